"""Idempotent inputs, end to end: whatever is sent again, by whomever and how often, is done once."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from understudy import Cluster
from understudy.events import RunAccepted, RunFinished, ToolStarted
from understudy.testing.offline import OfflineServer

from ..faults import driver, of, output

pytestmark = [pytest.mark.ray, pytest.mark.thorough, pytest.mark.timeout(300)]

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
    """A driver that has connected and spawned, and sends its input once `go` lets it."""
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
            assert [run.run_id for run in session.runs()] == ["order-7"]
            events = session.events()
            assert [len(of(events, kind)) for kind in (RunAccepted, ToolStarted, RunFinished)] == [1, 1, 1]
            cluster.shutdown()
