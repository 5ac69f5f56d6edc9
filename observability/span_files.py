"""Spans in a local file, where no collector is named: OTLP/JSON lines, and how they are read back."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext, SpanKind, StatusCode

from understudy.identifiers import check_identifier

from .line_files import append_lines
from .span_building import process_resource, scope

log = logging.getLogger(__name__)

FILE_BYTES = 64 * 1024 * 1024
"""Size at which a span file is rotated; one older file is kept."""


class FileSpanExporter(SpanExporter):
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
        append_lines(self._path, data)

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
    own = scope()
    document = _encode(
        {
            "resource": {"attributes": _attributes(process_resource().attributes)},
            "scopeSpans": [
                {"scope": {"name": own.name, "version": own.version}, "schemaUrl": own.schema_url, "spans": []}
            ],
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
