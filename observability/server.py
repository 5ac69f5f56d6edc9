"""The HTTP endpoint that Prometheus scrapes: `/metrics`, `/targets` to find all of them, and two pages for probes."""

from __future__ import annotations

import ipaddress
import json
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


def _ready() -> str:
    return ""


def _no_targets() -> list[dict[str, Any]]:
    return []


class _Handler(MetricsHandler):
    server_version = "understudy"
    sys_version = ""
    timeout = 30
    """Seconds after which a client that sends nothing is let go."""

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, _Server)
        path = urlsplit(self.path).path
        if path == "/metrics":
            server.scraped()
            super().do_GET()
        elif path == "/healthz":
            self._answer(200, b"ok\n")
        elif path == "/readyz":
            reason = server.ready()
            self._answer(503 if reason else 200, f"{reason or 'ok'}\n".encode())
        elif path == "/targets":
            self._answer(200, json.dumps(server.targets()).encode(), "application/json")
        else:
            self._answer(404, b"Here are /metrics, /targets, /healthz and /readyz.\n")

    def _answer(self, status: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    ready: Callable[[], str]
    targets: Callable[[], list[dict[str, Any]]]
    scraped: Callable[[], None]

    def handle_error(self, request: Any, client_address: Any) -> None:
        # The base class prints to stderr; most of these are clients that hung up.
        log.debug("request from %s failed", client_address, exc_info=True)


class _ServerIPv6(_Server):
    address_family = socket.AF_INET6


def serve_metrics(
    registry: Collector,
    port: int,
    host: str = "127.0.0.1",
    *,
    ready: Callable[[], str] = _ready,
    targets: Callable[[], list[dict[str, Any]]] = _no_targets,
    scraped: Callable[[], None] = lambda: None,
) -> tuple[int, Callable[[], None]]:
    """Serve `registry` from a thread of its own, in OpenMetrics or Prometheus text as the client asks.

    A port that can't be had must not keep a service from starting: then a free one is taken, and logged.

    Args:
        port: 0 for any free one.
        ready: why the service is not ready, for `/readyz`; empty if it is. Called, like the others, in threads.
        targets: what `/targets` answers: Prometheus' HTTP service discovery.
        scraped: called before each scrape.

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
    server.ready, server.targets, server.scraped = ready, targets, scraped
    thread = threading.Thread(target=server.serve_forever, name="understudy-metrics", daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return int(server.server_address[1]), stop


def address_of(host: str, port: int) -> str:
    """`host:port` as URLs and Prometheus want it: an IPv6 address in brackets."""
    try:
        bracketed = ipaddress.ip_address(host).version == 6
    except ValueError:
        bracketed = False
    return f"[{host}]:{port}" if bracketed else f"{host}:{port}"
