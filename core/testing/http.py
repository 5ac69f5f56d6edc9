"""HTTP/1.1 as far as the offline model needs it: keep-alive, content-length in, chunks out."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import parse_qs

from .protocol import compact, error_body
from .stored import StoredResponse

CALLS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
"""Where models are called."""

RESPONSES = "/v1/responses/"
"""Below this are the responses that are kept."""

MAX_BODY = 64 * 1024 * 1024
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 429: "Too Many Requests"}


@dataclass(slots=True)
class Answer:
    """An HTTP response to be sent.

    Attributes:
        cut: the connection is closed after `parts_sent` of its parts, or half of them.
        stall: nothing more comes after these, and the connection stays open.
        stored: what is streamed is this, from the event of the number `position` on, as it is made.
        success: how a model call counts; None for other requests.
    """

    status: int
    content_type: str
    parts: list[bytes]
    streamed: bool = False
    extra: str = ""
    delay: float = 0.0
    cut: bool = False
    stall: bool = False
    parts_sent: int = 0
    stored: StoredResponse | None = None
    position: int = 0
    success: bool | None = False

    @property
    def is_partial(self) -> bool:
        """Whether not all of it is sent."""
        return self.cut or self.stall

    def head(self) -> str:
        """The status and the headers, without those that say how long it is."""
        return (
            f"HTTP/1.1 {self.status} {REASONS.get(self.status, 'Error')}\r\ncontent-type: {self.content_type}\r\n"
            f"{self.extra}"
        )

    def most(self, parts: int) -> int:
        """So many of these parts are sent."""
        return (self.parts_sent or max(1, parts // 2)) if self.is_partial else parts

    def frames(self, separate: bool) -> list[bytes]:
        """The bytes on the wire, the parts of a streamed answer `separate` or in one; half of them if it is cut."""
        if self.streamed:
            parts = self.parts[: self.most(len(self.parts))]
            if not separate:
                parts = [b"".join(parts)]
            frames = [chunk(part) for part in parts]
            if not self.is_partial:
                frames.append(LAST_CHUNK)
            frames[0] = f"{self.head()}{CHUNKED}".encode() + frames[0]
            return frames
        body = b"".join(self.parts)
        header = f"{self.head()}content-length: {len(body)}\r\n\r\n".encode()
        return [header + (body[: len(body) // 2] if self.is_partial else body)]


CHUNKED = "transfer-encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


def chunk(part: bytes) -> bytes:
    """A part of a body that is sent in chunks."""
    return b"%x\r\n%b\r\n" % (len(part), part)


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

    def answer(self, raw: bytes, headers: dict[str, str], path: str) -> Answer:
        """The answer to a model call."""

    def fetched(self, identifier: str, query: dict[str, list[str]]) -> Answer:
        """What is kept of a response."""

    def cancelled(self, identifier: str) -> Answer:
        """A response that shall end."""

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
        self._sent = 0

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
        if self._current is not None and self._current.stored is not None:
            self._current.stored.followers.discard(self)
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
        path, _, query = path.partition("?")
        self._begin(self._route(method, path, query, headers, body))
        return True

    def _route(self, method: str, path: str, query: str, headers: dict[str, str], body: bytes) -> Answer:
        if method == "POST" and path in CALLS:
            answer = self.server.answer(body, headers, path)
            self.server.change(requests=1, in_flight=1)
            return answer
        identifier = path.removeprefix(RESPONSES).partition("/")[0] if path.startswith(RESPONSES) else ""
        if identifier and (method, path) == ("GET", RESPONSES + identifier):
            return self.server.fetched(identifier, parse_qs(query))
        if identifier and (method, path) == ("POST", f"{RESPONSES}{identifier}/cancel"):
            return self.server.cancelled(identifier)
        if (method, path) == ("GET", "/v1/models"):
            listing = {
                "object": "list",
                "data": [{"id": "offline", "object": "model", "created": 0, "owned_by": "understudy"}],
            }
            return Answer(200, "application/json", [compact(listing).encode()], success=None)
        if (method, path) == ("GET", "/stats"):
            return Answer(200, "application/json", [self.server.counted()], success=None)
        known = path in (*CALLS, "/v1/models", "/stats")
        status, message = (405, "Method not allowed") if known else (404, f"Invalid URL ({method} {path})")
        return Answer(status, "application/json", [error_body(status, message)], success=None)

    def _begin(self, answer: Answer) -> None:
        self._current = answer
        held = self.server.held
        if answer.stored is not None:  # it grows by itself, or is held back by itself
            self._sent = answer.position
            self.transport.write(f"{answer.head()}{CHUNKED}".encode())
            self.follow()
        elif held is not None and answer.success is not None:
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

    def follow(self) -> None:
        """Send what there is of a response that is kept, and go on when there is more of it."""
        answer = self._current
        assert answer is not None
        assert answer.stored is not None
        stored, loop = answer.stored, asyncio.get_running_loop()
        most = answer.position + answer.most(len(stored.events) - answer.position)
        end = min(stored.available(loop.time()), most)
        if end > self._sent:
            self.transport.write(chunk(b"".join(stored.events[self._sent : end])))
            self._sent = end
        if answer.is_partial and end == most:
            self._end(b"")
        elif stored.is_over(loop.time()) and end == stored.available(loop.time()):
            self._end(LAST_CHUNK)
        elif (due := stored.due(end)) is None:
            stored.followers.add(self)
        else:
            self._timer = loop.call_at(due, self.follow)

    def _send_next(self) -> None:
        frame = self._frames.popleft()
        if not self._frames:
            self._end(frame)
            return
        self.transport.write(frame)
        self._timer = asyncio.get_running_loop().call_later(self.server.chunk_delay, self._send_next)

    def _end(self, last: bytes) -> None:
        """Send the end of the answer. It is counted before: who has read an answer finds it in the counters."""
        assert self._current is not None
        if self._current.stall:  # until the client gives up
            self.transport.write(last)
            return
        answer, self._current = self._current, None
        if answer.success is not None:
            self.server.change(in_flight=-1, **{"completed" if answer.success else "failed": 1})
        self.transport.write(last)
        if answer.cut or self._close:
            self.transport.close()
        elif self._buffer:
            asyncio.get_running_loop().call_soon(self.data_received, b"")
