"""Two Ray nodes with PostgreSQL: a node service on each, sessions on both, one node killed, one stopped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from understudy import Cluster, Session
from understudy.cluster.cli.doctor import examine
from understudy.cluster.client import background
from understudy.cluster.ray.leaving import drain_node
from understudy.environment import for_services
from understudy.errors import CannotDrain
from understudy.events import ModelCallReissued, SessionActivated, SessionCrashed, TextDelta, ToolInDoubt

from ..faults import PATIENCE, Stage, call, end, gone, of, staged, wait_until
from ..postgres import database

pytestmark = [pytest.mark.ray, pytest.mark.thorough, pytest.mark.timeout(240)]

LOST = 15_000_000_000
"""Nanoseconds within which the sessions of a lost node must run elsewhere."""


class SecondNode:
    """Another Ray node on this machine; everything that runs on it descends from one process."""

    def __init__(self, address: str) -> None:
        command = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--block"]
        command += [f"--address={address}", "--num-cpus=1", "--object-store-memory=100000000", "--log-color=false"]
        self._process = subprocess.Popen(
            command, env=for_services(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def processes(self) -> list[psutil.Process]:
        """All its processes."""
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def pids(self) -> set[int]:
        """Their pids."""
        return {process.pid for process in self.processes()}

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of them."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """SIGKILL all of them at once."""
        end(self.processes())
        self._process.wait(20)


@pytest.fixture(scope="module")
def second(ray_cluster: str) -> Iterator[list[SecondNode]]:
    """The second node that lives now is the last one."""
    found = [SecondNode(ray_cluster)]
    try:
        yield found
    finally:
        for node in found:
            node.kill()


@pytest.fixture(scope="module")
def services(ray_cluster: str, second: list[SecondNode], postgres_server: str) -> Iterator[str]:
    """The services of a PostgreSQL store on both nodes."""
    with database(postgres_server) as dsn, Cluster.connect(dsn, max_actors=3, standby=1) as cluster:
        try:
            wait_until(lambda: len(node_pids(cluster)) == 2, "a node service on each node")
            yield dsn
        finally:
            cluster.shutdown()


@pytest.fixture
def stage(services: str, tmp_path: Path) -> Iterator[Stage]:
    """A client and an endpoint of the test's own."""
    with staged(services, tmp_path / "stage") as found:
        yield found


def node_pids(cluster: Cluster) -> dict[str, int]:
    """The node services: pid by node."""
    return {service.node_id: service.pid for service in cluster.services() if service.role == "node"}


def at(stage: Stage, node_id: str, count: int) -> list[Session]:
    """New sessions until there are `count` of them at home on this node."""
    background.wait(stage.cluster._connection.find_again())  # by itself it looks for new nodes twice a minute
    found: list[Session] = []
    while len(found) < count:
        session = stage.spawn()
        if session.info().node_id == node_id:
            found.append(session)
    return found


def places(session: Session) -> list[str]:
    """The nodes of the session's activations, in order."""
    return [event.node_id for event in of(session.events(), SessionActivated)]


def moved(session: Session, node_id: str) -> int:
    """When the session was activated on this node, in nanoseconds; waits for that."""
    wait_until(lambda: node_id in places(session), "it runs elsewhere")
    return 1000 * next(event.at for event in of(session.events(), SessionActivated) if event.node_id == node_id)


def homes(stage: Stage, second: list[SecondNode]) -> tuple[str, str]:
    """The first node, where the supervisor is, and the second."""

    def found() -> tuple[str, str] | None:  # a service that took long to restart was given up, and comes back
        pids = node_pids(stage.cluster)
        there = [node_id for node_id, pid in pids.items() if pid in second[-1].pids()]
        here = [node_id for node_id in pids if node_id not in there]
        return (here[0], there[0]) if len(here) == len(there) == 1 else None

    here, there = wait_until(found, "both nodes' services")
    assert [service.node_id for service in stage.cluster.services() if service.role == "supervisor"] == [here]
    return here, there


