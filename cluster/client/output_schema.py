"""`AgentSpec.output_type`: its JSON Schema, made where the type is, and instances of it from what the store has."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Iterator
from typing import Any

from understudy.actors.output import WRAPPED, resolve
from understudy.errors import InvalidSpec, OutputInvalid
from understudy.json_text import to_json
from understudy.spec import AgentSpec

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


def output_of(spec: AgentSpec) -> dict[str, Any] | None:
    """What a compiled specification says of its output; None for any text.

    Raises:
        InvalidSpec: with every problem of the type or schema in `details["problems"]`.
    """
    if spec.output_type is None:
        return None
    own = isinstance(spec.output_type, dict)
    schema, problems = _plain(spec.output_type) if own else _described(spec.output_type)
    problems = problems or list(_wrong(schema))
    if "response_format" in spec.parameters:
        problems.append("parameters: response_format can't be set beside an output_type")
    if not problems:
        schema, wrapped = _of_object(schema)
        problems = [
            f"{reference!r} leads into what is wrapped in an object: use $defs"
            for reference in _references(schema)
            if wrapped and reference.split("/")[1:2] not in ([name] for name in DEFINITIONS)
        ]
    if problems:
        found = [{"field": "output_type", "problem": problem} for problem in problems]
        raise InvalidSpec(
            f"the output type of agent {spec.name!r} can't be used: {'; '.join(problems)}.", details={"problems": found}
        )
    return {
        "name": _name(spec.output_type, schema), "schema": schema, "wrapped": wrapped, "strict": _is_strict(schema),
        "mode": spec.output_mode, "retries": spec.output_retries,
    }  # fmt: skip


def as_type(output: Any, output_type: Any, session_id: str) -> Any:
    """A run's output as an instance of the type; as it is if that is a schema, or there is no type or no output.

    Raises:
        OutputInvalid: the type's own checks refuse it, or the run was another type's.
    """
    if output is None or output_type is None or isinstance(output_type, dict):
        return output
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(output_type).validate_json(to_json(output))
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors(include_url=False)]
        raise OutputInvalid(
            f"the output fits its schema, but is no {_name(output_type, {})}: {'; '.join(problems)}",
            session_id=session_id,
            details={
                "reason": "type", "problems": problems, "output": output,
                "hint": "Put the rule into the schema, or read plain data: `cluster.session(id).run(run_id).result()`.",
            },
        ) from None  # fmt: skip


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


def _schemas(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """A schema and all within it, each with its place."""
    if isinstance(schema, list):
        for index, item in enumerate(schema):
            yield from _schemas(item, f"{path}/{index}")
    if not isinstance(schema, dict):
        return
    yield path, schema
    for name, value in schema.items():
        if name in SUBSCHEMAS and isinstance(value, dict):
            for key, item in value.items():
                yield from _schemas(item, f"{path}/{name}/{key}")
        elif name not in ("enum", "const", "default", "examples", "discriminator"):
            yield from _schemas(value, f"{path}/{name}")


def _references(schema: dict[str, Any]) -> list[str]:
    return [found["$ref"] for _, found in _schemas(schema) if isinstance(found.get("$ref"), str)]


def _wrong(schema: dict[str, Any]) -> Iterator[str]:
    """Why a schema can't be used."""
    from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

    if schema.get("$schema", DIALECT).rstrip("#") != DIALECT:
        yield f"$schema: only {DIALECT} is known"
    for error in Draft202012Validator(Draft202012Validator.META_SCHEMA).iter_errors(schema):
        yield f"{error.json_path}: {error.message}"
    for path, found in _schemas(schema):
        place = f"#{path}"
        yield from (f"{place}: {name} is not supported" for name in FOREIGN if name in found)
        reference = found.get("$ref")
        if isinstance(reference, str) and (reference[:1] != "#" or resolve(schema, reference) is None):
            yield f"{place}: $ref {reference!r} leads to nothing in this schema"
        patterns = found.get("patternProperties")
        for pattern in (found.get("pattern"), *(patterns if isinstance(patterns, dict) else ())):
            try:
                re.compile(pattern if isinstance(pattern, str) else "")
            except re.error as error:
                yield f"{place}: the pattern {pattern!r} is no regular expression of Python's: {error}"


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a type whose objects have no properties but their own: others would get lost in its instances."""
    for _, found in _schemas(schema):
        if found.get("type") == "object" and "properties" in found:
            found.setdefault("additionalProperties", False)
    return schema


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
    for path, found in _schemas(schema):
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


def _name(kind: Any, schema: dict[str, Any]) -> str:
    """What the endpoint is told the answer is called."""
    name = schema.get("title") if isinstance(kind, dict) else getattr(kind, "__name__", "")
    return re.sub(r"[^A-Za-z0-9_-]", "_", str(name or ""))[:64] or "output"
