"""What collectors and disks do to sinks: they refuse, hang, break off. Nothing is lost, nobody waits for ever."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client.openmetrics.exposition import generate_latest

from understudy.cluster.cli.doctor import _spans as where_spans_go
from understudy.config import Settings
from understudy.errors import InvalidConfiguration
from understudy.events import Event, RunStarted, SessionCrashed, ToolFinished
from understudy.identifiers import tool_span_identifier
from understudy.observability import replay
from understudy.observability.event_files import EventFiles
from understudy.observability.export import Export, SinkRefused
from understudy.observability.exporters import NoExporter, span_exporter
from understudy.observability.metrics import Metrics
from understudy.observability.span_files import FileSpanExporter
from understudy.observability.span_sink import WITH_CONTENT, SpanSink
from understudy.store.operations import progress
from understudy.store.reads import queries
from understudy.store.transaction import Transaction
from understudy.store.upkeep import retention
from understudy.telemetry import telemetry_problems

from ..collectors import GrpcCollector, HttpCollector, Request
from . import kernel as k

AT = 1_750_000_000_000_000


def tool_event(number: int) -> ToolFinished:
    return ToolFinished(
        session_id="s", run_id="r", trace_id="a" * 32, agent="lead", at=AT + number, call_id=f"r/1/{number}",
        tool="lookup", writer_seq=number,
    )  # fmt: skip


def tool_span(number: int) -> str:
    return tool_span_identifier("s", f"r/1/{number}")


def span_ids(requests: Sequence[Request]) -> list[str]:
    return [
        span.span_id.hex()
        for request in requests
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


class Journal:
    """The journal's log and cursors, in memory."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = list(events)
        self.cursors: dict[str, int] = {}
        self.changed = asyncio.Condition()

    async def read_events(self, after: int, limit: int) -> list[Event]:
        return [event for event in self.events if event.writer_seq > after][:limit]

    async def read_cursor(self, name: str) -> int:
        return self.cursors.get(name, 0)

    async def save_cursor(self, name: str, writer_seq: int) -> None:
        async with self.changed:
            self.cursors[name] = writer_seq
            self.changed.notify_all()

    async def cursor_at(self, name: str, writer_seq: int) -> None:
        async with asyncio.timeout(30), self.changed:
            await self.changed.wait_for(lambda: self.cursors.get(name) == writer_seq)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


def otlp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **variables: str) -> SpanExporter:
    """The exporter of these variables, as a service makes it."""
    named = {f"OTEL_EXPORTER_OTLP_{name}": value for name, value in variables.items()}
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    return span_exporter(named, tmp_path, "w")


def export_of(journal: Journal, sink: Any, name: str = "spans") -> Export:
    return Export(journal, sink, name, pause=0, retry=(0.001, 0.002))


async def exported(journal: Journal, export: Export, until: int) -> None:
    running = asyncio.create_task(export.run())
    await journal.cursor_at(export.name, until)
    await export.close()
    await running


async def test_http_collector_that_fails_in_every_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Refused, hung, closed, broken off: the cursor moves on success only, nothing is lost, the order is kept."""
    collector = HttpCollector()
    collector.faults = [400, "hang", "close", "truncate", 401]
    try:
        variables = {"HEADERS": "authorization=Bearer%20abc", "COMPRESSION": "gzip", "TIMEOUT": "1"}
        exporter = otlp(monkeypatch, tmp_path, ENDPOINT=collector.url, **variables)
        journal = Journal([tool_event(number) for number in range(1, 4)])
        await exported(journal, export_of(journal, SpanSink(exporter)), 3)
    finally:
        collector.close()
    assert list(dict.fromkeys(span_ids(collector.received))) == [tool_span(1), tool_span(2), tool_span(3)]
    assert {key.lower(): value for key, value in collector.headers[-1].items()}["authorization"] == "Bearer abc"


async def test_grpc_collector_that_fails_in_every_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same over gRPC: unavailable, out of order, not permitted, hung; headers arrive."""
    collector = GrpcCollector()
    code = grpc.StatusCode
    collector.faults = [code.INVALID_ARGUMENT, "hang", code.PERMISSION_DENIED, code.UNIMPLEMENTED]
    try:
        variables = {"HEADERS": "x-key=abc", "COMPRESSION": "gzip", "TIMEOUT": "1"}
        exporter = otlp(monkeypatch, tmp_path, ENDPOINT=collector.url, PROTOCOL="grpc", **variables)
        journal = Journal([tool_event(number) for number in range(1, 4)])
        await exported(journal, export_of(journal, SpanSink(exporter)), 3)
    finally:
        collector.close()
    assert list(dict.fromkeys(span_ids(collector.received))) == [tool_span(1), tool_span(2), tool_span(3)]
    assert collector.headers[-1]["x-key"] == "abc"


