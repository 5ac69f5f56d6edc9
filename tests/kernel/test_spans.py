"""Events to spans: one final span per ended thing, with the same bytes whoever projects it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from understudy.events import (
    EVENT_TYPES,
    ChildRestarted,
    Event,
    InputReceived,
    ModelCallCompleted,
    ModelCallFailed,
    ModelCallReissued,
    RunAccepted,
    RunFinished,
    RunStarted,
    SessionActivated,
    SessionClosed,
    SessionCrashed,
    SessionCreated,
    SessionMigrated,
    SessionMoved,
    SessionQuarantined,
    SessionResumed,
    ShutdownForced,
    ToolFinished,
    ToolStarted,
)
from understudy.identifiers import (
    run_link,
    run_span_identifier,
    span_identifier,
    tool_span_identifier,
    trace_identifier,
)
from understudy.observability.session_spans import crash_span_identifier
from understudy.observability.spans import spans_of
from understudy.spec import Supervision

from . import kernel as k

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
    currency="EUR",
    provider="openai",
    finish_reason="stop",
    usage=[100, 20, 40, 0, False, 1_250, 8],
    server_address="models.example",
    server_port=8443,
    parameters={
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "max_tokens": 100,
        "seed": 7,
        "n": 2,
        "stop": ["END"],
        "frequency_penalty": 0.1,
        "presence_penalty": 0.2,
        "reasoning_effort": "low",
    },
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
LAST_RUN = f"{'b' * 32}-{'c' * 16}"
BEGUN = RunStarted(**ENVELOPE, queued=1_500_000)
SHUTDOWN = ShutdownForced(**ENVELOPE, seq=11, waited=5_000_000, frame_id="f")
RESTARTED = ChildRestarted(
    **ENVELOPE, seq=12, call_id="r/2/0", child_id="c.1", lost_id="c", restart=1, delay=500_000, lost_run=LAST_RUN
)
IN_RUN: list[Event] = [
    BEGUN, SHUTDOWN, RESTARTED, SessionQuarantined(**ENVELOPE, seq=13, rule="no_progress", reason="private"),
    SessionClosed(**ENVELOPE, seq=14, reason="private"),
]  # fmt: skip
OUTSIDE: dict[str, Any] = {**ENVELOPE, "run_id": None, "trace_id": "", "round": 0}
ALONE: list[Event] = [
    SessionQuarantined(**OUTSIDE, seq=21, rule="max_restarts", reason="private", last_run=LAST_RUN),
    SessionResumed(**OUTSIDE, seq=22, last_run=LAST_RUN),
    SessionMigrated(**OUTSIDE, seq=23, changed=["model", "tools.lookup"], spec_hash="h", last_run=LAST_RUN),
    SessionClosed(**OUTSIDE, seq=24, reason="private", last_run=LAST_RUN),
    replace(RESTARTED, run_id=None, trace_id="", seq=25),
]
ENDINGS: list[Event] = [COMPLETED, FAILED, REISSUED, TOOL, CRASHED, RESUMED, FINISHED, *IN_RUN]


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
    events = [COMPLETED, FAILED, TOOL, CRASHED, RESUMED, FINISHED, other_attempt, *IN_RUN]
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
            "gen_ai.usage.cache_write.input_tokens": 8,
            "gen_ai.usage.cost": 0.00125,
            "understudy.cost.currency": "EUR",
            "understudy.model.retries": 1,
            "server.address": "models.example",
            "server.port": 8443,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.top_p": 0.9,
            "gen_ai.request.top_k": 40,
            "gen_ai.request.max_tokens": 100,
            "gen_ai.request.seed": 7,
            "gen_ai.request.choice.count": 2,
            "gen_ai.request.stop_sequences": ("END",),
            "gen_ai.request.frequency_penalty": 0.1,
            "gen_ai.request.presence_penalty": 0.2,
            "gen_ai.request.reasoning.level": "low",
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
    assert b"private" not in payload([*ENDINGS, *ALONE])


def test_events_that_end_nothing_have_no_span() -> None:
    """Starts and ordinary activations are covered by the span that ends later; outside a run only what is decided
    about a session has a span."""
    quiet = [RunAccepted, SessionCreated, ToolStarted, SessionActivated]
    assert [spans_of(kind(**ENVELOPE)) for kind in quiet] == [[]] * len(quiet)
    shown = [kind for kind in EVENT_TYPES.values() if spans_of(kind(**{**ENVELOPE, "trace_id": ""}))]
    assert shown == [
        SessionMigrated, SessionQuarantined, SessionResumed, SessionClosed, ChildRestarted
    ]  # fmt: skip


def test_what_happens_to_a_session_in_a_run_is_below_the_run() -> None:
    """Start, quarantine, forced shutdown, a sub-agent's restart, close: each has the run's span above it."""
    for event in IN_RUN:
        span = only_span(event)
        assert parent_id(span) == run_span_identifier("s", "r")
        assert span.end_time == AT * 1000
    names = [only_span(event).name for event in IN_RUN]
    assert names == ["start lead", "force_shutdown lead", "restart lead", "quarantine lead", "close lead"]
    assert attributes(only_span(BEGUN))["understudy.run.waited"] == 1.5
    assert only_span(SHUTDOWN).start_time == (AT - 5_000_000) * 1000
    errors = [attributes(only_span(event)).get("error.type") for event in IN_RUN]
    assert errors == [None, "shutdown_timeout", None, "no_progress", None]
    assert (
        attributes(only_span(RESTARTED)).items()
        >= {
            "understudy.restart.child_id": "c.1",
            "understudy.restart.lost_id": "c",
            "understudy.restart.number": 1,
            "understudy.restart.delay": 0.5,
        }.items()
    )


def test_what_happens_outside_a_run_is_a_trace_of_its_own() -> None:
    """It has no parent, shares its trace with nothing, and links to the session's last run, if there was one."""
    spans = [only_span(event) for event in ALONE]
    assert [span.name for span in spans] == [
        "quarantine lead", "resume lead", "migrate lead", "close lead", "restart lead",
    ]  # fmt: skip
    assert {parent_id(span) for span in spans} == {""}
    assert len({span.context.trace_id for span in spans if span.context is not None}) == len(ALONE)
    for span in spans:
        assert [f"{link.context.trace_id:032x}-{link.context.span_id:016x}" for link in span.links] == [LAST_RUN]
    assert only_span(SessionResumed(**OUTSIDE, seq=1)).links == ()
    assert attributes(spans[2])["understudy.migrate.changed"] == ("model", "tools.lookup")


