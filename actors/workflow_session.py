"""The loop of a workflow: its code instead of a model says what is done next. Everything else is a session's.

A step is a tool call of the session. It is asked for, begun, concluded and survives as one that a model asked for; the
messages that record it are what the code is run again from (`replay`). A session actor keeps the code where it is while
the session waits; one that does not have it runs it from the log.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec.structs import replace

from understudy.approvals import QUESTION
from understudy.errors import (
    Fenced,
    InvalidInput,
    StepFailed,
    ToolError,
    UnderstudyError,
    UnknownSession,
    WorkflowDiverged,
    WorkflowError,
)
from understudy.json_text import from_json
from understudy.messages import Message, storable
from understudy.ports import Node
from understudy.protocol import FrameIdentity
from understudy.records import Ask, CallState, Finish
from understudy.workflows import CONTINUED, DIVERGED, step_identifier, step_path

from .awaited import ContinueAsNew, Result
from .commits import Commits, Patience
from .execution import Outcome, presentable
from .hooks import Hooks
from .replay import Execution
from .results import rendered
from .servers import Servers
from .session import HookLoader, Step
from .steering import inputs_of, message_of
from .step_kinds import Steps, result_of
from .step_work import StepWork
from .tools import LoadedTool
from .window import Window
from .workflow import LoadedWorkflow
from .workflow_context import WorkflowContext
from .workflow_record import Recorded, read_input, recorded, taking
from .worktrees import WorkingTree

logger = logging.getLogger(__name__)

WorkflowLoader = Callable[[dict[str, Any]], Awaitable[LoadedWorkflow]]

BUDGET_EXCEEDED = "budget_exceeded"
"""How a run ends whose code fails with a step that a budget has ended."""

RETRY, FAIL = "retry", "fail"
"""What a person can say of code that asks for other steps than the log has."""


@dataclass(eq=False)
class Live:
    """A workflow's code where it has come to, and what the log must have for it to go on from there.

    Attributes:
        said: messages that this process has added, and that the window lacked when it forgot its own, in order.
    """

    execution: Execution
    recorded: Recorded
    run_id: str
    said: list[Message]

    def fits(self, window: Window) -> bool:
        """Whether the log is what this process has made it, and nothing else."""
        new = [_identity(message) for message in window.messages]
        return self.run_id == window.run_id and new == [_identity(message) for message in self.said]


def _identity(message: Message) -> tuple[Any, ...]:
    return message.role, message.origin, message.tool_call_id, message.content, message.tool_calls, message.extra


class WorkflowActivation:
    """A workflow at work in this process: the counterpart of `session.Activation`.

    Attributes:
        patience: when this process is to be taken for hung.
    """

    def __init__(
        self, window: Window, node: Node, load: Callable[[dict[str, Any]], Awaitable[LoadedTool]],
        load_hook: HookLoader, load_workflow: WorkflowLoader, frame: FrameIdentity,
    ) -> None:  # fmt: skip
        self.window = window
        self.patience = Patience()
        self._load_workflow = load_workflow
        self._hooks = Hooks(window, load_hook, self.patience.expect)
        self._commits = Commits(window, node, frame.frame_id, self.patience)
        self._worktree = WorkingTree(window, self._commits, self.patience)
        self._servers = Servers(window, node, frame.frame_id, self._commits, self.patience)
        self._steps = Steps(window)
        self._work = StepWork(
            window, node, frame, self._commits, self._hooks, self.patience, load, self._servers, self._steps
        )
        self._reload = partial(node.reload, frame.frame_id, window.activation)
        self._recorded: Recorded | None = None
        self._said: list[Message] = []  # since the window's messages end

    @property
    def stuck(self) -> bool:
        """Whether code of the user's goes on that could not be stopped."""
        return self._work.stuck or self._hooks.stuck

    async def advance(self) -> Step:
        """Do what is due and return the next step.

        Raises:
            Fenced: another activation of the session exists; nothing more may be done here.
        """
        window = self.window
        live, window.workflow = window.workflow, None
        if window.run_id is None:
            # The start alone: an input that is cancelled meanwhile makes it void, and nothing may have been done then.
            return await self._step(wait=None if self._start_run() else "idle")
        if window.cancel is not None:
            return await self._finish(Finish("cancelled"))
        try:
            asked = self._work.question(DIVERGED)
            if asked is not None and (step := await self._answered(asked)) is not None:
                return step
            unusable = await self._worktree.make() or await self._servers.list_tools(all_servers=not window.listed)
            if unusable is not None:
                return await self._finish(Finish("failed", error=unusable))
            execution = await self._code(live)
            self._work.resume(execution)
            return await self._go_on(execution)
        except WorkflowDiverged as diverged:
            return await self._ask_about(diverged)
        except (Fenced, UnknownSession):
            raise
        except UnderstudyError as error:
            return await self._failed(error)
        finally:
            await self._work.stop()

    def _start_run(self) -> bool:
        window, draft, inputs = self.window, self._commits.draft, inputs_of(self.window)
        if not inputs:
            return False
        first = inputs[0]
        draft.start_run = first.key
        window.run_id, window.round, window.calls = first.key, 0, []
        window.trace_id, window.sampled = first.payload["trace_id"], first.payload.get("sampled")
        self._say(message_of(first))
        return True

    def _say(self, message: Message) -> None:
        """Add a message of the run."""
        self._commits.draft.say(self.window, message)
        self._said.append(replace(message, run_id=self.window.run_id))

    async def _code(self, live: Any) -> Execution:
        """The run's code, where it has come to by the log.

        Raises:
            WorkflowDiverged: it asks for other steps than the log has.
            UnderstudyError: it can't be had, or its input is none.
        """
        window = self.window
        assert window.run_id is not None
        if isinstance(live, Live):
            if live.fits(window) and not self._said:
                self._recorded = live.recorded
                return live.execution
            live.execution.close()
        if not window.is_whole:
            window.known_seq, window.messages, window.is_whole = 0, [], True
            if self._commits.draft.start_run is None:  # else what was before is of other runs
                window.apply(await self._reload())
        messages = [*window.backwards(self._said)][::-1]
        self._recorded = found = recorded(messages, window.run_id)
        context = WorkflowContext(window.session_id, window.run_id)
        try:
            loaded = await self._load_workflow(window.spec["workflow"])
            arguments = read_input(loaded.function, found.given, window.session_id)
        except (ToolError, InvalidInput) as error:
            if not found.record.asked and not found.times:
                raise
            # It was run before: what is wrong with the code by now can be mended, and what it has done is not lost.
            raise WorkflowDiverged(f"the code that began this run can't be run any more: {error.message}") from error
        execution = Execution(context.whole(loaded.function, arguments), found.record, found.prefix)
        execution.replay()
        return execution

    async def _go_on(self, execution: Execution) -> Step:
        """Do what the code asks for, until only others can bring what it waits for."""
        while True:
            self._note(execution)
            if execution.is_over and not (execution.dropped and isinstance(execution.error, ContinueAsNew)):
                return await self._over(execution)  # no timer of its own may be left to the code that starts over
            results = await self._work.results(execution)
            if self.window.cancel is not None:
                return await self._finish(Finish("cancelled"))
            if not results:
                break
            for path, outcome, status in results:
                self._deliver(path, outcome, status, execution)
        if self._work.leave:
            return await self._step()  # what the code has asked for since, the next process begins
        assert self._recorded is not None
        assert self.window.run_id is not None
        self.window.forget_messages()
        self.window.workflow = Live(execution, self._recorded, self.window.run_id, self._said)
        return await self._step(wait=self._steps.wait_for(self._work.calls.values()))

    def _note(self, execution: Execution) -> None:
        """Have the next commit hold what the code has come to since, and begin the steps among it."""
        for taken in execution.taken():
            self._say(taking(*taken))
        new = execution.new()
        if new:
            run_id = self.window.run_id or ""
            self._ask_for(
                [
                    CallState(step_identifier(run_id, path), "requested", step.tool, step.arguments, index=number)
                    for number, (path, step) in enumerate(new)
                ]
            )
            for path, _ in new:
                self._work.begin(path, execution)
        snapshot = self._recorded.snapshot() if self._recorded is not None else None
        if snapshot is not None:
            self._say(snapshot)

    def _ask_for(self, calls: list[CallState]) -> None:
        self._commits.draft.steps += calls
        self._work.calls.update({step_path(self.window.run_id or "", call.call_id): call for call in calls})
        self._say(self._steps.asking(calls))

    def _deliver(self, path: str, outcome: Outcome, status: str, execution: Execution) -> None:
        """Record a step's result, and give it to the code."""
        text = storable(outcome.content)
        self._record_result(path, outcome.outcome, text, status)
        execution.deliver(path, Result(outcome.outcome, text, status))

    def _record_result(self, path: str, outcome: str, text: str, status: str = "") -> None:
        """Make a call's result a message."""
        call, draft = self._work.calls.pop(path), self._commits.draft
        extra = {"outcome": outcome, **({"status": status} if status else {})}
        self._say(Message("tool", text, tool_call_id=call.call_id, name=call.tool, extra=extra))
        executions = draft.calls[call.call_id].executions if call.call_id in draft.calls else call.executions
        draft.calls[call.call_id] = CallState(call.call_id, "done", executions=executions)

    async def _over(self, execution: Execution) -> Step:
        """The code has returned, failed, or wants to begin again."""
        error = execution.error
        if isinstance(error, ContinueAsNew):
            assert self._recorded is not None
            given = from_json(rendered(error.arguments).text)
            self._say(taking(CONTINUED, CONTINUED, {"given": given, "times": self._recorded.times + 1}))
            return await self._step()
        if isinstance(error, UnderstudyError):
            return await self._failed(error)
        if error is not None:
            logger.warning("the workflow of session %s failed", self.window.session_id, exc_info=error)
            return await self._failed(WorkflowError(presentable(f"{type(error).__name__}: {error}")))
        value = execution.value
        text = presentable(value) if isinstance(value, str) else rendered(value).text
        output = text if isinstance(value, str) else from_json(text)
        return await self._finish(Finish("completed", "" if value is None else text, output))

    async def _failed(self, error: UnderstudyError) -> Step:
        error.session_id = error.session_id or self.window.session_id
        spent = isinstance(error, StepFailed) and error.details.get("status") == BUDGET_EXCEEDED
        return await self._finish(Finish(BUDGET_EXCEEDED if spent else "failed", error=error.to_wire()))

    async def _finish(self, finish: Finish) -> Step:
        """The end of the run; every call that is open has a result then."""
        await self._worktree.fence(finish.status)
        draft = self._commits.draft
        await self._work.stop()
        draft.spawns, draft.asks, draft.given_up = [], [], []
        for path in [*self._work.calls]:
            outcome = await self._work.given_up(path)
            self._record_result(path, outcome.outcome, outcome.content)
        return await self._step(wait="idle", finish=await self._worktree.end(finish))

    async def _ask_about(self, diverged: WorkflowDiverged) -> Step:
        """Ask a person what shall become of a run whose code asks for other steps than its log has."""
        call = CallState(
            step_identifier(self.window.run_id or "", f"diverged{self.window.epoch}"), "requested", DIVERGED, "{}"
        )
        self._ask_for([call])
        prompt = f"workflow_diverged: {diverged.message}. {diverged.hint} {FAIL!r} ends the run."
        self._commits.draft.asks.append(Ask(call.call_id, QUESTION, presentable(prompt), (RETRY, FAIL)))
        return await self._step(wait="input")

    async def _answered(self, path: str) -> Step | None:
        """What follows from the answer to the question about diverged code; None: the code is run again."""
        item = self._work.answer(path)
        if item is None:
            return await self._step(wait="input")
        outcome = result_of(self._work.calls[path], item)
        self._work.conclude(path, outcome, item)
        self._record_result(path, outcome.outcome, outcome.content)
        if outcome.outcome == "ok" and outcome.content.strip().lower() != FAIL:
            return None
        message = "its code asks for other steps than its log has, and a person had it end"
        return await self._failed(WorkflowDiverged(message))

    async def _step(self, *, wait: str | None = None, finish: Finish | None = None) -> Step:
        batch = await self._commits.last(wait=wait, finish=finish)
        return Step(batch, leave=self._work.leave)
