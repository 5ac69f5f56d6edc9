"""`AgentSpec.output_type`: its JSON Schema, made where the type is, and instances of it from what the store has."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterator
from typing import Any

from understudy.actors.output_schemas import name_of, output_for, schemas
from understudy.errors import InvalidSpec, OutputInvalid
from understudy.json_text import to_json
from understudy.spec import AgentSpec


def output_of(spec: AgentSpec) -> dict[str, Any] | None:
    """What a compiled specification says of its output; None for any text.

    Raises:
        InvalidSpec: with every problem of the type or schema in `details["problems"]`.
    """
    if spec.output_type is None:
        return None
    own = isinstance(spec.output_type, dict)
    schema, problems = _plain(spec.output_type) if own else _described(spec.output_type)
    output: dict[str, Any] = {}
    if not problems:
        kind = None if own else _kind(spec.output_type)
        made = output_for(schema, kind, mode=spec.output_mode, retries=spec.output_retries)
        problems, output = (made, {}) if isinstance(made, list) else ([], made)
    if "response_format" in spec.parameters:
        problems = [*problems, "parameters: response_format can't be set beside an output_type"]
    if problems:
        found = [{"field": "output_type", "problem": problem} for problem in problems]
        raise InvalidSpec(
            f"the output type of agent {spec.name!r} can't be used: {'; '.join(problems)}.", details={"problems": found}
        )
    return output


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
            f"the output fits its schema, but is no {name_of(_kind(output_type))}: {'; '.join(problems)}",
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


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a type whose objects have no properties but their own: others would get lost in its instances."""
    for _, found in schemas(schema):
        if found.get("type") == "object" and "properties" in found:
            found.setdefault("additionalProperties", False)
    return schema


def _kind(kind: Any) -> str:
    return str(getattr(kind, "__name__", "") or "")
