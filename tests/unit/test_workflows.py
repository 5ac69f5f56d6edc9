"""Workflows in the cluster of one process: steps, people, signals, crashes, changed code."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from understudy import AgentSpec, Run, StepFailed, StepTimeout, ToolContext, WorkflowContext, tool, workflow
from understudy.cluster.client import background
from understudy.cluster.client.follower import asked
from understudy.errors import InvalidInput, InvalidSpec, NotRunning, RunConflict, SessionConflict
from understudy.protocol import Signal
from understudy.store.check.check import check
from understudy.store.db.engine import Database
from understudy.testing import LocalCluster

from .. import tiers

PATIENCE = 30.0

done: Counter[str] = Counter()
begun, released = threading.Event(), threading.Event()
code = {"version": 1}


class Part(BaseModel):
    """What a tool returns."""

    name: str
    size: int


@tool
def split(path: str) -> list[Part]:
    """Parts of a path."""
    done[path] += 1
    return [Part(name=f"{path}{number}", size=number) for number in range(3)]


@tool(on_crash="rerun")
async def square(number: int) -> int:
    """A pure function."""
    return number * number


@tool
def effect(name: str) -> str:
    """Something that must be done once."""
    done[name] += 1
    return name.upper()


@tool
def fails(message: str) -> None:
    """Always fails."""
    raise ValueError(message)


@tool(approve=True)
def pay(amount: int) -> str:
    """Needs an approval."""
    done["paid"] += 1
    return f"paid {amount}"


def _find_out(ctx: ToolContext) -> Part:
    """What became of a `charge` whose actor died."""
    return Part(name=ctx.call_key, size=ctx.arguments["amount"])


@tool(on_crash=_find_out)
def charge(amount: int) -> Part:
    """Lasts until the test lets it go; who dies meanwhile is found out about."""
    begun.set()
    released.wait(PATIENCE)
    return Part(name="not found out", size=amount)


@tool(on_crash="ask")
def ship(item: str) -> list[str]:
    """The same; a person is asked."""
    begun.set()
    released.wait(PATIENCE)
    return [item]


@tool(on_crash="rerun")
def hold() -> str:
    """Lasts until the test lets it go."""
    begun.set()
    released.wait(PATIENCE)
    return "held"


helper = AgentSpec(name="helper", instructions="You help.")


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    done.clear()
    begun.clear()
    released.clear()
    code["version"] = 1
    yield
    released.set()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """A cluster whose store is checked when the test is over."""
    store = f"sqlite:///{tmp_path}/store.db"
    with LocalCluster(store) as found:
        yield found
    database = Database(store)
    try:
        with database.snapshot() as connection:
            assert "\n".join(map(str, check(connection, "local"))) == ""
    finally:
        database.close()


def output(run: Run) -> Any:
    """What a run has returned."""
    return run.result(PATIENCE, check=True).output


@workflow
async def review(ctx: WorkflowContext, path: str) -> dict[str, Any]:
    """Tools, agents and models, one after the other and at once."""
    parts = await ctx.tool(split, path)
    squares = await ctx.foreach(parts, lambda part: ctx.tool(square, part.size), limit=2)
    said = await ctx.gather(*(ctx.agent(helper, f"Review {part.name}") for part in parts))
    return {"squares": squares, "said": said, "summary": await ctx.model(None, "Sum up")}


def test_steps_are_calls_of_the_session(cluster: LocalCluster) -> None:
    """A workflow's steps are recorded as calls and results, its children are sessions below it, and a second run under
    the same ids does nothing."""
    run = cluster.workflow(review, "src", session_id="w", run_id="r")
    expected = {
        "squares": [0, 1, 4],
        "said": [f"offline: Review src{number}" for number in range(3)],
        "summary": "offline: Sum up",
    }
    assert output(run) == expected
    messages = cluster.session("w").messages()
    asked = {call.call_id: call.name for message in messages for call in message.tool_calls}
    assert asked == {
        "r/0": "split", **{f"r/1.{n}.0": "square" for n in range(3)}, **{f"r/2.{n}.0": "agent" for n in range(3)},
        "r/3": "model",
    }  # fmt: skip
    assert [message.tool_call_id for message in messages if message.role == "tool"].count("r/0") == 1
    info = cluster.session("w").info()
    assert (info.kind, info.name, info.status) == ("workflow", "review", "idle")
    assert sorted(child.name for child in cluster.session("w").children()) == ["helper", "helper", "helper", "model"]
    assert output(cluster.workflow(review, "src", session_id="w", run_id="r")) == expected
    assert done == {"src": 1}
    with pytest.raises(RunConflict):
        cluster.workflow(review, "lib", session_id="w", run_id="r")
    assert output(cluster.workflow(review, "lib", session_id="w"))["squares"] == [0, 1, 4]


@workflow
async def talks(ctx: WorkflowContext) -> list[Any]:
    """Waits for people, signals and times."""
    found: list[Any] = [await ctx.ask("Which?", options=["a", "b"])]
    try:
        await ctx.ask("Anybody?", timeout=0.05)
    except StepTimeout as late:
        found.append(late.message)
    found.append(await ctx.ask("Still nobody?", timeout=0.05, default="go on"))
    found.append(await ctx.event("go"))
    try:
        await ctx.event("never", timeout=0.05)
    except StepTimeout as late:
        found.append(late.message)
    before = await ctx.now()
    await ctx.until(before - timedelta(days=1))
    await ctx.sleep(0.05)
    found.append((await ctx.now() - before) >= timedelta(seconds=0.05))
    await ctx.publish("progress", {"done": len(found)})
    return found


def test_people_signals_and_times(cluster: LocalCluster) -> None:
    """A workflow asks people, waits for signals, before and after they come, and for times; while it waits it is in no
    actor."""
    run = cluster.workflow(talks, session_id="w")
    session = cluster.session("w")
    paused = run.result(PATIENCE)
    assert paused.status == "waiting_for_input"
    assert [(asked.prompt, list(asked.options)) for asked in paused.pending] == [("Which?", ["a", "b"])]
    assert session.info().actor_pid is None
    assert not session.signal("go", {"number": 7})  # before a step waits for it
    assert session.query("progress") is None
    session.answer(paused.pending[0], "b")
    nobody, nothing = "nobody answered in time", "the event did not come in time"
    for _ in run:
        pass
    assert output(run) == ["b", nobody, "go on", {"number": 7}, nothing, True]
    assert session.query("progress") == {"done": 6}
    with pytest.raises(NotRunning):
        session.signal("go")


@workflow
async def waits_for_signals(ctx: WorkflowContext) -> list[Any]:
    """Takes signals of two names, some at once."""
    first = await ctx.gather(ctx.event("a"), ctx.event("a"), ctx.event("b"))
    return [*first, await ctx.event("a")]


def test_signals_are_taken_in_order(cluster: LocalCluster) -> None:
    """Each signal is taken by one step: the one that has waited longest for one of its name."""
    run = cluster.workflow(waits_for_signals, session_id="w")
    session = cluster.session("w")
    for number in range(3):
        session.signal("a", number)
    session.signal("b", "only")
    assert output(run) == [0, 1, "only", 2]
    agent = cluster.spawn(AgentSpec(name="agent"), session_id="agent")
    with pytest.raises(InvalidInput, match="no workflow"):
        agent.signal("a")
    with pytest.raises(InvalidInput, match="name"):
        session.signal("no name")


@workflow
async def outer(ctx: WorkflowContext, depth: int) -> dict[str, Any]:
    """Runs itself and another workflow."""
    inner = await ctx.workflow(outer, depth - 1) if depth else None
    try:
        await ctx.workflow(broken, "no stock")
    except StepFailed as failed:
        return {"inner": inner, "status": failed.details["status"], "said": failed.message}
    return {}


@workflow
async def broken(ctx: WorkflowContext, why: str) -> None:
    """Fails."""
    await ctx.tool(fails, why)


def test_workflows_are_steps_of_workflows(cluster: LocalCluster) -> None:
    """A child workflow is a session below its parent; how it failed is the step's error."""
    found = output(cluster.workflow(outer, 2, session_id="w"))
    assert found["status"] == "failed"
    assert "ValueError: no stock" in found["said"]
    assert found["inner"]["inner"]["inner"] is None
    assert len(cluster.session("w").tree()) == 6


