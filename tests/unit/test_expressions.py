"""Expressions of conditions and templates: what they mean, that mistakes are reported with their column, and that
nothing else can happen."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from understudy.durations import read_duration, seconds_of, time_of
from understudy.durations import written as written_duration
from understudy.workflow_definition.evaluation import NoValue, is_true, value_of, written
from understudy.workflow_definition.expressions import (
    EVERY,
    LONGEST_EXPRESSION,
    BadExpression,
    Path,
    parse,
    paths,
)
from understudy.workflow_definition.templates import parse_template, rendered, templates_in

VARIABLES: dict[str, Any] = {
    "found": [{"title": "a", "severe": False, "tags": ["x"]}, {"title": "b", "severe": True}],
    "count": 3, "name": "Ada", "yes": True, "nothing": None, "empty": [], "odd": {"my-key": {"0": "zero"}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("yes", True), ("nothing", False), ("empty", False), ("name", True), ("count", True), ("not empty", True),
        ("count == 3", True), ("count == 3.0", True), ("yes == 1", False), ("count != '3'", True), ("1 < count", True),
        ("count <= 2", False), ("'Ada' < 'Bob'", True), ("name in ['Ada', 'Bob']", True), ("'da' in name", True),
        ("name not in []", True), ("'my-key' in odd", True), ("found.0.title == 'a'", True),
        ("true in found.*.severe", True), ("found[1]['title'] == \"b\"", True), ('odd["my-key"].0 == "zero"', True),
        ("found.7.title == null", True), ("missing.at.all == null", True), ("yes and count == 3 or missing", True),
        ("not yes or not count", False), ("(yes or yes) and not (nothing or empty)", True), ("not not yes", True),
        ("found.*.tags == [['x'], null]", True), ("'it\\'s' == \"it's\"", True), ("'a\\nb' != 'a b'", True),
        ("-1 < 0 and 1e3 == 1000", True), ("[1, 2,] == [1, 2]", True), ("null in [null]", True), ("[] == empty", True),
        ("found.0 == found.0", True),
    ],
)  # fmt: skip
def test_what_conditions_mean(text: str, holds: bool) -> None:
    """Given a condition over some variables, then it holds or not; a path that leads to nothing is null in it."""
    assert is_true(parse(text), VARIABLES) is holds


@pytest.mark.parametrize(
    ("text", "column", "problem"),
    [
        ("", 1, "a value is missing"), ("count =", 7, "(write '==')"), ("a && b", 3, "(write 'and')"),
        ("a ||", 3, "(write 'or')"), ("!a", 1, "(write 'not')"), ("a === b", 3, "(write '==')"),
        ("a == None", 6, "(write 'null')"), ("a <> 1", 3, "(write '!=')"), ("1 < a < 3", 7, "`and` between"),
        ("(a", 3, "')' is missing"), ("a)", 2, "')' is not expected"), ("[1, 2", 6, "']' is missing"),
        ("a == 'b", 6, "no closing '"), ("len(a) > 1", 4, "no functions"), ("a + 1", 3, "no arithmetic"),
        ("a.my-key", 5, "hyphen"), ("a.", 2, "behind a dot"), ("a.__class__()", 12, "no functions"),
        ("a ['x']", 3, "directly behind"), ("a not b", 7, "`in` is missing"), ("'\\q' == a", 2, "no escape \\q"),
        ("{{a}} == 1", 1, "without braces"), ("a b", 3, "'b' is not expected"), ("and", 1, "is no value"),
        ("a == #", 6, "'#' can't be used"), ("lambda: 1", 7, "can't be used"),
        ("not " * 21 + "a", 81, "nested more than 20"), ("(" * 30, 21, "nested more than 20"),
        ("a" * 65, 1, "at most 64"), ("a or " * 300 + "a", 1001, "longer than 1000"),
        ("a.1234567890", 12, "is not expected"), ("a[b]", 2, "directly behind"), ("a == =", 6, "is no value"),
        ("a in", 5, "a value is missing"),
    ],
)  # fmt: skip
def test_mistakes_have_their_column(text: str, column: int, problem: str) -> None:
    """Given no expression, then it is said why and where, and how it is written here."""
    with pytest.raises(BadExpression) as raised:
        parse(text)
    assert (raised.value.column, problem in raised.value.problem) == (column, True), str(raised.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("name < 3", "a text < a number"), ("yes < yes", "true < true"), ("nothing > 1", "null > a number"),
        ("1 in 3", "a number in a number"), ("name in nothing", "a text in null"), ("found < found", "a list < a list"),
    ],
)  # fmt: skip
def test_what_has_no_value(text: str, problem: str) -> None:
    """Given two values that have no order, or nothing in them, then nothing is guessed."""
    with pytest.raises(NoValue, match=problem):
        is_true(parse(text), VARIABLES)


def test_paths_reach_nothing_but_data() -> None:
    """Given an object of Python's in a variable, then no attribute of it can be read."""

    class Secret:
        key = "s3cret"

    assert not is_true(parse("a.key == 's3cret' or a.__class__ or a.0"), {"a": Secret()})
    with pytest.raises(NoValue, match=r"a\.key leads to nothing"):
        value_of(parse("a.key"), {"a": Secret()})


