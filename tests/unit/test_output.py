"""Answers that must fit a schema: what is read and repaired, and that nothing is accepted which was not said."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from datetime import date
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, field_validator

from understudy import AgentSpec
from understudy.actors.output import MAX_DEPTH, REASONS, Reader, Rejected, validator_of
from understudy.cluster.client.compiling import compile_spec
from understudy.cluster.client.output_schema import as_type, output_of
from understudy.errors import InvalidSpec, OutputInvalid
from understudy.manifest import changes
from understudy.testing.instances import smallest

from ..malformed import OPEN, ORDER, Case, cases


class Item(BaseModel):
    name: str
    count: int = 1


class Tree(BaseModel):
    value: int
    children: list[Tree]


@dataclasses.dataclass
class Point:
    x: float
    day: date


class Even(BaseModel):
    number: int

    @field_validator("number")
    @classmethod
    def _even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("must be even")
        return value


class Functions(BaseModel):
    name: str
    first: Callable[[], int]
    second: Callable[[int], int]


def output(kind: Any, **more: Any) -> dict[str, Any]:
    """What is compiled for an output type."""
    found = output_of(AgentSpec(name="a", output_type=kind, **more))
    assert found is not None
    return found


def reader(kind: Any) -> Reader:
    described = output(kind)
    return Reader(described["schema"], wrapped=described["wrapped"])


def verdict(case: Case) -> tuple[str, str]:
    """The reason why a text is not accepted, and the value that is, as JSON: `3` and `3.0` are not the same."""
    try:
        value = Reader(case.schema, wrapped=False).read(case.reply.text or "", cut=case.reply.finish_reason == "length")
    except Rejected as rejected:
        return (rejected.reason if rejected.problems else "(no problems)"), ""
    return "", json.dumps(value)


@pytest.mark.parametrize("seed", range(5))
def test_every_malformed_answer_has_its_verdict(seed: int) -> None:
    """Given 500 answers of all kinds whose truth is known, then each is accepted as that, or refused for its reason."""
    found = list(islice((case for case in cases(seed) if case.reason != "refused"), 500))
    wrong = [
        (case.kind, case.reply, got, case.reason, case.value)
        for case in found
        if (got := verdict(case)) != (case.reason, "" if case.reason else json.dumps(case.value))
    ]
    assert not wrong, wrong[0]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=8)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


def exact_schema(value: Any) -> dict[str, Any]:
    """A schema that allows just the shape of a value."""
    if isinstance(value, dict):
        properties = {name: exact_schema(item) for name, item in value.items()}
        return {"type": "object", "properties": properties, "required": [*value], "additionalProperties": False}
    if isinstance(value, list):
        items = [exact_schema(item) for item in value]
        same = all(item == items[0] for item in items)
        return {"type": "array", "maxItems": len(value), **({"items": items[0]} if items and same else {})}
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
    return {"type": kinds[type(value)]}


@given(st.dictionaries(st.text(max_size=4), JSON, max_size=4), st.data(), st.booleans(), st.booleans())
@settings(max_examples=400, deadline=None)
def test_what_was_cut_off_is_accepted_only_if_nothing_is_missing(
    value: dict[str, Any], data: Any, cut: bool, exact: bool
) -> None:  # fmt: skip
    """Given an answer's beginning, then it is refused, or all that it lacks is brackets: its value is the whole's."""
    text = json.dumps(value, ensure_ascii=data.draw(st.booleans()))
    beginning = text[: data.draw(st.integers(0, len(text)))]
    schema = exact_schema(value) if exact else {"type": "object"}
    try:
        found = Reader(schema, wrapped=False).read(beginning, cut=cut)
    except Rejected:
        return
    assert json.dumps(found) == json.dumps(value)
    if beginning != text:
        assert exact
        assert set(text[len(beginning) :]) <= set("]}")


@given(st.text(alphabet='{}[]":,0123aetrufalsn\\ \n', max_size=40) | st.text(max_size=40), st.booleans())
@settings(max_examples=600, deadline=None)
def test_any_text_has_a_verdict(text: str, cut: bool) -> None:
    """Given any text at all, then it is refused for a known reason, or what is accepted is in it and fits."""
    schema = {"type": "object", "maxProperties": 2}
    try:
        found = Reader(schema, wrapped=False).read(text, cut=cut)
    except Rejected as rejected:
        found, reason = None, rejected.reason
    else:
        reason = REASONS[0]
    assert reason in REASONS
    if found is None:
        return
    assert validator_of(schema).is_valid(found)
    start = text.index("{")
    assert json.JSONDecoder().raw_decode(text, start)[0] == found


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("date", "2024-02-29", "2023-02-29"),
        ("date", "2024-02-29", "20240229"),
        ("time", "10:30:00Z", "25:00:00"),
        ("date-time", "2024-02-29T10:30:00+01:00", "2024-02-29"),
        ("date-time", "2024-02-29T10:30:00.5Z", "tomorrow"),
        ("uuid", "00000000-0000-4000-8000-000000000000", "no-uuid"),
        ("ipv4", "10.0.0.1", "10.0.0.256"),
    ],
)
def test_formats_are_checked(name: str, good: str, bad: str) -> None:
    """Given a text of a format that types of Python's have, then one that is not written so is refused."""
    read = Reader({"type": "object", "properties": {"x": {"format": name}}}, wrapped=False).read
    assert read(json.dumps({"x": good})) == {"x": good}
    assert read('{"x": 3}') == {"x": 3}
    with pytest.raises(Rejected, match="schema"):
        read(json.dumps({"x": bad}))


