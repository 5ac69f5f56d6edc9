"""The cluster's API in one process: no Ray, nothing to start or stop. For tests of agents."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import Coroutine, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from understudy.config import OFFLINE_MODEL, ModelProfile, Settings
from understudy.errors import CannotDrain, ClusterUnreachable, InvalidInput, ServiceGone, ToolError
from understudy.gateway.gateway import Gateway
from understudy.gateway.gateway_calls import GatewayCalls
from understudy.identifiers import check_identity, new_identifier
from understudy.node.basis import NodeConfig
from understudy.node.node_service import NodeService
from understudy.prices import price_table
from understudy.protocol import NewSession, Spawned
from understudy.reads import DrainInfo, SessionRecord
from understudy.supervisor.supervisor import Supervisor
from understudy.testing.offline import OfflineServer, Policy
from understudy.transport.repeating import CLIENT_PATIENCE, REPEAT_SECONDS, Repeating

from ..client.background import LoopThread
from ..client.client import Cluster, check_size
from ..client.client_connection import ClientConnection
from ..client.follower import asked
from ..client.method import client_method
from ..client.results import ServiceInfo
from ..client.session_handle import Session
from .local_machinery import END_SECONDS, NODE, THREADS, LocalFrame, LocalMachinery
from .local_node import LocalGateway, LocalNode, LocalToolHost
from .local_tasks import LocalTasks

Result = TypeVar("Result")

NAMESPACE = "local"

KILLABLE = ("node", "gateway", "tool_host")
"""The services that can be killed, by their roles in `Cluster.services`."""

START_SECONDS = 30.0
CLOSED = "this cluster was closed"


class LocalNodes:
    """The one node service, as clients ask it (`follower.Homes`): from their loop on the services' loop.

    Attributes:
        closed: it is asked nothing any more.
    """

    def __init__(self, node: LocalNode, services: LoopThread) -> None:
        self._node = node
        self._services = services
        self.closed = False

    async def there(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the services' loop.

        Raises:
            ClusterUnreachable: the cluster was closed.
        """
        if self.closed:
            coroutine.close()
            raise ClusterUnreachable(CLOSED)
        return await asyncio.wrap_future(self._services.submit(coroutine))

    async def home(self, _session_id: str) -> str:
        """Where every session is at home."""
        return NODE

    async def homes(self, session_ids: list[str]) -> dict[str, tuple[str, int]]:
        """The same, with each session's `seq`."""
        found = await asked(self, dict[str, tuple[str, int]], None, "read", "homes", [session_ids], {})
        return {session_id: (NODE, found.get(session_id, (NODE, 0))[1]) for session_id in session_ids}

    async def request(self, _session_id: str | None, method: str, *arguments: Any, turn: int = 0) -> Any:
        """A request (`Requests`), repeated while another service takes the place of one that was killed."""
        try:
            return await Repeating(CLIENT_PATIENCE).call(
                lambda call_id: self.call(NODE, "request", method, *arguments, call_id=call_id, timeout=None)
            )
        except ServiceGone as error:
            raise ClusterUnreachable(f"the node service does not answer: {error.message}") from None

    async def call(
        self, _node_id: str, method: str, *arguments: Any, call_id: str = "", timeout: float | None = REPEAT_SECONDS
    ) -> Any:  # fmt: skip
        """Call a method of the service."""
        async with asyncio.timeout(timeout):
            return await self.there(self._node.repeated(call_id, method, *arguments))

    async def learn(self) -> None:
        """It is always the same."""


