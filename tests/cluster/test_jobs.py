"""`ray job submit`, end to end: real heads with their job servers, Ray's command line, the example that users copy."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from understudy.testing.offline import OfflineServer

from ..faults import PATIENCE, gone, kill, wait_until
from ..jobs import EXAMPLE, JobHead, commands_of, job_directory

pytestmark = [pytest.mark.ray, pytest.mark.thorough, pytest.mark.timeout(300)]

TOKEN = "0123456789abcdef" * 4
KEY = "sk-of-the-jobs"
SUBMIT = "ray job submit --working-dir . --runtime-env runtime.yaml"
BUY = """'call order {"item": "pen", "number": 3}'"""
ASK = """'call price {"item": "pen"}'"""
NOISE = ("(raylet", "raylet)", "pid=", "Traceback", "WARNING", "unexpected system error")


class Place:
    """A module's head, store, and endpoint."""

    def __init__(self, head: JobHead, server: OfflineServer, directory: Path) -> None:
        self.head = head
        self.server = server
        self.directory = directory
        self.store = directory / "store.db"
        self.ledger = directory / "orders"

    def key_file(self, key: str) -> Path:
        """A file with a key, and a name without: Ray's logs have that."""
        path = self.directory / f"{key.removeprefix('sk-')}.txt"
        path.write_text(f"{key}\n")
        return path

    def job(self, name: str, key: str = KEY, **more: str) -> Path:
        """A job's directory."""
        variables = {
            "UNDERSTUDY_STORE": f"sqlite:///{self.store}",
            "SHOP_LEDGER": str(self.ledger),
            "OPENAI_BASE_URL": self.server.url,
            "OPENAI_API_KEY_FILE": str(self.key_file(key)),
        }
        return job_directory(self.directory / name, **{**variables, **more})

    def orders(self) -> list[str]:
        """What was ordered."""
        return self.ledger.read_text().splitlines() if self.ledger.exists() else []

    def rows(self, statement: str, *arguments: str) -> list[tuple[Any, ...]]:
        """Rows straight from the store."""
        with contextlib.closing(sqlite3.connect(f"file:{self.store}?mode=ro", uri=True)) as connection:
            return connection.execute(statement, arguments).fetchall()

    def sessions(self) -> set[str]:
        """All sessions; none if no job has made the store yet."""
        return {row[0] for row in self.rows("SELECT session_id FROM session")} if self.store.exists() else set()

    def frame(self, session_id: str) -> int:
        """The process that holds a session."""
        [[pid]] = self.rows("SELECT actor_pid FROM session WHERE session_id = ?", session_id)
        assert isinstance(pid, int)
        return pid

    def client(self, source: str, **variables: str) -> Any:
        """What a program prints that has nothing of any job."""
        return self.head.client(source, UNDERSTUDY_STORE=f"sqlite:///{self.store}", **variables)

    def results(self, *runs: tuple[str, str], **variables: str) -> list[str]:
        """The answers of runs (session and run id), fetched by a process of its own."""
        wanted = f"cluster.session(session_id).run(run_id).result({PATIENCE}, check=True).text"
        texts: list[str] = self.client(f"print(json.dumps([{wanted} for session_id, run_id in {runs!r}]))", **variables)
        return texts

    def supervisor(self) -> list[tuple[Any, ...]]:
        """The one supervisor: its process and its generation."""
        return self.rows("SELECT holder, generation FROM owner")

    def at_once(self, *commands: str, directory: Path | None = None) -> list[str]:
        """What commands say that are begun together; each must succeed."""
        begun = [self.head.begin(command, directory) for command in commands]
        outputs = [process.communicate(timeout=2 * PATIENCE)[0] for process in begun]
        assert [process.returncode for process in begun] == [0] * len(commands), outputs
        return outputs


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A head with token authentication, its job server and an endpoint."""
    directory = tmp_path_factory.mktemp("jobs")
    head = JobHead(directory, TOKEN)
    try:
        head.start()
        with OfflineServer() as server:
            yield Place(head, server, directory)
    finally:
        head.close()


def status(place: Place, job: str) -> str:
    """How a job stands."""
    return str(place.head.ask(f"/api/jobs/{job}")["status"])


def test_the_example(place: Place) -> None:
    """The commands of the example's README, as they are written: work is done once, logs are readable and without a
    secret, noise or key; Ray's job table has no key either."""
    directory = place.job("example")
    export, *commands = commands_of((EXAMPLE / "README.md").read_text())
    assert export.startswith("export RAY_API_SERVER_ADDRESS=")
    said = []
    for command in commands:
        if command == "ray job status lamp-1":
            wait_until(lambda: status(place, "lamp-1") == "SUCCEEDED", "the job in the background", 2 * PATIENCE)
        done = place.head.shell(command, directory)
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        said.append(done.stdout)
    first, again, _, listed, reported, logs = said
    for text in (first, again):
        assert "session buyer-pens, run pens\noffline: ordered 3 pen\n" in text
    for text in (first, again, logs):
        assert not any(noise in text for noise in NOISE)
    assert place.orders() == ["3 pen"]
    assert "lamp-1" in listed
    assert str(place.ledger) in listed  # as docs/jobs.md warns: Ray shows what is in `env_vars`
    assert "succeeded" in reported
    assert logs.endswith("\nsession buyer-lamp, run lamp\noffline: lamp: 35 EUR\n")
    assert place.server.stats.requests == 4
    assert {request.headers["authorization"] for request in place.server.requests} == {f"Bearer {KEY}"}
    for path in place.head.logs().rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert KEY.encode() not in content, path
            assert TOKEN.encode() not in content, path
    assert not any(KEY in text or TOKEN in text for text in said)


