"""`AgentSpec.output_type`: its JSON Schema, made where the type is, and instances of it from what the store has."""

from __future__ import annotations

from typing import Any

from understudy.actors.output_schemas import name_of
from understudy.actors.output_types import kind_name, output_of_type
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
    made = output_of_type(spec.output_type, mode=spec.output_mode, retries=spec.output_retries)
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
            f"the output fits its schema, but is no {name_of(kind_name(output_type))}: {'; '.join(problems)}",
            session_id=session_id,
            details={
                "reason": "type", "problems": problems, "output": output,
                "hint": "Put the rule into the schema, or read plain data: `cluster.session(id).run(run_id).result()`.",
            },
        ) from None  # fmt: skip
