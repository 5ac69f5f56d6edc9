"""Isolation: jobs that share a cluster share neither code nor credentials; two clusters don't share a store."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

from understudy import Cluster, tool
from understudy.errors import DeadlineExceeded
from understudy.events import SessionCreated
from understudy.testing.offline import OfflineServer

from ..faults import PATIENCE, Head, Stage, call, driver, kill, of, output, staged, wait_until
from ..processes.test_environment import PASSWORDS

pytestmark = [pytest.mark.ray, pytest.mark.thorough, pytest.mark.timeout(240)]

TOOLS = """
import os
from understudy import tool

@tool
def whoami() -> str:
    "Say whose code this is."
    return "the code of JOB"

@tool
def environment() -> dict[str, str]:
    "Show the environment of the tool's process."
    return dict(os.environ)
"""

JOB = """
import json, os, sys
import mytools
from understudy import AgentSpec, Cluster, tool

@tool
def local() -> str:
    "A tool defined in the driver itself."
    return "local to " + mytools.whoami()

name = sys.argv[1]
with Cluster.connect() as cluster:
    spec = AgentSpec(name=name, model="m", tools=[mytools.whoami, mytools.environment, local])
    session = cluster.spawn(spec, session_id=name)
    asks = ["call whoami {}", "call environment {}", "call local {}"]
    runs = [session.send(ask, run_id=f"run-{number}") for number, ask in enumerate(asks)]
    print(json.dumps([run.result(120, check=True).text for run in runs]))
"""


def job(directory: Path, name: str, dsn: str, key: str, url: str) -> subprocess.Popen[str]:
    """Start a driver with its own directory, code, key and endpoint."""
    directory.mkdir(exist_ok=True)
    (directory / "mytools.py").write_text(TOOLS.replace("JOB", name))
    environment = {"UNDERSTUDY_STORE": dsn, "OPENAI_API_KEY": key, "OPENAI_BASE_URL": url}
    return driver(directory, JOB, name, environment=environment)


def keys_seen(server: OfflineServer) -> set[str]:
    """What an endpoint was authorized with."""
    return {request.headers["authorization"] for request in server.requests}


def holding(directory: Path, secret: str) -> list[Path]:
    """The files below a directory that hold a text."""
    found = []
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_symlink() and secret.encode() in path.read_bytes():
            found.append(path)
    return found


def test_two_jobs_on_one_cluster(ray_cluster: str, store: str, tmp_path: Path) -> None:
    """Each sees its own code, its endpoint its own key; neither key shows anywhere else; run twice, work once."""
    secrets = {"red": "sk-red-5f0c1b7d9a", "blue": "sk-blue-83e6a4c2f1"}
    with OfflineServer() as red, OfflineServer() as blue:
        servers = {"red": red, "blue": blue}
        jobs = [job(tmp_path / name, name, store, secrets[name], servers[name].url) for name in secrets]
        results = {name: output(process) for name, process in zip(secrets, jobs, strict=True)}
        for name, (whose, environment, local) in results.items():
            assert whose == f"offline: the code of {name}"
            assert local == f"offline: local to the code of {name}"
            assert keys_seen(servers[name]) == {f"Bearer {secrets[name]}"}
            for hidden in (*secrets.values(), store, "OPENAI_API_KEY", "UNDERSTUDY_STORE"):
                assert hidden not in environment
        with Cluster.connect(store) as cluster:
            again = output(job(tmp_path / "red", "red", store, secrets["red"], red.url))
            assert again == results["red"]
            assert red.stats.requests == 6
            session = cluster.session("red")
            assert len(session.runs()) == 3
            assert len(of(session.events(), SessionCreated)) == 1
            for service in cluster.services():
                process = psutil.Process(service.pid)
                if service.role in ("supervisor", "node"):
                    _check_service(process, secrets, tmp_path)
            _check_nothing_kept(store, secrets, tmp_path)
            cluster.shutdown()


def _check_service(process: psutil.Process, secrets: dict[str, str], directory: Path) -> None:
    """A service has nothing of any job: not its environment, its directory, its code."""
    environment = json.dumps(process.environ())
    for hidden in (*secrets.values(), *(str(directory / name) for name in secrets), "OPENAI_"):
        assert hidden not in environment
    assert not any(process.cwd().startswith(str(directory / name)) for name in secrets)
    opened = {entry.path for entry in process.memory_maps()} | {entry.path for entry in process.open_files()}
    assert not any(path.startswith(str(directory / name)) for path in opened for name in secrets)


def _check_nothing_kept(store: str, secrets: dict[str, str], directory: Path) -> None:
    """No key is in the store, in Ray's logs or in our own files."""
    if store.startswith("sqlite"):
        kept = [path for path in directory.iterdir() if path.name.startswith("store.db")]
        content = b"".join(path.read_bytes() for path in kept)
    else:
        content = b"".join(table_rows(store))
    assert b"the code of red" in content
    import ray  # not at the top: our package must be imported before it, to set what Ray reads only once

    logs = Path(ray._private.worker._global_node.get_logs_dir_path())  # type: ignore[attr-defined]
    for secret in secrets.values():
        assert secret.encode() not in content
        assert not holding(logs, secret)
        assert not holding(Path(os.environ["XDG_STATE_HOME"]), secret)


