"""The tool calls of a round: each is brought to exactly one outcome, whatever happens to the process on the way."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine
from functools import partial
from typing import Any

from msgspec.structs import replace

from understudy.events import ToolInDoubt, ToolStarted
from understudy.identifiers import tool_span_identifier
from understudy.logs import about
from understudy.ports import Node
from understudy.records import (
    INTERRUPTED_BY_STEER,
    LEASE_SECONDS,
    Ask,
    CallState,
    InboxItem,
    LogEntry,
    Spawn,
    child_text,
)
from understudy.waiting import retrieve_error

from .answers import outcome_of, without_result
from .approval import as_edited, is_asked_first, permit, with_edit, with_time_out
from .asking import QUESTION, answer_to, ask_about
from .commits import Commits, Patience
from .delegation import is_delegated, wait_for, wanted_by
from .execution import Outcome, bind, execute, may_go_on, now, presentable, reconcile, reconcile_failed
from .handoffs import handed_off, handoff_of, is_handoff
from .hooks import Hooks
from .reports import CallReports, Reports
from .tools import LoadedTool, ToolContext
from .window import Window

COALESCE_SECONDS = 0.05
"""Results that come this soon after another share its commit."""

WATCH_AFTER_SECONDS = 0.25
"""Tools that run longer are watched for a cancellation."""

GOES_ON = "interrupted: the run was ended while this tool ran, and it could not be stopped; its outcome is unknown"
"""What a model reads as the result of such a call."""

Loader = Callable[[dict[str, Any]], Awaitable[LoadedTool]]


class ToolCalls:
    """Executes the calls of an activation's window, or hands them over.

    Attributes:
        leave: the process is to end with this activation: a thread goes on that can't be stopped.
    """

    def __init__(
        self,
        window: Window,
        commits: Commits,
        hooks: Hooks,
        patience: Patience,
        node: Node,
        load: Loader,
        frame_id: str,
    ) -> None:
        self.leave = False
        self._window = window
        self._commits = commits
        self._hooks = hooks
        self._patience = patience
        self._node = node
        self._load = load
        self._frame_id = frame_id
        self._results: dict[str, Outcome] = {}
        self._ended: dict[str, tuple[Outcome, int, InboxItem | None]] = {}
        self._begun: dict[str, asyncio.Future[Any]] = {}
        self._finding_out: list[asyncio.Future[Any]] = []
        self._handed_over: set[str] = set()
        self._asked = {call.call_id for call in window.calls if call.state == "asked"}
        self._reports = Reports()
        self._told = {item.id for item in window.inbox}

    def outcome(self, call_id: str) -> str:
        """How a call of the round ended; empty if it has not."""
        found = self._results.get(call_id)
        return found.outcome if found is not None else ""

    @property
    def stuck(self) -> bool:
        """Whether a tool goes on that ignores its cancellation."""
        return any(not work.done() for work in (*self._begun.values(), *self._finding_out))

    async def end(self, known: dict[str, Outcome]) -> None:
        """Give every call a result that has none: a run must not end otherwise.

        Args:
            known: results of calls that nobody has begun.
        """
        await self.take_children()
        for call in self._window.calls:
            outcome = self._results.get(call.call_id) or await self._known(call)
            if outcome is None:  # a cancel may have come while a hook was shown how it ended
                ended, executions, item = self._ended.get(call.call_id) or self._left(call, known)
                await self._conclude(call, ended, executions=executions, item=item)
        self._settle()

    def _settle(self) -> None:
        """Make the round's results messages. One of them may be of a call that hands off: then the session does."""
        window, draft = self._window, self._commits.draft
        for call in window.calls:
            draft.settle(window, call, self._results[call.call_id])
        found = handoff_of(window, window.calls, self._results)
        if found is not None:
            draft.handoff, records = found
            for record in records:
                draft.say(window, record)
        window.calls = []

    def _left(self, call: CallState, known: dict[str, Outcome]) -> tuple[Outcome, int, InboxItem | None]:
        """What is said of a call whose run ends first: an answer that was accepted for it, or that there is none."""
        if call.state == "requested" and call.call_id in known:
            return known[call.call_id], call.executions, None
        item = answer_to(call, self._window.inbox)  # also of one that asked in this activation
        answered = outcome_of(call, item.payload) if item is not None else None
        if answered is not None:
            return answered, call.executions, item
        begun = self._begun.get(call.call_id)
        if begun is not None and may_go_on(begun):
            return Outcome("interrupted", GOES_ON), call.executions + 1, None
        return without_result(call), call.executions, None

    @property
    def _specs(self) -> dict[str, dict[str, Any]]:
        """The agent's tools, by name."""
        return {tool["name"]: tool for tool in self._window.spec["tools"]}

    async def bring(self, known: dict[str, Outcome]) -> str | None:
        """Bring every call of the round to its result; what is waited for where children or people are not ready.

        Args:
            known: results of calls that are not executed.
        """
        window = self._window
        limit = asyncio.Semaphore(window.spec["parallel_tools"])
        specs = self._specs
        calls = [call for call in window.calls if call.call_id not in self._results]
        # First what others do: sub-agents begin at once, and a tool that kills its process takes no question with it.
        for by_others in (True, False):
            due = [
                self._due(call, specs, limit, known)
                for call in calls
                if not self._stops
                and self._is_for_others(call, specs.get(call.tool)) is by_others
                and (by_others or call.call_id in known or not is_handoff(specs.get(call.tool)))
            ]
            await self._all([work for work in due if work is not None])
        if window.cancel is None:
            await self.take_children()
            last = [call for call in self._missing() if call.call_id not in self._handed_over]
            if not self._stops and all(is_handoff(specs.get(call.tool)) for call in self._missing()):
                due = [self._due(call, specs, limit, known) for call in last]
                await self._all([work for work in due if work is not None])
        if window.cancel is not None:
            return None
        if window.interrupted:
            await self._give_up()
        missing = self._missing()
        if missing:
            waiting = [call for call in missing if call.call_id in self._asked or not is_handoff(specs.get(call.tool))]
            return wait_for(waiting, specs, self._asked)
        self._settle()
        return None

    def _missing(self) -> list[CallState]:
        """The calls of the round that have no result yet."""
        return [call for call in self._window.calls if call.call_id not in self._results]

    @property
    def _stops(self) -> bool:
        """Whether nothing more is begun: the run shall end, or is interrupted."""
        return self._window.cancel is not None or self._window.interrupted

    async def _give_up(self) -> None:
        """Give the calls of an interrupted round their results, as at the end of a run; not those that others are at:
        sub-agents go on, and the store has answered what waited for people or a time."""
        for call in self._window.calls:
            if call.call_id in self._results or self._is_with_others(call) or await self._known(call) is not None:
                continue
            ended, executions, item = self._ended.get(call.call_id) or self._left(call, {})
            await self._conclude(call, ended, executions=executions, item=item)
        self.leave = self.leave or any(map(may_go_on, (*self._begun.values(), *self._finding_out)))

    def _is_with_others(self, call: CallState) -> bool:
        """Whether a sub-agent, a person or the store is at a call, and its result is not here yet."""
        if call.call_id in self._handed_over or (call.child_id is not None and call.state == "started"):
            return True
        waits = call.state in ("asked", "waiting") or call.call_id in self._asked
        return waits and self._answer_to(call) is None

    def _answer_to(self, call: CallState) -> InboxItem | None:
        """The answer to a call, if it has come with all that follows from it: the record of a decision that is to be
        remembered is a message, which an Ack does not bring."""
        item = answer_to(call, self._window.inbox)
        return None if item is not None and "remember" in item.payload and item.id not in self._told else item

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
        self, call: CallState, specs: dict[str, dict[str, Any]], limit: asyncio.Semaphore, known: dict[str, Outcome]
    ) -> Coroutine[Any, Any, Outcome | None] | None:
        """What brings a call further; None while others are at it."""
        spec, call = specs.get(call.tool), as_edited(call)
        if call.state == "finished":
            return self._known(call)
        if call.state == "requested" and call.call_id in known:
            return self._conclude(call, known[call.call_id], executions=0)
        if spec is None:
            text = f"there is no tool named {call.tool!r}. Tools you have: {', '.join(sorted(specs)) or 'none'}."
            return self._conclude(call, Outcome("unknown_tool", text), executions=0)
        if call.state in ("asked", "waiting"):
            return self._run_tool(call, spec, limit) if self._answer_to(call) is not None else None
        if is_delegated(call, spec):
            return self._hand_over(call, spec) if call.state in ("requested", "approved") else None
        return self._run_tool(call, spec, limit)

    async def _known(self, call: CallState) -> Outcome | None:
        """The outcome that a call has in the store; one that was given up there has not been told to any hook."""
        if call.state != "finished" or call.result is None:
            return None
        outcome = Outcome(**call.result)
        if given_up(call):
            outcome = await self._hooks.after_tool(call, outcome)
        self._results[call.call_id] = outcome
        return outcome

    async def _gather(self, tasks: list[asyncio.Task[Outcome | None]]) -> None:
        """Await the tools, committing results early where others take longer; ends at once when cancelled."""
        pending: set[asyncio.Future[Any]] = set(tasks)
        watch: asyncio.Task[str] | None = None
        watch_at = time.monotonic() + WATCH_AFTER_SECONDS
        try:
            while pending:
                timeout = COALESCE_SECONDS if self._commits.draft else None if watch else WATCH_AFTER_SECONDS
                reported = None if self._commits.draft else self._reports.due()
                others: set[asyncio.Future[Any]] = {other for other in (watch, reported) if other is not None}
                done, pending = await asyncio.wait(
                    pending | others, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
                )
                if reported is not None:
                    pending.discard(reported)
                    if reported in done:
                        done.discard(reported)
                        self._commits.draft.entries += self._reports.take()
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
                    if self._stops:
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
            await self._commits.flush(anew=True)

    async def _stop(self, pending: Collection[asyncio.Future[Any]]) -> None:
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending, timeout=5.0)

    async def _run_tool(self, call: CallState, spec: dict[str, Any], limit: asyncio.Semaphore) -> Outcome | None:
        """Run one call under its `on_crash` rule and put its result into the draft; None if a person is asked."""
        async with limit:
            if call.state == "started" and spec["on_crash"] == "ask":
                self._commits.draft.entries.append(ToolInDoubt(call_id=call.call_id, tool=call.tool, policy="ask"))
                self._ask(ask_about(call))
                return None
            outcome: Outcome | None = None
            item = self._answer_to(call) if call.state in ("asked", "waiting") else None
            if call.state == "started":
                outcome = await self._in_doubt(call, spec)
            elif item is not None:
                outcome = outcome_of(call, item.payload)
            permitted = outcome or await self._permit(call, spec)
            if isinstance(permitted, Outcome):
                return await self._conclude(call, permitted, executions=call.executions, item=item)
            return await self._execute(call, permitted.arguments, spec, item) if permitted is not None else None

    async def _permit(self, call: CallState, spec: dict[str, Any]) -> CallState | Outcome | None:
        """The call as hooks let it be executed, or its outcome; None if a person is asked for approval."""
        permitted = await self._hooks.before_tool(call, spec)
        if isinstance(permitted, Outcome):
            return permitted
        found = permit(self._window, call, spec, permitted)
        if isinstance(found, Ask):
            self._ask(found)
            return None
        return found

    def _ask(self, asked: Ask) -> None:
        """Ask a person about a call that is executed here, from the next commit on."""
        self._asked.add(asked.call_id)
        self._handed_over.add(asked.call_id)
        self._commits.draft.asks.append(replace(asked, prompt=presentable(asked.prompt)))

    async def _execute(self, call: CallState, arguments: str, spec: dict[str, Any], item: InboxItem | None) -> Outcome:
        """Execute a call. What can wait or fail comes before the commit of its start: the lease runs from there."""
        if is_handoff(spec):
            done = handed_off(spec, replace(call, arguments=arguments))
            return await self._conclude(call, done, executions=call.executions + 1, item=item)
        timeout = spec["timeout"] or self._window.spec["tool_timeout"]
        self._patience.expect(time.monotonic() + timeout)
        try:
            loaded = await self._load(spec)
        except Exception as error:
            failed = Outcome("error", str(error))
            return await self._conclude(call, failed, executions=call.executions, item=item)
        keywords = bind(loaded, arguments, self._context(call, self._reports.of(call)))
        if isinstance(keywords, Outcome):
            return await self._conclude(call, keywords, executions=call.executions, item=item)
        if item is not None:
            self._commits.draft.inbox_done.append(item.id)  # it runs again: one commit has this and its start
        outcome, before, begun = None, math.inf, partial(self._begun.__setitem__, call.call_id)
        while outcome is None:
            if spec["on_crash"] != "rerun":
                before = await self._fence(call, ToolStarted(call_id=call.call_id, tool=call.tool))
                if self._stops:
                    return Outcome("cancelled", "cancelled")
            self._patience.expect(time.monotonic() + timeout)
            ids = {"run_id": self._window.run_id or "", "trace_id": self._window.trace_id}
            with about(**ids, span_id=tool_span_identifier(self._window.session_id, call.call_id)):
                outcome = await execute(loaded, keywords, timeout, before, begun)
        self.leave = self.leave or outcome.stuck_thread
        return await self._conclude(call, outcome, executions=call.executions + 1)

    def _context(self, call: CallState, reports: CallReports | None = None) -> ToolContext:
        window = self._window
        span_id = tool_span_identifier(window.session_id, call.call_id)
        return ToolContext(
            session_id=window.session_id,
            run_id=window.run_id or "",
            round=window.round,
            call_id=call.call_id,
            call_key=f"{window.session_id}/{call.call_id}",
            epoch=window.epoch,
            agent=window.spec["name"],
            workspace=window.spec["workspace"],
            traceparent=f"00-{window.trace_id}-{span_id}-01" if window.trace_id else "",
            _reporting=reports,
        )

    async def _fence(self, call: CallState, *events: LogEntry) -> float:
        """Commit that something is done about a call; the monotonic time before which it must have begun.

        The process may be stopped at any time, and after the lease somebody else may act on this call. So the lease is
        looked at last of all, by whoever begins; where it is over they come here again, and may be fenced.
        """
        sent = time.monotonic()
        self._commits.draft.entries += events
        self._commits.draft.calls[call.call_id] = CallState(call.call_id, "started", executions=call.executions)
        await self._commits.flush()
        return sent + LEASE_SECONDS

    async def _in_doubt(self, call: CallState, spec: dict[str, Any]) -> Outcome | None:
        """What is known of a call that had started when its process died; None to run it again."""
        policy = spec["on_crash"]
        told = ToolInDoubt(call_id=call.call_id, tool=call.tool, policy=policy)
        if policy == "reconcile":
            return await self._reconcile(call, spec, told)
        self._commits.draft.entries.append(told)
        if policy == "rerun":
            return None
        return without_result(call)

    async def _reconcile(self, call: CallState, spec: dict[str, Any], told: LogEntry) -> Outcome:
        """What the tool's own function finds out about a call; it is code of the user's, and begins as a tool does."""
        timeout = spec["timeout"] or self._window.spec["tool_timeout"]
        self._patience.expect(time.monotonic() + timeout)
        try:
            loaded = await self._load(spec)
        except Exception as error:
            self._commits.draft.entries.append(told)
            return Outcome("interrupted", presentable(reconcile_failed(f"{type(error).__name__}: {error}")))
        outcome, events = None, [told]
        while outcome is None:
            before = await self._fence(call, *events)
            self._patience.expect(time.monotonic() + timeout)
            outcome = await reconcile(loaded, self._context(call), timeout, before, self._finding_out.append)
            events = []
        self.leave = self.leave or outcome.stuck_thread
        return outcome

    async def _hand_over(self, call: CallState, spec: dict[str, Any]) -> Outcome | None:
        """Let the call wait for a sub-agent, a person or the store from the next commit on."""
        permitted = await self._permit(call, spec)
        if permitted is None:
            return None
        if isinstance(permitted, Outcome):
            return await self._conclude(call, permitted, executions=0)
        wanted = wanted_by(permitted, spec, self._window)
        if isinstance(wanted, str):
            return await self._conclude(call, Outcome("invalid", wanted), executions=0)
        if isinstance(wanted, Spawn):
            self._commits.draft.spawns.append(wanted)
            state = "waiting" if wanted.background else "started"
            started = CallState(call.call_id, state, child_id=wanted.child_id, executions=1)
            self._commits.draft.calls[call.call_id] = started
        else:
            wanted = with_time_out(self._window, wanted) if wanted.kind == QUESTION else wanted
            self._commits.draft.asks.append(replace(wanted, prompt=presentable(wanted.prompt)))
        self._handed_over.add(call.call_id)
        return None

    async def _conclude(
        self, call: CallState, outcome: Outcome, *, executions: int, item: InboxItem | None = None
    ) -> Outcome:
        """Give a call its one result, as the hooks leave it. One commit has it and the inbox row that brought it."""
        self._ended[call.call_id] = outcome, executions, item
        call = as_edited(call)
        if call.edited is not None:
            outcome = dataclasses.replace(outcome, content=presentable(with_edit(call.edited, outcome.content)))
        outcome = await self._hooks.after_tool(call, outcome)
        if item is not None:
            self._commits.draft.inbox_done.append(item.id)
        self._results[call.call_id] = outcome
        self._commits.draft.entries += self._reports.end(call.call_id)
        self._commits.draft.record(call, outcome, executions=executions)
        return outcome

    async def take_children(self) -> None:
        """Turn children's results in the inbox into results of their calls."""
        calls = {call.call_id: call for call in self._window.calls if call.call_id not in self._results}
        found = []
        for item in self._window.inbox:
            if item.kind != "child_result" or item.key not in calls:
                continue
            call, payload = calls.pop(item.key), item.payload
            started = call.updated_at or now()
            status = "ok" if payload["status"] == "completed" else "error"
            outcome = Outcome(status, child_text(payload), max(0, now() - started), started)
            found.append(self._conclude(call, outcome, executions=1, item=item))
        await asyncio.gather(*found)


def given_up(call: CallState) -> bool:
    """Whether a call ended without an agent: its processes died again and again, or a person said so."""
    return call.result is not None and call.result["outcome"] == "aborted"
