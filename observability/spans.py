"""Events to finished spans, by pure functions.

An event that ends something is projected to that thing's one span. Ids are hashes of what the span stands for, times
come from the event: the same event gives the same span, byte for byte, whoever projects it and how often. No
content (prompts, answers, arguments, error texts) is in a span.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from understudy.events import (
    Event,
    InputReceived,
    ModelCallCompleted,
    ModelCallFailed,
    ModelCallReissued,
    RunFinished,
    SessionActivated,
    SessionCrashed,
    SessionMoved,
    ToolFinished,
)
from understudy.identifiers import run_span_identifier, span_identifier, tool_span_identifier
from understudy.records import FAILED_STATUSES

from . import conventions as names

Attributes = dict[str, Any]

_SCOPE = InstrumentationScope(names.SCOPE_NAME)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


@cache
def process_resource() -> Resource:
    """Who emits the spans: `understudy`, and what OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say."""
    return Resource({"service.name": names.SERVICE_NAME}).merge(OTELResourceDetector().detect())


def spans_of(event: Event, content: Attributes | None = None) -> list[ReadableSpan]:
    """The spans that end with `event`: none for most types, and none for what belongs to no trace.

    Args:
        content: more attributes for the event's span (`content.py`), where that was asked for.
    """
    project = _PROJECTIONS.get(type(event))
    span = project(event) if project is not None and event.trace_id else None
    if span is None:
        return []
    return [span] if not content else [_with(span, content)]


def _with(span: ReadableSpan, attributes: Attributes) -> ReadableSpan:
    return ReadableSpan(
        name=span.name, context=span.context, parent=span.parent, resource=span.resource,
        attributes={**(span.attributes or {}), **attributes}, links=span.links, kind=span.kind, status=span.status,
        start_time=span.start_time, end_time=span.end_time, instrumentation_scope=span.instrumentation_scope,
    )  # fmt: skip


def chat_span_identifier(session_id: str, request_key: str) -> str:
    """The span of one attempt of a model call."""
    return span_identifier(session_id, request_key, names.CHAT)


def crash_span_identifier(session_id: str, epoch: int) -> str:
    """The span of the crash that ended activation `epoch`."""
    return span_identifier(session_id, str(epoch), names.CRASH)


def recover_span_identifier(session_id: str, epoch: int) -> str:
    """The span of what went by until activation `epoch` took over from one that had crashed."""
    return span_identifier(session_id, str(epoch), names.RECOVER)


def input_span_identifier(session_id: str, call_id: str, asked: int) -> str:
    """The span of a tool call's wait for a person, for the `asked`-th time."""
    return span_identifier(session_id, call_id, str(asked), names.WAIT_FOR_INPUT)


def _context(event: Event, span_id: str, *, remote: bool = False) -> SpanContext:
    return SpanContext(int(event.trace_id, 16), int(span_id, 16), is_remote=remote, trace_flags=_SAMPLED)


def _elsewhere(link: str) -> Link:
    """A `TRACE-SPAN` that may be of another trace."""
    trace_id, _, span_id = link.partition("-")
    context = SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=_SAMPLED)
    return Link(context)


