"""One tool call in a process of its own, which is no session actor's (`@tool(num_gpus=1)`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from understudy.identifiers import tool_span_identifier
from understudy.logs import about
from understudy.records import CallState
from understudy.tool_tasks import Reporting, TaskNews, TaskResult, ToolTask

from .execution import Outcome, bind, execute
from .hooks import arguments_of
from .reports import Reports
from .tools import LoadedTool, ToolContext, load
from .web_rules import WebRules


def news_of_task(task: ToolTask, blob: bytes | None, unpickle: Callable[[bytes], Any] | None) -> Iterator[TaskNews]:
    """`run_task` in a process that does nothing else: what is reported as it comes, the result at last. The event loop
    turns only while the caller waits for what is next."""
    with asyncio.Runner() as runner:
        news = asyncio.Queue[TaskNews | None]()

        async def begin() -> asyncio.Task[TaskResult]:
            work = asyncio.create_task(run_task(task, blob, unpickle, lambda said: news.put_nowait(TaskNews(said))))
            work.add_done_callback(lambda _: news.put_nowait(None))
            return work

        work = runner.run(begin())
        while (found := runner.run(news.get())) is not None:
            yield found
        yield TaskNews(result=work.result())


async def run_task(
    task: ToolTask, blob: bytes | None, unpickle: Callable[[bytes], Any] | None,
    reported: Reporting,
) -> TaskResult:  # fmt: skip
    """Execute a tool call; whatever goes wrong is in the result.

    Args:
        blob: the tool's code, if it came by value.
        unpickle: restores it.
        reported: is given what the tool reports, in order: of its progress what may be committed, of its own events
            all.
    """
    try:
        loaded = load(task.tool, lambda _digest: blob or b"", unpickle)
    except Exception as error:
        return TaskResult("error", str(error))
    reports = Reports()
    context = ToolContext(
        session_id=task.session_id, run_id=task.run_id, round=task.round, call_id=task.call_id, epoch=task.epoch,
        agent=task.agent, workspace=task.workspace, traceparent=task.traceparent,
        arguments=arguments_of(task.arguments) or {},
        web=msgspec.convert(task.web, WebRules) if task.web is not None else None,
        _reporting=reports.of(CallState(task.call_id, "started", tool=loaded.name)),
    )  # fmt: skip
    keywords = bind(loaded, task.arguments, context)
    if isinstance(keywords, Outcome):
        return _result(keywords)
    span_id = tool_span_identifier(task.session_id, task.call_id)
    with about(session_id=task.session_id, run_id=task.run_id, span_id=span_id):
        outcome = await _executed(loaded, keywords, task.timeout, reports, reported)
    if last := reports.end(task.call_id):
        reported(last)
    return _result(outcome)


async def _executed(
    tool: LoadedTool, keywords: dict[str, Any], timeout: float, reports: Reports,
    reported: Reporting,
) -> Outcome:  # fmt: skip
    """Execute it, and pass on meanwhile what may be committed by then."""
    work = asyncio.create_task(execute(tool, keywords, timeout))
    try:
        while not work.done():
            waited_for: set[asyncio.Future[Any]] = {work, reports.due()}
            await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
            if found := reports.take():
                reported(found)
    except asyncio.CancelledError:
        work.cancel()
        await asyncio.wait({work})
        raise
    outcome = work.result()
    assert outcome is not None  # it was given no time before which it had to begin
    return outcome


def _result(outcome: Outcome) -> TaskResult:
    return TaskResult(
        outcome.outcome, outcome.content, outcome.duration, outcome.started_at, list(outcome.attachments)
    )  # fmt: skip
