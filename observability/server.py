"""The HTTP endpoint that Prometheus scrapes: `/metrics`, `/targets` to find all of them, and two pages for probes."""

from __future__ import annotations

import errno
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

from understudy.errors import InvalidConfiguration, MetricsPortTaken

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


class MetricsServer:
    """The endpoint of one node service. It has its port from the beginning, and answers once it is started.

    Args:
        port: 0 for any free one.
        ready: why the service is not ready, for `/readyz`; empty if it is. Called, like the others, in threads.
        targets: what `/targets` answers: Prometheus' HTTP service discovery.
        scraped: called before each scrape.

    Attributes:
        port: which one it has.

    Raises:
        MetricsPortTaken: somebody else listens on that port.
        InvalidConfiguration: `host` is no address of this machine, or the port can't be had for another reason.
    """

    def __init__(
        self,
        registry: Collector,
        port: int,
        host: str = "127.0.0.1",
        *,
        ready: Callable[[], str] = _ready,
        targets: Callable[[], list[dict[str, Any]]] = _no_targets,
        scraped: Callable[[], None] = lambda: None,
    ) -> None:
        listener = _listening(port, host)
        self.port = int(listener.getsockname()[1])
        self._server = _Server((host, port), _Handler.factory(registry), bind_and_activate=False)
        self._server.socket.close()
        self._server.socket = listener
        self._server.ready, self._server.targets, self._server.scraped = ready, targets, scraped
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Serve, in a thread of its own; once, however often it is called."""
        if self._thread is not None:
            return
        self._thread = threading.Thread(target=self._server.serve_forever, name="understudy-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let go of the port, and wait for the thread."""
        if self._thread is not None:
            self._server.shutdown()
        self._server.server_close()
        if self._thread is not None:
            self._thread.join()


def _listening(port: int, host: str) -> socket.socket:
    """A socket that listens there. Connections of a predecessor that linger do not keep it (`SO_REUSEADDR`, which
    `create_server` sets): only somebody who listens does."""
    six = ":" in host
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if six else socket.AF_INET,
            dualstack_ipv6=six and socket.has_dualstack_ipv6(),
        )  # fmt: skip
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise MetricsPortTaken(f"port {port} for metrics is taken: somebody else listens on it at {host}") from None
        raise InvalidConfiguration(f"metrics can't be served at {address_of(host, port)}: {error}") from error


def address_of(host: str, port: int) -> str:
    """`host:port` as URLs and Prometheus want it: an IPv6 address in brackets."""
    try:
        bracketed = ipaddress.ip_address(host).version == 6
    except ValueError:
        bracketed = False
    return f"[{host}]:{port}" if bracketed else f"{host}:{port}"
