"""The cluster's API in one process: no Ray, nothing to start or stop. For tests of agents."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from understudy.actors.gateway import Gateway
from understudy.config import OFFLINE_MODEL, ModelProfile, Settings
from understudy.errors import CannotDrain, InvalidInput, ToolError, UnderstudyError
from understudy.identifiers import new_identifier
from understudy.prices import price_table
from understudy.supervisor.supervisor import Supervisor
from understudy.testing.offline import OfflineServer, Policy

from . import background
from .client import Cluster, Session
from .client_connection import ClientConnection
from .follower import Follower
from .local_machinery import NODE, LocalFrame, LocalMachinery, LocalNode
from .node_service import NodeConfig
from .repeating import REPEAT_SECONDS
from .results import DrainInfo, ServiceInfo

NAMESPACE = "local"
START_SECONDS = 30.0


class LocalNodes:
    """The one node service, as clients ask it (`follower.Homes`)."""

    def __init__(self, node: LocalNode) -> None:
        self._node = node

    async def home(self, _session_id: str) -> str:
        """Where every session is at home."""
        return NODE

    async def homes(self, session_ids: list[str]) -> dict[str, tuple[str, int]]:
        """The same, with each session's `seq`."""
        found: dict[str, tuple[str, int]] = await self.request(None, "read", "homes", [session_ids], {})
        return {session_id: (NODE, found.get(session_id, (NODE, 0))[1]) for session_id in session_ids}

    async def request(self, _session_id: str | None, method: str, *arguments: Any, turn: int = 0) -> Any:
        """A request (`Requests`)."""
        return await self._node.request(method, *arguments)

    async def call(
        self, _node_id: str, method: str, *arguments: Any, call_id: str = "", timeout: float | None = REPEAT_SECONDS
    ) -> Any:  # fmt: skip
        """Call a method of the service."""
        return await asyncio.wait_for(self._node.repeated(call_id, method, *arguments), timeout)

    async def learn(self) -> None:
        """It is always the same."""


