"""What a workflow's code has done within a time: what is at work when that is over ends, and the code is told once."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from understudy import AgentSpec, Run, RunResult, StepTimeout, WorkflowContext, tool, workflow
from understudy.actors.awaited import Record, Result
from understudy.actors.replay import Execution
from understudy.errors import InvalidInput
from understudy.events import ToolFinished
from understudy.store.check.check import check
from understudy.store.db.engine import Database
from understudy.testing import LocalCluster
from understudy.workflows import TIMEOUT_STEP

from .. import tiers

PATIENCE = 30.0
SHORT, LONG = 0.2, 3_600

done: Counter[str] = Counter()
begun = threading.Event()

slow = AgentSpec(name="slow", instructions='offline-script: [{"delay": 600, "text": "late"}]')
quick = AgentSpec(name="quick", instructions='offline-script: [{"text": "in time"}]')


@tool(on_crash="rerun")
async def never() -> str:
    """Lasts until it is stopped."""
    begun.set()
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
def _anew() -> None:
    done.clear()
    begun.clear()


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
async def waits(ctx: WorkflowContext) -> str:
    """Something of a minute within three seconds."""
    try:
        await ctx.within(3.0, ctx.event("never"))
    except StepTimeout:
        await ctx.tool(note, "out of time")
    return "over"


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
