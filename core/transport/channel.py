"""Calls over a Unix socket, between processes of one machine. No Ray.

Calls are numbered, so that answers come in any order; `wire.py` has the messages. A client says who it is with a ticket
that it got on another way; a ticket lets one connection in. The end of a connection tells both sides that the other is
gone: what was asked and not answered fails with `ServiceGone`, and may or may not have had its effect.
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
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import InvalidConfiguration, InvalidInput, ServiceGone, UnderstudyError
from ..waiting import retrieve_error
from . import wire
from .wire import Call, Connection, Failure, Hello, Message, Result

log = logging.getLogger(__name__)

MOST_TICKETS = 10_000
"""So many tickets that nobody used are kept; the oldest go first."""

HELLO_SECONDS = 5.0
"""Who connects must say who it is within this time."""

WELCOME = 0
"""The number of the answer to a `Hello`."""

LONGEST_PATH = 100
"""In bytes; Linux takes 107."""


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


class ChannelServer:
    """Takes connections of clients that were given a ticket, and answers their calls.

    Args:
        name: of the socket, within `socket_directory`. The sockets of processes that were killed are removed there.
        calls_at_once: so many of one client are worked at; None for any number.
    """

    def __init__(
        self,
        name: str,
        answer: Answer,
        ended: Ended = lambda _peer, _pid: None,
        *,
        calls_at_once: int | None = wire.CALLS_AT_ONCE,
    ) -> None:
        self._name = name
        self._calls_at_once = calls_at_once
        self._answer = answer
        self._ended = ended
        self._tokens: dict[str, str] = {}
        self._connections: dict[str, Connection] = {}
        self._open: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.path = ""

    async def start(self) -> None:
        """Begin to listen, unless it does; again where the socket's file is gone, as it is where something removes old
        files from the directories for temporary ones. Connections stay.

        Raises:
            InvalidConfiguration: there is no safe place for the socket.
        """
        if self._is_found():
            return
        if self._server is not None:
            self._server.close()
        try:
            await self._listen(socket_directory() / f"{self._name}-{os.getpid()}.sock")
        except OSError as error:
            raise InvalidConfiguration(f"no socket can be made: {error}. Set TMPDIR to a directory for it") from None

    def _is_found(self) -> bool:
        return bool(self.path) and os.path.exists(self.path)

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

    def _connected(self) -> Connection:
        connection = Connection(
            self._received, self._lost, holds_back=True, calls_at_once=self._calls_at_once
        )  # fmt: skip
        self._open.add(connection)
        asyncio.get_running_loop().call_later(HELLO_SECONDS, self._end_unknown, connection)
        return connection

    def _end_unknown(self, connection: Connection) -> None:
        if not connection.peer:
            connection.close()

    def _received(self, connection: Connection, message: Message) -> None:
        if not connection.peer:
            self._let_in(connection, message)
        elif isinstance(message, Call):
            connection.begin()
            task = asyncio.get_running_loop().create_task(self._answered(connection, message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            raise InvalidInput("a client may only call")

    def _let_in(self, connection: Connection, message: Message) -> None:
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

    async def _answered(self, connection: Connection, call: Call) -> None:
        try:
            answer = await self._answer(connection.peer, call.call_id, call.method, call.arguments)
            connection.send(Result(call.number, answer))
        except asyncio.CancelledError:
            connection.send(Failure(call.number, ServiceGone("the call was given up").to_wire()))
        except Exception as error:  # also of an answer that can't be sent
            if not isinstance(error, UnderstudyError):
                log.exception("a call of %s by %s failed", call.method, connection.peer)
            connection.send(Failure(call.number, UnderstudyError.of(error).to_wire()))
        finally:
            connection.end()

    def _lost(self, connection: Connection) -> None:
        self._open.discard(connection)
        if self._connections.get(connection.peer) is connection:
            del self._connections[connection.peer]
            self._ended(connection.peer, connection.pid)


class Channel:
    """A client's connection.

    Attributes:
        lost: the server is gone, or has ended the connection; another one needs another ticket.
    """

    def __init__(self) -> None:
        _channels.add(self)
        self._connection = Connection(self._received, self._end, holds_back=False)
        self._connection.peer = "the service"
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._number = WELCOME
        self.lost = False

    @classmethod
    async def connect(cls, ticket: Ticket) -> Channel:
        """Connect with a ticket.

        Raises:
            ServiceGone: nobody listens there, or the ticket is not taken.
        """
        channel, loop = cls(), asyncio.get_running_loop()
        connection = channel._connection
        welcome = channel._pending[WELCOME] = loop.create_future()
        try:
            await loop.create_unix_connection(lambda: connection, ticket.path)
            connection.send(Hello(ticket.peer, ticket.token))
            await welcome
        except OSError as error:
            raise ServiceGone(f"nobody listens on {ticket.path}: {error.strerror}") from None
        except BaseException:
            connection.close()
            raise
        finally:
            del channel._pending[WELCOME]
        return channel

    async def call(self, call_id: str, method: str, *arguments: Any) -> Any:
        """The answer to a call.

        Args:
            arguments: JSON-compatible data, bytes, and structures of such data, which arrive as dictionaries; tuples
                arrive as lists.

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

    def close_copy(self) -> None:
        """Close what a forked process has of the connection: it would keep it open when this process has ended."""
        transport = self._connection.transport
        if transport is not None and not self.lost:
            with contextlib.suppress(OSError):
                os.close(transport.get_extra_info("socket").fileno())

    async def close(self) -> None:
        """End the connection; what was asked and not answered fails."""
        self._connection.close()
        await self._connection.ended.wait()

    def _received(self, _connection: Connection, message: Message) -> None:
        if not isinstance(message, (Result, Failure)):
            raise InvalidInput("a server may only answer")
        answer = self._pending.get(message.number)
        if answer is None or answer.done():
            return  # whoever asked has given up
        if isinstance(message, Failure):
            answer.set_exception(UnderstudyError.from_wire(message.error))
        else:
            answer.set_result(message.value)

    def _end(self, _connection: Connection) -> None:
        self.lost = True
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(ServiceGone("the service has ended the connection"))
                retrieve_error(answer)


_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


def _close_copies() -> None:
    for channel in list(_channels):
        channel.close_copy()


os.register_at_fork(after_in_child=_close_copies)


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
