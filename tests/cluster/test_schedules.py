"""Schedules on Ray: they go on without the driver that set them, and over the death of the node service."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from understudy import Cluster, ScheduleInfo

TOOLS = """
from understudy import tool

@tool(on_crash="rerun")
def weigh(name: str) -> str:
    '''Weigh something.'''
    return f"{name} weighs {len(name)}"
"""
DRIVER = """
import sys
from scales import weigh
from understudy import AgentSpec, Cluster

with Cluster.connect(sys.argv[1], max_actors=2) as cluster:
    agent = AgentSpec(name="clerk", model="offline", tools=[weigh])
    cluster.schedule("pulse", 'call weigh {"name": "gold"}', agent=agent, every=3, overlap="all", catch_up="all")
"""
PATIENCE = 90.0


def fired(cluster: Cluster, number: int) -> ScheduleInfo:
    """The schedule, once it has fired so often; no event tells of it."""
    deadline = time.monotonic() + PATIENCE
    while (info := cluster.schedule("pulse").info()).fired < number:
        assert time.monotonic() < deadline, info
        time.sleep(0.2)
    return info


@pytest.mark.ray
@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_schedule_outlives_its_driver_and_its_node_service(ray_cluster: str, tmp_path: Path) -> None:
    """Given a driver that has set a schedule for an agent with a tool of its own, and is gone, when the node service is
    killed, then each due time has one session, which has used the tool, and none is left out."""
    (tmp_path / "scales.py").write_text(TOOLS)
    (tmp_path / "driver.py").write_text(DRIVER)
    store = f"sqlite:///{tmp_path}/store.db"
    done = subprocess.run(
        [sys.executable, "driver.py", store], cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    with Cluster.connect(store, start=False) as cluster:
        before = fired(cluster, 1)
        [service] = [service for service in cluster.services() if service.role == "node"]
        os.kill(service.pid, signal.SIGKILL)
        after = fired(cluster, before.fired + 2)
        cluster.schedule("pulse").pause()
        info = cluster.schedule("pulse").info()
        first = before.last_at - (before.fired - 1) * 3_000_000
        assert (after.missed, after.skipped, after.failed) == (0, 0, 0)
        for due in (first + number * 3_000_000 for number in range(info.fired)):
            name = f"schedule.pulse.{due}"
            assert cluster.session(name).run(name).result(60, check=True).text == "offline: gold weighs 4"
        assert len([one for one in cluster.sessions() if one.name == "clerk"]) == info.fired
        cluster.shutdown()
