"""The actors: thin shells around `NodeService`, `Frame` and `Supervisor`."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import TYPE_CHECKING, Any

import ray
from msgspec.structs import replace

from understudy import logs
from understudy.actors.code import search_also
from understudy.config import Settings
from understudy.environment import keep_for_tools
from understudy.errors import InvalidConfiguration
from understudy.gateway.gateway_socket import GatewaySocket
from understudy.node.node_calls import NodeCalls
from understudy.node.node_socket import FRAME, NodeSocket
from understudy.protocol import packed
from understudy.secrets import Secrets
from understudy.tasks import Tasks
from understudy.telemetry import telemetry_of
from understudy.transport.channel import Ticket
from understudy.transport.ends import process_identity
from understudy.transport.remote_node import Attempt, RemoteNode, SocketCalls
from understudy.transport.service_socket import ServiceSocket
from understudy.waiting import ticks

from .gateways import OwnGateway, OwnToolHost
from .guarding import SupervisorGuard
from .keeping import SecretKeeper
from .names import gateway_name, node_name, supervised, supervisor_name
from .placing import CPU_SLIVER
from .ray_edge import (
    RAY_NAMESPACE,
    actor_names,
    ask_head,
    cluster_identity,
    find_actor,
    kill_process,
    own_node,
    supervisor_here,
    through_ray,
    ticket,
)
from .versions import Versioned

if TYPE_CHECKING:  # the frame's process imports this module and must stay light
    from understudy.gateway.gateway_calls import GatewayCalls
    from understudy.node.node_service import NodeService
    from understudy.tool_host.hosted_servers import HostedServers

log = logging.getLogger(__name__)

CALLS_AT_ONCE = 20_000
"""Pending calls per service: beyond it Ray lets calls wait silently, so it is set above what admission lets in."""

ORPHAN_SECONDS = 300.0
LEAVE_SECONDS = 0.2
"""So long after its last step a session actor ends itself: the supervisor's watch has been answered by then."""

KEPT_SECONDS = 35.0
"""So long after it said so somebody is taken to keep the services: `understudy up --keep` says so every 10 s."""

FRAME_MEMORY = 64 * 1024 * 1024


class LastingActor(Versioned):
    """An actor beside a node service, which starts it and which it outlives; restarted by Ray when it dies.

    Args:
        calls: what it does.
        socket: where its node service asks for it.
    """

    def __init__(self, calls: GatewayCalls | HostedServers, socket: ServiceSocket) -> None:
        self._calls = calls
        self._socket = socket
        self._tasks = Tasks(log)
        # Also one that Ray has restarted, and that nobody calls any more.
        ray.get_runtime_context().current_actor.start.remote()

    async def start(self) -> None:
        """End this actor when nobody has called it for long."""
        self._tasks.alone("orphan", self._exit_alone)

    async def admit(self, _role: str, _name: str) -> Ticket:
        """A ticket for the node service (`ServiceSocket.admit`)."""
        return await self._socket.admit()

    async def repeated(self, call_id: str, method: str, *arguments: Any) -> Any:
        """See `ServiceSocket.answer`: for a node service that can't reach the socket."""
        return await self._socket.answer(call_id, method, *arguments)

    async def _exit_alone(self) -> None:
        await self._calls.abandoned(ORPHAN_SECONDS)
        log.warning("no node service for %.0f s: leaving", ORPHAN_SECONDS)
        await self._calls.close()
        ray.kill(ray.get_runtime_context().current_actor)  # for good: one that only exits is started again