def table_rows(dsn: str) -> Iterator[bytes]:
    """Everything that a PostgreSQL database holds, as text."""
    with psycopg.connect(dsn) as connection:
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
        for (name,) in tables:
            for row in connection.execute(f'SELECT t::text FROM "{name}" t'):
                yield row[0].encode()


OTHER_CLUSTER = """
import json, sys
from understudy import Cluster, tool
from understudy.config import ModelProfile
from understudy.errors import UnderstudyError

dsn, profile, url, timeout, *runs = sys.argv[1:]
try:
    cluster = Cluster.connect(dsn, profiles=[ModelProfile(profile, "sk-of-the-tests", url)], timeout=float(timeout))
except UnderstudyError as error:
    print(json.dumps([error.code, str(error)]))
else:
    print(json.dumps([cluster.session(name).run("run").result(120).text for name in runs]))
    if not runs:
        cluster.shutdown()
    cluster.close()
"""


class PlainHead(Head):
    """A Ray head as people start it: it has the whole environment of their shell."""

    def start(self) -> None:
        """Start it."""
        command = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--head", "--port=0"]
        done = subprocess.run(
            [*command, "--include-dashboard=false", "--disable-usage-stats"], env={**os.environ, **self.environment},
            capture_output=True, text=True, cwd=self._state, check=True,
        )  # fmt: skip
        found = re.search(r"--address='([^']+)'", done.stdout)
        assert found, done.stdout
        self.address = found.group(1)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainHead]:
    """A second Ray cluster, whose environment holds credentials."""
    with contextlib.closing(PlainHead(tmp_path_factory.mktemp("head"))) as found:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("RAY_ADDRESS", raising=False)
            for name in PASSWORDS:
                patch.setenv(name, f"hunter2-{name.lower()}")
            patch.setenv("LEDGER", "/ledger")
            found.start()
        yield found


def test_two_clusters_on_one_store(ray_cluster: str, postgres: str, head: Head, tmp_path: Path) -> None:
    """The second gets `store_owned`; when the first stands still it takes over after the lease, and when the first
    goes on it is fenced: nothing is done twice."""
    with staged(postgres, tmp_path / "stage") as stage:
        code, message = _other(head, stage, tmp_path, "60")
        assert code == "store_owned", message
        assert "UNDERSTUDY_NAMESPACE" in message
        acting, asking = stage.spawn(session_id="acting"), stage.spawn(session_id="asking")
        stage_run = acting.send(call("act", name="slow"), run_id="run")
        wait_until(lambda: stage.effects() == ["slow"], "the tool runs")
        stage.server.hold()
        asking.send("hello", run_id="run")
        stage.server.wait(lambda stats: stats.in_flight == 1)
        first = stage.pids("supervisor", "node", "frame", "standby")
        for pid in first:
            kill(pid, signal.SIGSTOP)
        try:
            # The lease, then new services, whose processes a busy machine may start one after the other.
            taking = _start_other(head, stage, tmp_path, "120", "acting", "asking")
            took_over = lambda: stage.server.stats.requests >= 3 or taking.poll() is not None  # noqa: E731
            wait_until(took_over, "it takes over", 2 * PATIENCE)
            stage.server.release()
            interrupted, answered = output(taking)
        finally:
            for pid in first:
                kill(pid, signal.SIGCONT)
        assert "interrupted" in interrupted
        assert answered == "offline: hello"
        stage.let_go("slow")
        assert stage_run.result(PATIENCE).text == interrupted
        assert _other(head, stage, tmp_path, "60") == []
        assert asking.send("again").result(PATIENCE).text == "offline: again"
        assert stage.effects() == ["slow"]
        stage.check()
        stage.cluster.shutdown()


def _start_other(head: Head, stage: Stage, directory: Path, timeout: str, *runs: str) -> subprocess.Popen[str]:
    arguments = (stage.dsn, stage.profile, stage.server.url, timeout, *runs)
    return driver(directory / "other", OTHER_CLUSTER, *arguments, environment=head.environment)


def _other(head: Head, stage: Stage, directory: Path, timeout: str) -> list[str]:
    answer: list[str] = output(_start_other(head, stage, directory, timeout))
    return answer


