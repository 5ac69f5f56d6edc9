"""Grafana dashboards and Prometheus alert rules, built by typed code; the files it builds are beside it."""
