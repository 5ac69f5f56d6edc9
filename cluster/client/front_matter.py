"""Texts that begin with fields in YAML between lines of `---`: agents as markdown, and skills."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from understudy.errors import InvalidInput
from understudy.skills import split
from understudy.yaml_text import NotYaml, read_yaml

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


def read_front_matter(text: str, name: str) -> FrontMatter:
    """Read a text with fields above it (`read_yaml`).

    Args:
        name: of the text, for errors.

    Raises:
        InvalidInput: there are no fields, or they can't be read; with the line.
    """
    found = split(text)
    if found is None:
        raise InvalidInput(f"{name} must begin with fields between two lines of `---`")
    try:
        read = read_yaml(found[0], FIRST_LINE)
    except NotYaml as error:
        raise InvalidInput(f"{name} has fields that are not YAML: {error}") from None
    for place, line in read.twice:
        raise InvalidInput(f"{name} has fields that are not YAML: line {line}: {place[-1]!r} is there twice")
    fields = {} if read.data is None else read.data
    if not isinstance(fields, dict) or not all(isinstance(key, str) for key in fields):
        raise InvalidInput(f"{name} must have fields by name between its lines of `---`")
    return FrontMatter(fields, found[1], {".".join(map(str, place)): line for place, line in read.lines.items()})