@ray.remote(num_cpus=CPU_SLIVER, max_restarts=-1, max_concurrency=CALLS_AT_ONCE)
class GatewayActor(LastingActor):
    """A node's gateway as an actor."""

    def __init__(self, settings: Settings, node_id: str) -> None:
        from understudy.gateway.hosting import GatewayHost

        logs.set_up("gateway", {**telemetry_of(os.environ), **settings.telemetry})
        self._host = GatewayHost(settings.offline_latency)
        self._keeper = SecretKeeper(settings, gateway_name(settings.instance, node_id), node_id)
        super().__init__(self._host.calls, GatewaySocket(node_id, self._host.calls))

    async def start(self) -> None:
        """See `LastingActor.start`. What it keeps for its node service, it learns from that or from others."""
        await super().start()
        self._tasks.alone("seek", self._keeper.seek)

    async def secrets(self) -> Secrets | None:
        """For a service that begins (`SecretKeeper`)."""
        return self._keeper.known


@ray.remote(num_cpus=CPU_SLIVER, max_restarts=-1, max_concurrency=CALLS_AT_ONCE)
class ToolHostActor(LastingActor):
    """A node's tool host as an actor. Its node service starts it when a session has MCP servers."""

    def __init__(self, settings: Settings, node_id: str) -> None:
        from understudy.tool_host.host_socket import ToolHostSocket
        from understudy.tool_host.hosted_servers import HostedServers

        logs.set_up("tools", {**telemetry_of(os.environ), **settings.telemetry})
        servers = HostedServers()
        super().__init__(servers, ToolHostSocket(node_id, servers))


@ray.remote(num_cpus=CPU_SLIVER, max_restarts=-1, max_concurrency=CALLS_AT_ONCE, concurrency_groups={"probe": 4})
class NodeActor(NodeCalls, Versioned):
    """The node service as an actor; restarted by Ray when it dies. Its settings are without secrets."""

    def __init__(self, settings: Settings, node_id: str, span_directory: str) -> None:
        from understudy.node.hosting import NodeHost

        from .farewell import Farewell
        from .head_watch import HeadWatch
        from .peers import Peers
        from .tool_tasks import RayTasks

        super().__init__()
        self._head = HeadWatch(ask_head)
        gateway = OwnGateway(settings, node_id, GatewayActor)
        tools = OwnToolHost(settings, node_id, ToolHostActor)
        self._keeper = SecretKeeper(settings, node_name(settings.instance, node_id), node_id)
        self._host = NodeHost(
            settings, self._keeper.whole, node_id, span_directory, str(ray.util.get_node_ip_address()),
            gateway=gateway.calls, tell=Peers(settings).tell, kill=gateway.kill, runner=RayTasks(settings),
            tool_host=tools.host, kill_tool_host=tools.kill, head=self._head,
        )  # fmt: skip
        self._guard = SupervisorGuard(
            self._host.owner, lambda holder: supervisor_here(holder, settings.instance), self._kill_supervisor,
            self._nudge_supervisor,
        )  # fmt: skip
        self._node_id = node_id
        self._settings = settings
        self._socket = NodeSocket(node_id, self._node, self.repeated)
        self._tasks = Tasks(log)
        self._farewell = Farewell(node_id, self._host, lambda: supervisor_handle(settings))

    async def admit(self, role: str, name: str) -> Ticket:
        """See `NodeSocket.admit`."""
        return await self._socket.admit(role, name)

    async def kill_process(self, pid: int) -> bool:
        return await kill_process(pid)

    async def profiles(self) -> Any:
        return self._host.known_profiles()

    async def secrets(self) -> Secrets | None:
        """For a service that begins (`SecretKeeper`)."""
        return self._keeper.known

    async def _node(self) -> NodeService:
        """The service; the guard runs from its first call on. One that fails begins again with the next call."""
        self._tasks.alone("guard", self._guard.run)
        self._farewell.attend()
        return await self._host.node()

    async def _kill_supervisor(self, pid: int, silent: float) -> None:
        log.warning("the supervisor (pid %d) is silent for %.0f s: killed", pid, silent)
        await kill_process(pid)

    async def _nudge_supervisor(self) -> None:
        """A supervisor that Ray restarted works only once it is called, and its own first call can get lost.

        In a thread: without Ray's head the look-up blocks for as long as Ray waits for it.
        """
        try:
            handle = await asyncio.to_thread(supervisor_handle, self._settings)
            if handle is not None:
                handle.start.remote()
        except Exception as error:
            log.info("the supervisor can't be called: %s", error)

    async def metrics_address(self) -> str:
        return self._host.metrics_address()

    @ray.method(concurrency_group="probe")
    async def probe(self) -> dict[str, float]:
        self._guard.heard()
        self._host.heard()
        return self._host.health()

    async def stop(self) -> None:
        """Commit what was submitted and let go of the store."""
        self._head.close()
        await self._socket.close()
        await self._host.close()


