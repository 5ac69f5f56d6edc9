"""Model calls in flight. The gateway makes them, and has them still when this service dies; here is what their answers
are for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

from msgspec import structs

from understudy.config import ModelProfile
from understudy.errors import ServiceGone, StoreError, UnderstudyError, UnknownSession
from understudy.ports import ModelGateway
from understudy.profiles import Profiles
from understudy.protocol import Attached, CallOrigin, Growth, Judged
from understudy.records import KeptResponse, ModelAnswer, ModelRequest
from understudy.store.db.session_row import ActiveSession
from understudy.streams import Parts
from understudy.tasks import Tasks

from .gateway_link import GatewayLink
from .service_link import Kill, never_killed
from .verdicts import Verdicts, judged

log = logging.getLogger(__name__)

Wanted = TypeVar("Wanted")

GROWTH_SECONDS = 0.03
"""What comes of an answer within so many seconds is reported together."""


RELEASE_SECONDS = 0.05
"""Calls that the gateway may forget within so many seconds are reported together."""


class Call:
    """One model call: what it is for, and what has come so far, if somebody follows it.

    Args:
        request: None for a call that the gateway has from the service before this one.
    """

    def __init__(self, origin: CallOrigin, request: ModelRequest | None) -> None:
        self.origin = origin
        self.request = request
        self.parts = Parts()
        self.restarts = 0
        self.is_whole = False
        self.gateway = ""
        """Which one has it; empty while none may have it."""
        self.lacks = False
        """The gateway does not have what the request leaves out: who activates the session next brings all of it."""
        self.complete = asyncio.Event()
        self.aborted = asyncio.Event()
        self.verdict: Judged | None = None
        """Of the hooks beside it, where some are."""
        self.judged = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.response = origin.response
        """That an endpoint makes in background mode, as far as this service knows."""

    @property
    def key(self) -> tuple[int, str]:
        """What it is found by: a session that is made again under a removed one's id has the same wait keys."""
        return self.origin.incarnation, self.origin.wait_key

    @property
    def needs_verdict(self) -> bool:
        """Whether the hooks beside it have still to say whether its answer counts."""
        return self.origin.guarded and self.verdict is None

    def bring(self, request: ModelRequest) -> None:
        """Here is the request again, with all of its messages."""
        if self.lacks and self.request is not None:
            self.request = structs.replace(
                self.request, messages=request.messages, text=request.text, lasting=request.lasting, left_out=0
            )
            self.lacks = False
            self.complete.set()


