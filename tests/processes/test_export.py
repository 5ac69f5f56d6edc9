"""Spans on their way out: nothing is lost, nothing shows twice, and a broken sink breaks nothing else."""

from __future__ import annotations

import asyncio
import json
import threading
from base64 import b64encode
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from understudy.errors import InvalidInput
from understudy.events import Event, ModelCallCompleted, ModelCallReissued, RunAccepted, ToolFinished
from understudy.identifiers import run_span_identifier, tool_span_identifier
from understudy.observability.export import Export
from understudy.observability.exporters import span_exporter
from understudy.observability.span_files import FileSpanExporter, read_spans
from understudy.observability.span_sink import SpanSink
from understudy.observability.spans import spans_of

AT = 1_750_000_000_000_000
TRACE = "0af7651916cd43dd8448eb211c80319c"


def tool_event(number: int, trace_id: str = TRACE) -> ToolFinished:
    return ToolFinished(
        session_id="s",
        run_id="r",
        trace_id=trace_id,
        agent="lead",
        at=AT + number,
        call_id=f"r/1/{number}",
        tool="lookup",
        writer_seq=number,
    )


def spans(numbers: range) -> list[ReadableSpan]:
    return [span for number in numbers for span in spans_of(tool_event(number))]


def tool_span(number: int) -> str:
    return tool_span_identifier("s", f"r/1/{number}")


class Journal:
    """The journal's log and cursors, in memory; `fail_saves` makes the next cursor writes fail."""

    def __init__(self, events: Sequence[Event] = ()) -> None:
        self.events = list(events)
        self.cursors: dict[str, int] = {}
        self.fail_saves = 0
        self.changed = asyncio.Condition()

    async def read_events(self, after: int, limit: int) -> list[Event]:
        return [event for event in self.events if event.writer_seq > after][:limit]

    async def read_cursor(self, name: str) -> int:
        return self.cursors.get(name, 0)

    async def save_cursor(self, name: str, writer_seq: int) -> None:
        if self.fail_saves:
            self.fail_saves -= 1
            raise ConnectionError("store unreachable")
        async with self.changed:
            self.cursors[name] = writer_seq
            self.changed.notify_all()

    async def cursor_at(self, writer_seq: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: self.cursors.get("otlp") == writer_seq)


class Sink(SpanExporter):
    """Remembers batches; does what `answers` says first: a result, or raises."""

    def __init__(self, *answers: SpanExportResult | Exception) -> None:
        self.answers = list(answers)
        self.batches: list[list[str]] = []
        self.threads: set[int] = set()
        self.stopped = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.threads.add(threading.get_ident())
        self.batches.append([f"{span.context.span_id:016x}" for span in spans if span.context])
        answer = self.answers.pop(0) if self.answers else SpanExportResult.SUCCESS
        if isinstance(answer, Exception):
            raise answer
        return answer

    def shutdown(self) -> None:
        self.stopped.set()


