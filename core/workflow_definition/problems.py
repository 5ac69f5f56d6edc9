"""The problems of a definition, gathered with their places."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..places import WHOLE, Place, shown
from ..suggestions import did_you_mean

MOST_PROBLEMS = 200
"""So many are reported."""

LONGEST_PROBLEM = 500
"""Characters."""

LONGEST_NAME, MOST_NAMES = 64, 200
"""A name is compared with others up to this length, and with so many of them: each comparison takes its time."""

MOST_LISTED = 20


class Problems:
    """Gathers problems."""

    def __init__(self) -> None:
        self._found: dict[tuple[Place, str], None] = {}
        self._closed: set[Place] = set()
        self._left_out = 0

    def add(self, place: Place, text: str, *, alone: bool = False) -> None:
        """Something is wrong at this place.

        Args:
            alone: whatever else would be reported of the place follows from it.
        """
        text = text if len(text) <= LONGEST_PROBLEM else f"{text[: LONGEST_PROBLEM - 1]}…"
        if (place, text) in self._found or place in self._closed:
            return
        if self.full:
            self._left_out += 1
            return
        self._found[place, text] = None
        if alone:
            self._closed.add(place)

    @property
    def full(self) -> bool:
        """No more are reported."""
        return len(self._found) >= MOST_PROBLEMS

    def in_order(self, order: Iterable[Place]) -> list[dict[str, str]]:
        """They, as `{"field", "problem"}`, in this order of the places that there are; what something lacks comes
        first of what is wrong within it."""
        where = {place: number for number, place in enumerate(order)}
        found = sorted(self._found, key=lambda item: _rank(item[0], where))
        entries = [{"field": shown(place), "problem": text} for place, text in found]
        if self._left_out:
            entries.append({"field": WHOLE, "problem": f"there are {self._left_out} more problems"})
        return entries


def _rank(place: Place, where: dict[Place, int]) -> tuple[int, int]:
    known = place
    while known not in where and known:
        known = known[:-1]
    return where.get(known, 0), int(known != place)


def meant(name: str, known: Iterable[str]) -> str:
    """` (did you mean …?)`, where one of the last names is close."""
    names = [*known][-MOST_NAMES:]
    return did_you_mean(name, names) if len(name) <= LONGEST_NAME else ""


def listing(names: Iterable[str]) -> str:
    """Some names."""
    found = [*names]
    more = f" and {len(found) - MOST_LISTED} more" if len(found) > MOST_LISTED else ""
    return ", ".join(found[:MOST_LISTED]) + more


def quoted(value: Any) -> str:
    """A value as it is shown in a problem."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
