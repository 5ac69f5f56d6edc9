"""Which variables a place of a definition sees, and why it does not see another one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from ..places import Place, shown
from .kinds import Kind

SHOWN_CYCLE = 10


class Scope:
    """The variables that are seen in one part of a definition, and what is known of their values.

    Attributes:
        names: those of this part.
    """

    def __init__(self, above: Scope | None = None, names: dict[str, Kind] | None = None) -> None:
        self._above = above
        self.names = names or {}

    def get(self, name: str) -> Kind | None:
        """What is known of a variable; None if there is no such one here."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope._above
        return None

    def visible(self) -> list[str]:
        """The names of all."""
        above = self._above.visible() if self._above is not None else []
        return [*above, *self.names]


def steps_in(steps: Any, place: Place) -> Iterator[tuple[Place, dict[str, Any]]]:
    """All steps of a list, and those within them, each with its place, in their order."""
    for index, step in enumerate(steps if isinstance(steps, list) else ()):
        yield from _with_inner(step, (*place, index))


def _with_inner(step: Any, place: Place) -> Iterator[tuple[Place, dict[str, Any]]]:
    if not isinstance(step, dict):
        return
    yield place, step
    for name in ("sequence", "parallel"):
        yield from steps_in(step.get(name), (*place, name))
    for name, field in (("foreach", "do"), ("loop", "do"), ("branch", "else")):
        body = step.get(name)
        cases = body.get("cases") if isinstance(body, dict) and name == "branch" else None
        for index, case in enumerate(cases if isinstance(cases, list) else ()):
            inner = case.get("do") if isinstance(case, dict) else None
            yield from _with_inner(inner, (*place, name, "cases", index, "do"))
        if isinstance(body, dict):
            yield from _with_inner(body.get(field), (*place, name, field))
    for name in ("fallback", "on_error", "undo"):
        yield from _with_inner(step.get(name), (*place, name))


class Uses:
    """Where results of steps are used.

    Attributes:
        places: of the steps, by their ids.
    """

    def __init__(self) -> None:
        self.places: dict[str, Place] = {}
        self._owners: dict[Place, str] = {}
        self._used: dict[str, dict[str, None]] = {}

    def add_step(self, name: str, place: Place) -> None:
        """There is a step with this id."""
        self.places[name] = place
        self._owners[place] = name

    def shown(self, name: str) -> str:
        """Where the step with this id is, as users see it."""
        return shown(self.places[name])

    def add(self, name: str, place: Place) -> None:
        """A variable is used here."""
        if name in self.places:
            for owner in self._owners_of(place):
                self._used.setdefault(owner, {})[name] = None

    def _owners_of(self, place: Place) -> list[str]:
        """The ids of the steps that a place is in."""
        above = (place[:length] for length in range(len(place) + 1))
        return [self._owners[one] for one in above if one in self._owners]

    def why_not(self, name: str, place: Place) -> str | None:
        """Why a place does not see a variable; None if no step has this id. Once all uses are known."""
        step = self.places.get(name)
        if step is None:
            return None
        if place[: len(step)] == step:
            return "it is the result of the step that this is in"
        common = next(at for at, (one, other) in enumerate(zip(place, step, strict=False)) if one != other)
        within, mine, its = place[:common], place[common], step[common]
        container = within[-1] if within else None
        if container == "parallel":
            return f"{shown(step)} is done at the same time, in one `parallel`"
        if container == "cases" or {mine, its} & {"else", "cases"}:
            return f"{shown(step)} is in another case of the branch"
        if isinstance(mine, int) and isinstance(its, int) and mine < its:
            return f"{shown(step)} is done later{self._cycle(name, place)}"
        closed = next((str(part) for part in step[common:] if part in CLOSED), "")
        return f"it is the result of {shown(step)}, which only that `{closed}` sees: use an id of the step around it"

    def _cycle(self, name: str, place: Place) -> str:
        """That a later step needs, by way of others, the one that needs it."""
        owners = {*self._owners_of(place)}
        found, waiting = {name: ""}, deque([name])  # the step by which each was found
        while waiting:
            step = waiting.popleft()
            for used in self._used.get(step, ()):
                if used in owners:
                    way: list[str] = []
                    while step:
                        way.insert(0, step)
                        step = found[step]
                    way = [*way[:SHOWN_CYCLE], *["…"] * (len(way) > SHOWN_CYCLE)]
                    return f", and needs this one: a cycle, {' → '.join([used, *way, used])}"
                if used not in found:
                    found[used] = step
                    waiting.append(used)
        return ""


CLOSED = ("foreach", "loop", "branch", "fallback", "on_error", "undo")
"""Parts of a step whose inner steps nobody outside sees."""
