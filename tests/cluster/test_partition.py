"""A node whose network is cut, and healed: a Ray node in a network namespace of its own, and its cable pulled."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from understudy import AgentSpec, Cluster, Session
from understudy.cluster.client import background
from understudy.environment import for_services
from understudy.events import SessionActivated, ToolStarted
from understudy.store.check.check import check
from understudy.store.db.engine import Database

from ..faults import PATIENCE, end, gone, of, tools_of, wait_until
from ..kernel.kernel import script
from ..postgres import PostgresServer

pytestmark = [
    pytest.mark.ray,
    pytest.mark.thorough,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a network namespace"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="needs `ip` (Debian: iproute2)"),
]

LOST = 15_000_000_000
"""Nanoseconds within which the sessions of a node that is cut off must run elsewhere."""

NETWORK = "10.213.77"


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20).stdout


def namespace_of(process: psutil.Process) -> str:
    """The name of the network namespace of tests in this process: who finds it later knows whose it was."""
    return f"understudy-{process.pid}-{process.create_time():.0f}"


def cable_of(namespace: str) -> str:
    """The name of this end of the cable to a network namespace."""
    return f"us{namespace.split('-')[1]}"


def remove(namespace: str) -> None:
    """Take away a network namespace and its cable, as far as they are there."""
    for command in (["link", "del", cable_of(namespace)], ["netns", "del", namespace]):
        subprocess.run(["ip", *command], check=False, capture_output=True, timeout=20)


def remove_remains() -> None:
    """Take away what processes left that were killed in this test: their network would be in the way of the next one.
    What runs in there is ended as well."""
    living = {namespace_of(process) for process in psutil.process_iter()}
    for line in ip("netns", "list").splitlines():
        name = line.split()[0]
        if re.fullmatch(r"understudy-\d+-\d+", name) and name not in living:
            inside = ip("netns", "pids", name).split()
            end(process for process in psutil.process_iter() if str(process.pid) in inside)
            remove(name)


class RemoteNode:
    """A Ray node in a network namespace, joined to this machine by a cable that can be pulled."""

    def __init__(self, address: str) -> None:
        remove_remains()
        self._name = namespace_of(psutil.Process())
        self._cable = cable_of(self._name)
        ip("netns", "add", self._name)
        ip("link", "add", self._cable, "type", "veth", "peer", "name", "uplink", "netns", self._name)
        ip("addr", "add", f"{NETWORK}.1/30", "dev", self._cable)
        ip("link", "set", self._cable, "up")
        for command in (
            ["addr", "add", f"{NETWORK}.2/30", "dev", "uplink"],
            ["link", "set", "lo", "up"],
            ["link", "set", "uplink", "up"],
            ["route", "add", "default", "via", f"{NETWORK}.1"],
        ):
            ip("-n", self._name, *command)
        command = ["ip", "netns", "exec", self._name, sys.executable, "-c"]
        command += ["from ray.scripts.scripts import main; main()", "start", "--block", f"--address={address}"]
        command += [f"--node-ip-address={NETWORK}.2", "--num-cpus=1", "--object-store-memory=100000000"]
        self._process = subprocess.Popen(
            command, env=for_services(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def cut(self) -> None:
        """Pull the cable: nothing arrives in either direction, and nobody is notified."""
        ip("link", "set", self._cable, "down")

    def heal(self) -> None:
        """Plug it in again."""
        ip("link", "set", self._cable, "up")

    def processes(self) -> list[psutil.Process]:
        """What runs in it."""
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def close(self) -> None:
        """End everything in it, and take the namespace away."""
        end(self.processes())
        self._process.wait(20)
        remove(self._name)


@pytest.fixture
def remote(ray_cluster: str) -> Iterator[RemoteNode]:
    node = RemoteNode(ray_cluster)
    try:
        yield node
    finally:
        node.close()


@pytest.fixture
def stores(postgres: str, ray_cluster: str) -> Iterator[dict[str, str]]:
    """DSNs of two PostgreSQL stores: over a socket file, which no cable carries, and over the network."""
    host = ray_cluster.rpartition(":")[0]
    with PostgresServer(settings={"listen_addresses": "*"}) as server:
        server.trust(f"{NETWORK}.0/30", f"{host}/32")
        yield {"in reach": postgres, "out of reach": server.dsn.replace("127.0.0.1", host)}


def places(session: Session) -> list[str]:
    """The nodes of the session's activations, in order."""
    return [event.node_id for event in of(session.events(), SessionActivated)]


