"""Helpers of the fault tests: a cluster on a store, an endpoint that counts, tools with side effects, signals."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
from sqlalchemy import text

from understudy import AgentSpec, Cluster, Session, tool
from understudy.config import ModelProfile
from understudy.events import Event, RunStarted
from understudy.identifiers import COPIED
from understudy.store.check.check import check
from understudy.store.db.engine import Database
from understudy.testing.offline import OfflineServer

PATIENCE = 60.0
"""Seconds until a wait of these tests gives up: far more than anything takes, on a slow and busy machine too."""

Value = TypeVar("Value")


def wait_until(condition: Callable[[], Value], what: str, timeout: float = PATIENCE) -> Value:
    """Poll until `condition` gives something true, and return it; the longer that takes, the less often."""
    began = time.monotonic()
    while True:
        value = condition()
        if value:
            return value
        waited = time.monotonic() - began
        if waited > timeout:
            raise AssertionError(f"{what}: not within {timeout:g} s (last: {value!r})")
        time.sleep(min(0.2, 0.02 + waited / 20))


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to a process of the test's cluster."""
    assert pid > 1
    os.kill(pid, number)


def gone(pid: int) -> bool:
    """Whether the process has ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def end(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL all of them at once, and wait until none lives."""
    doomed = list(processes)
    for process in doomed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    wait_until(lambda: all(gone(process.pid) for process in doomed), "their end", 20)


def tools_of(directory: Path) -> list[Any]:
    """Two tools that append their name to a file each time they begin: `act` (not repeatable) and `look` (rerun).

    Then they take so many seconds; with a name that begins with `slow` they go on only when the file `go-NAME` exists.
    They travel by value.
    """
    folder = str(directory)

    def perform(name: str, seconds: float) -> str:
        import os
        import time

        with open(os.path.join(folder, "effects"), "a") as file:
            file.write(f"{name}\n")
        while name.startswith("slow") and not os.path.exists(os.path.join(folder, f"go-{name}")):
            time.sleep(0.02)
        time.sleep(seconds)
        return f"did {name}"

    @tool
    def act(name: str, seconds: float = 0.0) -> str:
        """Act on the world, once."""
        return perform(name, seconds)

    @tool(on_crash="rerun")
    def look(name: str, seconds: float = 0.0) -> str:
        """Look at the world."""
        return perform(name, seconds)

    return [act, look]


def call(tool_name: str, **arguments: Any) -> str:
    """An input that makes the offline model call a tool, then answer with its result."""
    return f"{uuid.uuid4().hex[:8]}\ncall {tool_name} {json.dumps(arguments)}"


@dataclass
class Stage:
    """A test's own client, endpoint and directory on a cluster that others may share."""

    dsn: str
    cluster: Cluster
    server: OfflineServer
    directory: Path
    profile: str
    sessions: list[Session] = field(default_factory=list)

    def spawn(self, *, session_id: str | None = None, **options: Any) -> Session:
        """A session whose model is this stage's endpoint."""
        options.setdefault("tools", tools_of(self.directory))
        spec = AgentSpec(name="actor", model="m", profile=self.profile, **options)
        session = self.cluster.spawn(spec, session_id=session_id)
        self.sessions.append(session)
        return session

    def effects(self) -> list[str]:
        """What the tools did, in order."""
        path = self.directory / "effects"
        return path.read_text().splitlines() if path.exists() else []

    def let_go(self, name: str) -> None:
        """Let a slow tool end."""
        (self.directory / f"go-{name}").touch()

    def pids(self, *roles: str) -> list[int]:
        """Processes of the cluster in these roles."""
        return [service.pid for service in self.cluster.services() if service.role in roles]

    def gateways(self) -> list[int]:
        """Processes of the gateways."""
        return self.pids("gateway")

    def frames(self) -> list[int]:
        """All frames, with a session or without."""
        return self.pids("frame", "standby")

    def wait_for_standbys(self, count: int = 2) -> list[int]:
        """Wait until there are so many frames without a session, so that nothing starts in the middle of a test."""
        return wait_until(lambda: (found := self.pids("standby"))[count - 1 :] and found, f"{count} standbys")

    def generation(self) -> int:
        """Of the supervisor that owns the store."""
        return int(self.query("SELECT generation FROM owner")[0][0])

    def query(self, statement: str, **parameters: Any) -> list[Any]:
        """Rows straight from the store."""
        store = Database(self.dsn)
        try:
            with store.read() as connection:
                return list(connection.execute(text(statement), parameters))
        finally:
            store.close()

    def check(self, *sessions: Session) -> None:
        """What must hold for every session after its runs have ended, whatever happened to processes: the books
        balance, all is at rest, and each run that began took its input into the transcript once."""
        trees = [info.id for session in sessions or self.sessions for info in session.tree()]
        store = Database(self.dsn)
        try:
            with store.snapshot() as connection:
                violations = check(connection, "default", trees)
        finally:
            store.close()
        assert not violations, "\n".join(map(str, violations))
        for table in ("inbox", "reservation", "timer"):
            left = {row[0] for row in self.query(f"SELECT session_id FROM {table}")}
            assert left.isdisjoint(trees), f"{table} is not empty"
        assert not {row[0] for row in self.query("SELECT session_id FROM run WHERE finished_at = 0")} & set(trees)
        for session in map(self.cluster.session, trees):
            started = Counter(event.run_id for event in of(session.events(), RunStarted))
            inputs = [message for message in session.messages() if message.role == "user" and not message.name]
            taken = Counter(str(message.run_id) for message in inputs)
            assert started == Counter({run: taken[run] for run in taken if not run.startswith(COPIED)})


