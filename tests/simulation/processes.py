"""The kernel's processes on the simulated cluster: what `understudy.cluster` makes of the plain classes on Ray."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Container, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn

from msgspec.structs import replace

from understudy.actors.frame import Frame
from understudy.cluster.ray.guarding import SupervisorGuard
from understudy.config import ModelProfile
from understudy.errors import ClusterError, ServiceGone, UnderstudyError
from understudy.gateway.gateway import Gateway
from understudy.gateway.gateway_calls import GatewayCalls
from understudy.node.basis import NodeConfig
from understudy.node.node_calls import NodeCalls
from understudy.node.node_service import NodeService
from understudy.placement import DEFAULT, is_isolated
from understudy.ports import ModelGateway
from understudy.protocol import Attached, Exit, News, ServiceDirectory, StepCall, Work, packed
from understudy.records import KeptResponse, ModelAnswer, ModelRequest
from understudy.store.reads import queries
from understudy.supervisor.ports import ADOPT_SECONDS
from understudy.supervisor.supervisor import Supervisor
from understudy.transport.remote_gateway import RemoteGateway
from understudy.transport.remote_node import RemoteNode
from understudy.transport.remote_tool_host import RemoteToolHost
from understudy.transport.repeating import SUPERVISOR_PATIENCE, Joining
from understudy.transport.serving import Serving
from understudy.transport.signatures import signature_of
from understudy.waiting import answered_within, ticks

from . import operator
from .autoscaling import limits
from .cluster import Actor, Line, Machine
from .executed import SimulatedTasks
from .responses import WAIT_KEY
from .servers import ToolHostProcess

if TYPE_CHECKING:
    from .world import World

ORPHAN_SECONDS = 300.0
KILL_SECONDS = 6.0
EOF_SECONDS = 0.002
"""So long after a process's death its connections end."""

CREATE_SECONDS = 120.0


INCARNATION: ContextVar[int] = ContextVar("incarnation")
"""Of the session that a gateway makes a model call for: its request does not say it."""


class CountedGateway(Gateway):
    """The gateway; each model call that it is asked for is counted, for it is paid, and so is each answer."""

    count: Callable[[ModelRequest, int], None]
    answered: Callable[[ModelRequest, int], None]
    cancelled: Callable[[KeptResponse], None]

    async def call(self, request: ModelRequest, *arguments: Any) -> ModelAnswer:
        """See `Gateway.call`."""
        incarnation = INCARNATION.get()
        self.count(request, incarnation)
        WAIT_KEY.set(request.wait_key)
        answer = await super().call(request, *arguments)
        if answer.error is None:
            self.answered(request, incarnation)
        return answer

    async def cancel(self, response: KeptResponse) -> None:
        """See `Gateway.cancel`."""
        self.cancelled(response)
        await super().cancel(response)


class CountedCalls(GatewayCalls):
    """The gateway's calls, each of which knows which incarnation of its session it is for."""

    async def _ask(self, call: Any) -> ModelAnswer:
        INCARNATION.set(call.origin.incarnation)
        return await super()._ask(call)


class GatewayProcess:
    """A gateway's process (`understudy.cluster.ray.services.GatewayActor` and `understudy.gateway.hosting`)."""

    def __init__(self, world: World, actor: Actor) -> None:
        self._actor = actor
        self._profiles = world.profiles
        self._gateway = CountedGateway()
        self._gateway.count, self._gateway.answered = world.model_call, world.invariants.answered
        self._gateway.cancelled = world.cancelled
        self.calls = CountedCalls(self._gateway, self._prepare)
        self._serving = Serving(ModelGateway, self)

    def __getattr__(self, method: str) -> Any:
        return getattr(self.calls, method)

    async def attach(self, service: str, profiles: list[ModelProfile]) -> Attached:
        return replace(await self.calls.attach(service, profiles), pid=self._actor.pid)

    async def repeated(self, call_id: str, method: str, *arguments: Any) -> Any:
        return await self._serving.answer(call_id, method, *arguments)

    async def _prepare(self, _profile: str) -> None:
        if not self._gateway.knows("offline"):
            for profile in self._profiles:
                self._gateway.register(profile)


