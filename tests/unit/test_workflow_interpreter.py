"""Workflow definitions as they are done: on the context that functions have, and its execution, without an engine."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from understudy.actors.awaited import Record, Result
from understudy.actors.replay import Execution
from understudy.actors.workflow_context import WorkflowContext
from understudy.actors.workflow_inputs import checked_inputs
from understudy.actors.workflow_interpreter import interpret
from understudy.errors import InvalidInput, StepFailed, StepLimit, UnderstudyError, WorkflowError
from understudy.json_text import from_json, to_json
from understudy.workflow_definition import builder as w
from understudy.workflow_definition.steps import Definition, Retry, Step
from understudy.workflows import TIMEOUT_STEP

from ..definitions import definitions

TIMED = ("ask", "event")

Answer = Callable[[str, dict[str, Any]], Any]


class Fails(Exception):
    """What an answer raises if its step shall fail."""

    def __init__(self, text: str = "no", outcome: str = "error") -> None:
        super().__init__(text)
        self.outcome = outcome


class Doing:
    """A definition that is done, by answers.

    Attributes:
        asked: the steps that it came to, and their arguments.
        most: steps that were under way at once.
        execution: of its code.
    """

    def __init__(
        self, definition: Definition, inputs: dict[str, Any] | None = None, most_steps: int | None = None
    ) -> None:
        self._definition, self._inputs, self._most_steps = definition, inputs or {}, most_steps
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.most = 0

    def begun(self, record: Record) -> Execution:
        async def code(context: WorkflowContext) -> Any:
            return await interpret(context, self._definition, self._inputs, self._most_steps)

        execution = Execution(WorkflowContext("s", "r").whole(code, {}), record)
        execution.replay()
        return execution

    def done(self, answer: Answer, pick: Callable[[list[str]], str] = min, *, replays: bool = False) -> Any:
        """Its result.

        Args:
            answer: of a step, by its name and arguments.
            pick: which step ends next.
            replays: begin again from the record behind each step.
        """
        self.execution = execution = self.begun(Record())
        while not execution.is_over:
            new = execution.new()
            self.asked += [(wanted.tool, from_json(wanted.arguments)) for _, wanted in new]
            self.most = max(self.most, len(execution.waiting))
            if replays:
                record = execution.record
                self.execution = execution = self.begun(
                    Record(dict(record.asked), list(record.results), dict(record.taken))
                )
                assert not execution.new()
            path = pick(sorted(execution.waiting | execution.dropped))
            execution.deliver(path, _result(*execution.record.asked[path], answer))
        if execution.error is not None:
            raise execution.error
        return execution.value


def _result(tool: str, arguments: str, answer: Answer) -> Result:
    try:
        value = answer(tool, from_json(arguments))
    except Fails as failed:
        return Result(failed.outcome, str(failed))
    return Result("ok", str(value) if tool == "ask" else to_json(value))


def run(*steps: Step, answer: Answer = lambda name, arguments: arguments, given: Any = None, **fields: Any) -> Any:
    """What steps lead to."""
    return Doing(w.define("n", *steps, **fields), given).done(answer)


def test_a_panel_of_reviewers() -> None:
    """Given a definition with most kinds of steps, then each is asked for what its templates are, and the result is
    that of its output."""
    severe = {"type": "object", "properties": {"severe": {"type": "boolean"}}}
    definition = w.define(
        "review",
        w.tool("split", {"path": "{{path}}", "deep": {"n": ["{{depth}}", 1]}}, id="parts"),
        w.foreach(
            "{{parts}}",
            w.agent("reviewer", "Review {{part}} ({{index}}) of {{parts}}", output_schema=severe),
            as_="part", id="found", max_concurrency=2,
        ),
        w.ask("Publish {{found.*.severe}}?", "yes", "no", when="true in found.*.severe", timeout="1h", id="said"),
        w.branch(
            ("said == 'no'", w.tool("discard")),
            ("said == 'yes'", w.model("Sum up {{found.0}}", model="m", instructions="Be brief.")), id="end",
        ),
        inputs={"path": {"type": "string"}, "depth": {"type": "integer", "default": 3}},
        output={"end": "{{end}}", "all": "{{found}}", "n": "{{parts.1}}!"},
    )  # fmt: skip

    def answer(name: str, arguments: dict[str, Any]) -> Any:
        given = {"split": ["a", "b", "c"], "ask": "yes", "model": "the sum"}
        return given[name] if name in given else {"severe": " b " in arguments["task"]}

    doing = Doing(definition, {"path": "src"})
    assert doing.done(answer, replays=True) == {
        "end": "the sum", "all": [{"severe": False}, {"severe": True}, {"severe": False}], "n": "b!",
    }  # fmt: skip
    assert doing.asked[0] == ("split", {"path": "src", "deep": {"n": [3, 1]}})
    assert doing.asked[1] == ("agent", {"agent": "reviewer", "task": 'Review a (0) of ["a","b","c"]'})
    assert doing.most == 2
    asked = {"prompt": "Publish [false,true,false]?", "options": ["yes", "no"], "timeout": 3600.0, "default": None}
    assert doing.asked[4] == ("ask", asked)
    assert doing.asked[5] == (
        "model", {"agent": "model", "task": 'Sum up {"severe":false}', "model": "m", "instructions": "Be brief."}
    )  # fmt: skip
    assert len(doing.asked) == 6


def test_results_that_nothing_has_led_to_are_null() -> None:
    """Given steps that are left out, then they and what is in them are null to what follows, as is an empty branch."""
    assert run(
        w.sequence(w.tool("t", id="inner"), id="left", when="false"),
        w.parallel(w.tool("t", {"x": 1}, id="one"), w.sequence(w.tool("t", id="two"), when="1 == 2"), id="both"),
        w.branch(("false", w.tool("t")), id="none"),
        output=["{{left}}", "{{inner}}", "{{one.x}}", "{{two}}", "{{both}}", "{{none}}"],
    ) == [None, None, 1, None, [{"x": 1}, None], None]


def test_the_last_step_has_the_result() -> None:
    """Given no output, then the result is that of the last step; a foreach over nothing has none of them."""
    assert run(w.tool("t", {"x": 1}), w.sequence(w.tool("t"), w.tool("t", {"x": 2}))) == {"x": 2}
    assert run(w.foreach([], w.tool("t"))) == []


def test_a_loop_ends_when_it_may_and_when_it_must() -> None:
    """Given a loop, then it sees its round and what the one before led to, and ends when its condition holds, or after
    so many rounds."""
    step = w.tool("t", {"round": "{{index}}", "before": "{{last}}"}, id="made")
    second = {"round": 1, "before": {"round": 0, "before": None}}
    assert run(w.loop(step, max=5, until="made.round == 1 and last.round == 1")) == second
    assert run(w.loop(step, max=2)) == second


def test_foreach_within_foreach() -> None:
    """Given lists of lists, then the inner item hides the outer one unless it has another name."""
    inner = w.foreach("{{row}}", w.tool("t", {"at": "{{row.0}} {{item}} {{index}}"}))
    found = run(w.foreach([["a", "b"], ["c"]], inner, as_="row"))
    assert [[one["at"] for one in row] for row in found] == [["a a 0", "a b 1"], ["c c 0"]]


def test_steps_that_fail_are_tried_again() -> None:
    """Given a retry, then a step that fails is tried as often, with longer and longer waits between."""
    tries: list[str] = []

    def answer(name: str, _arguments: dict[str, Any]) -> Any:
        tries.append(name)
        if name == "t" and tries.count("t") < 4:
            raise Fails
        return "done"

    doing = Doing(w.define("n", w.tool("t", retry=Retry(4, "2s", 3))))
    assert doing.done(answer, replays=True) == "done"
    assert [arguments.get("seconds") for _, arguments in doing.asked] == [None, 2.0, None, 3.0, None, 3.0, None]
    tries.clear()
    with pytest.raises(StepFailed):
        Doing(w.define("n", w.tool("t", retry=Retry(3)))).done(answer)


def failing(name: str, arguments: dict[str, Any]) -> Any:
    """Everything fails but the tool `good`."""
    if name != "good":
        raise Fails(f"{name} failed", "timeout" if name in ("ask", "event") else "error")
    return arguments


def test_what_is_done_about_failures() -> None:
    """Given steps that fail, then the workflow fails, or goes on with null, or with another step's result; a step that
    gets the failure is done before, and its result is not the step's."""
    with pytest.raises(StepFailed, match="bad failed"):
        run(w.tool("bad"), answer=failing)
    error = {"code": "{{error.code}}", "why": "{{error.message}}"}
    definition = w.define(
        "n",
        w.tool("bad", on_error="continue", id="a"),
        w.ask("q", timeout=5, fallback=w.tool("good", error), id="b"),
        w.tool("bad", fallback=w.tool("bad"), on_error=w.tool("good", {**error, "handler": True}), id="c"),
        w.sequence(
            w.tool("good", {"x": 1}, id="d"), w.tool("bad", id="e"), w.tool("good"), on_error="continue", id="f"
        ),
        output=["{{a}}", "{{b}}", "{{c}}", "{{d}}", "{{e}}", "{{f}}"],
    )
    doing = Doing(definition)
    assert doing.done(failing, replays=True) == [
        None, {"code": "step_timeout", "why": "ask failed"}, None, {"x": 1}, None, None,
    ]  # fmt: skip
    assert ("good", {"code": "step_failed", "why": "bad failed", "handler": True}) in doing.asked
    with pytest.raises(StepFailed, match="bad failed"):
        run(w.tool("other", on_error=w.tool("bad")), answer=failing)
    with pytest.raises(StepFailed, match="worse failed"):
        run(w.tool("bad", fallback=w.tool("worse")), answer=failing)


