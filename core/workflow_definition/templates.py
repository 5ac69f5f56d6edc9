"""Texts with `{{…}}` in them. One that is nothing but a `{{…}}` is the value itself, every other one is a text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..json_text import to_json
from ..places import Place
from .evaluation import value_of
from .expressions import BadExpression, Expression, parse_within


@dataclass(frozen=True)
class Template:
    """A text with expressions in it.

    Attributes:
        parts: texts, and expressions between them; nothing else in it is empty.
    """

    parts: tuple[str | Expression, ...]

    @property
    def whole(self) -> Expression | None:
        """The expression that it is; None if it is a text."""
        alone = self.parts[0] if len(self.parts) == 1 else None
        return None if isinstance(alone, str) else alone


def scan(text: str) -> Iterator[str | Expression | BadExpression]:
    """What a text consists of: texts, expressions, and why there is none between two braces."""
    end = 0
    while (start := text.find("{{", end)) >= 0:
        if start > end:
            yield text[end:start]
        try:
            expression, end = parse_within(text, start + 2)
            yield expression
        except BadExpression as error:
            yield error
            closing = text.find("}}", start)
            end = closing + 2 if closing >= 0 else len(text)
    if end < len(text):
        yield text[end:]


def parse_template(text: str) -> Template:
    """Read a text.

    Raises:
        BadExpression: what is between two braces is no expression.
    """
    parts: list[str | Expression] = []
    for part in scan(text):
        if isinstance(part, BadExpression):
            raise part
        parts.append(part)
    return Template(tuple(parts))


def rendered(value: Any, variables: Mapping[str, Any]) -> Any:
    """Data with its templates replaced by what they are; names of fields are left as they are.

    Raises:
        NoValue: a template has no value.
    """
    if isinstance(value, str):
        return _of_text(value, variables)
    if isinstance(value, list):
        return [rendered(item, variables) for item in value]
    if isinstance(value, dict):
        return {name: rendered(item, variables) for name, item in value.items()}
    return value


def _of_text(text: str, variables: Mapping[str, Any]) -> Any:
    template = parse_template(text)
    if template.whole is not None:
        return value_of(template.whole, variables)
    return "".join(
        part if isinstance(part, str) else text_of(value_of(part, variables)) for part in template.parts
    )  # fmt: skip


def text_of(value: Any) -> str:
    """A value within a text: a text as it is, everything else as JSON."""
    return value if isinstance(value, str) else to_json(value)


def templates_in(value: Any, place: Place = ()) -> Iterator[tuple[Place, str]]:
    """Every text with braces in data, and where it is."""
    if isinstance(value, str):
        if "{{" in value:
            yield place, value
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from templates_in(item, (*place, index))
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from templates_in(item, (*place, name))
