"""Times that come while everything is dead: all services and session actors are one process here, and get SIGKILL."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

NAPS = """
from understudy import WorkflowContext, tool, workflow

@tool
def effect(name: str) -> str:
    '''Do something once.'''
    with open(__file__ + ".effects", "a") as file:
        file.write(name + chr(10))
    return name

@workflow
async def nap(ctx: WorkflowContext, name: str, seconds: float = 0.0) -> str:
    if seconds:
        await ctx.sleep(seconds)
    return await ctx.tool(effect, name)
"""
BEGIN = """
import sys, threading
from datetime import UTC, datetime, timedelta
from naps import nap
from understudy.events import TimerSet
from understudy.testing import LocalCluster

with LocalCluster(sys.argv[1]) as cluster:
    run = cluster.workflow(nap, "slept", 12.0, session_id="s", run_id="r")
    due = datetime.now(UTC) + timedelta(seconds=12)
    cluster.schedule("once", workflow=nap, input={"name": "once"}, at=due)
    cluster.schedule("often", workflow=nap, input={"name": "often"}, every=12, max_firings=1)
    next(event for event in run if isinstance(event, TimerSet))
    print(due.timestamp(), flush=True)
    threading.Event().wait()
"""
END = """
import json, sys, time
from understudy.events import TimerFired
from understudy.testing import LocalCluster

with LocalCluster(sys.argv[1]) as cluster:
    found = {"s": cluster.session("s").run("r").result(60).text}
    for name in ("once", "often"):
        schedule = cluster.schedule(name)
        while not (info := schedule.info()).fired:
            time.sleep(0.05)
        found[name] = cluster.session(info.last_session).run(info.last_run).result(60).text
        found[name + " counts"] = [info.fired, info.skipped, info.failed, info.state]
    found["timers fired"] = sum(isinstance(event, TimerFired) for event in cluster.session("s").events())
    found["sessions"] = len(cluster.sessions())
print(json.dumps(found))
"""


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_what_is_due_in_a_total_outage_happens_once(tmp_path: Path) -> None:
    """Given a workflow that sleeps, and schedules of workflows, when all services and session actors are killed, and
    the times come before any runs again, then at the next start each happens, once; and at the one after it nothing
    more."""
    (tmp_path / "naps.py").write_text(NAPS)
    store = f"sqlite:///{tmp_path}/store.db"
    command = [sys.executable, "-c", BEGIN, store]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as everything:
        assert everything.stdout is not None
        due = float(everything.stdout.readline())
        os.kill(everything.pid, signal.SIGKILL)
    died = time.time()
    assert died < due, "it took too long to begin"
    while time.time() < due + 1.0:  # that it passes is what is tested
        time.sleep(0.1)
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", END, store], cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == {
            "s": "slept", "once": "once", "often": "often", "timers fired": 1, "sessions": 3,
            "once counts": [1, 0, 0, "ended"], "often counts": [1, 0, 0, "ended"],
        }  # fmt: skip
    assert sorted((tmp_path / "naps.py.effects").read_text().split()) == ["often", "once", "slept"]