class Picky(SpanExporter):
    """Refuses every batch with one of these spans in it, and everything while `away`."""

    def __init__(self, *refused: str) -> None:
        self.refused = set(refused)
        self.away = 0
        self.accepted: list[str] = []
        self.calls = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.calls += 1
        found = [f"{span.context.span_id:016x}" for span in spans if span.context]
        if self.away or self.refused & set(found):
            self.away = max(0, self.away - 1)
            return SpanExportResult.FAILURE
        self.accepted += found
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass


@given(
    count=st.integers(2, 40),
    bad=st.sets(st.integers(1, 40), max_size=3),
    away=st.integers(0, 12),
)
def test_only_what_is_to_blame_is_dropped(count: int, bad: set[int], away: int) -> None:
    """A refused span costs itself alone; a collector that is away costs nothing, whenever it comes back."""
    refused = {number for number in bad if number <= count}
    exporter = Picky(*map(tool_span, refused))
    exporter.away = away
    sink = SpanSink(exporter)
    events: list[Event] = [tool_event(number) for number in range(1, count + 1)]
    for _ in range(60):
        try:
            sink.take(events)
            break
        except SinkRefused:
            continue
    else:
        assert len(refused) == count  # then nobody can tell a bad span from a collector that is away
        return
    wanted = [tool_span(number) for number in range(1, count + 1) if number not in refused]
    assert set(exporter.accepted) == set(wanted)
    assert sink.dropped == len(refused)


async def test_spans_with_content_are_sent_in_parts_that_collectors_take() -> None:
    """Given content, then a batch is not refused for its size, nor tried three times before it is parted."""

    class Small(Picky):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            return super().export(spans) if len(spans) <= WITH_CONTENT else SpanExportResult.FAILURE

    async def content(_: list[Event]) -> dict[int, dict[str, str]]:
        return {}

    small, events = Small(), [tool_event(number) for number in range(1, 101)]
    sink = SpanSink(small, content)
    await sink.prepare(events)
    assert sink.take(events) == 100
    assert small.accepted == [tool_span(number) for number in range(1, 101)]


def test_a_collector_that_is_away_for_long_drops_nothing() -> None:
    """However often it refuses, a span is not given up unless another one is taken at that time."""
    exporter = Picky()
    exporter.away = 1_000
    sink = SpanSink(exporter)
    events: list[Event] = [tool_event(number) for number in range(1, 9)]
    refusals = 0
    while True:
        try:
            sink.take(events)
            break
        except SinkRefused:
            refusals += 1
    assert refusals > 100
    assert sink.dropped == 0
    assert set(exporter.accepted) == {tool_span(number) for number in range(1, 9)}


