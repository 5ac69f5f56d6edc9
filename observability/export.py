"""Spans on their way out: a durable cursor over the journal's log, and the sinks.

At least once: the cursor moves only after the sink took the spans, so a crash in between sends some of them again.
They are identical then, and whoever reads them drops repeats by span id.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext, SpanKind, StatusCode

from understudy.events import Event
from understudy.identifiers import check_identifier

from .conventions import SCOPE_NAME
from .spans import process_resource, spans_of

log = logging.getLogger(__name__)

BATCH = 512
"""Events read and exported at once."""

FILE_BYTES = 64 * 1024 * 1024
"""Size at which a span file is rotated; one older file is kept."""


class EventLog(Protocol):
    """What the exporter needs of the journal: its own log, in the order of `writer_seq`, and a place for cursors."""

    async def read_events(self, after: int, limit: int) -> list[Event]:
        """Up to `limit` events with a `writer_seq` greater than `after`, ascending."""

    async def read_cursor(self, name: str) -> int:
        """The `writer_seq` saved under `name`; 0 when there is none."""

    async def save_cursor(self, name: str, writer_seq: int) -> None:
        """Durably remember `writer_seq` under `name`."""


class SpanExport:
    """Sends the spans of one journal's events to one sink, in order, from a durable cursor.

    A sink or store that fails is logged and tried again, after 0.5 s doubling to 30 s; it never raises here. Attributes
    `exported` and `failures` count spans taken and batches refused in this process; `pending_since` is the time of the
    first event of the batch that it is at, or could not get rid of, 0 without one.

    Args:
        sink: any exporter of the OpenTelemetry SDK; called in a worker thread, one call at a time.
        name: of the cursor.
        pause: seconds to gather events after the first notice, so that busy journals export in large batches.
    """

    def __init__(
        self,
        log: EventLog,
        sink: SpanExporter,
        name: str,
        *,
        pause: float = 1.0,
        retry: tuple[float, float] = (0.5, 30.0),
    ) -> None:
        self._log = log
        self._sink = sink
        self._name = name
        self._pause = pause
        self._retry = retry
        self._cursor = self._saved = -1
        self._news = asyncio.Event()
        self._news.set()  # what an earlier process left
        self._closing = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._aborted = False
        self.exported = 0
        self.failures = 0
        self.pending_since = 0

    @property
    def cursor(self) -> int:
        """The last event that the sink has taken; -1 while that is not known."""
        return self._cursor

    def notify(self) -> None:
        """There are new events. Cheap; call it after each commit, from the event loop of `run`."""
        self._news.set()

    async def run(self) -> None:
        """Export until `close`."""
        self._idle.clear()
        delay = self._retry[0]
        try:
            while not self._closing.is_set():
                await self._news.wait()
                self._news.clear()
                await self._sleep(self._pause)
                if await self._drain():
                    delay = self._retry[0]
                    continue
                self._news.set()
                log.warning("spans are not exported (%d failures); next try in %g s", self.failures, delay)
                await self._sleep(delay)
                delay = min(delay * 2, self._retry[1])
        finally:
            self._idle.set()

    async def close(self, timeout: float = 5.0) -> None:
        """End `run` after one more try to export what is left; the rest keeps for the next start.

        Returns after `timeout` seconds at the latest.
        """
        self._closing.set()
        self._news.set()
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
                await self._drain()
        except TimeoutError:
            self._aborted = True
            log.warning("spans were still being exported after %g s; the next start continues there", timeout)
        # Also ends the retries of an exporter that is still at it in its thread.
        self._sink.shutdown()

    async def _sleep(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._closing.wait(), seconds)
        except TimeoutError:
            pass

    async def _drain(self) -> bool:
        """Export until the log's end; False when something failed on the way."""
        try:
            if self._cursor < 0:
                self._cursor = self._saved = await self._log.read_cursor(self._name)
            await self._save()  # what the sink has taken is not sent again only because the store failed
            while not self._aborted and (events := await self._log.read_events(self._cursor, BATCH)):
                self.pending_since = events[0].at
                spans = _project(events)
                if spans and await asyncio.to_thread(self._sink.export, spans) is not SpanExportResult.SUCCESS:
                    self.failures += 1
                    return False
                self.exported += len(spans)
                self._cursor, self.pending_since = events[-1].writer_seq, 0
                await self._save()
        except Exception:
            self.failures += 1
            log.exception("spans can't be exported")
            return False
        return True

    async def _save(self) -> None:
        if self._saved != self._cursor:
            await self._log.save_cursor(self._name, self._cursor)
            self._saved = self._cursor


def _project(events: Iterable[Event]) -> list[ReadableSpan]:
    spans: list[ReadableSpan] = []
    for event in events:
        try:
            spans += spans_of(event)
        except Exception:
            # One event that can't be shown must not hold up all that follow.
            log.exception("event %s %d has no span", event.type, event.writer_seq)
    return spans


