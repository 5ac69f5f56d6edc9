"""Which traces are exported: all of a trace or nothing of it, as OpenTelemetry's samplers say, whoever exports it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider, sampling
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

from understudy.actors.tools import ToolContext, tool
from understudy.cluster.client.session_handle import current_span
from understudy.events import Event, SessionClosed, ToolFinished
from understudy.identifiers import tool_span_identifier, traceparent
from understudy.observability.sampling import is_sampled, span_sampler
from understudy.observability.span_sink import SpanSink
from understudy.observability.spans import spans_of
from understudy.store.reads import queries
from understudy.telemetry import SAMPLERS, telemetry_of, telemetry_problems

from ..collectors import HttpCollector
from ..traced import spans_in
from . import kernel as k

TRACE_IDS = st.integers(1, 2**128 - 1)
RATIOS = st.floats(0, 1).map(lambda ratio: round(ratio, 6))


def variables(sampler: str, ratio: float | str = "") -> dict[str, str]:
    return {"OTEL_TRACES_SAMPLER": sampler} | ({"OTEL_TRACES_SAMPLER_ARG": str(ratio)} if ratio != "" else {})


def event(trace_id: int, sampled: bool | None = None, number: int = 1) -> ToolFinished:
    return ToolFinished(
        session_id="s", run_id="r", trace_id=f"{trace_id:032x}", sampled=sampled, agent="lead", at=1_000_000 + number,
        call_id=f"r/1/{number}", tool="lookup", writer_seq=number,
    )  # fmt: skip


@given(TRACE_IDS, RATIOS, st.sampled_from(SAMPLERS), st.sampled_from([None, True, False]))
def test_the_decision_is_that_of_the_sdk(trace_id: int, ratio: float, name: str, sampled: bool | None) -> None:
    """Given the same variables, then a trace is in where a program with OpenTelemetry's SDK has its spans of it."""
    with pytest.MonkeyPatch.context() as patch:
        for key, value in variables(name, f"{ratio:.6f}").items():
            patch.setenv(key, value)
        sdk = TracerProvider().sampler
    context = SpanContext(trace_id, 1, is_remote=True, trace_flags=TraceFlags(int(bool(sampled))))
    caller = None if sampled is None else set_span_in_context(NonRecordingSpan(context))
    wanted = sdk.should_sample(caller, trace_id, "invoke_agent lead").decision.is_sampled()
    assert is_sampled(span_sampler(variables(name, f"{ratio:.6f}")), event(trace_id, sampled)) is wanted


def test_without_variables_the_caller_decides() -> None:
    """The default is OpenTelemetry's: all traces, but those that a caller does not record."""
    sampler = span_sampler({})
    assert [is_sampled(sampler, event(7, sampled)) for sampled in (None, True, False)] == [True, True, False]
    assert [is_sampled(span_sampler(variables("always_on")), event(7, said)) for said in (None, False)] == [True, True]


@given(st.sampled_from(SAMPLERS), TRACE_IDS, st.sampled_from([None, True, False]))
def test_a_trace_is_in_or_out_as_one(name: str, trace_id: int, sampled: bool | None) -> None:
    """Nothing but the trace and its caller counts: not the session, the place in the log, or the kind of span."""
    sampler = span_sampler(variables(name, 0.5))
    events = [event(trace_id, sampled, number) for number in (1, 2, 3)]
    events += [ToolFinished(session_id="other", trace_id=f"{trace_id:032x}", sampled=sampled, tool="x", call_id="c")]
    assert len({is_sampled(sampler, one) for one in events}) == 1


def test_what_has_no_run_is_decided_by_its_own_trace() -> None:
    """A close outside a run is in about as often as the ratio says, and each time alike."""
    sampler = span_sampler(variables("traceidratio", 0.5))
    closed = [SessionClosed(session_id=f"s-{number}", seq=number) for number in range(200)]
    taken = [is_sampled(sampler, one) for one in closed]
    assert taken == [is_sampled(sampler, one) for one in closed]
    assert 60 < sum(taken) < 140


class Taken(SpanExporter):
    """Takes everything."""

    def __init__(self) -> None:
        self.spans: list[str] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans += [f"{span.context.span_id:016x}" for span in spans if span.context]
        return SpanExportResult.SUCCESS


async def test_what_is_left_out_is_taken_over_and_its_content_not_read() -> None:
    """Events of traces that are out count as done: no exporter hears of them, and nothing is looked up for them."""
    asked: list[int] = []

    async def content(events: list[Event]) -> dict[int, dict[str, Any]]:
        asked.extend(one.writer_seq for one in events)
        return {}

    exporter = Taken()
    sink = SpanSink(exporter, content, sampling.DEFAULT_ON)
    events: list[Event] = [event(1, False, 1), event(2, None, 2), event(3, True, 3), event(1, False, 4)]
    await sink.prepare(events)
    assert sink.take(events) == 2
    assert asked == [2, 3]
    assert exporter.spans == [tool_span_identifier("s", "r/1/2"), tool_span_identifier("s", "r/1/3")]
    await sink.prepare([replace(event(1), trace_id="no trace id")])  # holds up nobody
    assert asked == [2, 3]
    await sink.prepare(events[:1])
    assert sink.take(events[:1]) == 0
    assert len(exporter.spans) == 2


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (variables("jaeger_remote"), "OTEL_TRACES_SAMPLER='jaeger_remote' must be one of: always_on,"),
        (variables("traceidratio", "1.5"), "OTEL_TRACES_SAMPLER_ARG='1.5' must be a number from 0 to 1"),
        (variables("parentbased_traceidratio", "half"), "OTEL_TRACES_SAMPLER_ARG='half' must be a number"),
        (variables("traceidratio", "nan"), "OTEL_TRACES_SAMPLER_ARG='nan' must be a number"),
    ],
)
def test_what_is_no_sampler_is_said(given: dict[str, str], problem: str) -> None:
    """One line for what can't be used; a service that finds it in its own environment exports as if it was not set."""
    (found,) = telemetry_problems(given)
    assert found.startswith(problem)
    assert is_sampled(span_sampler(given), event(2**64 - 1))