def test_a_failure_that_nobody_catches_ends_the_run(cluster: LocalCluster) -> None:
    """The run's error says which step failed, and why; one of the code's own, its type."""
    result = cluster.workflow(broken, "no stock", session_id="w").result(PATIENCE)
    assert result.status == "failed"
    assert result.error is not None
    assert (result.error["code"], result.error["message"]) == ("step_failed", "ValueError: no stock")
    assert result.error["details"] == {"path": "0", "step": "fails", "outcome": "error", "status": ""}

    @workflow
    async def mistaken(ctx: WorkflowContext) -> None:
        raise KeyError("x")

    result = cluster.workflow(mistaken, session_id="m").result(PATIENCE)
    assert result.error is not None
    assert (result.error["code"], result.error["message"]) == ("workflow_error", "KeyError: 'x'")


@workflow
async def buys(ctx: WorkflowContext, amount: int) -> str:
    """Needs an approval."""
    return str(await ctx.tool(pay, amount))


def test_a_step_needs_an_approval(cluster: LocalCluster) -> None:
    """A tool that needs an approval is executed after one, once; a rejection is the step's error."""
    run = cluster.workflow(buys, 5, session_id="w")
    assert run.result(PATIENCE).status == "waiting_for_input"
    cluster.session("w").approve()
    assert output(run) == "paid 5"
    refused = cluster.workflow(buys, 6, session_id="w")
    assert refused.result(PATIENCE).status == "waiting_for_input"
    cluster.session("w").reject(reason="too much")
    error = refused.result(PATIENCE).error
    assert error is not None
    assert error["details"]["outcome"] == "refused"
    assert done == {"paid": 1}


