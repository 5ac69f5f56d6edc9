"""Reading server-sent events as they arrive."""

from __future__ import annotations

from .adapters import Malformed

MAX_LINE = 16 * 1024 * 1024
"""Bytes of one line; an endpoint that sends more is not speaking the protocol."""

MAX_ANSWER = 64 << 20
"""Bytes of an answer as it arrives: a stream says a token in some 300 of them, so this is more than any model says."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventStream:
    """Incremental parser of a `text/event-stream`, as the HTML standard defines it.

    What it gives does not depend on how the bytes are cut. `event`, `id` and `retry` are ignored: what an event of a
    model is, and where a stream can be continued, its data say.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._first = True
        self._after_return = False
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[str]:
        """The data of the events that `chunk` completes. What the stream ends without completing is dropped.

        Raises:
            Malformed: a line is longer than `MAX_LINE`.
        """
        if self._after_return and chunk.startswith(b"\n"):
            chunk = chunk[1:]  # the second half of a line end that was cut in two
            self._after_return = False
        if not chunk:
            return []
        self._after_return = chunk.endswith(b"\r")
        whole = self._rest + chunk
        lines = whole.splitlines()
        self._rest = b"" if whole.endswith((b"\n", b"\r")) else lines.pop()
        if len(self._rest) > MAX_LINE:
            raise Malformed(f"a line of more than {MAX_LINE} bytes")
        return self._take(lines)

    def _take(self, lines: list[bytes]) -> list[str]:
        events = []
        for line in lines:
            if self._first:
                self._first = False
                line = line.removeprefix(_BYTE_ORDER_MARK)
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" ").decode("utf-8", "replace"))
            elif not line and self._data:
                events.append("\n".join(self._data))
                self._data = []
        return events