class Work:
    """The services of a store on both nodes, and two sessions at home on the remote one: one acts, one has not begun.

    Args:
        directory: an empty one, for what the sessions do.
    """

    def __init__(self, dsn: str, cluster: Cluster, remote: RemoteNode, directory: Path) -> None:
        self.dsn = dsn
        self.cluster = cluster
        self.directory = directory
        directory.mkdir()
        wait_until(lambda: len(nodes(cluster)) == 2, "a node service on each node")
        pids = {process.pid for process in remote.processes()}
        [self.there] = [node for node, pid in nodes(cluster).items() if pid in pids]
        background.wait(cluster._connection.find_again())  # by itself a client looks for new nodes twice a minute
        self.acting, self.answering = (at(cluster, self.there, directory, name) for name in ("slow", "quick"))
        self.tool = self.acting.send("go")
        wait_until(lambda: effects(directory) == ["slow"], "the tool runs")

    def moves(self, began: int) -> None:
        """Since `began` the network is cut: the other node has the sessions in time, and finishes what can be."""
        run = self.answering.send("go")
        wait_until(lambda: places(self.acting)[-1] != self.there, "it runs elsewhere")
        moved = of(self.acting.events(), SessionActivated)[-1].at * 1000
        assert moved - began < LOST
        assert (run.result(PATIENCE).status, run.result().text) == ("completed", "done")

    def ends_right(self) -> None:
        """The network is whole again."""
        assert (self.tool.result(PATIENCE).status, self.tool.result().text) == ("completed", "done")
        wait_until(lambda: len(nodes(self.cluster)) in (1, 2) and self.cluster.services(), "the services")
        assert sorted(effects(self.directory)) == ["quick", "slow"]
        assert len(of(self.acting.events(), ToolStarted)) == 1
        assert self.answering.send("again").result(PATIENCE).ok
        assert violations(self.dsn) == []


LEFT_BEHIND = """
import os, signal, subprocess, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import psutil
from tests.cluster import test_partition as partition

name = partition.namespace_of(psutil.Process())
partition.ip("netns", "add", name)
partition.ip("link", "add", partition.cable_of(name), "type", "veth", "peer", "name", "uplink", "netns", name)
command = ["ip", "netns", "exec", name, "sleep", "600"]
process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(name, process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_run_left_is_taken_away() -> None:
    """Given a process that was killed with its network namespace, cable and node there, when the next one begins, then
    they are gone; those of a process that lives are not."""
    mine = namespace_of(psutil.Process())
    ip("netns", "add", mine)
    try:
        root = str(Path(__file__).parents[2])
        said = subprocess.run(
            [sys.executable, "-c", LEFT_BEHIND, root], capture_output=True, text=True, check=False, timeout=60
        )
        name, pid = said.stdout.split()
        assert name in ip("netns", "list")
        remove_remains()
        assert name not in ip("netns", "list")
        assert mine in ip("netns", "list")
        assert gone(int(pid))
        wait_until(lambda: f"{cable_of(name)}@" not in ip("link", "show"), "its cable is away")
    finally:
        remove(mine)


def test_the_network_of_a_node_is_cut_and_heals(remote: RemoteNode, stores: dict[str, str], tmp_path: Path) -> None:
    """Given sessions at work on a node, of a store that it reaches without the network and of one that it does not,
    when the network is cut, then the others have them within 15 s; when it heals, the node's late work is refused:
    every run ends once and right, no side effect is repeated."""
    with ExitStack() as clusters, ThreadPoolExecutor() as threads:
        found = []
        for reach, dsn in stores.items():
            cluster = clusters.enter_context(Cluster.connect(dsn, max_actors=3, standby=1, model="offline"))
            clusters.callback(cluster.shutdown)
            found.append(Work(dsn, cluster, remote, tmp_path / reach))
        remote.cut()
        began = time.time_ns()
        list(threads.map(lambda work: work.moves(began), found))
        for work in found:
            (work.directory / "go-slow").touch()
        remote.heal()
        list(threads.map(Work.ends_right, found))


def nodes(cluster: Cluster) -> dict[str, int]:
    """The node services: pid by node."""
    return {service.node_id: service.pid for service in cluster.services() if service.role == "node"}


def effects(directory: Path) -> list[str]:
    path = directory / "effects"
    return path.read_text().splitlines() if path.exists() else []


def at(cluster: Cluster, node_id: str, directory: Path, name: str) -> Session:
    """A new session at home on this node, that acts once and then says `done`. Its model is the node's own."""
    instructions = script([("act", {"name": name})], "done", "done again")
    while True:
        spec = AgentSpec(name=name, model="offline", instructions=instructions, tools=tools_of(directory))
        session = cluster.spawn(spec)
        if session.info().node_id == node_id:
            return session


def violations(dsn: str) -> list[object]:
    database = Database(dsn)
    try:
        with database.snapshot() as connection:
            return list(check(connection, "default"))
    finally:
        database.close()