class NodeProcess(NodeCalls):
    """A node service's process (`understudy.cluster.ray.services.NodeActor` and `hosting.NodeHost`)."""

    def __init__(self, world: World, actor: Actor) -> None:
        super().__init__()
        self._world = world
        self._actor = actor
        machine = actor.machine
        self._line = Line()
        config = NodeConfig(
            world.store.dsn, world.namespace, machine.node_id, f"node-{machine.node_id}",
            span_directory=world.span_directory,
        )  # fmt: skip
        self._tools_line = Line()
        self.service = NodeService(
            config, RemoteGateway(self._to_gateway), self._tell, self._kill_gateway,
            processes=world.commands.of(machine), tool_host=RemoteToolHost(self._to_tool_host),
            kill_tool_host=self._kill_tool_host, runner=SimulatedTasks(world),
        )  # fmt: skip
        for profile in world.profiles:
            self.service.profiles.learn(profile)
        self._starting = asyncio.Lock()
        self._started = False
        self._beat = time.monotonic()
        self._guard = SupervisorGuard(self._owner, self._pid_here, self._kill_supervisor, _nudged)
        self._guarding: asyncio.Task[None] | None = None

    def _gateway(self) -> Actor:
        machine, world = self._actor.machine, self._world
        return world.cluster.start_actor(
            f"gateway/{machine.node_id}", machine, lambda actor: GatewayProcess(world, actor), restarts=True
        )

    async def _to_gateway(self, call_id: str, method: str, *arguments: Any) -> Any:
        sent = ("repeated", call_id, method, *packed(arguments))
        return await self._world.cluster.call(
            self._gateway(), *sent, here=self._actor.machine, line=self._line
        )  # fmt: skip

    def _tool_host(self) -> Actor:
        machine, world = self._actor.machine, self._world
        return world.cluster.start_actor(
            f"tools/{machine.node_id}", machine, lambda actor: ToolHostProcess(world, actor), restarts=True
        )

    async def _to_tool_host(self, call_id: str, method: str, *arguments: Any) -> Any:
        sent = ("repeated", call_id, method, *packed(arguments))
        return await self._world.cluster.call(
            self._tool_host(), *sent, here=self._actor.machine, line=self._tools_line
        )  # fmt: skip

    async def _kill_tool_host(self, pid: int) -> None:
        await self._world.kill_and_wait(pid or self._tool_host().pid)

    async def _kill_gateway(self, pid: int) -> None:
        await self._world.kill_and_wait(pid or self._gateway().pid)

    def _left(self, run: asyncio.Task[None]) -> None:
        if not run.cancelled():
            self._world.invariants.violated(f"the guard of the supervisor ended: {run.exception()!r}")

    async def _tell(self, node_id: str, news: News) -> None:
        try:
            actor = self._world.cluster.actors.get(f"node/{node_id}")
            if actor is not None:
                await asyncio.wait_for(self._world.call(actor, "notice", news, here=self._actor.machine), 10.0)
        except (TimeoutError, UnderstudyError):
            pass

    async def _node(self) -> NodeService:
        if self._guarding is None:
            self._guarding = asyncio.get_running_loop().create_task(self._guard.run())
            self._guarding.add_done_callback(self._left)
        if not self._started:
            async with self._starting:
                if not self._started:
                    await self.service.start()
                    asyncio.get_running_loop().create_task(self._beating())
                    self._started = True
        return self.service

    async def _beating(self) -> None:
        while True:
            self._beat = time.monotonic()
            await asyncio.sleep(0.5)

    async def _owner(self) -> str | None:
        row = await self.service.reading.query(queries.owner)
        return row.holder if row is not None else None

    def _pid_here(self, holder: str) -> int:
        node_id, pid, _ = holder.split("/")[-1].split(":") if holder else ("", "0", "")
        return int(pid) if node_id == self._actor.machine.node_id else 0

    async def _kill_supervisor(self, pid: int, silent: float) -> None:
        self._world.kill_pid(pid, f"the supervisor is silent for {silent:.0f} s")

    async def lost(self, frame_id: str) -> None:
        """The end of a frame's process (`node_socket.NodeSocket`)."""
        with contextlib.suppress(UnderstudyError):
            await (await self._node()).deaths.frame_died(frame_id, "process_died", EOF_SECONDS)

    async def step(self, call: StepCall) -> Work | Exit:
        """A process whose death was reported is given nothing any more, however late its call arrives."""
        node = await self._node()
        frame_id = call.frame.frame_id
        buried = frame_id in node.frames.known.buried
        answer = await super().step(call)
        if buried and isinstance(answer, Work):
            self._world.invariants.violated(f"frame {frame_id}, whose death was reported, was given work")
        return answer

    async def kill_process(self, pid: int) -> bool:
        return await self._world.kill_and_wait(pid)

    async def pid(self) -> int:
        return self._actor.pid

    async def probe(self) -> dict[str, float]:
        now = time.monotonic()
        self._guard.heard()
        if not self._started:
            return {"silent": 0.0, "journal": 0.0, "failing": 0.0}
        self.service.supervisor_heard = now
        journal = self.service.journal
        return {"silent": now - self._beat, "journal": journal.silence(), "failing": journal.outage.failing()}


