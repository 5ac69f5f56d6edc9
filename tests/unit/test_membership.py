"""The supervisor and its nodes, without Ray: who is lost, who joins, and what the node services receive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any

import pytest

from understudy.config import ModelProfile
from understudy.errors import (
    CannotDrain,
    InvalidConfiguration,
    MetricsPortTaken,
    ServiceGone,
    StaleGeneration,
    StoreUnreachable,
    UnderstudyError,
    Unschedulable,
)
from understudy.scaling import Scaling
from understudy.store.operations.draining import check_drain
from understudy.supervisor import staffing, watching
from understudy.supervisor import supervisor as supervising
from understudy.supervisor.pool import Demand
from understudy.supervisor.ports import DrainReport, NodeReport, TakenOver
from understudy.supervisor.supervisor import Supervisor

PATIENCE = 20.0
LOST = 0.6


class Node:
    """A node service that answers unless it is silent, and remembers what it received."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self.pid = self.process = 1
        self.silent = self.away = False
        self.drain: DrainReport | None = None
        self.away_at = "acquire"
        self.refused: Exception | None = None
        self.probes = self.asked = 0
        self.condemned: list[str] = []
        self.named: dict[str, int] = {}
        self.hung: set[str] = set()
        self.generation = 0
        self.takeovers: list[tuple[int, int, list[str]]] = []
        self.deaths: list[str] = []
        self.causes: list[str] = []
        self.may_live: list[bool] = []
        self.demand: dict[str, Demand] = {}
        self.hangs: list[tuple[str, float]] = []
        self.unschedulable: list[dict[str, str]] = []
        self.profiles: list[str] = []
        self.brings: list[ModelProfile] = []
        self.refusals: list[UnderstudyError] = []
        self.changed = asyncio.Event()
        self.machinery: Any = None
        self.given: list[tuple[Any, ...]] = []

    @property
    def nodes(self) -> list[str]:
        return self.takeovers[-1][2] if self.takeovers else []

    async def call(self, method: str, *arguments: Any) -> Any:
        if self.silent or (method == "request" and arguments[0] in self.hung):
            await asyncio.Event().wait()
        if self.away and method in (self.away_at, "request" if self.away_at == "acquire" else ""):
            await asyncio.sleep(0.01)
            raise StoreUnreachable("away")
        if method == "acquire":
            Machinery.generation += 1
            return Machinery.generation
        if method == "request":
            return self.machinery.request(*arguments)
        if method == "give":
            self.given.append(arguments)
            self.changed.set()
            return arguments[0]
        if method == "take_over":
            self.generation = arguments[0]
            self.takeovers.append(arguments)
            self.changed.set()
            return TakenOver()
        if method == "frame_died":
            if self.refusals:
                raise self.refusals.pop()
            self.deaths.append(arguments[0])
            self.causes.append(arguments[1])
            self.may_live.append(arguments[3])
            self.changed.set()
        if method == "frame_hangs":
            self.hangs.append(arguments)
        if method == "unschedulable":
            self.unschedulable.append(arguments[0])
            self.changed.set()
        if method == "demand":
            self.asked += 1
            self.changed.set()
            await asyncio.sleep(0.05)
            return NodeReport(
                self.process, self.generation, self.nodes, self.drain, self.demand, self.condemned, self.named
            )
        if method == "register" and self.refused is not None:
            raise self.refused
        if method == "register":
            self.profiles.append(arguments[0].name)
            self.changed.set()
        return self.brings if method == "profiles" else None

    async def meet(self) -> None:
        await self.call("pid")
        self.pid = self.process

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def probe(self) -> dict[str, float]:
        if self.silent:
            await asyncio.Event().wait()
        self.probes += 1
        self.changed.set()
        return {"silent": 0.0, "journal": 0.0, "failing": 0.0}

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that changes when this node is called."""
        async with asyncio.timeout(PATIENCE):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def until_announced(self, nodes: list[str]) -> int:
        """Wait until a takeover named these nodes; returns its generation."""
        async with asyncio.timeout(PATIENCE):
            while not self.takeovers or sorted(self.takeovers[-1][2]) != nodes:
                self.changed.clear()
                await self.changed.wait()
        return self.takeovers[-1][0]


class Frame:
    """A frame on node `a` that lives until a test ends it."""

    frame_id, node_id, placement, pid = "f", "a", "", 2

    def __init__(self) -> None:
        self.died = asyncio.Event()
        self.details: dict[str, str] = {}
        self.overdue = 0.0
        self.probes = 0

    async def watch(self) -> str:
        await self.died.wait()
        raise UnderstudyError("its process is gone", details=self.details)

    async def probe(self) -> dict[str, float]:
        self.probes += 1
        return {"overdue": self.overdue, "silent": 0.0, "busy": 0.0}


class Machinery:
    """A cluster of such nodes; `a` is the supervisor's own."""

    generation = 0

    def __init__(self, *node_ids: str) -> None:
        self.nodes = {node_id: Node(node_id) for node_id in node_ids}
        self.tried: list[str] = []
        self.failure: Exception | None = None
        self.abandoned: list[str] = []
        self.obstacle = ""
        self.noticed: dict[str, float | None] = {}
        self.drains: dict[str, dict[str, Any]] = {}
        self.asked = asyncio.Event()
        self.frame = Frame()
        self.known: list[set[str]] = []
        self.pids: set[int] = set()
        self.killing = asyncio.Event()
        self.killed = asyncio.Event()
        self.killed.set()
        self.reached = True  # whether what is killed is known to be gone
        self.nodes_asked_for: list[int] = []
        self.created = asyncio.Event()  # set: frames that are being created are there

    async def node_ids(self) -> list[str]:
        return list(self.nodes)

    def request(self, method: str, *arguments: Any) -> Any:
        """What the store would say to what a client may ask."""
        if method == "read" and arguments[0] == "drains":
            return list(self.drains.values())
        if method == "begin_drains":
            node_ids, deadline, reason, stop, nodes, _ = arguments
            for number, node_id in enumerate(node_ids):
                check_drain(node_id, nodes, {*self.drains, *node_ids[:number]}, stop=stop)
            self.drains |= {
                node_id: {"node_id": node_id, "deadline": deadline, "reason": reason} for node_id in node_ids
            }
            self.asked.set()
        if method == "end_drains":
            return len([self.drains.pop(node_id) for node_id in arguments[0] if node_id in self.drains])
        return None

    async def notices(self) -> dict[str, float | None]:
        return self.noticed

    async def node_service(self, node_id: str) -> Node:
        if self.nodes[node_id].silent:
            await asyncio.Event().wait()
        self.nodes[node_id].machinery = self
        return self.nodes[node_id]

    async def frames(self, node_id: str, known: Collection[str] = ()) -> list[Any]:
        self.known.append(set(known))
        return [self.frame] if node_id == self.frame.node_id and self.frame.frame_id not in known else []

    async def frame_ids(self, node_id: str) -> set[str]:
        return {self.frame.frame_id} if node_id == self.frame.node_id else set()

    async def create_frame(self, node: Any, frame_id: str, _placement: str) -> Any:
        self.tried.append(frame_id)
        if self.failure is not None:
            raise self.failure
        if self.obstacle:
            raise Unschedulable(self.obstacle)
        await self.created.wait()
        frame = Frame()
        frame.frame_id, frame.node_id, frame.pid = frame_id, node.node_id, 3
        return frame

    async def kill(self, _node_id: str, pid: int, _handle: Any) -> bool:
        self.pids.add(pid)
        self.killing.set()
        await self.killed.wait()
        return self.reached

    def abandon(self, node: Any, _frames: Any) -> None:
        self.abandoned.append(node.node_id)

    async def request_nodes(self, cpus: list[float]) -> None:
        self.nodes_asked_for.append(len(cpus))
        self.asked.set()

    def cpus(self, _node_id: str) -> float:
        return 1.0

    def holder_is_dead(self, _holder: str) -> bool:
        return True


