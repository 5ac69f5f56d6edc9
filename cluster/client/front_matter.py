"""Texts that begin with fields in YAML between lines of `---`: agents as markdown, and skills."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml  # type: ignore[import-untyped]

from understudy.errors import InvalidInput
from understudy.skills import split

FIRST_LINE = 2
"""Where the fields begin: below the first `---`."""


@dataclass(frozen=True)
class FrontMatter:
    """What a text says.

    Attributes:
        lines: the line of each field, by its place (`agents.0.name`).
        body: what is below the fields.
    """

    fields: dict[str, Any]
    body: str
    lines: dict[str, int] = field(default_factory=dict)

    def line_of(self, place: str) -> int | None:
        """The line of a field, or of the one that it is in; None if the fields don't have it."""
        while place:
            if place in self.lines:
                return self.lines[place]
            place = place.rpartition(".")[0]
        return None


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Without aliases: by these a few lines stand for any amount of data."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            problem = "aliases (`*name`) can't be used: write the value out"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.peek_event().start_mark)
        return super().compose_node(parent, index)


def read_front_matter(text: str, name: str) -> FrontMatter:
    """Read a text with fields above it. The fields are plain data: YAML's tags for objects and its aliases are refused.

    Args:
        name: of the text, for errors.

    Raises:
        InvalidInput: there are no fields, or they can't be read; with the line.
    """
    found = split(text)
    if found is None:
        raise InvalidInput(f"{name} must begin with fields between two lines of `---`")
    loader = _Loader(found[0])
    try:
        node = loader.get_single_node()
        lines = dict(_lines(node, "")) if node is not None else {}
        fields = loader.construct_document(node) if node is not None else {}
    except yaml.YAMLError as error:
        raise InvalidInput(f"{name} has fields that are not YAML: {_described(error)}") from None
    except (RecursionError, ValueError) as error:  # a date that is none, say
        raise InvalidInput(f"{name} has fields that can't be used: {error}") from None
    finally:
        loader.dispose()
    if not isinstance(fields, dict) or not all(isinstance(key, str) for key in fields):
        raise InvalidInput(f"{name} must have fields by name between its lines of `---`")
    return FrontMatter(fields, found[1], lines)


def _lines(node: Any, place: str) -> Iterator[tuple[str, int]]:
    """The line of each field below a node. Raises `YAMLError`: one is there twice."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            if name in seen:
                raise yaml.MarkedYAMLError(problem=f"{name!r} is there twice", problem_mark=key.start_mark)
            seen.add(name)
            yield f"{place}{name}", key.start_mark.line + FIRST_LINE
            yield from _lines(value, f"{place}{name}.")
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield f"{place}{index}", value.start_mark.line + FIRST_LINE
            yield from _lines(value, f"{place}{index}.")


def _described(error: yaml.YAMLError) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or "it can't be parsed"
    where = f"line {mark.line + FIRST_LINE}: " if mark is not None else ""
    hint = "; a text with a colon in it must be quoted" if "mapping values are not allowed" in problem else ""
    return f"{where}{problem}{hint}"