async def _nudged() -> None:
    """A supervisor that was restarted works by itself here."""


def hear(world: World, node: Actor, frame_id: str) -> None:
    """The node service of a frame's machine hears of the end of its process, as its socket has it."""
    frame, process = world.cluster.frames[frame_id], node.process
    if frame.machine is node.machine and process is not None and node.alive and node.target is not None:
        process.spawn(node.target.lost(frame_id), f"{node.name}.lost")


class NodeLink(RemoteNode):
    """A frame's way to its node service."""

    def __init__(self, world: World, actor: Actor, node: Actor) -> None:
        def attempt(call_id: str, method: str, *arguments: Any) -> Any:
            return world.call(node, "repeated", call_id, method, *arguments, here=actor.machine)

        super().__init__(attempt)
        self._world = world
        self._actor = actor
        self._served: set[tuple[str, int]] = set()

    async def step(self, call: StepCall) -> Work | Exit:
        answer = await super().step(call)
        if isinstance(answer, Work):
            self._check_work(answer)
        return answer

    async def _leave(self) -> NoReturn:
        self._world.scheduler.world.soon(self._actor.kill)
        await asyncio.Event().wait()
        raise AssertionError

    def _check_work(self, work: Work) -> None:
        """A process has sessions of its placement only; one for a single activation has no other."""
        _, _, frame_id, name = self._actor.name.split("/")
        placement = DEFAULT if name == "-" else name
        self._served.add((work.session_id, work.epoch))
        if is_isolated(placement) and len(self._served) > 1:
            self._world.invariants.violated(
                f"frame {frame_id} was for one activation, and has had {sorted(self._served)}"
            )
        where = f"session_id = '{work.session_id}' AND incarnation = {work.incarnation}"
        for (wanted,) in self._world.committed(f"SELECT placement FROM session WHERE {where}"):
            if wanted != placement:
                self._world.invariants.violated(f"{work.session_id} wants placement {wanted!r}, not {placement!r}")


class FrameProcess:
    """A session actor's process (`services.FrameActor`)."""

    def __init__(self, world: World, actor: Actor, node: Actor, frame_id: str, node_id: str, placement: str) -> None:
        self._world = world
        self.frame = Frame(NodeLink(world, actor, node), frame_id, node_id, placement)
        self.frame.identity = replace(self.frame.identity, pid=actor.pid)
        self._actor = actor
        self._run: asyncio.Task[None] | None = None
        self._probed = time.monotonic()

    async def start(self) -> int:
        if self._run is None:
            self._run = asyncio.get_running_loop().create_task(self.frame.run())
            self._run.add_done_callback(self._left)
            self._orphan = asyncio.get_running_loop().create_task(self._exit_alone())
        return self._actor.pid

    def _left(self, run: asyncio.Task[None]) -> None:
        if not run.cancelled() and run.exception() is not None:
            self._world.invariants.violated(f"the loop of a frame failed: {run.exception()!r}")

    async def watch(self) -> str:
        assert self._run is not None
        await asyncio.shield(self._run)
        return "exit"

    async def _exit_alone(self) -> None:
        async for stood_still in ticks(5.0):
            if stood_still:
                self._probed = time.monotonic()
            if time.monotonic() - self._probed > ORPHAN_SECONDS:
                self._actor.kill()

    async def probe(self) -> dict[str, float]:
        self._probed = time.monotonic()
        return {**self.frame.health(), "pid": self._actor.pid}