class LocalConnection(ClientConnection):
    """Services in this process, and a client's connection to them.

    Attributes:
        last: what is to be ended after the services.
    """

    def __init__(
        self, settings: Settings, gateway: LocalGateway, tool_host: LocalToolHost, node: LocalNode,
        machinery: LocalMachinery, services: LoopThread,
    ) -> None:  # fmt: skip
        self._nodes = LocalNodes(node, services)
        super().__init__(settings, self._nodes)
        self._gateway = gateway
        self._tool_host = tool_host
        self._node = node
        self._machinery = machinery
        self._services = services
        self._supervisor = Supervisor(
            machinery, machinery.holder, standby=settings.standby, max_actors=settings.max_actors
        )
        self._supervising: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self.last = ExitStack()

    async def start(self) -> None:
        """Start the services, on their loop. Raises what keeps them from starting."""
        try:
            await self._node.start()
            self._supervising = asyncio.get_running_loop().create_task(self._supervisor.run())
            await self._supervisor.ready(START_SECONDS)
        except BaseException:
            await self.end()
            raise

    async def end(self) -> None:
        """End the services, on their loop."""
        if self._supervising is not None:
            await self._supervisor.stop()
            self._supervising.cancel()
            await asyncio.wait({self._supervising}, timeout=END_SECONDS)
        self._machinery.forget()
        await self._machinery.stop()
        await self._node.close()
        await self._gateway.close()
        await self._tool_host.close()

    async def kill(self, session_id: str) -> bool:
        """See `LocalCluster.kill`."""

        async def strike(frame_id: str) -> bool:
            frame = self._machinery.alive.get(frame_id)
            if frame is None or frame.session_id != session_id:  # since the row was read
                return False
            frame.kill()
            return True

        row: SessionRecord = await self.read(SessionRecord, "info", session_id)
        if not row.active or row.frame_id is None:
            return False
        return await self._nodes.there(strike(row.frame_id))

    def strike(self, role: str) -> None:
        """Kill a service (`KILLABLE`). From any thread: calls that are made after this go to the next one."""
        if self._nodes.closed:
            raise ClusterUnreachable(CLOSED)
        services = {"node": self._node.kill, "gateway": self._gateway.kill, "tool_host": self._tool_host.kill}
        self._services.loop.call_soon_threadsafe(services[role])

    async def spawn(
        self,
        session: NewSession,
        blobs: dict[str, bytes],
        placements: Iterable[str] = (),
        runtime_env: dict[str, Any] | None = None,
    ) -> Spawned:
        """See `ClientConnection.spawn`."""
        return await asked(self._nodes, Spawned, None, "spawn", session, blobs)

    def code_placement(self) -> dict[str, Any]:
        """This process has it."""
        return {}

    async def services(self) -> list[ServiceInfo]:
        """Parts of this process, by their roles."""

        async def look() -> list[str]:
            frames = self._node.service.frames
            held = {slot.frame_id for slot in frames.paging.slots.values() if slot.session_id is not None}
            held |= frames.known.expected.keys()
            return ["frame" if frame_id in held else "standby" for frame_id in self._machinery.alive]

        hosts = ["tool_host"] if self._tool_host.servers.servers else []
        roles = ["supervisor", "node", "gateway", *hosts, *await self._nodes.there(look())]
        return [ServiceInfo(role, os.getpid(), NODE, "") for role in roles]

    async def drain(
        self, node_id: str | None, timeout: float, *, wait: bool, stop: bool, by: str = ""
    ) -> list[DrainInfo]:
        """There is nobody to go on."""
        raise CannotDrain("a local cluster has one node", details={"nodes": [NODE]})

    async def undrain(self, node_id: str) -> bool:
        """Nothing is drained."""
        return False

    async def different_settings(self) -> list[str]:
        """None."""
        return []

    async def renew(self, timeout: float) -> bool:
        """They have the credentials."""
        return True

    async def let_go(self) -> None:
        """They end with this client."""

    async def find_again(self) -> None:
        """They are where they were."""

    async def close(self) -> None:
        """End the services: without this connection there are none. Whoever is cancelled meanwhile ends nothing."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            await self.follower.close()
            self._nodes.closed = True  # first: what is cut off would be asked again
            await asyncio.wrap_future(self._services.submit(self.end()))
        finally:
            await asyncio.to_thread(self.last.close)

    async def shutdown(self) -> None:
        """The same."""
        await self.close()


class LocalCluster(Cluster):
    """A cluster in this process: sessions, tools, sub-agents, timers and restarts as in production, for tests.

    The kernel is the real one, on a real store; the services share a thread, each session actor has its own. What only
    processes can show is missing: a tool that exhausts memory or changes the environment does so to the test. Tools are
    not copied, so they may refer to what the test looks at.

    ```python
    with LocalCluster() as cluster:
        run = cluster.spawn(AgentSpec(name="clerk", tools=[refund])).send("Refund order 7")
        assert run.result(10).ok
    ```

    Deaths: `points` has what session actors have done so far, and `kill_at` lets one die at such a point, or the node
    service or the gateway. A test that tries them all begins a new cluster for each. `kill` and `kill_service` do so
    now.

    Args:
        store: DSN; by default a SQLite file of its own, removed at the end. In one that is kept, tools that can't be
            imported are known only to the cluster they were given to.
        model: None for the offline model (`understudy.testing.policies`), which this process serves; else a model
            of the first profile.
        policy: what the offline model answers; None for its own.
        profiles, prices: see `Cluster.connect`.
        standby, max_actors: session actors that wait, and that there may be.
        identity: see `Cluster.connect`.

    Closing it ends everything; a store that was given keeps what was committed.

    Attributes:
        points: what session actors did for their sessions, in order: `SESSION: before step`, `SESSION: reply to step`,
            the same of `commit`, and so on. One session alone passes the same points each time.
        model_server: the offline model, with its counters and the requests that it got.

    Raises:
        InvalidConfiguration: a setting can't be used.
        StoreUnreachable, StoreVersion, StoreSchema: the store can't be used.
        StoreOwned: another cluster works with it.
    """

    def __init__(
        self,
        store: str | None = None,
        *,
        model: str | None = None,
        policy: Policy | None = None,
        profiles: Iterable[ModelProfile] = (),
        prices: Mapping[str, Any] | str | Path | None = None,
        standby: int = 1,
        max_actors: int = 4,
        identity: str = "",
    ) -> None:
        settings = Settings(
            store or "", model or OFFLINE_MODEL, NAMESPACE, standby=standby, max_actors=max_actors,
            prices=price_table(prices or {}),
        )  # fmt: skip
        check_size(settings)
        check_identity(identity)
        self.points: list[str] = []
        self._counting = threading.Lock()
        self._deaths: dict[int, str] = {}  # at which point what dies: a service, by its role, or "": the session actor
        self._functions: dict[bytes, Any] = {}
        with ExitStack() as stack:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="understudy-local-"))
            settings = replace(settings, store=store or f"sqlite:///{directory}/store.db")
            self.model_server = stack.enter_context(OfflineServer(policy))
            services = LoopThread(THREADS)
            stack.callback(services.stop, END_SECONDS)
            config = NodeConfig(
                settings.store, NAMESPACE, NODE, "node", span_directory=directory, serves_metrics=False,
                command_directory=f"{directory}/commands",
                prices=settings.prices,
            )  # fmt: skip
            gateway, known = LocalGateway(lambda: GatewayCalls(Gateway())), list(profiles)
            tasks, tool_host = LocalTasks(self._function), LocalToolHost()
            node = LocalNode(lambda: NodeService(config, gateway, runner=tasks, tool_host=tool_host))
            for profile in (*known, ModelProfile(OFFLINE_MODEL, "offline", self.model_server.url)):
                node.service.profiles.learn(profile)
            machinery = LocalMachinery(node, services, self._function, self._at_point)
            self._local = LocalConnection(settings, gateway, tool_host, node, machinery, services)
            self._local.identity = identity
            services.wait(self._local.start())
            self._local.last = stack.pop_all()
        super().__init__(self._local, settings, known[0].name if known else None, self._note_function)

    @client_method
    async def kill(self, session: Session | str) -> bool:
        """Let the session actor die that has a session now; False if none has it, as while it has nothing to do.

        Its session goes on in another one: what was committed is there, a tool in doubt is treated by its policy.
        """
        return await self._local.kill(session if isinstance(session, str) else session.id)

    def kill_service(self, role: str) -> None:
        """Let a service die now, `node`, `gateway` or `tool_host`; another one takes its place, as in production.

        Sessions stay in their actors, and tools go on. The next node service finds in the store what was committed;
        session actors send it the rest again, and the gateway has kept the answers to model calls. If the gateway dies,
        these are lost, and the calls are made again (`ModelCallReissued`). With the tool host the MCP servers die that
        it has started, and calls of them are in doubt.

        Raises:
            InvalidInput: no service of this role can be killed.
            ClusterUnreachable: the cluster was closed.
        """
        self._local.strike(_killable(role))

    def kill_at(self, *points: int, service: str | None = None) -> None:
        """Let session actors die at these places in `points`, counted from 0, once they are reached; or a service
        instead (`kill_service`).

        Raises:
            InvalidInput: a point has passed, or no service of this role can be killed.
        """
        victim = "" if service is None else _killable(service)
        passed = [point for point in points if point < len(self.points)]
        if passed:
            raise InvalidInput(f"points {passed} have passed: there are {len(self.points)} already")
        self._deaths.update(dict.fromkeys(points, victim))

    def _at_point(self, label: str, frame: LocalFrame) -> None:
        with self._counting:
            number = len(self.points)
            self.points.append(f"{frame.session_id}: {label}")
        victim = self._deaths.get(number)
        if victim:
            self._local.strike(victim)
        elif victim is not None:
            frame.kill()

    def _note_function(self, item: Any) -> bytes:
        """Instead of a copy: what leads to the function itself, in this cluster."""
        key = new_identifier().encode()
        self._functions[key] = item
        return key

    def _function(self, key: bytes) -> Any:
        if key not in self._functions:
            raise ToolError("it was a function of another cluster: one that can be imported is found again")
        return self._functions[key]


def _killable(role: str) -> str:
    if role not in KILLABLE:
        raise InvalidInput(f"no service of role {role!r} can be killed: one of {', '.join(KILLABLE)} can")
    return role
