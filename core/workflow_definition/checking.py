"""From data to a definition, or to everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from ..errors import InvalidSpec
from ..problem_texts import described
from .limits import Limits
from .limits import look as look_at_limits
from .meaning import Meaning
from .plain import places_of, with_names
from .problems import Problems
from .shape import look
from .steps import Definition, Step


def definition_problems(
    data: Any, *, agents: Collection[str] | None = None, tools: Collection[str] | None = None,
    limits: Limits | None = None,
) -> list[dict[str, str]]:  # fmt: skip
    """Every problem of a definition, as `{"field", "problem"}`, in the order of its fields; whatever the data is, this
    raises nothing.

    Args:
        agents, tools: the names that a step may have; None: they are not looked at.
        limits: of one that a model has written.
    """
    problems = Problems()
    order = places_of(data, problems)
    if order is None:
        return problems.in_order(())
    named = with_names(data)
    look(named, problems)
    Meaning(problems, agents=agents, tools=tools).look(named)
    if limits is not None:
        look_at_limits(named, limits, problems)
    return problems.in_order(order)


def read_definition(
    data: Any, *, agents: Collection[str] | None = None, tools: Collection[str] | None = None
) -> Definition:
    """The definition that data is (`definition_problems`).

    Raises:
        InvalidSpec: with every problem in `details["problems"]`.
    """
    problems = definition_problems(data, agents=agents, tools=tools)
    if problems:
        raise InvalidSpec(described("the workflow", problems), details={"problems": problems})
    return converted(data)


def converted(data: Any) -> Definition:
    """The definition that data without problems is."""
    return msgspec.convert(data, Definition)


def to_data(definition: Definition | Step) -> dict[str, Any]:
    """A definition, or a step, as data, without what is as by default; `read_definition` makes the same one of it."""
    found: dict[str, Any] = msgspec.to_builtins(definition)
    return found
