"""What a workflow's code has done within a time: what is at work when that is over ends, and the code learns of it
once."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from understudy import AgentSpec, Run, RunResult, StepTimeout, WorkflowContext, tool, workflow
from understudy.actors.awaited import Record, Result
from understudy.actors.replay import Execution
from understudy.errors import InvalidInput
from understudy.events import TimerFired, TimerSet, ToolFinished
from understudy.store.check.check import check
from understudy.store.db.engine import Database
from understudy.testing import LocalCluster
from understudy.workflow_definition import builder as w
from understudy.workflow_definition.steps import Definition, Retry
from understudy.workflows import TIMEOUT_STEP

from .. import tiers

PATIENCE = 30.0
SHORT, LONG = 0.2, 3_600

done: Counter[str] = Counter()

slow = AgentSpec(name="slow", instructions='offline-script: [{"delay": 600, "text": "late"}]')
quick = AgentSpec(name="quick", instructions='offline-script: [{"text": "in time"}]')


@tool(on_crash="rerun")
async def never() -> str:
    """Lasts until it is stopped."""
    await asyncio.Event().wait()
    return ""


@tool(on_crash="rerun")
def note(name: str) -> str:
    """Done at once."""
    done[name] += 1
    return name


@tool(approve=True)
def pay() -> str:
    """Nobody approves it."""
    done["paid"] += 1
    return "paid"


@pytest.fixture(autouse=True)
def _reset() -> None:
    done.clear()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """A cluster whose store is checked when the test is over."""
    store = f"sqlite:///{tmp_path}/store.db"
    with LocalCluster(store) as found:
        yield found
    books(store)


def books(store: str) -> None:
    database = Database(store)
    try:
        with database.snapshot() as connection:
            assert "\n".join(map(str, check(connection, "local"))) == ""
    finally:
        database.close()


def ended(run: Run) -> RunResult:
    """The end of a run, whoever is asked meanwhile."""
    for _ in run:
        pass
    return run.result(PATIENCE, check=True)


@workflow
async def everything(ctx: WorkflowContext) -> list[Any]:
    """One step of each kind is out of time, then several, one within the other; what is in time is not."""

    async def late(step: Any) -> str:
        try:
            return f"no time-out: {await ctx.within(SHORT, step)}"
        except StepTimeout as error:
            return f"{error.code} {error.details['path']}"

    async def steps() -> None:
        await ctx.tool(note, "within")
        await ctx.gather(ctx.agent(slow, "?"), ctx.ask("?"), ctx.within(LONG, ctx.event("never")))

    return [
        await late(ctx.agent(slow, "?")),
        await late(ctx.ask("?")),
        await late(ctx.event("never")),
        await late(ctx.sleep(LONG)),
        await late(ctx.tool(never)),
        await late(ctx.tool(pay)),
        await late(steps()),
        await ctx.within(LONG, ctx.agent(quick, "?")),
        await ctx.within(LONG, ctx.tool(note, "alone")),
    ]


EVERYTHING = [*(f"step_timeout {number}" for number in range(7)), "in time", "alone"]


def test_what_is_at_work_ends_when_the_time_is_over(cluster: LocalCluster) -> None:
    """Given an agent, a question, an event, a pause, a tool, a call that needs an approval, and several of these, when
    their time is over, then the code gets `step_timeout` and goes on, and everything has ended: sub-agents are
    cancelled, and nobody is asked any more. What is done in time has its value."""
    run = cluster.workflow(everything, session_id="w")
    result = ended(run)
    assert result.output == EVERYTHING
    assert not result.pending
    statuses = Counter(info.status for info in cluster.session("w").tree())
    assert statuses == {"idle": 1, "cancelled": 2, "completed": 1}
    finished = [event for event in cluster.session("w").events() if isinstance(event, ToolFinished)]
    timers = Counter(event.outcome for event in finished if event.tool == TIMEOUT_STEP)
    assert timers == {"ok": 7, "cancelled": 3}
    assert done == {"within": 1, "alone": 1}


@pytest.mark.sweep
@pytest.mark.thorough
def test_a_death_anywhere_changes_no_time_limit(tmp_path: Path) -> None:
    """Given the same, when the session actor that comes to a point first dies there, then the result is the same, and
    the books balance."""
    with LocalCluster() as clean:
        assert ended(clean.workflow(everything, session_id="w")).output == EVERYTHING
        count = len(clean.points)
    for at in tiers.points(range(0, count, 3)):
        store = f"sqlite:///{tmp_path}/{at}.db"
        with LocalCluster(store) as cluster:
            cluster.kill_at(at)
            assert ended(cluster.workflow(everything, session_id="w")).output == EVERYTHING, at
        books(store)


@workflow
async def begins_again(ctx: WorkflowContext, times: int = 0) -> int:
    """Begins again right behind what was done in time."""
    await ctx.within(LONG, ctx.tool(note, f"round {times}"))
    if times < 2:
        await ctx.continue_as_new(times=times + 1)
    return times


@pytest.mark.sweep
def test_a_timer_ends_before_its_code_continues_as_new(tmp_path: Path) -> None:
    """Given code that continues as new right behind work that was done in time, then the timer of that work has ended
    before the new code does anything, wherever the session actor dies first."""

    def checked(cluster: LocalCluster) -> None:
        run = cluster.workflow(begins_again, session_id="w", run_id="r")
        assert ended(run).output == 2
        finished = [event.call_id for event in cluster.session("w").events() if isinstance(event, ToolFinished)]
        assert finished == ["r/0.1.0", "r/0.0.0", "r/n1.0.1.0", "r/n1.0.0.0", "r/n2.0.1.0", "r/n2.0.0.0"]

    with LocalCluster() as clean:
        checked(clean)
        count = len(clean.points)
    for at in tiers.points(range(0, count, 3)):
        store = f"sqlite:///{tmp_path}/{at}.db"
        with LocalCluster(store) as cluster:
            cluster.kill_at(at)
            checked(cluster)
        books(store)


def written() -> Definition:
    """Steps of a file that are out of time: tried again and replaced, left, and one within another."""
    never = w.wait(event="never")
    return w.define(
        "limits",
        w.agent("slow", "?", timeout=SHORT, retry=Retry(2, 0.01), fallback=w.tool("note", {"name": "instead"}), id="a"),
        w.parallel(w.agent("slow", "?"), never, w.sequence(never, timeout="1h"), timeout=SHORT, on_error="continue"),
        w.loop(w.sequence(w.tool("note", {"name": "round"}), never), max=3, timeout=SHORT,
               on_error=w.tool("note", {"name": "{{error.code}}"})),
        w.agent("quick", "?", timeout="1h", id="b"),
        output=["{{a}}", "{{b}}"],
    )  # fmt: skip


@pytest.mark.sweep
def test_a_death_anywhere_changes_no_timeout_of_a_file(tmp_path: Path) -> None:
    """Given a definition whose steps have a timeout, when the session actor that comes to a point first dies there,
    then each is out of time once a try, what is to be done about failures is done, and the books balance."""

    def checked(cluster: LocalCluster) -> None:
        run = cluster.workflow(written(), agents=[slow, quick], tools=[note], session_id="w")
        assert ended(run).output == ["instead", "in time"]
        over = [event for event in cluster.session("w").events() if isinstance(event, ToolFinished)]
        assert sum(event.tool == TIMEOUT_STEP and event.outcome == "ok" for event in over) == 4

    with LocalCluster() as clean:
        checked(clean)
        count = len(clean.points)
    assert done == {"instead": 1, "round": 1, "step_timeout": 1}
    for at in tiers.points(range(0, count, 3)):
        store = f"sqlite:///{tmp_path}/{at}.db"
        with LocalCluster(store) as cluster:
            cluster.kill_at(at)
            checked(cluster)
        books(store)


def test_a_time_that_is_over_while_nothing_runs(tmp_path: Path) -> None:
    """Given a step with a timeout whose time is over while no service runs, when services run again, then it is out of
    time once, by the time that was recorded when it began."""
    store = f"sqlite:///{tmp_path}/store.db"
    late = w.parallel(w.wait(event="never"), w.agent("slow", "?"), timeout=1.5, fallback=w.model("instead"), id="a")
    with LocalCluster(store) as first:
        run = first.workflow(w.define("late", late), agents=[slow], session_id="w", run_id="r")
        set_at = next(event for event in run if isinstance(event, TimerSet))
    time.sleep(max(0.0, set_at.due_at / 1_000_000 - time.time()))
    with LocalCluster(store) as second:
        assert second.session("w").run("r").result(PATIENCE, check=True).output == "offline: instead"
        events = second.session("w").events()
        assert [event for event in events if isinstance(event, TimerSet)] == [set_at]
        fired = [event for event in events if isinstance(event, TimerFired)]
        assert [event.name for event in fired] == [set_at.name]
    books(store)


def test_times_that_are_none() -> None:
    """A time must be more than nothing, and less than ten years."""
    context = WorkflowContext("s", "r")
    for seconds in (0, -1, float("nan"), 1e12):
        with pytest.raises(InvalidInput, match="timeout"):
            context.within(seconds, context.sleep(1))


def timed(code: Any, record: Record | None = None) -> Execution:
    execution = Execution(WorkflowContext("s", "r").whole(code, {}), record or Record())
    execution.replay()
    return execution


def test_the_record_says_who_was_first() -> None:
    """Given work and its timer, whose results have come in either order, then code that is run from the record does the
    same; steps that were given up are awaited behind a time-out, and a timer is not."""

    async def code(ctx: WorkflowContext) -> str:
        try:
            await ctx.within(5, ctx.gather(ctx.sleep(10), ctx.sleep(20)))
        except StepTimeout as error:
            return error.details["path"]
        return str(await ctx.within(5, ctx.uuid()))

    first = timed(code)
    assert [path for path, _ in first.new()] == ["0.0.0", "0.1.0.0.0", "0.1.0.1.0"]
    first.deliver("0.1.0.1.0", Result("ok", "null"))
    first.deliver("0.0.0", Result("ok", "null"))
    assert [*first.dropped] == ["0.1.0.0.0"]
    assert not timed(code, first.record).is_over
    first.deliver("0.1.0.0.0", Result("cancelled", "cancelled"))
    for execution in (first, timed(code, first.record)):
        assert (execution.is_over, execution.value, execution.error) == (True, "0", None)

    second = timed(code)
    second.new()
    second.deliver("0.1.0.0.0", Result("ok", "null"))
    second.deliver("0.1.0.1.0", Result("ok", "null"))
    assert [*second.dropped] == ["0.0.0"]
    assert second.is_over  # the second timer was not asked for: its work was done at once
    assert second.new() == []
    again = timed(code, second.record)
    assert (again.value, [*again.dropped]) == (second.value, ["0.0.0"])
    second.deliver("0.0.0", Result("aborted", "given up"))
    assert timed(code, second.record).value == second.value
