"""The execution of a workflow's code: the same from its record as without one, whatever order results come in."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.actors.awaited import Record, Result
from understudy.actors.replay import Execution
from understudy.actors.tools import tool
from understudy.actors.workflow import workflow
from understudy.actors.workflow_context import Retry, WorkflowContext
from understudy.actors.workflow_record import SNAPSHOT_STEPS, Recorded
from understudy.errors import InvalidInput, StepFailed, StepTimeout, WorkflowDiverged, WorkflowError
from understudy.json_text import from_json, to_json

Code = Callable[[WorkflowContext], Awaitable[Any]]


@tool
def step(name: str) -> Any:
    """A step by its name."""


@workflow
async def named(ctx: WorkflowContext, name: str) -> str:
    """For child steps."""
    return name


def begun(code: Code, record: Record | None = None) -> Execution:
    """Code that has come to its first steps, or to where its record ends."""
    execution = Execution(WorkflowContext("s", "r").whole(code, {}), record or Record())
    execution.replay()
    return execution


def result(value: Any = None, outcome: str = "ok") -> Result:
    return Result(outcome, to_json(value) if outcome == "ok" else str(value))


def asked(execution: Execution) -> dict[str, Any]:
    """The steps that are new, by path: the name each was given."""
    return {path: from_json(wanted.arguments).get("name", wanted.tool) for path, wanted in execution.new()}


def copy(record: Record) -> Record:
    return Record(dict(record.asked), list(record.results), dict(record.taken))


def test_steps_of_branches_have_paths_of_their_own() -> None:
    """A step's path is its number in its branch, behind those of the branches that it is in."""

    async def code(ctx: WorkflowContext) -> list[Any]:
        async def two(name: str) -> Any:
            await ctx.tool(step, f"{name}1")
            return await ctx.tool(step, f"{name}2")

        await ctx.tool(step, "first")
        return await ctx.gather(two("a"), ctx.tool(step, "b"), ctx.foreach(["c", "d"], two))

    execution = begun(code)
    assert asked(execution) == {"0": "first"}
    execution.deliver("0", result())
    assert asked(execution) == {"1.0.0": "a1", "1.1.0": "b", "1.2.0.0.0": "c1", "1.2.0.1.0": "d1"}
    execution.deliver("1.0.0", result())
    assert asked(execution) == {"1.0.1": "a2"}
    for path, value in (("1.2.0.1.0", 0), ("1.2.0.0.0", 0), ("1.1.0", 2), ("1.0.1", 1)):
        execution.deliver(path, result(value))
    assert set(asked(execution)) == {"1.2.0.0.1", "1.2.0.1.1"}
    execution.deliver("1.2.0.1.1", result(4))
    execution.deliver("1.2.0.0.1", result(3))
    assert execution.is_over
    assert execution.value == [1, 2, [3, 4]]


@settings(max_examples=60, deadline=None)
@given(order=st.randoms(use_true_random=False), stops=st.lists(st.integers(0, 60), max_size=4))
def test_code_that_is_run_again_goes_on_where_it_was(order: random.Random, stops: list[int]) -> None:
    """Whatever order results come in, and wherever the code is run again from its record, what it asks for and returns
    is the same."""

    async def code(ctx: WorkflowContext) -> list[Any]:
        seen: list[Any] = []  # shared by the branches, and so dependent on the order of results

        async def branch(number: int) -> Any:
            for turn in range(number % 3 + 1):
                seen.append(await ctx.tool(step, f"{number}.{turn}.{len(seen)}"))
            return await ctx.random()

        found = await ctx.foreach(range(7), branch, limit=3)
        return [found, seen, await ctx.uuid()]

    def run(stops: list[int], picks: list[str] | None = None) -> tuple[Any, list[str], Record]:
        execution, delivered = begun(code), []
        while not execution.is_over:
            asked(execution), execution.taken()
            if len(delivered) in stops:
                again = begun(code, copy(execution.record))
                assert not again.new()
                assert not again.taken()
                assert list(again.waiting)
                assert set(again.waiting) == set(execution.waiting)
                execution = again
            path = picks[len(delivered)] if picks else order.choice(sorted(execution.waiting))
            delivered.append(path)
            execution.deliver(path, result(path))
        return execution.value, delivered, execution.record

    value, delivered, record = run(stops)
    replayed = begun(code, record)
    assert replayed.is_over
    assert replayed.value == value
    assert len(delivered) == len(set(delivered)) == 13


def test_no_more_begin_at_once_than_one_transaction_takes() -> None:
    """Given a gather of very many without a limit, then 2,000 begin, and the next ones as these end; a limit beyond
    that is refused."""

    async def code(ctx: WorkflowContext) -> int:
        with pytest.raises(InvalidInput, match="1 to 2000"):
            await ctx.foreach([1], ctx.tool, limit=2_001)
        return len(await ctx.gather(*(ctx.tool(step, str(number)) for number in range(2_002))))

    execution = begun(code)
    first = asked(execution)
    assert len(first) == 2_000
    for path in list(first)[:2]:
        execution.deliver(path, result())
    assert len(asked(execution)) == 2