def test_the_same_job_twice_at_once(place: Place, postgres: str) -> None:
    """Two submissions of one job at the same time, on PostgreSQL: both succeed alike, the work is done once."""
    ledger, before = place.directory / "once", place.server.stats.requests
    directory = place.job("twice", UNDERSTUDY_STORE=postgres, SHOP_LEDGER=str(ledger))
    outputs = place.at_once(*[f"{SUBMIT} -- python driver.py twice {BUY}"] * 2, directory=directory)
    assert all("offline: ordered 3 pen" in text for text in outputs)
    assert ledger.read_text() == "3 pen\n"
    assert place.server.stats.requests == before + 2
    down = place.head.shell("understudy down --keep-ray --json", UNDERSTUDY_STORE=postgres)
    assert '"services": "ended"' in down.stdout


def test_stopped_and_killed(place: Place) -> None:
    """`ray job stop` while the model answers: the driver says how to go on, its session goes on. With
    `--cancel-on-stop` the run is cancelled. A driver that gets SIGKILL: its job fails, its session goes on, and the
    result is fetched by another process."""
    directory = place.job("stopped")
    place.server.hold()
    try:
        before = place.server.stats.requests
        jobs = {"stop": "", "cancel": "--cancel-on-stop", "kill": ""}
        submit = f"{SUBMIT} --no-wait --submission-id"
        place.at_once(
            *(f"{submit} {name} -- python driver.py {option} {name} {ASK}" for name, option in jobs.items()),
            directory=directory,
        )
        place.server.wait(lambda stats: stats.requests == before + 3, PATIENCE)
        place.at_once("ray job stop stop", "ray job stop cancel")
        assert status(place, "stop") == status(place, "cancel") == "STOPPED"
        [killed] = [pid for pid, line in place.head.command_lines().items() if line[1:3] == ["driver.py", "kill"]]
        kill(killed)
        wait_until(lambda: status(place, "kill") == "FAILED", "the job has failed")
    finally:
        place.server.release()
    assert "the run goes on. Submit again to wait for it, or: understudy show buyer-stop" in logs(place, "stop")
    assert "stopped, and cancelled the run" in logs(place, "cancel")
    assert place.results(("buyer-stop", "stop"), ("buyer-kill", "kill")) == ["offline: pen: 2 EUR"] * 2
    assert place.rows("SELECT status FROM run WHERE session_id = 'buyer-cancel'") == [("cancelled",)]
    shown = place.head.shell("understudy show buyer-stop", UNDERSTUDY_STORE=f"sqlite:///{place.store}")
    assert "offline: pen: 2 EUR" in shown.stdout


