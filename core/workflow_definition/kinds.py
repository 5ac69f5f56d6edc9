"""What is known of a variable's value before it has one: from a JSON Schema, or from the kind of the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..json_schemas import resolve
from .expressions import Every, Expression, Items, Literal, Path
from .problems import listing, meant

MOST_REFERENCES = 20
"""So many references are followed from one to the next."""

NAMES = {
    "string": "a text", "number": "a number", "integer": "a whole number", "boolean": "true or false", "null": "null",
    "object": "an object", "array": "a list",
}  # fmt: skip
"""JSON Schema's types."""


@dataclass(frozen=True)
class Kind:
    """What is known of a value; nothing, unless something is said.

    Attributes:
        schema: that it fits.
        root: the whole schema that this one is from, for its references.
        items: it is a list, of such values.
    """

    schema: dict[str, Any] | None = None
    root: dict[str, Any] | None = None
    items: Kind | None = None

    @property
    def type(self) -> str | None:
        """JSON Schema's word for what it is; None if that is not known."""
        if self.items is not None:
            return "array"
        found = (self.schema or {}).get("type")
        return found if isinstance(found, str) and found in NAMES else None


ANY = Kind()
TEXT, WHOLE_NUMBER, NOTHING, BOOLEAN = (Kind({"type": name}) for name in ("string", "integer", "null", "boolean"))
ERROR = Kind(
    {"type": "object", "properties": {"code": {}, "message": {}}, "additionalProperties": False},
)


class NoSuchPart(ValueError):
    """A value of this kind has no such part."""


def of_schema(schema: Any, root: dict[str, Any] | None = None) -> Kind:
    """What fits a schema."""
    root = root or (schema if isinstance(schema, dict) else None)
    for _ in range(MOST_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or root is None:
            break
        schema = resolve(root, reference)
    if not isinstance(schema, dict) or "$ref" in schema:
        return ANY
    return Kind(schema, root)


def of_expression(expression: Expression, known: Callable[[str], Kind | None]) -> Kind:
    """What an expression is.

    Args:
        known: what is known of a variable.

    Raises:
        NoSuchPart: a part of a variable is read that it does not have.
    """
    match expression:
        case Path(name, parts):
            return part_of(known(name) or ANY, name, parts)
        case Items():
            return Kind(items=ANY)
        case Literal(value):
            return next((kind for of, kind in _LITERALS if isinstance(value, of)), NOTHING)
    return BOOLEAN


_LITERALS: tuple[tuple[Any, Kind], ...] = (
    (bool, BOOLEAN), (str, TEXT), (int, WHOLE_NUMBER), (float, Kind({"type": "number"})),
)  # fmt: skip


def part_of(kind: Kind, written: str, parts: tuple[str | int | Every, ...]) -> Kind:
    """What a part of a value is.

    Args:
        written: the value, as it is written.

    Raises:
        NoSuchPart: a value of this kind has none.
    """
    for index, part in enumerate(parts):
        if isinstance(part, Every):
            _check_list(kind, written, "* stands for every item of a list")
            return Kind(items=part_of(_item(kind), f"{written}.*", parts[index + 1 :]))
        kind = _part(kind, written, part)
        written = f"{written}.{part}"
    return kind


def _check_list(kind: Kind, written: str, why: str) -> None:
    if kind.type not in (None, "array"):
        raise NoSuchPart(f"{written} is {NAMES[kind.type or '']}: {why}")


def _part(kind: Kind, written: str, part: str | int) -> Kind:
    if kind.type is None:
        return ANY
    if kind.type == "array":
        if isinstance(part, str):
            raise NoSuchPart(f"{written} is a list: an index or * must follow, as in {written}.0.{part}")
        return _item(kind)
    if kind.type != "object":
        raise NoSuchPart(f"{written} is {NAMES[kind.type]}, and has no part {part!r}")
    schema = kind.schema or {}
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    name = str(part)
    if name in properties:
        return of_schema(properties[name], kind.root)
    if schema.get("additionalProperties") is False and not schema.keys() & {"patternProperties", "allOf", "anyOf"}:
        there = f"; there are: {listing(properties)}" if properties else ""
        raise NoSuchPart(f"{written} has no {name!r}{meant(name, properties)}{there}")
    return ANY


def _item(kind: Kind) -> Kind:
    if kind.items is not None:
        return kind.items
    schema = kind.schema or {}
    if "prefixItems" in schema:
        return ANY
    return of_schema(schema.get("items"), kind.root)
