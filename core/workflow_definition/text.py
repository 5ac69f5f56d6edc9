"""Definitions as texts: JSON and YAML. What is read is what JSON can hold, and what is there twice is reported."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..places import Place, shown
from ..yaml_text import NotYaml, read_yaml, write_yaml
from .checking import definition_problems, to_data
from .steps import Definition

LONGEST_TEXT = 1_000_000
"""Characters of a definition."""

FORMS = {".json": "JSON", ".yaml": "YAML", ".yml": "YAML"}
"""The forms, by how names of files end."""


class NoDefinition(ValueError):
    """A text is not of its form at all. The message says where and why, and goes on from the text's name."""


@dataclass(frozen=True)
class DefinitionText:
    """What a text says, before it is checked.

    Attributes:
        lines: of each part of the data, where they are known.
        twice: fields that their object has more than once.
    """

    data: Any
    lines: dict[Place, int] = field(default_factory=dict)
    twice: tuple[Place, ...] = ()

    def problems(
        self, *, agents: Collection[str] | None = None, tools: Collection[str] | None = None
    ) -> list[dict[str, str]]:
        """Every problem (`definition_problems`), with its line where that is known."""
        again = [{"field": shown(place), "problem": "is there twice in one object"} for place in self.twice]
        found = again + definition_problems(self.data, agents=agents, tools=tools)
        lines = {shown(place): line for place, line in self.lines.items()}
        return [{**item, "problem": item["problem"] + _line(item["field"], lines)} for item in found]


def read_text(text: str, form: str) -> DefinitionText:
    """Read a text.

    Args:
        form: `JSON` or `YAML`.

    Raises:
        NoDefinition: it is not of this form, or too long.
    """
    if len(text) > LONGEST_TEXT:
        raise NoDefinition(f"has more than {LONGEST_TEXT:,} characters")
    if form == "YAML":
        try:
            found = read_yaml(text)
        except NotYaml as error:
            raise NoDefinition(f"is not YAML: {error}") from None
        return DefinitionText(found.data, found.lines, tuple(place for place, _ in found.twice))
    try:
        data = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse)
    except ValueError as error:
        raise NoDefinition(f"is not JSON: {error}") from None
    except RecursionError:
        raise NoDefinition("is nested too deeply") from None
    return DefinitionText(data, twice=tuple(_doubled(data)))


class _Doubled(dict[str, Any]):
    """An object that has fields twice."""

    twice: tuple[str, ...] = ()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    doubled = _Doubled(found)
    doubled.twice = tuple(name for name, number in Counter(name for name, _ in pairs).items() if number > 1)
    return doubled


def _refuse(name: str) -> Any:
    raise ValueError(f"JSON has no number {name}")


def _doubled(data: Any) -> Iterator[Place]:
    waiting: list[tuple[Place, Any]] = [((), data)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, _Doubled):
            yield from ((*place, name) for name in value.twice)
        if isinstance(value, dict):
            waiting += [((*place, name), item) for name, item in value.items()]
        elif isinstance(value, list):
            waiting += [((*place, index), item) for index, item in enumerate(value)]


def _line(shown_place: str, lines: dict[str, int]) -> str:
    """The line of a place, or of what it is missing from."""
    while shown_place:
        if shown_place in lines:
            return f" (line {lines[shown_place]})"
        shown_place = shown_place[: max(shown_place.rfind("."), shown_place.rfind("["), 0)]
    return ""


def written(definition: Definition, form: str) -> str:
    """A definition as a text; `read_text` and `read_definition` make the same one of it.

    Args:
        form: `JSON` or `YAML`.
    """
    data = to_data(definition)
    if form == "JSON":
        return json.dumps(data, ensure_ascii=False, indent=2, allow_nan=False) + "\n"
    return write_yaml(data)
