"""Events to finished spans, by pure functions.

An event that ends something is projected to that thing's one span. Ids are hashes of what the span stands for, times
come from the event: the same event gives the same span, byte for byte, whoever projects it and how often. No
content (prompts, answers, arguments, error texts) is in a span.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import Link, SpanKind

from understudy.events import (
    ChildRestarted,
    Event,
    InputReceived,
    ModelCallCompleted,
    ModelCallFailed,
    ModelCallReissued,
    RunFinished,
    RunStarted,
    SessionActivated,
    SessionClosed,
    SessionCrashed,
    SessionMigrated,
    SessionMoved,
    SessionQuarantined,
    SessionResumed,
    ShutdownForced,
    ToolFinished,
)
from understudy.identifiers import (
    happening_trace_identifier,
    run_span_identifier,
    span_identifier,
    tool_span_identifier,
)
from understudy.messages import Usage
from understudy.prices import MILLION
from understudy.records import FAILED_STATUSES

from . import conventions as names
from . import session_spans
from .span_building import Attributes, context, elsewhere, make_span, with_attributes

OUTSIDE_RUNS = (SessionQuarantined, SessionResumed, SessionMigrated, SessionClosed, ChildRestarted)
"""Events that have a span also where the session is at no run: in a trace of its own, linked to the last run."""


def spans_of(event: Event, content: Attributes | None = None) -> list[ReadableSpan]:
    """The spans that end with `event`: none for most types, and none for what belongs to no trace.

    Args:
        content: more attributes for the event's span (`content.py`), where that was asked for.
    """
    project = _PROJECTIONS.get(type(event))
    trace_id = trace_of_event(event)
    span = project(replace(event, trace_id=trace_id)) if project is not None and trace_id else None
    if span is None:
        return []
    return [span] if not content else [with_attributes(span, content)]


def trace_of_event(event: Event) -> str:
    """The trace that the event's span is in; empty for none."""
    if not event.trace_id and isinstance(event, OUTSIDE_RUNS):
        return happening_trace_identifier(event.session_id, event.seq)
    return event.trace_id


def chat_span_identifier(session_id: str, request_key: str) -> str:
    """The span of one attempt of a model call."""
    return span_identifier(session_id, request_key, names.CHAT)


def input_span_identifier(session_id: str, call_id: str, asked: int) -> str:
    """The span of a tool call's wait for a person, for the `asked`-th time."""
    return span_identifier(session_id, call_id, str(asked), names.WAIT_FOR_INPUT)


def _usage(wire: list[Any] | None) -> Attributes:
    if not wire:
        return {}
    usage = Usage.from_wire(wire)
    attributes: Attributes = {
        names.USAGE_INPUT_TOKENS: usage.input_tokens,
        names.USAGE_OUTPUT_TOKENS: usage.output_tokens,
    }
    for name, amount in (
        (names.USAGE_CACHED_TOKENS, usage.cached_tokens),
        (names.USAGE_CACHE_WRITE_TOKENS, usage.cache_write_tokens),
        (names.USAGE_REASONING_TOKENS, usage.reasoning_tokens),
        (names.USAGE_COST, usage.cost / MILLION),
    ):
        if amount:
            attributes[name] = amount
    return attributes


def _begun(event: RunStarted) -> ReadableSpan:
    """A run has begun: what a collector has of it before anything in it has ended."""
    return make_span(
        event,
        names.START,
        event.agent,
        span_identifier(event.session_id, event.run_id or "", names.START),
        start=event.at,
        end=event.at,
        attributes={names.RUN_WAITED: event.queued / MILLION},
    )


def _run(event: RunFinished) -> ReadableSpan:
    error = (event.error_code or event.status) if event.status in FAILED_STATUSES else ""
    return make_span(
        event,
        names.INVOKE_AGENT,
        event.agent,
        run_span_identifier(event.session_id, event.run_id or ""),
        start=event.started_at or event.at,
        end=event.at,
        attributes={names.RUN_STATUS: event.status, names.RUN_ROUNDS: event.rounds, **_usage(event.usage)},
        error=error,
        # Another session's span, or the caller's own.
        parent=context(event, event.parent_span_id, remote=True) if event.parent_span_id else None,
        links=tuple(map(elsewhere, event.links or ())),
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
    if event.server_address:
        shared[names.SERVER_ADDRESS] = event.server_address
        if event.server_port:
            shared[names.SERVER_PORT] = event.server_port
    for name, value in (event.parameters or {}).items():
        if name in names.REQUEST_PARAMETERS:
            shared[names.REQUEST_PARAMETERS[name]] = tuple(value) if isinstance(value, list) else value
    if event.retries:
        shared[names.MODEL_RETRIES] = event.retries
    links: tuple[Link, ...] = ()
    span_id = chat_span_identifier(event.session_id, event.request_key)
    if event.attempt > 1:
        shared[names.MODEL_ATTEMPT] = event.attempt
        lost_key = f"{event.request_key.rpartition('/')[0]}/{event.attempt - 1}"
        links = (Link(context(event, chat_span_identifier(event.session_id, lost_key))),)
    if event.late:  # the attempt's own span may have ended as lost
        shared[names.MODEL_LATE] = True
        links = (*links, Link(context(event, span_id)))
        span_id = span_identifier(event.session_id, event.request_key, names.CHAT, "late")
    return make_span(
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
    attributes = _usage(event.usage)
    if names.USAGE_COST in attributes and event.currency:
        attributes[names.COST_CURRENCY] = event.currency
    for name, value in (
        (names.REQUEST_STREAM, event.first_chunk > 0),
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
    return make_span(
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
    return make_span(
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


def _input(event: InputReceived) -> ReadableSpan:
    """A person was waited for: a part of the call that asked, which may have done other things before and after."""
    return make_span(
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
        parent=context(event, tool_span_identifier(event.session_id, event.call_id)),
    )


_PROJECTIONS: dict[type[Event], Callable[[Any], ReadableSpan | None]] = {
    RunStarted: _begun,
    RunFinished: _run,
    ModelCallCompleted: _completed,
    ModelCallFailed: _failed,
    ModelCallReissued: _reissued,
    ToolFinished: _tool,
    InputReceived: _input,
    SessionCrashed: session_spans.crashed,
    SessionActivated: session_spans.activated,
    SessionMoved: session_spans.moved,
    SessionQuarantined: session_spans.quarantined,
    SessionResumed: session_spans.resumed,
    SessionMigrated: session_spans.migrated,
    SessionClosed: session_spans.closed,
    ShutdownForced: session_spans.shutdown_forced,
    ChildRestarted: session_spans.child_restarted,
}
