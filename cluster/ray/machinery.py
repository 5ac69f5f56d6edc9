"""What the supervisor needs of Ray: starting, finding, watching, probing and killing actors."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from understudy.config import Settings
from understudy.errors import ClusterError, InvalidConfiguration, ServiceGone, UnderstudyError, Unschedulable
from understudy.node.node_calls import NodeCalls
from understudy.placement import is_scarce
from understudy.supervisor.ports import ADOPT_SECONDS
from understudy.telemetry import FOR_FRAMES
from understudy.transport.ends import is_gone
from understudy.transport.repeating import SUPERVISOR_PATIENCE, Joining
from understudy.transport.signatures import signature_of
from understudy.waiting import answered_within

from . import package_store
from .names import FrameName, frames_among, gateway_name, node_name, tool_host_name
from .placing import actor_options, obstacle, variables
from .ray_edge import (
    RAY_NAMESPACE,
    actor_names,
    cluster_identity,
    find_actor,
    kill_process,
    result_of,
    submitted,
    through_ray,
    where,
)

log = logging.getLogger(__name__)

CREATE_SECONDS = 120.0
KNOWN_DEFINITIONS = 1_000
KILL_TRIES = 6
KILL_SECONDS = 6.0


class RayNode:
    """A node service."""

    def __init__(self, handle: Any, node_id: str) -> None:
        self.handle = handle
        self.node_id = node_id
        self.pid = 0
        self._calls = Joining(SUPERVISOR_PATIENCE)
        self._attempt = through_ray(handle)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method, repeating it while the service restarts."""
        try:
            found = await self._calls.call(
                lambda call_id: self._attempt(call_id, method, *arguments), method, arguments
            )  # fmt: skip
            return signature_of(getattr(NodeCalls, method)).result(found)
        except ServiceGone as error:
            raise ServiceGone(f"{method}: {error.message}") from None

    async def meet(self) -> None:
        """Learn its pid."""
        self.pid = await self.call("pid")

    async def watch(self) -> None:
        """Fails when the process is gone."""
        await result_of(self.handle.watch.remote())

    async def probe(self) -> dict[str, float]:
        """Its health."""
        found: dict[str, float] = await result_of(self.handle.probe.remote())
        return found


class RayFrame:
    """A frame.

    Attributes:
        node_id: the node whose service it works for.
        host: the node that its process is on: another one, perhaps, if it asks for resources.
    """

    def __init__(self, handle: Any, frame_id: str, node_id: str, placement: str, pid: int = 0) -> None:
        self.handle = handle
        self.frame_id = frame_id
        self.node_id = node_id
        self.placement = placement
        self.pid = pid
        self.host = node_id

    async def find(self) -> None:
        """Learn from Ray where it is, whether it answers or not."""
        self.pid, host = await asyncio.to_thread(where, self.handle)
        self.host = host or self.node_id

    async def begin(self) -> None:
        """Let it take work, and learn where it is."""
        self.pid = await result_of(submitted(self.handle.start.remote))
        if is_scarce(self.placement):
            self.host = await result_of(submitted(self.handle.host.remote))

    async def watch(self) -> str:
        """Why it left; fails when its process is gone."""
        return str(await result_of(self.handle.watch.remote()))

    async def probe(self) -> dict[str, float]:
        """Its health."""
        found: dict[str, float] = await result_of(self.handle.probe.remote())
        return found