def _span(
    event: Event,
    operation: str,
    subject: str,
    span_id: str,
    *,
    start: int,
    end: int,
    attributes: Attributes,
    error: str = "",
    kind: SpanKind = SpanKind.INTERNAL,
    parent: SpanContext | None = None,
    links: tuple[Link, ...] = (),
) -> ReadableSpan:
    """Build a span; times are microseconds. Without a `parent` it is below its run's span."""
    shared: Attributes = {
        names.AGENT_NAME: event.agent,
        names.CONVERSATION_ID: event.session_id,
        names.SESSION_ROOT_ID: event.root_id or event.session_id,
        names.EPOCH: event.epoch,
    }
    if operation in names.GENAI_OPERATIONS:
        shared[names.OPERATION_NAME] = operation
    if event.parent_id:
        shared[names.SESSION_PARENT_ID] = event.parent_id
    if event.run_id:
        shared[names.RUN_ID] = event.run_id
        if parent is None and operation != names.INVOKE_AGENT:
            parent = _context(event, run_span_identifier(event.session_id, event.run_id))
    if error:
        attributes[names.ERROR_TYPE] = error
    return ReadableSpan(
        name=f"{operation} {subject}".rstrip(),
        context=_context(event, span_id),
        parent=parent,
        resource=process_resource(),
        attributes=shared | attributes,
        links=links,
        kind=kind,
        status=Status(StatusCode.ERROR) if error else Status(StatusCode.UNSET),
        start_time=start * 1000,
        end_time=max(start, end) * 1000,
        instrumentation_scope=_SCOPE,
    )


def _usage(usage: list[Any] | None) -> Attributes:
    if not usage:
        return {}
    keys = (
        names.USAGE_INPUT_TOKENS,
        names.USAGE_OUTPUT_TOKENS,
        names.USAGE_CACHED_TOKENS,
        names.USAGE_REASONING_TOKENS,
    )
    return {key: tokens for key, tokens in zip(keys, usage, strict=False) if tokens or key in keys[:2]}


def _run(event: RunFinished) -> ReadableSpan:
    error = (event.error_code or event.status) if event.status in FAILED_STATUSES else ""
    return _span(
        event,
        names.INVOKE_AGENT,
        event.agent,
        run_span_identifier(event.session_id, event.run_id or ""),
        start=event.started_at or event.at,
        end=event.at,
        attributes={names.RUN_STATUS: event.status, names.RUN_ROUNDS: event.rounds, **_usage(event.usage)},
        error=error,
        # Another session's span, or the caller's own.
        parent=_context(event, event.parent_span_id, remote=True) if event.parent_span_id else None,
        links=tuple(map(_elsewhere, event.links or ())),
    )


def _times(event: ModelCallCompleted | ModelCallFailed | ToolFinished) -> tuple[int, int]:
    start = event.started_at or event.at - event.duration
    return start, start + event.duration


def _chat(event: ModelCallCompleted | ModelCallFailed, attributes: Attributes, error: str = "") -> ReadableSpan:
    start, end = _times(event)
    shared: Attributes = {
        names.PROVIDER_NAME: event.provider or names.PROVIDER,
        names.REQUEST_MODEL: event.model,
        names.ROUND: event.round,
    }
    if event.retries:
        shared[names.MODEL_RETRIES] = event.retries
    links: tuple[Link, ...] = ()
    span_id = chat_span_identifier(event.session_id, event.request_key)
    if event.attempt > 1:
        shared[names.MODEL_ATTEMPT] = event.attempt
        lost_key = f"{event.request_key.rpartition('/')[0]}/{event.attempt - 1}"
        links = (Link(_context(event, chat_span_identifier(event.session_id, lost_key))),)
    if event.late:  # the attempt's own span may have ended as lost
        shared[names.MODEL_LATE] = True
        links = (*links, Link(_context(event, span_id)))
        span_id = span_identifier(event.session_id, event.request_key, names.CHAT, "late")
    return _span(
        event,
        names.CHAT,
        event.model,
        span_id,
        start=start,
        end=end,
        attributes=shared | attributes,
        error=error,
        kind=SpanKind.CLIENT,
        links=links,
    )


def _completed(event: ModelCallCompleted) -> ReadableSpan:
    attributes: Attributes = {names.REQUEST_STREAM: event.first_chunk > 0, **_usage(event.usage)}
    for name, value in (
        (names.RESPONSE_MODEL, event.response_model),
        (names.RESPONSE_ID, event.response_id),
        (names.RESPONSE_FINISH_REASONS, (event.finish_reason,) if event.finish_reason else ()),
        (names.RESPONSE_FIRST_CHUNK, event.first_chunk / 1_000_000),
        (names.MODEL_REDONE, event.redone),
    ):
        if value:
            attributes[name] = value
    return _chat(event, attributes)


