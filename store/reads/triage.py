"""Reading the triage inbox, and what loops know."""

from __future__ import annotations

from sqlalchemy import Connection, bindparam, func, or_, select

from understudy.errors import UnknownTriageEntry
from understudy.reads import LoopMemory, TriageEntry

from ..db.prepared import first, read
from ..db.statements import LOOP_MEMORY, TRIAGE, columns_of
from ..operations.loops import memory_of

MINE = TRIAGE.c.namespace == bindparam("ns")

SELECT_ENTRIES = (
    select(*columns_of(TRIAGE, TriageEntry))
    .where(MINE, or_(TRIAGE.c.resolved_at == 0, bindparam("resolved") == 1))
    .order_by(TRIAGE.c.last_at.desc(), TRIAGE.c.id)
    .limit(bindparam("most"))
)
SELECT_ENTRY = select(*columns_of(TRIAGE, TriageEntry)).where(MINE, TRIAGE.c.id == bindparam("id"))
SELECT_MEMORY = select(*columns_of(LOOP_MEMORY, LoopMemory)).where(
    LOOP_MEMORY.c.namespace == bindparam("ns"), LOOP_MEMORY.c.name == bindparam("name")
)

MOST_COUNTED = 100
SELECT_OPEN = (
    select(TRIAGE.c.schedule, func.count().label("open"))
    .where(MINE, TRIAGE.c.resolved_at == 0)
    .group_by(TRIAGE.c.schedule)
    .order_by(func.count().desc(), TRIAGE.c.schedule)
    .limit(MOST_COUNTED)
)

MOST_READ = 1_000
"""Entries that are read at once."""


def triage(connection: Connection, namespace: str, resolved: bool = False) -> list[TriageEntry]:
    """The open entries, the one that has come last first; with `resolved` those, too."""
    rows = read(connection, SELECT_ENTRIES, ns=namespace, resolved=int(resolved), most=MOST_READ)
    return sorted((TriageEntry(**row) for row in rows), key=lambda entry: (-entry.last_at, entry.id))


def triage_entry(connection: Connection, namespace: str, entry_id: str) -> TriageEntry:
    """One of them. Raises `UnknownTriageEntry`."""
    row = first(connection, SELECT_ENTRY, ns=namespace, id=entry_id)
    if row is None:
        raise UnknownTriageEntry(f"there is no entry {entry_id!r} in triage")
    return TriageEntry(**row)


def open_entries(connection: Connection, namespace: str) -> dict[str, int]:
    """How many are open, by schedule; of the `MOST_COUNTED` schedules that have most."""
    return {row["schedule"]: row["open"] for row in read(connection, SELECT_OPEN, ns=namespace)}


def loop_memory(connection: Connection, namespace: str, name: str) -> LoopMemory:
    """What a loop knows of its runs; nothing of one that has had none."""
    row = first(connection, SELECT_MEMORY, ns=namespace, name=name)
    return memory_of(row) if row is not None else LoopMemory(name)