class Collector:
    """A real OTLP receiver on a socket; answers with `statuses` first, then 200."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.received: list[ExportTraceServiceRequest] = []
        self.paths: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status = collector.statuses.pop(0) if collector.statuses else 200
                if status == 200:
                    collector.received.append(ExportTraceServiceRequest.FromString(body))
                    collector.paths.add(self.path)
                self.send_response(status)
                self.send_header("Retry-After", "0")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    @property
    def span_ids(self) -> list[str]:
        return [
            span.span_id.hex()
            for request in self.received
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    receiver = Collector()
    yield receiver
    receiver.close()


def exporter(journal: Journal, sink: SpanExporter) -> Export:
    return Export(journal, SpanSink(sink), "otlp", pause=0, retry=(0.001, 0.002))


async def test_a_collector_gets_every_span_once_although_it_refuses_first(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """503 is retried by the SDK, 400 fails the batch: the cursor stays until the collector has taken it."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    collector.statuses = [503, 400, 503]
    journal = Journal([tool_event(number) for number in range(1, 4)])
    export = exporter(journal, span_exporter({"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}, tmp_path, "w"))
    running = asyncio.create_task(export.run())
    await journal.cursor_at(3)
    assert collector.span_ids == [tool_span(number) for number in range(1, 4)]
    assert collector.paths == {"/v1/traces"}
    assert (export.exported, export.failures) == (3, 1)
    journal.events.append(tool_event(4))
    export.notify()
    await journal.cursor_at(4)
    await export.close()
    await running
    assert collector.span_ids[3:] == [tool_span(4)]
    assert read_spans(tmp_path, TRACE) == []


async def test_the_cursor_moves_only_after_the_sink_took_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    """A sink that refuses or raises sees the same batch again; nothing is raised to the journal."""
    journal = Journal([tool_event(1)])
    sink = Sink(SpanExportResult.FAILURE, RuntimeError("broken"))
    export = exporter(journal, sink)
    running = asyncio.create_task(export.run())
    await journal.cursor_at(1)
    await export.close()
    await running
    assert sink.batches == [[tool_span(1)]] * 3
    assert export.failures == 2
    assert "broken" in caplog.text
    assert threading.get_ident() not in sink.threads


async def test_a_new_process_continues_at_the_cursor() -> None:
    """What an earlier process exported is not sent again; what it left is sent without any notice."""
    journal = Journal([tool_event(number) for number in range(1, 5)])
    journal.cursors["otlp"] = 2
    sink = Sink()
    await exporter(journal, sink).close()
    assert sink.batches == [[tool_span(3), tool_span(4)]]
    assert journal.cursors["otlp"] == 4


async def test_a_store_that_fails_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """A cursor that can't be saved is saved later, without sending again what the sink has taken."""
    journal = Journal([tool_event(1)])
    journal.fail_saves = 2
    sink = Sink()
    export = exporter(journal, sink)
    running = asyncio.create_task(export.run())
    await journal.cursor_at(1)
    await export.close()
    await running
    assert sink.batches == [[tool_span(1)]]
    assert "store unreachable" in caplog.text


async def test_batches_are_bounded_and_in_order() -> None:
    """A long backlog goes out in pieces of at most 512 events."""
    journal = Journal([tool_event(number) for number in range(1, 1_201)])
    sink = Sink()
    await exporter(journal, sink).close()
    assert [len(batch) for batch in sink.batches] == [512, 512, 176]
    assert [span for batch in sink.batches for span in batch] == [tool_span(number) for number in range(1, 1_201)]


async def test_events_without_spans_move_the_cursor(caplog: pytest.LogCaptureFixture) -> None:
    """Quiet events, and one that can't be shown, neither reach the sink nor hold up the next."""
    damaged = tool_event(2, trace_id="not hexadecimal")
    journal = Journal([RunAccepted(trace_id=TRACE, writer_seq=1), damaged])
    sink = Sink()
    await exporter(journal, sink).close()
    assert sink.batches == []
    assert journal.cursors["otlp"] == 2
    assert "tool_finished 2 has no span" in caplog.text


async def test_close_is_bounded_and_stops_the_sink(caplog: pytest.LogCaptureFixture) -> None:
    """A sink that hangs delays the end by the timeout only; the cursor stays for the next start."""

    class Hanging(Sink):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            self.stopped.wait()
            return SpanExportResult.FAILURE

    journal = Journal([tool_event(1)])
    export = exporter(journal, Hanging())
    running = asyncio.create_task(export.run())
    await asyncio.sleep(0)
    await export.close(timeout=0.05)
    await running
    assert journal.cursors == {}
    assert "the next start continues there" in caplog.text


def test_without_a_collector_spans_go_to_a_file_and_can_be_read_by_trace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The local file gives back what was exported: ids, times, kinds, attributes, links, errors."""
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    envelope: dict[str, Any] = {"session_id": "s", "run_id": "r", "trace_id": TRACE, "agent": "lead", "at": AT}
    lost = ModelCallReissued(**envelope, lost_key="s/r/1/1", request_key="s/r/1/2", model="m", started_at=AT - 50)
    answer = ModelCallCompleted(
        **envelope, request_key="s/r/1/2", attempt=2, model="m", finish_reason="stop", first_chunk=500_000, duration=20
    )
    sink = span_exporter({}, tmp_path / "spans", "node-1")
    sink.export([*spans_of(answer), *spans_of(lost), *spans_of(tool_event(1, "f" * 32))])
    first, second = read_spans(tmp_path / "spans", TRACE)
    assert (first.name, first.kind, first.error) == ("chat m", "CLIENT", True)
    assert first.started_at == (AT - 50) * 1000
    assert first.attributes["error.type"] == "gateway_lost"
    assert second.parent_span_id == run_span_identifier("s", "r")
    assert second.links == (first.span_id,)
    assert not second.error
    assert second.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert second.attributes["gen_ai.response.time_to_first_chunk"] == 0.5
    assert second.attributes["gen_ai.request.stream"] is True
    assert read_spans(tmp_path / "nowhere", TRACE) == []


def test_lines_of_the_file_are_otlp_json(tmp_path: Path) -> None:
    """Each line is a document that a collector reads, with the content of the protobuf form."""
    FileSpanExporter(tmp_path, "w").export(spans(range(1, 2)))
    document = json.loads((tmp_path / "spans-w.jsonl").read_text())
    (span,) = document["resourceSpans"][0]["scopeSpans"][0]["spans"]
    for key in ("traceId", "spanId", "parentSpanId"):
        # OTLP/JSON has ids in hexadecimal, protobuf's own JSON form in base64.
        span[key] = b64encode(bytes.fromhex(span[key])).decode()
    expected = encode_spans(spans(range(1, 2)))
    expected.resource_spans[0].scope_spans[0].spans[0].flags = 0
    assert ParseDict(document, ExportTraceServiceRequest()) == expected


async def test_a_crash_between_append_and_cursor_shows_no_span_twice(tmp_path: Path) -> None:
    """The next process appends the batch again; readers see each span once."""
    journal = Journal([tool_event(1), tool_event(2)])
    journal.fail_saves = 1
    await exporter(journal, FileSpanExporter(tmp_path, "w")).close()
    assert journal.cursors == {}
    await exporter(journal, FileSpanExporter(tmp_path, "w")).close()
    assert journal.cursors == {"otlp": 2}
    assert len((tmp_path / "spans-w.jsonl").read_text().splitlines()) == 4
    assert [record.span_id for record in read_spans(tmp_path, TRACE)] == [tool_span(1), tool_span(2)]


def test_a_line_torn_by_a_crash_costs_only_itself(tmp_path: Path) -> None:
    """What is appended after a torn line is readable."""
    sink = FileSpanExporter(tmp_path, "w")
    sink.export(spans(range(1, 2)))
    path = tmp_path / "spans-w.jsonl"
    path.write_bytes(path.read_bytes() + path.read_bytes()[:-20])
    sink.export(spans(range(2, 3)))
    assert [record.span_id for record in read_spans(tmp_path, TRACE)] == [tool_span(1), tool_span(2)]


def test_the_file_is_rotated_and_bounded(tmp_path: Path) -> None:
    """The current and one older file are kept; both are read."""
    sink = FileSpanExporter(tmp_path, "w", max_bytes=1_000)
    for number in range(1, 30):
        sink.export(spans(range(number, number + 1)))
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes.keys() == {"spans-w.jsonl", "spans-w.jsonl.1"}
    assert max(sizes.values()) < 3_000
    newest = [record.span_id for record in read_spans(tmp_path, TRACE)]
    assert len(newest) >= 2
    assert newest == [tool_span(number) for number in range(30 - len(newest), 30)]


def test_a_file_that_cannot_be_written_is_a_failure_not_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A full or missing disk makes the export wait; nothing is raised."""
    (tmp_path / "file").write_text("")
    assert FileSpanExporter(tmp_path / "file", "w").export(spans(range(1, 2))) is SpanExportResult.FAILURE
    assert "can't be written" in caplog.text


def test_a_writer_name_cannot_leave_the_directory(tmp_path: Path) -> None:
    """The writer's name is an identifier, never a path."""
    with pytest.raises(InvalidInput):
        FileSpanExporter(tmp_path, "../elsewhere")
