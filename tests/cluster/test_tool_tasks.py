"""Tools as Ray tasks: processes of their own, which outlast their session's, and end when nobody wants them."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from understudy import AgentSpec, Cluster, ToolContext, tool
from understudy.events import CustomEvent, ToolProgress


@tool(num_cpus=0.1)
def work(directory: str, context: ToolContext) -> str:
    """Work until there is a file `go`, and report."""
    place = Path(directory)
    context.progress(0.5, "half way")
    context.emit("at work", os.getpid())
    with (place / "effects").open("a") as effects:
        effects.write(f"{context.call_key} {os.getpid()}\n")
    while not (place / "go").exists():
        time.sleep(0.02)
    context.emit("gone on", os.getpid())
    context.progress(1.0)
    return f"worked with {sorted(name for name in os.environ if name.startswith('RAY_JOB_CONFIG'))}"


@tool(num_cpus=0.1)
async def dies(directory: str) -> str:
    """Die."""
    (Path(directory) / "died").touch()
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


@tool(num_gpus=512)
def huge() -> str:
    """Need what nobody has."""
    return "never"


def effects(directory: Path, count: int = 1) -> list[list[str]]:
    """What was begun, once there is so much of it: call and pid of each."""
    file, until = directory / "effects", time.monotonic() + 60
    while not file.exists() or len(file.read_text().splitlines()) < count:
        assert time.monotonic() < until, "it did not begin"
        time.sleep(0.02)
    return [line.split() for line in file.read_text().splitlines()]


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_a_call_outlasts_its_sessions_process(ray_cluster: str, tmp_path: Path) -> None:
    """Given a call that is at work as a Ray task: its session's process is killed, the next one gets its result, and it
    was begun once; what it reports meanwhile is in the log, once. One whose own process dies is in doubt, one that
    nobody can have is refused, and the process of a run that is cancelled ends."""
    first, second = tmp_path / "first", tmp_path / "second"
    for directory in (first, second):
        directory.mkdir()
    calls = [["work", {"directory": str(first)}], ["dies", {"directory": str(first)}], ["huge", {}]]
    script = f"offline-script: {json.dumps([{'tool_calls': calls}, {'text': 'done'}])}"
    with Cluster.connect(f"sqlite:///{tmp_path}/store.db", max_actors=2) as cluster:
        spec = AgentSpec(name="a", model="offline", instructions=script, tools=[work, dies, huge])
        session = cluster.spawn(spec)
        run = session.send("go")
        ((_, pid),) = effects(first)
        for event in run:  # the session's process lives, and passes on what the task's one reports
            if isinstance(event, CustomEvent) and event.name == "at work":
                break
        frame = session.info().actor_pid
        assert frame is not None
        assert frame != int(pid)
        os.kill(frame, signal.SIGKILL)
        while session.info().epoch == 1:
            time.sleep(0.02)
        assert psutil.pid_exists(int(pid))
        (first / "go").touch()
        assert run.result(timeout=60).text == "done"
        worked, died, refused = [message.text for message in session.messages() if message.role == "tool"]
        assert worked == "worked with []"
        assert "outcome is unknown" in died
        assert "GPU 512" in refused
        assert len(effects(first)) == 1
        events = session.events()
        said = [(event.name, event.data) for event in events if isinstance(event, CustomEvent) and event.tool == "work"]
        assert said == [("at work", int(pid)), ("gone on", int(pid))]
        assert [event.fraction for event in events if isinstance(event, ToolProgress)] == [0.5, 1.0]

        only = json.dumps([{"tool_calls": [["work", {"directory": str(second)}]]}, {"text": "done"}])
        other = cluster.spawn(
            AgentSpec(name="b", model="offline", instructions=f"offline-script: {only}", tools=[work])
        )
        run = other.send("go")
        ((_, pid),) = effects(second)
        run.cancel()
        assert run.result(timeout=60).status == "cancelled"
        psutil.wait_procs([psutil.Process(int(pid))] if psutil.pid_exists(int(pid)) else [], timeout=30)
        assert not psutil.pid_exists(int(pid))
        cluster.shutdown()