@workflow
async def counts(ctx: WorkflowContext, number: int, total: int = 0) -> int:
    """Begins again and again."""
    total += await ctx.tool(square, number)
    if number:
        await ctx.continue_as_new(number=number - 1, total=total)
    return total


def test_a_workflow_continues_as_new(cluster: LocalCluster) -> None:
    """The run goes on with another input and an empty record; its result is the last one's."""
    run = cluster.workflow(counts, 4, session_id="w", run_id="r")
    assert output(run) == 30
    asked = [call.call_id for message in cluster.session("w").messages() for call in message.tool_calls]
    assert asked == ["r/0", "r/n1.0", "r/n2.0", "r/n3.0", "r/n4.0"]


@workflow
async def holds(ctx: WorkflowContext) -> list[Any]:
    """Its code depends on a version."""
    first = await ctx.tool(effect, "first")
    second = await ctx.tool(hold)
    third = await ctx.tool(effect, "third") if code["version"] != 2 else None
    return [first, second, third]


@workflow
async def changes(ctx: WorkflowContext) -> list[Any]:
    """Its first step depends on a version."""
    first = await ctx.tool(effect, "first" if code["version"] == 1 else "other")
    return [first, await ctx.tool(hold)]


def test_a_killed_actor_changes_nothing(cluster: LocalCluster) -> None:
    """A workflow whose actor dies goes on where it was: what it has done is not done again."""
    run = cluster.workflow(holds, session_id="w")
    assert begun.wait(PATIENCE)
    assert cluster.kill("w")
    released.set()
    assert output(run) == ["FIRST", "held", "THIRD"]
    assert done == {"first": 1, "third": 1}


@workflow
async def charges(ctx: WorkflowContext) -> Any:
    """A call about which its tool finds out."""
    part = await ctx.tool(charge, 5)
    assert isinstance(part, Part)
    return part


@workflow
async def ships(ctx: WorkflowContext) -> Any:
    """A call about which a person is asked."""
    return await ctx.tool(ship, "book")


def test_a_call_in_doubt_has_a_value_as_any_other(cluster: LocalCluster) -> None:
    """What is found out about a call, by its tool or by a person, is the step's value, of the tool's own type."""
    run = cluster.workflow(charges, session_id="w", run_id="r")
    assert begun.wait(PATIENCE)
    assert cluster.kill("w")
    released.set()
    assert output(run) == {"name": "w/r/0", "size": 5}
    begun.clear()
    released.clear()
    run = cluster.workflow(ships, session_id="v")
    assert begun.wait(PATIENCE)
    assert cluster.kill("v")
    paused = run.result(PATIENCE)
    released.set()
    assert paused.pending[0].kind == "in_doubt"
    cluster.session("v").answer(paused.pending[0], '["book", "shipped"]')
    assert output(run) == ["book", "shipped"]


def test_changed_code_asks_what_to_do(cluster: LocalCluster) -> None:
    """Code that asks for other steps than the log has stops and asks; once it is mended the run goes on from there."""
    run = cluster.workflow(changes, session_id="w")
    assert begun.wait(PATIENCE)
    code["version"] = 2
    assert cluster.kill("w")
    released.set()
    asked = run.result(PATIENCE)
    assert asked.status == "waiting_for_input"
    assert "workflow_diverged" in asked.pending[0].prompt
    assert '{"name": "first"}' in asked.pending[0].prompt
    assert '{"name": "other"}' in asked.pending[0].prompt
    cluster.session("w").answer(asked.pending[0], "retry")
    while (again := run.result(PATIENCE)).pending == asked.pending:  # the answer may not have had its effect yet
        assert again.status == "waiting_for_input"
    assert again.status == "waiting_for_input"
    code["version"] = 1
    cluster.session("w").answer(again.pending[0], "retry")
    assert output(run) == ["FIRST", "held"]
    assert done == {"first": 1}