def test_steps_that_are_out_of_time() -> None:
    """Given steps of every kind with a time that is over, then what they are at is ended and they have failed, as any
    other: they are tried again, then replaced, or left; one that is in time has its result."""
    never = w.tool("good", {"never": True})
    late: dict[str, Any] = {"timeout": "1m", "on_error": "continue"}
    slow = [
        w.tool("good", {"never": True}, **late), w.agent("a", "never", **late), w.model("never", **late),
        w.sequence(w.tool("good"), never, **late), w.parallel(never, never, **late), w.foreach([1, 2], never, **late),
        w.branch(("true", never), **late), w.loop(never, max=2, **late), w.ask("never", **late),
        w.wait(event="never", **late),
        w.tool("good", {"never": True}, timeout=5, retry=Retry(2), fallback=w.tool("good", {"why": "{{error.code}}"})),
    ]  # fmt: skip
    fast = w.tool("good", {"x": 1}, timeout=5, id="fast")
    doing = Doing(w.define("n", fast, *slow, w.tool("good", {"x": "{{fast.x}}"}, timeout=5), w.tool("good", {"x": 2})))

    def pick(paths: list[str]) -> str:
        """What is given up, or does not take for ever; a timer if there is nothing else."""
        asked, dropped = doing.execution.record.asked, doing.execution.dropped
        ends = [path for path in paths if path in dropped or asked[path][0] in TIMED or "never" not in asked[path][1]]
        return min(ends, key=lambda path: (asked[path][0] == TIMEOUT_STEP, path))

    def answer(name: str, arguments: dict[str, Any]) -> Any:
        return failing(name, arguments) if name in TIMED else arguments

    assert doing.done(answer, pick, replays=True) == {"x": 2}
    assert ("good", {"why": "step_timeout"}) in doing.asked
    assert ("good", {"x": 1}) in doing.asked
    assert Counter(name for name, _ in doing.asked if name not in ("good", "a")) == {
        TIMEOUT_STEP: 12, "agent": 1, "model": 1, "ask": 1, "event": 1, "sleep": 1,
    }  # fmt: skip