def test_a_numeric_run_id_is_not_a_place_in_the_log() -> None:
    """A run that its caller calls `22` shares no trace with what happened at place 22."""
    alone = only_span(ALONE[1]).context
    assert alone is not None
    assert trace_identifier("s", "22") != f"{alone.trace_id:032x}"


def test_who_makes_the_spans_is_said_with_version_and_schema() -> None:
    """Resource and scope have Understudy's version, the scope the URL of the conventions."""
    span = only_span(TOOL)
    scope = span.instrumentation_scope
    assert scope is not None
    assert (scope.name, scope.version) == ("understudy", version("understudy"))
    assert scope.schema_url == "https://opentelemetry.io/schemas/gen-ai/1.42.0"
    assert span.resource.attributes["service.version"] == version("understudy")
    (resource,) = encode_spans([span]).resource_spans
    assert resource.scope_spans[0].schema_url == scope.schema_url


# Everything that can happen, and what docs/traces.md says of it.

INPUT = InputReceived(**ENVELOPE, call_id="r/2/1", kind="in_doubt", asked=2, decision="rerun", waited=500)
MOVED = SessionMoved(**ENVELOPE, seq=9, from_node="a", to_node="b", forced=True)
LATE = ModelCallCompleted(
    **ENVELOPE, request_key="s/r/2/1", attempt=1, model="m", late=True, redone=True, usage=[1, 1, 1, 1, False]
)
SAID = {
    "gen_ai.input.messages": "[]", "gen_ai.output.messages": "[]", "gen_ai.tool.call.arguments": "{}",
    "gen_ai.tool.call.result": "x",
}  # fmt: skip


def documented() -> str:
    return (Path(__file__).parents[2] / "docs" / "traces.md").read_text()


def test_every_event_has_a_span_or_is_named_as_having_none() -> None:
    """The whole vocabulary: docs/traces.md has each type either in the table of spans or among those without one."""
    table, without = documented().split("All others have no span of their own:")
    spanned = dict(re.findall(r"^\| `(\w+)` \| `(\w+) \w+` \|", table, re.M))
    quiet = set(re.findall(r"`([a-z_]+)`", without.partition("What belongs to no run")[0])) - {"unknown"}
    assert spanned.keys() | quiet == EVENT_TYPES.keys() - {"unknown"}
    assert not spanned.keys() & quiet
    for name, kind in EVENT_TYPES.items():
        event = kind(**ENVELOPE, **({"cause": "resume"} if kind is SessionActivated else {}))
        assert [span.name.split()[0] for span in spans_of(event)] == ([spanned[name]] if name in spanned else []), name


