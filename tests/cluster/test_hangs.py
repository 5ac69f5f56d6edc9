"""Processes that hang: Ray says nothing of a stopped one for over a minute, so each is looked after by another.

What these tests take is the time limits that a hung process has; so they have SQLite and PostgreSQL at the same time.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from understudy import Cluster
from understudy.cluster.client import background
from understudy.events import SessionActivated

from ..faults import PATIENCE, Stage, call, gone, kill, of, staged, wait_until
from ..postgres import database

pytestmark = [pytest.mark.ray, pytest.mark.thorough, pytest.mark.timeout(240)]

Scenario = Callable[[Stage], None]


@pytest.fixture(scope="module")
def services(
    ray_cluster: str, postgres_server: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """Two stores with services of their own: DSN by kind. What a test stops must be replaced for the next one."""
    with database(postgres_server) as postgres, ExitStack() as clusters:
        found = {"sqlite": f"sqlite:///{tmp_path_factory.mktemp('store')}/store.db", "postgresql": postgres}
        for dsn in found.values():
            cluster = clusters.enter_context(Cluster.connect(dsn, max_actors=4, standby=1))
            clusters.callback(cluster.shutdown)
        yield found


@pytest.fixture
def on_both(services: dict[str, str], tmp_path: Path) -> Iterator[Callable[[Scenario], None]]:
    """Plays a scenario on both stores at once; each has a client and an endpoint of its own."""
    with ExitStack() as stack:
        stages = {kind: stack.enter_context(staged(dsn, tmp_path / kind)) for kind, dsn in services.items()}

        def play(scenario: Scenario) -> None:
            with ThreadPoolExecutor() as threads:
                played = {kind: threads.submit(scenario, stage) for kind, stage in stages.items()}
            for kind, ended in played.items():
                error = ended.exception()
                if error is not None:
                    error.add_note(f"with {kind}")
                    raise error

        yield play


def test_stopped_actor_is_replaced_and_its_tool_runs_once(on_both: Callable[[Scenario], None]) -> None:
    """Ray says nothing of a stopped process for over a minute: a probe finds it, and it is killed before the resume."""

    def scenario(stage: Stage) -> None:
        session = stage.spawn()
        run = session.send(call("act", name="slow"))
        wait_until(lambda: stage.effects() == ["slow"], "the tool runs")
        pid = session.info().actor_pid or 0
        stopped_at = time.time_ns() // 1000
        kill(pid, signal.SIGSTOP)
        assert "interrupted" in run.result(PATIENCE).text
        assert gone(pid)
        [resumed] = [event for event in of(session.events(), SessionActivated) if event.cause == "resume"]
        assert resumed.at - stopped_at < 15_000_000
        stage.let_go("slow")
        assert session.send("again").result(PATIENCE).text == "offline: again"
        assert stage.effects() == ["slow"]
        stage.check()

    on_both(scenario)


@pytest.mark.parametrize(("which", "requests"), [("node", 1), ("gateway", 2)], ids=["node", "gateway"])
def test_stopped_service_is_replaced(on_both: Callable[[Scenario], None], which: str, requests: int) -> None:
    """Its supervisor kills a node service, its node service a gateway, and Ray restarts it. The answer to the call that
    was in flight is committed; one that a gateway held goes out again."""

    def scenario(stage: Stage) -> None:
        session = stage.spawn(tools=())
        stage.server.hold()
        run = session.send("hello")
        stage.server.wait(lambda stats: stats.in_flight == 1)
        [pid] = stage.pids("node") if which == "node" else stage.gateways()
        kill(pid, signal.SIGSTOP)
        wait_until(lambda: gone(pid), "it is killed")
        stage.server.wait(lambda stats: stats.requests == requests, PATIENCE)
        stage.server.release()
        assert run.result(PATIENCE).text == "offline: hello"
        assert stage.server.stats.requests == requests
        stage.check()

    on_both(scenario)


def test_stopped_supervisor_is_replaced(on_both: Callable[[Scenario], None]) -> None:
    """The node service misses its probes and kills it; runs go on all the while, and the next one restores the dead."""

    def scenario(stage: Stage) -> None:
        session, other = stage.spawn(), stage.spawn()
        run = session.send(call("act", name="slow"))
        wait_until(lambda: stage.effects() == ["slow"], "the tool runs")
        [pid] = stage.pids("supervisor")
        generation = stage.generation()
        kill(pid, signal.SIGSTOP)
        assert other.send("hello").result(PATIENCE).text == "offline: hello"
        kill(session.info().actor_pid or 0)
        wait_until(lambda: gone(pid), "it is killed")
        # A standby takes the session up; no supervisor is needed for it.
        assert "interrupted" in run.result(PATIENCE).text
        wait_until(lambda: stage.generation() == generation + 1, "another one supervises")
        stage.check()

    on_both(scenario)


def test_stopped_supervisor_whose_node_service_is_new_is_replaced(on_both: Callable[[Scenario], None]) -> None:
    """Given a supervisor that hangs, when its node service dies and is restarted, which has never heard of it, then the
    new one finds in the store who supervises, and kills it. The model's credentials are with the gateway still."""

    def scenario(stage: Stage) -> None:
        session = stage.spawn()
        assert session.send("hello").result(PATIENCE).text == "offline: hello"
        [pid], [node] = stage.pids("supervisor"), stage.pids("node")
        generation = stage.generation()
        kill(pid, signal.SIGSTOP)
        kill(node)
        wait_until(lambda: gone(pid), "it is killed")
        assert session.send("again").result(PATIENCE).text == "offline: again"
        wait_until(lambda: stage.generation() == generation + 1, "the next supervisor")
        stage.check()

    on_both(scenario)


def test_services_that_end_while_their_keeper_asks(
    ray_cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given an `up --keep` whose question a hung supervisor has, when the services are ended, then it hears that they
    were, and not that they can't be reached."""
    dsn, asks = f"sqlite:///{tmp_path}/store.db", Event()

    async def noticed(timeout: float) -> Any:
        asks.set()
        return await version(timeout)

    with Cluster.connect(dsn, max_actors=1, standby=0) as cluster, Cluster.connect(dsn, start=False) as keeper:
        connection: Any = keeper._connection
        version = connection.version
        monkeypatch.setattr(connection, "version", noticed)
        supervisor = next(service.pid for service in cluster.services() if service.role == "supervisor")
        kill(supervisor, signal.SIGSTOP)
        with ThreadPoolExecutor() as threads:
            renewed = threads.submit(background.wait, connection.renew(PATIENCE))
            assert asks.wait(PATIENCE)
            cluster.shutdown()
            with suppress(ProcessLookupError):  # Ray may have ended it by now
                kill(supervisor)
            assert renewed.result(PATIENCE / 2) is False
