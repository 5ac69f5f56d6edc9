"""Workflow definitions, whatever they are: what the builder makes is right and stays the same in every form, nothing
makes the checker raise, and its JSON Schema says what it says."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
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
from understudy.workflow_definition.plain import with_names
from understudy.workflow_definition.problems import Problems
from understudy.workflow_definition.reference import meanings
from understudy.workflow_definition.shape import look
from understudy.workflow_definition.steps import Definition, Part, Retry, Step
from understudy.workflow_definition.text import FORMS, NoDefinition, read_text, written

from ..definitions import NAMES, definitions

FILES = Path(__file__).parents[1] / "workflows"

GOOD = [
    read_text(path.read_text(encoding="utf-8"), FORMS[path.suffix]).data for path in sorted((FILES / "good").iterdir())
]

SCHEMA = json_schema()

VALIDATOR = validator_of(SCHEMA)


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
    """Given any data, then every problem is reported; without any, it is a definition, and it has a text."""
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


ALL = w.Options(id="i", when="true", on_error="fail", retry=Retry(2, "5s", 6), fallback=w.tool("t"))

EACH_KIND: list[Step] = [
    w.agent("a", "t", output_schema={"type": "string"}, **ALL),
    w.model("p", model="m", instructions="i"),
    w.sequence(w.tool("t", {"x": 1}), on_error=w.tool("t")),
    w.parallel(w.tool("t"), max_concurrency=3),
    w.foreach([1], w.tool("t"), as_="one"),
    w.foreach("{{x}}", w.tool("t")),
    w.branch(("true", w.tool("t")), otherwise=w.tool("t")),
    w.loop(w.tool("t"), max=2, until="true"),
    w.wait(5),
    w.wait(event="e", timeout=3),
    w.wait(until="2026-12-24T18:00:00+01:00"),
    w.ask("q", "yes", timeout="5m"),
]
"""Steps in which each field is at least once."""


def agree(data: Any) -> bool:
    """Whether the JSON Schema takes data; the checker, which looks at its fields and types, must say the same, and
    what makes a definition of it must take it then."""
    problems = Problems()
    look(data, problems)
    found = problems.in_order(())
    assert (found == []) is VALIDATOR.is_valid(data), (data, found)
    if not found:
        msgspec.convert(data, Definition)
    return not found


@given(damaged(PLAIN) | PLAIN)
def test_the_json_schema_says_what_the_checker_says(data: Any) -> None:
    """Given any data, then the JSON Schema takes it if, and only if, the checker finds its fields and types right."""
    agree(data)


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every object and list in data, with each name or index that is in it."""
    for name, value in list(data.items() if isinstance(data, dict) else enumerate(data)):
        yield data, name
        if isinstance(value, dict | list):
            yield from places(value)


@pytest.mark.parametrize("step", EACH_KIND, ids=lambda step: step.kind)
def test_each_way_of_damage_is_seen_by_both(step: Step) -> None:
    """Given a step, and anything in it replaced, removed or added, then checker and JSON Schema say the same of it."""
    data = {"name": "n", "steps": [to_data(step)], "inputs": {"x": {}}, "output": 1, "description": "d", "format": 1}
    assert agree(data)
    others = [
        None,
        True,
        0,
        2,
        1.5,
        -1,
        "",
        "x",
        "x y",
        "fail",
        "5m",
        [],
        ["x"],
        [1],
        {},
        {"x": 1},
        to_data(w.ask("q")),
    ]
    taken = 0
    for at, name in list(places(data)):
        before = at[name]
        for other in others:
            at[name] = other
            taken += agree(data)
        at[name] = before
        if isinstance(at, dict):
            at[name + "s"] = before
            taken += agree(data)
            del at[name + "s"]
            del at[name]
            taken += agree(data)
            at[name] = before
    step_data = data["steps"][0]
    for field in {*FIELDS} - step_data.keys():
        for other in ({}, 3, "x", [to_data(w.ask("q"))], to_data(w.ask("q"))):
            step_data[field] = other
            taken += agree(data)
        del step_data[field]
    assert taken > 0


@pytest.mark.parametrize("path", sorted((FILES / "malformed").iterdir()), ids=lambda path: path.name)
def test_malformed_files_are_so_for_both(path: Path) -> None:
    """Given a malformed file, then the JSON Schema refuses it if its fields or types are wrong."""
    try:
        data = read_text(path.read_text(encoding="utf-8"), FORMS[path.suffix]).data
    except NoDefinition:
        return
    agree(with_names(data))


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
            fields = [item["field"] for item in definition_problems(rest)]
            assert (name in fields) is (name in needed), name


def test_the_builder_tells_all_problems() -> None:
    """Given steps with mistakes, then the error has all of them, with their places."""
    with pytest.raises(Exception, match="3 problems") as raised:
        w.define("n", w.ask("{{who}}"), w.loop(w.ask("q"), max=0), w.wait())
    problems = raised.value.details["problems"]
    assert [item["field"] for item in problems] == ["steps[0].ask.question", "steps[1].loop.max", "steps[2].wait"]
