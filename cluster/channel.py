"""Calls over a Unix socket, between processes of one machine. No Ray.

Each message is a MessagePack array behind its length (four bytes, big endian). Calls are numbered, so that answers come
in any order. A client says who it is with a ticket that it got on another way; a ticket lets one connection in. The end
of a connection tells both sides that the other is gone: what was asked and not answered fails with `ServiceGone`, and
may or may not have had its effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import secrets
import socket
import stat
import struct
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from understudy.errors import InvalidConfiguration, InvalidInput, ServiceGone, UnderstudyError
from understudy.waiting import retrieve_error

log = logging.getLogger(__name__)

LENGTH = struct.Struct(">I")
LARGEST_MESSAGE = 1024 * 1024 * 1024
"""In bytes; Ray's packages of code, the largest that is sent, have 512 MiB. More is refused where it would be sent."""

MOST_TICKETS = 10_000
"""So many tickets that nobody used are kept; the oldest go first."""

CALLS_AT_ONCE = 1_000
"""So many calls of one client are worked at; more are not read before some of them are answered."""

HELLO_SECONDS = 5.0
"""Who connects must say who it is within this time."""

LARGE_NUMBER, HALF_CHARACTERS, PAIRS = 1, 2, 3
"""MessagePack's extension types for what it has no others for: numbers beyond 64 bits and texts with halves of
characters, as models write them, and objects that have such a text as a name."""

WELCOME = 0
"""The number of the answer to a `Hello`."""

LONGEST_PATH = 100
"""In bytes; Linux takes 107."""


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


class Ticket(NamedTuple):
    """Lets one client in, once.

    Attributes:
        path: of the socket.
        peer: who may use it.
    """

    path: str
    peer: str
    token: str


Answer = Callable[[str, str, str, list[Any]], Awaitable[Any]]
"""Does what a call asks for: who calls (`Ticket.peer`), the call's id, its method and arguments."""

Ended = Callable[[str, int], None]
"""Hears of the end of a client's last connection: whose it was, and the pid that its process had here (0: unknown)."""


def socket_directory() -> Path:
    """A directory for sockets that nobody but this user (and root) may enter.

    Raises:
        InvalidConfiguration: there is something of that name which another user made, or may enter.
        OSError: it can't be made.
    """
    path = Path(tempfile.gettempdir()) / f"understudy-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise InvalidConfiguration(
            f"{path} must be a directory of user {os.getuid()} that nobody else may enter: remove it, or set TMPDIR to "
            "another directory for temporary files"
        )
    return path


