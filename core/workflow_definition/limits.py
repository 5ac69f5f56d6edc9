"""What a definition may not go beyond where a model has written it. As `meaning`, it takes data of whatever shape."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from ..places import Place
from .problems import Problems, listing, meant, quoted
from .steps import AT_ONCE
from .variables import steps_in


@dataclass(frozen=True)
class Limits:
    """The limits of a definition.

    Attributes:
        steps: of the definition, and that a run of it may come to.
        at_once: steps that may be under way at once.
        models: that steps may name.
        asks: whether a person may be asked.
        sessions: whether agents and models may work for it.
    """

    steps: int
    at_once: int
    models: Collection[str] = ()
    asks: bool = False
    sessions: bool = True


def look(data: Any, limits: Limits, problems: Problems) -> None:
    """Gather where a definition goes beyond its limits."""
    steps = data.get("steps") if isinstance(data, dict) else None
    number = 0
    for place, step in steps_in(steps, ("steps",)):
        number += 1
        if "ask" in step and not limits.asks:
            problems.add((*place, "ask"), "you have no tool to ask a person, so your workflow can't ask one either")
        for kind in () if limits.sessions else ("agent", "model"):
            if kind in step:
                problems.add((*place, kind), "no session may be created below yours: this tree is as deep as it may be")
        body = step.get("model")
        model = body.get("model") if isinstance(body, dict) else None
        if isinstance(model, str) and model not in limits.models:
            there = f"{meant(model, limits.models)}; there are: {listing(limits.models)}" if limits.models else ""
            problems.add((*place, "model", "model"), f"you may not use {quoted(model)}{there or ': leave it out'}")
    if number > limits.steps:
        problems.add(("steps",), f"there are {number} steps, and you may have {limits.steps}")
    for index, step in enumerate(steps if isinstance(steps, list) else ()):
        _width(step, ("steps", index), limits.at_once, problems)


def _width(step: Any, place: Place, most: int, problems: Problems) -> int:
    """How many steps a step may have under way at once; one that has more than the most is reported, the innermost
    alone."""
    if not isinstance(step, dict):
        return 1
    inner = {at: _width(one, at, most, problems) for at, one in _within(step, place)}
    given = step.get("max_concurrency")
    limit = given if isinstance(given, int) and not isinstance(given, bool) and given > 0 else None
    together = sorted((width for at, width in inner.items() if at[len(place)] == "parallel"), reverse=True)
    found = max([1, *inner.values(), sum(together[:limit])])
    if "foreach" in step:
        found = max(found, inner.get((*place, "foreach", "do"), 1) * (limit or AT_ONCE))
    if found > most:
        problems.add(place, f"up to {found} steps would be under way at once, and {most} may: lower max_concurrency")
        return 1
    return found


def _within(step: dict[str, Any], place: Place) -> Iterator[tuple[Place, Any]]:
    """The steps right within a step, each with its place."""
    for name in ("sequence", "parallel"):
        inner = step.get(name)
        yield from (((*place, name, index), one) for index, one in enumerate(inner if isinstance(inner, list) else ()))
    for name, field in (("foreach", "do"), ("loop", "do"), ("branch", "else")):
        body = step.get(name)
        if isinstance(body, dict):
            yield (*place, name, field), body.get(field)
            cases = body.get("cases") if name == "branch" else None
            for index, case in enumerate(cases if isinstance(cases, list) else ()):
                yield (*place, name, "cases", index, "do"), case.get("do") if isinstance(case, dict) else None
    for name in ("fallback", "on_error", "undo"):
        yield (*place, name), step.get(name)