@workflow
async def doubts_beside(ctx: WorkflowContext) -> list[Any]:
    """A call about which a person is asked, beside one that goes on."""
    return list(await ctx.gather(ctx.tool(send), ctx.tool(hold)))


@tool(on_crash="ask")
def send() -> str:
    """Dies with its actor the first time."""
    begun.set()
    released.wait(PATIENCE)
    return "sent"


def test_an_answer_about_a_call_in_doubt_is_a_value_beside_others(cluster: LocalCluster) -> None:
    """What a person says of a call in doubt is its value, also where the actor is busy with another branch."""
    run = cluster.workflow(doubts_beside, session_id="w")
    assert begun.wait(PATIENCE)
    assert cluster.kill("w")
    while not (pending := cluster.session("w").pending()):
        assert run.result(PATIENCE).status == "waiting_for_input"
    cluster.session("w").answer(pending[0], "it arrived")
    released.set()
    assert output(run) == ["it arrived", "held"]


@workflow
async def lacks(ctx: WorkflowContext, number: int) -> Any:
    """Its code can't be run for a while."""
    return await ctx.tool(hold)


def test_code_that_can_not_be_run_for_a_while_ends_no_run(cluster: LocalCluster, monkeypatch: Any) -> None:
    """A run whose code can't be had any more asks what to do, as one whose code asks for other steps does."""
    run = cluster.workflow(lacks, 1, session_id="w")
    assert begun.wait(PATIENCE)
    definition = lacks.__understudy_workflow__  # type: ignore[attr-defined]
    monkeypatch.delattr(lacks, "__understudy_workflow__")
    assert cluster.kill("w")
    released.set()
    asked = run.result(PATIENCE)
    assert "can't be run any more" in asked.pending[0].prompt
    monkeypatch.setattr(lacks, "__understudy_workflow__", definition, raising=False)
    cluster.session("w").answer(asked.pending[0], "retry")
    assert output(run) == "held"


def test_names_that_mean_two_things_are_refused(cluster: LocalCluster) -> None:
    """Two workflows of one name, and a tool with the name of a step, are refused before anything is begun."""

    @workflow(name="lacks")
    async def runs_its_namesake(ctx: WorkflowContext) -> Any:
        return await ctx.workflow(lacks, 1)

    with pytest.raises(InvalidSpec, match="another workflow is named 'lacks'"):
        cluster.workflow(runs_its_namesake)

    @tool(name="sleep")
    def naps() -> None:
        """Do nothing."""

    @workflow(tools=[naps])
    async def sleeps(ctx: WorkflowContext) -> None: ...

    with pytest.raises(InvalidSpec, match="no tool may have the name of a step, 'sleep'"):
        cluster.workflow(sleeps)


@workflow
async def asks_beside(ctx: WorkflowContext) -> list[Any]:
    """Waits for a person beside a tool."""
    return list(await ctx.gather(ctx.ask("Beside?"), ctx.tool(hold if code["version"] == 1 else effect, *others())))


def others() -> list[str]:
    """The arguments of its second step, by version."""
    return [] if code["version"] == 1 else ["x"]


def test_what_comes_for_changed_code_waits(cluster: LocalCluster) -> None:
    """What is answered while the code does not fit the log has its effect later, and wakes nobody again and again."""
    run = cluster.workflow(asks_beside, session_id="w")
    session = cluster.session("w")
    assert begun.wait(PATIENCE)
    code["version"] = 2
    assert cluster.kill("w")
    released.set()
    while len(pending := session.pending()) < 2:
        assert run.result(PATIENCE).status == "waiting_for_input"
    beside, asked = sorted(pending, key=lambda item: "diverged" in item.prompt)
    session.answer(beside, "yes")
    output(cluster.workflow(counts, 1))  # some time
    before = session.info().epoch
    output(cluster.workflow(counts, 1))
    assert session.info().epoch == before
    code["version"] = 1
    session.answer(asked, "retry")
    assert output(run) == ["yes", "held"]


def test_diverged_code_can_be_given_up(cluster: LocalCluster) -> None:
    """A person may have the run end instead."""
    run = cluster.workflow(changes, session_id="w")
    assert begun.wait(PATIENCE)
    code["version"] = 2
    assert cluster.kill("w")
    released.set()
    cluster.session("w").answer(run.result(PATIENCE).pending[0], "fail")
    error = run.result(PATIENCE).error
    assert error is not None
    assert error["code"] == "workflow_diverged"