async def test_a_broken_sink_holds_up_nobody_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each sink has its cursor; one that fails is logged, and the others go on."""
    events = [tool_event(number) for number in range(1, 4)]
    journal = Journal(events)
    exporter = Picky()
    exporter.away = 10**9
    broken = export_of(journal, SpanSink(exporter))
    running = asyncio.create_task(broken.run())
    await exported(journal, export_of(journal, EventFiles(tmp_path, "w"), "events"), 3)
    await broken.close(timeout=1.0)
    await running
    assert journal.cursors == {"events": 3}
    assert broken.failures
    assert broken.pending_since == AT + 1
    assert "spans are not exported" in caplog.text


def test_variables_choose_the_exporter(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A collector if one is named, none if that is said, else the local file; unusable ones don't end the service."""
    local = FileSpanExporter
    assert isinstance(span_exporter({}, tmp_path, "w"), local)
    assert isinstance(span_exporter({"OTEL_SDK_DISABLED": "true"}, tmp_path, "w"), NoExporter)
    none = {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}
    assert isinstance(span_exporter(none, tmp_path, "w"), NoExporter)
    assert isinstance(span_exporter({"OTEL_EXPORTER_OTLP_HEADERS": "a=b"}, tmp_path, "w"), local)
    wrong = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}
    assert isinstance(span_exporter(wrong, tmp_path, "w"), local)
    assert "must be one of: http/protobuf, grpc" in caplog.text
    others = span_exporter({"OTEL_TRACES_EXPORTER": "console"}, tmp_path, "w")  # of the driver's own spans
    assert isinstance(others, FileSpanExporter)
    named = span_exporter({"OTEL_TRACES_EXPORTER": "otlp"}, tmp_path, "w")
    assert type(named).__name__ == "OTLPSpanExporter"
    named.shutdown()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "udp"), ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://user:hunter22@c:4318"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "hunter22@c:4318"), ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "0"), ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "hunter22"), ("OTEL_SDK_DISABLED", "yes"),
        ("UNDERSTUDY_LOG_FORMAT", "xml"), ("UNDERSTUDY_LOG_LEVEL", "loud"), ("UNDERSTUDY_EVENT_LOG", "relative"),
        ("UNDERSTUDY_REDACT", "("), ("UNDERSTUDY_REDACT", "a*"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_said(name: str, value: str) -> None:
    """One line per variable, with what it must be; a secret's value is not in it."""
    (problem,) = telemetry_problems({name: value})
    assert problem.startswith(name)
    assert "hunter22" not in problem


def test_deflate_is_for_http() -> None:
    """gRPC knows no deflate."""
    wanted = {"OTEL_EXPORTER_OTLP_COMPRESSION": "deflate"}
    assert telemetry_problems(wanted) == []
    assert telemetry_problems({**wanted, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})


# The event log.


def events_of(count: int) -> list[Event]:
    found: list[Event] = []
    for number in range(1, count + 1):
        kind = (tool_event(number), RunStarted(agent="lead", queued=number), SessionCrashed(agent="lead"))[number % 3]
        found.append(replace(kind, writer_seq=number, seq=number, session_id="s", at=AT + number))
    return found


def totals(events: Sequence[Event]) -> bytes:
    metrics = Metrics()
    metrics.apply(events)
    shown: bytes = generate_latest(metrics.registry)
    return shown


@pytest.mark.thorough
@given(
    count=st.integers(1, 60), size=st.integers(1, 20), repeated=st.integers(0, 5), torn=st.integers(0, 200),
    max_bytes=st.integers(1, 5_000),
)  # fmt: skip
def test_a_replay_gives_the_same_totals(
    tmp_path_factory: pytest.TempPathFactory, count: int, size: int, repeated: int, torn: int, max_bytes: int
) -> None:
    """Whatever was written twice, torn or rotated: each event comes once, in order, and metrics are the same."""
    directory = tmp_path_factory.mktemp("log")
    events = events_of(count)
    files = EventFiles(directory, "node-1", max_bytes=max_bytes)
    for start in range(0, count, size):
        files.take(events[start : start + size])
        if repeated and start:  # a crash between append and cursor, within the last line
            newest = max(directory.iterdir())
            newest.write_bytes(newest.read_bytes()[: -min(torn, 60) or None])
            files = EventFiles(directory, "node-1", max_bytes=max_bytes)
            files.take(events[start : start + size])
    found = list(replay(directory))
    assert found == events
    assert totals(found) == totals(events)


def test_writers_are_replayed_one_by_one(tmp_path: Path) -> None:
    """Two journals have logs of their own, with numbers of their own; strangers' files are left alone."""
    for writer in ("node-a", "node-b"):
        EventFiles(tmp_path, writer).take(events_of(3))
    (tmp_path / "events-notes.jsonl").write_text("hello\n")
    assert [event.writer_seq for event in replay(tmp_path)] == [1, 2, 3, 1, 2, 3]
    (file, _) = sorted(path for path in tmp_path.iterdir() if "node" in path.name)
    assert len(list(replay(file))) == 3
    assert json.loads(file.read_text().splitlines()[0])["writer_seq"] == 1


def test_the_disk_has_a_batch_before_it_is_acknowledged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsync comes before the cursor, of a new file's directory too; a full disk refuses, and raises nothing else."""
    synced: list[int] = []
    monkeypatch.setattr("understudy.observability.line_files.os.fsync", synced.append)
    files = EventFiles(tmp_path / "log", "w")
    files.take(events_of(2))
    assert len(synced) == 2
    files.take(events_of(2))
    assert len(synced) == 3
    (tmp_path / "file").write_text("")
    with pytest.raises(SinkRefused, match="can't be written"):
        EventFiles(tmp_path / "file", "w").take(events_of(2))


def test_settings_name_what_cannot_be_used_and_doctor_says_where_spans_go() -> None:
    """Wrong variables are an error before anything starts; a header's value is in no text."""
    headers = {"OTEL_EXPORTER_OTLP_HEADERS": "authorization=hunter22", "OTEL_EXPORTER_OTLP_ENDPOINT": "https://c:4317"}
    with pytest.raises(InvalidConfiguration, match="http/protobuf, grpc") as raised:
        Settings.from_environment({**headers, "OTEL_EXPORTER_OTLP_PROTOCOL": "x"})
    assert "hunter22" not in str(raised.value)
    settings = Settings.from_environment({**headers, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
    assert settings.telemetry.items() >= headers.items()
    assert "hunter22" not in repr(settings)
    assert where_spans_go(settings) == "to https://c:4317 over grpc"
    assert where_spans_go(Settings.from_environment({"OTEL_TRACES_EXPORTER": "none"})) == "none"
    assert "local files" in where_spans_go(Settings.from_environment({}))
    sampled = {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.25"}
    assert where_spans_go(Settings.from_environment(sampled)).startswith(
        "to local files, sampled by traceidratio of 0.25"
    )


def test_what_the_exporters_cost_is_paid_by_those_who_ask() -> None:
    """Neither exporter is loaded without a collector, and gRPC's package not without gRPC."""
    code = (
        "import sys; from pathlib import Path\n"
        "from understudy.observability.exporters import span_exporter\n"
        "span_exporter({}, Path('/nowhere'), 'w')\n"
        "assert not any(name.startswith(('grpc', 'opentelemetry.exporter')) for name in sys.modules)\n"
        "span_exporter({'OTEL_EXPORTER_OTLP_ENDPOINT': 'http://c:4318'}, Path('/nowhere'), 'w').shutdown()\n"
        "assert not any(name == 'grpc' for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


async def test_sinks_of_a_service_and_the_one_that_is_switched_off(tmp_path: Path) -> None:
    """A service has a cursor for each sink; one that nobody asks for any more holds up no retention."""
    log = {"UNDERSTUDY_EVENT_LOG": str(tmp_path / "log")}
    dsn = f"sqlite:///{tmp_path}/store.db"
    async with k.running(dsn, tmp_path / "spans", telemetry=log) as kernel:
        await kernel.run("s", k.spec(k.script("done")))
        assert set(kernel.service.projection.exports) == {"spans", "events"}
        writer = kernel.service.config.writer
    assert [event.type for event in replay(tmp_path / "log")][-1] == "run_finished"
    async with k.running(dsn, tmp_path / "spans") as kernel:
        reading = kernel.service.reading
        assert await reading.query(queries.export_cursor, writer, "events") == 0
        assert await reading.query(queries.export_cursor, writer, "spans") > 0


async def test_stores_may_share_the_directory_of_their_event_logs(tmp_path: Path) -> None:
    """Given two stores with one directory, whose writers have the same name, then a replay has all events of both."""
    log = {"UNDERSTUDY_EVENT_LOG": str(tmp_path / "log")}
    for name in ("first", "second"):
        async with k.running(f"sqlite:///{tmp_path}/{name}.db", tmp_path / "spans", telemetry=log) as kernel:
            await kernel.run(name, k.spec(k.script("done")))
    events = list(replay(tmp_path / "log"))
    for name in ("first", "second"):
        kinds = [event.type for event in events if event.session_id == name]
        assert (kinds[0], kinds[-1]) == ("session_created", "run_finished")


async def test_retention_waits_for_every_sink(tmp_path: Path) -> None:
    """Events that one of the sinks lacks stay."""
    (tmp_path / "file").write_text("")
    dsn = f"sqlite:///{tmp_path}/store.db"
    async with k.running(dsn, tmp_path / "spans") as kernel:
        await kernel.run("s", k.spec(k.script("done")))
        writer = kernel.service.config.writer
    async with k.running(dsn, tmp_path / "spans", telemetry={"UNDERSTUDY_EVENT_LOG": str(tmp_path / "file")}) as kernel:

        def prune(tx: Transaction) -> tuple[str, int]:
            progress.keep_sinks(tx, writer, [progress.SPANS])
            progress.keep_sinks(tx, writer, [progress.SPANS, progress.EVENTS])  # this one begins from the start
            early = retention.drop_events(tx, "s", tx.now + 1).kept
            progress.save_cursor(tx, writer, progress.EVENTS, 1_000_000)
            return early, retention.drop_events(tx, "s", tx.now + 1).events

        early, removed = await kernel.service.journal.submit(prune)
    assert early == "not exported yet"
    assert removed > 0
