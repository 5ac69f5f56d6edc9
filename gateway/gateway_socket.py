"""The gateway's socket, for its node service alone. No Ray."""

from __future__ import annotations

import asyncio
from typing import Any

from understudy.errors import InvalidInput
from understudy.ports import ModelGateway
from understudy.transport.channel import ChannelServer, Ticket
from understudy.transport.serving import Serving

METHODS = frozenset(name for name in vars(ModelGateway) if not name.startswith("_"))

SERVICE = "node"
"""The one peer: a node service that comes ends the connection of the one before it."""


class GatewaySocket:
    """Answers a node service on its socket, and who takes another way.

    Args:
        node_id: a part of the socket's name.
        calls: does what is asked for.
    """

    def __init__(self, node_id: str, calls: ModelGateway) -> None:
        self._serving = Serving(ModelGateway, calls)
        # As many calls at once as there are sessions that wait for a model: none of them may hold back the others.
        self._server = ChannelServer(f"gateway-{node_id[:12]}", self._called, calls_at_once=None)
        self._starting = asyncio.Lock()

    async def admit(self) -> Ticket:
        """A ticket for the node service. Raises `InvalidConfiguration`: no socket can be made."""
        async with self._starting:
            await self._server.start()
        return self._server.admit(SERVICE)

    async def answer(self, call_id: str, method: str, *arguments: Any) -> Any:
        """Have one of a `ModelGateway`'s methods done. Raises what that raises."""
        if method not in METHODS:
            raise InvalidInput(f"a gateway has no method {method!r}")
        return await self._serving.answer(call_id, method, *arguments)

    async def close(self) -> None:
        """End the connection."""
        await self._server.close()
        await self._serving.close()

    async def _called(self, _peer: str, call_id: str, method: str, arguments: list[Any]) -> Any:
        return await self.answer(call_id, method, *arguments)
