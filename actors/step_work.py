"""The steps of a workflow at work: begun, handed over or executed here, each brought to its one result."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from msgspec.structs import replace

from understudy.approvals import IN_DOUBT
from understudy.ports import Node
from understudy.protocol import FrameIdentity
from understudy.records import CallState, InboxItem
from understudy.waiting import retrieve_error
from understudy.workflows import APPROVED, step_path

from .answers import outcome_of
from .approval import as_edited
from .call_outcomes import CallOutcomes
from .commits import Commits, Patience
from .execution import MAX_RESULT_CHARACTERS, Outcome, presentable
from .hooks import Hooks
from .replay import Execution
from .servers import Servers
from .step_kinds import Steps, result_of
from .step_values import as_value, of_step, result_type
from .tool_calls import COALESCE_SECONDS, WATCH_AFTER_SECONDS
from .tools import LoadedTool
from .window import Window
from .workflow_context import ToolWanted

LOOK_SECONDS = 1.0
"""While tools run here, what others have brought is looked for this often."""

Arrived = tuple[str, Outcome, str]
"""A step's path, its outcome, and the status of the run that did it (empty if none did)."""


class StepWork:
    """The open steps of an activation's workflow.

    Attributes:
        calls: by path.
    """

    def __init__(
        self, window: Window, node: Node, frame: FrameIdentity, commits: Commits, hooks: Hooks, patience: Patience,
        load: Callable[[dict[str, Any]], Awaitable[LoadedTool]], servers: Servers, steps: Steps,
    ) -> None:  # fmt: skip
        self.calls = {step_path(window.run_id or "", call.call_id): call for call in window.calls}
        self._window = window
        self._node, self._frame_id = node, frame.frame_id
        self._commits = commits
        self._load_tool = load
        self._steps = steps
        self._outcomes = CallOutcomes(window, node, frame, commits, hooks, patience, self._load, servers)
        self._limit = asyncio.Semaphore(window.spec["parallel_tools"])
        self._at_work: dict[asyncio.Task[Outcome | None], str] = {}
        self._watch: asyncio.Task[str] | None = None
        self._approved: set[int] = set()  # inbox rows that were dealt with
        self._given_up: set[str] = set()  # what others are at, and shall give a result

    @property
    def leave(self) -> bool:
        """Whether the process is to end with this activation: a thread goes on that can't be stopped."""
        return self._outcomes.leave

    @property
    def stuck(self) -> bool:
        """Whether a tool goes on that ignores its cancellation."""
        return self._outcomes.stuck

    async def _load(self, spec: dict[str, Any]) -> LoadedTool:
        return of_step(await self._load_tool(spec))

    def resume(self, execution: Execution) -> None:
        """Do what is due about the steps that were open when this activation began."""
        for path in [path for path in self.calls if path in execution.waiting]:
            self.begin(path, execution)

    def begin(self, path: str, execution: Execution) -> None:
        """Do what is due about a step; nothing while others are at it, or if this process is to end first."""
        if self.leave:
            return
        call, step = self.calls[path], execution.waiting[path]
        work: Coroutine[Any, Any, Outcome | None]
        if call.state == "finished" and not isinstance(step, ToolWanted):
            work = self._known(call)
        elif isinstance(step, ToolWanted):
            if call.state in ("asked", "waiting") and self._outcomes.answer_to(call) is None:
                return
            work = self._tool(path, call, step)
        elif call.state == "requested":
            work = self._hand_over(path, call, execution)
        else:
            return
        self._at_work[asyncio.create_task(work)] = path

    async def _known(self, call: CallState) -> Outcome:
        assert call.result is not None
        return Outcome.of(call.result)

    async def _hand_over(self, path: str, call: CallState, execution: Execution) -> Outcome | None:
        wanted = self._steps.handed_over(call, execution.waiting[path], execution.record)
        if isinstance(wanted, Outcome):
            return await self._outcomes.conclude(call, wanted, executions=0)
        draft = self._commits.draft
        self.calls[path] = wanted.state
        if wanted.spawn is not None:
            draft.spawns.append(wanted.spawn)
            draft.calls[call.call_id] = wanted.state
        elif wanted.ask is not None:
            draft.asks.append(replace(wanted.ask, prompt=presentable(wanted.ask.prompt)))
        return None

    async def _tool(self, path: str, call: CallState, step: ToolWanted) -> Outcome | None:
        """Have a tool's call done. What led to it is committed before it begins, also the values that the code has
        taken: run again, the code asks for this very call."""
        spec, is_elsewhere = self._steps.tool(step), self._steps.is_rendered_elsewhere(step.tool)
        if call.state == "finished":
            outcome: Outcome | None = await self._known(call)
        elif isinstance(spec, Outcome):
            return await self._outcomes.conclude(call, spec, executions=0)
        else:
            if spec["on_crash"] == "rerun":  # other tools have a commit of their own before they begin
                await self._commits.flush()
                if self._window.stops:
                    return Outcome("cancelled", "cancelled")
            outcome = None if is_elsewhere else await self._said(call, step)
            outcome = outcome or await self._outcomes.run(as_edited(call), spec, self._limit)
        if outcome is None:  # a person is asked: about what, says the draft still
            kinds = {asked.call_id: asked.kind for asked in self._commits.draft.asks}
            self.calls[path] = replace(call, state="asked", question=kinds.get(call.call_id, call.question))
        elif outcome.outcome == "ok" and is_elsewhere:
            outcome = _as_json(outcome, step)
        return outcome

    async def _said(self, call: CallState, step: ToolWanted) -> Outcome | None:
        """What a person has said of a call in doubt, as a value before any commit has it; None if nothing, or that it
        is to run again."""
        is_asked = call.state == "asked" and call.question == IN_DOUBT
        item = self._outcomes.answer_to(call) if is_asked else None
        said = outcome_of(call, item.payload) if item is not None else None
        if said is None:
            return None
        said = _as_json(said, step) if said.outcome == "ok" else said
        return await self._outcomes.conclude(call, said, executions=call.executions, item=item)

    async def results(self, execution: Execution) -> list[Arrived]:
        """Wait for results; none if only others can bring some, or the run is cancelled."""
        while self._window.cancel is None:
            self._take_approvals(execution)
            found = self._from_others(execution)
            for task in [task for task in self._at_work if task.done()]:
                path, outcome = self._at_work.pop(task), await task
                if outcome is not None:
                    found.append((path, outcome, ""))
            known = {path for path, _, _ in found} | self._given_up
            found += await self._give_up([path for path in execution.dropped if path not in known])
            if found or not self._at_work:
                return found
            if all(not task.done() for task in self._at_work):
                await self._wait()
        return []

    async def _give_up(self, paths: list[str]) -> list[Arrived]:
        """End steps that the code does not await any more: here and now what is done here, the others by those who are
        at them."""
        await self._end([task for task, path in self._at_work.items() if path in paths])
        found: list[Arrived] = []
        for path in paths:
            call = self.calls[path]
            if call.state in ("asked", "waiting") or (call.state == "started" and call.child_id is not None):
                self._given_up.add(path)
                self._commits.draft.given_up.append(call.call_id)
            else:
                found.append((path, await self.given_up(path), ""))
        return found

    async def _wait(self) -> None:
        """Wait until something ends here, or the run is cancelled; commit what gathers, and look what others bring."""
        draft, reported = self._commits.draft, None
        with_others = len(self.calls) > len(self._at_work)
        timeout: float | None = LOOK_SECONDS if with_others else WATCH_AFTER_SECONDS
        if draft:  # a result is in doubt until it is committed; what ends during that commit shares the next one
            timeout = 0.0 if draft.calls else COALESCE_SECONDS
        others: set[asyncio.Future[Any]] = set()
        if not draft:
            reported = self._outcomes.reports.due()
            if reported is not None:
                others.add(reported)
            if self._watch is not None:
                others.add(self._watch)
                timeout = timeout if with_others else None
        done, _ = await asyncio.wait(
            {*self._at_work, *others}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
        )  # fmt: skip
        if self._watch is not None and self._watch in done:
            self._window.cancel = await self._watch
        elif reported is not None and reported in done:
            self._commits.draft.entries += self._outcomes.reports.take()  # a call's start may have been committed since
        elif not done and (self._commits.draft or with_others):
            await self._commits.flush(even_if_empty=True)
        elif not done and self._watch is None:
            watched = self._window.activation, self._window.run_id or "", self._window.round
            self._watch = asyncio.create_task(self._node.interrupted(self._frame_id, *watched))
            self._watch.add_done_callback(retrieve_error)  # a commit may fail at the same time

    def _take_approvals(self, execution: Execution) -> None:
        """Begin the calls that a person has approved since this activation began."""
        for item in self._window.inbox:
            if item.kind != APPROVED or item.id in self._approved:
                continue
            self._approved.add(item.id)
            self._commits.draft.inbox_done.append(item.id)
            path = step_path(self._window.run_id or "", item.key)
            call = self.calls.get(path)
            if call is not None and call.state == "asked" and path in execution.waiting:
                # Else it was approved when this activation began, or nobody wants it any more.
                self.calls[path] = replace(call, state="approved", edited=item.payload["edited"], question="")
                self._outcomes.asked.discard(call.call_id)
                self._outcomes.handed_over.discard(call.call_id)
                self.begin(path, execution)

    def _from_others(self, execution: Execution) -> list[Arrived]:
        """The results that the inbox has for steps that were handed over."""
        found: list[Arrived] = []
        for item in self._answers():
            path = step_path(self._window.run_id or "", item.key)
            step = execution.waiting.get(path)
            if (step is None and path not in execution.dropped) or isinstance(step, ToolWanted):
                if step is not None and path not in self._at_work.values():
                    self.begin(path, execution)
                continue
            outcome = result_of(self.calls[path], item)
            self.conclude(path, outcome, item)
            found.append((path, outcome, str(item.payload.get("status") or "")))
        return found

    def _answers(self) -> list[InboxItem]:
        """Results in the inbox that nothing was made of yet."""
        taken = set(self._commits.draft.inbox_done)
        run_id = self._window.run_id or ""
        return [
            item
            for item in self._window.inbox
            if item.is_result and item.id not in taken and step_path(run_id, item.key) in self.calls
        ]

    def answer(self, path: str) -> InboxItem | None:
        """The result that the inbox has for a step."""
        call_id = self.calls[path].call_id
        return next((item for item in self._answers() if item.key == call_id), None)

    def conclude(self, path: str, outcome: Outcome, item: InboxItem) -> None:
        """Give a step that was handed over its result. One commit has it and the inbox row that brought it."""
        call, draft = self.calls[path], self._commits.draft
        draft.inbox_done.append(item.id)
        draft.record(call, outcome, executions=max(1, call.executions))

    def question(self, tool: str) -> str | None:
        """The path of an open call of this tool."""
        return next((path for path, call in self.calls.items() if call.tool == tool), None)

    async def given_up(self, path: str) -> Outcome:
        """The outcome of a call whose run ends first."""
        call = self.calls[path]
        known = self._outcomes.results.get(call.call_id)
        if known is not None:
            return known
        if call.state == "finished":
            return await self._known(call)
        item = self.answer(path)
        if item is not None and call.child_id is not None:
            outcome = result_of(call, item)
            self.conclude(path, outcome, item)
            return outcome
        await self._outcomes.give_up(call, {})
        return self._outcomes.results[call.call_id]

    async def stop(self) -> None:
        """End what runs here."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        await self._end([*self._at_work])

    async def _end(self, tasks: list[asyncio.Task[Outcome | None]]) -> None:
        """End some of what runs here."""
        pending = [task for task in tasks if not task.done()]
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending, timeout=5.0)
            self._outcomes.leave_what_goes_on()
        for task in tasks:
            if task.done():
                retrieve_error(task)
            del self._at_work[task]


def _as_json(outcome: Outcome, step: ToolWanted) -> Outcome:
    """What another process or a person has said, as a value of the tool's; an error where it was cut off."""
    if len(outcome.content) >= MAX_RESULT_CHARACTERS - 1:
        text = f"it was executed, but its result has more than {MAX_RESULT_CHARACTERS} characters"
        return dataclasses.replace(outcome, outcome="error", content=text)
    kind = result_type(step.item) if step.item is not None else None
    return dataclasses.replace(outcome, content=as_value(outcome.content, kind))
