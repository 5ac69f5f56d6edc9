"""A trace as a list: the spans of a run and of all below it, the open ones included, from committed events alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode

from understudy.events import (
    ChildSpawned,
    Event,
    InputRequested,
    ModelCallReissued,
    ModelCallStarted,
    RunAccepted,
    RunFinished,
    RunStarted,
    SessionActivated,
    SessionCrashed,
    TimerSet,
    ToolInDoubt,
    ToolStarted,
)
from understudy.identifiers import run_span_identifier, tool_span_identifier
from understudy.wakeups import WAIT

from . import conventions as names
from .session_spans import recover_span_identifier
from .spans import chat_span_identifier, input_span_identifier, spans_of


@dataclass(frozen=True)
class TraceSpan:
    """One span of a trace.

    Attributes:
        parent_span_id: empty for none; a span of the caller's is in no list of ours.
        operation: the first word of its name (docs/traces.md): `invoke_agent`, `chat`, `crash`, ….
        start, end: microseconds since 1970 UTC; `end` is 0 while it goes on.
        status: `ok`, `error` or `open`.
        error: the `error.type` of an error.
        attributes: as exported (docs/traces.md); of an open span those that are known.
        links: ids of the spans that it goes on from: a lost attempt, a crash, an earlier run.
    """

    trace_id: str
    span_id: str
    parent_span_id: str
    name: str
    operation: str
    session_id: str
    agent: str
    run_id: str
    start: int
    end: int
    status: str
    error: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)
    links: tuple[str, ...] = ()


def trace_of(events: Iterable[Event]) -> list[TraceSpan]:
    """The spans of one trace, by start; the events may come from many sessions, each session's in its order."""
    ended: dict[str, TraceSpan] = {}
    going_on: dict[str, TraceSpan] = {}
    for event in events:
        # That a run has begun is shown by its own span here, which is drawn open.
        for span in () if isinstance(event, RunStarted) else spans_of(event):
            ended[_identifier(span)] = _ended(event, span)
        begin = _BEGINNINGS.get(type(event))
        for begun in begin(event) if begin is not None and event.trace_id else ():
            known = going_on.get(begun.span_id, begun)
            # A run lasts from its start, whatever it waited before; a tool that runs again is the same call.
            start = begun.start if begun.operation == names.INVOKE_AGENT else known.start
            parent = known.parent_span_id if isinstance(event, RunStarted) else begun.parent_span_id
            going_on[begun.span_id] = replace(begun, start=start, parent_span_id=parent)
        if isinstance(event, SessionActivated):
            going_on.pop(recover_span_identifier(event.session_id, event.epoch), None)
        if isinstance(event, RunFinished):
            going_on = {key: span for key, span in going_on.items() if not _is_of(span, event)}
    spans = [*ended.values(), *(span for key, span in going_on.items() if key not in ended)]
    starts = {span.span_id: span.start for span in spans}

    def order(span: TraceSpan) -> tuple[int, bool, int, str]:
        # A recovery is timed from the moment of the death, which is a little before its crash is committed.
        recovers = span.operation == names.RECOVER
        start = max([span.start, *(starts.get(link, 0) for link in span.links if recovers)])
        return start, recovers, span.end or span.start, span.span_id

    return sorted(spans, key=order)


def _is_of(span: TraceSpan, event: Event) -> bool:
    return span.session_id == event.session_id and span.run_id == (event.run_id or "")


def _identifier(span: ReadableSpan) -> str:
    return f"{span.context.span_id:016x}" if span.context is not None else ""


def _ended(event: Event, span: ReadableSpan) -> TraceSpan:
    attributes = dict(span.attributes or {})
    failed = span.status.status_code is StatusCode.ERROR
    return TraceSpan(
        trace_id=event.trace_id,
        span_id=_identifier(span),
        parent_span_id=f"{span.parent.span_id:016x}" if span.parent is not None else "",
        name=span.name,
        operation=span.name.partition(" ")[0],
        session_id=event.session_id,
        agent=event.agent,
        run_id=event.run_id or "",
        start=(span.start_time or 0) // 1000,
        end=(span.end_time or 0) // 1000,
        status="error" if failed else "ok",
        error=str(attributes.get(names.ERROR_TYPE, "")) if failed else "",
        attributes=attributes,
        links=tuple(f"{link.context.span_id:016x}" for link in span.links),
    )


def _open(
    event: Event, operation: str, subject: str, span_id: str, attributes: dict[str, Any], *, parent: str | None = None
) -> TraceSpan:  # fmt: skip
    below_run = run_span_identifier(event.session_id, event.run_id or "")
    return TraceSpan(
        trace_id=event.trace_id,
        span_id=span_id,
        parent_span_id=below_run if parent is None else parent,
        name=f"{operation} {subject}".rstrip(),
        operation=operation,
        session_id=event.session_id,
        agent=event.agent,
        run_id=event.run_id or "",
        start=event.at,
        end=0,
        status="open",
        attributes={names.AGENT_NAME: event.agent, names.CONVERSATION_ID: event.session_id} | attributes,
    )


Begun = tuple[TraceSpan, ...]


def _run(event: RunAccepted) -> Begun:
    span_id = run_span_identifier(event.session_id, event.run_id or "")
    waits = {names.RUN_STATUS: "queued"}
    return (_open(event, names.INVOKE_AGENT, event.agent, span_id, waits, parent=event.parent_span_id),)


def _begun(event: RunStarted) -> Begun:
    span_id = run_span_identifier(event.session_id, event.run_id or "")
    return (_open(event, names.INVOKE_AGENT, event.agent, span_id, {names.RUN_STATUS: "running"}, parent=""),)


def _call(event: ModelCallStarted | ModelCallReissued) -> Begun:
    span_id = chat_span_identifier(event.session_id, event.request_key)
    request = {names.REQUEST_MODEL: event.model, names.MODEL_ATTEMPT: event.attempt}
    return (_open(event, names.CHAT, event.model, span_id, request),)


def _tool(event: Event, call_id: str, tool: str) -> Begun:
    span_id = tool_span_identifier(event.session_id, call_id)
    called = {names.TOOL_NAME: tool, names.TOOL_CALL_ID: call_id}
    return (_open(event, names.EXECUTE_TOOL, tool, span_id, called),)


def _timer(event: TimerSet) -> Begun:
    return _tool(event, event.name, WAIT) if event.kind == "wait" else ()


def _question(event: InputRequested) -> Begun:
    span_id = input_span_identifier(event.session_id, event.call_id, event.asked)
    parent = tool_span_identifier(event.session_id, event.call_id)
    asks = _open(event, names.WAIT_FOR_INPUT, event.kind, span_id, {names.INPUT_KIND: event.kind}, parent=parent)
    return (*(_tool(event, event.call_id, "request_user_input") if event.kind == "question" else ()), asks)


def _down(event: SessionCrashed) -> Begun:
    return (_open(event, names.RECOVER, event.agent, recover_span_identifier(event.session_id, event.epoch + 1), {}),)


_BEGINNINGS: dict[type[Event], Callable[[Any], Begun]] = {
    RunAccepted: _run,
    RunStarted: _begun,
    ModelCallStarted: _call,
    ModelCallReissued: _call,
    ToolStarted: lambda event: _tool(event, event.call_id, event.tool),
    ToolInDoubt: lambda event: _tool(event, event.call_id, event.tool),
    ChildSpawned: lambda event: _tool(event, event.call_id, "spawn_agent"),
    TimerSet: _timer,
    InputRequested: _question,
    SessionCrashed: _down,
}
"""What is shown of something that has not ended. A tool that is `rerun` has no beginning in the log."""