def scraped(stage: Stage, name: str, **labels: str) -> float:
    """The sum of a metric's samples over all node services."""
    amount = 0.0
    for service in stage.cluster.services():
        if service.role == "node" and service.address:
            with urllib.request.urlopen(service.address) as response:
                found = text_string_to_metric_families(response.read().decode())
            amount += sum(
                sample.value
                for family in found
                for sample in family.samples
                if sample.name == name and labels.items() <= sample.labels.items()
            )
    return amount


def carried(stage: Stage) -> float:
    """Runs of services that are gone."""
    return scraped(stage, "understudy_runs_carried", state="accepted")


def balanced(stage: Stage) -> bool:
    """Whether no run is lost, or counted twice."""
    accepted = scraped(stage, "understudy_runs_accepted_total") + carried(stage)
    finished = scraped(stage, "understudy_runs_finished_total")
    finished += scraped(stage, "understudy_runs_carried", state="finished")
    return accepted - finished == scraped(stage, "understudy_runs_live")


def test_each_node_leads_prometheus_to_all(stage: Stage, second: list[SecondNode]) -> None:
    """Given two nodes, then each service names both to Prometheus, is ready, and knows memory and supervisor."""
    addresses = {service.address for service in stage.cluster.services() if service.role == "node"}
    assert len(addresses) == 2
    for address in addresses:
        base = address.removesuffix("/metrics")

        def listed(base: str = base) -> set[str]:
            with urllib.request.urlopen(f"{base}/targets") as response:
                found = json.load(response)
            return {f"http://{target}/metrics" for entry in found for target in entry["targets"]}

        def is_ready(base: str = base) -> bool:
            try:
                with urllib.request.urlopen(f"{base}/readyz") as response:
                    return bool(response.status == 200)
            except urllib.error.HTTPError:  # it has begun just now
                return False

        wait_until(lambda: listed() == addresses, "all services are listed")
        wait_until(is_ready, "the service is ready")
    assert stage.spawn().send("hello").result(PATIENCE).ok
    wait_until(lambda: balanced(stage), "no run is lost")
    for name in ("understudy_actors_cap", "understudy_memory_available_bytes", "understudy_frames_memory_bytes"):
        assert scraped(stage, name) > 0
    assert 0 <= scraped(stage, "understudy_supervisor_silence_seconds") < 2 * 12


def test_sessions_are_spread_over_the_nodes(stage: Stage, second: list[SecondNode]) -> None:
    """Given two nodes, when one client starts and follows sessions, then each node runs half, on its own frames."""
    here, there = homes(stage, second)
    sessions = [stage.spawn() for _ in range(6)]
    runs = [session.send(call("look", name=f"thing-{number}")) for number, session in enumerate(sessions)]
    assert [run.result(PATIENCE).text for run in runs] == [f"offline: did thing-{number}" for number in range(6)]
    assert sorted(session.info().node_id for session in sessions) == sorted([here, there] * 3)
    assert all(set(places(session)) == {session.info().node_id} for session in sessions)
    frames = {s.pid: s.node_id for s in stage.cluster.services() if s.role in ("frame", "standby")}
    assert {node_id for pid, node_id in frames.items() if pid in second[-1].pids()} == {there}
    [found] = [check.found for check in examine(stage.dsn) if check.name == "services"]
    assert all(f"node {node_id[:8]} pid" in found for node_id in (here, there))
    for session in sessions:
        events = list(session.send("again"))
        assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "offline: again"
    stage.check()


def test_a_cancel_crosses_nodes(stage: Stage, second: list[SecondNode]) -> None:
    """Given a session in a model call, when another node's service commits its cancel, then the call is closed."""
    here, there = homes(stage, second)
    stage.server.hold()
    for home, other in ((here, there), (there, here)):
        [session] = at(stage, home, 1)
        run = session.send("hello")
        stage.server.wait(lambda stats: stats.in_flight == 1)
        nodes = stage.cluster._connection.nodes
        assert background.wait(nodes.call(other, "request", "cancel", session.id, None, "no more", "first"))
        assert run.result(PATIENCE).status == "cancelled"
        stage.server.wait(lambda stats: stats.in_flight == 0)
        assert set(places(session)) == {home}
    stage.check(*stage.sessions)