def span_sink(directory: Path, writer: str) -> SpanExporter:
    """The sink that the environment asks for: a collector over OTLP (http/protobuf), otherwise a file in `directory`.

    Args:
        writer: name of the file's one writer, unique in `directory`.
    """
    if os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        # Here, because it costs several megabytes that a process without a collector need not pay.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter()
    return FileSpanSink(directory, writer)


class FileSpanSink(SpanExporter):
    """Appends spans to `spans-WRITER.jsonl`, one OTLP/JSON document per line, as collectors read and write them.

    At `max_bytes` the file becomes `spans-WRITER.jsonl.1`, replacing the one before it. What was exported survives
    the process, not a power failure.
    """

    def __init__(self, directory: Path, writer: str, *, max_bytes: int = FILE_BYTES) -> None:
        self._path = directory / f"spans-{check_identifier(writer, 'span writer')}.jsonl"
        self._max_bytes = max_bytes

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        data = "".join(map(_line, spans)).encode()
        try:
            self._append(data)
        except OSError as error:
            log.error("spans can't be written to %s: %s", self._path, error)
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def _append(self, data: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists() and self._path.stat().st_size >= self._max_bytes:
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        with self._path.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    data = b"\n" + data  # a process died within its last line
            file.write(data)

    def shutdown(self) -> None:
        """Nothing is held open."""


def _line(span: ReadableSpan) -> str:
    """One span as a complete OTLP/JSON document and a line end."""
    context = span.get_span_context() or SpanContext(0, 0, is_remote=False)
    encoded: dict[str, Any] = {
        "traceId": f"{context.trace_id:032x}",
        "spanId": f"{context.span_id:016x}",
        "name": span.name,
        "kind": span.kind.value + 1,
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "attributes": _attributes(span.attributes),
        "status": {"code": span.status.status_code.value},
    }
    if span.parent is not None:
        encoded["parentSpanId"] = f"{span.parent.span_id:016x}"
    if span.links:
        encoded["links"] = [
            {"traceId": f"{link.context.trace_id:032x}", "spanId": f"{link.context.span_id:016x}"}
            for link in span.links
        ]
    return f"{_head()}{_encode(encoded)}]}}]}}]}}\n"


_encode = json.JSONEncoder(separators=(",", ":")).encode


@cache
def _head() -> str:
    """What stands before the span in each line: the same for all spans of this process."""
    document = _encode(
        {
            "resource": {"attributes": _attributes(process_resource().attributes)},
            "scopeSpans": [{"scope": {"name": SCOPE_NAME}, "spans": []}],
        }
    )
    return f'{{"resourceSpans":[{document.removesuffix("]}]}")}'


def _attributes(attributes: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in (attributes or {}).items()]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"arrayValue": {"values": [_value(item) for item in value]}}


def _plain(value: Mapping[str, Any]) -> Any:
    ((kind, content),) = value.items()
    if kind == "arrayValue":
        return [_plain(item) for item in content.get("values", [])]
    return int(content) if kind == "intValue" else content


@dataclass(frozen=True)
class SpanRecord:
    """A span read back from a file. Times are nanoseconds since 1970 UTC; `links` are span ids."""

    trace_id: str
    span_id: str
    parent_span_id: str
    name: str
    kind: str
    started_at: int
    ended_at: int
    error: bool
    attributes: dict[str, Any] = field(default_factory=dict)
    links: tuple[str, ...] = ()


def read_spans(directory: Path, trace_id: str) -> list[SpanRecord]:
    """The spans of one trace from all files in `directory`, by start time, each once. Unreadable lines are skipped."""
    found: dict[str, SpanRecord] = {}
    for path in sorted(directory.glob("spans-*.jsonl*"), reverse=True):  # a writer's older file first
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                lines = [line for line in file if trace_id in line]
        except FileNotFoundError:
            continue  # rotated away meanwhile
        for line in lines:
            try:
                record = _record(json.loads(line))
            except (ValueError, KeyError, IndexError, TypeError):
                continue
            if record.trace_id == trace_id:
                found[record.span_id] = record
    return sorted(found.values(), key=lambda record: (record.started_at, record.ended_at, record.span_id))


def _record(document: Mapping[str, Any]) -> SpanRecord:
    span = document["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    return SpanRecord(
        trace_id=span["traceId"],
        span_id=span["spanId"],
        parent_span_id=span.get("parentSpanId", ""),
        name=span["name"],
        kind=SpanKind(span["kind"] - 1).name,
        started_at=int(span["startTimeUnixNano"]),
        ended_at=int(span["endTimeUnixNano"]),
        error=span["status"].get("code") == StatusCode.ERROR.value,
        attributes={item["key"]: _plain(item["value"]) for item in span["attributes"]},
        links=tuple(link["spanId"] for link in span.get("links", ())),
    )