@ray.remote(
    num_cpus=CPU_SLIVER, memory=FRAME_MEMORY, max_restarts=0, max_concurrency=100, concurrency_groups={"probe": 2}
)
class FrameActor(Versioned):
    """A session actor. Its process holds one session at a time."""

    def __init__(
        self, node: Any, frame_id: str, node_id: str, placement: str, code_path: list[str], code_path_after: list[str],
        variables: list[str], logging_as: dict[str, str],
    ) -> None:  # fmt: skip
        from understudy.actors.frame import Frame

        logs.set_up("frame", {**telemetry_of(os.environ), **logging_as})
        # Ray's worker has its node's whole environment. Nothing of the user's is loaded yet.
        self._unusable: InvalidConfiguration | None = None
        try:
            keep_for_tools(variables)
        except InvalidConfiguration as error:
            self._unusable = error
        search_also(code_path, code_path_after)
        calls: Attempt = through_ray(node)
        if node_id == own_node():
            calls = SocketCalls(lambda: ticket(node, FRAME, frame_id), calls)
        self._frame = Frame(RemoteNode(calls), frame_id, node_id, placement)
        self._run: asyncio.Task[None] | None = None
        self._probed = time.monotonic()

    async def start(self) -> int:
        """Begin to take work; returns the pid. Raises `InvalidConfiguration` if its tools would lack variables."""
        if self._unusable is not None:  # not when it is created: Ray would only tell that it died
            raise self._unusable
        if self._run is None:
            loop = asyncio.get_running_loop()
            self._run = loop.create_task(self._frame.run())
            # Its session goes on elsewhere by now: a tool that ignores its cancellation must not live on here until the
            # supervisor, which may be away, ends this process. `watch` answers first.
            self._run.add_done_callback(lambda _run: loop.call_later(LEAVE_SECONDS, os._exit, 0))
            self._orphan = asyncio.get_running_loop().create_task(self._exit_alone())
        return os.getpid()

    async def host(self) -> str:
        """The node that this process is on."""
        return str(ray.get_runtime_context().get_node_id())

    async def watch(self) -> str:
        """`exit` when the frame was asked to leave; raises when its loop failed. Its process's death fails the call."""
        assert self._run is not None
        await asyncio.shield(self._run)
        return "exit"

    async def _exit_alone(self) -> None:
        async for stood_still in ticks(5.0):
            if stood_still:  # what it did not hear tells nothing
                self._probed = time.monotonic()
            if time.monotonic() - self._probed > ORPHAN_SECONDS:
                log.warning("no supervisor for %.0f s: leaving", ORPHAN_SECONDS)
                os._exit(1)

    @ray.method(concurrency_group="probe")
    async def probe(self) -> dict[str, float]:
        self._probed = time.monotonic()
        return {**self._frame.health(), "pid": os.getpid()}