def test_a_cancel_ends_what_it_is_at(cluster: LocalCluster) -> None:
    """A cancelled workflow ends, whether it waits or a tool runs, and so do its children."""
    waiting = cluster.workflow(talks, session_id="w")
    assert waiting.result(PATIENCE).status == "waiting_for_input"
    assert waiting.cancel("enough")
    assert waiting.result(PATIENCE).status == "cancelled"
    running = cluster.workflow(holds, session_id="v")
    assert begun.wait(PATIENCE)
    assert running.cancel("enough")
    released.set()
    assert running.result(PATIENCE).status == "cancelled"


def test_inputs_that_do_not_fit_are_refused(cluster: LocalCluster) -> None:
    """What the function does not take is refused where it is known; an input that was sent otherwise ends its run."""
    for arguments, keywords in (((), {}), (("a", "b"), {}), (("a",), {"other": 1})):
        with pytest.raises(InvalidSpec, match="review"):
            cluster.workflow(review, *arguments, **keywords)
    with pytest.raises(InvalidInput, match="decorate"):
        cluster.workflow(print)
    output(cluster.workflow(counts, 0, session_id="w"))
    error = cluster.session("w").send("hello").result(PATIENCE).error
    assert error is not None
    assert (error["code"], "number, total" in error["message"]) == ("invalid_input", True)
    error = cluster.session("w").send('{"number": "many"}').result(PATIENCE).error
    assert error is not None
    assert (error["code"], error["message"]) == ("invalid_input", 'number: "many" is no int')
    with pytest.raises(SessionConflict):
        cluster.workflow(broken, "x", session_id="w")
    with pytest.raises(InvalidInput, match="signal"):
        cluster.session("w").steer("hello")
    with pytest.raises(InvalidInput, match="forked"):
        cluster.session("w").fork(0)


def test_functions_that_are_no_workflows() -> None:
    """What can't be a workflow is refused where it is defined."""

    def plain(ctx: WorkflowContext) -> None: ...

    async def nothing() -> None: ...

    async def many(ctx: WorkflowContext, *names: str) -> None: ...

    for function, said in ((plain, "async"), (nothing, "context"), (many, "names")):
        with pytest.raises(InvalidSpec, match=said):
            workflow(function)
    with pytest.raises(InvalidSpec, match="instructions"):
        workflow(instructions="x")(outer)


@workflow
async def until_morning(ctx: WorkflowContext) -> str:
    """Waits for a time that is far away."""
    await ctx.until(datetime(2100, 1, 1, tzinfo=UTC))
    return "morning"


def test_a_workflow_that_waits_for_long_holds_nothing(cluster: LocalCluster) -> None:
    """A time of years is a timer in the store."""
    run = cluster.workflow(until_morning, session_id="w")
    session = cluster.session("w")
    for _ in run:
        if session.info().status == "waiting_for_timer":
            break
    assert session.info().actor_pid is None
    assert run.cancel()
    assert run.result(PATIENCE).status == "cancelled"


@tool(on_crash="rerun")
def post(key: str) -> str:
    """Idempotent by its key."""
    done[key] += 1
    return str(done.total())


@workflow
async def posts(ctx: WorkflowContext) -> str:
    """A key that is taken, and a value of a tool, are arguments of tools that may run twice."""
    first = await ctx.tool(post, await ctx.uuid())
    return await ctx.tool(post, f"behind {first}")


@pytest.mark.sweep
def test_a_tool_that_runs_again_gets_the_same_arguments() -> None:
    """Given tools that may run twice, whose arguments are values that the code has taken and other tools' results, when
    the actor dies at any point, then each is called with the same arguments again."""
    with LocalCluster() as clean:
        output(clean.workflow(posts, session_id="w"))
        points = list(clean.points)
    for at in tiers.points(range(len(points))):
        done.clear()
        with LocalCluster() as cluster:
            cluster.kill_at(at)
            output(cluster.workflow(posts, session_id="w"))
        assert len(done) == 2, (points[at], done)


def test_a_repeated_signal_is_one(cluster: LocalCluster) -> None:
    """A signal whose request arrives twice is taken by one step, also where another one waits for its name by then."""
    run = cluster.workflow(waits_for_signals, session_id="w")

    def send(payload: int, request: str) -> bool:
        nodes = cluster._local._nodes
        return background.wait(asked(nodes, bool, "w", "signal", "w", Signal("a", payload), request, ""))

    first = send(0, "one")
    assert send(0, "one") is first
    send(1, "two")
    send(2, "three")
    send(1, "two")
    cluster.session("w").signal("b", "only")
    assert output(run) == [0, 1, "only", 2]
