"""The text of an agent's file: fields in TOML or JSON, or in YAML above instructions in markdown."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from understudy.errors import InvalidInput

from .front_matter import FrontMatter, read_front_matter

SUFFIXES = {".md": "markdown", ".toml": "TOML", ".json": "JSON"}
"""The forms of agents' files."""


@dataclass(frozen=True)
class AgentText:
    """What a file says, before anything of it is looked up.

    Attributes:
        fields: as written; the text below those of a markdown file is its `instructions`.
        matter: of a markdown file.
        problems: what is wrong with it, as `{"field", "problem"}`.
    """

    fields: dict[str, Any]
    matter: FrontMatter | None = None
    problems: list[dict[str, str]] = field(default_factory=list)

    def line_of(self, place: str) -> int | None:
        """The line of a field; None where it is not known."""
        return self.matter.line_of(place) if self.matter is not None else None


def read_text(path: Path) -> AgentText:
    """Read a file of the form that its name says; TOML where it says none.

    Raises:
        InvalidInput: it can't be read, or does not have this form.
    """
    kind = SUFFIXES.get(path.suffix, "TOML")
    try:
        text = path.read_text(encoding="utf-8")
        if kind == "markdown":
            return _markdown(read_front_matter(text, str(path)))
        data = json.loads(text) if kind == "JSON" else tomllib.loads(text)
    except OSError as error:
        raise InvalidInput(f"{path} can't be read: {error.strerror}") from None
    except ValueError as error:  # that of UTF-8, TOML and JSON alike
        raise InvalidInput(f"{path} is not {kind}: {error}") from None
    if not isinstance(data, dict):
        raise InvalidInput(f"{path} must hold an object of fields, not {type(data).__name__}")
    return AgentText(data)


def _markdown(matter: FrontMatter) -> AgentText:
    if "instructions" in matter.fields and matter.body:
        problem = "they are the text below the fields: leave this out, or that"
        return AgentText(matter.fields, matter, [{"field": "instructions", "problem": problem}])
    fields = {**matter.fields, "instructions": matter.body} if matter.body else matter.fields
    return AgentText(fields, matter)