def _failed(event: ModelCallFailed) -> ReadableSpan:
    return _chat(event, _usage(event.usage), event.error_code or "error")


def _reissued(event: ModelCallReissued) -> ReadableSpan:
    """The attempt that was lost with its gateway; nobody else is left to end its span."""
    return _span(
        event,
        names.CHAT,
        event.model,
        chat_span_identifier(event.session_id, event.lost_key),
        start=event.started_at or event.at,
        end=event.at,
        attributes={
            names.PROVIDER_NAME: names.PROVIDER,
            names.REQUEST_MODEL: event.model,
            names.ROUND: event.round,
            names.MODEL_ATTEMPT: max(1, event.attempt - 1),
        },
        error="gateway_lost",
        kind=SpanKind.CLIENT,
    )


def _tool(event: ToolFinished) -> ReadableSpan:
    start, end = _times(event)
    return _span(
        event,
        names.EXECUTE_TOOL,
        event.tool,
        tool_span_identifier(event.session_id, event.call_id),
        start=start,
        end=end,
        attributes={
            names.TOOL_NAME: event.tool,
            names.TOOL_TYPE: "function",
            names.TOOL_CALL_ID: event.call_id,
            names.TOOL_OUTCOME: event.outcome,
            names.TOOL_EXECUTIONS: event.executions,
            names.ROUND: event.round,
        },
        error="" if event.outcome == "ok" else event.outcome,
    )


def _crashed(event: SessionCrashed) -> ReadableSpan:
    return _span(
        event,
        names.CRASH,
        event.agent,
        crash_span_identifier(event.session_id, event.epoch),
        start=event.at,
        end=event.at,
        attributes={
            names.CRASH_PID: event.pid,
            names.CRASH_WAITING: event.waiting,
            names.CRASH_PROGRESS: event.progress,
            names.CRASH_DECISION: event.decision,
        },
        error=event.cause or "process_died",
    )


def _activated(event: SessionActivated) -> ReadableSpan | None:
    if event.cause != "resume":
        return None
    crash = _context(event, crash_span_identifier(event.session_id, event.epoch - 1))
    return _span(
        event,
        names.RECOVER,
        event.agent,
        recover_span_identifier(event.session_id, event.epoch),
        start=event.at - event.down,
        end=event.at,
        attributes={names.NODE_ID: event.node_id, names.PID: event.pid},
        links=(Link(crash),),
    )


def _moved(event: SessionMoved) -> ReadableSpan:
    return _span(
        event,
        names.MOVE,
        event.agent,
        span_identifier(event.session_id, str(event.seq), names.MOVE),
        start=event.at,
        end=event.at,
        attributes={names.MOVE_FROM: event.from_node, names.NODE_ID: event.to_node, names.MOVE_FORCED: event.forced},
    )


def _input(event: InputReceived) -> ReadableSpan:
    """A person was waited for: a part of the call that asked, which may have done other things before and after."""
    return _span(
        event,
        names.WAIT_FOR_INPUT,
        event.kind,
        input_span_identifier(event.session_id, event.call_id, event.asked),
        start=event.at - event.waited,
        end=event.at,
        attributes={
            names.TOOL_CALL_ID: event.call_id,
            names.INPUT_KIND: event.kind,
            names.INPUT_DECISION: event.decision,
        },
        parent=_context(event, tool_span_identifier(event.session_id, event.call_id)),
    )


_PROJECTIONS: dict[type[Event], Callable[[Any], ReadableSpan | None]] = {
    RunFinished: _run,
    ModelCallCompleted: _completed,
    ModelCallFailed: _failed,
    ModelCallReissued: _reissued,
    ToolFinished: _tool,
    SessionCrashed: _crashed,
    SessionActivated: _activated,
    SessionMoved: _moved,
    InputReceived: _input,
}
