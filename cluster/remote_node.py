"""The node service as a frame reaches it, from another process. No Ray."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, Protocol

from understudy.errors import ServiceGone

from .channel import Channel, Ticket
from .repeating import FRAME_PATIENCE, Repeating

log = logging.getLogger(__name__)

ADMIT_SECONDS = 5.0
"""How long a ticket is waited for before it is asked for again: what a service is asked that is killed can get lost."""


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
        admit: asks the service for a ticket, on the other way. Raises `ServiceGone`.
        otherwise: the other way.
    """

    def __init__(self, admit: Callable[[], Awaitable[Ticket]], otherwise: Attempt) -> None:
        self._admit = admit
        self._otherwise = otherwise
        self._channel: Channel | None = None
        self._connecting = asyncio.Lock()
        self._failed = 0

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
            if self._channel is None or self._channel.lost:
                try:
                    ticket = await asyncio.wait_for(self._admit(), ADMIT_SECONDS)
                except TimeoutError:
                    raise ServiceGone(f"no ticket within {ADMIT_SECONDS:.0f} s") from None
                try:
                    self._channel, self._failed = await Channel.connect(ticket), 0
                except ServiceGone as error:
                    self._failed += 1
                    log.log(logging.WARNING if self._failed == CONNECT_TRIES else logging.INFO, "%s", error.message)
                    return None
            return self._channel

    async def close(self) -> None:
        """End the connection, if there is one."""
        if self._channel is not None:
            await self._channel.close()
