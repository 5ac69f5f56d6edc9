"""What becomes of single steps of workflows: recorded before they are begun, in doubt, edited, reporting."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from understudy import Budget, StepFailed, ToolContext, WorkflowContext, tool, workflow
from understudy.events import ToolFinished
from understudy.store.check.check import check
from understudy.store.db.engine import Database
from understudy.testing import LocalCluster

PATIENCE = 30.0

begun, released, is_over = threading.Event(), threading.Event(), threading.Event()
clusters: list[LocalCluster] = []


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """A cluster whose store is checked when the test is over."""
    store = f"sqlite:///{tmp_path}/store.db"
    begun.clear()
    released.clear()
    is_over.clear()
    with LocalCluster(store) as found:
        clusters.append(found)
        yield found
        released.set()
        is_over.set()
    clusters.clear()
    database = Database(store)
    try:
        with database.snapshot() as connection:
            assert "\n".join(map(str, check(connection, "local"))) == ""
    finally:
        database.close()


@tool(approve=True)
def pay(amount: int) -> dict[str, int]:
    """Needs an approval."""
    return {"paid": amount}


@workflow
async def buys(ctx: WorkflowContext, amount: int) -> Any:
    """Needs an approval."""
    return await ctx.tool(pay, amount)


def test_a_call_that_a_person_has_edited_has_its_value(cluster: LocalCluster) -> None:
    """Where a person approves a step with other arguments, the code gets what the tool returns for these, and nothing
    beside it."""
    run = cluster.workflow(buys, 5, session_id="w")
    assert run.result(PATIENCE).status == "waiting_for_input"
    cluster.session("w").approve(arguments={"amount": 7})
    assert run.result(PATIENCE, check=True).output == {"paid": 7}


def _held() -> str:
    begun.set()
    released.wait(PATIENCE)
    return "held"


@tool(on_crash="ask")
def dangerous() -> str:
    """A person says what became of it."""
    return _held()


@tool(on_crash=lambda _context: "found out")
def traceable() -> str:
    """It can be found out."""
    return _held()


async def _look(_context: ToolContext) -> dict[str, str]:
    return {"found": "out"}


@tool(on_crash=_look)
def visible() -> dict[str, str]:
    """The same with a value, and async."""
    return {"said": _held()}


@workflow(tools=[dangerous, traceable, visible])
async def doubts(ctx: WorkflowContext, name: str) -> Any:
    """A step of one of the tools."""
    return await ctx.tool(name)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("dangerous", "a person says it"), ("traceable", "found out"), ("visible", {"found": "out"})],
)
def test_a_step_in_doubt_has_a_value(cluster: LocalCluster, name: str, expected: Any) -> None:
    """What a person says of a call whose process died, or what its tool finds out, is the step's value, also where that
    is a text."""
    run = cluster.workflow(doubts, name, session_id="w")
    assert begun.wait(PATIENCE)
    assert cluster.kill("w")
    released.set()
    result = run.result(PATIENCE)
    if result.pending:
        cluster.session("w").answer(result.pending[0], "a person says it")
        result = run.result(PATIENCE)
    assert (result.status, result.output) == ("completed", expected)


@workflow
async def doubts_a_text(ctx: WorkflowContext) -> str:
    """A step of a tool that says that it returns a text."""
    return await ctx.tool(dangerous)


def test_a_step_that_is_run_again_has_its_value(cluster: LocalCluster) -> None:
    """Where a person has a call in doubt run again, the step's value is what the tool returns then."""
    run = cluster.workflow(doubts_a_text, session_id="w")
    assert begun.wait(PATIENCE)
    assert cluster.kill("w")
    released.set()
    cluster.session("w").answer(run.result(PATIENCE).pending[0], rerun=True)
    assert run.result(PATIENCE, check=True).output == "held"


@tool(on_crash="ask")
def sends() -> str:
    """Kills its process."""
    clusters[0].kill("w")
    return "nobody hears of it"


@tool(on_crash="rerun")
def answers(later: int) -> str:
    """Answers what is asked about the call beside it, and kills its process, and the next one so many points later."""
    session = clusters[0].session("w")
    if not released.is_set():
        pending = session.pending()
        if not pending:
            return str(is_over.wait(PATIENCE))
        session.answer(pending[0], "it arrived")
        released.set()
        clusters[0].kill_at(len(clusters[0].points) + later)
        clusters[0].kill("w")
    return "answered"


@workflow
async def answered(ctx: WorkflowContext, later: int) -> list[Any]:
    """A call in doubt, beside one that commits something."""
    return await ctx.gather(ctx.tool(sends), ctx.tool(answers, later))


@pytest.mark.parametrize("later", range(6))
def test_an_answer_is_a_value_in_each_commit_that_has_it(cluster: LocalCluster, later: int) -> None:
    """Given what a person has said of a call in doubt, which the commit of another tool's start has as well, when the
    process dies behind that commit, or anywhere else, then the step's value is what the person has said."""
    run = cluster.workflow(answered, later, session_id="w")
    for _ in run:
        pass
    assert run.result(PATIENCE, check=True).output == ["it arrived", "answered"]


