"""HTTP/1.1 as far as the offline model needs it: keep-alive, content-length in, chunks out."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Protocol, cast

from .protocol import compact, error_body

MAX_BODY = 64 * 1024 * 1024
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 429: "Too Many Requests"}


@dataclass(slots=True)
class Answer:
    """An HTTP response to be sent. `success` says how a chat request counts; None for other requests."""

    status: int
    content_type: str
    parts: list[bytes]
    streamed: bool = False
    extra: str = ""
    delay: float = 0.0
    cut: bool = False
    success: bool | None = False

    def frames(self, separate: bool) -> list[bytes]:
        """The bytes on the wire, the parts of a streamed answer `separate` or in one; half of them if it is cut."""
        head = (
            f"HTTP/1.1 {self.status} {REASONS.get(self.status, 'Error')}\r\ncontent-type: {self.content_type}\r\n"
            f"{self.extra}"
        )
        if self.streamed:
            parts = self.parts[: len(self.parts) // 2] if self.cut else self.parts
            if not separate:
                parts = [b"".join(parts)]
            frames = [b"%x\r\n%b\r\n" % (len(part), part) for part in parts]
            if not self.cut:
                frames.append(b"0\r\n\r\n")
            frames[0] = f"{head}transfer-encoding: chunked\r\n\r\n".encode() + frames[0]
            return frames
        body = b"".join(self.parts)
        header = f"{head}content-length: {len(body)}\r\n\r\n".encode()
        return [header + (body[: len(body) // 2] if self.cut else body)]


class Model(Protocol):
    """Whose requests come in here.

    Attributes:
        connections: those that are open.
        held: those that wait with their answers; None while none has to.
        chunk_delay: seconds between the events of a streamed answer.
    """

    connections: set[Connection]
    held: list[Connection] | None
    chunk_delay: float

    def answer(self, raw: bytes, headers: dict[str, str]) -> Answer:
        """The answer to a chat request."""

    def change(self, **changes: int) -> None:
        """Add to the counters."""

    def counted(self) -> bytes:
        """The counters as JSON."""


class Connection(asyncio.Protocol):
    """One keep-alive connection: answers its requests one after the other."""

    def __init__(self, server: Model) -> None:
        self.server = server
        self.transport: asyncio.Transport
        self._buffer = b""
        self._current: Answer | None = None
        self._close = False
        self._timer: asyncio.TimerHandle | None = None
        self._frames: deque[bytes] = deque()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        held = self.server.held
        if held is not None and self in held:
            held.remove(self)
        if self._current is not None and self._current.success is not None:
            self.server.change(aborted=1, in_flight=-1)
        self._current = None

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while self._current is None and not self.transport.is_closing() and self._take_request():
            pass

    def _take_request(self) -> bool:
        """Take one complete request out of the buffer and begin to answer it; False if there is none yet."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        request, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        method, _, rest = request.partition(" ")
        path, _, version = rest.rpartition(" ")
        length = headers.get("content-length", "0")
        if "transfer-encoding" in headers or not length.isdecimal() or int(length) > MAX_BODY:
            self._close = True
            self._buffer = b""
            self._begin(Answer(400, "application/json", [error_body(400, "send a content-length")], success=None))
            return False
        stop = end + 4 + int(length)
        if len(self._buffer) < stop:
            if headers.get("expect", "").lower() == "100-continue" and len(self._buffer) == end + 4:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            return False
        body, self._buffer = self._buffer[end + 4 : stop], self._buffer[stop:]
        self._close = headers.get("connection", "").lower() == "close" or version != "HTTP/1.1"
        self._begin(self._route(method, path.partition("?")[0], headers, body))
        return True

    def _route(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        if (method, path) == ("POST", "/v1/chat/completions"):
            answer = self.server.answer(body, headers)
            self.server.change(requests=1, in_flight=1)
            return answer
        if (method, path) == ("GET", "/v1/models"):
            listing = {
                "object": "list",
                "data": [{"id": "offline", "object": "model", "created": 0, "owned_by": "understudy"}],
            }
            return Answer(200, "application/json", [compact(listing).encode()], success=None)
        if (method, path) == ("GET", "/stats"):
            return Answer(200, "application/json", [self.server.counted()], success=None)
        known = path in ("/v1/chat/completions", "/v1/models", "/stats")
        status, message = (405, "Method not allowed") if known else (404, f"Invalid URL ({method} {path})")
        return Answer(status, "application/json", [error_body(status, message)], success=None)

    def _begin(self, answer: Answer) -> None:
        self._current = answer
        held = self.server.held
        if held is not None and answer.success is not None:
            held.append(self)
        elif answer.delay > 0:
            self._timer = asyncio.get_running_loop().call_later(answer.delay, self.send)
        else:
            self.send()

    def send(self) -> None:
        """Send the current answer, at once or event by event."""
        assert self._current is not None
        separate = self.server.chunk_delay > 0
        frames = self._current.frames(separate)
        if separate:
            self._frames = deque(frames)
            self._send_next()
        else:
            self._end(b"".join(frames))

    def _send_next(self) -> None:
        frame = self._frames.popleft()
        if not self._frames:
            self._end(frame)
            return
        self.transport.write(frame)
        self._timer = asyncio.get_running_loop().call_later(self.server.chunk_delay, self._send_next)

    def _end(self, last: bytes) -> None:
        """Send the end of the answer. It is counted before: who has read an answer finds it in the counters."""
        answer, self._current = self._current, None
        assert answer is not None
        if answer.success is not None:
            self.server.change(in_flight=-1, **{"completed" if answer.success else "failed": 1})
        self.transport.write(last)
        if answer.cut or self._close:
            self.transport.close()
        elif self._buffer:
            asyncio.get_running_loop().call_soon(self.data_received, b"")
