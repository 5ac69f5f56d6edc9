"""JSON Schemas of what an agent answers: whether one can be used, and what a compiled specification says of it.

Pure. The driver uses it for an agent's `output_type`, a frame for the schema of a sub-agent that a model writes.
"""

from __future__ import annotations

import re
from typing import Any

from understudy.json_schemas import DEFINITIONS, resolve, schema_problems, schemas

from .output import WRAPPED

STRICT = frozenset({
    "type", "properties", "required", "additionalProperties", "items", "enum", "const", "anyOf", "description", "title",
    "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minItems",
    "maxItems", *DEFINITIONS,
})  # fmt: skip
"""Keywords that OpenAI's strict mode knows. A reference stands alone there."""

STRICT_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"})


def output_for(schema: dict[str, Any], kind: str | None, *, mode: str, retries: int) -> dict[str, Any] | list[str]:
    """What a compiled specification says of the output that fits a schema; or every problem of the schema.

    Args:
        kind: the name of the type that it is of; None for the schema's own title.
    """
    problems = list(schema_problems(schema))
    if problems:
        return problems
    schema, wrapped = _of_object(schema)
    problems = [
        f"{reference!r} leads into what is wrapped in an object: use $defs"
        for reference in _references(schema)
        if wrapped and reference.split("/")[1:2] not in ([name] for name in DEFINITIONS)
    ]
    title = str(schema.get("title") or "") if kind is None else kind
    made = {
        "name": name_of(title), "schema": schema, "wrapped": wrapped, "strict": _is_strict(schema), "mode": mode,
        "retries": retries,
    }  # fmt: skip
    return problems or made


def name_of(title: str) -> str:
    """The answer's name in a request to an endpoint."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", title)[:64] or "output"


def _references(schema: dict[str, Any]) -> list[str]:
    return [found["$ref"] for _, found in schemas(schema) if isinstance(found.get("$ref"), str)]


def _of_object(schema: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The schema of an object, which is what endpoints take, and whether the schema is wrapped in it."""
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference != "#":
        target = resolve(schema, reference)
        if isinstance(target, dict) and target.get("type") == "object" and schema.keys() <= {"$ref", *DEFINITIONS}:
            return {**target, **{name: schema[name] for name in DEFINITIONS if name in schema}}, False
    if schema.get("type") == "object":
        return schema, False
    inner = {name: value for name, value in schema.items() if name not in (*DEFINITIONS, "$schema")}
    kept = {name: schema[name] for name in DEFINITIONS if name in schema}
    properties = {WRAPPED: inner}
    return {
        "type": "object", "properties": properties, "required": [WRAPPED], "additionalProperties": False, **kept,
    }, True  # fmt: skip


def _is_strict(schema: dict[str, Any]) -> bool:
    """Whether OpenAI's strict mode takes the schema: objects have just the properties that are declared, all of them,
    and no keyword is used that it does not know."""
    for path, found in schemas(schema):
        if "$ref" in found:
            if len(found) > 1 and path:
                return False
            continue
        properties = found.get("properties")
        if found.get("type") == "object" or properties is not None:
            if found.get("additionalProperties") is not False or properties is None:
                return False
            if set(properties) != set(found.get("required", ())):
                return False
        if not found.keys() <= STRICT or not found.keys() & {"type", "enum", "const", "anyOf"}:
            return False
        if "format" in found and found["format"] not in STRICT_FORMATS:
            return False
    return True
