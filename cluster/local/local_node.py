"""A node service, a gateway and a tool host as parts of this process. Each can be killed; another one takes its place.
No Ray."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from understudy.errors import ServiceGone
from understudy.gateway.gateway_calls import GatewayCalls
from understudy.node.node_calls import NodeCalls
from understudy.node.node_service import NodeService
from understudy.protocol import packed
from understudy.tasks import Tasks
from understudy.tool_host.hosted_servers import HostedServers
from understudy.transport.remote_gateway import RemoteGateway
from understudy.transport.remote_tool_host import RemoteToolHost
from understudy.transport.serving import Serving
from understudy.waiting import retrieve_error

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class LocalProcess:
    """What the callers of a service see of its process: calls that are under way when it dies fail.

    Args:
        name: of the service, for the error.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._under_way: set[asyncio.Task[Any]] = set()
        self._dead = Tasks(log)

    async def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Have the service do something. It is cancelled with its caller.

        Raises:
            ServiceGone: the service died meanwhile.
        """
        task = asyncio.get_running_loop().create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        task.add_done_callback(retrieve_error)
        try:
            await asyncio.wait((task,))
        finally:
            task.cancel()
        if task.cancelled():
            raise ServiceGone(f"{self._name} died")
        return task.result()

    def die(self, rest: Coroutine[Any, Any, None]) -> None:
        """Let all calls fail, and do in the background what is left to do: what the operating system would."""
        for task in self._under_way:
            task.cancel()
        self._dead.spawn(rest)

    async def buried(self) -> None:
        """Wait until nothing is left of those that died."""
        if dead := list(self._dead):
            await asyncio.wait(dead)


class LocalGateway(RemoteGateway):
    """A gateway in this process. The one that takes its place when it is killed has none of its calls.

    Args:
        make: makes one.

    Attributes:
        calls: the gateway that there is now.
    """

    def __init__(self, make: Callable[[], GatewayCalls]) -> None:
        super().__init__(self._answer)
        self._make = make
        self._process = LocalProcess("the gateway")
        self.calls = make()

    async def _answer(self, call_id: str, method: str, *arguments: Any) -> Any:
        return await self._process.call(getattr(self.calls, method)(*arguments))

    def kill(self) -> None:
        """End it as SIGKILL would end its process: its calls, and the answers that it has kept, are lost."""
        dead, self.calls = self.calls, self._make()
        self._process.die(dead.close())

    async def close(self) -> None:
        """End all calls."""
        await self._process.buried()
        await self.calls.close()


class LocalToolHost(RemoteToolHost):
    """A tool host in this process. The one that takes its place when it is killed has none of its servers and calls.

    Args:
        make: makes one.

    Attributes:
        servers: the host that there is now.
    """

    def __init__(self, make: Callable[[], HostedServers] = HostedServers) -> None:
        super().__init__(self._answer)
        self._make = make
        self._process = LocalProcess("the tool host")
        self.servers = make()

    async def _answer(self, call_id: str, method: str, *arguments: Any) -> Any:
        found = await self._process.call(getattr(self.servers, method)(*arguments))
        return packed(found)

    def kill(self) -> None:
        """End it as SIGKILL would end its process, and with it the processes of its servers."""
        dead, self.servers = self.servers, self._make()
        self._process.die(dead.close())

    async def close(self) -> None:
        """End all servers."""
        await self._process.buried()
        await self.servers.close()


class LocalNode(NodeCalls):
    """A node service in this process. The next call starts the one that takes its place when it is killed.

    Args:
        make: makes one.

    Attributes:
        service: the one that there is now.
        process: what it is called through.
    """

    def __init__(self, make: Callable[[], NodeService]) -> None:
        super().__init__()
        self._make = make
        self.process = LocalProcess("the node service")
        self._starting = asyncio.Lock()
        self._started = False
        self.service = make()

    async def start(self) -> None:
        """Start the service, unless it has started. Raises what keeps it from starting."""
        await self.process.call(self._node())

    async def repeated(self, call_id: str, method: str, *arguments: Any) -> Any:
        """See `NodeCalls.repeated`. Raises `ServiceGone` as well: the service died meanwhile."""
        return await self.process.call(super().repeated(call_id, method, *arguments))

    async def _node(self) -> NodeService:
        while not self._started:
            async with self._starting:
                if not self._started:
                    await self.buried()
                    service = self.service
                    await service.start()
                    self._started = service is self.service  # else it was killed meanwhile
        return self.service

    async def profiles(self) -> Any:
        """For a supervisor that does not know them."""
        return self.service.profiles.all()

    async def kill_process(self, _pid: int) -> bool:
        """Not known: session actors are parts of this process."""
        return False

    def health(self) -> dict[str, float]:
        """See `understudy.supervisor.ports.NodeHandle.probe`."""
        journal = self.service.journal
        return {"silent": 0.0, "journal": journal.silence(), "failing": journal.outage.failing()}

    def kill(self) -> None:
        """End the service as SIGKILL would end its process: what it has not committed is lost."""
        dead, self.service = self.service, self._make()
        serving, self._serving = self._serving, Serving(NodeCalls, self)
        self._started = False
        dead.abandon()
        self.process.die(_let_go(dead, serving))

    async def buried(self) -> None:
        """Wait until those that were killed have let go of their store and their files."""
        await self.process.buried()

    async def close(self) -> None:
        """Stop the service; calls that have no answer get none."""
        await self.buried()
        await self.service.close()
        await self._serving.close()


async def _let_go(service: NodeService, serving: Serving) -> None:
    await serving.close()
    await service.close()
