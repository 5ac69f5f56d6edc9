"""The format's JSON Schema, for editors and for models: made from `steps`, so it is what the checker looks at.

It says what can be said of fields and types. What a text means (variables, conditions, durations) only the checker
knows.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..json_schemas import DIALECT
from .reference import meaning_of, meanings
from .steps import Definition, Part

TITLE = "A workflow of Understudy"


def json_schema() -> dict[str, Any]:
    """The schema of a definition (2020-12)."""
    (reference,), parts = msgspec.json.schema_components([Definition], ref_template="#/$defs/{name}")
    by_name = {kind.__name__: kind for kind in _parts()}
    definitions = {name: _completed(schema, by_name[name]) for name, schema in sorted(parts.items())}
    return {"$schema": DIALECT, "title": TITLE, **reference, "$defs": definitions}


def _parts() -> list[type[Part]]:
    return [Part, *Part.__subclasses__()]


def _completed(schema: dict[str, Any], part: type[Part]) -> dict[str, Any]:
    """The schema of a part with what msgspec does not know of it."""
    said = meanings(part)
    found = {name: value for name, value in schema.items() if name != "title"} | {"description": meaning_of(part)}
    found["properties"] = {
        name: {**value, "description": said[name]} for name, value in schema["properties"].items()
    }  # fmt: skip
    if part.ONE_OF:
        found["oneOf"] = [{"required": [name]} for name in part.ONE_OF]
    if part.ONLY_WITH:
        found["dependentSchemas"] = {
            name: {"anyOf": [{"required": [other]} for other in others]} for name, others in part.ONLY_WITH.items()
        }
    return found