def test_what_was_done_is_undone_if_the_workflow_fails() -> None:
    """Given steps with an undo, when the workflow fails, then those that were done are undone, the last first, each
    with its result, though it failed of too many steps, and one of these fails; else nothing is."""

    def booked(name: str, **more: Any) -> Step:
        return w.tool("good", {"book": name}, id=name, undo=w.tool("good", {"undo": f"{{{{{name}.book}}}}"}), **more)

    steps = (
        booked("a"), booked("b", when="false"), w.parallel(booked("c"), booked("d")),
        w.tool("bad", undo=w.tool("good", {"undo": "never"}), on_error="continue"),
        w.tool("good", undo=w.tool("bad")),
    )  # fmt: skip
    fine = Doing(w.define("n", *steps))
    fine.done(failing, replays=True)
    assert [said for _, said in fine.asked if "undo" in said] == []
    for last, most in ((w.tool("bad"), None), (w.loop(w.tool("good"), max=100), 20)):
        doing = Doing(w.define("n", *steps, last), most_steps=most)
        with pytest.raises(StepFailed if most is None else StepLimit):
            doing.done(failing, replays=True)
        assert [said["undo"] for _, said in doing.asked if "undo" in said] == ["d", "c", "a"]


def test_what_is_undone_has_a_limit_of_its_own() -> None:
    """Given many steps whose undos are loops, when the workflow fails, then all of these together come to as many
    steps as a run may, and not each of them."""
    undone = w.loop(w.tool("good", {"undo": 1}), max=10)
    steps = (w.foreach([*range(9)], w.tool("good", undo=undone)), w.tool("bad"))
    doing = Doing(w.define("n", *steps), most_steps=20)
    with pytest.raises(StepFailed):
        doing.done(failing, replays=True)
    assert 10 <= len([said for _, said in doing.asked if "undo" in said]) <= 20


