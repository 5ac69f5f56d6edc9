"""Tool calls that this frame does not execute itself: its node service has them executed (`@tool(num_gpus=1)`)."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from msgspec.structs import replace

from understudy.errors import UnderstudyError
from understudy.identifiers import new_identifier
from understudy.ports import Node
from understudy.records import CallState
from understudy.tool_tasks import TaskResult, ToolTask

from .commits import Patience
from .execution import Outcome
from .reports import CallReports
from .tools import LoadedTool, ToolContext
from .window import Window

MOST_LOST = 3
"""So often a call that may be repeated is begun in one activation, if the processes die that execute it."""

TASK_PROCESS = "the tool's own process"
"""Who dies during a call that is executed elsewhere; with its node service it dies as well."""

LOST = f"its process died {MOST_LOST} times; it was not begun again"

END_SECONDS = 2.0
"""How long a frame waits for the node service to end what nobody wants any more; the service finds out by itself."""


def is_task(spec: dict[str, Any]) -> bool:
    """Whether a tool's calls are executed elsewhere."""
    return "task" in spec


def unloaded(spec: dict[str, Any]) -> LoadedTool:
    """A tool that is not loaded here, to see whether arguments fit its schema."""
    return LoadedTool(spec["name"], _elsewhere, False, spec["parameters"])


def _elsewhere() -> None:
    raise AssertionError("it is executed elsewhere")


class TaskCalls:
    """Has the node service execute calls of an activation's window."""

    def __init__(self, window: Window, node: Node, frame_id: str, patience: Patience) -> None:
        self._window = window
        self._node = node
        self._frame_id = frame_id
        self._patience = patience

    async def service(self) -> str:
        """The name of the service that there is: what one has begun, the next one knows nothing of."""
        with self._patience.waiting():
            return await self._node.task_service(self._frame_id)

    async def run(
        self, spec: dict[str, Any], context: ToolContext, arguments: str, service: str, reports: CallReports
    ) -> Outcome | None:
        """Begin a call, unless it is under way or has its result; how it ended. None: its process is gone, or the
        service is, and nobody knows.

        Args:
            service: that may begin it; another one must not.
            reports: take what the tool reports meanwhile.
        """
        return await self._ask(self._task(spec, context, arguments, new_identifier()), service, reports)

    async def attach(self, spec: dict[str, Any], context: ToolContext, reports: CallReports) -> Outcome | None:
        """How a call ended, or will end, that an earlier activation has begun; None if nobody knows.

        Args:
            reports: take what the tool has reported that is not committed, and what it reports meanwhile.
        """
        return await self._ask(self._task(spec, context, "", ""), "", reports)

    async def _ask(self, task: ToolTask, service: str, reports: CallReports) -> Outcome | None:
        activation = self._window.activation
        after: int | None = None
        try:
            with self._patience.waiting():  # for resources, however long; the process looks after the call's own time
                while found := await self._node.task(self._frame_id, activation, task, service, after):
                    for report in found.reports:
                        reports.pass_on(report)
                    if found.result is not None:
                        return _outcome(found.result)
                    after, task = found.last, replace(task, attempt="", arguments="")  # it has begun
                return None
        except asyncio.CancelledError:
            await self.end(task.call_id)
            raise

    async def end(self, call_id: str) -> None:
        """Have a call ended that nobody wants any more."""
        with contextlib.suppress(TimeoutError, UnderstudyError):
            ending = self._node.end_task(self._frame_id, self._window.activation, call_id)
            await asyncio.wait_for(ending, END_SECONDS)

    def _task(self, spec: dict[str, Any], context: ToolContext, arguments: str, attempt: str) -> ToolTask:
        return ToolTask(
            session_id=context.session_id, run_id=context.run_id, round=context.round, call_id=context.call_id,
            epoch=context.epoch, agent=context.agent, attempt=attempt, tool=spec, arguments=arguments,
            timeout=spec["timeout"] or self._window.spec["tool_timeout"],
            placement=self._window.spec.get("placement", ""), workspace=context.workspace,
            traceparent=context.traceparent, web=self._window.spec.get("web"),
        )  # fmt: skip


def _outcome(found: TaskResult) -> Outcome:
    return Outcome(
        found.outcome, found.content, found.duration, found.started_at, attachments=tuple(found.attachments)
    )  # fmt: skip


def begun(call: CallState, at: int) -> CallState:
    """A call that was begun at a time, and of which nobody knows more."""
    return CallState(
        call.call_id, "started", tool=call.tool, arguments=call.arguments, provider_id=call.provider_id,
        index=call.index, epoch=call.epoch, executions=call.executions + 1, updated_at=at, edited=call.edited,
    )  # fmt: skip
