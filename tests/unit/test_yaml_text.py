"""YAML is read as what JSON can hold: which values mean what, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from hypothesis import example, given
from hypothesis import strategies as st

from understudy.yaml_text import NotYaml, YamlText, read_yaml, write_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"), ("on", "on"), ("Yes", "Yes"), ("2026-12-24", "2026-12-24"), ("2026-13-45", "2026-13-45"),
        ("1:30", "1:30"), ("1_000", "1_000"), ("<<", "<<"), ("=", "="), ("010", 10), ("0o10", 8), ("0x1F", 31),
        ("-1", -1), ("1.", 1.0), (".5", 0.5), ("1e3", 1000.0), ("~", None), ("", None), ("NULL", None),
        ("TRUE", True), ("false", False), ("tRUE", "tRUE"), ("!!str 1", "1"), ("[a, {b: no}]", ["a", {"b": "no"}]),
    ],
)  # fmt: skip
def test_what_values_mean(text: str, value: Any) -> None:
    """Given a value as it is written, then it means what the core schema of YAML 1.2 says."""
    found = read_yaml(text).data
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: &x 1\nb: *x", "line 2: aliases"), ("a: .inf", "line 1: JSON has no number .inf"),
        ("a: 1e999", "line 1: JSON has no number 1e999"), ("a: !!bool maybe", "line 1: 'maybe' is no tag"),
        ("a: !!binary aGk=", "line 1: could not determine a constructor"), ("a: b: c", "must be quoted"),
        ("a\n---\nb", "line 2: a second document"), ("a: \x00", "special characters"), ("? [a]\n: b", "unhashable"),
        ("a: " + "1" * 5000, "digits"), ("[" * 5000 + "]" * 5000, "nested too deeply"), ("a: [", "line 1"),
    ],
)  # fmt: skip
def test_what_is_refused(text: str, problem: str) -> None:
    """Given what JSON can't hold, or what could stand for any amount of data, then it is refused with its line."""
    with pytest.raises(NotYaml, match=problem):
        read_yaml(text)


def test_lines_and_doubled_fields() -> None:
    """Given several mistakes of one kind, then each part has its line, and every doubled field is reported."""
    found = read_yaml("a: 1\nb:\n  - c: 1\n    c: 2\na: 3", first_line=10)
    assert found == YamlText(
        {"a": 3, "b": [{"c": 2}]},
        {("a",): 14, ("b",): 11, ("b", 0): 12, ("b", 0, "c"): 13},
        ((("b", 0, "c"), 13), (("a",), 14)),
    )


DATA = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text("ab\n\t :#-'0oe.1") | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("ab:10"), inner),
    max_leaves=10,
)  # fmt: skip


@given(DATA)
def test_json_is_yaml(value: Any) -> None:
    """Given any JSON text, then it means the same as YAML."""
    assert read_yaml(json.dumps(value)).data == value


@given(DATA)
@example(["\x85", "\u2028\n", "\ufeff", "0o10", "1e3", " a\nb ", "no", "=", "\U0001f600"])
def test_what_is_written_is_read(value: Any) -> None:
    """Given any data, then its YAML is read as the same data, by a reader of YAML 1.1 as well."""
    text = write_yaml(value)
    assert (read_yaml(text).data, yaml.safe_load(text)) == (value, value)