Kind = TypeVar("Kind", bound=Event)


def of(events: list[Event], kind: type[Kind]) -> list[Kind]:
    """The events of one class."""
    return [event for event in events if isinstance(event, kind)]


@contextlib.contextmanager
def staged(dsn: str, directory: Path, **options: Any) -> Iterator[Stage]:
    """A `Stage` on the cluster of this store; `latency` and other options go to the endpoint."""
    directory.mkdir(exist_ok=True)
    with OfflineServer(**options) as server:
        profile = f"test-{uuid.uuid4().hex[:8]}"
        with Cluster.connect(dsn, profiles=[ModelProfile(profile, "sk-of-the-tests", server.url)]) as cluster:
            yield Stage(dsn, cluster, server, directory, profile)


def driver(
    directory: Path, source: str, *arguments: str, environment: dict[str, str] | None = None, **pipes: int
) -> subprocess.Popen[str]:
    """Start a driver script in a process and directory of its own."""
    directory.mkdir(exist_ok=True)
    script = directory / "driver.py"
    written = directory / f"{uuid.uuid4().hex}.py"
    written.write_text(source)
    written.replace(script)  # at once: another driver of this directory may be just reading it
    return subprocess.Popen(
        [sys.executable, str(script), *arguments], cwd=directory, env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **pipes,
    )  # fmt: skip


def output(process: subprocess.Popen[str], timeout: float = 2 * PATIENCE) -> Any:
    """Wait for a driver and return the JSON of its last line."""
    with process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        finally:
            process.kill()
    assert process.returncode == 0, stderr[-3000:]
    assert stdout, f"it said nothing: {stderr[-3000:]}"
    return json.loads(stdout.splitlines()[-1])


class Head:
    """A Ray head of its own, beside the one that the test session shares; every process of it can be killed at once.

    Args:
        directory: for the state of who starts it.
        environment: variables that it has beside those of this process.
        python: that it and all actors run in.
    """

    def __init__(
        self, directory: Path, environment: dict[str, str] | None = None, python: str = sys.executable
    ) -> None:
        self._state = directory
        self._python = python
        self._environment = environment or {}
        self._temporary = tempfile.mkdtemp(prefix="ray-")  # short: it holds sockets
        self.address = ""

    @property
    def environment(self) -> dict[str, str]:
        """What a driver of this cluster needs."""
        found = {"RAY_TMPDIR": self._temporary, "XDG_STATE_HOME": str(self._state), **self._environment}
        return {**found, "RAY_ADDRESS": self.address} if self.address else found

    def start(self) -> None:
        """Start it as `Cluster.connect` would."""
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        self.address = ""
        done = subprocess.run(
            [self._python, "-c", "from understudy.cluster.ray.own_ray import start_ray; print(start_ray())"],
            env={**environment, **self.environment}, capture_output=True, text=True, cwd=self._state, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        self.address = done.stdout.splitlines()[-1]

    def logs(self) -> Path:
        """The directory with the logs of all its processes."""
        return next(Path(self._temporary).glob("**/session_latest/logs"))

    def processes(self) -> list[psutil.Process]:
        """Ray's daemons and all that they started."""
        found: dict[int, psutil.Process] = {}
        for process in psutil.process_iter(["cmdline"]):
            line = " ".join(process.info["cmdline"] or ())
            # Ray's client server knows the address only, and has no parent that does.
            if self._temporary in line or (self.address and f"--address={self.address}" in line):
                found[process.pid] = process
                with contextlib.suppress(psutil.NoSuchProcess):
                    found.update({child.pid: child for child in process.children(recursive=True)})
        found.pop(os.getpid(), None)
        return list(found.values())

    def command_lines(self) -> dict[int, list[str]]:
        """The command of each process that lives, by pid."""
        found = {}
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                found[process.pid] = process.cmdline()
        return found

    def kill(self) -> None:
        """SIGKILL everything at once."""
        end(self.processes())

    def close(self) -> None:
        """Leave nothing behind."""
        self.kill()
        shutil.rmtree(self._temporary, ignore_errors=True)
