"""What a workflow's step costs, beside a step of DBOS and a plain Ray task; and what going on with a long one costs."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray
from comparison import PROGRAMS, Order, is_there, started
from harness import Bench, Row, median
from workload import over_agents, over_items

from understudy import Cluster

AT_ONCE = 16
DBOS, TASK, WITH_A_TOOL = "a step of DBOS", "a Ray task", "a step with a tool"


@ray.remote
def looked_up(city: str) -> str:
    """As `workload.lookup`, of which nothing is kept."""
    return f"{city}: 7 degrees"


def workflows(bench: Bench) -> list[Row]:
    """A workflow over many items, 16 at a time, beside steps of DBOS ('.[benchmarks]') and plain Ray tasks."""
    items, agents = bench.some(500, 50), bench.some(200, 20)
    each: dict[str, list[float]] = {}
    with ExitStack() as stack:
        cluster = stack.enter_context(bench.cluster())
        ways: dict[str, Callable[[], float]] = {
            "tool": lambda: _ours(cluster, over_items, items) / items,
            "agent": lambda: _ours(cluster, over_agents, agents) / agents,
            TASK: lambda: _tasks(items) / items,
        }
        if is_there(("dbos",)):
            peer = stack.enter_context(started("dbos_steps.py", bench))
            ways[DBOS] = lambda: peer.work_off(Order("items", items, AT_ONCE))[0] / items
        else:
            bench.say("DBOS is not installed: pip install -e '.[benchmarks]'")
        for way in ways.values():
            way()  # actors, workers and databases start
        for _ in range(bench.some(5, 1)):
            for name, way in ways.items():
                each.setdefault(name, []).append(way() * 1e3)
    measured = [(WITH_A_TOOL, "tool", other) for other in (DBOS, TASK) if other in each]
    measured.append(("a step with an agent, one model call", "agent", "tool"))
    return [
        Row("workflows", f"{text}, {AT_ONCE} at a time", median(each[name]), "ms", median(each[other]),
            WITH_A_TOOL if other == "tool" else other,
            turns=tuple(value / base for value, base in zip(each[name], each[other], strict=True)))
        for text, name, other in measured
    ]  # fmt: skip


def _ours(cluster: Cluster, flow: Any, items: int) -> float:
    """Seconds from the call to the result."""
    began = time.perf_counter()
    assert cluster.workflow(flow, items, AT_ONCE).result(300, check=True).output == items
    return time.perf_counter() - began


def _tasks(items: int) -> float:
    began = time.perf_counter()
    todo, at_work = list(range(items)), list[Any]()
    while todo or at_work:
        while todo and len(at_work) < AT_ONCE:
            at_work.append(looked_up.remote(str(todo.pop())))
        done, at_work = ray.wait(at_work, num_returns=1)
        ray.get(done)
    return time.perf_counter() - began


def long_workflow(bench: Bench) -> list[Row]:
    """A workflow of 10,000 steps goes on in another process: with snapshots of its record, and without. No Ray."""
    steps, taken, gone_on = bench.some(10_000, 300), dict[bool, Any](), dict[bool, list[Any]]()
    directories = {kept: Path(tempfile.mkdtemp(prefix="long-", dir=bench.directory)) for kept in (True, False)}
    for kept, directory in directories.items():
        taken[kept] = _phase(directory, "take", steps, kept)
    for _ in range(bench.some(5, 1)):
        for kept, directory in directories.items():
            with tempfile.TemporaryDirectory(dir=bench.directory) as copy:  # each turn goes on with the same log
                (Path(copy) / "long.db").write_bytes((directory / "long.db").read_bytes())
                gone_on.setdefault(kept, []).append(_phase(Path(copy), "go-on", steps, kept))
    against = "without snapshots"
    rows = [
        Row("long workflow", f"{steps:,} steps in one process, a step", taken[True]["seconds"] / steps * 1e3, "ms",
            taken[False]["seconds"] / steps * 1e3, against)
    ]  # fmt: skip
    for name, text, unit in (("seconds", "time", "s"), ("cpu", "CPU", "s"), ("megabytes", "memory", "MB")):
        ours, others = ([max(one[name], 0.01) for one in gone_on[kept]] for kept in (True, False))
        rows.append(
            Row("long workflow", f"going on behind {steps:,} steps in another process: {text}", median(ours), unit,
                median(others), against, turns=tuple(one / other for one, other in zip(ours, others, strict=True)))
        )  # fmt: skip
    return rows


def _phase(directory: Path, phase: str, steps: int, kept: bool) -> Any:
    """What a phase of `peers/long_workflow.py` took."""
    arguments = [str(directory), phase, str(steps), str(max(20, steps // 20) if kept else 0)]
    command = [sys.executable, str(PROGRAMS / "long_workflow.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1500)
    if done.returncode:
        raise RuntimeError(f"{phase} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])