def test_the_error_for_changed_code_names_what_the_record_has() -> None:
    """A step with other arguments, another step, and one that is gone each name both."""

    async def before(ctx: WorkflowContext) -> None:
        await ctx.tool(step, "one")
        await ctx.tool(step, "two")

    execution = begun(before)
    asked(execution)
    execution.deliver("0", result())
    asked(execution)
    record = execution.record

    async def other_arguments(ctx: WorkflowContext) -> None:
        await ctx.tool(step, "uno")

    async def other_step(ctx: WorkflowContext) -> None:
        await ctx.tool(step, "one")
        await ctx.sleep(5)

    async def gone(ctx: WorkflowContext) -> None:
        await ctx.tool(step, "one")

    for code, said in (
        (other_arguments, r'step 0 is step with .*"one".*, and the code asks for step with .*"uno"'),
        (other_step, r'step 1 is step with .*"two".*, and the code asks for sleep with .*5'),
        (gone, r'step 1 is step with .*"two".*, which is under way, and the code does not ask for it'),
    ):
        with pytest.raises(WorkflowDiverged, match=said):
            begun(code, copy(record))


def test_a_result_the_code_does_not_wait_for_is_a_divergence() -> None:
    """Code that skips a step that the record has a result of gets an error that says so."""

    async def before(ctx: WorkflowContext) -> None:
        await ctx.gather(ctx.tool(step, "a"), ctx.tool(step, "b"))

    async def after(ctx: WorkflowContext) -> None:
        await ctx.gather(ctx.tool(step, "a"))

    execution = begun(before)
    asked(execution)
    execution.deliver("0.1.0", result())
    with pytest.raises(WorkflowDiverged, match=r"step 0\.1\.0 is step .* what it awaits there: 0\.0\.0 \(step\)"):
        begun(after, execution.record)


def test_patched_is_true_for_new_runs_and_false_for_those_that_were_here() -> None:
    """A run whose record goes on behind a patch keeps the old branch, for ever; one that comes there for the first
    time has the new one, for ever."""

    async def old(ctx: WorkflowContext) -> Any:
        await ctx.tool(step, "first")
        await ctx.tool(step, "old")
        return await ctx.tool(step, "last")

    async def new(ctx: WorkflowContext) -> Any:
        await ctx.tool(step, "first")
        await ctx.tool(step, "new" if await ctx.patched("better") else "old")
        return [await ctx.patched("better"), await ctx.tool(step, "last")]

    execution = begun(old)
    asked(execution)
    execution.deliver("0", result())
    asked(execution)  # "old" is asked for
    kept = begun(new, copy(execution.record))
    assert kept.taken() == [("patched:better", "patched", False)]
    kept.deliver("1", result())
    kept.deliver("2", result(1))
    assert kept.value == [False, 1]

    fresh = begun(new)
    asked(fresh)
    fresh.deliver("0", result())
    assert asked(fresh) == {"1": "new"}
    again = begun(new, copy(fresh.record))
    again.deliver("1", result())
    assert again.taken() == []


def test_a_failed_branch_lets_no_other_begin() -> None:
    """`gather` awaits the branches that are under way, begins no other, and raises the first error."""

    async def code(ctx: WorkflowContext) -> Any:
        try:
            await ctx.foreach(range(5), lambda number: ctx.tool(step, str(number)), limit=2)
        except StepFailed as failed:
            return failed.message, failed.details
        return None

    execution = begun(code)
    assert asked(execution) == {"0.0.0": "0", "0.1.0": "1"}
    execution.deliver("0.1.0", result("no", "error"))
    assert asked(execution) == {}
    assert not execution.is_over
    execution.deliver("0.0.0", result("too late", "timeout"))
    assert execution.value == ("no", {"path": "0.1.0", "step": "step", "outcome": "error", "status": ""})


def test_errors_can_be_results() -> None:
    """With `return_exceptions` every branch is run, and errors are among the results."""

    async def code(ctx: WorkflowContext) -> Any:
        found = await ctx.gather(ctx.tool(step, "a"), ctx.tool(step, "b"), return_exceptions=True)
        return [type(item).__name__ for item in found]

    execution = begun(code)
    asked(execution)
    execution.deliver("0.0.0", result("no", "error"))
    execution.deliver("0.1.0", result("late", "timeout"))
    assert execution.value == ["StepFailed", "StepTimeout"]
    assert issubclass(StepTimeout, StepFailed)


def test_a_retry_pauses_and_gives_up() -> None:
    """A step is done again after growing pauses, and its last error is raised."""

    async def code(ctx: WorkflowContext) -> Any:
        return await ctx.tool(step, "x", retry=Retry(attempts=3, backoff=1, factor=3))

    execution = begun(code)
    said = []
    while not execution.is_over:
        ((path, wanted),) = execution.new()
        said.append((path, wanted.tool, from_json(wanted.arguments).get("seconds")))
        execution.deliver(path, result() if wanted.tool == "sleep" else result("no", "error"))
    assert said == [("0", "step", None), ("1", "sleep", 1), ("2", "step", None), ("3", "sleep", 3), ("4", "step", None)]
    assert isinstance(execution.error, StepFailed)


