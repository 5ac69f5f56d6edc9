"""One tool call in a process of its own, which is no session actor's (`@tool(num_gpus=1)`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from understudy.identifiers import tool_span_identifier
from understudy.logs import about
from understudy.tool_tasks import TaskResult, ToolTask

from .execution import Outcome, bind, execute
from .hooks import arguments_of
from .tools import ToolContext, load
from .web_rules import WebRules


async def run_task(task: ToolTask, blob: bytes | None, unpickle: Callable[[bytes], Any] | None) -> TaskResult:
    """Execute a tool call; whatever goes wrong is in the result.

    Args:
        blob: the tool's code, if it came by value.
        unpickle: restores it.
    """
    try:
        loaded = load(task.tool, lambda _digest: blob or b"", unpickle)
    except Exception as error:
        return TaskResult("error", str(error))
    context = ToolContext(
        session_id=task.session_id, run_id=task.run_id, round=task.round, call_id=task.call_id, epoch=task.epoch,
        agent=task.agent, workspace=task.workspace, traceparent=task.traceparent,
        arguments=arguments_of(task.arguments) or {},
        web=msgspec.convert(task.web, WebRules) if task.web is not None else None,
    )  # fmt: skip
    keywords = bind(loaded, task.arguments, context)
    if isinstance(keywords, Outcome):
        return _result(keywords)
    span_id = tool_span_identifier(task.session_id, task.call_id)
    with about(session_id=task.session_id, run_id=task.run_id, span_id=span_id):
        outcome = await execute(loaded, keywords, task.timeout)
    assert outcome is not None  # it was given no time before which it had to begin
    return _result(outcome)


def _result(outcome: Outcome) -> TaskResult:
    return TaskResult(
        outcome.outcome, outcome.content, outcome.duration, outcome.started_at, list(outcome.attachments)
    )  # fmt: skip
