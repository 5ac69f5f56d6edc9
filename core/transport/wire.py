"""Messages of a channel (`channel.py`), as they are on a socket, and one end of a connection. No Ray.

Each message is a MessagePack array behind its length (four bytes, big endian).
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any, cast

import msgspec

from ..errors import InvalidInput
from ..protocol import packed, plain

log = logging.getLogger(__name__)

LENGTH = struct.Struct(">I")
LARGEST_MESSAGE = 1024 * 1024 * 1024
"""In bytes; Ray's packages of code, the largest that is sent, have 512 MiB. More is refused where it would be sent."""

CALLS_AT_ONCE = 1_000
"""So many calls of one client are worked at, as a rule; more are not read before some of them are answered."""

LARGE_NUMBER, HALF_CHARACTERS, PAIRS = 1, 2, 3
"""MessagePack's extension types for what it has no others for: numbers beyond 64 bits and texts with halves of
characters, as models write them, and objects that have such a text as a name."""


class Hello(msgspec.Struct, array_like=True, tag=0):
    """The first message of a client."""

    peer: str
    token: str


class Call(msgspec.Struct, array_like=True, tag=1):
    """A call. `call_id` is the same for all attempts of it; `number` is this attempt's."""

    number: int
    call_id: str
    method: str
    arguments: Any


class Result(msgspec.Struct, array_like=True, tag=2):
    """What a call returned."""

    number: int
    value: Any


class Failure(msgspec.Struct, array_like=True, tag=3):
    """What a call raised (`UnderstudyError.to_wire`)."""

    number: int
    error: dict[str, Any]


Message = Hello | Call | Result | Failure


def _escaped(value: Any) -> Any:
    """The value, with what MessagePack can't hold as extensions, and without subclasses of Python's own types, such as
    HTML libraries' texts: those arrive as what they are at bottom."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return msgspec.msgpack.Ext(HALF_CHARACTERS, value.encode("utf-8", "surrogatepass"))
        return plain(value)
    elif isinstance(value, bool):
        return value
    elif isinstance(value, int):
        if -(1 << 63) <= value < 1 << 64:
            return plain(value)
        size = value.bit_length() // 8 + 1
        return msgspec.msgpack.Ext(LARGE_NUMBER, value.to_bytes(size, "big", signed=True))
    elif isinstance(value, float):
        return plain(value)
    elif isinstance(value, dict):
        pairs = [(_escaped(key), _escaped(item)) for key, item in value.items()]
        if any(isinstance(key, msgspec.msgpack.Ext) for key, _ in pairs):
            return msgspec.msgpack.Ext(PAIRS, msgspec.msgpack.encode(pairs))
        return dict(pairs)
    elif isinstance(value, (list, tuple)):
        return [_escaped(item) for item in value]
    elif isinstance(value, msgspec.Struct) or is_dataclass(value):
        return _escaped(packed(value))
    return value


def _restored(code: int, data: memoryview) -> Any:
    if code == LARGE_NUMBER:
        return int.from_bytes(data, "big", signed=True)
    if code == HALF_CHARACTERS:
        return bytes(data).decode("utf-8", "surrogatepass")
    if code == PAIRS:
        return dict(msgspec.msgpack.decode(data, type=list[tuple[Any, Any]], ext_hook=_restored))
    raise msgspec.ValidationError(f"extension {code} is not known")


class Connection(asyncio.Protocol):
    """One end of a connection: splits what comes into messages, and knows when what is sent is not taken.

    Args:
        holds_back: reads no more while that is so, or many calls are under way. Only a server may: if both sides did,
            each could wait for the other.
        calls_at_once: so many are; None for any number.
    """

    def __init__(
        self, received: Callable[[Connection, Message], None], lost: Callable[[Connection], None], *, holds_back: bool,
        calls_at_once: int | None = None,
    ) -> None:  # fmt: skip
        self._received = received
        self._lost = lost
        self._holds_back = holds_back
        self._calls_at_once = calls_at_once
        self._buffer = bytearray()
        self._decoder = msgspec.msgpack.Decoder(Message, ext_hook=_restored)
        self._encoder = msgspec.msgpack.Encoder()
        self.transport: asyncio.Transport | None = None
        self.peer = ""
        self.pid = 0
        self._under_way = 0
        self.writable = asyncio.Event()
        self.writable.set()
        self.ended = asyncio.Event()
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= LENGTH.size:
                (size,) = LENGTH.unpack_from(buffer, start)
                if size > LARGEST_MESSAGE:
                    raise InvalidInput(f"a message of {size} bytes is announced; {LARGEST_MESSAGE} are the most")
                if len(buffer) - start - LENGTH.size < size:
                    break
                with memoryview(buffer) as view:
                    message = self._decoder.decode(view[start + LENGTH.size : start + LENGTH.size + size])
                start += LENGTH.size + size
                self._received(self, message)
        except (msgspec.MsgspecError, InvalidInput) as error:
            log.warning("a connection of %s is closed: %s", self.peer or "somebody unknown", error)
            self.close()
            return
        del buffer[:start]

    def send(self, message: Message) -> None:
        """Send a message, if the other side is there still.

        Raises:
            InvalidInput: it is larger than `LARGEST_MESSAGE`.
        """
        data = self._packed(message)
        if len(data) > LARGEST_MESSAGE:
            raise InvalidInput(f"a message of {len(data)} bytes can't be sent; {LARGEST_MESSAGE} are the most")
        if self.transport is not None and not self.transport.is_closing():
            # As one piece: some releases of Python 3.12 and 3.13 write several without ever holding the writer back.
            self.transport.write(LENGTH.pack(len(data)) + data)

    def _packed(self, message: Message) -> bytes:
        try:
            return self._encoder.encode(message)
        except (OverflowError, UnicodeEncodeError, TypeError):  # seldom: it is looked through only then
            fields = {name: _escaped(getattr(message, name)) for name in message.__struct_fields__}
            return self._encoder.encode(type(message)(**fields))

    def pause_writing(self) -> None:
        self.writable.clear()
        self._look()

    def resume_writing(self) -> None:
        self.writable.set()
        self._look()

    def begin(self) -> None:
        """One more call of the other side is worked at."""
        self._under_way += 1
        self._look()

    def end(self) -> None:
        """A call of the other side was answered."""
        self._under_way -= 1
        self._look()

    def _look(self) -> None:
        """Read on, or not."""
        transport = self.transport
        if not self._holds_back or transport is None or transport.is_closing():
            return
        many = self._calls_at_once is not None and self._under_way >= self._calls_at_once
        paused = many or not self.writable.is_set()
        if paused != self._paused:
            self._paused = paused
            (transport.pause_reading if paused else transport.resume_reading)()

    def connection_lost(self, _error: Exception | None) -> None:
        self.writable.set()
        self.ended.set()
        self._lost(self)

    def close(self) -> None:
        """End the connection; what was not sent yet is not sent."""
        if self.transport is not None:
            self.transport.abort()