def _escaped(value: Any) -> Any:
    """The value, with what MessagePack can't hold as extensions, and without subclasses of Python's own types, such as
    HTML libraries' texts: those arrive as what they are at bottom."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return msgspec.msgpack.Ext(HALF_CHARACTERS, value.encode("utf-8", "surrogatepass"))
        return str.__str__(value)
    elif isinstance(value, bool):
        return value
    elif isinstance(value, int):
        if -(1 << 63) <= value < 1 << 64:
            return int.__int__(value)
        size = value.bit_length() // 8 + 1
        return msgspec.msgpack.Ext(LARGE_NUMBER, value.to_bytes(size, "big", signed=True))
    elif isinstance(value, float):
        return float.__float__(value)
    elif isinstance(value, dict):
        pairs = [(_escaped(key), _escaped(item)) for key, item in value.items()]
        if any(isinstance(key, msgspec.msgpack.Ext) for key, _ in pairs):
            return msgspec.msgpack.Ext(PAIRS, msgspec.msgpack.encode(pairs))
        return dict(pairs)
    elif isinstance(value, (list, tuple)):
        return [_escaped(item) for item in value]
    return value


def _restored(code: int, data: memoryview) -> Any:
    if code == LARGE_NUMBER:
        return int.from_bytes(data, "big", signed=True)
    if code == HALF_CHARACTERS:
        return bytes(data).decode("utf-8", "surrogatepass")
    if code == PAIRS:
        return dict(msgspec.msgpack.decode(data, type=list[tuple[Any, Any]], ext_hook=_restored))
    raise msgspec.ValidationError(f"extension {code} is not known")


class _Connection(asyncio.Protocol):
    """One end of a connection: splits what comes into messages, and knows when what is sent is not taken.

    Args:
        holds_back: reads no more while that is so, or many calls are under way. Only a server may: if both sides did,
            each could wait for the other.
    """

    def __init__(
        self, received: Callable[[_Connection, Message], None], lost: Callable[[_Connection], None], *, holds_back: bool
    ) -> None:  # fmt: skip
        self._received = received
        self._lost = lost
        self._holds_back = holds_back
        self._buffer = bytearray()
        self._decoder = msgspec.msgpack.Decoder(Message, ext_hook=_restored)
        self._encoder = msgspec.msgpack.Encoder()
        self.transport: asyncio.Transport | None = None
        self.peer = ""
        self.pid = 0
        self.under_way = 0
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
        self.look()

    def resume_writing(self) -> None:
        self.writable.set()
        self.look()

    def look(self) -> None:
        """Read on, or not."""
        transport = self.transport
        if not self._holds_back or transport is None or transport.is_closing():
            return
        paused = not self.writable.is_set() or self.under_way >= CALLS_AT_ONCE
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


class ChannelServer:
    """Takes connections of clients that were given a ticket, and answers their calls.

    Args:
        name: of the socket, within `socket_directory`. The sockets of processes that were killed are removed there.
    """

    def __init__(self, name: str, answer: Answer, ended: Ended = lambda _peer, _pid: None) -> None:
        self._name = name
        self._answer = answer
        self._ended = ended
        self._tokens: dict[str, str] = {}
        self._connections: dict[str, _Connection] = {}
        self._open: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.path = ""

    async def start(self) -> None:
        """Begin to listen.

        Raises:
            InvalidConfiguration: there is no safe place for the socket.
        """
        try:
            await self._listen(socket_directory() / f"{self._name}-{os.getpid()}.sock")
        except OSError as error:
            raise InvalidConfiguration(f"no socket can be made: {error}. Set TMPDIR to a directory for it") from None

    async def _listen(self, path: Path) -> None:
        for old in path.parent.glob("*.sock"):
            if _is_dead(old):
                old.unlink(missing_ok=True)
        # It has its name once it listens: before, whoever removes dead sockets could take it for one.
        begun = path.with_suffix(".new")
        if len(os.fsencode(path)) > LONGEST_PATH:
            raise InvalidConfiguration(f"the path of a socket is too long: {path}. Set TMPDIR to a shorter directory")
        begun.unlink(missing_ok=True)
        self._server = await asyncio.get_running_loop().create_unix_server(self._connected, str(begun))
        begun.chmod(0o600)
        begun.rename(path)
        self.path = str(path)

    async def close(self) -> None:
        """Stop listening, and end all connections."""
        if self._server is not None:
            self._server.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
        for task in self._tasks:
            task.cancel()
        for connection in list(self._open):
            connection.close()
            await connection.ended.wait()

    def admit(self, peer: str) -> Ticket:
        """A ticket for a client, which replaces one that it did not use."""
        self._tokens.pop(peer, None)
        token = self._tokens[peer] = secrets.token_hex(16)
        while len(self._tokens) > MOST_TICKETS:
            del self._tokens[next(iter(self._tokens))]
        return Ticket(self.path, peer, token)

    def _connected(self) -> _Connection:
        connection = _Connection(self._received, self._lost, holds_back=True)
        self._open.add(connection)
        asyncio.get_running_loop().call_later(HELLO_SECONDS, self._end_unknown, connection)
        return connection

    def _end_unknown(self, connection: _Connection) -> None:
        if not connection.peer:
            connection.close()

    def _received(self, connection: _Connection, message: Message) -> None:
        if not connection.peer:
            self._let_in(connection, message)
        elif isinstance(message, Call):
            connection.under_way += 1
            if connection.under_way >= CALLS_AT_ONCE:
                connection.look()
            task = asyncio.get_running_loop().create_task(self._answered(connection, message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            raise InvalidInput("a client may only call")

    def _let_in(self, connection: _Connection, message: Message) -> None:
        assert connection.transport is not None
        pid, user = _process(connection.transport)
        if user not in (os.getuid(), 0):
            raise InvalidInput("it is of another user")
        if not isinstance(message, Hello):
            raise InvalidInput("it does not say who it is")
        token = self._tokens.get(message.peer, "")
        if not token or not hmac.compare_digest(token.encode(), message.token.encode()):
            raise InvalidInput("it has no ticket")
        del self._tokens[message.peer]
        earlier = self._connections.get(message.peer)
        if earlier is not None:
            earlier.close()
        connection.peer, connection.pid = message.peer, pid
        self._connections[message.peer] = connection
        connection.send(Result(WELCOME, None))

    async def _answered(self, connection: _Connection, call: Call) -> None:
        reply: Message
        try:
            answer = await self._answer(connection.peer, call.call_id, call.method, call.arguments)
            reply = Result(call.number, answer)
        except UnderstudyError as error:
            reply = Failure(call.number, error.to_wire())
        except asyncio.CancelledError:
            reply = Failure(call.number, ServiceGone("the call was given up").to_wire())
        except Exception as error:
            log.exception("a call of %s by %s failed", call.method, connection.peer)
            reply = Failure(call.number, UnderstudyError(f"{type(error).__name__}: {error}").to_wire())
        try:
            connection.send(reply)
        except InvalidInput as error:
            connection.send(Failure(call.number, error.to_wire()))
        except Exception as error:
            log.exception("the answer to a call of %s by %s can't be sent", call.method, connection.peer)
            connection.send(Failure(call.number, UnderstudyError(f"{type(error).__name__}: {error}").to_wire()))
        finally:
            connection.under_way -= 1
            if connection.under_way == CALLS_AT_ONCE - 1:
                connection.look()

    def _lost(self, connection: _Connection) -> None:
        self._open.discard(connection)
        if self._connections.get(connection.peer) is connection:
            del self._connections[connection.peer]
            self._ended(connection.peer, connection.pid)


class Channel:
    """A client's connection.

    Attributes:
        lost: the server is gone, or has ended the connection; another one needs another ticket.
    """

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self.lost = False

    @classmethod
    async def connect(cls, ticket: Ticket) -> Channel:
        """Connect with a ticket.

        Raises:
            ServiceGone: nobody listens there, or the ticket is not taken.
        """
        channel: Channel | None = None

        def received(_connection: _Connection, message: Message) -> None:
            assert channel is not None
            channel._received(message)

        def lost(_connection: _Connection) -> None:
            if channel is not None:
                channel._end()

        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_unix_connection(
                lambda: _Connection(received, lost, holds_back=False), ticket.path
            )
        except OSError as error:
            raise ServiceGone(f"nobody listens on {ticket.path}: {error.strerror}") from None
        channel = cls(connection)
        connection.peer = "the service"
        welcome = channel._pending[WELCOME] = loop.create_future()
        try:
            connection.send(Hello(ticket.peer, ticket.token))
            await welcome
        except BaseException:
            connection.close()
            raise
        finally:
            del channel._pending[WELCOME]
        return channel

    async def call(self, call_id: str, method: str, *arguments: Any) -> Any:
        """The answer to a call.

        Args:
            arguments: JSON-compatible data, and bytes; tuples arrive as lists.

        Raises:
            UnderstudyError: what the call raised.
            ServiceGone: the connection ended first; the call may or may not have had its effect.
            InvalidInput: it is larger than `LARGEST_MESSAGE`, and was not sent.
        """
        await self._connection.writable.wait()
        if self.lost:
            raise ServiceGone("the service has ended the connection")
        self._number += 1
        number = self._number
        answer = self._pending[number] = asyncio.get_running_loop().create_future()
        try:
            self._connection.send(Call(number, call_id, method, arguments))
            return await answer
        finally:
            self._pending.pop(number, None)

    async def close(self) -> None:
        """End the connection; what was asked and not answered fails."""
        self._connection.close()
        await self._connection.ended.wait()

    def _received(self, message: Message) -> None:
        if not isinstance(message, (Result, Failure)):
            raise InvalidInput("a server may only answer")
        answer = self._pending.get(message.number)
        if answer is None or answer.done():
            return  # whoever asked has given up
        if isinstance(message, Failure):
            answer.set_exception(UnderstudyError.from_wire(message.error))
        else:
            answer.set_result(message.value)

    def _end(self) -> None:
        self.lost = True
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(ServiceGone("the service has ended the connection"))
                retrieve_error(answer)


def _process(transport: asyncio.Transport) -> tuple[int, int]:
    """The process at the other end, and its user (`unix(7)`, SO_PEERCRED)."""
    credentials = struct.Struct("3i")
    found = transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    pid, user, _ = credentials.unpack(found)
    return int(pid), int(user)


def _is_dead(path: Path) -> bool:
    """Whether nobody listens on this socket any more. Its name does not say: its process may be in another
    container."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
    return False
