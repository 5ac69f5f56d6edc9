"""The gateway: all model calls of a node go through here.

It calls the endpoint, retries what is worth it, and returns the whole answer or one of the `Model*` errors. It knows
no sessions and writes nothing: its caller keeps the waits and the journal.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

import aiohttp
import httpx2
import msgspec
import openai

from understudy.config import ModelProfile
from understudy.errors import ContextOverflow, ModelError, ModelProfileMissing, ModelUnavailable
from understudy.profiles import check
from understudy.records import KeptResponse, ModelAnswer, ModelRequest
from understudy.streams import Piece
from understudy.tasks import Tasks

from .admission import Stopped
from .backoff import Backoff
from .course import Course
from .endpoint import Endpoint
from .failures import RateLimited
from .limits import Limits
from .needs import require
from .responses import cancel_path
from .tries import Listener, Tries

log = logging.getLogger(__name__)

CANCEL_SECONDS = 5.0
"""How long an endpoint is waited for that shall cancel a response."""


LEAST_SECONDS = 1.0
"""A fallback with less time than this is not asked."""


def cause_of(error: ModelError) -> str:
    """For what a call has failed, in the words of `Fallback.on`."""
    if isinstance(error, ModelUnavailable):
        return "unavailable"
    return "overflow" if isinstance(error, ContextOverflow) else "refused"


class Gateway:
    """Makes model calls with the client of the `openai` package, streaming.

    Args:
        retries: how often a call that failed in a way worth retrying is tried again, after the first try.
        backoff: seconds before the first retry; doubles up to `backoff_max`, less a random quarter. `Retry-After`
            from the endpoint takes precedence.

    Attributes:
        limits: the rate limits of its endpoints.
    """

    def __init__(
        self,
        *,
        retries: int = 3,
        backoff: float = 0.5,
        backoff_max: float = 8.0,
    ) -> None:
        self.limits = Limits()
        self._backoff = Backoff(retries, backoff, backoff_max)
        self._endpoints: dict[str, Endpoint] = {}
        self._retired: set[Endpoint] = set()
        self._tasks = Tasks(log)

    def register(self, profile: ModelProfile) -> None:
        """Make a profile known, in place of one of the same name; calls under way keep the old one.

        Raises:
            InvalidConfiguration: see `check`.
        """
        check(profile)
        known = self._endpoints.get(profile.name)
        if known is not None and known.profile == profile:
            return
        self._endpoints[profile.name] = Endpoint(profile)
        self.limits.update(profile)
        if known is not None:
            self._retired.add(known)

    def knows(self, name: str) -> bool:
        """Whether a profile of this name is registered."""
        return name in self._endpoints

    def server(self, name: str) -> tuple[str, int]:
        """Host and port of a profile's endpoint; nothing if it is not registered."""
        endpoint = self._endpoints.get(name)
        return endpoint.server if endpoint is not None else ("", 0)

    async def call(
        self,
        request: ModelRequest,
        on_delta: Callable[[Piece], None] | None = None,
        on_restart: Callable[[], None] | None = None,
        on_response: Callable[[KeptResponse | None], None] | None = None,
        tree: str = "",
        course: Course | None = None,
    ) -> ModelAnswer:
        """Make one model call; cancelling it closes the connection.

        In background mode (`ModelProfile.background`) the endpoint goes on with the response then (`cancel`); a
        connection that is lost is no loss. `request.response` is a response that is fetched, not asked for, from the
        endpoint that has it. If the endpoint no longer has it, the model is asked again. A response that the endpoint
        is still at work on when the call fails there is cancelled.

        Where the profile has fallbacks, they are asked one after the other within the deadline, each within its own
        limits; the answer says which profile and model gave it, if not those of the request. Each is asked for a
        function of the same request. A call with a fallback's response begins with that fallback. If it has no answer,
        the call is made as one without a response, in what is left of the deadline.

        Args:
            on_delta: gets text, reasoning and arguments of tool calls as they arrive.
            on_restart: called when a try failed after some of it was delivered: what follows is a new answer.
            on_response: in background mode, gets the response as soon as the endpoint has said its id, before anything
                else of it; again if the call had to be repeated. None when another endpoint is asked: there is none.
            tree: trees of sessions take turns where requests have to wait.
            course: what is measured of the call, which its answer has; for who wants to know it of one that fails.

        Raises:
            ModelProfileMissing: the request's profile was never registered.
            ModelRefused: the endpoint refused the request (4xx); not retried.
            ModelProtocolError: the endpoint does not speak the protocol; not retried.
            ModelUnavailable: every try failed, or the deadline passed. The deadline begins when the call's turn has
                come: waiting for `max_concurrency` and rate limits does not use it up. A request that is refused for
                a rate limit waits for another turn; it fails if its endpoint takes none for longer than its deadline.

        Errors of an endpoint have in `details`: `base_url`, `retries`, `started_at` and `duration` (microseconds), and,
        where known, `status` and `provider_code`. No message has the key.
        """
        endpoint = self._endpoints.get(request.profile)
        if endpoint is None:
            raise ModelProfileMissing(
                f"no model profile {request.profile!r} is registered on this node", details={"profile": request.profile}
            )
        listener = Listener(on_delta, on_restart, on_response, course or Course())
        return listener.course.measured(await self._answer(endpoint, request, listener, tree))

    async def _answer(self, endpoint: Endpoint, request: ModelRequest, listener: Listener, tree: str) -> ModelAnswer:
        """The answer of the first one that gives any: who keeps a response, the endpoint, its fallbacks."""
        found = await self._fetched(request, listener, tree)
        if isinstance(found, ModelAnswer):
            return found
        request = found
        first, left = await self._asked(request, listener, tree)
        if isinstance(first, ModelAnswer):
            return first
        for fallback in endpoint.profile.fallbacks:
            if fallback.profile not in self._endpoints or cause_of(first) not in fallback.on or left < LEAST_SECONDS:
                continue
            model = fallback.model or request.model
            log.info("profile %s gives no answer: %s is asked, model %s", request.profile, fallback.profile, model)
            listener.start_over()
            asked = msgspec.structs.replace(
                request, profile=fallback.profile, model=model, deadline=left, response=None
            )
            result, left = await self._asked_instead(asked, listener, tree)
            if isinstance(result, ModelAnswer):
                return result
            # Else what the first one said is what the caller can do something about.
        raise first

    async def _fetched(self, request: ModelRequest, listener: Listener, tree: str) -> ModelAnswer | ModelRequest:
        """The answer that a fallback keeps a response of; otherwise the request that is left to be made: with its
        response only where the request's own endpoint can fetch it. Raises what failed if no time is left."""
        kept = request.response
        if kept is None:
            return request
        keeper = self._endpoints.get(kept.profile)
        keeps = keeper is not None and keeper.adapter.keeps
        if keeps and kept.profile == request.profile:
            return request
        request = msgspec.structs.replace(request, response=None)
        if keeps:
            asked = msgspec.structs.replace(request, profile=kept.profile, model=kept.model, response=kept)
            result, left = await self._asked_instead(asked, listener, tree)
            if isinstance(result, ModelAnswer):
                return result
            if left < LEAST_SECONDS:
                raise result
            log.info("profile %s gives no answer: %s is asked again", kept.profile, request.profile)
            request = msgspec.structs.replace(request, deadline=left)
        listener.start_over()  # what comes is not of that response
        return request

    async def _asked_instead(
        self, request: ModelRequest, listener: Listener, tree: str
    ) -> tuple[ModelAnswer | ModelError, float]:
        """The same of a fallback, whose answer says so."""
        result, left = await self._asked(request, listener, tree)
        if isinstance(result, ModelAnswer):
            result = replace(result, profile=request.profile, model=request.model)
        return result, left

    async def _asked(
        self, request: ModelRequest, listener: Listener, tree: str
    ) -> tuple[ModelAnswer | ModelError, float]:
        """What one endpoint makes of a request, and how many seconds of the deadline are left."""
        endpoint = self._endpoints[request.profile]
        listener.course.asks(endpoint.adapter.provider)
        tries = Tries(self._backoff, endpoint, request, listener)
        result: ModelAnswer | ModelError
        try:
            result = await self._run(tries, tree)
        except ModelError as error:
            result = error
            if tries.unfinished is not None:
                self._tasks.spawn(self.cancel(tries.unfinished))
        return result, request.deadline - tries.seconds

    async def _run(self, tries: Tries, tree: str) -> ModelAnswer:
        """The answer of one endpoint, from as many turns as it takes."""
        endpoint, request, again = tries.endpoint, tries.request, False
        require(endpoint.profile, request)
        limits = self.limits.of(endpoint.profile.name)
        endpoint.calls += 1
        try:
            while True:
                try:
                    async with limits.turn(request, tree, tries.course, again=again, fetches=tries.fetches) as turn:
                        return await tries.run(turn)
                except RateLimited:
                    again = True
                except Stopped as stopped:
                    tries.fail_stopped(stopped.seconds)
        finally:
            endpoint.calls -= 1
            if self._retired:
                await self._close_retired()

    async def cancel(self, response: KeptResponse) -> None:
        """Have the endpoint end a response that it makes in the background. What fails about it is logged: the endpoint
        then ends by itself, and nobody waits for what it says."""
        endpoint = self._endpoints.get(response.profile)
        if endpoint is None or not endpoint.adapter.keeps:
            return
        endpoint.calls += 1
        try:
            async with asyncio.timeout(CANCEL_SECONDS):
                await endpoint.cancel(cancel_path(response.id))
        except (TimeoutError, openai.APIError, httpx2.RequestError, aiohttp.ClientError) as error:
            log.warning("response %s can't be cancelled: %s", response.id, endpoint.clean(str(error)))
        finally:
            endpoint.calls -= 1
            if self._retired:
                await self._close_retired()

    async def close(self) -> None:
        """Close all connections. Calls under way fail; cancel them first."""
        cancelling = list(self._tasks)
        self._tasks.cancel()
        await asyncio.gather(*cancelling, return_exceptions=True)
        for endpoint in [*self._endpoints.values(), *self._retired]:
            await endpoint.http.aclose()
        self._endpoints.clear()
        self._retired.clear()

    async def _close_retired(self) -> None:
        for endpoint in [endpoint for endpoint in self._retired if endpoint.calls == 0]:
            self._retired.discard(endpoint)
            await endpoint.http.aclose()
