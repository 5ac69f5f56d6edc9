"""Rules about triage, and what loops know."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sqlalchemy import and_, false, literal_column, or_, select

from understudy.loops import KEPT_RUNS

from ..db.prepared import Row
from ..db.statements import LOOP_MEMORY, NAMESPACE, TRIAGE
from .check_scope import Books, Found, Scope, Wrong, selected


@selected
def triage(scope: Scope) -> Iterator[Wrong]:
    """An entry in triage is of a schedule, has come at least once, and was opened again less often than that; one that
    is open was resolved by nobody."""
    mine = false() if scope.some else TRIAGE.c.namespace == NAMESPACE
    who: Any = literal_column("'triage ' || id").label("session_id")
    counted = or_(TRIAGE.c.count < 1, TRIAGE.c.reopened >= TRIAGE.c.count, TRIAGE.c.schedule == "")
    never = and_(TRIAGE.c.resolved_at == 0, TRIAGE.c.resolved_by != "")
    found = select(who, TRIAGE.c.count, TRIAGE.c.reopened, TRIAGE.c.resolved_by)
    said = "it has come {count} times, and was opened again {reopened} times"
    yield found.where(mine, counted), said.format_map
    yield found.where(mine, never), lambda row: f"it is open, and {row['resolved_by']} has resolved it"


@selected
def loops(scope: Scope) -> Iterator[Wrong]:
    """Each run that a loop has attempted is counted once: it passed, failed, was cancelled, or is pending."""
    mine = false() if scope.some else LOOP_MEMORY.c.namespace == NAMESPACE
    names = ("attempted", "passed", "failed", "cancelled", "pending", "recent")
    who: Any = literal_column("'loop ' || name").label("session_id")
    yield select(who, *(LOOP_MEMORY.c[name] for name in names)).where(mine), _problem


def _problem(row: Row) -> str | None:
    pending, recent = row["pending"] or [], row["recent"] or []
    ended = row["passed"] + row["failed"] + row["cancelled"]
    if row["attempted"] != ended + len(pending):
        return f"{row['attempted']} were attempted, {ended} have ended, and {len(pending)} are pending"
    if len({*pending}) != len(pending) or {*pending} & {run["run_id"] for run in recent}:
        return "a run is pending twice, or has ended as well"
    if len(recent) != min(ended, KEPT_RUNS):
        return f"{ended} have ended, and it knows how {len(recent)} of them did"
    return None


TRIAGE_RULES: dict[str, Callable[[Books], Iterable[Found]]] = {"triage": triage, "loops": loops}
