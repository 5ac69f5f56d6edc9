"""What a gateway's process answers to its node service: model calls that outlast the service. No Ray.

The process itself is Ray's actor (`understudy.cluster.ray.services.GatewayActor`), a simulated one, or a part of the
user's (`understudy.cluster.local`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from understudy.config import ModelProfile
from understudy.errors import ModelProfileMissing, ServiceGone, UnderstudyError
from understudy.estimates import estimate_usage
from understudy.messages import Usage
from understudy.profiles import Profiles
from understudy.protocol import Attached, CallOrigin, Growth
from understudy.rates import RateReport, RateShares
from understudy.records import KeptResponse, ModelAnswer, ModelRequest
from understudy.redaction import know
from understudy.streams import REASONING, TEXT, Parts, Piece
from understudy.tasks import Tasks
from understudy.transport.one_service import OneService
from understudy.waiting import is_set_within

from .course import Course
from .gateway import Gateway
from .histories import Histories
from .request_facts import recorded_parameters

log = logging.getLogger(__name__)

PROFILE_SECONDS = 30.0
"""How long a call waits for its credentials after a cold start, before it fails."""

KEPT_SECONDS = 12 * 3_600.0
"""So long answers are kept for a node service that does not come back."""

Prepare = Callable[[str], Awaitable[None]]
"""Makes a profile known that this process provides itself, by its name; does nothing about others."""


async def nothing_to_prepare(_profile: str) -> None:
    """The `Prepare` of a process that provides none."""


class _HeldCall:
    """A model call: what has come of it so far, or its answer, until that is released."""

    def __init__(self, origin: CallOrigin, request: ModelRequest) -> None:
        self.origin = origin
        self.request = request
        self.parts = Parts()
        self.restarts = 0
        self.grown = asyncio.Event()
        self.identified = asyncio.Event()
        self.begun = False
        self.aborted = False
        self.response = request.response
        self.course = Course()
        self.answer: asyncio.Future[ModelAnswer] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[None] | None = None

    def add(self, piece: Piece) -> None:
        """More has come."""
        self.parts.add(piece)
        self.grown.set()

    def identify(self, response: KeptResponse | None) -> None:
        """An endpoint makes this response, and keeps it; None: another one is asked, which has said none yet."""
        self.response = response
        self.identified.set()

    def end(self, answer: ModelAnswer) -> None:
        """This is the answer."""
        if not self.answer.done():
            self.answer.set_result(answer)
        self._wake()

    def drop(self) -> None:
        """Nobody wants it any more."""
        if self.task is not None:
            self.task.cancel()
        self.answer.cancel()
        self._wake()

    def _wake(self) -> None:
        """Nothing more comes: whoever waits for more looks."""
        self.grown.set()
        self.identified.set()

    def restart(self) -> None:
        """What came is void: the next try starts over."""
        self.parts = Parts()
        self.restarts += 1
        self.grown.set()

    def partial(self) -> ModelAnswer:
        """What came so far, as the answer: of that only the text can be of use, and all of it was paid for."""
        if not self.parts.lengths:
            return ModelAnswer.aborted(self.origin.session_id)
        text, usage = self.parts.text(TEXT), self.usage()
        if not text:
            return replace(ModelAnswer.aborted(self.origin.session_id), usage=usage)
        return ModelAnswer(content=text, finish_reason="aborted", usage=usage)

    def usage(self) -> Usage:
        """What came so far took, as estimated from text, reasoning and tool calls."""
        said = self.parts.text(REASONING) + self.parts.text(TEXT)
        return estimate_usage(self.request, said, self.parts.calls())


class GatewayCalls:
    """A `understudy.ports.ModelGateway`: it makes each call once, and keeps its answer until that is committed.

    Args:
        gateway: makes the calls.
    """

    def __init__(self, gateway: Gateway, prepare: Prepare = nothing_to_prepare) -> None:
        self.gateway = gateway
        self._prepare = prepare
        self._service = OneService("the gateway")
        self._profiles = Profiles()
        self._histories = Histories()
        self._calls: dict[str, _HeldCall] = {}
        self._learned = asyncio.Event()
        self._tasks = Tasks(log)

    @property
    def held(self) -> int:
        """How many calls are in flight, or have an answer that nobody has released."""
        return len(self._calls)

    async def attach(self, service: str, profiles: list[ModelProfile]) -> Attached:
        """See `ModelGateway.attach`."""
        self._service.attach(service)
        for profile in profiles:
            try:
                self._learn(profile)
            except Exception:  # one that can't be used must not keep the others from being called
                log.exception("model profile %s is refused", profile.name)
        origins = [call.origin for call in self._calls.values()]
        return Attached(self._service.identity, self._service.number, os.getpid(), origins, self._profiles.all())

    async def register(self, number: str, profile: ModelProfile) -> None:
        """See `ModelGateway.register`."""
        self._service.require(number)
        self._learn(profile)

    async def call(self, number: str, origin: CallOrigin, request: ModelRequest | None) -> ModelAnswer | None:
        """See `ModelGateway.call`."""
        self._service.require(number)
        call = self._calls.get(origin.key)
        if call is None:
            request = self._histories.completed(origin, request) if request is not None else None
            if request is None:
                return None
            call = self._calls[origin.key] = _HeldCall(origin, request)
            call.task = self._tasks.spawn(self._make(call))
        await asyncio.wait((call.answer,))
        if call.answer.cancelled():
            raise ServiceGone(f"the call {origin.request_key} was released", session_id=origin.session_id)
        return call.answer.result()

    async def growth(self, number: str, key: str, restarts: int, lengths: list[int]) -> Growth:
        """See `ModelGateway.growth`."""
        self._service.require(number)
        while (call := self._calls.get(key)) is not None:
            if (call.restarts, call.parts.lengths) != (restarts, lengths) or call.answer.done():
                new = call.parts.after(lengths if call.restarts == restarts else [])
                return Growth(call.restarts, new, call.answer.done())
            call.grown.clear()
            await call.grown.wait()
        return Growth(restarts, [])

    async def response(self, number: str, key: str, known: KeptResponse | None) -> KeptResponse | None:
        """See `ModelGateway.response`."""
        self._service.require(number)
        while (call := self._calls.get(key)) is not None:
            if call.response not in (None, known):
                return call.response
            if call.answer.done():
                break
            call.identified.clear()
            await call.identified.wait()
        return None

    async def cancel(self, number: str, response: KeptResponse) -> None:
        """See `ModelGateway.cancel`."""
        self._service.require(number)
        self._tasks.spawn(self._cancel(response))

    async def abort(self, number: str, key: str) -> None:
        """See `ModelGateway.abort`."""
        self._service.require(number)
        call = self._calls.get(key)
        if call is not None and call.task is not None and not call.answer.done() and not call.aborted:
            call.aborted = True
            if call.begun:  # a task that is cancelled before it runs would leave no answer
                call.task.cancel()

    async def release(self, number: str, keys: list[str]) -> None:
        """See `ModelGateway.release`."""
        self._service.require(number)
        for key in keys:
            call = self._calls.pop(key, None)
            if call is not None:
                call.drop()

    async def heard(self, number: str) -> None:
        """See `ModelGateway.heard`."""
        self._service.require(number)

    async def rates(self, number: str, seen: int) -> RateReport:
        """See `ModelGateway.rates`."""
        self._service.require(number)
        return await self.gateway.limits.reported(seen)

    async def share(self, number: str, shares: RateShares) -> RateReport:
        """See `ModelGateway.share`."""
        self._service.require(number)
        self.gateway.limits.share(shares)
        return self.gateway.limits.report()

    async def abandoned(self, seconds: float) -> None:
        """Return when no node service has been heard of for so long, or while there are answers that were paid for, and
        whose store may be away, for `KEPT_SECONDS`."""
        await self._service.abandoned(lambda: KEPT_SECONDS if self._calls else seconds, seconds / 60)

    async def close(self) -> None:
        """End all calls, and their connections."""
        tasks = list(self._tasks)
        self._tasks.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for call in self._calls.values():
            call.drop()
        self._calls.clear()
        await self.gateway.close()

    def _learn(self, profile: ModelProfile) -> None:
        know(profile.api_key)
        self.gateway.register(self._profiles.learn(profile))
        self._learned.set()

    async def _make(self, call: _HeldCall) -> None:
        """Make the call. It has an answer in the end, whatever happens: its session would wait for ever."""
        call.begun = True
        try:
            answer = call.partial() if call.aborted else await self._ask(call)
        except asyncio.CancelledError:
            if self._calls.get(call.origin.key) is not call:  # it was released
                raise
            answer = call.partial()
        except Exception as error:
            if not isinstance(error, UnderstudyError):
                log.exception("the model call of session %s failed", call.origin.session_id)
            answer = ModelAnswer.failed(error, call.origin.session_id, call.parts.text(TEXT) or None)
            if call.parts.lengths:  # the endpoint counts what it has sent, whatever became of it
                answer = replace(answer, usage=call.usage())
        if call.aborted and call.response is not None:  # else the endpoint would go on, and count what nobody reads
            self._tasks.spawn(self.gateway.cancel(call.response))
        if call.response is not None and not answer.response_id and not answer.profile:  # what came is of that response
            answer = replace(answer, response_id=call.response.id, background=True)
            if call.response.profile != call.request.profile:
                answer = replace(answer, profile=call.response.profile, model=call.response.model)
        if not answer.started_at:  # it has failed, or was aborted, perhaps before its first request
            ended = time.time_ns() // 1_000
            started = call.course.started_at or ended
            answer = call.course.measured(replace(answer, started_at=started, duration=ended - started))
        server_address, server_port = self.gateway.server(answer.profile or call.request.profile)
        parameters = recorded_parameters(call.request.parameters) or None
        call.end(replace(answer, server_address=server_address, server_port=server_port, parameters=parameters))

    async def _ask(self, call: _HeldCall) -> ModelAnswer:
        profile = call.request.profile
        if not await self._comes_to_know(profile):
            raise ModelProfileMissing(
                f"no credentials for model profile {profile!r}", session_id=call.origin.session_id
            )
        if call.request.response is not None:  # else that response can't be had, and the call is made without
            await self._comes_to_know(call.request.response.profile)
        return await self.gateway.call(
            call.request, call.add, call.restart, call.identify, call.origin.root_id, call.course
        )

    async def _cancel(self, response: KeptResponse) -> None:
        if await self._comes_to_know(response.profile):
            await self.gateway.cancel(response)
        else:
            log.warning("response %s is not cancelled: no credentials for %s", response.id, response.profile)

    async def _comes_to_know(self, profile: str) -> bool:
        """Wait for a profile, which may come after whoever needs it; whether it has come in time."""
        loop = asyncio.get_running_loop()
        await self._prepare(profile)
        deadline = loop.time() + PROFILE_SECONDS
        while not self.gateway.knows(profile):
            self._learned.clear()
            if not await is_set_within(self._learned, deadline - loop.time()):
                return False
        return True