def test_what_was_done_is_undone_in_reverse_order() -> None:
    """When the code fails, what was registered is undone, the last first; what fails of that is recorded."""

    async def code(ctx: WorkflowContext) -> None:
        for name in ("a", "b", "c"):
            await ctx.tool(step, name)
            ctx.on_failure(ctx.tool, step, f"undo {name}")
        raise ValueError("out of stock")

    execution = begun(code)
    order = []
    while not execution.is_over:
        for path, name in asked(execution).items():
            order.append(name)
            execution.deliver(path, result("no", "error") if name == "undo b" else result())
    assert order == ["a", "b", "c", "undo c", "undo b", "undo a"]
    assert str(execution.error) == "out of stock"
    assert [(name, value) for _, name, value in execution.taken()] == [("undo_failed", "StepFailed: no")]


def test_asyncio_has_no_place_in_a_workflow() -> None:
    """What is awaited that is no step raises an error that says what to use; the code may catch it and go on."""

    async def code(ctx: WorkflowContext) -> str:
        try:
            await asyncio.sleep(0)
        except WorkflowError as error:
            return error.message
        return ""

    assert "ctx.sleep" in begun(code).value


def test_steps_refuse_what_they_can_not_do() -> None:
    """Wrong arguments raise where they are written, and nothing is asked for."""

    async def code(ctx: WorkflowContext) -> list[str]:
        wrong: list[Callable[[], Any]] = [
            lambda: ctx.tool(step),
            lambda: ctx.tool(print, "x"),
            lambda: ctx.tool("bash", "ls"),
            lambda: ctx.agent(3, "x"),
            lambda: ctx.agent("a", " "),
            lambda: ctx.model("m", ""),
            lambda: ctx.workflow(step, "x"),
            lambda: ctx.sleep(-1),
            lambda: ctx.until("tomorrow"),  # type: ignore[arg-type]
            lambda: ctx.ask(""),
            lambda: ctx.event("no name"),
            lambda: ctx.gather(limit=0),
        ]
        found = []
        for each in wrong:
            try:
                await each()
            except InvalidInput as error:
                found.append(error.message)
        return found

    execution = begun(code)
    assert execution.is_over
    assert execution.error is None
    assert len(execution.value) == 12
    assert execution.new() == []


def test_nothing_is_left_behind() -> None:
    """Code that is let go of runs its `finally`, and warns of nothing that it had not begun."""
    left = []

    async def code(ctx: WorkflowContext) -> None:
        async def one(name: str) -> None:
            try:
                await ctx.tool(step, name)
            finally:
                left.append(name)

        await ctx.gather(one("a"), one("b"), one("c"), limit=1)

    execution = begun(code)
    execution.close()
    execution.close()
    assert left == ["a"]


def test_a_snapshot_is_what_the_log_has_and_does_not_grow() -> None:
    """A snapshot says what it said when it was made, whatever the code does before it is sent, and what is read of the
    log is equal to it: a process that made it goes on with the code that it has."""
    known = Record({"0": ("act", "{}")}, [("0", Result("ok", "1"))] * SNAPSHOT_STEPS, {"1": ("now", 1.5)})
    made = Recorded(known, {"x": 1}, 0).snapshot()
    assert made is not None
    before = from_json(to_json(made.extra))
    known.asked["2"] = known.asked["0"]
    known.taken["3"] = ("now", 2.5)
    assert made.extra == before


def test_a_set_is_the_same_arguments_in_any_process() -> None:
    """A set's order differs between processes; in a step's arguments it has one order."""

    async def code(ctx: WorkflowContext) -> None:
        await ctx.tool(step, {"pear", "apple", "fig"})  # type: ignore[arg-type]

    ((_, wanted),) = begun(code).new()
    assert wanted.arguments == '{"name": ["apple", "fig", "pear"]}'


def test_time_outs_that_are_none_are_refused() -> None:
    """A time that no clock can have raises where it is written."""

    async def code(ctx: WorkflowContext) -> int:
        refused = 0
        for seconds in (float("inf"), float("nan"), 0, -1, 1e14):
            for begin in (ctx.ask, ctx.event):
                try:
                    await begin("x", timeout=seconds)
                except InvalidInput:
                    refused += 1
        return refused

    assert begun(code).value == 10


def test_a_value_that_is_none_is_undone() -> None:
    """What can't be returned fails the workflow as an error of its code does: what was done is undone."""

    async def code(ctx: WorkflowContext) -> object:
        ctx.on_failure(ctx.tool, step, "undo")
        return object()

    execution = begun(code)
    assert asked(execution) == {"0": "undo"}
    execution.deliver("0", result())
    assert "JSON" in str(execution.error)