def test_a_service_receives_the_sampler() -> None:
    """Both variables go from the connect to the services; an argument that no sampler reads is nobody's problem."""
    given = variables("traceidratio", "0.25")
    assert telemetry_of(given) == given
    assert telemetry_problems(given) == []
    assert telemetry_problems(variables("always_on", "whatever")) == []
    assert telemetry_problems({"OTEL_TRACES_SAMPLER": "TraceIdRatio"}) == []


@pytest.mark.parametrize(("sampled", "flags"), [(True, "01"), (False, "00"), (None, "01")])
def test_the_traceparent_of_a_tool(sampled: bool | None, flags: str) -> None:
    """A request of a tool says that the trace is not recorded only if the caller says so."""
    assert traceparent("a" * 32, "b" * 16, sampled) == f"00-{'a' * 32}-{'b' * 16}-{flags}"


def test_a_program_that_does_not_record_says_so() -> None:
    """The current span's flag is taken along with its ids."""
    for sampler, wanted in ((sampling.ALWAYS_ON, True), (sampling.ALWAYS_OFF, False)):
        with TracerProvider(sampler=sampler).get_tracer("driver").start_as_current_span("request"):
            found = current_span()
        assert found is not None
        assert found[2] is wanted


@tool
def own_traceparent(context: ToolContext) -> str:
    """What a request of this tool would say."""
    return context.traceparent


@pytest.mark.parametrize(("sampled", "flags"), [(True, "01"), (False, "00"), (None, "01")])
async def test_tools_pass_the_callers_decision_on(tmp_path: Path, sampled: bool | None, flags: str) -> None:
    """Given a caller that records its trace, or not, then that is what its run's tools say, in each of its rounds."""
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path / "spans") as kernel:
        await kernel.spawn(
            "s", k.spec(k.script([("own_traceparent", {})], [("own_traceparent", {})], "done"), [own_traceparent])
        )
        run = {"run_id": "r", "content": "go"}
        if sampled is not None:
            run |= {"trace_id": "a" * 32, "parent_span_id": "c" * 16, "sampled": sampled}
        await kernel.ask("send", "s", run)
        await kernel.end("s")
        found = await kernel.results()
    assert [value.rpartition("-")[2] for value in found] == [flags, flags]


def collected(collector: HttpCollector) -> dict[str, set[str]]:
    """Ids of spans by trace."""
    found: dict[str, set[str]] = defaultdict(set)
    for identifier, span in spans_in(collector.received).items():
        found[span.trace_id.hex()].add(identifier)
    return dict(found)


def by_trace(events: list[Event]) -> dict[str, set[str]]:
    """The same of all that an unsampled export would have."""
    found: dict[str, set[str]] = defaultdict(set)
    for span in [span for one in events for span in spans_of(one)]:
        assert span.context is not None
        found[f"{span.context.trace_id:032x}"].add(f"{span.context.span_id:016x}")
    return dict(found)


async def test_whole_traces_across_sub_agents_and_a_restart(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a ratio, callers that record and that don't, sub-agents, and a node service that is killed in the midst,
    then the collector has some traces whole and nothing of the others, and the cursor is at the log's end."""
    child = k.spec(k.script("seen"), name="child")
    lead = k.spec(k.script([("spawn_agent", {"agent": "child", "task": "look"})], "done"), ["spawn_agent"],
                  agents={"child": child}, name="lead")  # fmt: skip
    callers: list[tuple[str, bool | None]] = [("", None)] * 6 + [("a" * 32, True), ("b" * 32, False)]
    with HttpCollector() as collector:
        telemetry = variables("parentbased_traceidratio", "0.5") | {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        async with k.running(store, tmp_path / "spans", telemetry=telemetry) as kernel:
            for number, (trace_id, sampled) in enumerate(callers):
                await kernel.spawn(f"s{number}", lead)
                run = {"run_id": "r", "content": "go"}
                if trace_id:
                    run |= {"trace_id": trace_id, "parent_span_id": "c" * 16, "sampled": sampled}
                await kernel.ask("send", f"s{number}", run)
                await kernel.end(f"s{number}")
                if number == 3:
                    kernel.kill_node()
            await kernel.quiet()
            config = kernel.service.config
            events = await kernel.service.reading.query(queries.writer_events, config.writer, 0, 10_000)
            export = kernel.service.projection.exports["spans"]
            await export.catch_up(30)
            assert export.cursor == events[-1].writer_seq
    everything, found = by_trace(events), collected(collector)
    assert set(everything) >= {"a" * 32, "b" * 32}
    assert len(everything) == len(callers)
    sampler = span_sampler(telemetry)
    of_trace = {one.trace_id: one for one in events if one.trace_id}
    taken = {trace for trace, one in of_trace.items() if is_sampled(sampler, one)}
    assert found == {trace: spans for trace, spans in everything.items() if trace in taken}
    assert "a" * 32 in found
    assert "b" * 32 not in found
    assert {one.sampled for one in events if one.trace_id == "b" * 32} == {False}
    assert {one.session_id for one in events if one.trace_id == "b" * 32} > {"s7"}