class LocalConnection(ClientConnection):
    """Services in this process, and a client's connection to them."""

    def __init__(self, settings: Settings, node: LocalNode, machinery: LocalMachinery) -> None:
        nodes = LocalNodes(node)
        super().__init__(settings, nodes, Follower(nodes))
        self._node = node
        self._machinery = machinery
        self._supervisor = Supervisor(
            machinery, f"{NODE}/{new_identifier()}", standby=settings.standby, max_actors=settings.max_actors
        )
        self._supervising: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start the services. Raises what keeps them from starting."""
        await self._node.service.start()
        self._supervising = asyncio.get_running_loop().create_task(self._supervisor.run())
        await self._supervisor.ready(START_SECONDS)

    async def spawn(
        self,
        session: dict[str, Any],
        blobs: dict[str, bytes],
        placements: Iterable[str] = (),
        runtime_env: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """See `ClientConnection.spawn`."""
        found: dict[str, Any] = await self._node.request("spawn", session, blobs)
        return found

    def code_placement(self) -> dict[str, Any]:
        """This process has it."""
        return {}

    def frame_of(self, session_id: str) -> LocalFrame | None:
        """The session actor that has the session now, at work or waiting."""
        for slot in self._node.service.frames.paging.slots.values():
            if slot.session_id == session_id:
                return self._machinery.alive.get(slot.frame_id)
        return None

    async def services(self) -> list[ServiceInfo]:
        """Parts of this process, by their roles."""
        pid = os.getpid()
        held = {slot.frame_id for slot in self._node.service.frames.paging.slots.values() if slot.session_id}
        roles = ["supervisor", "node"] + ["frame" if name in held else "standby" for name in self._machinery.alive]
        return [ServiceInfo(role, pid, NODE, "") for role in roles]

    async def drain(self, node_id: str | None, timeout: float, *, wait: bool, stop: bool) -> list[DrainInfo]:
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

    async def find_again(self) -> None:
        """They are where they were."""

    async def close(self) -> None:
        """End the services: without this connection there are none."""
        await self.follower.close()
        if self._supervising is not None:
            await self._supervisor.stop()
            self._supervising.cancel()
            await asyncio.wait({self._supervising}, timeout=1.0)
        await self._machinery.stop()
        await self._node.close()

    async def shutdown(self) -> None:
        """The same."""
        await self.close()


class LocalCluster(Cluster):
    """A cluster in this process: sessions, tools, sub-agents, timers and restarts as in production, for tests.

    The kernel is the real one, on a real store; session actors are tasks on an event loop in a thread. What only
    processes can show is missing: a tool that blocks, exhausts memory or changes the environment does so to all. Tools
    are not copied, so they may refer to what the test looks at.

    ```python
    with LocalCluster() as cluster:
        run = cluster.spawn(AgentSpec(name="clerk", tools=[refund])).send("Refund order 7")
        assert run.result(10).ok
    ```

    Deaths: `points` has what session actors have done so far, and `kill_at` lets one die at such a point. A test that
    tries them all begins a new cluster for each.

    Args:
        store: DSN; by default a SQLite file of its own, removed at the end. In one that is kept, tools that can't be
            imported are known to the cluster only that they were given to.
        model: None for the offline model (`understudy.testing.policies`), which this process serves; else one of the
            first profile.
        policy: what the offline model answers; None for its own.
        profiles, prices: see `Cluster.connect`.
        standby, max_actors: session actors that wait, and that there may be.

    Attributes:
        points: what session actors did for their sessions, in order: `SESSION: before step`, `SESSION: reply to step`,
            the same of `commit`, and so on. One session alone passes the same points each time.
        model_server: the offline model, with its counters and the requests that it got.

    Raises:
        StoreUnreachable, StoreVersion, StoreSchema: the store can't be used.
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
    ) -> None:
        self.points: list[str] = []
        self._deaths: set[int] = set()
        self._functions: dict[bytes, Any] = {}
        self._directory = tempfile.TemporaryDirectory(prefix="understudy-local-")
        store = store or f"sqlite:///{self._directory.name}/store.db"
        known = list(profiles)
        settings = Settings(
            store, model or OFFLINE_MODEL, NAMESPACE, standby=standby, max_actors=max_actors,
            prices=price_table(prices or {}),
        )  # fmt: skip
        self.model_server = OfflineServer(policy)
        self.model_server.start()
        try:
            connection = background.wait(self._open(settings, known))
        except BaseException:
            self.model_server.stop()
            self._directory.cleanup()
            raise
        super().__init__(connection, settings, known[0].name if known else None, self._note_function)
        self._local = connection

    async def _open(self, settings: Settings, profiles: list[ModelProfile]) -> LocalConnection:
        gateway = Gateway(prices=settings.prices)
        for profile in (*profiles, ModelProfile(OFFLINE_MODEL, "offline", self.model_server.url)):
            gateway.register(profile)
        config = NodeConfig(
            settings.store, settings.namespace, NODE, "node", span_directory=self._directory.name, serves_metrics=False
        )
        node = LocalNode(config, gateway)
        connection = LocalConnection(settings, node, LocalMachinery(node, self._function, self._at_point))
        try:
            await connection.open()
        except UnderstudyError:
            await connection.close()
            raise
        return connection

    def kill(self, session: Session | str) -> bool:
        """Let the session actor die that has a session now; False if none has it, as while it has nothing to do.

        Its session goes on in another one: what was committed is there, a tool in doubt is treated by its policy.
        """
        session_id = session if isinstance(session, str) else session.id

        async def strike() -> bool:
            frame = self._local.frame_of(session_id)
            if frame is None:
                await self._local.read("info", session_id)  # raises if there is no such session
                return False
            frame.kill()
            return True

        return background.wait(strike())

    def kill_at(self, *points: int) -> None:
        """Let session actors die at these places in `points`, counted from 0, once they are reached."""
        passed = [point for point in points if point < len(self.points)]
        if passed:
            raise InvalidInput(f"points {passed} have passed: there are {len(self.points)} already")
        self._deaths.update(points)

    def close(self) -> None:
        """End everything; a store that was given keeps what was committed."""
        super().close()
        self.model_server.stop()
        self._directory.cleanup()

    def shutdown(self) -> None:
        """The same."""
        self.close()

    def _at_point(self, label: str, frame: LocalFrame) -> None:
        number = len(self.points)
        self.points.append(f"{frame.session_id}: {label}")
        if number in self._deaths:
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
