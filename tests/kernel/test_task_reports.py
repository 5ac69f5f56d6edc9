"""What tools report that are executed in processes of their own: it is in the log while they run, in order, and once,
whoever dies of those that pass it on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from understudy.actors.task_worker import news_of_task
from understudy.actors.tools import ToolContext, describe, tool
from understudy.errors import Fenced
from understudy.events import CustomEvent, ToolProgress
from understudy.node.tool_tasks import Reported
from understudy.testing import LocalCluster
from understudy.tool_tasks import Report, TaskNews, ToolTask

from .. import tiers
from . import kernel as k
from .deaths import Deaths
from .tool_runner import Runner

pytestmark = pytest.mark.conformance

RUNNERS: list[Runner] = []
"""The one of the test that runs is the last."""


@asynccontextmanager
async def running(tmp_path: Path, store: str = "") -> AsyncIterator[Runner]:
    runner = Runner()
    RUNNERS[:] = [runner]
    async with k.running(store or f"sqlite:///{tmp_path}/store.db", tmp_path, runner=runner) as runner.kernel:
        yield runner


async def seen(session_id: str, event_type: str, count: int = 1) -> None:
    """Wait until so many of these events are committed."""
    kernel = RUNNERS[-1].kernel
    assert kernel is not None
    await kernel.until(session_id, event_type, count)


@tool(num_gpus=1)
async def tell(context: ToolContext) -> str:
    """Report, and go on when others have seen it."""
    context.emit("row", 1)
    await seen(context.session_id, "custom")
    context.progress(0.5, "half way")
    await seen(context.session_id, "tool_progress")
    for number in (2, 3):
        context.emit("row", number)
    context.progress(1)
    return "done"


@tool(num_gpus=1, on_crash="rerun")
async def tell_again(context: ToolContext) -> str:
    """Report in which process it is; the third one also after its session has gone to another frame."""
    number, kernel = len(RUNNERS[-1].begun), RUNNERS[-1].kernel
    assert kernel is not None
    for _ in range(2):
        context.emit("row", number)
    if number == 3:
        await seen("s", "custom", 6)
        holder = kernel.holder("s")
        assert holder is not None
        kernel.kill(holder)
        context.emit("row", number)
    return "done"


def spec(called: Any = tell) -> dict[str, Any]:
    return k.spec(k.script([(called.__understudy_tool__.name, {})], "done"), [called])


async def logged(kernel: k.Kernel, session_id: str = "s") -> list[Any]:
    """What the log has of calls: `started`, outcomes, fractions, and data of events."""
    found: list[Any] = []
    for event in await kernel.events(session_id):
        data = event["data"]
        if event["type"] in ("tool_started", "tool_finished"):
            found.append(data.get("outcome", "started"))
        elif event["type"] in ("tool_progress", "custom"):
            found.append(data["fraction"] if "fraction" in data else data["data"])
    return found


async def test_reports_are_committed_while_the_tool_runs(store: str, tmp_path: Path) -> None:
    """Whoever follows the session sees them before the tool ends, and its last ones before the result."""
    async with running(tmp_path, store) as runner:
        assert runner.kernel is not None
        await runner.kernel.run("s", spec())
        assert await logged(runner.kernel) == ["started", 1, 0.5, 2, 3, 1.0, "ok"]
        assert await runner.kernel.results() == ["done"]


@pytest.mark.sweep
@pytest.mark.parametrize("victim", ["frame", "node"])
async def test_a_death_anywhere_doubles_and_drops_nothing(victim: str, tmp_path: Path) -> None:
    """A frame killed at any point: all that the tool emits is in the log, once and in order. A node service killed:
    with it the process ends, and what was committed is a part of that without gaps."""

    async with running(tmp_path) as runner:
        kernel = runner.kernel
        assert kernel is not None
        start = len(kernel.points)
        await kernel.run("clean", spec())
        points = kernel.points[start:]
        for at in tiers.points(range(points.index("before task"), len(points), 1 if victim == "frame" else 2)):
            deaths = Deaths(kernel, f"s{at}", at, victim)
            await kernel.run(f"s{at}", spec())
            kernel.on_point = None
            await kernel.quiet()
            kernel.check(f"s{at}")
            found = await logged(kernel, f"s{at}")
            rows = [item for item in found if isinstance(item, int)]
            fractions = [item for item in found if isinstance(item, float)]
            assert rows == [1, 2, 3][: len(rows)], deaths.where
            assert fractions == [0.5, 1.0][: len(fractions)], deaths.where
            assert found[-1] in ("ok", "interrupted"), deaths.where
            if found[-1] == "ok":
                assert (len(rows), len(fractions)) == (3, 2), deaths.where
            if victim == "frame" and at > points.index("task begins"):
                assert found[-1] == "ok", deaths.where


async def test_a_process_that_dies_has_reported(tmp_path: Path) -> None:
    """What processes reported before they died comes before what the next one reports, also where a frame dies then."""
    async with running(tmp_path) as runner:
        assert runner.kernel is not None
        runner.dies = 2
        await runner.kernel.run("s", spec(tell_again))
        assert await logged(runner.kernel) == [1, 1, 2, 2, 3, 3, 3, "ok"]
        assert "tool_in_doubt" not in await runner.kernel.types("s")


async def test_an_activation_that_is_over_gets_nothing(tmp_path: Path) -> None:
    """Given a frame that asks, when another one has the session, then it is fenced where there is something new."""
    async with running(tmp_path) as runner:
        kernel = runner.kernel
        assert kernel is not None
        runner.gate.clear()
        await kernel.spawn("s", spec())
        await kernel.send("s")
        await runner.at_work.wait()
        slot = kernel.service.frames.paging.holder("s")
        assert slot is not None
        assert slot.activation is not None
        asked = ToolTask("s", "r", 1, "r/1/0", 1, "agent", "", describe(tell, pickle=None)[0][0], "", 9.0)
        late = asyncio.create_task(kernel.service.tasks.run(slot.frame_id, slot.activation, asked, "", None))
        kernel.kill(kernel.workers[slot.frame_id])
        await kernel.until("s", "session_activated", 2)
        runner.gate.set()
        assert (await kernel.end("s"))["status"] == "completed"
        with pytest.raises(Fenced):
            await late
        assert await logged(kernel) == ["started", 1, 0.5, 2, 3, 1.0, "ok"]


def row(number: int) -> CustomEvent:
    return CustomEvent(call_id="c", tool="t", name="row", data=number)


async def test_what_is_kept() -> None:
    """The latest progress, and events until they are committed; a caller gets what it does not have."""
    kept = Reported()
    more = kept.more
    for number in range(10_000):
        kept.add([ToolProgress(call_id="c", tool="t", fraction=number / 10_000)])
    assert more.done()
    kept.add([row(1), row(2), ToolProgress(call_id="c", tool="t", fraction=1.0), row(3)])
    assert [type(report).__name__ for report in kept.after(0)] == ["CustomEvent"] * 2 + ["ToolProgress", "CustomEvent"]
    assert kept.after(kept.last - 1) == [row(3)]
    committed: list[Report] = [row(1), ToolProgress(fraction=0.5), row(2), ToolProgress(fraction=1.0)]
    kept.forget(committed[:3])
    kept.forget(committed[:3])
    assert [report for report in kept.after(0) if isinstance(report, CustomEvent)] == [row(3)]
    assert len(kept.after(0)) == 2
    kept.forget(committed)
    assert kept.after(0) == [row(3)]
    assert kept.after(kept.last) == []


@tool(num_gpus=1)
def in_a_thread(context: ToolContext) -> str:
    """Report from threads, often."""
    other = threading.Thread(target=lambda: context.emit("row", 1))
    other.start()
    other.join()
    for number in range(1_000):
        context.progress(number / 999)
    context.emit("row", "sk\ud800")
    return "done"


@tool(num_gpus=1, timeout=0.01)
async def too_long(context: ToolContext) -> None:
    """Report, and never end."""
    context.emit("row", 1)
    await asyncio.Event().wait()


def task(called: Any, timeout: float = 9.0) -> ToolTask:
    return ToolTask("s", "r", 1, "r/1/0", 1, "agent", "a", describe(called, pickle=None)[0][0], "{}", timeout)


def test_what_a_process_says() -> None:
    """Its reports as they come, of its progress the latest; the result is the last thing, whatever happens."""
    *said, last = news_of_task(task(in_a_thread), None, None)
    reports = [report for news in said for report in news.reports]
    assert [report.data for report in reports if isinstance(report, CustomEvent)] == [1, "sk?"]
    progress = [report.fraction for report in reports if isinstance(report, ToolProgress)]
    assert len(progress) <= 3
    assert progress[-1] == 1.0
    assert last.result is not None
    assert (last.result.outcome, last.result.content) == ("ok", "done")

    *said, last = news_of_task(task(too_long, 0.01), None, None)
    assert said == [TaskNews([CustomEvent(call_id="r/1/0", tool="too_long", name="row", data=1)])]
    assert last.result is not None
    assert last.result.outcome == "timeout"


def test_a_local_cluster_shows_them() -> None:
    """A program that follows a run sees what such a tool reports in its thread."""
    from understudy import AgentSpec

    with LocalCluster() as cluster:
        agent = AgentSpec(
            name="a", model="offline", tools=[in_a_thread], instructions=k.script([("in_a_thread", {})], "done")
        )
        events = list(cluster.spawn(agent).send("go"))
    assert [event.data for event in events if isinstance(event, CustomEvent)] == [1, "sk?"]
    assert [event.fraction for event in events if isinstance(event, ToolProgress)][-1] == 1.0
