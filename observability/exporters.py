"""Which exporter spans go to, as the environment says: a collector over OTLP, a local file, or none."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from understudy.telemetry import GRPC, exports_spans, has_collector, protocol_of, telemetry_problems

from .span_files import FileSpanExporter

log = logging.getLogger(__name__)


class NoExporter(SpanExporter):
    """Takes everything and keeps nothing, so that what is not wanted does not pile up."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing is held open."""


def span_exporter(variables: Mapping[str, str], directory: Path, writer: str) -> SpanExporter:
    """The exporter that `variables` ask for. Variables that can't be used are logged, and spans go to the file.

    An OTLP exporter reads its endpoint, headers, timeout, compression and certificates itself from `os.environ`, which
    must have them.

    Args:
        directory: of the local file.
        writer: name of the file's one writer, unique in `directory`.
    """
    if not exports_spans(variables):
        return NoExporter()
    if not has_collector(variables):
        return FileSpanExporter(directory, writer)
    problems = telemetry_problems(variables)
    if not problems:
        try:
            return _otlp(variables)
        except Exception as error:  # certificates that are missing, say
            problems = [f"{type(error).__name__}: {error}"]
    log.error("spans go to files in %s instead of the collector: %s", directory, "; ".join(problems))
    return FileSpanExporter(directory, writer)


def _otlp(variables: Mapping[str, str]) -> SpanExporter:
    # Here, because they cost 10 MB (http/protobuf) and 20 MB (grpc) that a process without a collector need not pay.
    if protocol_of(variables) == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()