def test_problems_are_reported_with_their_places_and_not_without_end() -> None:
    """Given many and long problems, then ten are reported, each with its place, shortened."""
    schema = {"type": "object", "additionalProperties": {"type": "integer"}}
    with pytest.raises(Rejected) as raised:
        Reader(schema, wrapped=False).read(json.dumps({f"k{number}": "x" * 1000 for number in range(30)}))
    assert len(raised.value.problems) == 11
    assert raised.value.problems[0].startswith("$.k0: 'xxx")
    assert raised.value.problems[-1] == "and 20 more"
    assert max(map(len, raised.value.problems)) < 350


def test_nesting_has_a_limit() -> None:
    """Given a value nested as deeply as allowed, or deeper, then it is accepted, or refused."""
    read = reader(Tree).read

    def tree(depth: int) -> str:
        return '{"value": 1, "children": [' * depth + "]}" * depth

    assert read(tree(MAX_DEPTH // 2))
    for depth in (MAX_DEPTH, 20_000):
        with pytest.raises(Rejected, match="inexact"):
            read(tree(depth))


# The driver's part.


@pytest.mark.parametrize(
    ("kind", "wrapped", "strict"),
    [
        (Item, False, False),  # a default makes a property one that may be left out
        (Tree, False, True),
        (Point, False, True),
        (list[Tree], True, True),
        (int | None, True, True),
        (dict[str, int], False, False),
        ({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}, False, False),
        ({"enum": ["yes", "no"], "title": "Yes or no?"}, True, True),
        (ORDER, False, True),
        (OPEN, False, False),
    ],
)
def test_schemas_are_made_of_types(kind: Any, wrapped: bool, strict: bool) -> None:
    """Given a model, a dataclass, an annotation or a schema, then the compiled schema is an object's, strict where
    OpenAI allows that, and its smallest instance can be read."""
    found = output(kind)
    assert (found["wrapped"], found["strict"], found["schema"]["type"]) == (wrapped, strict, "object")
    text = json.dumps(smallest(found["schema"]))
    assert as_type(reader(kind).read(text), kind, "s") is not Ellipsis
    assert set(found["name"]) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_-0123456789")


def test_own_schemas_stay_as_they_are() -> None:
    """Given a JSON Schema, then nothing is added to it; the schema of a type is closed, since its instances lose what
    the type does not have."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert output(schema)["schema"] == schema
    assert output(Item)["schema"]["additionalProperties"] is False


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Functions, ["first: ", "second: "]),
        ("Item", ["is a text"]),
        (5, ["no JSON Schema"]),
        ({"type": "strin", "properties": {"a": {"$ref": "#/$defs/b"}, "c": {"pattern": "("}}, "$id": "x"},
         ["$.type: 'strin'", "'#/$defs/b' leads to nothing", "the pattern '('", "$id is not supported"]),
        ({"type": "object", "properties": {"a": {"$ref": "https://example.org/schema"}}}, ["leads to nothing"]),
        ({"type": "array", "items": {"$ref": "#"}}, ["use $defs"]),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "type": "object"}, ["$schema"]),
        ({"const": float("nan")}, ["not JSON-compatible"]),
    ],
)  # fmt: skip
def test_unusable_types_are_refused_with_all_problems(kind: Any, expected: list[str]) -> None:
    """Given a type or a schema that can't be used, then compiling the agent names every problem."""
    with pytest.raises(InvalidSpec) as raised:
        compile_spec(AgentSpec(name="a", output_type=kind), model="offline", profile=None)
    problems = [item["problem"] for item in raised.value.details["problems"]]
    assert all(any(text in problem for problem in problems) for text in expected), problems
    assert len(problems) >= len(expected)


def test_what_contradicts_an_output_type_is_refused() -> None:
    """Given a response format among the parameters, or a tool of the answer's name, then both are refused."""
    with pytest.raises(InvalidSpec, match="response_format"):
        output(Item, parameters={"response_format": {"type": "json_object"}})

    def final_answer() -> str:
        return ""

    from understudy import tool

    with pytest.raises(InvalidSpec, match="final_answer"):
        compile_spec(AgentSpec(name="a", output_type=Item, tools=[tool(final_answer)]), model="offline", profile=None)


def test_an_output_becomes_an_instance() -> None:
    """Given data that fits the schema, then it is an instance of the type; where the type itself refuses it, the
    error has the data; a schema or no type leaves it as it is."""
    assert as_type({"name": "pen", "count": 2}, Item, "s") == Item(name="pen", count=2)
    assert as_type({"x": 1, "day": "2024-02-29"}, Point, "s") == Point(1.0, date(2024, 2, 29))
    assert as_type([1], list[int], "s") == [1]
    assert as_type({"name": "pen"}, {"type": "object"}, "s") == {"name": "pen"}
    assert as_type({"name": "pen"}, None, "s") == {"name": "pen"}
    with pytest.raises(OutputInvalid, match="must be even") as raised:
        as_type({"number": 3}, Even, "s")
    assert raised.value.details["output"] == {"number": 3}


def test_a_changed_output_type_is_a_change() -> None:
    """Given an agent whose output type came, went or changed, then the manifest says so; an equal one is none."""
    kinds = [None, Item, Tree]
    plain, item, tree = (
        compile_spec(AgentSpec(name="a", output_type=kind), model="offline", profile=None).spec for kind in kinds
    )
    again = compile_spec(AgentSpec(name="a", output_type=Item), model="offline", profile=None).spec
    assert [changes(plain, item), changes(item, plain), changes(item, tree)] == [("output",)] * 3
    assert changes(item, again) == ()
    assert item["hash"] == again["hash"] != tree["hash"]
