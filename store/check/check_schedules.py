"""Rules about schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sqlalchemy import false, literal_column, select

from understudy.protocol import unpacked
from understudy.schedules import NewSchedule
from understudy.wakeups import microseconds

from ..db.prepared import Row
from ..db.statements import NAMESPACE, SCHEDULE
from .check_scope import Books, Found, Scope, Wrong, selected

OUTCOMES = ("fired", "skipped", "missed", "failed")


@selected
def schedules(scope: Scope) -> Iterator[Wrong]:
    """Each due time of a schedule that has passed is counted once: it fired, was skipped, was missed or failed. One
    that has ended is due at no time; the next due time of another is later than the last."""
    mine = false() if scope.some else SCHEDULE.c.namespace == NAMESPACE
    names = ("definition", "first_at", "next_at", "due_at", "last_at", *OUTCOMES)
    who: Any = literal_column("'schedule ' || name").label("session_id")
    yield select(who, *(SCHEDULE.c[name] for name in names)).where(mine), _problem


def _problem(row: Row) -> str | None:
    wanted: NewSchedule = unpacked(row["definition"], NewSchedule, "the definition")
    ended, counted = row["next_at"] == 0, sum(row[name] for name in OUTCOMES)
    if ended != (row["due_at"] == 0):
        return f"its next due time is {row['next_at']}, and it fires at {row['due_at']}"
    if not ended and row["next_at"] <= row["last_at"]:
        return f"its next due time is {row['next_at']}, and {row['last_at']} was dealt with"
    if wanted.max_firings and row["fired"] > wanted.max_firings:
        return f"it has fired {row['fired']} times, and may {wanted.max_firings} times"
    passed = _passed(wanted, row["first_at"], row["next_at"])
    if passed is not None and passed != counted:
        return f"{passed} due times have passed, and {counted} are counted"
    return None


def _passed(wanted: NewSchedule, first_at: int, next_at: int) -> int | None:
    """How many due times have passed; None where that can't be known without going through them."""
    timing, period = wanted.timing, microseconds(wanted.timing.every)
    if timing.at:
        return 0 if next_at else 1
    if not timing.every:
        return None
    if next_at:
        return (next_at - first_at) // period
    return (timing.until - first_at) // period + 1 if timing.until and not wanted.max_firings else None


SCHEDULE_RULES: dict[str, Callable[[Books], Iterable[Found]]] = {"schedules": schedules}
