"""The store's password is in no place where Ray keeps anything: services that are restarted get it from each other."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from understudy import Cluster
from understudy.cluster.cli.doctor import examine
from understudy.config import ModelProfile
from understudy.errors import StoreRefused

from ..faults import PATIENCE, Head, Stage, call, kill, staged, wait_until
from ..postgres import PostgresServer
from ..redis import RedisServer, redis_server

pytestmark = [pytest.mark.ray, pytest.mark.thorough, pytest.mark.timeout(300)]

PASSWORD = "correct-horse-4711"
HEADER = "Bearer-staple-0815"


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """DSN of a database of a server that wants a password."""
    with PostgresServer(password=PASSWORD) as server:
        yield server.database()


@pytest.fixture(scope="module")
def head(redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """A Ray head that keeps its state in Redis, to which this process connects."""
    ray.shutdown()
    found = Head(tmp_path_factory.mktemp("state"), redis.environment)
    patch = pytest.MonkeyPatch()
    try:
        found.start()
        for name, value in found.environment.items():
            patch.setenv(name, value)
        yield found
    finally:
        ray.shutdown()
        found.close()
        patch.undo()


@pytest.fixture
def stage(head: Head, postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"authorization={HEADER}")
    monkeypatch.setenv("UNDERSTUDY_MAX_ACTORS", "3")
    monkeypatch.setenv("UNDERSTUDY_STANDBY", "1")
    with staged(postgres, tmp_path / "stage") as found:
        yield found


def pids(stage: Stage, *roles: str) -> list[int]:
    """The services of these roles, once all are there."""
    return wait_until(lambda: len(found := stage.pids(*roles)) == len(roles) and found, f"{roles}")


def at_work(stage: Stage) -> tuple[str, str]:
    """The session and the run of a tool that has begun, and waits for `let_go`."""
    session = stage.spawn()
    run = session.send(call("look", name="slow"))
    wait_until(lambda: "slow" in stage.effects(), "the tool runs")
    return session.id, run.run_id


def ends_well(stage: Stage, session_id: str, run_id: str) -> None:
    stage.let_go("slow")
    assert stage.cluster.session(session_id).run(run_id).result(PATIENCE).text.endswith("did slow")
    assert stage.cluster.session(session_id).send("again").result(PATIENCE).text == "offline: again"
    stage.check()


def connected_again(stage: Stage) -> Cluster:
    """A client that brings all that the one of the stage brought."""
    return Cluster.connect(stage.dsn, profiles=[ModelProfile(stage.profile, "sk-of-the-tests", stage.server.url)])


def test_ray_keeps_no_secret(stage: Stage, head: Head, redis: RedisServer, postgres: str) -> None:
    """Given a DSN with a password, also on a command line, then neither Redis, nor logs, nor any process's environment
    or command line has it, nor the header for a collector."""
    assert stage.spawn().send("hello").result(PATIENCE).ok
    ps = [sys.executable, "-m", "understudy.cluster", "ps", "--store", postgres]
    assert subprocess.run(ps, capture_output=True, cwd="/", check=False).returncode == 0
    kept = {"redis": redis.dump()}
    assert postgres.replace(f":{PASSWORD}", "").encode() in kept["redis"]
    assert b"--store" in kept["redis"]
    for path in [path for path in head.logs().rglob("*") if path.is_file()]:
        kept[str(path)] = path.read_bytes()
    for process in head.processes():
        kept[f"environment of {process.name()}"] = Path(f"/proc/{process.pid}/environ").read_bytes()
        kept[f"command line of {process.name()}"] = Path(f"/proc/{process.pid}/cmdline").read_bytes()
    for secret in (PASSWORD, HEADER):
        assert not [where for where, content in kept.items() if secret.encode() in content], secret


@pytest.mark.parametrize(
    "roles", [("node",), ("gateway",), ("supervisor",), ("node", "supervisor"), ("node", "gateway"),
              ("supervisor", "gateway")], ids="+".join,
)  # fmt: skip
def test_who_is_restarted_gets_the_password_from_who_lives(stage: Stage, roles: tuple[str, ...]) -> None:
    """Given services of which one or two die at once, then they are back without any client's help, and runs go on."""
    session_id, run_id = at_work(stage)
    before = pids(stage, "node", "gateway", "supervisor")
    for pid in pids(stage, *roles):
        kill(pid)
    wait_until(lambda: len(set(pids(stage, "node", "gateway", "supervisor")) - set(before)) == len(roles), "restarts")
    ends_well(stage, session_id, run_id)


def test_when_all_die_at_once_they_wait_for_the_next_connect(stage: Stage, postgres: str) -> None:
    """Given nobody who has the password any more, then services say that they wait for it, also in `doctor`; a wrong
    one that somebody brings is refused and replaced by the right one, and the run goes on."""
    session_id, run_id = at_work(stage)
    before = pids(stage, "node", "gateway", "supervisor")
    for pid in before:
        kill(pid, signal.SIGSTOP)
    for pid in before:
        kill(pid)

    def waits() -> bool:
        [found] = [check for check in examine(postgres) if check.name == "services"]
        return not found.ok and "the password of postgresql://postgres@" in found.found

    wait_until(waits, "doctor says what is missing")
    with pytest.raises(StoreRefused):
        Cluster.connect(postgres.replace(PASSWORD, "wrong-4711"), timeout=5)
    with connected_again(stage) as cluster:
        assert cluster.session(session_id).info().id == session_id
    ends_well(stage, session_id, run_id)