class Calls:
    """Starts each call once; who asks again under the same key is attached to it.

    A session waits for one call at most, the latest. It can have others in flight: of runs that have ended since,
    or that it waited for here before it went elsewhere and came back.

    Args:
        service: what this node service is called, and no other.
        answered: commits an answer.
        lost: gets a call that its gateway has died with, once it is forgotten here; or one that lacks messages.
        grown: gets a session whose answer has grown.
        followed: whether somebody follows the answers of a session as they grow.
        identified: commits which endpoint has the response to a call, under which id.
        verdicts: what frames have said of the calls beside which hooks run.
        attended: whether a frame is at a session, so that such a call will have its verdict.
        unattended: has a frame see to that of a call; False if no session waits for the call any more.
    """

    def __init__(
        self,
        gateway: ModelGateway,
        service: str,
        profiles: Profiles,
        *,
        answered: Callable[[Call, ModelAnswer], Awaitable[None]],
        identified: Callable[[CallOrigin, KeptResponse], Awaitable[None]],
        lost: Callable[[Call], Awaitable[None]],
        grown: Callable[[str], None],
        followed: Callable[[str], bool],
        verdicts: Verdicts,
        attended: Callable[[str], bool],
        unattended: Callable[[Call], Awaitable[bool]],
        kill: Kill = never_killed,
    ) -> None:
        self.link = GatewayLink(gateway, service, profiles, self._found, kill)
        self._gateway = gateway
        self._profiles = profiles
        self._answered = answered
        self._identified = identified
        self._lost = lost
        self._grown = grown
        self._followed = followed
        self._verdicts = verdicts
        self._attended = attended
        self._unattended = unattended
        self._calls: dict[tuple[int, str], Call] = {}
        self._of_session: dict[str, list[Call]] = {}
        self._latest: dict[str, Call] = {}
        self._unwanted: list[str] = []
        self._releasing = False
        self._tasks = Tasks(log)
        self._ending: list[asyncio.Task[None]] = []
        self._has_attached = False

    def __len__(self) -> int:
        return len(self._calls)

    def in_flight(self) -> list[Call]:
        """All calls."""
        return list(self._calls.values())

    def sessions(self) -> set[str]:
        """Those whose latest call needs nobody (`is_under_way`)."""
        return {session_id for session_id in self._latest if self.is_under_way(session_id)}

    def find(self, incarnation: int, wait_key: str) -> Call | None:
        """The call in flight under this key."""
        return self._calls.get((incarnation, wait_key))

    def of_session(self, session_id: str) -> Call | None:
        """The latest call of a session, if that is in flight: if it waits for any here, it waits for that."""
        return self._latest.get(session_id)

    def is_under_way(self, session_id: str) -> bool:
        """Whether the latest call of a session is in flight, and lacks nothing: neither messages nor, unless a frame is
        at it, the verdict of the hooks beside it."""
        call = self._latest.get(session_id)
        return call is not None and not call.lacks and not (call.needs_verdict and not self._attended(session_id))

    def needs_verdict(self, session_id: str) -> bool:
        """Whether the hooks beside the latest call of a session have still to say whether its answer counts."""
        call = self._latest.get(session_id)
        return call is not None and call.needs_verdict

    def is_ready(self, row: ActiveSession) -> bool:
        """Whether an active session has something to do: it waits for nothing, or for a call that is lost, or lacks
        something."""
        return row.wait is None or (row.wait == "model" and not self.is_under_way(row.session_id))

    def start(self, call: Call) -> None:
        """Start a call, unless it is in flight."""
        if call.key not in self._calls:
            session_id = call.origin.session_id
            self._calls[call.key] = self._latest[session_id] = call
            self._of_session.setdefault(session_id, []).append(call)
            call.task = asyncio.get_running_loop().create_task(self._run(call))
            self._identify_if_kept(call)
            said = self._verdicts.of(*call.key)
            if said is not None:
                self._take_verdict(call, said)
            if self._followed(session_id):
                self._follow(call)

    async def register(self, profile: ModelProfile) -> None:
        """Have the gateway learn a profile that this service has learned: calls may wait for it."""
        for call in self.in_flight():
            self._identify_if_kept(call)
        await self.link.register(profile)

    def forget(self, call: Call) -> None:
        """The call's answer is committed: whoever comes to attach to it finds the answer in the store."""
        if self._calls.get(call.key) is not call:
            return
        del self._calls[call.key]
        session_id = call.origin.session_id
        of_session = self._of_session[session_id]
        of_session.remove(call)
        if not of_session:
            del self._of_session[session_id]
        if self._latest.get(session_id) is call:
            del self._latest[session_id]
        self._verdicts.over(*call.key)
        self._release([call.origin.key])

    def drop(self, session_id: str) -> None:
        """Close the connection of a session's call and commit nothing: somebody else will issue it again."""
        call = self.of_session(session_id)
        if call is not None:
            self.forget(call)
            if call.task is not None:
                call.task.cancel()

    def abort(self, session_id: str, incarnation: int, run_id: str, round_number: int | None = None) -> None:
        """Close the connection of a run's call, or only of the one of this round; what came so far is its answer."""
        for call in self._of_session.get(session_id, ()):
            of = (call.origin.incarnation, call.origin.run_id)
            meant = round_number in (None, call.origin.round)
            if of == (incarnation, run_id) and meant:
                self._end(call)

    def _end(self, call: Call) -> None:
        if not call.aborted.is_set():
            call.aborted.set()
            if call.gateway:
                self._tasks.spawn(self._abort(call))

    def judge(self, verdict: Judged) -> None:
        """The hooks beside a call have their verdict, the first of which counts: one that lets nothing pass aborts
        it."""
        call = self.find(verdict.activation.incarnation, verdict.wait_key)
        if call is not None:
            self._take_verdict(call, verdict)

    def _take_verdict(self, call: Call, verdict: Judged) -> None:
        if call.needs_verdict:
            call.verdict = verdict
            call.judged.set()
            if verdict.error is not None:
                self._end(call)

    def abandon(self) -> None:
        """Forget everything at once: the gateway goes on with it, for a successor."""
        self._ending += [call.task for call in self.in_flight() if call.task is not None]
        for known in (self._calls, self._of_session, self._latest):
            known.clear()
        self.link.close()
        self._tasks.cancel()
        for task in self._ending:
            task.cancel()

    async def close(self) -> None:
        """The same, and wait until nobody is at a call any more."""
        self.abandon()
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _found(self, attached: Attached) -> None:
        """The gateway has calls: at first those of the service before this one, whose answers are wanted; what else
        is not known here was answered, or given up."""
        unwanted = []
        for origin in sorted(attached.held, key=lambda origin: -origin.attempt):  # the latest is waited for
            call = Call(origin, None)
            if not self._has_attached and call.key not in self._calls:
                call.gateway = attached.gateway
                self.start(call)
            elif (known := self._calls.get(call.key)) is None or known.origin.key != origin.key:
                unwanted.append(origin.key)
        self._has_attached = True
        self._release(unwanted)

    async def _run(self, call: Call) -> None:
        """Make the call and commit its outcome, whatever that is: a wait without one would be made again for ever."""
        try:
            answer = await self._answer_to(call)
            if answer is None:
                self.forget(call)
                await self._lost(call)
                return
            if call.origin.guarded:
                answer = await self._judged(call, answer)
            price = self._profiles.price(answer.profile or call.origin.profile, answer.model or call.origin.model)
            if price is not None:
                cost = price.cost(answer.usage)
                answer = replace(answer, usage=replace(answer.usage, cost=cost), currency=price.currency)
            try:
                # Shielded: a cancellation that comes now must not lose an answer that was paid for.
                await asyncio.shield(self._answered(call, answer))
            except UnknownSession:  # removed since: there is no log that could have it
                log.info("the answer to %s is dropped: its session was removed", call.origin.request_key)
            except Exception as error:
                log.exception("the answer to %s can't be stored", call.origin.request_key)
                failed = ModelAnswer.failed(error, call.origin.session_id)
                failed = replace(
                    failed, usage=answer.usage, currency=answer.currency, provider=answer.provider,
                    started_at=answer.started_at, duration=answer.duration, waited=answer.waited,
                    retried=answer.retried, chunk_times=answer.chunk_times,
                )  # fmt: skip
                await self._answered(call, failed)
        finally:
            self.forget(call)

    async def _answer_to(self, call: Call) -> ModelAnswer | None:
        """The gateway's answer; None if a gateway had the call and is gone: then the call must be made again, under
        another key, since that one may have been paid for."""
        while True:
            attached = await self._attached(call)
            if attached is None or call.gateway not in ("", attached.gateway):
                if not call.aborted.is_set():
                    return None
                if call.response is not None:  # the gateway that would have cancelled it is gone
                    self.cancel(call.response)
                return ModelAnswer.aborted(call.origin.session_id)
            call.gateway = attached.gateway
            try:
                answer = await self._gateway.call(attached.number, call.origin, call.request)
            except ServiceGone:
                self.link.lost(attached)
            except Exception as error:
                if not isinstance(error, UnderstudyError):  # such a one says that it can't be sent
                    log.exception("the model call of session %s failed", call.origin.session_id)
                return ModelAnswer.failed(error, call.origin.session_id)
            else:
                if answer is not None or call.request is None:
                    return answer
                call.gateway = ""  # it made nothing of it
                await self._completed(call)

    def _identify_if_kept(self, call: Call) -> None:
        if self._profiles.keeps_responses(call.origin.profile):
            self._tasks.alone(("response", call.origin.key), self._identify, call)

    async def _identify(self, call: Call) -> None:
        """Commit which endpoint has the response, as soon as it is known: whoever takes the call over, whatever has
        died, fetches that response instead of paying for another one."""
        known = call.response

        async def ask(number: str) -> KeptResponse | None:
            return await self._gateway.response(number, call.origin.key, known)

        while response := await self._heard_of(call, ask):
            call.response = response
            try:
                await self._identified(call.origin, response)
            except StoreError:  # of this one transaction: the id is not noted yet
                log.warning("the id of the response to %s is committed once more", call.origin.request_key)
                await asyncio.sleep(GROWTH_SECONDS)
                continue
            known = response

    async def _heard_of(self, call: Call, ask: Callable[[str], Awaitable[Wanted]]) -> Wanted | None:
        """What the gateway that has a call says of it; None once the call is over.

        Args:
            ask: takes the number of the attachment; asked again of the next one if that is lost.
        """
        while self._calls.get(call.key) is call:
            attached = await self.link.attached()
            if call.gateway != attached.gateway:  # it is about to be handed over, or lost
                await asyncio.sleep(GROWTH_SECONDS)
                continue
            try:
                return await ask(attached.number)
            except ServiceGone:
                self.link.lost(attached)
        return None

    async def _judged(self, call: Call, answer: ModelAnswer) -> ModelAnswer:
        """What counts of an answer, once the hooks beside its call have said so. A call that failed, or is not wanted
        any more, is not held up by them; one that was aborted may have been by them, under the service before."""
        failed = answer.error is not None and answer.error["code"] != "aborted"
        if call.needs_verdict and not (failed or call.aborted.is_set()):
            if not self._attended(call.origin.session_id) and not await self._unattended(call):
                return answer  # a late one, of which nothing is kept but what it took
            await _unless_aborted(call, call.judged.wait())
        return judged(answer, call.verdict, call.origin.session_id, unwanted=call.aborted.is_set())

    async def _completed(self, call: Call) -> None:
        """Wait until somebody has brought all messages of a call, or it is aborted."""
        call.lacks = True
        call.complete.clear()
        await self._lost(call)
        await _unless_aborted(call, call.complete.wait())

    async def _attached(self, call: Call) -> Attached | None:
        """The gateway; None if the call was aborted before any had it."""
        if call.gateway:
            return await self.link.attached()
        if self.link.current is not None:
            return None if call.aborted.is_set() else self.link.current
        return await _unless_aborted(call, self.link.attached())

    async def _abort(self, call: Call) -> None:
        """Have the gateway abort a call; it may get lost with its attachment, and with the gateway the call does."""
        await self._pass_on(
            lambda number: self._gateway.abort(number, call.origin.key), lambda: self._calls.get(call.key) is call
        )

    def cancel(self, response: KeptResponse) -> None:
        """Have an endpoint end a response whose run has ended, while this node has a gateway; nobody repeats that."""
        self._tasks.spawn(self._pass_on(lambda number: self._gateway.cancel(number, response), lambda: True))

    async def _pass_on(self, tell: Callable[[str], Awaitable[None]], wanted: Callable[[], bool]) -> None:
        """Have the gateway do something, or the next one if that is lost, as long as it is wanted.

        Args:
            tell: takes the number of the attachment.
        """
        while wanted():
            attached = await self.link.attached()
            try:
                return await tell(attached.number)
            except ServiceGone:
                self.link.lost(attached)

    def _release(self, keys: list[str]) -> None:
        """Let the gateway forget calls. What does not reach it is found when it is attached again (`_found`)."""
        self._unwanted += keys
        if self._unwanted and not self._releasing:
            self._releasing = True
            self._tasks.spawn(self._release_all())

    async def _release_all(self) -> None:
        while self._unwanted:
            await asyncio.sleep(RELEASE_SECONDS)
            keys, self._unwanted = self._unwanted, []
            attached = await self.link.attached()
            try:
                await self._gateway.release(attached.number, keys)
            except ServiceGone:
                self.link.lost(attached)
        self._releasing = False

    # What clients follow.

    def stream(self, session_id: str) -> tuple[str, Parts] | None:
        """`(key of this try, what has come)` of a session's call, for a client that follows it."""
        call = self.of_session(session_id)
        if call is None:
            return None
        self._follow(call)
        return f"{call.origin.request_key}/{call.restarts}", call.parts

    def _follow(self, call: Call) -> None:
        if call.is_whole:
            return
        self._tasks.alone(call.origin.key, self._read_growth, call)

    async def _read_growth(self, call: Call) -> None:
        """Read what comes of an answer while somebody follows it."""
        session_id = call.origin.session_id

        async def ask(number: str) -> Growth:
            return await self._gateway.growth(number, call.origin.key, call.restarts, call.parts.lengths)

        while (growth := await self._heard_of(call, ask)) is not None:
            if growth.restarts != call.restarts:
                call.restarts, call.parts = growth.restarts, Parts()
            call.parts.take(growth.parts)
            call.is_whole = growth.ended
            self._grown(session_id)
            if growth.ended:
                return
            await asyncio.sleep(GROWTH_SECONDS)
            if not self._followed(session_id):
                return


async def _unless_aborted(call: Call, wanted: Awaitable[Wanted]) -> Wanted | None:
    """What is waited for; None if the call is aborted first."""
    waiting: list[asyncio.Future[Any]] = [asyncio.ensure_future(wanted), asyncio.ensure_future(call.aborted.wait())]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        return None if call.aborted.is_set() else await waiting[0]
    finally:
        for wait in waiting:
            wait.cancel()
