"""JSON Schemas (2020-12) that users and models write: whether one can be used, and what is in it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

DIALECT = "https://json-schema.org/draft/2020-12/schema"

DEFINITIONS = ("$defs", "definitions")

FOREIGN = ("$id", "$anchor", "$dynamicRef", "$dynamicAnchor", "$vocabulary")
"""Keywords that change what a reference means: not supported."""

SUBSCHEMAS = ("properties", "patternProperties", "dependentSchemas", *DEFINITIONS)
"""Keywords whose values are schemas by name; other lists and tables are looked through as they are."""

EXPENSIVE = ("pattern", "patternProperties", "unevaluatedItems", "unevaluatedProperties")
"""Keywords with which a schema that no person has reviewed could keep a process busy for ever."""

MOST_SCHEMAS = 10_000
"""So many schemas a validator may have to look at for one value (`is_bounded`)."""


def schema_problems(schema: dict[str, Any]) -> Iterator[str]:
    """Why a JSON Schema can't be used, each with its place in it."""
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


def resolve(root: Any, reference: str) -> Any:
    """What a reference within a schema (`#/$defs/Name`) leads to; None where that is not there."""
    found = root
    for part in reference.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            return None
    return found


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
