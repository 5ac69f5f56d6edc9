"""One run with two SIGKILLs and three sub-agents, traced into a collector that refuses at first.

`python -m tests.traced --seconds 60` shows it with a collector that refuses for a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from understudy.events import Event
from understudy.observability.spans import spans_of
from understudy.store.reads import queries

from .collectors import HttpCollector
from .kernel import kernel as k

SPAWN = [("spawn_agent", {"agent": "child", "task": f"look {number}"}) for number in range(3)]


@dataclass
class Shown:
    """What came out: the run, and its spans as the collector has them, by id, in the order of their first arrival."""

    status: str
    refusals: int
    seconds: float
    first: dict[str, Any] = field(default_factory=dict)
    again: dict[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> Counter[str]:
        return Counter(span.name for span in self.first.values())

    def problems(self) -> list[str]:
        """What is not as it must be."""
        found = []
        roots = [span.name for span in self.first.values() if not span.parent_span_id]
        lost = {span.parent_span_id.hex() for span in self.first.values() if span.parent_span_id} - self.first.keys()
        if roots != ["invoke_agent lead"]:
            found.append(f"roots: {roots}")
        if lost:
            found.append(f"parents that are missing: {lost}")
        if len({span.trace_id for span in self.first.values()}) != 1:
            found.append("more than one trace")
        if self.names["invoke_agent child"] != 3 or self.names["crash child"] + self.names["crash lead"] < 1:
            found.append(f"spans: {dict(self.names)}")
        if not self.names["recover child"] + self.names["recover lead"]:
            found.append("no recovery")
        if list(self.first) != list(self.again):
            found.append("another export has other spans, or another order")
        if [s.SerializeToString() for s in self.first.values()] != [s.SerializeToString() for s in self.again.values()]:
            found.append("another export has other bytes")
        return found


def spans_in(requests: Iterable[ExportTraceServiceRequest]) -> dict[str, Any]:
    """Spans by id; one that came again must be the same."""
    found: dict[str, Any] = {}
    for request in requests:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    known = found.setdefault(span.span_id.hex(), span)
                    assert known == span, f"{span.name} came twice, and differs"
    return found


async def show(directory: Path, seconds: float) -> Shown:
    """Do it; the collector refuses everything for so long, and the run does not wait for that."""
    note = [("note", {"path": str(directory / "notes"), "text": "x"})]
    child = k.spec(k.script(note, "seen"), [k.note], name="child")
    lead = k.spec(k.script(SPAWN, "all seen"), ["spawn_agent"], agents={"child": child}, name="lead")
    begun = time.monotonic()
    with HttpCollector() as collector:
        collector.refuse(seconds)
        telemetry = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
        os.environ.update(telemetry)
        try:
            dsn = f"sqlite:///{directory}/store.db"
            async with k.running(dsn, directory / "spans", telemetry=telemetry) as kernel:
                kernel.on_point = _killer(kernel)
                row = await kernel.run("s", lead)
                await kernel.quiet()
                events = await _events(kernel)
                wanted = spans_in([encode_spans([span for event in events for span in spans_of(event)])])
                async with asyncio.timeout(seconds + 60):
                    while len(spans_in(collector.received)) < len(wanted):
                        await collector.more()
        finally:
            os.environ.pop("OTEL_EXPORTER_OTLP_ENDPOINT")
    shown = Shown(row["status"], collector.refusals, time.monotonic() - begun)
    shown.first, shown.again = spans_in(collector.received), wanted
    return shown


def _killer(kernel: k.Kernel) -> Any:
    """SIGKILL for the first session actor whose tool has had its effect, and for the node service at the second."""
    kills = ["node", "frame"]

    def on_point(_number: int, label: str, worker: k.Worker | None) -> None:
        if label == "tool has had its effect" and worker is not None and kills:
            if kills.pop() == "frame":
                kernel.kill(worker)
            else:
                kernel.kill_node()

    return on_point


async def _events(kernel: k.Kernel) -> list[Event]:
    config = kernel.service.config
    found: list[Event] = await kernel.service.reading.query(queries.writer_events, config.writer, 0, 10_000)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    with tempfile.TemporaryDirectory() as directory:
        shown = asyncio.run(show(Path(directory), parser.parse_args().seconds))
    print(f"run {shown.status}; {len(shown.first)} spans after {shown.refusals} refusals, {shown.seconds:.1f} s in all")
    for name, count in sorted(shown.names.items()):
        print(f"  {count} {name}")
    print("problems:", "; ".join(shown.problems()) or "none")


if __name__ == "__main__":
    main()