def logs(place: Place, job: str) -> str:
    """What a job printed."""
    return str(place.head.ask(f"/api/jobs/{job}/logs")["logs"])


FAMILY = """
import os, sys, time
from pathlib import Path
from helper import peek
from understudy import AgentSpec, Cluster

with Cluster.connect() as cluster:
    lead = AgentSpec(name="lead", tools=["spawn_agent"], agents=[AgentSpec(name="child", tools=[peek])])
    lead = cluster.spawn(lead, session_id="lead-" + sys.argv[1])
    lead.send('call spawn_agent {"agent": "child", "task": "call peek {}"}', run_id="r")
    while not Path(os.environ["GO"] + ".begun").exists():
        time.sleep(0.05)
"""

HELPER = """
import os, time
from pathlib import Path
from understudy import tool

@tool(on_crash="rerun")
def peek() -> str:
    "Whose code is this?"
    Path(os.environ["GO"] + ".begun").touch()
    while not Path(os.environ["GO"]).exists():
        time.sleep(0.02)
    return "the code of NAME"
"""


def test_code_and_keys_outlive_the_job(place: Place) -> None:
    """Two jobs with different code under one module name, and with different keys, end while their sub-agents are at
    work; then those die. Each goes on with its own job's code, endpoint and key, under the one supervisor."""
    with OfflineServer() as red, OfflineServer() as blue:
        servers = {"red": red, "blue": blue}
        jobs = []
        for name, server in servers.items():
            go = str(place.directory / f"go-{name}")
            directory = place.job(name, f"sk-of-{name}", GO=go, OPENAI_BASE_URL=server.url)
            (directory / "scripts").mkdir()
            (directory / "scripts" / "helper.py").write_text(HELPER.replace("NAME", name))
            (directory / "scripts" / "family.py").write_text(FAMILY)
            jobs.append(place.head.begin(f"{SUBMIT} -- python scripts/family.py {name}", directory))
        outputs = [process.communicate(timeout=2 * PATIENCE)[0] for process in jobs]
        assert [process.returncode for process in jobs] == [0, 0], outputs
        supervisor = place.supervisor()
        for name in servers:
            [[child]] = place.rows("SELECT session_id FROM session WHERE parent_id = ?", f"lead-{name}")
            kill(place.frame(child))
        for name in servers:
            (place.directory / f"go-{name}").touch()
        results = place.results(*((f"lead-{name}", "r") for name in servers))
        for (name, server), result in zip(servers.items(), results, strict=True):
            assert result.count(f"the code of {name}") == 1
            assert {request.headers["authorization"] for request in server.requests} == {f"Bearer sk-of-{name}"}
            assert server.stats.requests == 4
        assert place.supervisor() == supervisor


def test_jobs_that_cannot_work(place: Place) -> None:
    """A working_dir that is not there, a driver with an import error, a tool whose import fails, a store in the
    working_dir, a Python without Understudy: each says so where a user looks, and leaves nothing behind."""
    directory = place.job("broken")
    (directory / "wrong.py").write_text("import no_such_module\n")
    shop = (directory / "shop.py").read_text()
    (directory / "shop.py").write_text(
        shop.replace('    return f"{item}:', '    import no_such_library\n\n    return f"{item}:')
    )
    relative = place.job("relative", UNDERSTUDY_STORE="sqlite:///store.db")
    before = place.sessions()
    begun = [
        place.head.begin(f"ray job submit --working-dir no/such -- python driver.py nowhere {ASK}", directory),
        place.head.begin(f"{SUBMIT} -- python wrong.py", directory),
        place.head.begin(f"{SUBMIT} -- python driver.py broken {ASK}", directory),
        place.head.begin(f"{SUBMIT} -- python driver.py relative {ASK}", relative),
        # Without site-packages: as a cluster whose Python lacks Understudy.
        place.head.begin(f"{SUBMIT} -- python -S driver.py bare {ASK}", directory),
    ]
    outputs = [process.communicate(timeout=2 * PATIENCE)[0] for process in begun]
    nowhere, wrong, broken, inside, bare = outputs
    assert [process.returncode != 0 for process in begun] == [True, True, False, True, True], outputs
    assert "no/such" in nowhere
    assert "No module named 'no_such_module'" in wrong
    assert "No module named 'no_such_library'" in broken  # the model received it, and repeats it
    assert "Ray deletes" in inside
    assert "No module named 'understudy'" in bare
    assert place.sessions() - before == {"buyer-broken"}