def test_where_sessions_run(ray_cluster: str, tmp_path: Path) -> None:
    """Given an agent with a process of its own per activation, one with an environment of its own, one that wants what
    no node has, and a killed one with wishes: each runs where it says, the third says why it waits and holds up
    nobody, and the last goes on under the same wishes.
    """
    folder = str(tmp_path)

    @tool(on_crash="rerun")
    def where() -> str:
        """Say where this runs."""
        import os
        import time
        from pathlib import Path

        Path(folder, "seen").touch()
        while Path(folder, "hold").exists():
            time.sleep(0.02)
        return f"{os.getpid()} {os.environ.get('FLAVOR')}"

    with staged(f"sqlite:///{tmp_path}/store.db", tmp_path / "stage") as stage:
        alone = stage.spawn(tools=[where], isolation="process")
        answers = [alone.send(call("where")).result(PATIENCE, check=True).text for _ in range(2)]
        assert len(set(answers)) == 2
        wait_until(lambda: not any(map(psutil.pid_exists, pids_in(answers))), "its processes have ended")
        greedy = stage.spawn(tools=[where], resources={"no-such-thing": 1})
        waits = greedy.send(call("where"))
        wait_until(lambda: greedy.info().error, "the reason why it waits")
        assert (greedy.info().error or {})["code"] == "unschedulable"
        with pytest.raises(DeadlineExceeded, match=r"has not ended after 0\.1 s: .*no-such-thing"):
            waits.result(0.1)
        wishes = {"runtime_env": {"env_vars": {"FLAVOR": "mint"}}, "resources": {"num_cpus": 0.25}}
        placed = stage.spawn(tools=[where], **wishes)
        (tmp_path / "hold").touch()
        (tmp_path / "seen").unlink()
        run = placed.send(call("where"))
        wait_until((tmp_path / "seen").exists, "the tool runs")
        first = placed.info().actor_pid
        assert first is not None
        kill(first)
        (tmp_path / "hold").unlink()
        text = run.result(PATIENCE, check=True).text
        assert text.endswith(" mint")
        assert pids_in([text]) != [first]
        waits.cancel()
        assert waits.result(PATIENCE).status == "cancelled"
        stage.check()
        stage.cluster.shutdown()


def pids_in(answers: list[str]) -> list[int]:
    """Whose `where` answered `offline: PID FLAVOR`."""
    return [int(answer.split()[1]) for answer in answers]


WHAT_TOOLS_SEE = """
import json, os, time
from understudy import AgentSpec, Cluster, tool

@tool(on_crash="rerun")
def variables() -> str:
    "Names of the variables that this process has."
    return " ".join(sorted(os.environ))

@tool(on_crash="rerun")
def value(name: str) -> str:
    "What one of them says, and how long it is."
    return f"{os.environ[name]} {len(os.environ[name])}"

def ask(text, **fields):
    spec = AgentSpec(name="a", tools=[variables, value, "bash"], sandbox="none", workspace=".", **fields)
    return cluster.spawn(spec).send(text)

with Cluster.connect() as cluster:
    named = {"environment": ["DB_PASS", "LEDGER"], "runtime_env": {"env_vars": {"FLAVOR": "mint"}}}
    asks = ["call variables {}", 'call bash {"command": "env"}', 'call value {"name": "DB_PASS"}']
    answers = [ask(text, **fields).result(120, check=True).text for fields in ({}, named) for text in asks[:2]]
    answers.append(ask(asks[2], **named).result(120, check=True).text)
    waits = ask(asks[0], environment=["NO_SUCH_THING"])
    session = cluster.session(waits.session_id)
    while not session.info().error:
        time.sleep(0.05)
    print(json.dumps([*answers, session.info().error["message"]]))
    waits.cancel()
    cluster.shutdown()
"""


def test_tools_see_what_was_named_of_a_nodes_variables(head: PlainHead, tmp_path: Path) -> None:
    """Given a Ray whose environment holds credentials, then neither a tool nor a command of `bash` has one of them, but
    those that its agent names, whose values are hidden in results; who names what is not there gets an error."""
    *texts, value, missing = output(driver(tmp_path / "job", WHAT_TOOLS_SEE, environment=head.environment))
    for text, own in zip(texts, [set(), set(), *[{"DB_PASS", "LEDGER", "FLAVOR"}] * 2], strict=True):
        assert {name for name in (*PASSWORDS, "LEDGER", "FLAVOR") if name in text} == own
        assert "PATH" in text
        assert "hunter2" not in text
    assert value == f"offline: *** {len('hunter2-db_pass')}"
    assert "NO_SUCH_THING" in missing
