"""Events to spans: one final span per ended thing, with the same bytes whoever projects it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from understudy.events import (
    EVENT_TYPES,
    Event,
    ModelCallCompleted,
    ModelCallFailed,
    ModelCallReissued,
    RunAccepted,
    RunFinished,
    RunStarted,
    SessionActivated,
    SessionCrashed,
    SessionCreated,
    ToolFinished,
    ToolStarted,
)
from understudy.identifiers import run_span_identifier, span_identifier, tool_span_identifier
from understudy.observability.spans import crash_span_identifier, spans_of

AT = 1_750_000_000_000_000
TRACE = "0af7651916cd43dd8448eb211c80319c"
ENVELOPE: dict[str, Any] = {
    "session_id": "s",
    "run_id": "r",
    "round": 2,
    "epoch": 4,
    "trace_id": TRACE,
    "agent": "lead",
    "parent_id": "p",
    "root_id": "top",
    "at": AT,
}
COMPLETED = ModelCallCompleted(
    **ENVELOPE,
    request_key="s/r/2/1",
    model="gpt-4o-mini",
    response_model="gpt-4o-mini-2024",
    response_id="resp-1",
    provider="openai",
    finish_reason="stop",
    usage=[100, 20, 40, 0, False],
    started_at=AT - 900_000,
    duration=800_000,
    first_chunk=250_000,
    retries=1,
)
FAILED = ModelCallFailed(
    **ENVELOPE, request_key="s/r/2/2", attempt=2, model="m", error_code="model_refused", error_message="private text"
)
REISSUED = ModelCallReissued(
    **ENVELOPE, request_key="s/r/2/2", lost_key="s/r/2/1", model="m", attempt=2, started_at=AT - 5_000_000
)
TOOL = ToolFinished(
    **ENVELOPE,
    call_id="r/2/0",
    tool="lookup",
    outcome="timeout",
    started_at=AT - 70,
    duration=60,
    error_message="private",
)
CRASHED = SessionCrashed(**ENVELOPE, pid=17, waiting=True)
RESUMED = SessionActivated(**{**ENVELOPE, "epoch": 5}, cause="resume", down=30_000, pid=18, node_id="n")
FINISHED = RunFinished(
    **ENVELOPE,
    started_at=AT - 9_000_000,
    rounds=3,
    usage=[300, 60, 0, 0, False],
    parent_span_id="00f067aa0ba902b7",
)
ENDINGS: list[Event] = [COMPLETED, FAILED, REISSUED, TOOL, CRASHED, RESUMED, FINISHED]


def only_span(event: Event) -> ReadableSpan:
    (span,) = spans_of(event)
    return span


def span_id(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"{span.context.span_id:016x}"


def parent_id(span: ReadableSpan) -> str:
    return f"{span.parent.span_id:016x}" if span.parent else ""


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def payload(events: list[Event]) -> bytes:
    data: bytes = encode_spans([span for event in events for span in spans_of(event)]).SerializeToString()
    return data


def test_the_same_events_give_the_same_bytes_in_any_process() -> None:
    """A projection done again elsewhere, from stored events, is byte-identical: receivers can drop the repeat."""
    wire = [event.to_wire() for event in ENDINGS]
    script = (
        "import sys, json\n"
        "from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans\n"
        "from understudy.events import Event\n"
        "from understudy.observability.spans import spans_of\n"
        "events = [Event.from_wire(data) for data in json.loads(sys.argv[1])]\n"
        "spans = [span for event in events for span in spans_of(event)]\n"
        "sys.stdout.buffer.write(encode_spans(spans).SerializeToString())\n"
    )
    elsewhere = subprocess.run([sys.executable, "-c", script, json.dumps(wire)], check=True, capture_output=True)
    assert payload(ENDINGS) == payload(ENDINGS) == elsewhere.stdout


def test_every_span_says_whose_it_is() -> None:
    """Trace, session, parent, root and run are on all spans, and all have an end."""
    for event in ENDINGS:
        span = only_span(event)
        assert span.context is not None
        assert f"{span.context.trace_id:032x}" == TRACE
        assert span.start_time is not None
        assert span.end_time is not None
        assert 0 < span.start_time <= span.end_time
        assert (
            attributes(span).items()
            >= {
                "gen_ai.conversation.id": "s",
                "gen_ai.agent.name": "lead",
                "understudy.session.parent_id": "p",
                "understudy.session.root_id": "top",
                "understudy.run.id": "r",
            }.items()
        )


def test_span_ids_differ_between_things() -> None:
    """No two of the spans of a run share an id."""
    other_attempt = ModelCallCompleted(**ENVELOPE, request_key="s/r/2/3", attempt=3)
    events = [COMPLETED, FAILED, TOOL, CRASHED, RESUMED, FINISHED, other_attempt]
    assert len({span_id(only_span(event)) for event in events}) == len(events)


def test_a_run_is_an_invoke_agent_span_below_the_callers() -> None:
    """It spans the run, carries totals and status, and hangs under the caller's or the parent's tool span."""
    span = only_span(FINISHED)
    assert (span.name, span.kind, span.status.status_code) == ("invoke_agent lead", SpanKind.INTERNAL, StatusCode.UNSET)
    assert span_id(span) == run_span_identifier("s", "r")
    assert parent_id(span) == "00f067aa0ba902b7"
    assert (span.start_time, span.end_time) == ((AT - 9_000_000) * 1000, AT * 1000)
    assert attributes(span)["gen_ai.operation.name"] == "invoke_agent"
    assert attributes(span)["gen_ai.usage.input_tokens"] == 300
    assert attributes(span)["understudy.run.status"] == "completed"


def test_a_run_without_a_caller_is_the_root_of_its_trace() -> None:
    """Without a parent span it has none, also when it was never started."""
    span = only_span(RunFinished(**ENVELOPE, status="cancelled"))
    assert span.parent is None
    assert span.start_time == span.end_time == AT * 1000


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        ("failed", "model_refused", "model_refused"),
        ("quarantined", "", "quarantined"),
        ("round_limit", "", "round_limit"),
        ("cancelled", "", None),
        ("completed", "", None),
    ],
)
def test_a_run_that_ended_badly_is_an_error(status: str, code: str, error: str | None) -> None:
    """`error.type` is the error's code or the status; a cancelled run is none."""
    span = only_span(RunFinished(**ENVELOPE, status=status, error_code=code))
    assert attributes(span).get("error.type") == error
    assert (span.status.status_code is StatusCode.ERROR) == (error is not None)