def test_a_node_service_killed_alone_comes_back(stage: Stage, second: list[SecondNode]) -> None:
    """Given work on both nodes, when the second node's service is killed, then Ray restarts it and all stay at home."""
    here, there = homes(stage, second)
    [mine], [other] = at(stage, here, 1), at(stage, there, 1)
    stage.server.hold()
    runs = [session.send("hello") for session in (mine, other)]
    stage.server.wait(lambda stats: stats.in_flight == 2)
    killed = node_pids(stage.cluster)[there]
    psutil.Process(killed).kill()
    wait_until(lambda: node_pids(stage.cluster).get(there) not in (killed, None), "the service is back")
    stage.server.release()
    assert [run.result(PATIENCE).text for run in runs] == ["offline: hello"] * 2
    assert stage.server.stats.requests == 2
    assert set(places(mine)) == {here}
    assert set(places(other)) == {there}
    assert not of(mine.events(), ModelCallReissued)
    stage.check()


def test_a_stopped_frame_is_killed_through_its_node(stage: Stage, second: list[SecondNode]) -> None:
    """Given a tool on the second node, when its frame is stopped, then that is killed and the session resumed."""
    _, there = homes(stage, second)
    [session] = at(stage, there, 1)
    run = session.send(call("act", name="slow"))
    wait_until(lambda: stage.effects() == ["slow"], "the tool runs")
    pid = session.info().actor_pid or 0
    psutil.Process(pid).suspend()
    assert "interrupted" in run.result(PATIENCE).text
    assert gone(pid)
    assert set(places(session)) == {there}
    assert stage.effects() == ["slow"]
    [crash] = of(session.events(), SessionCrashed)
    assert 4_000_000 < crash.unseen < 20_000_000  # a probe that was answered, and one that was not
    stage.check()


def test_a_node_is_cut_off_and_comes_back(stage: Stage, second: list[SecondNode]) -> None:
    """Given all processes of a node are stopped, then the other has its sessions within 15 s; continued, it is fenced.

    Its tool ends unheard, its calls are late, and nothing of it is done twice.
    """
    here, there = homes(stage, second)
    acting, calling = at(stage, there, 2)
    tool = acting.send(call("act", name="slow"))
    wait_until(lambda: stage.effects() == ["slow"], "the tool runs")
    before = stage.server.stats.requests
    stage.server.hold()
    run = calling.send("hello")
    stage.server.wait(lambda stats: stats.in_flight == 1)
    stopped = time.time_ns()
    second[-1].signal(signal.SIGSTOP)
    try:
        assert moved(acting, here) - stopped < LOST
        assert moved(calling, here) - stopped < LOST
    finally:
        second[-1].signal(signal.SIGCONT)
    stage.let_go("slow")
    stage.server.release()
    assert run.result(PATIENCE).text == "offline: hello"
    assert "interrupted" in tool.result(PATIENCE).text
    assert stage.effects() == ["slow"]
    assert [event.policy for event in of(acting.events(), ToolInDoubt)] == ["report"]
    assert stage.server.stats.requests == before + 3  # a call, the same again, and the round after the tool
    wait_until(lambda: len(node_pids(stage.cluster)) == 2, "the node has a service again")
    assert [places(session)[-1] for session in (acting, calling)] == [here, here]
    [session] = at(stage, there, 1)
    assert session.send("hello").result(PATIENCE).text == "offline: hello"
    stage.check()


