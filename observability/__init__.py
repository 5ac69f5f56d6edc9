"""From committed events to Prometheus metrics, OpenTelemetry spans and JSON lines."""

from __future__ import annotations

from .event_files import replay as replay
