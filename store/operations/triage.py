"""Triage: what becomes of an entry, in the transaction that ends the run that failed, or of whom looks after it."""

from __future__ import annotations

from typing import Any

from sqlalchemy import func, insert, select, update

from understudy.errors import UnknownTriageEntry
from understudy.loops import SHOWN_ENTRIES
from understudy.messages import storable
from understudy.reads import TriageEntry
from understudy.triage import LONGEST_TEXT, MOST_ENTRIES, entry_identifier, shared_identifier

from ..db.prepared import Row
from ..db.statements import TRIAGE, columns_of
from ..transaction import Transaction

COLUMNS = columns_of(TRIAGE, TriageEntry)


def request_key(entry_id: str) -> str:
    """Instead of a session's id, in the requests that are remembered: no session has such an id."""
    return f"triage {entry_id}"


def add(tx: Transaction, schedule: str, code: str, text: str, session_id: str = "", run_id: str = "") -> None:
    """Count a failure of what a schedule begins. An entry of the same failure that was resolved is open again.

    Args:
        session_id, run_id: the run that has failed; empty if none could be begun.
    """
    text = storable(text)[:LONGEST_TEXT]
    entry_id = entry_identifier(schedule, code, text.replace(run_id, "") if run_id else text)
    found = _locked(tx, entry_id)
    if found is None and _count(tx, schedule) >= MOST_ENTRIES:
        entry_id = shared_identifier(schedule, code)
        found = _locked(tx, entry_id)
    last = {"text": text, "last_at": tx.now, "last_session": session_id, "last_run": run_id}
    if found is not None:
        again = {"resolved_at": 0, "resolved_by": "", "reopened": found.reopened + (0 if found.is_open else 1)}
        _write(tx, entry_id, {"count": found.count + 1, **last, **again})
        return
    first: Row = {"count": 1, "first_at": tx.now, "resolved_at": 0, "resolved_by": "", "reopened": 0, "retry_run": ""}
    tx.writes += 1
    values = {"namespace": tx.namespace, "id": entry_id, "schedule": schedule, "code": code, **first, **last}
    tx.connection.execute(insert(TRIAGE).values(**values))


def resolve(tx: Transaction, entry_id: str) -> bool:
    """Take an entry out of the inbox, until the same failure comes again. True if it was open. Raises
    `UnknownTriageEntry`."""
    if not known(tx, entry_id).is_open:
        return False
    _write(tx, entry_id, {"resolved_at": tx.now, "resolved_by": tx.by})
    return True


def tried_again(tx: Transaction, entry_id: str, run_id: str) -> None:
    """Note the run that shall show whether the failure is over: if it completes, the entry is resolved."""
    _write(tx, entry_id, {"retry_run": run_id})


def completed(tx: Transaction, schedule: str, run_id: str) -> None:
    """A run has completed: the entry for which it was begun, if it was for one, is resolved."""
    mine = (TRIAGE.c.schedule == schedule, TRIAGE.c.retry_run == run_id, TRIAGE.c.resolved_at == 0)
    found = select(TRIAGE.c.id).where(TRIAGE.c.namespace == tx.namespace, *mine)
    for entry_id in list(tx.connection.execute(found).scalars()):
        entry = _locked(tx, entry_id)
        if entry is not None and entry.is_open:
            _write(tx, entry_id, {"resolved_at": tx.now, "resolved_by": ""})


def open_of(tx: Transaction, schedule: str) -> list[TriageEntry]:
    """The entries of a schedule that an agent sees. They are only read: what it sees is committed with its input."""
    mine = (TRIAGE.c.namespace == tx.namespace, TRIAGE.c.schedule == schedule, TRIAGE.c.resolved_at == 0)
    latest = (TRIAGE.c.last_at.desc(), TRIAGE.c.id)
    rows = tx.connection.execute(select(*COLUMNS).where(*mine).order_by(*latest).limit(SHOWN_ENTRIES))
    return sorted(map(_entry, rows), key=lambda entry: (-entry.last_at, entry.id))


def known(tx: Transaction, entry_id: str) -> TriageEntry:
    """An entry, which nobody else writes until the commit. Raises `UnknownTriageEntry`."""
    found = _locked(tx, entry_id)
    if found is None:
        raise UnknownTriageEntry(f"there is no entry {entry_id!r} in triage")
    return found


# Rows. What is read here is not kept in the transaction: it is written at once.


def _of(tx: Transaction, entry_id: str) -> tuple[Any, ...]:
    return TRIAGE.c.namespace == tx.namespace, TRIAGE.c.id == entry_id


def _locked(tx: Transaction, entry_id: str) -> TriageEntry | None:
    """An entry as it is. It waits for nobody, since this transaction has sessions locked: where another one has this
    lock, `StoreBusy` has the whole transaction tried again."""
    statement = select(*COLUMNS).where(*_of(tx, entry_id))
    if tx.connection.dialect.name != "sqlite":
        statement = statement.with_for_update(nowait=True)
    found = tx.connection.execute(statement).first()
    return _entry(found) if found is not None else None


def _entry(row: Any) -> TriageEntry:
    return TriageEntry(**row._mapping)


def _count(tx: Transaction, schedule: str) -> int:
    mine = (TRIAGE.c.namespace == tx.namespace, TRIAGE.c.schedule == schedule)
    return tx.connection.execute(select(func.count()).select_from(TRIAGE).where(*mine)).scalar() or 0


def _write(tx: Transaction, entry_id: str, values: Row) -> None:
    tx.writes += 1
    tx.connection.execute(update(TRIAGE).where(*_of(tx, entry_id)).values(**values))
