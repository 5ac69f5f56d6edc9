"""What loops know of their runs, and what goes to triage of those: written in the transaction that ends the run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sqlalchemy import bindparam, delete, insert, select, update

from understudy.events import ERROR_UNCUT
from understudy.loops import COMPLETED, KEPT_CHARACTERS, begun, ended, has_failed
from understudy.messages import storable
from understudy.reads import LoopMemory, LoopRun
from understudy.redaction import redacted
from understudy.schedules import SOURCE, schedule_of

from ..db.prepared import Row
from ..db.session_row import SessionRow
from ..db.statements import LOOP_MEMORY, RUN, columns_of
from ..transaction import Transaction
from . import triage

COLUMNS = columns_of(LOOP_MEMORY, LoopMemory)

SELECT_SOURCE = select(RUN.c.source).where(
    RUN.c.namespace == bindparam("ns"), RUN.c.session_id == bindparam("session"), RUN.c.run_id == bindparam("run")
)


def run_ended(
    tx: Transaction, row: SessionRow, run_id: str, status: str, error: dict[str, Any] | None, text: str
) -> None:  # fmt: skip
    """Do what follows from the end of a run that a schedule has begun; nothing for any other, which costs no statement.

    Args:
        error: of the run; None if it has none.
        text: its result.
    """
    name = schedule_of(run_id)
    if name is None or tx.read_one(SELECT_SOURCE, row.session_id, session=row.session_id, run=run_id) != SOURCE:
        return
    code = str((error or {}).get("code") or status)
    failure = redacted(str((error or {}).get("message") or f"the run ended as {status}")[:ERROR_UNCUT])
    said = text if status == COMPLETED else f"{code}: {failure}"
    known = memory(tx, name)
    now = ended(known, LoopRun(run_id, status, storable(said)[:KEPT_CHARACTERS], tx.now))
    if now is not None:
        _write(tx, known, now)
    if has_failed(status):
        triage.add(tx, name, code, failure, row.session_id, run_id)
    elif status == COMPLETED:
        triage.completed(tx, name, run_id)


def run_begun(tx: Transaction, known: LoopMemory, run_id: str) -> None:
    """A firing of a loop has begun a run.

    Args:
        known: what `memory` has said in this transaction.
    """
    _write(tx, known, begun(known, run_id))


def memory(tx: Transaction, name: str) -> LoopMemory:
    """What a loop knows, which nobody else writes until the commit; empty if nothing was recorded of it.

    It waits for nobody, since this transaction may have sessions locked: where another one has this lock, `StoreBusy`
    has the whole transaction tried again.
    """
    statement = select(*COLUMNS).where(*_of(tx, name))
    if tx.connection.dialect.name != "sqlite":
        statement = statement.with_for_update(nowait=True)
    found = tx.connection.execute(statement).mappings().first()
    return memory_of(dict(found)) if found is not None else LoopMemory(name)


def reset(tx: Transaction, name: str) -> bool:
    """Forget what a loop knows; runs that go on are forgotten, too. True if it knew anything."""
    if not memory(tx, name).updated_at:
        return False
    tx.writes += 1
    tx.connection.execute(delete(LOOP_MEMORY).where(*_of(tx, name)))
    return True


def memory_of(row: Row) -> LoopMemory:
    """The record of a row."""
    recent = tuple(LoopRun(**run) for run in row["recent"] or ())
    return LoopMemory(**{**row, "pending": tuple(row["pending"] or ()), "recent": recent})


def _of(tx: Transaction, name: str) -> tuple[Any, ...]:
    return LOOP_MEMORY.c.namespace == tx.namespace, LOOP_MEMORY.c.name == name


def _write(tx: Transaction, before: LoopMemory, now: LoopMemory) -> None:
    tx.writes += 1
    values = {**asdict(now), "updated_at": tx.now}
    name = values.pop("name")
    if before.updated_at:
        tx.connection.execute(update(LOOP_MEMORY).where(*_of(tx, name)).values(**values))
    else:
        tx.connection.execute(insert(LOOP_MEMORY).values(namespace=tx.namespace, name=name, **values))