class SupervisorProcess:
    """The supervisor's process (`services.SupervisorActor`)."""

    def __init__(self, world: World, actor: Actor) -> None:
        holder = f"cluster/instance/{actor.machine.node_id}:{actor.pid}:0"
        self.supervisor = Supervisor(
            SimulatedMachinery(world, actor), holder, standby=world.standby, max_actors=world.max_actors,
            scaling=limits(world.plan.machines, world.plan.scales) if world.plan.scales else None,
        )  # fmt: skip
        self._run = asyncio.get_running_loop().create_task(self.supervisor.run())

    async def ready(self, timeout: float) -> ServiceDirectory:
        return await self.supervisor.ready(timeout)

    async def directory(self) -> ServiceDirectory:
        return self.supervisor.directory()

    async def want(self, placement: str) -> None:
        await self.supervisor.ready(30.0)
        self.supervisor.want(placement)

    async def drain(self, node_ids: list[str], seconds: float, reason: str, stop: bool, request_id: str) -> None:
        await self.supervisor.ready(30.0)
        await self.supervisor.drains.begin(node_ids, seconds, request_id, reason=reason, stop=stop)

    async def undrain(self, node_id: str, request_id: str) -> bool:
        await self.supervisor.ready(30.0)
        return await self.supervisor.drains.undo(node_id, request_id)


class NodeHandle:
    """A node service, as the supervisor reaches it (`machinery.RayNode`)."""

    def __init__(self, world: World, supervisor: Actor, actor: Actor) -> None:
        self._world = world
        self._supervisor = supervisor
        self.actor = actor
        self.node_id = actor.machine.node_id
        self.pid = 0
        self._calls = Joining(SUPERVISOR_PATIENCE)

    def _once(self, method: str, *arguments: Any) -> Any:
        return self._world.call(self.actor, method, *arguments, here=self._supervisor.machine)

    async def call(self, method: str, *arguments: Any) -> Any:
        found = await self._calls.call(
            lambda call_id: self._once("repeated", call_id, method, *arguments), method, arguments
        )
        return signature_of(getattr(NodeCalls, method)).result(found)

    async def meet(self) -> None:
        self.pid = await self.call("pid")

    async def watch(self) -> None:
        await self._once("watch")

    async def probe(self) -> dict[str, float]:
        found: dict[str, float] = await self._once("probe")
        return found


class FrameHandle:
    """A frame, as the supervisor sees it (`machinery.RayFrame`)."""

    def __init__(self, world: World, supervisor: Actor, actor: Actor, frame_id: str, placement: str) -> None:
        self._world = world
        self._supervisor = supervisor
        self.actor = actor
        self.frame_id = frame_id
        self.node_id = actor.machine.node_id
        self.placement = placement
        self.pid = actor.pid

    def _once(self, method: str) -> Any:
        return self._world.call(self.actor, method, here=self._supervisor.machine)

    async def begin(self) -> None:
        self.pid = await self._once("start")

    async def watch(self) -> str:
        return str(await self._once("watch"))

    async def probe(self) -> dict[str, float]:
        found: dict[str, float] = await self._once("probe")
        return found