@pytest.fixture
async def machinery(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Machinery]:
    """Three nodes under a supervisor that is in a hurry."""
    async with supervised(Machinery("a", "b", "c"), monkeypatch) as found:
        yield found


@asynccontextmanager
async def supervised(
    found: Machinery, monkeypatch: pytest.MonkeyPatch, scaling: Scaling | None = None
) -> AsyncIterator[Machinery]:
    """Such nodes, once all of them know which nodes there are."""
    monkeypatch.setattr(supervising, "CENSUS_SECONDS", 0.02)
    monkeypatch.setattr(watching, "PROBE_SECONDS", 0.02)
    monkeypatch.setattr(supervising, "LOST_SECONDS", LOST)
    monkeypatch.setattr(supervising, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(watching, "REPEAT_SECONDS", 0.01)
    monkeypatch.setattr("understudy.supervisor.probing.PROBE_DEADLINE", 0.05)
    supervisor = Supervisor(found, "holder", standby=0, max_actors=1, scaling=scaling)
    running = asyncio.create_task(supervisor.run())
    await supervisor.ready(PATIENCE)
    for node in found.nodes.values():
        await node.until_announced(list(found.nodes))
    found.supervisor = supervisor  # type: ignore[attr-defined]
    try:
        yield found
    finally:
        await supervisor.stop()
        running.cancel()
        await asyncio.gather(running, *supervisor._tasks, return_exceptions=True)


async def test_a_node_service_without_its_port_is_reported_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a service that can't have the port of its metrics, then who waits for the services gets the error, with
    time left: the service has waited for it already."""
    monkeypatch.setattr(supervising, "LEASE_SECONDS", 0.01)
    found = Machinery("a")

    async def refuse(*_call: Any) -> Any:
        raise MetricsPortTaken("port 9464 for metrics is taken")

    monkeypatch.setattr(found.nodes["a"], "call", refuse)
    supervisor = Supervisor(found, "holder", standby=0, max_actors=1)
    running = asyncio.create_task(supervisor.run())
    try:
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(MetricsPortTaken, match="9464"):
                await supervisor.ready(100 * PATIENCE)
    finally:
        await supervisor.stop()
        running.cancel()
        await asyncio.gather(running, *supervisor._tasks, return_exceptions=True)


async def test_a_silent_node_is_lost(machinery: Machinery) -> None:
    """Given three nodes, when one gives no answer, then the others learn under the next generation who is left."""
    generation = machinery.generation
    machinery.nodes["b"].silent = True
    assert await machinery.nodes["a"].until_announced(["a", "c"]) == generation + 1
    assert await machinery.nodes["c"].until_announced(["a", "c"]) == generation + 1
    assert machinery.abandoned == ["b"]


async def test_a_node_that_ray_has_lost_is_lost_at_once(machinery: Machinery) -> None:
    """Given three nodes, when one is no longer listed, then its silence need not be waited for."""
    began = time.monotonic()
    del machinery.nodes["c"]
    await machinery.nodes["a"].until_announced(["a", "b"])
    assert machinery.abandoned == ["c"]
    assert time.monotonic() - began < LOST


async def test_a_lost_node_comes_back(machinery: Machinery) -> None:
    """Given a node that was given up, when it answers again, then all are notified under the next generation: one that
    has not heard of it can take nothing that is at work there."""
    machinery.nodes["b"].silent = True
    generation = await machinery.nodes["a"].until_announced(["a", "c"])
    machinery.nodes["b"] = Node("b")
    machinery.supervisor._joining.clear()  # type: ignore[attr-defined]
    for node in machinery.nodes.values():
        assert await node.until_announced(["a", "b", "c"]) == generation + 1
    assert {takeover[0] for takeover in machinery.nodes["b"].takeovers} == {generation + 1}


async def test_a_frame_that_was_made_for_a_lost_service_is_ended(machinery: Machinery) -> None:
    """Given a frame that is being created on a node, when the node is lost and comes back, and then the frame is there,
    then it is killed: it knows the service of before, and sessions would wait for it to call in."""
    machinery.nodes["b"].demand = {"": Demand(ready=1)}
    await machinery.nodes["b"].until(lambda: bool(machinery.tried))
    machinery.nodes["b"].silent = True
    await machinery.nodes["a"].until_announced(["a", "c"])
    machinery.nodes["b"] = Node("b")
    machinery.supervisor._joining.clear()  # type: ignore[attr-defined]
    await machinery.nodes["b"].until_announced(["a", "b", "c"])
    machinery.created.set()
    await machinery.nodes["b"].until(lambda: 3 in machinery.pids)
    assert machinery.tried[0] not in machinery.supervisor._known.frames  # type: ignore[attr-defined]


async def test_a_supervisor_that_stood_still_loses_no_node(machinery: Machinery) -> None:
    """Given healthy nodes, when the supervisor's own process stands still for a while, then it gives up none."""
    generation = machinery.generation
    time.sleep(2 * LOST)  # noqa: ASYNC251 - what a stopped process does
    machinery.nodes["d"] = Node("d")
    assert await machinery.nodes["a"].until_announced(["a", "b", "c", "d"]) == generation + 1
    assert machinery.abandoned == []


async def test_a_process_that_can_not_be_killed_ages_no_node(machinery: Machinery) -> None:
    """Given a frame whose tool hangs, when its process outlives SIGKILL for longer than a node may be silent, then no
    node is taken for lost."""
    generation, node = machinery.generation, machinery.nodes["b"]
    machinery.killed.clear()
    machinery.frame.overdue = 60.0
    await asyncio.wait_for(machinery.killing.wait(), PATIENCE)
    began, probes = time.monotonic(), node.probes
    await machinery.nodes["a"].until(lambda: bool(machinery.abandoned) or time.monotonic() - began > 2 * LOST)
    assert machinery.abandoned == []
    assert node.probes > probes + 2
    assert machinery.generation == generation


@pytest.mark.parametrize("silent", [False, True])
async def test_the_service_of_a_frame_that_hangs_hears_since_when(
    machinery: Machinery, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:  # fmt: skip
    """Given a frame that hangs, then its node's service hears for how long it was silent before it is killed; a service
    that does not answer is not waited for."""
    monkeypatch.setattr(watching, "ANNOUNCE_SECONDS", 0.05)
    machinery.nodes["a"].silent = silent
    began = time.monotonic() - PATIENCE  # it was well before this test began
    machinery.frame.overdue = 60.0
    await asyncio.wait_for(machinery.killing.wait(), PATIENCE)
    assert machinery.frame.pid in machinery.pids
    hangs = machinery.nodes["a"].hangs
    assert silent == (not hangs)
    assert all(name == "f" and 0 < silence < time.monotonic() - began for name, silence in hangs)


async def test_a_condemned_process_that_can_not_be_killed_holds_no_demand_up(machinery: Machinery) -> None:
    """Given a frame whose run was ended by force, when its process outlives SIGKILL, then its node's demand is served
    all the same, and the process is killed once."""
    node = machinery.nodes["a"]
    machinery.killed.clear()
    node.condemned = ["f"]
    await asyncio.wait_for(machinery.killing.wait(), PATIENCE)
    asked = node.asked
    machinery.killing.clear()
    await node.until(lambda: node.asked > asked + 2)
    assert not machinery.killing.is_set()


@pytest.mark.thorough
async def test_a_lost_node_is_noticed_while_the_lease_is_not_renewed(
    machinery: Machinery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given node services that don't answer whether the lease is renewed, when a node is silent, then it is lost."""
    for node in machinery.nodes.values():
        node.hung = {"renew"}
    monkeypatch.setattr(supervising, "RENEW_SECONDS", 0.02)
    supervisor: Supervisor = machinery.supervisor  # type: ignore[attr-defined]
    asked, renewing = supervisor._ask, asyncio.Event()

    async def ask(method: str, *arguments: Any) -> Any:
        if arguments[0] == "renew":
            renewing.set()
        return await asked(method, *arguments)

    monkeypatch.setattr(supervisor, "_ask", ask)
    await asyncio.wait_for(renewing.wait(), PATIENCE)
    machinery.nodes["b"].silent = True
    await machinery.nodes["a"].until_announced(["a", "c"])
    assert machinery.abandoned == ["b"]


async def test_a_death_is_reported_until_it_is_dealt_with(machinery: Machinery) -> None:
    """Given a frame, when it dies while its node service was just restarted and has no store, it is reported again."""
    node = machinery.nodes["a"]
    node.refusals = [StaleGeneration("not adopted yet"), StoreUnreachable("away")]
    machinery.frame.died.set()
    async with asyncio.timeout(PATIENCE):
        while not node.deaths:
            node.changed.clear()
            await node.changed.wait()
    assert node.deaths == ["f"]
    assert not node.refusals


async def test_a_service_that_was_restarted_unnoticed_gets_the_credentials(machinery: Machinery) -> None:
    """Given a node service that died during a `take_over`, when the repeated call reached the next process, then that
    receives the rest too."""
    node = machinery.nodes["b"]
    await machinery.supervisor.register(ModelProfile("key", "secret"))  # type: ignore[attr-defined]
    node.process, node.profiles = 2, []
    async with asyncio.timeout(PATIENCE):
        while not node.profiles:
            node.changed.clear()
            await node.changed.wait()
    assert node.profiles == ["key"]
    assert node.pid == 2


async def test_a_profile_that_can_not_be_used_is_kept_by_nobody(machinery: Machinery) -> None:
    """Given such a profile, when a client registers it, then that client gets the error, and services that start
    again are taken over as before; also if one of them refuses a profile that the others have taken."""
    supervisor, node = machinery.supervisor, machinery.nodes["b"]  # type: ignore[attr-defined]
    with pytest.raises(InvalidConfiguration):
        await supervisor.register(ModelProfile("bad", "key", "no url"))
    assert (list(supervisor.profiles), node.profiles) == ([], [])
    supervisor.profiles["bad"] = ModelProfile("bad", "key", "no url")
    node.refused = InvalidConfiguration("no")
    node.process, before = 2, len(node.takeovers)
    await node.until(lambda: len(node.takeovers) > before)


@pytest.mark.parametrize("reached", [True, False])
async def test_others_are_asked_where_the_store_is_not_reached(machinery: Machinery, reached: bool) -> None:
    """Given a node whose service does not reach the store, when the supervisor asks, then another one answers; if none
    of them reaches it, that is said at once."""
    supervisor = machinery.supervisor  # type: ignore[attr-defined]
    for node in list(machinery.nodes.values())[: 1 if reached else None]:
        node.away = True
    if reached:
        await supervisor._renew(1.0)
    else:
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(StoreUnreachable):
                await supervisor._renew(1.0)


@pytest.mark.parametrize("at", ["acquire", "take_over"])
async def test_frames_live_while_a_supervisor_waits_for_the_store(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a supervisor that can't begin since the store is away, then it probes the frames that there are: those that
    nobody calls for long end themselves, with what they are at."""
    monkeypatch.setattr(supervising, "REASSURE_SECONDS", 0.05)
    found = Machinery("a", "b")
    found.nodes["a"].away, found.nodes["a"].away_at = True, at
    supervisor = Supervisor(found, "holder", standby=0, max_actors=1)
    running = asyncio.create_task(supervisor.run())
    try:
        async with asyncio.timeout(PATIENCE):
            while found.frame.probes < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert found.nodes["a"].takeovers == []
    finally:
        await supervisor.stop()
        running.cancel()
        await asyncio.gather(running, *supervisor._tasks, return_exceptions=True)


async def test_why_a_frame_died_is_reported(machinery: Machinery) -> None:
    """What Ray knows of the cause reaches the node service, which writes it into the session's log."""
    node = machinery.nodes["a"]
    machinery.frame.details = {"cause": "out_of_memory"}
    machinery.frame.died.set()
    async with asyncio.timeout(PATIENCE):
        while not node.causes:
            node.changed.clear()
            await node.changed.wait()
    assert node.causes == ["out_of_memory"]


@pytest.mark.parametrize("reached", [True, False])
async def test_a_process_that_is_not_reached_may_live(machinery: Machinery, reached: bool) -> None:
    """Given a frame that Ray gives up, when nobody can say whether its process is gone, then its node's service hears
    that it may live."""
    node, machinery.reached = machinery.nodes["a"], reached
    machinery.frame.died.set()
    async with asyncio.timeout(PATIENCE):
        while not node.may_live:
            node.changed.clear()
            await node.changed.wait()
    assert node.may_live == [not reached]


async def test_what_can_not_be_started_is_reported(machinery: Machinery) -> None:
    """Given sessions that ask for what no node has, then their node service and the directory say why they wait."""
    node, supervisor = machinery.nodes["b"], machinery.supervisor  # type: ignore[attr-defined]
    machinery.obstacle = "no node has GPU 1"
    node.demand = {"gpu": Demand(ready=1)}
    async with asyncio.timeout(PATIENCE):
        while not node.unschedulable:
            node.changed.clear()
            await node.changed.wait()
    assert "no node has GPU 1" in node.unschedulable[-1]["gpu"]
    assert list(supervisor.directory().problems) == ["gpu"]


async def test_a_notice_of_the_cluster_begins_a_drain(machinery: Machinery) -> None:
    """Given a node that the cluster will end in 60 s, then it is drained once, well before, and all nodes are
    notified."""
    before = {node_id: len(node.takeovers) for node_id, node in machinery.nodes.items()}
    began = time.time()
    machinery.noticed = {"b": 60.0}
    await asyncio.wait_for(machinery.asked.wait(), PATIENCE)
    assert list(machinery.drains) == ["b"]
    assert 49 <= machinery.drains["b"]["deadline"] / 1e6 - began <= 50 + PATIENCE
    async with asyncio.timeout(PATIENCE):
        for node_id, node in machinery.nodes.items():
            while len(node.takeovers) == before[node_id]:
                node.changed.clear()
                await node.changed.wait()
    supervisor: Supervisor = machinery.supervisor  # type: ignore[attr-defined]
    assert await supervisor.drains.undo("b", "undo")
    machinery.asked.clear()
    await supervisor._census()
    await asyncio.sleep(0.1)  # that nothing happens can't be awaited
    assert machinery.drains == {}


async def test_the_last_node_is_not_drained(machinery: Machinery) -> None:
    """Given three nodes of which two are drained, the third is refused, by hand and by a notice, unless all stop."""
    supervisor: Supervisor = machinery.supervisor  # type: ignore[attr-defined]
    await supervisor.drains.begin(["b", "c"], 60, "one", reason="test")
    with pytest.raises(CannotDrain):
        await supervisor.drains.begin(["a"], 60, "two", reason="test")
    await supervisor.drains.heed({"a": 5.0})
    assert set(machinery.drains) == {"b", "c"}
    await supervisor.drains.undo("b", "four")
    await supervisor.drains.heed({"a": 5.0})  # the cluster says it for as long as it holds
    assert set(machinery.drains) == {"a", "c"}
    await supervisor.drains.undo("a", "five")
    await supervisor.drains.begin(["b"], 60, "six", reason="test")
    await supervisor.drains.begin(["a", "b", "c"], 60, "three", reason="test", stop=True)
    assert set(machinery.drains) == {"a", "b", "c"}


async def test_frames_are_not_created_on_a_drained_node(machinery: Machinery) -> None:
    """Given one node that is drained and one that is full, when standbys are wanted, only the third one gets some."""
    created: list[str] = []
    enough = asyncio.Event()

    async def create_frame(node: Node, _frame_id: str, _placement: str) -> Any:
        created.append(node.node_id)
        enough.set()
        await asyncio.Event().wait()

    machinery.create_frame = create_frame  # type: ignore[method-assign]
    machinery.nodes["b"].drain = DrainReport("test", False)
    supervisor: Supervisor = machinery.supervisor  # type: ignore[attr-defined]
    supervisor._staffing._standby = 1
    supervisor.want("elsewhere")
    await asyncio.wait_for(enough.wait(), PATIENCE)
    await asyncio.sleep(0.2)
    assert set(created) == {"c"}


async def test_a_placement_that_nobody_uses_is_forgotten(machinery: Machinery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given placements that were wanted, when one is not used for long, then nothing stands by for it any more, and
    nothing is remembered of it; one that is in use stays."""
    monkeypatch.setattr(staffing, "WANTED_SECONDS", 0.2, raising=False)
    supervisor: Supervisor = machinery.supervisor  # type: ignore[attr-defined]
    node = machinery.nodes["a"]
    node.demand = {"used": Demand(acting=1)}
    supervisor.want("used")
    supervisor.want("unused")
    began = time.monotonic()
    await node.until(lambda: "unused" not in supervisor._staffing._wanted or time.monotonic() - began > PATIENCE / 4)
    assert set(supervisor._staffing._wanted) == {"", "used"}
    asked = node.asked
    await node.until(lambda: node.asked > asked + 2)
    assert set(supervisor._known.nodes["a"].stock._standbys) == {"", "used"}


@pytest.mark.parametrize("lost", [1, 2])
async def test_a_death_whose_watch_was_lost_is_reported(machinery: Machinery, lost: int) -> None:
    """Given a frame that died, and calls that should have reported it and were lost, when probes find nobody there,
    then the frame is watched again, each time, and its node's service hears of the death."""

    class Lost(Frame):
        watched = 0

        async def watch(self) -> str:
            self.watched += 1
            if self.watched <= lost:
                await asyncio.Event().wait()
            raise ServiceGone("it died")

        async def probe(self) -> dict[str, float]:
            raise ServiceGone("it died")

    supervisor, frame = machinery.supervisor, Lost()
    supervisor._known.frames[frame.frame_id] = frame  # type: ignore[assignment]
    supervisor._tasks.spawn(supervisor._watching.watch_frame(frame, supervisor._known.term))
    node = machinery.nodes["a"]
    await node.until(lambda: node.deaths == [frame.frame_id])
    assert frame.watched == lost + 1


async def test_a_killed_frame_whose_watch_never_tells_is_dead(machinery: Machinery) -> None:
    """Given a frame that hangs, and whose process has left another one that keeps its connections open, when it is
    killed, then its node's service hears of its death, once, although its watch tells nothing."""

    class Forked(Frame):
        async def watch(self) -> str:
            await asyncio.Event().wait()
            raise AssertionError

    supervisor, frame = machinery.supervisor, Forked()  # type: ignore[attr-defined]
    frame.overdue = 60.0
    supervisor._known.frames[frame.frame_id] = frame
    supervisor._tasks.spawn(supervisor._watching.watch_frame(frame, supervisor._known.term))
    node = machinery.nodes["a"]
    await node.until(lambda: bool(node.deaths))
    probes = node.probes
    await node.until(lambda: node.probes > probes + 1)
    assert (node.deaths, node.may_live) == ([frame.frame_id], [False])
    assert frame.frame_id not in supervisor._known.frames


async def test_a_stranger_that_hangs_lives_until_it_was_killed(machinery: Machinery) -> None:
    """Given a frame that called in at its node and is not known, when it turns out to hang, then its node's service
    hears of its death once its process is gone, and not before; those that are known are not asked who they are."""
    node, asked = machinery.nodes["a"], len(machinery.known)
    machinery.frame, machinery.killed = Frame(), asyncio.Event()
    machinery.frame.frame_id, machinery.frame.overdue = "stranger", 60.0
    node.named = {"f": 7, "stranger": 8}
    await asyncio.wait_for(machinery.killing.wait(), PATIENCE)
    served = node.asked
    await node.until(lambda: node.asked > served + 2)
    assert (node.deaths, machinery.known[asked]) == ([], {"f"})
    machinery.killed.set()
    machinery.frame.died.set()
    await node.until(lambda: node.deaths == ["stranger"])


async def test_what_a_frame_held_that_was_not_seen_to_start_goes_on(machinery: Machinery) -> None:
    """Given a frame whose creation failed after its process had begun and called in, when that is noticed, then its
    node's service hears that the frame is dead, and that its process may live if that is not known to be gone."""
    node, supervisor = machinery.nodes["b"], machinery.supervisor  # type: ignore[attr-defined]
    machinery.failure = ServiceGone("it died while it started")
    machinery.reached = False
    node.demand = {"": Demand(ready=1)}
    await node.until(lambda: bool(machinery.tried))
    node.named = {machinery.tried[0]: 8}
    await node.until(lambda: machinery.tried[0] in node.deaths)
    assert set(node.may_live) == {True}
    assert machinery.tried[0] not in supervisor._known.frames


async def test_a_frame_that_died_unseen_is_reported_where_it_is_named(machinery: Machinery) -> None:
    """Given a frame that died while nobody watched it, when a service names it, then what may be left of its process is
    killed, and only then the service hears of its death; of frames that live it hears nothing."""
    node = machinery.nodes["a"]
    machinery.killed.clear()
    node.named = {"f": 7, "gone": 8}
    await asyncio.wait_for(machinery.killing.wait(), PATIENCE)
    served = node.asked
    await node.until(lambda: node.asked > served + 2)
    assert node.deaths == []
    machinery.killed.set()
    await node.until(lambda: bool(node.deaths))
    assert (set(node.deaths), set(node.may_live), machinery.pids) == ({"gone"}, {False}, {8})


async def test_a_frame_is_not_judged_without_being_looked_for(
    machinery: Machinery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a frame that is known, when it becomes unknown while others are looked for, then it is looked for as well
    before anybody hears that it is dead."""
    node, frames, looked = machinery.nodes["a"], machinery.frames, list[set[str]]()
    supervisor: Supervisor = machinery.supervisor  # type: ignore[attr-defined]

    async def found(node_id: str, known: Collection[str] = ()) -> list[Any]:
        looked.append(set(known))
        supervisor._known.frames.pop("f", None)
        return await frames(node_id, known)

    monkeypatch.setattr(machinery, "frames", found)
    node.named = {"f": 7, "gone": 8}
    await node.until(lambda: len(looked) > 1)
    node.named = {"f": 7}
    await node.until(lambda: "f" in supervisor._known.frames)
    assert (node.deaths, machinery.pids) == (["gone"], {8})


async def test_a_death_that_is_being_reported_is_reported_once(machinery: Machinery) -> None:
    """Given a frame whose death is being dealt with, when its node's service names it, then nobody else deals with it:
    who saw it die knows more of it."""
    node = machinery.nodes["a"]
    machinery.killed.clear()
    node.named = {"f": 7}
    machinery.frame.details = {"cause": "out_of_memory"}
    machinery.frame.died.set()
    await asyncio.wait_for(machinery.killing.wait(), PATIENCE)
    served = node.asked
    await node.until(lambda: node.asked > served + 2)
    machinery.killed.set()
    await node.until(lambda: bool(node.causes))
    assert node.causes == ["out_of_memory"]


async def test_a_node_that_joins_is_named_under_the_next_generation_only(
    machinery: Machinery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a node that joins while no generation can be taken, when others are notified again, then its name is not
    among those of the present generation: whoever has not heard of it would take its sessions."""
    supervisor: Supervisor = machinery.supervisor  # type: ignore[attr-defined]
    node, going, asked = machinery.nodes["b"], asyncio.Event(), supervisor._ask

    async def held(method: str, *arguments: Any) -> Any:
        if method == "acquire":
            going.set()
            await asyncio.Event().wait()
        return await asked(method, *arguments)

    monkeypatch.setattr(supervisor, "_ask", held)
    machinery.nodes["d"] = Node("d")
    await asyncio.wait_for(going.wait(), PATIENCE)
    supervisor._tasks.over("fence").cancel()  # as where it fails
    before = len(node.takeovers)
    node.process = 2  # another process, which must be notified
    await node.until(lambda: len(node.takeovers) > before)
    generation, _, nodes = node.takeovers[-1]
    assert (generation, sorted(nodes)) == (supervisor.generation, ["a", "b", "c"])
    assert machinery.nodes["d"].takeovers == []


async def test_a_supervisor_that_starts_is_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a supervisor that waits for another node's service while it starts, then its own node's service is probed
    all the while: it kills a supervisor that it does not hear of."""
    monkeypatch.setattr(watching, "PROBE_SECONDS", 0.02)
    monkeypatch.setattr(supervising, "LOST_SECONDS", PATIENCE)
    found = Machinery("a", "b")
    found.nodes["b"].silent = True
    supervisor = Supervisor(found, "holder", standby=0, max_actors=1)
    running = asyncio.create_task(supervisor.run())
    try:
        async with asyncio.timeout(PATIENCE):
            while found.nodes["a"].probes < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (supervisor.state, found.nodes["a"].takeovers) == ("starting", [])
    finally:
        await supervisor.stop()
        running.cancel()
        await asyncio.gather(running, *supervisor._tasks, return_exceptions=True)


async def test_credentials_that_one_node_has_reach_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a supervisor that begins with no credentials, when one of its nodes brings some, then the others receive
    them, also those that it spoke with before."""
    found = Machinery("a", "b", "c")
    found.nodes["c"].brings = [ModelProfile("p", "sk-1", "http://endpoint/v1")]
    async with supervised(found, monkeypatch):
        for node in found.nodes.values():
            await node.until(lambda node=node: "p" in node.profiles)  # type: ignore[misc]