@ray.remote(num_cpus=CPU_SLIVER, max_restarts=-1, max_concurrency=CALLS_AT_ONCE, concurrency_groups={"probe": 2})
class SupervisorActor(Versioned):
    """The supervisor as an actor; restarted by Ray when it dies. Its settings are without secrets."""

    def __init__(self, settings: Settings, span_directory: str) -> None:
        from understudy.supervisor.supervisor import Supervisor

        logs.set_up("supervisor", {**telemetry_of(os.environ), **settings.telemetry})

        from .machinery import RayMachinery

        holder = f"{cluster_identity()}/{settings.instance}/{process_identity(os.getpid())}"
        self._keeper = SecretKeeper(settings, supervisor_name(settings.instance))
        self._machinery = RayMachinery(settings, span_directory, NodeActor, FrameActor)
        self.supervisor = Supervisor(
            self._machinery, holder, standby=settings.standby, max_actors=settings.max_actors, scaling=settings.scaling
        )
        self._run: asyncio.Task[None] | None = None
        self._keepers: dict[str, float] = {}
        self._tasks = Tasks(log)
        # Ray restarts this process, but only a call makes it work: the first is its own.
        ray.get_runtime_context().current_actor.start.remote()

    async def start(self) -> int:
        """Begin to supervise; returns the pid."""
        if self._run is None:
            self._run = asyncio.get_running_loop().create_task(self.supervisor.run())
            self._tasks.spawn(self._keeper.seek())
        return os.getpid()

    async def hand_over(self, secrets: Secrets) -> None:
        """Learn what this actor's settings are without, for the node services. One that supervises knows better: what
        its services have was accepted by the store."""
        if self.supervisor.state != "supervising":
            self._keeper.learn(secrets)

    async def secrets(self) -> Secrets | None:
        """For a service that begins (`SecretKeeper`)."""
        return self._keeper.known

    async def ready(self, timeout: float) -> Any:
        """See `Supervisor.ready`; the directory is packed."""
        await self.start()
        directory = await self.supervisor.ready(timeout)
        here = str(ray.get_runtime_context().get_node_id())
        return packed(replace(directory, pid=os.getpid(), node_id=here))

    async def settings(self) -> dict[str, str]:
        """What the services were started with (`Settings.of_services`)."""
        return (await self._keeper.settings()).of_services()

    async def keep(self, keeper: str) -> None:
        """Know that somebody (`understudy up --keep`) keeps these services, and says so again before long."""
        self._keepers[keeper] = time.monotonic()

    async def let_go(self, keeper: str) -> None:
        """Know that somebody keeps them no more."""
        self._keepers.pop(keeper, None)

    async def kept_by(self) -> list[str]:
        """Who keeps these services, as far as this process has heard."""
        now = time.monotonic()
        return [keeper for keeper, heard in self._keepers.items() if now - heard < KEPT_SECONDS]

    async def want(self, placement: str) -> None:
        await self.start()
        await self.supervisor.ready(30.0)
        self.supervisor.want(placement)

    async def register(self, profile: Any) -> None:
        await self.start()
        await self.supervisor.ready(30.0)
        await self.supervisor.register(profile)

    async def drain(self, node_ids: list[str], seconds: float, reason: str, stop: bool, request_id: str) -> None:
        """See `Drains.begin`."""
        await self.start()
        await self.supervisor.ready(30.0)
        await self.supervisor.drains.begin(node_ids, seconds, request_id, reason=reason, stop=stop)

    async def undrain(self, node_id: str, request_id: str) -> bool:
        """See `Drains.undo`."""
        await self.start()
        await self.supervisor.ready(30.0)
        return await self.supervisor.drains.undo(node_id, request_id)

    async def stop(self) -> None:
        """Give the store up, then end frames and node services."""
        await self.supervisor.stop()
        await self._machinery.stop()

    @ray.method(concurrency_group="probe")
    async def probe(self) -> dict[str, float]:
        return {"silent": time.monotonic() - self.supervisor.last_beat}


def supervisor_handle(settings: Settings) -> Any | None:
    """The running supervisor, or None."""
    return find_actor(supervisor_name(settings.instance))


def other_supervisors(settings: Settings) -> list[str]:
    """The instances (namespace and a hash of the store) of all other supervisors in this Ray cluster."""
    return sorted(supervised(actor_names()) - {settings.instance})


__all__ = ["RAY_NAMESPACE", "FrameActor", "GatewayActor", "NodeActor", "SupervisorActor", "supervisor_handle"]