def test_a_node_is_lost_and_another_joins(stage: Stage, second: list[SecondNode], ray_cluster: str) -> None:
    """Given work on both nodes, when all processes of one are killed, then the other has its sessions within 15 s.

    No tool runs twice, no call of the surviving node is repeated, and a node that joins gets new sessions.
    """
    here, there = homes(stage, second)
    mine = at(stage, here, 1)
    acting, calling, idle = at(stage, there, 3)
    assert idle.send("before").result(PATIENCE).ok
    tool = acting.send(call("act", name="slow"))
    wait_until(lambda: stage.effects() == ["slow"], "the tool runs")
    before = stage.server.stats.requests
    stage.server.hold()
    runs = [session.send("hello") for session in (*mine, calling)]
    followed = ThreadPoolExecutor(1).submit(list, runs[-1])
    stage.server.wait(lambda stats: stats.in_flight == 2)
    killed = time.time_ns()
    second[-1].kill()
    assert moved(acting, here) - killed < LOST
    assert moved(calling, here) - killed < LOST
    stage.server.release()
    assert [run.result(PATIENCE).text for run in runs] == ["offline: hello"] * 2
    seqs = [event.seq for event in calling.events() if event.run_id == runs[-1].run_id]
    assert [event.seq for event in followed.result(PATIENCE) if event.seq] == seqs
    assert "interrupted" in tool.result(PATIENCE).text
    assert stage.effects() == ["slow"]
    assert [event.policy for event in of(acting.events(), ToolInDoubt)] == ["report"]
    assert [event.attempt for event in of(calling.events(), ModelCallReissued)] == [2]
    assert not of(mine[0].events(), ModelCallReissued)
    assert stage.server.stats.requests == before + 4  # two calls, one of them again, and the round after the tool
    assert [event.run_id for event in list(idle.send("after", run_id="after"))][-1] == "after"
    assert idle.info().node_id == here
    assert list(node_pids(stage.cluster)) == [here]
    wait_until(lambda: balanced(stage) and carried(stage) > 0, "another service tells of the lost node's runs")
    second.append(SecondNode(ray_cluster))
    wait_until(lambda: len(node_pids(stage.cluster)) == 2, "the new node has a service")
    _, joined = homes(stage, second)
    [session] = at(stage, joined, 1)
    assert session.send("hello").result(PATIENCE).text == "offline: hello"
    assert set(places(session)) == {joined}
    stage.check()


def test_a_node_is_drained(stage: Stage, second: list[SecondNode], ray_cluster: str) -> None:
    """Given a tool at work on the second node, when that is drained by hand, by what runs there, ended by
    SIGTERM, or taken away by Ray with a notice, then the tool ends there, the next round is the other node's, and
    nothing is done twice."""
    here, there = homes(stage, second)

    def terminate() -> None:
        os.kill(node_pids(stage.cluster)[there], signal.SIGTERM)

    def announce() -> None:
        import ray  # after understudy, which says how it authenticates

        deadline = time.time_ns() // 1_000_000 + 60_000
        preemption = 2
        assert ray._raylet.GcsClient(address=ray_cluster).drain_node(there, preemption, "test", deadline)[0]

    def drain() -> None:
        stage.cluster.drain(there[:12], wait=False)

    def leave() -> None:
        [found] = background.wait(drain_node(there, 60.0, wait=False))
        assert (found.node_id, found.reason) == (there, "asked for there")

    def standbys() -> list[int]:
        return [info.pid for info in stage.cluster.services() if (info.role, info.node_id) == ("standby", there)]

    for way in (drain, leave, terminate, announce):
        name = f"slow-{way.__name__}"
        [session] = at(stage, there, 1)
        before = stage.server.stats.requests
        pid = node_pids(stage.cluster)[there]
        run = session.send(call("act", name=name))
        wait_until(lambda name=name: name in stage.effects(), "the tool runs")
        wait_until(standbys, "a standby")
        way()
        wait_until(lambda: [found.node_id for found in stage.cluster.drains()] == [there], f"{way.__name__}: it drains")
        wait_until(lambda: not standbys(), "the node knows, and lets go what nobody needs")
        assert session.info().node_id == there
        stage.let_go(name)
        assert run.result(PATIENCE).text == f"offline: did {name}"
        [found] = wait_until(lambda: [d for d in stage.cluster.drains() if d.finished_at], "nothing is left")
        assert found.left == 0
        assert places(session) == [there, here]
        assert not of(session.events(), SessionCrashed)
        assert stage.effects().count(name) == 1
        assert stage.server.stats.requests == before + 2
        assert stage.spawn().info().node_id == here
        if way is terminate:
            wait_until(lambda pid=pid: gone(pid), "the service has ended")
            wait_until(lambda pid=pid: node_pids(stage.cluster).get(there, pid) != pid, "there is another one")
        with pytest.raises(CannotDrain):
            stage.cluster.drain(here)
        if way is not announce:
            assert stage.cluster.undrain(there)
            assert stage.cluster.drains() == []
    stage.check()
