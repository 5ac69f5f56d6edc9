"""The node service's socket: who may call what there, and what the end of a connection tells. No Ray."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from understudy.errors import InvalidInput, UnderstudyError
from understudy.ports import Node
from understudy.tasks import Tasks
from understudy.transport.channel import ChannelServer, Ticket
from understudy.transport.ends import has_ended
from understudy.transport.service_socket import methods_of

if TYPE_CHECKING:
    from .node_service import NodeService

log = logging.getLogger(__name__)

FRAME, CLIENT = "frame", "client"

CALLS = {
    FRAME: methods_of(Node),
    CLIENT: frozenset({"request", "metrics_address"}),
}
"""What each role may call."""

END_SECONDS = 0.2
"""So long after its connection a process may need to end."""

SCARCE_MEMORY = 0.15
"""Where a node has less than this share of its memory left, Ray may have killed a process for want of it."""


class NodeSocket:
    """Lets frames and clients of this machine in, and notices the ends of frames.

    Args:
        node_id: of the service; a part of the socket's name.
        node: the service, once it is started.
        answer: has a call done: its id, method and arguments. It knows calls that are repeated.
    """

    def __init__(
        self,
        node_id: str,
        node: Callable[[], Awaitable[NodeService]],
        answer: Callable[..., Awaitable[Any]],
    ) -> None:
        self._node = node
        self._answer = answer
        self._server = ChannelServer(f"node-{node_id[:12]}", self._called, self._ended)
        self._starting = asyncio.Lock()
        self._closed = False
        self._tasks = Tasks(log)

    async def admit(self, role: str, name: str) -> Ticket:
        """A ticket for a frame, by its id, or for a client.

        Raises:
            InvalidConfiguration: no socket can be made.
        """
        async with self._starting:
            await self._server.start()
        return self._server.admit(f"{role}/{name}")

    async def close(self) -> None:
        """End all connections; what becomes of frames now is nobody's concern."""
        self._closed = True
        self._tasks.cancel()
        await self._server.close()

    async def _called(self, peer: str, call_id: str, method: str, arguments: list[Any]) -> Any:
        role, _, name = peer.partition("/")
        if method not in CALLS[role]:
            raise InvalidInput(f"a {role} can't call {method!r}")
        if role == FRAME and method != "blob" and _caller(method, arguments) != name:
            raise InvalidInput("a frame can't call for another one")
        return await self._answer(call_id, method, *arguments)

    def _ended(self, peer: str, pid: int) -> None:
        role, _, frame_id = peer.partition("/")
        if role != FRAME or self._closed:
            return
        self._tasks.spawn(self._tell(frame_id, pid))

    async def _tell(self, frame_id: str, pid: int) -> None:
        """Resume what a frame held, if its process has ended: the supervisor, which hears of it from Ray, comes later
        and finds it done. Where memory is short its word is waited for, since Ray says what it killed; so it is where
        another process had the connection than the frame has named."""
        began = time.monotonic()
        try:
            if not await has_ended(pid, END_SECONDS):
                return
            node = await self._node()
            memory, slot = node.frames.supply.measured, node.frames.paging.slots.get(frame_id)
            scarce = memory is not None and memory.free < SCARCE_MEMORY * memory.total
            if slot is not None and slot.pid == pid and not scarce:
                # Its connection was a sign of life until it ended.
                await node.deaths.frame_died(frame_id, "process_died", max(1e-6, time.monotonic() - began))
        except UnderstudyError as error:
            log.info("the end of frame %s is left to the supervisor: %s", frame_id, error)


def _caller(method: str, arguments: list[Any]) -> Any:
    """The frame that a call says it is of; what it says is not checked yet."""
    try:
        return arguments[0]["frame"]["frame_id"] if method == "step" else arguments[0]
    except (LookupError, TypeError):
        return None
