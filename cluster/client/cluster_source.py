"""A running cluster as pages and views look at it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from understudy.event_wire import EventWire
from understudy.reads import NodeLoad

from .client_connection import ClientConnection
from .fleet import Result
from .results import ServiceInfo


class ClusterSource:
    """`fleet.Source` on a client's connection. Lives on its loop."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._lost = False

    async def read(self, kind: type[Result], what: str, *arguments: Any, **options: Any) -> Result:
        return await self._connection.read(kind, what, *arguments, **options)

    async def services(self) -> list[ServiceInfo]:
        if self._lost:
            await self._connection.find_again()
        self._lost = True
        found = await self._connection.services()
        self._lost = False
        return found

    async def load(self, node_id: str) -> NodeLoad:
        return await self._connection.load(node_id)

    async def follow(self, session_id: str, after: int) -> AsyncIterator[EventWire]:
        async with self._connection.follower.follow(session_id, after=after) as subscription:
            while True:
                kind, *news = await subscription.queue.get()
                if kind == "error":
                    raise news[0]
                yield news[0].to_wire()

    async def act(self, method: str, session_id: str, *arguments: Any, by: str = "") -> Any:
        anything: Any = Any
        return await self._connection.change(anything, method, session_id, *arguments, by=by)

    async def drain(self, node_id: str, timeout: float, by: str = "") -> None:
        await self._connection.drain(node_id, timeout, wait=False, stop=False, by=by)

    async def undrain(self, node_id: str) -> bool:
        return await self._connection.undrain(node_id)