class RayMachinery:
    """The supervisor's hands (`understudy.supervisor.ports.Machinery`)."""

    def __init__(self, settings: Settings, span_directory: str, node_class: Any, frame_class: Any) -> None:
        self._settings = settings
        self._span_directory = span_directory
        self._node_class = node_class
        self._frame_class = frame_class
        self._nodes: dict[str, RayNode] = {}
        self._definitions: OrderedDict[str, dict[str, Any]] = OrderedDict()

    async def node_ids(self) -> list[str]:
        """This node; with PostgreSQL, then all others that are alive and have CPUs to offer.

        A SQLite file has one writer, and is where it is.
        """
        own = str(ray.get_runtime_context().get_node_id())
        if self._settings.store.startswith("sqlite"):
            return [own]
        nodes = await asyncio.to_thread(ray.nodes)
        alive = {node["NodeID"] for node in nodes if node["Alive"] and node["Resources"].get("CPU")}
        return [own, *sorted(alive - {own})]

    async def notices(self) -> dict[str, float | None]:
        """Nodes that Ray drains: because of `ray drain-node`, an autoscaler, or a machine that is taken away."""
        state = ray._private.state.state  # what Ray's own libraries use; its public API has no word of it
        found: dict[str, int] = await asyncio.to_thread(state.get_draining_nodes)
        now = time.time()
        return {node_id: max(0.0, at / 1000 - now) if at else None for node_id, at in found.items()}

    async def node_service(self, node_id: str) -> RayNode:
        """Get or create the service of a node, and wait until it answers."""
        handle = self._node_class.options(
            name=node_name(self._settings.instance, node_id),
            namespace=RAY_NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        ).remote(self._settings, node_id, self._span_directory)
        node = RayNode(handle, node_id)
        await node.meet()
        self._nodes[node_id] = node
        return node

    async def frames(self, node_id: str | None = None, known: Container[str] = ()) -> list[RayFrame]:
        """The frames (of one node, or all) that are there, whoever created them, but for those known."""
        names = await self._frame_names(node_id)
        found = await asyncio.gather(*(self._adopt(name) for name in names if name.frame_id not in known))
        return [frame for frame in found if frame is not None]

    async def frame_ids(self, node_id: str) -> set[str]:
        """See `Machinery.frame_ids`."""
        return {name.frame_id for name in await self._frame_names(node_id)}

    async def _frame_names(self, node_id: str | None) -> list[FrameName]:
        names = frames_among(await asyncio.to_thread(actor_names), self._settings.instance)
        return [name for name in names if node_id in (None, name.node_id)]

    async def _adopt(self, name: FrameName) -> RayFrame | None:
        """A frame as it is found. One that does not answer may have a tool that blocks its event loop: whoever watches
        and probes it tells whether it hangs, and until it has been killed for that it lives."""
        # In a thread, as all that asks Ray's head: without one it blocks for as long as Ray waits for it.
        handle = await asyncio.to_thread(find_actor, name.of(self._settings.instance))
        if handle is None:  # it has gone, or Ray's head failed to look it up
            return None
        frame = RayFrame(handle, *name)
        await frame.find()
        try:
            await answered_within(frame.begin(), ADOPT_SECONDS)
        except (TimeoutError, UnderstudyError) as error:
            log.warning("frame %s (pid %d) does not answer yet: %s", name.frame_id, frame.pid, error or "no answer")
        return frame

    async def create_frame(self, node: Any, frame_id: str, placement: str) -> RayFrame:
        """Start a frame on a node, in the environment that the placement asks for.

        One that asks for resources or labels is started wherever the cluster has them. Where the number of nodes
        follows the load, Ray's autoscaler sees it wait, and may bring a node that has them.

        Raises:
            Unschedulable: no node has them, or comes to have them.
            InvalidConfiguration: the node's environment lacks variables.
        """
        definition = await self._definition(node, placement)
        options = actor_options(definition)
        await package_store.provide(definition.get("runtime_env") or {}, partial(node.call, "blob"))
        reason = ""
        if is_scarce(placement):
            reason = obstacle(definition, await asyncio.to_thread(ray.nodes))
            if reason and self._settings.scaling is None:
                raise Unschedulable(reason)
        else:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        actor = self._frame_class.options(
            name=FrameName(frame_id, node.node_id, placement).of(self._settings.instance),
            namespace=RAY_NAMESPACE,
            lifetime="detached",
            **options,
        )
        create = partial(
            actor.remote,
            node.handle,
            frame_id,
            node.node_id,
            placement,
            definition.get("code_path") or [],
            definition.get("code_path_after") or [],
            variables(definition),
            {name: self._settings.telemetry[name] for name in FOR_FRAMES if name in self._settings.telemetry},
        )
        frame = RayFrame(await _created(create), frame_id, node.node_id, placement)
        try:
            await asyncio.wait_for(frame.begin(), CREATE_SECONDS)
        except TimeoutError:
            ray.kill(frame.handle)
            if reason:
                raise Unschedulable(f"{reason}, and none came within {CREATE_SECONDS:.0f} s") from None
            raise ClusterError(f"a frame was not ready after {CREATE_SECONDS:.0f} s (see `ray status`)") from None
        except InvalidConfiguration:
            ray.kill(frame.handle)
            raise
        return frame

    async def _definition(self, node: Any, placement: str) -> dict[str, Any]:
        """What a placement asks for. It never changes, and frames must come while the store is away too."""
        if not placement:
            return {}
        if placement not in self._definitions:
            self._definitions[placement] = json.loads(await node.call("blob", placement))
            while len(self._definitions) > KNOWN_DEFINITIONS:
                self._definitions.popitem(last=False)
        self._definitions.move_to_end(placement)
        return self._definitions[placement]

    async def kill(self, node_id: str, pid: int, handle: Any) -> bool:
        """See `Machinery.kill`: by its pid, on another node through its service, else through Ray, whose word that an
        actor is dead says nothing of a process on a machine that Ray does not reach."""
        node_id = getattr(handle, "host", node_id)
        if node_id == ray.get_runtime_context().get_node_id() and pid > 1:
            for _ in range(KILL_TRIES):
                if await kill_process(pid):
                    return True
            log.error("process %d can't be killed", pid)
        elif isinstance(handle, RayNode):
            ray.kill(handle.handle, no_restart=False)
        elif await self._kill_there(self._nodes.get(node_id), pid):
            return True
        elif handle is not None:
            ray.kill(handle.handle)
        return False

    async def _kill_there(self, node: RayNode | None, pid: int) -> bool:
        if node is None or pid <= 1:
            return False
        try:
            return bool(await asyncio.wait_for(node.call("kill_process", pid), KILL_SECONDS))
        except (TimeoutError, UnderstudyError):
            return False

    def abandon(self, node: Any, frames: Sequence[Any]) -> None:
        """Have the processes of a lost node ended as far as they can still be reached; waits for nothing."""
        self._nodes.pop(node.node_id, None)
        asyncio.get_running_loop().run_in_executor(None, self._end_services, node.node_id)
        for actor in (node, *frames):
            ray.kill(actor.handle)

    def _end_services(self, node_id: str) -> None:
        """End a node's gateway and tool host. In a thread: without Ray's head the look-up blocks for as long as Ray
        waits for it."""
        for name in (gateway_name, tool_host_name):
            try:
                service = find_actor(name(self._settings.instance, node_id))
                if service is not None:
                    ray.kill(service)
            except RayError as error:
                log.warning("a service of node %s can't be ended: %s", node_id[:8], error)

    async def request_nodes(self, cpus: list[float]) -> None:
        """See `Machinery.request_nodes`. Ray has one such request; that of another program would be replaced."""
        await asyncio.to_thread(request_resources, bundles=[{"CPU": count} for count in cpus])

    def cpus(self, node_id: str) -> float:
        """CPUs that Ray counts on a node."""
        for node in ray.nodes():
            if node["NodeID"] == node_id:
                return float(node["Resources"].get("CPU", 1.0))
        return 1.0

    def holder_is_dead(self, holder: str) -> bool:
        """A former supervisor of this cluster (its generation is fenced), or a process that would be seen here."""
        *_, cluster, instance, process = holder.split("/")  # behind the address of the head, which may have moved
        if (cluster, instance) == (cluster_identity().split("/")[-1], self._settings.instance):
            return True
        return is_gone(process)

    async def stop(self) -> None:
        """End all node services, gateways and frames of this cluster. In this order: a service that lives takes the end
        of its frames for deaths, and gives their sessions to those that are left."""
        for node in self._nodes.values():
            try:
                await asyncio.wait_for(result_of(node.handle.stop.remote()), 15.0)
            except (TimeoutError, ServiceGone):
                log.warning("node service %s did not stop cleanly", node.node_id[:8])
            ray.kill(node.handle)
            await asyncio.to_thread(self._end_services, node.node_id)
        for frame in await self.frames():
            ray.kill(frame.handle)


async def _created(create: Callable[[], Any]) -> Any:
    """Create an actor, in a thread: its name is registered with Ray's head, which may be away. One that nobody waits
    for any more when it is there is ended."""
    created = asyncio.get_running_loop().run_in_executor(None, create)
    try:
        return await asyncio.shield(created)
    except asyncio.CancelledError:
        created.add_done_callback(_end_unwanted)
        raise


def _end_unwanted(created: asyncio.Future[Any]) -> None:
    if not created.cancelled() and created.exception() is None:
        ray.kill(created.result())
