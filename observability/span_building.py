"""How a span is made of an event: whose it is, where it belongs, and who sends it."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import Any

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from understudy.events import Event
from understudy.identifiers import run_span_identifier

from . import conventions as names

Attributes = dict[str, Any]

SAMPLED = TraceFlags(TraceFlags.SAMPLED)


@cache
def process_resource() -> Resource:
    """Who emits the spans: `understudy`, and what OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say."""
    own = Resource({"service.name": names.SERVICE_NAME, "service.version": version("understudy")})
    return own.merge(OTELResourceDetector().detect())


@cache
def scope() -> InstrumentationScope:
    """What makes the spans: this package, in its version, by the conventions in theirs."""
    return InstrumentationScope(names.SCOPE_NAME, version("understudy"), names.SCHEMA_URL)


def context(event: Event, span_id: str, *, remote: bool = False) -> SpanContext:
    """A span in the event's trace."""
    return SpanContext(int(event.trace_id, 16), int(span_id, 16), is_remote=remote, trace_flags=SAMPLED)


def elsewhere(link: str) -> Link:
    """A `TRACE-SPAN` that may be of another trace."""
    trace_id, _, span_id = link.partition("-")
    return Link(SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=SAMPLED))


def make_span(
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
    """Build a span; times are microseconds. Without a `parent` it is below its run's span, if it is of a run."""
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
            parent = context(event, run_span_identifier(event.session_id, event.run_id))
    if error:
        attributes[names.ERROR_TYPE] = error
    return ReadableSpan(
        name=f"{operation} {subject}".rstrip(),
        context=context(event, span_id),
        parent=parent,
        resource=process_resource(),
        attributes=shared | attributes,
        links=links,
        kind=kind,
        status=Status(StatusCode.ERROR) if error else Status(StatusCode.UNSET),
        start_time=start * 1000,
        end_time=max(start, end) * 1000,
        instrumentation_scope=scope(),
    )


def with_attributes(span: ReadableSpan, attributes: Attributes) -> ReadableSpan:
    """The same span with more attributes."""
    return ReadableSpan(
        name=span.name, context=span.context, parent=span.parent, resource=span.resource,
        attributes={**(span.attributes or {}), **attributes}, links=span.links, kind=span.kind, status=span.status,
        start_time=span.start_time, end_time=span.end_time, instrumentation_scope=span.instrumentation_scope,
    )  # fmt: skip
