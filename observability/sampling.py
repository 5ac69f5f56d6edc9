"""Which traces are exported: OpenTelemetry's samplers, asked of a trace id and of the caller's decision alone.

So all spans of a trace are in or out as one, whatever process exports them, and whenever. A standard sampler's answer
depends on nothing else (OpenTelemetry specification, Trace SDK, "Sampling").
"""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.sdk.trace import sampling
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

from understudy.events import Event
from understudy.telemetry import sampler_of

from .spans import trace_of_event

_SPAN = 1
"""Any span id: a caller's context is valid with one, and no sampler looks at it."""


def span_sampler(variables: Mapping[str, str]) -> sampling.Sampler:
    """The sampler that `variables` ask for."""
    name, ratio = sampler_of(variables)
    own: sampling.Sampler
    match name.removeprefix("parentbased_"):
        case "always_off":
            own = sampling.ALWAYS_OFF
        case "traceidratio":
            own = sampling.TraceIdRatioBased(ratio)
        case _:
            own = sampling.ALWAYS_ON
    return sampling.ParentBased(own) if name.startswith("parentbased_") else own


def is_sampled(sampler: sampling.Sampler, event: Event) -> bool:
    """Whether the spans of an event are exported."""
    trace_id = int(trace_of_event(event) or "0", 16)
    decision = sampler.should_sample(_caller(trace_id, event.sampled), trace_id, "").decision
    return decision is sampling.Decision.RECORD_AND_SAMPLE


def _caller(trace_id: int, sampled: bool | None) -> Context | None:
    if sampled is None:
        return None
    flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
    return set_span_in_context(NonRecordingSpan(SpanContext(trace_id, _SPAN, is_remote=True, trace_flags=flags)))
