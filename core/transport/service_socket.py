"""The socket of a service of one node service, for that one alone. No Ray."""

from __future__ import annotations

import asyncio
from typing import Any

from ..errors import InvalidInput
from .channel import ChannelServer, Ticket
from .serving import Serving

SERVICE = "node"
"""The one peer: a node service that comes ends the connection of the one before it."""


def methods_of(port: type) -> frozenset[str]:
    """The names of the methods that a Protocol has."""
    return frozenset(name for name in vars(port) if not name.startswith("_"))


class ServiceSocket:
    """Answers a node service on a socket, and who takes another way.

    Args:
        name: of the socket.
        port: the Protocol whose methods may be called.
        target: does what is asked for.
    """

    def __init__(self, name: str, port: type, target: object) -> None:
        self._methods = methods_of(port)
        self._serving = Serving(port, target)
        # As many calls at once as there are sessions that wait: none of them may hold back the others.
        self._server = ChannelServer(name, self._called, calls_at_once=None)
        self._starting = asyncio.Lock()

    async def admit(self) -> Ticket:
        """A ticket for the node service. Raises `InvalidConfiguration`: no socket can be made."""
        async with self._starting:
            await self._server.start()
        return self._server.admit(SERVICE)

    async def answer(self, call_id: str, method: str, *arguments: Any) -> Any:
        """Have one of the port's methods done. Raises what that raises."""
        if method not in self._methods:
            raise InvalidInput(f"there is no method {method!r} here")
        return await self._serving.answer(call_id, method, *arguments)

    async def close(self) -> None:
        """End the connection."""
        await self._server.close()
        await self._serving.close()

    async def _called(self, _peer: str, call_id: str, method: str, arguments: list[Any]) -> Any:
        return await self.answer(call_id, method, *arguments)
