"""From committed events to Prometheus metrics and OpenTelemetry spans."""
