"""Whether a value is data that JSON and the store can hold, and not too much of it. Reads any object of Python's."""

from __future__ import annotations

import math
from typing import Any

from ..messages import storable
from ..places import Place
from .problems import Problems

DEEPEST = 200
"""Levels of lists and objects: three for each of 50 steps within steps, and what is in the last one."""

MOST_VALUES = 200_000

LONGEST_TEXT = 200_000
"""Characters of one text."""

LARGEST_INTEGER = 2**63 - 1


def places_of(data: Any, problems: Problems) -> list[Place] | None:
    """Every place in the data, in its order; None if it can't be looked at any further.

    What has no name that could be one is left out (`with_names`).
    """
    found: list[Place] = []
    waiting: list[tuple[Place, Any, tuple[int, ...]]] = [((), data, ())]
    ended = False
    while waiting:
        place, value, within = waiting.pop()
        found.append(place)
        if len(found) > MOST_VALUES:
            problems.add((), f"it has more than {MOST_VALUES:,} values")
            return None
        problem = _problem(value)
        if problem is not None:
            problems.add(place, problem, alone=True)
        if not isinstance(value, dict | list):
            continue
        if id(value) in within:
            problems.add(place, "is within itself, without an end")
            ended = True
        elif len(within) >= DEEPEST:
            problems.add(place, f"is nested more than {DEEPEST} levels deep")
            ended = True
        else:
            inner = [*value.items()] if isinstance(value, dict) else [*enumerate(value)]
            above = (*within, id(value))
            for name, item in reversed(inner):
                problem = None if isinstance(value, list) else _name_problem(name)
                if problem is not None:
                    problems.add(place, problem)
                else:
                    waiting.append(((*place, name), item, above))
    return None if ended else found


def with_names(data: Any) -> Any:
    """The data without what has no name that could be one."""
    if isinstance(data, list):
        return [with_names(item) for item in data]
    if isinstance(data, dict):
        return {name: with_names(item) for name, item in data.items() if _name_problem(name) is None}
    return data


def _name_problem(name: Any) -> str | None:
    if not isinstance(name, str):
        return f"has the name {str(name)[:80]}, which is no text: put it in quotes"
    return f"has a name with characters that can't be stored: {name[:80]!r}" if storable(name) != name else None


def _problem(value: Any) -> str | None:
    if value is None or isinstance(value, bool | dict | list):
        return None
    if isinstance(value, str):
        if len(value) > LONGEST_TEXT:
            return f"is longer than {LONGEST_TEXT:,} characters"
        return "has characters that can't be stored" if storable(value) != value else None
    if isinstance(value, int):
        return "is a number beyond 64 bits" if abs(value) > LARGEST_INTEGER else None
    if isinstance(value, float):
        return None if math.isfinite(value) else f"is {value}, a number that JSON does not have"
    return f"is nothing that JSON has: {type(value).__name__}"