def test_a_model_call_is_a_chat_span_below_the_run() -> None:
    """It has the GenAI attributes of request, response and usage, and covers the call with its retries."""
    span = only_span(COMPLETED)
    assert (span.name, span.kind) == ("chat gpt-4o-mini", SpanKind.CLIENT)
    assert span_id(span) == span_identifier("s", "s/r/2/1", "chat")
    assert parent_id(span) == run_span_identifier("s", "r")
    assert (span.start_time, span.end_time) == ((AT - 900_000) * 1000, (AT - 100_000) * 1000)
    assert (
        attributes(span).items()
        >= {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "openai",
            "gen_ai.request.model": "gpt-4o-mini",
            "gen_ai.request.stream": True,
            "gen_ai.response.model": "gpt-4o-mini-2024",
            "gen_ai.response.id": "resp-1",
            "gen_ai.response.finish_reasons": ("stop",),
            "gen_ai.response.time_to_first_chunk": 0.25,
            "gen_ai.usage.input_tokens": 100,
            "gen_ai.usage.output_tokens": 20,
            "gen_ai.usage.cache_read.input_tokens": 40,
            "understudy.model.retries": 1,
        }.items()
    )


def test_a_failed_model_call_says_why() -> None:
    """`error.type` is the stable error code."""
    span = only_span(FAILED)
    assert span.status.status_code is StatusCode.ERROR
    assert attributes(span)["error.type"] == "model_refused"


def test_a_lost_attempt_ends_in_error_and_the_next_one_links_to_it() -> None:
    """When a node service dies, the trace shows the attempt that was lost and the one that replaced it."""
    lost = only_span(REISSUED)
    assert span_id(lost) == span_identifier("s", "s/r/2/1", "chat")
    assert lost.status.status_code is StatusCode.ERROR
    assert (lost.start_time, lost.end_time) == ((AT - 5_000_000) * 1000, AT * 1000)
    replaced = only_span(ModelCallCompleted(**ENVELOPE, request_key="s/r/2/2", attempt=2, model="m"))
    assert [link.context for link in replaced.links] == [lost.context]


def test_a_tool_call_is_an_execute_tool_span_below_the_run() -> None:
    """Its outcome is its error type unless it is ok."""
    span = only_span(TOOL)
    assert (span.name, span.kind, parent_id(span)) == (
        "execute_tool lookup",
        SpanKind.INTERNAL,
        run_span_identifier("s", "r"),
    )
    assert span_id(span) == tool_span_identifier("s", "r/2/0")
    assert (
        attributes(span).items()
        >= {
            "gen_ai.tool.name": "lookup",
            "gen_ai.tool.type": "function",
            "gen_ai.tool.call.id": "r/2/0",
            "error.type": "timeout",
        }.items()
    )
    fine = only_span(ToolFinished(**ENVELOPE, call_id="r/2/1", tool="lookup"))
    assert "error.type" not in attributes(fine)


def test_a_crash_is_visible_and_the_recovery_links_to_it() -> None:
    """A short error span marks the death; the recover span lasts as long as the session was down."""
    crash, recover = only_span(CRASHED), only_span(RESUMED)
    assert (crash.name, attributes(crash)["error.type"]) == ("crash lead", "process_died")
    assert span_id(crash) == crash_span_identifier("s", 4)
    assert recover.name == "recover lead"
    assert (recover.start_time, recover.end_time) == ((AT - 30_000) * 1000, AT * 1000)
    assert [link.context for link in recover.links] == [crash.context]
    assert parent_id(crash) == parent_id(recover) == run_span_identifier("s", "r")


def test_content_is_in_no_span() -> None:
    """Error texts may quote prompts and results; they stay in the store."""
    assert b"private" not in payload(ENDINGS)


def test_events_that_end_nothing_have_no_span() -> None:
    """Starts and ordinary activations are told by the span that ends later; outside a run there is no trace."""
    quiet = [RunAccepted, RunStarted, SessionCreated, ToolStarted, SessionActivated]
    assert [spans_of(kind(**ENVELOPE)) for kind in quiet] == [[]] * len(quiet)
    assert [spans_of(kind(**{**ENVELOPE, "trace_id": ""})) for kind in EVENT_TYPES.values()] == [[]] * len(EVENT_TYPES)
