"""How a node service reaches the gateway and the tool host of its node, starts them, and has one killed that hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from understudy.config import Settings
from understudy.errors import ServiceGone
from understudy.protocol import packed
from understudy.transport.channel import Ticket
from understudy.transport.remote_gateway import RemoteGateway
from understudy.transport.remote_node import SocketCalls
from understudy.transport.remote_tool_host import RemoteToolHost
from understudy.transport.repeating import Patience, Repeating

from .names import gateway_name, tool_host_name
from .ray_edge import RAY_NAMESPACE, kill_process, pid_of, submitted, through_ray, ticket

PATIENCE = Patience(attempt=60.0, growth=2.0, longest=600.0, gone=0.0)


class OwnService:
    """A service of this node that its node service starts, and that outlives it.

    Args:
        name: of its actor.
        actor_class, arguments: what it is made of.
        what: it is called in logs.

    Attributes:
        attempt: makes one attempt of a call.
    """

    def __init__(self, name: str, node_id: str, actor_class: Any, arguments: Sequence[Any], what: str) -> None:
        self._name = name
        self._node_id = node_id
        self._class = actor_class
        self._arguments = arguments
        self._handle: Any = None
        self._finding = asyncio.Lock()
        self.attempt = SocketCalls(self._admit, self._through_ray, what)

    async def kill(self, pid: int) -> None:
        """Kill its process, by its pid; 0 for the one that Ray has now, unless that is starting. Ray starts another
        one."""
        if not pid and self._handle is not None:
            pid = await asyncio.to_thread(pid_of, self._handle)
        if pid:
            await kill_process(pid)

    async def _admit(self) -> Ticket:
        handle = await self._found()
        try:
            return await ticket(handle, "node", self._node_id)
        except ServiceGone:
            self._handle = None  # Ray may not know it any more
            raise

    async def _through_ray(self, call_id: str, method: str, *arguments: Any) -> Any:
        """A call where there is no socket. What Ray carries may get lost with a process: it is asked for again."""
        attempt, sent = through_ray(await self._found()), packed(arguments)
        try:
            return await Repeating(PATIENCE).call(lambda repeated: attempt(repeated, method, *sent), call_id=call_id)
        except ServiceGone:
            self._handle = None
            raise

    async def _found(self) -> Any:
        async with self._finding:
            if self._handle is None:
                self._handle = await asyncio.to_thread(submitted, self._find)
            return self._handle

    def _find(self) -> Any:
        return self._class.options(
            name=self._name,
            namespace=RAY_NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            scheduling_strategy=NodeAffinitySchedulingStrategy(self._node_id, soft=False),
        ).remote(*self._arguments)


class OwnGateway(OwnService):
    """The gateway of this node.

    Args:
        settings: without secrets.
        actor_class: the actor's.

    Attributes:
        calls: it, as its node service sees it.
    """

    def __init__(self, settings: Settings, node_id: str, actor_class: Any) -> None:
        name = gateway_name(settings.instance, node_id)
        super().__init__(name, node_id, actor_class, (settings, node_id), "the gateway")
        self.calls = RemoteGateway(self.attempt)


class OwnToolHost(OwnService):
    """The tool host of this node, which is started once a session needs it.

    Args:
        settings: without secrets.
        actor_class: the actor's.

    Attributes:
        host: it, as its node service sees it.
    """

    def __init__(self, settings: Settings, node_id: str, actor_class: Any) -> None:
        name = tool_host_name(settings.instance, node_id)
        super().__init__(name, node_id, actor_class, (settings, node_id), "the tool host")
        self.host = RemoteToolHost(self.attempt)
