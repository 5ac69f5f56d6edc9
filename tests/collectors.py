"""Real OTLP receivers on sockets, which can fail in the ways that collectors do."""

from __future__ import annotations

import asyncio
import gzip
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

Request = trace_service_pb2.ExportTraceServiceRequest


class HttpCollector:
    """A real OTLP/HTTP receiver; does what `faults` says first: a status, or `hang`, `close`, `truncate`."""

    def __init__(self) -> None:
        self.faults: list[int | str] = []
        self.received: list[Request] = []
        self.headers: list[dict[str, str]] = []
        self.let_go = threading.Event()
        self.refusals = 0
        self._refuses_for = self._refuses_until = 0.0
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                fault = collector.next_fault()
                collector.headers.append(dict(self.headers))
                if fault == "hang":
                    collector.let_go.wait(20)
                    return
                if fault == "close":
                    return
                if fault == 200:
                    collector.received.append(Request.FromString(collector.unpacked(self.headers, body)))
                self.send_response(int(fault) if fault != "truncate" else 500)
                self.send_header("Content-Length", "100" if fault == "truncate" else "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def refuse(self, seconds: float) -> None:
        """Answer 503 and 400 in turn for so long, from the first request on."""
        self._refuses_for = seconds

    def next_fault(self) -> int | str:
        if self._refuses_for:
            self._refuses_until, self._refuses_for = time.monotonic() + self._refuses_for, 0.0
        if time.monotonic() < self._refuses_until:
            self.refusals += 1
            return 503 if self.refusals % 2 else 400
        return self.faults.pop(0) if self.faults else 200

    async def more(self) -> None:
        """Wait until something else was received."""
        known = len(self.received)
        while len(self.received) == known:  # noqa: ASYNC110 (a thread receives)
            await asyncio.sleep(0.02)

    def __enter__(self) -> HttpCollector:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def unpacked(self, headers: Any, body: bytes) -> bytes:
        return gzip.decompress(body) if headers.get("Content-Encoding") == "gzip" else body

    def close(self) -> None:
        self.let_go.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


class GrpcCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """A real OTLP/gRPC receiver; answers with the status codes of `faults` first."""

    def __init__(self) -> None:
        self.faults: list[grpc.StatusCode | str] = []
        self.received: list[Request] = []
        self.headers: list[dict[str, str]] = []
        self.let_go = threading.Event()
        self.pool = ThreadPoolExecutor(4)
        self.server = grpc.server(self.pool)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self.server)
        self.url = f"http://127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def Export(self, request: Request, context: Any) -> Any:
        self.headers.append({key: value for key, value in context.invocation_metadata()})
        fault = self.faults.pop(0) if self.faults else None
        if fault == "hang":
            self.let_go.wait(20)
        elif fault is not None:
            context.abort(fault, "not now")
        self.received.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    def close(self) -> None:
        self.let_go.set()
        self.server.stop(None).wait()
        self.pool.shutdown()
