"""JSON Schemas of what an agent answers: whether one can be used, and what a compiled specification says of it.

Pure. The driver uses it for an agent's `output_type`, a frame for the schema of a sub-agent that a model writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from .output import WRAPPED, resolve

DIALECT = "https://json-schema.org/draft/2020-12/schema"

DEFINITIONS = ("$defs", "definitions")

FOREIGN = ("$id", "$anchor", "$dynamicRef", "$dynamicAnchor", "$vocabulary")
"""Keywords that change what a reference means: not supported."""

STRICT = frozenset({
    "type", "properties", "required", "additionalProperties", "items", "enum", "const", "anyOf", "description", "title",
    "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minItems",
    "maxItems", *DEFINITIONS,
})  # fmt: skip
"""Keywords that OpenAI's strict mode knows. A reference stands alone there."""

STRICT_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"})

SUBSCHEMAS = ("properties", "patternProperties", "dependentSchemas", *DEFINITIONS)
"""Keywords whose values are schemas by name; other lists and tables are looked through as they are."""


def output_for(schema: dict[str, Any], kind: str | None, *, mode: str, retries: int) -> dict[str, Any] | list[str]:
    """What a compiled specification says of the output that fits a schema; or every problem of the schema.

    Args:
        kind: the name of the type that it is of; None for the schema's own title.
    """
    problems = list(_wrong(schema))
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


def is_bounded(schema: dict[str, Any], most: int) -> bool:
    """Whether a validator has to look at no more than so many schemas for the values of an answer, however deep it is:
    at each place those that are combined, and what they refer to. One that refers to itself there has no end; one that
    refers to itself several times for the same part of a value has to be looked at twice as often at each depth."""
    places, known, seen = [[schema]], set[tuple[int, ...]](), 0
    while places:
        waiting = places.pop()
        place = tuple(sorted(map(id, waiting)))
        if place in known:
            continue
        known.add(place)
        here: list[dict[str, Any]] = []
        while waiting:
            found = waiting.pop()
            seen += 1
            if seen > most:
                return False
            here.append(found)
            for name in ("allOf", "anyOf", "oneOf"):
                waiting += _only_schemas(found.get(name) or ())
            waiting += _only_schemas(found.get(name) for name in ("not", "if", "then", "else"))
            waiting += _only_schemas((found.get("dependentSchemas") or {}).values())
            waiting += _only_schemas([resolve(schema, found["$ref"])] if isinstance(found.get("$ref"), str) else ())
        places += _parts_of(here)
    return True


def _parts_of(combined: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """What schemas that are combined at a place demand of the parts of its value: of each property, and of items."""
    tables = [(found.get("properties") or {}, found.get("additionalProperties")) for found in combined]
    for name in {name: None for properties, _ in tables for name in properties}:
        yield _only_schemas(properties.get(name, others) for properties, others in tables)
    yield _only_schemas(others for _, others in tables)
    yield _only_schemas(found.get("propertyNames") for found in combined)
    items = [item for found in combined for item in found.get("prefixItems") or ()]
    yield _only_schemas([*items, *(found.get(name) for found in combined for name in ("items", "contains"))])


def _only_schemas(values: Iterable[Any]) -> list[dict[str, Any]]:
    """Those that are tables: what is true or false costs nothing."""
    return [value for value in values if isinstance(value, dict)]


def name_of(title: str) -> str:
    """What an endpoint is told the answer is called."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", title)[:64] or "output"


def schemas(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """A schema and all within it, each with its place."""
    if isinstance(schema, list):
        for index, item in enumerate(schema):
            yield from schemas(item, f"{path}/{index}")
    if not isinstance(schema, dict):
        return
    yield path, schema
    for name, value in schema.items():
        if name in SUBSCHEMAS and isinstance(value, dict):
            for key, item in value.items():
                yield from schemas(item, f"{path}/{name}/{key}")
        elif name not in ("enum", "const", "default", "examples", "discriminator"):
            yield from schemas(value, f"{path}/{name}")


def _references(schema: dict[str, Any]) -> list[str]:
    return [found["$ref"] for _, found in schemas(schema) if isinstance(found.get("$ref"), str)]


def _wrong(schema: dict[str, Any]) -> Iterator[str]:
    """Why a schema can't be used."""
    from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

    if str(schema.get("$schema", DIALECT)).rstrip("#") != DIALECT:
        yield f"$schema: only {DIALECT} is known"
    for error in Draft202012Validator(Draft202012Validator.META_SCHEMA).iter_errors(schema):
        yield f"{error.json_path}: {error.message}"
    for path, found in schemas(schema):
        place = f"#{path}"
        yield from (f"{place}: {name} is not supported" for name in FOREIGN if name in found)
        reference = found.get("$ref")
        if isinstance(reference, str) and (reference[:1] != "#" or resolve(schema, reference) is None):
            yield f"{place}: $ref {reference!r} leads to nothing in this schema"
        patterns = found.get("patternProperties")
        for pattern in (found.get("pattern"), *(patterns if isinstance(patterns, dict) else ())):
            try:
                re.compile(pattern if isinstance(pattern, str) else "")
            except (re.error, OverflowError, RecursionError) as error:
                yield f"{place}: the pattern {pattern!r} is no regular expression of Python's: {error}"


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
