"""Types of Python's as what an agent answers: their JSON Schemas, made where the type is.

The driver uses it for an agent's `output_type`, a workflow's code for that of a step.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterator
from typing import Any

from understudy.json_schemas import schemas

from .output_schemas import output_for


def output_of_type(kind: Any, *, mode: str, retries: int) -> dict[str, Any] | list[str]:
    """What a compiled specification says of an output, a type or a JSON Schema; or every problem of it."""
    own = isinstance(kind, dict)
    schema, problems = _plain(kind) if own else _described(kind)
    return problems or output_for(schema, None if own else kind_name(kind), mode=mode, retries=retries)


def _plain(schema: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    try:
        return json.loads(json.dumps(schema, allow_nan=False)), []
    except (TypeError, ValueError, RecursionError) as error:
        return {}, [f"it is not JSON-compatible: {error}"]


def _described(kind: Any) -> tuple[dict[str, Any], list[str]]:
    """The schema of a type, and what of the type has none."""
    from pydantic import TypeAdapter

    if isinstance(kind, str):
        return {}, [f"{kind!r} is a text: give the type itself, or a JSON Schema"]
    try:
        return _closed(_plain(TypeAdapter(kind).json_schema())[0]), []
    except Exception as error:  # whatever code of the user's type does, too
        found = [f"{name}: {problem}" for name, part in _parts(kind) if (problem := _undescribed(part))]
        return {}, found or [_first_line(error)]


def _undescribed(kind: Any) -> str:
    from pydantic import TypeAdapter

    try:
        TypeAdapter(kind).json_schema()
    except Exception as error:
        return _first_line(error)
    return ""


def _first_line(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return f"it has no JSON Schema: {text.splitlines()[0].rstrip('.')}"


def _parts(kind: Any) -> Iterator[tuple[str, Any]]:
    """The fields of a type by name, if it has such."""
    if hasattr(kind, "model_fields"):
        yield from ((name, field.annotation) for name, field in kind.model_fields.items())
    elif dataclasses.is_dataclass(kind) or typing.is_typeddict(kind):
        try:
            yield from typing.get_type_hints(kind, include_extras=True).items()
        except Exception:
            return  # what is said of the whole type says this, too


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a type whose objects have no properties but their own: others would get lost in its instances."""
    for _, found in schemas(schema):
        if found.get("type") == "object" and "properties" in found:
            found.setdefault("additionalProperties", False)
    return schema


def kind_name(kind: Any) -> str:
    """A type's own name; empty if it has none."""
    return str(getattr(kind, "__name__", "") or "")
