"""Model calls in flight. A call belongs to the node service, not to the frame that asked for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from understudy.errors import ModelProfileMissing, UnderstudyError, UnknownSession
from understudy.estimates import estimate_usage
from understudy.gateway.gateway import Gateway
from understudy.records import ModelAnswer, ModelRequest

log = logging.getLogger(__name__)

PROFILE_SECONDS = 30.0
"""How long a call waits for its credentials after a cold start, before it fails."""


@dataclass(eq=False)
class Call:
    """One model call: what it is for, and what has come so far."""

    session_id: str
    incarnation: int
    run_id: str
    round: int
    attempt: int
    placement: str
    root_id: str
    request: ModelRequest
    text: list[str] = field(default_factory=list)
    length: int = 0
    restarts: int = 0
    task: asyncio.Task[None] | None = None
    running: bool = False
    aborted: bool = False

    @property
    def request_key(self) -> str:
        return f"{self.request.wait_key}/{self.attempt}"

    @property
    def key(self) -> tuple[int, str]:
        """What it is found by: a session that is made again under a removed one's id has the same wait keys."""
        return self.incarnation, self.request.wait_key


class Calls:
    """Starts each call once; who asks again under the same key is attached to it.

    A session waits for one call at most, the latest. It can have others in flight: of runs that have ended since,
    or that it waited for here before it went elsewhere and came back.
    """

    def __init__(
        self,
        gateway: Gateway,
        answered: Callable[[Call, ModelAnswer], Awaitable[None]],
        delta: Callable[[str], None],
        prepare: Callable[[str], Awaitable[None]],
    ) -> None:
        self.gateway = gateway
        self._answered = answered
        self._delta = delta
        self._prepare = prepare
        self._calls: dict[tuple[int, str], Call] = {}
        self._of_session: dict[str, list[Call]] = {}
        self._latest: dict[str, Call] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def in_flight(self) -> list[Call]:
        """All calls."""
        return list(self._calls.values())

    def sessions(self) -> set[str]:
        """Those whose latest call is in flight."""
        return set(self._latest)

    def find(self, incarnation: int, wait_key: str) -> Call | None:
        """The call in flight under this key."""
        return self._calls.get((incarnation, wait_key))

    def of_session(self, session_id: str) -> Call | None:
        """The latest call of a session, if that is in flight: if it waits for any here, it waits for that."""
        return self._latest.get(session_id)

    def start(self, call: Call) -> None:
        """Start a call, unless it is in flight."""
        if call.key not in self._calls:
            self._calls[call.key] = self._latest[call.session_id] = call
            self._of_session.setdefault(call.session_id, []).append(call)
            call.task = asyncio.get_running_loop().create_task(self._run(call))

    def forget(self, call: Call) -> None:
        """The call's answer is committed: whoever comes to attach to it finds the answer in the store."""
        if self._calls.get(call.key) is not call:
            return
        del self._calls[call.key]
        of_session = self._of_session[call.session_id]
        of_session.remove(call)
        if not of_session:
            del self._of_session[call.session_id]
        if self._latest.get(call.session_id) is call:
            del self._latest[call.session_id]

    def drop(self, session_id: str) -> None:
        """Close the connection of a session's call and commit nothing: somebody else will issue it again."""
        call = self.of_session(session_id)
        if call is not None:
            self.forget(call)
            if call.task is not None:
                call.task.cancel()

    def abort(self, session_id: str, incarnation: int, run_id: str) -> None:
        """Close the connection of a run's call; what came so far is its answer."""
        for call in self._of_session.get(session_id, ()):
            if (call.incarnation, call.run_id) == (incarnation, run_id) and call.task is not None and not call.aborted:
                call.aborted = True
                if call.running:  # a task that is cancelled before it runs would never commit anything
                    call.task.cancel()

    async def close(self) -> None:
        """Abort everything without committing: a successor re-issues what is unanswered."""
        calls = self.in_flight()
        for known in (self._calls, self._of_session, self._latest):
            known.clear()
        for call in calls:
            if call.task is not None:
                call.task.cancel()
        await asyncio.gather(*(call.task for call in calls if call.task), return_exceptions=True)

    async def _run(self, call: Call) -> None:
        """Make the call and commit its outcome, whatever that is: a wait without one would be made again for ever."""
        started = time.time_ns() // 1000
        call.running = True
        try:
            answer = await self._outcome(call)
            if not answer.started_at:
                answer = replace(answer, started_at=started, duration=time.time_ns() // 1000 - started)
            try:
                # Shielded: a cancellation that comes now must not lose an answer that was paid for.
                await asyncio.shield(self._answered(call, answer))
            except UnknownSession:  # removed since: there is no log that could have it
                log.info("the answer to %s is dropped: its session was removed", call.request_key)
            except Exception as error:
                log.exception("the answer to %s can't be stored", call.request_key)
                problem = UnderstudyError.of(error, session_id=call.session_id)
                lost = ModelAnswer(
                    usage=answer.usage, error=problem.to_wire(), started_at=answer.started_at,
                    duration=answer.duration,
                )  # fmt: skip
                await self._answered(call, lost)
        finally:
            self.forget(call)

    async def _outcome(self, call: Call) -> ModelAnswer:
        """The call's answer, with what it costs; one with an error if there is none."""
        try:
            answer = await self._ask(call) if not call.aborted else _partial(call)
        except asyncio.CancelledError:
            if self._calls.get(call.key) is not call:
                raise
            answer = _partial(call)
        except UnderstudyError as error:
            answer = ModelAnswer(content="".join(call.text) or None, error=error.to_wire())
        except Exception as error:
            log.exception("the model call of session %s failed", call.session_id)
            answer = ModelAnswer(error=UnderstudyError.of(error, session_id=call.session_id).to_wire())
        price = self.gateway.price(call.request.profile, call.request.model)
        if price is not None:
            answer = replace(answer, usage=replace(answer.usage, cost=price.cost(answer.usage)))
        return answer

    async def _ask(self, call: Call) -> ModelAnswer:
        profile = call.request.profile
        await self._prepare(profile)
        deadline = time.monotonic() + PROFILE_SECONDS
        while not self.gateway.knows(profile):
            if time.monotonic() > deadline:
                raise ModelProfileMissing(f"no credentials for model profile {profile!r}", session_id=call.session_id)
            await asyncio.sleep(0.2)

        def on_delta(text: str) -> None:
            call.text.append(text)
            call.length += len(text)
            self._delta(call.session_id)

        def on_restart() -> None:
            call.text.clear()
            call.length = 0
            call.restarts += 1
            self._delta(call.session_id)

        return await self.gateway.call(call.request, on_delta, on_restart)

    def stream(self, session_id: str) -> tuple[str, str] | None:
        """`(key of this try, text so far)` of a session's call, for clients that follow it."""
        call = self.of_session(session_id)
        return (f"{call.request_key}/{call.restarts}", "".join(call.text)) if call is not None else None


def _partial(call: Call) -> ModelAnswer:
    text = "".join(call.text)
    if not text:
        error: dict[str, Any] = {"code": "aborted", "message": "the call was aborted", "session_id": call.session_id}
        return ModelAnswer(error=error)
    return ModelAnswer(content=text, finish_reason="aborted", usage=estimate_usage(call.request, text))