def test_what_is_read_is_known() -> None:
    """Given an expression, then all variables in it are listed, with their parts and columns."""
    found = list(paths(parse("a.b[0] == 'x' and not (c in [d.*, 1])")))
    assert found == [Path("a", ("b", 0), 1), Path("c", (), 24), Path("d", (EVERY,), 30)]
    assert written(Path("a", ("b", 0, EVERY, "x y"), 1)) == "a.b.0.*['x y']"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{{count}}", 3), ("{{ found.*.title }}", ["a", "b"]), ("n={{count}}", "n=3"), ("{{name}}{{name}}", "AdaAda"),
        ("{{count == 3}}", True), ("is {{yes}}, {{nothing}}", "is true, null"),
        ("{{found.0}}!", '{"title":"a","severe":false,"tags":["x"]}!'), ("plain } text }}", "plain } text }}"),
        ("{{'{{'}}x}}", "{{x}}"), ("", ""), ("{{'}}'}}", "}}"), (" {{count}}", " 3"),
    ],
)  # fmt: skip
def test_templates(text: str, value: Any) -> None:
    """Given a template, then one that is nothing but an expression is its value, and any other is a text."""
    assert rendered({"a": [text, 1]}, VARIABLES) == {"a": [value, 1]}


@pytest.mark.parametrize(
    ("text", "column", "problem"),
    [
        ("ab {{count", 11, "}} is missing"), ("{{}}", 3, "a value is missing"), ("{{a}", 4, "can't be used"),
        ("x {{a}} {{b c}}", 13, "'c' is not expected"), ("{{ {{a}} }}", 4, "without braces"),
        ("{{" + " " * 2000 + "a}}", 2003, "at most 1000"),
    ],
)  # fmt: skip
def test_mistakes_in_templates(text: str, column: int, problem: str) -> None:
    """Given a template that can't be read, then the column is that of the whole text."""
    with pytest.raises(BadExpression) as raised:
        parse_template(text)
    assert (raised.value.column, problem in raised.value.problem) == (column, True), str(raised.value)


def test_a_template_that_leads_to_nothing_has_no_value() -> None:
    """Given a path that leads to nothing, then a template has no value, unlike a condition."""
    with pytest.raises(NoValue, match=r"found\.9\.title leads to nothing"):
        rendered("{{found.9.title}}", VARIABLES)


def test_templates_are_found_wherever_they_are() -> None:
    """Given data with templates in it, then each is found with its place; names of fields have none."""
    found = list(templates_in({"a": ["{{x}}", {"{{n}}": "y {{z}}"}], "b": "no"}, ("at",)))
    assert found == [(("at", "a", 0), "{{x}}"), (("at", "a", 1, "{{n}}"), "y {{z}}")]


PIECES = st.sampled_from(
    ["a", "b", ".", "0", "*", "[", "]", "(", ")", "==", "<", "in", "not", "and", "or", "'x'", '"', "'", "\\", "{{",
     "}}", "1", "-1", "null", "true", ",", " ", "=", "!", "é", "\x00", "\n", "١"]
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text("ab"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab0"), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(PIECES, max_size=20).map("".join) | st.text(max_size=40), JSON, JSON)
@example("(" * LONGEST_EXPRESSION, None, None)
@example("a == b", [[[[]]]] * 3, [[[[]]]] * 3)
def test_nothing_else_can_happen(text: str, first: Any, second: Any) -> None:
    """Given any text and any values, then an expression has a value, or says why not, and a column of the text."""
    variables, column, why = {"a": first, "b": second}, 1, "none"
    try:
        assert is_true(parse(text), variables) in (True, False)
    except BadExpression as error:
        column = error.column
    except NoValue as error:
        why = str(error)
    try:
        rendered(text, variables)
    except (BadExpression, NoValue) as error:
        why += str(error)
    assert 1 <= column <= len(text) + 1
    assert why


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (1, 1),
        (0.5, 0.5),
        ("30s", 30),
        ("5m", 300),
        ("1h30m", 5400),
        ("2d", 172_800),
        ("1d1h1m1s", 90_061),
        ("090s", 90),
    ],
)
def test_durations(value: float | str, seconds: float) -> None:
    """Given a duration as it is written, then it has so many seconds."""
    assert seconds_of(value) == seconds


@pytest.mark.parametrize(
    "value", [0, -1, float("inf"), "", "5", "5 m", "1m1h", "1.5h", "0s", "m", "400d", "9" * 5000 + "s", "١s"]
)
def test_no_durations(value: float | str) -> None:
    """Given anything else, or no time at all, then it is refused."""
    with pytest.raises(ValueError, match=r"duration|must be more than 0"):
        seconds_of(value)


@pytest.mark.parametrize("text", ["1s", "5m", "1h30m", "2d", "8d1h", "0s"])
def test_durations_are_written_as_they_are_read(text: str) -> None:
    """Given a duration, then what is written of it is read as the same; parts of a second are a number."""
    assert written_duration(read_duration(text)) == text
    assert (read_duration("2w"), written_duration(0.25)) == (14 * 86_400, "0.25s")


def test_moments_have_a_zone() -> None:
    """Given a moment, then it must be one, and have its zone."""
    assert time_of("2026-12-24T18:00:00+01:00").isoformat() == "2026-12-24T18:00:00+01:00"
    assert time_of("2026-12-24T17:00:00Z") == time_of("2026-12-24T18:00:00+01:00")
    for text in ("2026-12-24", "2026-12-24T18:00:00", "tomorrow", "2026-13-24T18:00:00Z", ""):
        with pytest.raises(ValueError, match="no time with a zone"):
            time_of(text)
