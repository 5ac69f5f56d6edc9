"""Workflow definitions, whatever they are: what the builder makes is right and stays the same in every form, nothing
makes the checker raise, and its JSON Schema says what it says."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.actors.output import validator_of
from understudy.workflow_definition import builder as w
from understudy.workflow_definition.checking import definition_problems, read_definition, to_data
from understudy.workflow_definition.json_schema import json_schema
from understudy.workflow_definition.problems import Problems
from understudy.workflow_definition.reference import meanings
from understudy.workflow_definition.shape import look
from understudy.workflow_definition.steps import KINDS, Definition, Part, Retry, Step
from understudy.workflow_definition.text import FORMS, read_text, written

FILES = Path(__file__).parents[1] / "workflows"

GOOD = [
    read_text(path.read_text(encoding="utf-8"), FORMS[path.suffix]).data for path in sorted((FILES / "good").iterdir())
]

SCHEMA = json_schema()

VALIDATOR = validator_of(SCHEMA)

WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="{}\x00"), min_size=1, max_size=12)
NAMES = st.from_regex(r"[A-Za-z0-9._-]{1,12}", fullmatch=True)
DURATIONS = st.sampled_from([1, 0.5, "5s", "1h30m", "2d"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
SCHEMAS = st.sampled_from([{"type": "string"}, {"type": "object", "properties": {"n": {"type": "integer"}}}, {}])


class Drawn:
    """Draws a definition in which every variable is defined where it is used."""

    def __init__(self, draw: Any) -> None:
        self._draw = draw
        self._ids = 0

    def steps(self, visible: list[str], depth: int) -> list[Step]:
        """Steps one after the other; their ids are visible behind them."""
        return [self.step(visible, depth) for _ in range(self._draw(st.integers(1, 3)))]

    def text(self, visible: list[str]) -> str:
        """A text with templates."""
        pieces = WORDS | st.sampled_from(visible).map(lambda name: f"{{{{ {name} }}}}") if visible else WORDS
        return "".join(self._draw(st.lists(pieces, min_size=1, max_size=3)))

    def condition(self, visible: list[str]) -> str:
        """A condition."""
        names = st.sampled_from([*visible, "'x'", "null", "1"])
        one, two = self._draw(names), self._draw(names)
        return self._draw(st.sampled_from([one, f"{one} == {two}", f"not ({one} in [{two}, 1]) or {one}"]))

    def step(self, visible: list[str], depth: int) -> Step:
        """A step of any kind, with any options."""
        draw = self._draw
        kind = draw(st.sampled_from(KINDS if depth else ("agent", "tool", "model", "wait", "ask")))
        options: dict[str, Any] = {}
        if draw(st.booleans()):
            options["when"] = self.condition(visible)
        if draw(st.booleans()):
            options["timeout"] = draw(DURATIONS)
        if draw(st.booleans()):
            options["retry"] = Retry(draw(st.integers(1, 9)), draw(DURATIONS))
        if depth and draw(st.integers(0, 4)) == 0:
            options["fallback"] = self.step([*visible, "error"], depth - 1)
        options["on_error"] = "fail"
        if depth and draw(st.integers(0, 4)) == 0:
            options["on_error"] = self.step([*visible, "error"], depth - 1)
        if kind in ("agent", "tool", "model") and draw(st.booleans()):
            options["output_schema"] = draw(SCHEMAS)
        if kind in ("parallel", "foreach") and draw(st.booleans()):
            options["max_concurrency"] = draw(st.integers(1, 9))
        made: list[str] = []
        step = getattr(self, kind)(visible, made, depth - 1, options)
        if draw(st.booleans()):
            self._ids += 1
            made.append(f"s{self._ids}")
            step = msgspec.structs.replace(step, id=made[-1])
        visible += made
        return step

    def agent(self, visible: list[str], _made: list[str], _depth: int, options: Any) -> Step:
        return w.agent(self._draw(NAMES), self.text(visible), **options)

    def tool(self, visible: list[str], _made: list[str], _depth: int, options: Any) -> Step:
        return w.tool("mine:tool", {self._draw(WORDS): [self._draw(JSON), self.text(visible)]}, **options)

    def model(self, visible: list[str], _made: list[str], _depth: int, options: Any) -> Step:
        return w.model(self.text(visible), model="gpt-4o", instructions=self.text(visible), **options)

    def ask(self, visible: list[str], _made: list[str], _depth: int, options: Any) -> Step:
        return w.ask(self.text(visible), **options)

    def wait(self, visible: list[str], _made: list[str], _depth: int, options: Any) -> Step:
        alone = [f"{{{{{name}}}}}" for name in visible]
        kind = self._draw(st.sampled_from(["seconds", "until", "event"]))
        if kind == "seconds":
            return w.wait(self._draw(DURATIONS | st.sampled_from(alone) if alone else DURATIONS), **options)
        if kind == "until":
            return w.wait(until=self._draw(st.sampled_from(["2026-12-24T18:00:00+01:00", *alone])), **options)
        return w.wait(event=self._draw(NAMES), **options)

    def sequence(self, visible: list[str], made: list[str], depth: int, options: Any) -> Step:
        inner = [*visible]
        steps = self.steps(inner, depth)
        made += inner[len(visible) :]
        return w.sequence(*steps, **options)

    def parallel(self, visible: list[str], made: list[str], depth: int, options: Any) -> Step:
        steps = []
        for _ in range(self._draw(st.integers(1, 3))):
            inner = [*visible]
            steps.append(self.step(inner, depth))
            made += inner[len(visible) :]
        return w.parallel(*steps, **options)

    def foreach(self, visible: list[str], _made: list[str], depth: int, options: Any) -> Step:
        self._ids += 1
        name = self._draw(st.sampled_from(["item", f"v{self._ids}"]))
        items = [self._draw(JSON), self.text(visible)]
        return w.foreach(items, self.step([*visible, name, "index"], depth), as_=name, **options)

    def branch(self, visible: list[str], _made: list[str], depth: int, options: Any) -> Step:
        cases = [(self.condition(visible), self.step([*visible], depth)) for _ in range(self._draw(st.integers(1, 2)))]
        otherwise = self.step([*visible], depth) if self._draw(st.booleans()) else msgspec.UNSET
        return w.branch(*cases, otherwise=otherwise, **options)

    def loop(self, visible: list[str], _made: list[str], depth: int, options: Any) -> Step:
        inner = [*visible, "index", "last"]
        step = self.step(inner, depth)
        return w.loop(step, max=self._draw(st.integers(1, 9)), until=self.condition(inner), **options)


@st.composite
def definitions(draw: Any) -> Definition:
    """Definitions as the builder makes them."""
    drawn = Drawn(draw)
    inputs = {"i1": draw(SCHEMAS), "i2": {"type": "integer", "default": 3}}
    visible = [*inputs]
    steps = drawn.steps(visible, 3)
    output = draw(st.sampled_from([msgspec.UNSET, {"all": [f"{{{{{name}}}}}" for name in visible]}]))
    return w.define(draw(NAMES), *steps, inputs=inputs, output=output, description=draw(WORDS), tools=["mine:tool"])


@given(definitions())
def test_what_the_builder_makes_is_right_in_every_form(definition: Definition) -> None:
    """Given any definition that the builder makes, then it has no problem, fits the JSON Schema, and is the same one
    when it is written and read again, as JSON and as YAML."""
    data = to_data(definition)
    assert definition_problems(data) == []
    assert list(VALIDATOR.iter_errors(data)) == []
    for form in ("JSON", "YAML"):
        read = read_text(written(definition, form), form)
        assert (read.twice, read_definition(read.data)) == ((), definition)


FIELDS = sorted({name for part in Part.__subclasses__() for name in meanings(part)})
PIECES = st.sampled_from(
    ["{{a}}", "{{", "a == ", "and", "fail", "5m", "item", "{{item.0}}", "$ref", "#", "type", "object", "pattern", "("]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | PIECES | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS) | PIECES, inner, max_size=4),
    max_leaves=20,
)


@st.composite
def damaged(draw: Any, values: Any) -> Any:
    """A good definition with a few parts replaced, removed or added."""
    data = copy.deepcopy(draw(st.sampled_from(GOOD)))
    for _ in range(draw(st.integers(0, 4))):
        at: Any = data
        while True:
            names = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not names:
                break
            name = draw(st.sampled_from(names))
            if isinstance(at[name], dict | list) and draw(st.integers(0, 5)):
                at = at[name]
                continue
            match draw(st.sampled_from(["replace", "remove", "add"])):
                case "replace":
                    at[name] = draw(values)
                case "remove":
                    del at[name]
                case _ if isinstance(at, dict):
                    at[draw(st.sampled_from(FIELDS))] = draw(values)
            break
    return data


@given(damaged(VALUES) | VALUES)
def test_nothing_makes_the_checker_raise(data: Any) -> None:
    """Given any data, then every problem is told; without any, it is a definition, and it has a text."""
    problems = definition_problems(data)
    assert all(item["field"] and item["problem"] for item in problems)
    if not problems:
        definition = read_definition(data)
        assert read_definition(read_text(written(definition, "YAML"), "YAML").data) == definition


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats(-3, 9) | PIECES | st.just(""),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
    max_leaves=8,
)


@given(damaged(PLAIN) | PLAIN)
def test_the_json_schema_says_what_the_checker_says(data: Any) -> None:
    """Given any data, then the JSON Schema takes it if, and only if, the checker finds its fields and types right; so
    does what makes a definition of it, which does not know of fields that exclude each other."""
    problems = Problems()
    look(data, problems)
    told = problems.told(())
    assert (told == []) is VALIDATOR.is_valid(data), told
    try:
        msgspec.convert(data, Definition)
    except msgspec.ValidationError:
        assert told != []


def test_the_json_schema_explains_every_field() -> None:
    """Given the JSON Schema, then each part and field says what it is for, and it is one that editors can use."""
    validator_of(SCHEMA).check_schema(SCHEMA)
    assert SCHEMA["$ref"] == "#/$defs/Definition"
    for name, part in SCHEMA["$defs"].items():
        assert part["description"], name
        assert all(field["description"] for field in part["properties"].values()), name
    assert SCHEMA["$defs"]["Foreach"]["properties"].keys() == {"items", "do", "as"}
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA


def test_the_checker_notices_each_way_of_damage() -> None:
    """Given good definitions, then each field that is needed is missed when it is gone, and none that is not."""
    needed = {"name", "steps"}
    for good in GOOD:
        for name in good:
            rest = {other: value for other, value in good.items() if other != name}
            told = [item["field"] for item in definition_problems(rest)]
            assert (name in told) is (name in needed), name


def test_the_builder_tells_all_problems() -> None:
    """Given steps with mistakes, then the error has all of them, with their places."""
    with pytest.raises(Exception, match="3 problems") as raised:
        w.define("n", w.ask("{{who}}"), w.loop(w.ask("q"), max=0), w.wait())
    problems = raised.value.details["problems"]
    assert [item["field"] for item in problems] == ["steps[0].ask.question", "steps[1].loop.max", "steps[2].wait"]
