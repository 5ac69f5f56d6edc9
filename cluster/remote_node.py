"""The node service as a frame reaches it, from another process. No Ray."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, Protocol

from understudy.errors import ServiceGone, UnderstudyError

from .channel import Channel, Ticket
from .repeating import FRAME_PATIENCE, Repeating

log = logging.getLogger(__name__)

ADMIT_SECONDS = 5.0
"""How long a ticket is waited for: what a service is asked that is killed can get lost."""


CONNECT_TRIES = 3


class Attempt(Protocol):
    """Makes one attempt of a call. Raises `ServiceGone` when the service can't be reached."""

    def __call__(self, call_id: str, method: str, *arguments: Any) -> Awaitable[Any]: ...


class RemoteNode:
    """A `understudy.ports.Node` in another process. Its calls are repeated until they are answered.

    Args:
        attempt: how the service is reached.
    """

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._repeating = Repeating(FRAME_PATIENCE)

    async def step(self, call: dict[str, Any]) -> dict[str, Any]:
        """See `Node.step`."""
        found: dict[str, Any] = await self._call("step", call)
        return found

    async def commit(self, call: dict[str, Any]) -> dict[str, Any]:
        """See `Node.commit`."""
        found: dict[str, Any] = await self._call("commit", call)
        return found

    async def reload(self, session_id: str, incarnation: int, epoch: int) -> dict[str, Any]:
        """See `Node.reload`."""
        found: dict[str, Any] = await self._call("reload", session_id, incarnation, epoch)
        return found

    async def interrupted(self, session_id: str, incarnation: int, epoch: int, run_id: str) -> str:
        """See `Node.interrupted`."""
        return str(await self._call("interrupted", session_id, incarnation, epoch, run_id))

    async def specification(self, session_id: str) -> dict[str, Any]:
        """See `Node.specification`."""
        found: dict[str, Any] = await self._call("specification", session_id)
        return found

    async def blob(self, digest: str) -> bytes:
        """See `Node.blob`."""
        found: bytes = await self._call("blob", digest)
        return found

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return await self._repeating.call(lambda call_id: self._attempt(call_id, method, *arguments))
        except ServiceGone as error:
            log.warning("the node service is gone for good: %s", error)
            return await self._leave()

    async def _leave(self) -> NoReturn:
        """End this process: nobody will ever give it work."""
        os._exit(1)


class SocketCalls:
    """Calls of a service of this machine, on its socket; a connection that was lost is made anew.

    Where no connection can be made the call takes the other way; so do all, if that happens `CONNECT_TRIES` times in a
    row: another container or user can be on the same machine and not reach the socket.

    Args:
        admit: asks the service for a ticket, on the other way. Raises `ServiceGone`, or what keeps it from having a
            socket.
        otherwise: the other way.
    """

    def __init__(self, admit: Callable[[], Awaitable[Ticket]], otherwise: Attempt) -> None:
        self._admit = admit
        self._otherwise = otherwise
        self._channel: Channel | None = None
        self._connecting = asyncio.Lock()
        self._failed = 0
        self._closed = False

    async def __call__(self, call_id: str, method: str, *arguments: Any) -> Any:
        """One attempt of a call. Raises what `Channel.call` raises."""
        channel = await self._connected()
        if channel is None:
            return await self._otherwise(call_id, method, *arguments)
        return await channel.call(call_id, method, *arguments)

    async def _connected(self) -> Channel | None:
        if self._failed >= CONNECT_TRIES:
            return None
        async with self._connecting:
            if self._closed:
                raise ServiceGone("this connection was closed")
            if self._channel is None or self._channel.lost:
                self._channel = await self._connect()
            return self._channel

    async def _connect(self) -> Channel | None:
        try:
            # A service that gives no answer is not gone: the time-out goes to whoever repeats the call.
            ticket = await asyncio.wait_for(self._admit(), ADMIT_SECONDS)
        except ServiceGone:
            raise
        except UnderstudyError as error:  # it can't make a socket
            self._failing(error)
            return None
        try:
            channel = await Channel.connect(ticket)
        except ServiceGone as error:
            self._failing(error)
            return None
        self._failed = 0
        return channel

    def _failing(self, error: UnderstudyError) -> None:
        self._failed += 1
        level = logging.WARNING if self._failed == CONNECT_TRIES else logging.INFO
        log.log(level, "the node service is called through Ray, more slowly: %s", error.message)

    async def close(self) -> None:
        """End the connection, if there is one, for good."""
        async with self._connecting:
            self._closed = True
            if self._channel is not None:
                await self._channel.close()