class SimulatedMachinery:
    """The supervisor's hands (`understudy.supervisor.ports.Machinery`)."""

    def __init__(self, world: World, supervisor: Actor) -> None:
        self._world = world
        self._supervisor = supervisor
        self._nodes: dict[str, NodeHandle] = {}

    @property
    def _machine(self) -> Machine:
        return self._supervisor.machine

    async def node_ids(self) -> list[str]:
        own = self._machine.node_id
        others = [m.node_id for m in self._world.cluster.machines.values() if m.node_id != own and not m.noticed]
        await asyncio.sleep(0.002)
        return [own, *sorted(others)]

    async def notices(self) -> dict[str, float | None]:
        await asyncio.sleep(0.001)
        return dict(self._world.notices)

    async def node_service(self, node_id: str) -> NodeHandle:
        world = self._world
        machine = world.cluster.machines[node_id]
        actor = world.cluster.start_actor(
            f"node/{node_id}", machine, lambda actor: NodeProcess(world, actor), restarts=True
        )
        node = NodeHandle(world, self._supervisor, actor)
        await node.meet()
        self._nodes[node_id] = node
        return node

    async def frames(self, node_id: str, known: Container[str] = ()) -> Sequence[FrameHandle]:
        prefix = f"frame/{node_id}/"
        named = [(name, actor) for name, actor in self._world.cluster.actors.items() if name.startswith(prefix)]
        return await asyncio.gather(*(self._adopt(actor) for name, actor in named if name.split("/")[2] not in known))

    async def frame_ids(self, node_id: str) -> set[str]:
        await asyncio.sleep(0.001)
        names = [name.split("/") for name in self._world.cluster.actors]
        return {parts[2] for parts in names if parts[:2] == ["frame", node_id]}

    async def _adopt(self, actor: Actor) -> FrameHandle:
        _, _, frame_id, placement = actor.name.split("/")
        frame = FrameHandle(self._world, self._supervisor, actor, frame_id, "" if placement == "-" else placement)
        with contextlib.suppress(TimeoutError, ServiceGone):
            await answered_within(frame.begin(), ADOPT_SECONDS)
        return frame

    async def create_frame(self, node: Any, frame_id: str, placement: str) -> FrameHandle:
        world = self._world
        await asyncio.sleep(world.cluster.network.uniform(0.3, 1.5))
        machine = node.actor.machine
        actor = world.cluster.start_actor(
            f"frame/{node.node_id}/{frame_id}/{placement or '-'}",
            machine,
            lambda actor: FrameProcess(world, actor, node.actor, frame_id, node.node_id, placement),
        )
        actor.forked = world.forks.random() < world.plan.forked
        actor.ended.append(lambda: world.cluster.forget(actor))
        actor.ended.append(lambda: world.cluster.after(EOF_SECONDS, hear, world, node.actor, frame_id))
        frame = FrameHandle(world, self._supervisor, actor, frame_id, placement)
        try:
            await asyncio.wait_for(frame.begin(), CREATE_SECONDS)
        except TimeoutError:
            world.ray_kill(actor, restart=False)
            raise ClusterError(f"a frame was not ready after {CREATE_SECONDS:.0f} s") from None
        return frame

    async def kill(self, node_id: str, pid: int, handle: Any) -> bool:
        if node_id == self._machine.node_id and pid > 1:
            return await self._world.kill_and_wait(pid)
        if isinstance(handle, NodeHandle):
            self._world.ray_kill(handle.actor, restart=True)
            return False
        node = self._nodes.get(node_id)
        try:
            if node is not None and pid > 1 and await asyncio.wait_for(node.call("kill_process", pid), KILL_SECONDS):
                return True
        except (TimeoutError, UnderstudyError):
            pass
        if handle is not None:
            self._world.ray_kill(handle.actor, restart=False)
        return False

    def abandon(self, node: Any, frames: Sequence[Any]) -> None:
        self._world.invariants.check_abandoned(node.actor.machine)
        self._nodes.pop(node.node_id, None)
        own = [self._world.cluster.actors.get(f"{kind}/{node.node_id}") for kind in ("gateway", "tools")]
        for actor in (node.actor, *own, *(frame.actor for frame in frames)):
            if actor is not None:
                self._world.ray_kill(actor, restart=False)

    async def request_nodes(self, cpus: list[float]) -> None:
        await asyncio.sleep(0.002)
        self._world.autoscaler.request(len(cpus))

    def cpus(self, node_id: str) -> float:
        return 2.0

    def holder_is_dead(self, holder: str) -> bool:
        return not holder.startswith(operator.RIVAL)  # a former supervisor of this cluster: its generation is fenced