@tool(on_crash="rerun")
def lasts() -> str:
    """Goes on until somebody says so."""
    return _held()


@workflow
async def shops(ctx: WorkflowContext) -> list[Any]:
    """A tool that goes on, and one that needs an approval."""
    return await ctx.gather(ctx.tool(lasts), ctx.tool(pay, 5))


@pytest.mark.parametrize("edited", [None, {"amount": 7}])
def test_an_approved_call_waits_for_no_other_branch(cluster: LocalCluster, edited: dict[str, int] | None) -> None:
    """Given a call that needs an approval beside a tool that is at work, a person is asked at once, and once it is
    approved the call is executed, with the arguments that the person wrote, while the other tool still goes on."""
    run = cluster.workflow(shops, session_id="w")
    assert begun.wait(PATIENCE)
    session = cluster.session("w")
    asked = next(event for event in run if event.type == "input_requested")
    session.approve(asked.call_id, arguments=edited)
    done = next(event for event in run if event.type == "tool_finished")
    assert (done.tool, done.outcome, released.is_set()) == ("pay", "ok", False)
    released.set()
    assert run.result(PATIENCE, check=True).output == ["held", {"paid": 7 if edited else 5}]


@tool(approve=True)
def reports(context: ToolContext) -> str:
    """Reports what it does, and goes on for a while."""
    context.emit("begun", {})
    begun.set()
    released.wait(PATIENCE)
    return "reported"


@workflow
async def listens(ctx: WorkflowContext) -> str:
    """A step that reports."""
    return str(await ctx.tool(reports))


def test_what_a_step_reports_is_in_the_log(cluster: LocalCluster) -> None:
    """An event that a tool emits as soon as it has begun, while its start is being committed, is not lost."""
    run = cluster.workflow(listens, session_id="w")
    assert run.result(PATIENCE).status == "waiting_for_input"
    cluster.session("w").approve()
    assert begun.wait(PATIENCE)
    found = next(event for event in run if event.type in ("custom", "tool_finished"))
    released.set()
    assert found.type == "custom"
    assert run.result(PATIENCE, check=True).output == "reported"


@tool(on_crash="rerun")
def looks_at_its_log() -> list[str]:
    """The steps that are recorded while it runs."""
    messages = clusters[0].session("w").messages()
    return [call.call_id for message in messages for call in message.tool_calls]


@workflow(budget=Budget(scope="session", rounds=3))
async def looks(ctx: WorkflowContext) -> list[Any]:
    """Steps that may be repeated."""
    first = await ctx.tool(looks_at_its_log)
    return [first, await ctx.tool(looks_at_its_log)]


def test_a_step_is_recorded_before_it_is_begun(cluster: LocalCluster) -> None:
    """Also one of a tool that may run again: it never acts on what nobody would know of after a crash. A workflow's
    steps are no rounds of its budget."""
    run = cluster.workflow(looks, session_id="w", run_id="r")
    assert run.result(PATIENCE, check=True).output == [["r/0"], ["r/0", "r/1"]]


@tool(on_crash="rerun", timeout=0.2)
def outlives() -> str:
    """Can't be stopped when its time is over."""
    return str(is_over.wait(PATIENCE))


@tool(on_crash="rerun")
def goes_on() -> str:
    """The same, with a longer time."""
    return str(is_over.wait(PATIENCE))


@tool(on_crash="rerun")
def where(context: ToolContext) -> int:
    """The activation that it is done in."""
    return context.epoch


@workflow
async def outlived(ctx: WorkflowContext) -> list[Any]:
    """Goes on behind tools that could not be stopped, by their own time and by the code's, beside one at work."""

    async def late(step: Any) -> list[Any]:
        try:
            return [await step]
        except StepFailed as error:
            return [error.code, await ctx.tool(where), await ctx.tool(where)]

    first = await ctx.tool(where)
    found = await ctx.gather(late(ctx.tool(outlives)), ctx.tool(lasts))
    return [first, *found, await late(ctx.within(0.2, ctx.tool(goes_on)))]


def test_what_follows_a_tool_that_can_not_be_stopped_is_done_elsewhere(cluster: LocalCluster) -> None:
    """Given a synchronous tool that outlives its time, or the code's, then no step begins in its process any more: what
    is at work there ends, and the next process begins what the code has asked for."""
    run = cluster.workflow(outlived, session_id="w", run_id="r")
    for event in run:
        if isinstance(event, ToolFinished) and event.call_id == "r/1.0.0":
            released.set()
    assert run.result(PATIENCE, check=True).output == [
        1, ["step_timeout", 2, 2], "held", ["step_timeout", 3, 3],
    ]  # fmt: skip
