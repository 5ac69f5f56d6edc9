"""A job that KubeRay retries: the same entrypoint in one fresh Ray cluster after the other, over one store."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from understudy.cluster.ray import own_ray
from understudy.environment import for_services
from understudy.store.check.check import check
from understudy.store.db.engine import Database
from understudy.testing.offline import OfflineServer

from ..faults import end, wait_until
from ..postgres import free_port

pytestmark = [pytest.mark.ray, pytest.mark.thorough, pytest.mark.timeout(400)]

JOB = '''
"""Two agents, each with one task; the job ends early, with exit code 3, once it has sent the named one."""

import os
import sys
import time

from understudy import AgentSpec, Cluster, tool

FOLDER = {folder!r}


@tool(on_crash="rerun")
def record(name: str) -> str:
    """Record a name when that is allowed."""
    open(os.path.join(FOLDER, "at-" + name), "w").close()
    while not os.path.exists(os.path.join(FOLDER, "go-" + name)):
        time.sleep(0.02)
    with open(os.path.join(FOLDER, "effects"), "a") as file:
        file.write(name + "\\n")
    return "did " + name


with Cluster.connect() as cluster:
    for name in ("first", "second"):
        spec = AgentSpec(name="clerk", instructions="Record it.", model="test", tools=[record])
        session = cluster.spawn(spec, session_id="job-" + name)
        run = session.send('task\\ncall record {{"name": "' + name + '"}}', run_id="job-" + name)
        if name in sys.argv:
            os._exit(3)
        print(run.result(60, check=True).text)
'''

WHERE = """
import json
from understudy import Cluster
with Cluster.connect(start=False) as cluster:
    services = [service.node_id for service in cluster.services()]
import ray
cpus = {node["NodeID"]: node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]}
print(json.dumps([services, cpus]))
"""


class Pods:
    """A Ray cluster of its own: a head without CPUs and a worker, as two pods of KubeRay's production overlay."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.port = free_port()
        self.directory = tempfile.mkdtemp(prefix="understudy-pods-")
        address = f"127.0.0.1:{self.port}"
        self.environment = {**environment, "RAY_ADDRESS": address}
        head = ["--head", f"--port={self.port}", "--num-cpus=0", "--include-dashboard=false", "--disable-usage-stats"]
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            self._start(*head, f"--temp-dir={self.directory}", "--node-ip-address=127.0.0.1")
            self._start(f"--address={address}", "--num-cpus=2", "--node-ip-address=127.0.0.1")  # waits for its head
            wait_until(lambda: self._alive() and own_ray._answers(address), "the head")
        except BaseException:
            self.delete()
            raise

    def _start(self, *arguments: str) -> None:
        command = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--block"]
        command += [*arguments, "--object-store-memory=100000000", "--log-color=false"]
        with (Path(self.directory) / "log").open("ab") as log:
            self._processes.append(subprocess.Popen(command, env=for_services(), stdout=log, stderr=subprocess.STDOUT))

    def _alive(self) -> bool:
        log = Path(self.directory) / "log"
        assert all(process.poll() is None for process in self._processes), log.read_text()
        return True

    def run(self, *command: str, code: int = 0) -> str:
        """What a Python command prints; it must end with this exit code."""
        done = subprocess.run(
            [sys.executable, *command], env=self.environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == code, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def understudy(self, *arguments: str) -> str:
        """The same, of a command of ours."""
        return self.run("-m", "understudy.cluster", *arguments)

    def delete(self) -> None:
        """SIGKILL everything at once, as when the pods' machine goes."""
        doomed = []
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                root = psutil.Process(process.pid)
                doomed += [root, *root.children(recursive=True)]
        end(doomed)
        for process in self._processes:
            process.wait(20)
        shutil.rmtree(self.directory, ignore_errors=True)


@contextmanager
def pods(environment: dict[str, str]) -> Iterator[Pods]:
    """A fresh Ray cluster for one attempt of a job; it is deleted afterwards."""
    found = Pods(environment)
    try:
        yield found
    finally:
        found.delete()


def test_a_job_that_is_retried_does_nothing_twice(postgres: str, server: OfflineServer, tmp_path: Path) -> None:
    """Given a job whose first attempt fails half-way and whose Ray cluster is deleted, when the next attempt runs in a
    fresh one, then it finishes the rest: no model call is made and no effect done that the first attempt had; no
    service is at the head, which offers no CPUs, but a console can be; and `up --keep` ends when the services are
    stopped."""
    environment = {
        **for_services(), "XDG_STATE_HOME": str(tmp_path / "state"), "UNDERSTUDY_STORE": postgres,
        "OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "test", "UNDERSTUDY_STANDBY": "0",
    }  # fmt: skip
    job, effects = tmp_path / "job.py", tmp_path / "effects"
    job.write_text(JOB.format(folder=str(tmp_path)))
    (tmp_path / "go-first").touch()

    with pods(environment) as first:
        first.run(str(job), "second", code=3)
        wait_until((tmp_path / "at-second").exists, "the second task's tool runs")
        assert effects.read_text().split() == ["first"]
        assert server.stats.requests == 3

    (tmp_path / "go-second").touch()
    with pods(environment) as second:
        keeper = subprocess.Popen([sys.executable, "-m", "understudy.cluster", "up", "--keep"], env=second.environment)
        try:
            assert second.run(str(job)).split("\n") == ["offline: did first", "offline: did second", ""]
            assert effects.read_text().split() == ["first", "second"]
            assert server.stats.requests == 4
            assert second.run(str(job)).startswith("offline: did first")
            assert server.stats.requests == 4

            services, cpus = json.loads(second.run("-c", WHERE))
            assert {cpus[node_id] for node_id in services} == {2.0}
            assert sorted(cpus.values()) == [0.0, 2.0]
            assert keeper.poll() is None
            port = str(free_port())
            page = json.loads(second.understudy("console", "--detach", "--port", port, "--json"))["url"]
            with urllib.request.urlopen(f"{page}healthz", timeout=20) as answer:
                assert answer.status == 200
            second.understudy("drain", "--stop")
            assert keeper.wait(60) == 0
        finally:
            keeper.kill()
            keeper.wait(20)
    database = Database(postgres)
    try:
        with database.read() as connection:
            assert check(connection, "default") == []
    finally:
        database.close()