def test_what_has_no_value_fails_its_step() -> None:
    """Given templates and conditions that have no value then, or one that can't be used, the step fails, says where,
    is not tried again, and what is to be done about failures is done."""
    for step, why in [
        (w.tool("t", {"x": ["{{a.gone}}"]}), r"steps\[1\]\.tool\.arguments: a\.gone leads to nothing"),
        (w.ask("q", when="a < 1"), r"steps\[1\]\.when: an object < a number"),
        (w.foreach("{{a}}", w.ask("q")), r"steps\[1\]\.foreach\.items is no list"),
        (w.wait("{{a}}"), r"steps\[1\]\.wait\.seconds is .* which is no time"),
        (w.wait("{{a.x}}"), r"steps\[1\]\.wait\.seconds: is 0, and must be more than 0"),
        (w.wait(until="{{a.x}}"), r"steps\[1\]\.wait\.until: '0' is no time with a zone"),
        (w.wait(event="no {{a.x}}"), r"steps\[1\]: the name of an event"),
        (w.agent("a", "{{a.empty}}"), r"steps\[1\]: the task for agent 'a' must be a text"),
        (w.tool("t", {"retry": 1}), r"steps\[1\]\.tool: a workflow can't give the argument 'retry'"),
        (w.loop(w.ask("q"), max=2, until="last < 3"), r"steps\[1\]\.loop\.until: a text < a number"),
    ]:
        first = w.tool("t", {"x": 0, "empty": ""}, id="a")
        with pytest.raises(WorkflowError, match=why):
            run(first, step)
        again = {"retry": Retry(5), "on_error": "continue", "id": "b"}
        assert run(first, w.sequence(step, **again), output=["{{b}}"]) == [None]


def test_results_that_do_not_fit() -> None:
    """Given a tool whose result does not fit its schema, then that is a failure like any other; agents and models are
    asked for what fits."""
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    fails = w.tool("t", {"x": "1"}, output_schema=schema)
    with pytest.raises(StepFailed, match=r"result of t does not fit the output_schema at steps\[0\]\.tool: \$\.x"):
        run(fails)
    assert run(w.tool("t", {"x": 1}, output_schema=schema)) == {"x": 1}


def test_waits() -> None:
    """Given waits, then each asks for what it says: a time, a moment, a signal."""
    doing = Doing(
        w.define(
            "n", w.wait("1m"), w.wait("{{a}}"), w.wait(until="2026-12-24T18:00:00+01:00"),
            w.wait(event="paid-{{a}}", timeout=9, id="paid"), inputs={"a": {}}, output="{{paid.sum}}",
        ),
        {"a": 2},
    )  # fmt: skip
    assert doing.done(lambda name, _: {"sum": 5} if name == "event" else None) == 5
    assert [arguments for _, arguments in doing.asked] == [
        {"seconds": 60.0}, {"seconds": 2}, {"until": "2026-12-24T17:00:00+00:00"}, {"name": "paid-2", "seconds": 9.0},
    ]  # fmt: skip


def test_inputs_are_checked() -> None:
    """Given inputs, then all that is wrong with them is reported; what is left out is as by default."""
    definition = w.define(
        "n", w.ask("q"), inputs={"path": {"type": "string"}, "depth": {"type": "integer", "default": 2}}
    )
    assert checked_inputs(definition, {"path": "x"}) == {"path": "x", "depth": 2}
    with pytest.raises(InvalidInput) as raised:
        checked_inputs(definition, {"pth": 1, "depth": "deep"})
    assert [(item["field"], item["problem"]) for item in raised.value.details["problems"]] == [
        ("depth", "$: 'deep' is not of type 'integer'"),
        ("path", "is missing"),
        ("pth", "there is no such input (did you mean 'path'?); there are: path, depth"),
    ]
    with pytest.raises(InvalidInput, match="there is none"):
        checked_inputs(w.define("n", w.ask("q")), {"x": 1})


VALUES = st.sampled_from([None, "text", 3, [], ["a", "b"], {"n": 1}, True, Fails(), Fails("late", "timeout")])


MOST_STEPS = 60
"""Of a drawn definition's run: it is run from its record again behind each."""


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much])
@given(definitions(), st.randoms(use_true_random=False), st.lists(VALUES, min_size=1, max_size=5))
def test_any_definition_does_the_same_again(definition: Definition, order: random.Random, values: list[Any]) -> None:
    """Given any definition, and whatever its steps lead to, in whatever order, then it ends with a result or with an
    error of ours; a run that is begun again from its record behind each step asks for the same and ends the same."""

    def answer(_name: str, arguments: dict[str, Any]) -> Any:
        if next(answered) > MOST_STEPS:
            reject()
        value = values[len(to_json(arguments)) % len(values)]
        if isinstance(value, Fails):
            raise value
        return value

    def ended(*, replays: bool) -> tuple[Any, list[Any]]:
        nonlocal answered
        answered = itertools.count(1)
        doing, chosen = Doing(definition, {"i1": inputs}), random.Random(seed)
        try:
            return doing.done(answer, chosen.choice, replays=replays), doing.asked
        except UnderstudyError as error:
            return str(error), doing.asked

    answered = itertools.count(1)
    inputs = {} if definition.inputs["i1"].get("type") == "object" else "x"
    seed = order.random()
    assert ended(replays=False) == ended(replays=True)
