"""The inputs of a workflow's definition. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from understudy.errors import InvalidInput
from understudy.problem_texts import listed
from understudy.workflow_definition.problems import listing, meant
from understudy.workflow_definition.steps import Definition

from .output import validator_of


def checked_inputs(definition: Definition, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a run, with the defaults of those that are left out.

    Raises:
        InvalidInput: with every problem in `details["problems"]`.
    """
    problems = []
    for name in inputs.keys() - definition.inputs.keys():
        there = f"; there are: {listing(definition.inputs)}" if definition.inputs else "; there is none"
        problem = f"there is no such input{meant(name, definition.inputs)}{there}"
        problems.append({"field": name, "problem": problem})
    found: dict[str, Any] = {}
    for name, schema in definition.inputs.items():
        if name not in inputs and "default" not in schema:
            problems.append({"field": name, "problem": "is missing"})
            continue
        found[name] = inputs.get(name, schema.get("default"))
        problems += [{"field": name, "problem": problem} for problem in misfits(found[name], schema)]
    if problems:
        problems.sort(key=lambda item: item["field"])
        raise InvalidInput(
            f"the inputs of workflow {definition.name!r} can't be used: {listed(problems)}",
            details={"problems": problems},
        )
    return found


def misfits(value: Any, schema: dict[str, Any]) -> Iterator[str]:
    """Why a value does not fit a schema."""
    try:
        for error in itertools.islice(validator_of(schema).iter_errors(value), 3):
            yield f"{error.json_path}: {error.message}"
    except RecursionError:
        yield "it is nested too deeply"
