"""Idempotent inputs, end to end: whatever is sent again, by whomever and how often, is done once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from understudy import Cluster
from understudy.events import RunAccepted, RunFinished, ToolStarted
from understudy.testing.offline import OfflineServer

from .faults import Head, driver, of, output, wait_until
from .postgres import free_port

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

DRIVERS = 10

DRIVER = """
import json, os, sys
from understudy import AgentSpec, Cluster, tool
from understudy.errors import UnderstudyError

@tool
def refund(order: str) -> str:
    "Refund an order."
    with open(EFFECTS, "a") as file:
        file.write(order + "\\n")
    return "refunded " + order

EFFECTS = sys.argv[1]
text = sys.argv[2]
with Cluster.connect() as cluster:
    desk = cluster.spawn(AgentSpec(name="desk", model="m", tools=[refund]), session_id="desk")
    sys.stdin.readline()
    try:
        result = desk.send(text, run_id="order-7").result(120, check=True)
        print(json.dumps([result.status, result.text, result.run_id]))
    except UnderstudyError as error:
        print(json.dumps([error.code, "", ""]))
"""

ORDER = 'call refund {"order": "7"}'


def start(directory: Path, environment: dict[str, str], text: str = ORDER) -> subprocess.Popen[str]:
    """A driver that has connected and spawned, and sends its input once it is told to."""
    return driver(directory, DRIVER, str(directory / "effects"), text, environment=environment, stdin=subprocess.PIPE)


def go(drivers: list[subprocess.Popen[str]]) -> list[Any]:
    """Let all of them send at once; their results."""
    for process in drivers:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return [output(process) for process in drivers]


def test_ten_drivers_send_the_same_input_at_once(ray_cluster: str, tmp_path: Path) -> None:
    """Ten drivers with one run_id: one run with one result for all, one side effect. Another text under the run_id is
    an error; and the same script again, later, gets the result and does nothing."""
    directory, store = tmp_path / "drivers", f"sqlite:///{tmp_path}/store.db"
    with OfflineServer() as server:
        environment = {"UNDERSTUDY_STORE": store, "OPENAI_API_KEY": "sk-test", "OPENAI_BASE_URL": server.url}
        results = go([start(directory, environment) for _ in range(DRIVERS)])
        assert results == [["completed", "offline: refunded 7", "order-7"]] * DRIVERS
        assert go([start(directory, environment, "something else")]) == [["run_conflict", "", ""]]
        assert go([start(directory, environment)]) == results[:1]
        assert server.stats.requests == 2
        assert (directory / "effects").read_text() == "7\n"
        with Cluster.connect(store) as cluster:
            session = cluster.session("desk")
            assert [run["run_id"] for run in session.runs()] == ["order-7"]
            events = session.events()
            assert [len(of(events, kind)) for kind in (RunAccepted, ToolStarted, RunFinished)] == [1, 1, 1]
            cluster.shutdown()


class JobHead(Head):
    """A Ray head with its job server."""

    def start(self) -> None:
        """Start it as an administrator would: `ray start --head` with its dashboard."""
        # Below 20,000 are Ray's workers; the agent's usual port may be another head's.
        ports = set[int]()
        while len(ports) < 2:
            ports |= {port for port in [free_port()] if port >= 20_000}
        port, agent = ports
        self.jobs = f"http://127.0.0.1:{port}"
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        command = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--head", "--port=0"]
        command += ["--include-dashboard=true", f"--dashboard-port={port}", "--disable-usage-stats"]
        command += [f"--dashboard-agent-listen-port={agent}"]
        started = subprocess.run(
            command,
            env={**environment, **self.environment},
            capture_output=True,
            text=True,
            cwd=self._state,
            check=False,
        )
        assert started.returncode == 0, started.stdout + started.stderr
        wait_until(self._answers, "the job server")
        wait_until(self._takes_jobs, "an agent that runs jobs")

    def _takes_jobs(self) -> bool:
        """The server answers before there is anybody who runs what it is given."""
        command = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "job", "submit"]
        command += [f"--address={self.jobs}", "--", "true"]
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        done = subprocess.run(command, env={**environment, **self.environment}, capture_output=True)
        return done.returncode == 0

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.jobs}/api/version", timeout=2):
                return True
        except urllib.error.HTTPError:  # it asks for a token, which `ray job submit` has
            return True
        except OSError:
            return False


@pytest.fixture
def head(tmp_path: Path) -> Iterator[JobHead]:
    """A Ray head with its job server, of this test alone."""
    found = JobHead(tmp_path)
    try:
        found.start()
        yield found
    finally:
        found.close()


def test_a_job_is_submitted_twice(head: JobHead, postgres: str, tmp_path: Path) -> None:
    """`ray job submit` of the same driver twice, at once: both succeed with the same result, its work is done once."""
    directory = tmp_path / "job"
    directory.mkdir()
    (directory / "driver.py").write_text(DRIVER.replace("    sys.stdin.readline()\n", ""))
    with OfflineServer() as server:
        variables = {
            "UNDERSTUDY_STORE": postgres, "OPENAI_API_KEY": "sk-test",
            "OPENAI_BASE_URL": server.url, "XDG_STATE_HOME": str(tmp_path),
        }  # fmt: skip
        command = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "job", "submit"]
        command += [f"--address={head.jobs}", f"--working-dir={directory}", "--log-color=false"]
        command += [f"--runtime-env-json={json.dumps({'env_vars': variables})}", "--", sys.executable, "driver.py"]
        command += [str(tmp_path / "effects"), ORDER]
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        jobs = [
            subprocess.Popen(
                command,
                env={**environment, **head.environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for _ in range(2)
        ]
        told = [process.communicate(timeout=200)[0] for process in jobs]
        assert [process.returncode for process in jobs] == [0, 0], told
        for text in told:
            assert '["completed", "offline: refunded 7", "order-7"]' in text
        assert (tmp_path / "effects").read_text() == "7\n"
        assert server.stats.requests == 2
