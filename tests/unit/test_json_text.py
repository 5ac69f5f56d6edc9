"""JSON as text: what msgspec and the standard library together read and write."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.json_text import from_json, to_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters()), inner),
)  # fmt: skip
"""Also halves of characters, and integers of any size."""


@given(VALUES)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    """Given any JSON value, when it is written, then this module and the standard library read it alike."""
    assert from_json(to_json(value)) == json.loads(to_json(value)) == value


@given(VALUES)
def test_what_others_wrote_is_read(value: Any) -> None:
    """Given what the standard library wrote, then the same is read, from text and from bytes."""
    text = json.dumps(value)
    assert from_json(text) == from_json(text.encode()) == value


@pytest.mark.parametrize(
    ("text", "value"), [("[Infinity]", [float("inf")]), ("1e999", float("inf")), ("9" * 40, 10**40 - 1)]
)
def test_what_some_endpoints_send(text: str, value: Any) -> None:
    """Numbers that JSON does not have are read."""
    assert from_json(text) == value


@pytest.mark.parametrize("text", ["", "{", "{'a': 1}", '{"a": 1} x', "9" * 5_000])
def test_what_is_no_json(text: str) -> None:
    """It is refused as the standard library does."""
    with pytest.raises(ValueError):  # noqa: PT011 - that of the standard library
        from_json(text)


def test_a_number_that_json_does_not_have_is_written_as_null() -> None:
    """Whoever reads it later may be strict."""
    assert to_json({"score": float("nan")}) == '{"score":null}'
    assert from_json(to_json({"score": float("inf"), "half": "\ud83d"})) == {"score": None, "half": "\ud83d"}


def test_what_json_has_nothing_for() -> None:
    """It is refused."""
    with pytest.raises(TypeError):
        to_json({"a": object()})
