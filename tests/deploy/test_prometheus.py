"""A real Prometheus finds the node services, and scrapes what they serve."""

from __future__ import annotations

from pathlib import Path

import pytest

from understudy.events import ModelCallCompleted
from understudy.observability.metrics import Metrics
from understudy.observability.server import MetricsServer

from ..prometheus import prometheus

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.mark.thorough
def test_prometheus_scrapes_counters_and_keeps_exemplars(tmp_path: Path) -> None:
    """The exposition is one that the real thing takes, exemplars with their trace id included."""
    metrics = Metrics()
    shown = MetricsServer(metrics.registry, 0)
    shown.start()
    port = shown.port
    try:
        metrics.apply([ModelCallCompleted(trace_id=TRACE, model="m", duration=700_000, writer_seq=1)])
        with prometheus(tmp_path / "prometheus", targets=[f"127.0.0.1:{port}"]) as server:
            answered = 'understudy_model_calls_total{outcome="ok"}'
            server.until(lambda: server.query(answered) != {}, "a scrape")
            assert server.value(answered) == 1
            assert server.targets() == {f"http://127.0.0.1:{port}/metrics": "up"}
    finally:
        shown.close()