def test_every_attribute_is_documented() -> None:
    """The table of attributes is complete, and names none that does not exist."""
    table = documented().split("| attribute | of |")[1].split("\n## ")[0]
    listed = {
        name
        for line in table.splitlines()
        for name in re.findall(r"`((?:gen_ai|understudy|error|server)\.[\w.]+)`", line)
    }
    found = {
        name
        for event in [*ENDINGS, *ALONE, INPUT, MOVED, LATE]
        for span in spans_of(event, SAID)
        for name in attributes(span)
    }
    assert found == listed


def test_a_wait_for_a_person_is_below_the_call_that_asked() -> None:
    """It lasts from the question to the answer; asked again, it is another span."""
    span = only_span(INPUT)
    assert (span.name, parent_id(span)) == ("wait_for_input in_doubt", tool_span_identifier("s", "r/2/1"))
    assert (span.start_time, span.end_time) == ((AT - 500) * 1000, AT * 1000)
    assert span_id(span) != span_id(only_span(replace(INPUT, asked=1)))


def test_a_late_answer_does_not_repeat_the_lost_span() -> None:
    """The attempt was reported as lost; its answer is another span, which links to it."""
    late, lost = only_span(LATE), only_span(REISSUED)
    assert span_id(late) != span_id(lost)
    assert [link.context for link in late.links] == [lost.context]
    assert attributes(late)["understudy.model.late"] is True


def test_a_run_links_to_those_it_goes_on_from() -> None:
    """Links may lead to other traces."""
    span = only_span(replace(FINISHED, links=[f"{'b' * 32}-{'c' * 16}"]))
    assert [(link.context.trace_id, link.context.span_id) for link in span.links] == [
        (int("b" * 32, 16), int("c" * 16, 16))
    ]


def links_of(events: list[dict[str, Any]]) -> list[Any]:
    return [event["data"]["links"] for event in events if event["type"] == "run_finished"]


async def test_a_sessions_runs_are_linked(store: str, tmp_path: Path) -> None:
    """The first has none; each further one links to the one before it, in that one's trace, wherever that came from."""
    caller = ("a" * 32, "b" * 16)
    async with k.running(store, tmp_path / "spans") as kernel:
        await kernel.run("s", k.spec(k.script("one")))
        run = {"run_id": "r2", "content": "go", "trace_id": caller[0], "parent_span_id": caller[1]}
        await kernel.ask("send", "s", run)
        await kernel.end("s", "r2")
        await kernel.send("s", run_id="r3")
        await kernel.end("s", "r3")
        events = await kernel.events("s")
    first = run_link(trace_identifier("s", "r"), "s", "r")
    assert links_of(events) == [None, [first], [run_link(caller[0], "s", "r2")]]
    ended = [event for event in events if event["type"] == "run_finished"]
    assert [event["data"]["parent_span_id"] for event in ended] == ["", caller[1], ""]


async def test_later_runs_of_a_sub_agent_and_restarted_ones_are_linked(tmp_path: Path) -> None:
    """A detached sub-agent's next run has its own trace and links to its task in the parent's; a task that is started
    again stays in the parent's trace and links to the lost one."""
    spawn = [("spawn_agent", {"agent": name, "task": "go"}) for name in ("pet", "weak")]
    pet = k.spec(k.script("hello"), name="pet", lifecycle="detached")
    weak = k.spec("offline-script: this is not JSON", name="weak", restart_type="transient")
    rules = Supervision(max_restarts=1, backoff=0.01, jitter=0.0, exceeded="report").model_dump()
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path / "spans") as kernel:
        agents = {"pet": pet, "weak": weak}
        lead = k.spec(k.script(spawn, "done"), ["spawn_agent"], agents=agents, supervision=rules)
        await kernel.run("s", lead)
        tree = await kernel.ask("read", "tree", ["s"], {})
        child = {row["agent"]: row["session_id"] for row in tree if row["restarts"] == 0}
        detached = child["pet"]
        await kernel.send(detached, run_id="later")
        await kernel.end(detached, "later")
        later = await kernel.events(detached)
        restarted = {event["data"]["lost_id"]: event["data"]["child_id"] for event in await kernel.events("s")
                     if event["type"] == "child_restarted"}  # fmt: skip
        again = [(lost, links_of(await kernel.events(new))) for lost, new in restarted.items()]
    trace = trace_identifier("s", "r")
    assert links_of(later) == [None, [run_link(trace, detached, "task")]]
    assert [event["trace_id"] for event in later if event["type"] == "run_finished"] == [
        trace, trace_identifier(detached, "later"),
    ]  # fmt: skip
    assert again
    assert again == [(lost, [[run_link(trace, lost, "task")]]) for lost, _ in again]
