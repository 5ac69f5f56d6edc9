"""The tool calls of a round: each is brought to exactly one outcome, whatever happens to the process on the way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Coroutine
from typing import Any

from understudy.ports import Node
from understudy.protocol import FrameIdentity
from understudy.records import (
    INTERRUPTED_BY_STEER,
    CallState,
    child_text,
)
from understudy.waiting import retrieve_error

from .approval import as_edited, is_asked_first
from .call_outcomes import CallOutcomes, Loader
from .commits import Commits, Patience
from .delegation import is_delegated, wait_for
from .execution import Outcome, now
from .handoffs import handoff_of, is_handoff
from .hooks import Hooks
from .servers import Servers
from .window import Window

COALESCE_SECONDS = 0.05
"""Results that come this soon after another share its commit."""

WATCH_AFTER_SECONDS = 0.25
"""Tools that run longer are watched for a cancellation."""


class ToolCalls:
    """Executes the calls of an activation's window, or hands them over."""

    def __init__(
        self, window: Window, commits: Commits, hooks: Hooks, patience: Patience, node: Node, load: Loader,
        servers: Servers, frame: FrameIdentity,
    ) -> None:  # fmt: skip
        self._window = window
        self._commits = commits
        self._hooks = hooks
        self._node = node
        self._frame_id = frame.frame_id
        self._outcomes = CallOutcomes(window, node, frame, commits, hooks, patience, load, servers)

    @property
    def leave(self) -> bool:
        """Whether the process is to end with this activation: a thread goes on that can't be stopped."""
        return self._outcomes.leave

    def outcome(self, call_id: str) -> str:
        """How a call of the round ended; empty if it has not."""
        found = self._outcomes.results.get(call_id)
        return found.outcome if found is not None else ""

    @property
    def stuck(self) -> bool:
        """Whether a tool goes on that ignores its cancellation."""
        return self._outcomes.stuck

    async def end(self, known: dict[str, Outcome]) -> None:
        """Give every call a result that has none: a run must not end otherwise.

        Args:
            known: results of calls that nobody has begun.
        """
        await self.take_children()
        for call in self._window.calls:
            outcome = self._outcomes.results.get(call.call_id) or await self._known(call)
            if outcome is None:  # a cancel may have come while a hook was shown how it ended
                await self._outcomes.give_up(call, known)
        self._finish_calls()

    def _finish_calls(self) -> None:
        """Make the round's results messages. One of them may be of a call that hands off: then the session does."""
        window, draft = self._window, self._commits.draft
        self._outcomes.record_handoff()
        for call in window.calls:
            draft.finish_call(window, call, self._outcomes.results[call.call_id])
        found = handoff_of(window, window.calls, self._outcomes.results)
        if found is not None:
            draft.handoff, records = found
            for record in records:
                draft.say(window, record)
        window.calls = []

    async def bring(self, known: dict[str, Outcome]) -> str | None:
        """Bring every call of the round to its result; what is waited for where children or people are not ready.

        Args:
            known: results of calls that are not executed.
        """
        window = self._window
        limit = asyncio.Semaphore(window.spec["parallel_tools"])
        specs = window.tools
        calls = [call for call in window.calls if call.call_id not in self._outcomes.results]
        # First what others do: sub-agents begin at once, and a tool that kills its process takes no question with it.
        for by_others in (True, False):
            due = [
                self._due(call, limit, known)
                for call in calls
                if not self._window.stops
                and self._is_for_others(call, specs.get(call.tool)) is by_others
                and (by_others or call.call_id in known or not is_handoff(specs.get(call.tool)))
            ]
            await self._all([work for work in due if work is not None])
        if window.cancel is None:
            await self.take_children()
            await self._hand_off(limit, known)
        if window.cancel is not None:
            return None
        if window.interrupted:
            await self._give_up()
        missing = self._missing()
        if missing:
            asked = self._outcomes.asked
            waiting = [call for call in missing if call.call_id in asked or not is_handoff(specs.get(call.tool))]
            return wait_for(waiting, specs, asked)
        self._finish_calls()
        return None

    async def _hand_off(self, limit: asyncio.Semaphore, known: dict[str, Outcome]) -> None:
        """Execute the round's handoff, once all other calls have their results."""
        missing = self._missing()
        if self._window.stops or not all(is_handoff(self._window.tools.get(call.tool)) for call in missing):
            return
        last = [call for call in missing if call.call_id not in self._outcomes.handed_over]
        due = [self._due(call, limit, known) for call in last]
        await self._all([work for work in due if work is not None])

    def _missing(self) -> list[CallState]:
        """The calls of the round that have no result yet."""
        return [call for call in self._window.calls if call.call_id not in self._outcomes.results]

    async def _give_up(self) -> None:
        """Give the calls of an interrupted round their results, as at the end of a run; not those that others are at:
        sub-agents go on, and the store has answered what waited for people or a time."""
        for call in self._window.calls:
            if (
                call.call_id in self._outcomes.results
                or self._is_with_others(call)
                or await self._known(call) is not None
            ):
                continue
            await self._outcomes.give_up(call, {})
        self._outcomes.leave_what_goes_on()

    def _is_with_others(self, call: CallState) -> bool:
        """Whether a sub-agent, a person or the store is at a call, and its result is not here yet."""
        if call.call_id in self._outcomes.handed_over or (call.child_id is not None and call.state == "started"):
            return True
        if call.call_id in self._outcomes.again:
            return False
        waits = call.state in ("asked", "waiting") or call.call_id in self._outcomes.asked
        return waits and self._outcomes.answer_to(call) is None

    def _is_for_others(self, call: CallState, spec: dict[str, Any] | None) -> bool:
        """Whether nothing of a call is executed here before others have done something about it."""
        return spec is not None and (is_delegated(call, spec) or is_asked_first(self._window, call, spec))

    async def _all(self, due: list[Coroutine[Any, Any, Outcome | None]]) -> None:
        """Do what is due about some calls of the round, all at once."""
        tasks = [asyncio.create_task(work) for work in due]
        try:
            if self._commits.draft.spawns:
                await self._commits.flush()
            await self._gather(tasks)
        finally:
            await self._stop({task for task in tasks if not task.done()})
            for task in tasks:
                if task.done():
                    retrieve_error(task)  # the first one is raised, and others are no surprise

    def _due(
        self, call: CallState, limit: asyncio.Semaphore, known: dict[str, Outcome]
    ) -> Coroutine[Any, Any, Outcome | None] | None:
        """What brings a call further; None while others are at it."""
        specs = self._window.tools
        spec, call = specs.get(call.tool), as_edited(call)
        if call.state == "finished":
            return self._known(call)
        if call.state == "requested" and call.call_id in known:
            return self._outcomes.conclude(call, known[call.call_id], executions=0)
        if spec is None:
            text = f"there is no tool named {call.tool!r}. Tools you have: {', '.join(sorted(specs)) or 'none'}."
            return self._outcomes.conclude(call, Outcome("unknown_tool", text), executions=0)
        if call.state in ("asked", "waiting"):
            return self._outcomes.run(call, spec, limit) if self._outcomes.answer_to(call) is not None else None
        if is_delegated(call, spec):
            return self._outcomes.hand_over(call, spec) if call.state in ("requested", "approved") else None
        return self._outcomes.run(call, spec, limit)

    async def _known(self, call: CallState) -> Outcome | None:
        """The outcome that a call has in the store; one that was given up there has not been shown to any hook."""
        if call.state != "finished" or call.result is None:
            return None
        outcome = Outcome.of(call.result)
        if given_up(call):
            outcome = await self._hooks.after_tool(call, outcome)
        self._outcomes.results[call.call_id] = outcome
        return outcome

    async def _gather(self, tasks: list[asyncio.Task[Outcome | None]]) -> None:
        """Await the tools, committing results early where others take longer; ends at once when cancelled."""
        pending: set[asyncio.Future[Any]] = set(tasks)
        watch: asyncio.Task[str] | None = None
        watch_at = time.monotonic() + WATCH_AFTER_SECONDS
        try:
            while pending:
                timeout = COALESCE_SECONDS if self._commits.draft else None if watch else WATCH_AFTER_SECONDS
                reported = None if self._commits.draft else self._outcomes.reports.due()
                others: set[asyncio.Future[Any]] = {other for other in (watch, reported) if other is not None}
                done, pending = await asyncio.wait(
                    pending | others, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
                )
                if reported is not None:
                    pending.discard(reported)
                    if reported in done:
                        done.discard(reported)
                        self._commits.draft.entries += self._outcomes.reports.take()
                        if not done:
                            continue
                if watch is not None:
                    pending.discard(watch)
                    if watch in done:
                        await self._interrupt(watch, pending)
                        return
                for task in done:
                    await task  # Fenced, raised by a commit inside, ends the activation
                if done:
                    continue
                if self._commits.draft:
                    await self._commits.flush()
                    if self._window.stops:
                        return await self._stop(pending)
                    if time.monotonic() < watch_at:
                        continue
                if watch is None:
                    watched = self._window.activation, self._window.run_id or "", self._window.round
                    watch = asyncio.create_task(self._node.interrupted(self._frame_id, *watched))
                    watch.add_done_callback(retrieve_error)  # a commit may fail at the same time
        finally:
            if watch is not None:
                watch.cancel()

    async def _interrupt(self, watch: asyncio.Task[str], pending: Collection[asyncio.Future[Any]]) -> None:
        reason = await watch
        await self._stop(pending)
        if reason == INTERRUPTED_BY_STEER:
            self._window.interrupted = True
        else:
            self._window.cancel = reason
        if any(map(self._is_with_others, self._window.calls)):  # what others said of these before counts
            await self._commits.flush(even_if_empty=True)

    async def _stop(self, pending: Collection[asyncio.Future[Any]]) -> None:
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending, timeout=5.0)

    async def take_children(self) -> None:
        """Turn children's results in the inbox into results of their calls."""
        calls = {call.call_id: call for call in self._window.calls if call.call_id not in self._outcomes.results}
        found = []
        for item in self._window.inbox:
            if item.kind != "child_result" or item.key not in calls:
                continue
            call, payload = calls.pop(item.key), item.payload
            started = call.updated_at or now()
            status = "ok" if payload["status"] == "completed" else "error"
            outcome = Outcome(status, child_text(payload), max(0, now() - started), started)
            found.append(self._outcomes.conclude(call, outcome, executions=1, item=item))
        await asyncio.gather(*found)


def given_up(call: CallState) -> bool:
    """Whether a call ended without an agent: its processes died again and again, or a person said so."""
    return call.result is not None and call.result["outcome"] == "aborted"