@pytest.mark.parametrize("variables", [
    {"RAY_AUTH_TOKEN_PATH": "wrong"}, {"RAY_AUTH_TOKEN_PATH": "", "RAY_AUTH_MODE": ""}
], ids=["wrong", "none"])  # fmt: skip
def test_the_wrong_token(place: Place, variables: dict[str, str]) -> None:
    """Without the head's token, commands and `ray job submit` fail at once and say what to do; no token is shown."""
    (place.directory / "wrong").write_text("f" * 64)
    unset = " ".join(f"-u {name}" for name, value in variables.items() if not value)
    given = {name: str(place.directory / value) for name, value in variables.items() if value}
    store = {"UNDERSTUDY_STORE": f"sqlite:///{place.store}"}
    since = time.monotonic()
    begun = [
        place.head.begin(f"env {unset} {command}", **given, **store)
        for command in ("understudy ps --json 2>/dev/null", "understudy doctor", "ray job submit -- true")
    ]
    ps, doctor, _ = outputs = [process.communicate(timeout=PATIENCE)[0] for process in begun]
    assert time.monotonic() - since < 30  # a refused connection takes Ray 20 s, after the command has started
    assert json.loads(ps)["error"]["code"] == "invalid_auth_token"
    assert "~/.ray/auth_token" in doctor
    assert "wants a token" in doctor or "does not accept this token" in doctor
    assert all(process.returncode != 0 for process in begun)
    assert not any(secret in text for secret in (TOKEN, "f" * 64) for text in outputs)


def test_everything_dies_after_the_job(place: Place) -> None:
    """A job has ended, its run waits for the model; the session actor dies, then everything does, Ray and its packages
    included. After the next start the run goes on unasked with the tool of the job's working_dir.

    The last test of this head: it is started again without its job server, which takes half the time."""
    directory = place.job("outlived")
    place.server.hold()
    before = place.server.stats.requests
    command = f"{SUBMIT} --no-wait --submission-id outlived -- python driver.py outlived {ASK}"
    assert place.head.shell(command, directory).returncode == 0
    place.server.wait(lambda stats: stats.requests == before + 1, PATIENCE)
    assert place.head.shell("ray job stop outlived").returncode == 0
    first = place.frame("buyer-outlived")
    kill(first)
    wait_until(lambda: gone(first), "the session actor is dead")
    place.head.kill()
    place.server.release()
    place.head.start(jobs=False)
    model = {"OPENAI_API_KEY_FILE": str(place.key_file(KEY)), "OPENAI_BASE_URL": place.server.url}
    assert place.results(("buyer-outlived", "outlived"), **model) == ["offline: pen: 2 EUR"]


def test_without_authentication(tmp_path: Path) -> None:
    """A head without authentication, a job that names no store and no key: the store is the default of the head's user,
    the model is offline; a client with some token is let in."""
    head = JobHead(tmp_path, token=None)
    try:
        head.start()
        directory = job_directory(tmp_path / "job", SHOP_LEDGER=str(tmp_path / "orders"))
        done = head.shell(f"{SUBMIT} --entrypoint-num-cpus 0.5 -- python driver.py pens {BUY}", directory)
        assert "offline: ordered 3 pen" in done.stdout
        assert (tmp_path / "understudy" / "store.db").exists()
        shown = head.shell("understudy ps --all", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="f" * 64)
        assert shown.returncode == 0
        assert "buyer-pens" in shown.stdout
    finally:
        head.close()
        assert os.getpid() not in [process.pid for process in head.processes()]
