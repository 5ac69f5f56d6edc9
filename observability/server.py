"""The HTTP endpoint that Prometheus scrapes: `/metrics`, and `/healthz` for probes."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import MetricsHandler
from prometheus_client.registry import Collector

from understudy.errors import InvalidConfiguration

log = logging.getLogger(__name__)


class _Handler(MetricsHandler):
    timeout = 30
    """Seconds after which a client that sends nothing is let go."""

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path == "/metrics":
            super().do_GET()
        elif path == "/healthz":
            self._answer(200, b"ok\n")
        else:
            self._answer(404, b"Here are /metrics and /healthz.\n")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        # The base class prints to stderr; most of these are clients that hung up.
        log.debug("request from %s failed", client_address, exc_info=True)


class _ServerIPv6(_Server):
    address_family = socket.AF_INET6


def serve_metrics(registry: Collector, port: int, host: str = "127.0.0.1") -> tuple[int, Callable[[], None]]:
    """Serve `registry` from a thread of its own, in OpenMetrics or Prometheus text as the client asks.

    A port that can't be had must not keep a service from starting: then a free one is taken, and logged.

    Args:
        port: 0 for any free one.

    Returns:
        The port actually used, and a function that stops the server and waits for its thread.

    Raises:
        InvalidConfiguration: `host` is no address of this machine.
    """
    handler = _Handler.factory(registry)
    kind = _ServerIPv6 if ":" in host else _Server
    try:
        server = kind((host, port), handler)
    except OSError as refused:
        try:
            server = kind((host, 0), handler)
        except OSError as error:
            raise InvalidConfiguration(f"metrics can't be served on address {host!r}: {error}") from error
        log.warning(
            "port %d for metrics can't be had (%s): they are on port %d", port, refused, server.server_address[1]
        )
    thread = threading.Thread(target=server.serve_forever, name="understudy-metrics", daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return int(server.server_address[1]), stop
