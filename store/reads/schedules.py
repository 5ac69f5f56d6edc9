"""Reading schedules."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, and_, bindparam, func, select

from understudy.errors import UnknownSchedule
from understudy.protocol import unpacked
from understudy.reads import ScheduleInfo
from understudy.schedules import NewSchedule
from understudy.workflows import WORKFLOW

from ..db.prepared import Row, first, read
from ..db.statements import RUN, SCHEDULE, columns_of

STATUS = func.coalesce(RUN.c.status, "").label("last_status")
COLUMNS = [*columns_of(SCHEDULE, ScheduleInfo), SCHEDULE.c.definition, SCHEDULE.c.set_by, STATUS]
LAST_RUN = and_(
    RUN.c.namespace == SCHEDULE.c.namespace, RUN.c.session_id == SCHEDULE.c.last_session,
    RUN.c.run_id == SCHEDULE.c.last_run,
)  # fmt: skip
WITH_LAST_RUN = SCHEDULE.outerjoin(RUN, LAST_RUN)
MINE = SCHEDULE.c.namespace == bindparam("ns")

SELECT_SCHEDULES = select(*COLUMNS).select_from(WITH_LAST_RUN).where(MINE).order_by(SCHEDULE.c.name)
SELECT_SCHEDULE = select(*COLUMNS).select_from(WITH_LAST_RUN).where(MINE, SCHEDULE.c.name == bindparam("name"))
SELECT_DUE = (
    select(SCHEDULE.c.name, SCHEDULE.c.due_at)
    .where(MINE, SCHEDULE.c.due_at > 0, SCHEDULE.c.due_at <= bindparam("until"))
    .order_by(SCHEDULE.c.due_at, SCHEDULE.c.name)
)


def schedules(connection: Connection, namespace: str) -> list[ScheduleInfo]:
    """All of them, by their names."""
    found = map(_info, read(connection, SELECT_SCHEDULES, ns=namespace))
    return sorted(found, key=lambda schedule: schedule.name)  # whatever the database's order of texts is


def schedule(connection: Connection, namespace: str, name: str) -> ScheduleInfo:
    """One of them. Raises `UnknownSchedule`."""
    row = first(connection, SELECT_SCHEDULE, ns=namespace, name=name)
    if row is None:
        raise UnknownSchedule(f"there is no schedule {name!r} in this store")
    return _info(row)


def due_schedules(connection: Connection, namespace: str, until: int) -> list[tuple[str, int]]:
    """Name and time of those that fire until a time (microseconds), the first one first."""
    return [(row["name"], row["due_at"]) for row in read(connection, SELECT_DUE, ns=namespace, until=until)]


def _info(row: Row) -> ScheduleInfo:
    definition, by = row.pop("definition"), row.pop("set_by")
    wanted: NewSchedule = unpacked(definition, NewSchedule, f"schedule {row['name']}")
    timing: Any = wanted.timing
    rules = {name: getattr(wanted, name) for name in ("content", "session_id", "overlap", "catch_up", "window",
                                                       "max_firings", "memory")}  # fmt: skip
    times = {name: getattr(timing, name) for name in timing.__struct_fields__}
    of_each: Row = {"agent": "", "workflow": "", "key": "", "priority": 0}
    if wanted.place is not None:
        of_each |= {"key": wanted.place.key, "priority": wanted.place.priority}
    if wanted.spec is not None:
        of_each["workflow" if wanted.spec.get("kind") == WORKFLOW else "agent"] = wanted.spec["name"]
    return ScheduleInfo(**{**row, **rules, **times, **of_each, "paused": bool(row["paused"]), "by": by})
