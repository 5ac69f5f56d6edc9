"""JSON Schemas in a definition: of inputs, and of results."""

from __future__ import annotations

from typing import Any

from ..json_schemas import EXPENSIVE, MOST_SCHEMAS, is_bounded, schema_problems, schemas
from ..json_text import to_json

LONGEST_SCHEMA = 20_000
"""Characters, as JSON."""

SHOWN = 3
"""So many of a schema's problems are reported."""


def schema_problem(schema: dict[str, Any]) -> str | None:
    """Why a schema can't be used; None if it can."""
    try:
        if len(to_json(schema)) > LONGEST_SCHEMA:
            return f"has more than {LONGEST_SCHEMA} characters, as JSON"
        found = [*dict.fromkeys(schema_problems(schema))]
        if not found and not is_bounded(schema, MOST_SCHEMAS):
            found = ["what must fit one value is too much, or refers to itself without an end"]
    except RecursionError:
        found = ["it is nested too deeply"]
    if not found:
        return None
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return f"is no JSON Schema that can be used: {'; '.join(found[:SHOWN])}{more}"


def default_problem(schema: dict[str, Any]) -> str | None:
    """Why the default of a schema that can be used does not fit it; None if it does, or there is none."""
    if "default" not in schema or any(name in one for _, one in schemas(schema) for name in EXPENSIVE):
        return None
    from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

    try:
        error = next(Draft202012Validator(schema).iter_errors(schema["default"]), None)
    except (RecursionError, ArithmeticError):
        return None
    return f"has a default that does not fit: {error.message}" if error is not None else None
