"""Retention: what may be removed, and when. Each tree, and each session's events, go in a transaction of their own.

What may go is decided by functions that only read (`…_to_drop`), so a dry run says what a real one would do. Nothing
is removed that a sink has not taken yet: metric totals and exported spans stay exact. A session's messages go only with
its whole tree.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, and_, delete, func, or_, select, update

from understudy.errors import Conflict, SessionActive, UnknownSession

from ..db.statements import COMMAND, EVENT, EXPORT_CURSOR, MESSAGE, METRIC_STATE, RUN, SESSION, TIMER
from ..operations import code, notes, requests
from ..operations.wakeups import WAKEUP_TIMER
from ..transaction import Transaction

DAY = 86_400_000_000


@dataclass(frozen=True)
class Removed:
    """What one operation removed; `kept` says why nothing was, if nothing was.

    Attributes:
        last_seq: up to which a session's events went.
    """

    session_ids: tuple[str, ...] = ()
    runs: int = 0
    messages: int = 0
    events: int = 0
    last_seq: int = 0
    kept: str = ""

    @property
    def sessions(self) -> int:
        """How many of them."""
        return len(self.session_ids)


def finished_trees(connection: Connection, namespace: str, before: int) -> list[str]:
    """Roots of trees without any work, in which nothing happened since `before` (microseconds since 1970 UTC)."""
    statement = (
        select(SESSION.c.root_id)
        .where(SESSION.c.namespace == namespace, SESSION.c.root_id.not_in(_with_jobs(namespace)))
        .group_by(SESSION.c.root_id)
        .having(and_(func.max(SESSION.c.updated_at) < before, *_idle()))
        .order_by(func.max(SESSION.c.updated_at))
    )
    return list(connection.execute(statement).scalars())


def _idle() -> tuple[Any, ...]:
    return func.max(SESSION.c.active) == 0, func.sum(SESSION.c.inbox_count) == 0


def _with_jobs(namespace: str) -> Any:
    """Selects the roots of trees that will have work, unasked: they have wakeups, or commands at work."""
    woken = select(TIMER.c.session_id).where(TIMER.c.namespace == namespace, TIMER.c.name.startswith(WAKEUP_TIMER))
    with_commands = select(COMMAND.c.session_id).where(COMMAND.c.namespace == namespace, COMMAND.c.ended_at == 0)
    jobs = or_(SESSION.c.session_id.in_(woken), SESSION.c.session_id.in_(with_commands))
    return select(SESSION.c.root_id).where(SESSION.c.namespace == namespace, jobs)


def sessions_with_events(connection: Connection, namespace: str, before: int) -> list[str]:
    """Sessions that have events from before a time."""
    statement = (
        select(SESSION.c.session_id)
        .where(SESSION.c.namespace == namespace, SESSION.c.created_at < before, SESSION.c.pruned_seq < SESSION.c.seq)
        .order_by(SESSION.c.created_at)
    )
    return list(connection.execute(statement).scalars())


def drop_tree(tx: Transaction, root_id: str, before: int | None = None) -> Removed:
    """Remove a whole tree, if `tree_to_drop` says so; it says what is raised, too."""
    tree = select(SESSION.c.session_id).where(SESSION.c.namespace == tx.namespace, SESSION.c.root_id == root_id)
    known: set[str] = set()
    while known != (found := set(tx.read(tree).scalars())):  # some may have come before the others were locked
        tx.load(found)
        known = found
    removed = tree_to_drop(tx.connection, tx.namespace, root_id, before)
    if not removed.kept:
        requests.outlive(tx, removed.session_ids)
        notes.forget(tx, removed.session_ids)
        tx.drop(removed.session_ids)
        requests.forget_old(tx)
    return removed


def tree_to_drop(connection: Connection, namespace: str, root_id: str, before: int | None = None) -> Removed:
    """What removing a whole tree would remove now.

    Args:
        before: only if nothing happened in it since then; None for no matter when.

    Raises:
        UnknownSession: there is no such session (only without `before`).
        Conflict: it is not the root of its tree.
        SessionActive: it, or one below it, has work to do (only without `before`).
    """
    where = (SESSION.c.namespace == namespace, SESSION.c.session_id == root_id)
    root = connection.execute(select(SESSION.c.root_id).where(*where)).scalar()
    if root is None and before is not None:
        return Removed(kept="gone")
    if root is None:
        raise UnknownSession(f"there is no session {root_id!r} in this store", session_id=root_id)
    if root != root_id:
        raise Conflict(f"it belongs to the tree of {root}, which goes as a whole", session_id=root_id)
    columns = (SESSION.c.session_id, SESSION.c.active, SESSION.c.inbox_count, SESSION.c.updated_at)
    tree = select(*columns).where(SESSION.c.namespace == namespace, SESSION.c.root_id == root_id)
    rows = connection.execute(tree.order_by(SESSION.c.session_id)).all()
    busy = next((row.session_id for row in rows if row.active or row.inbox_count), None)
    if busy is not None and before is None:
        raise SessionActive(f"session {busy} has work to do", session_id=root_id)
    if busy is not None or (before is not None and max(row.updated_at for row in rows) >= before):
        return Removed(kept="at work")
    if before is not None and connection.execute(_with_jobs(namespace).where(SESSION.c.root_id == root_id)).first():
        return Removed(kept="at work")
    ids = tree.with_only_columns(SESSION.c.session_id)
    if _first_unexported(connection, namespace, ids):
        return Removed(kept="not exported yet")

    def count(table: Any) -> int:
        where = (table.c.namespace == namespace, table.c.session_id.in_(ids))
        return connection.execute(select(func.count()).select_from(table).where(*where)).scalar() or 0

    return Removed(tuple(row.session_id for row in rows), count(RUN), count(MESSAGE), count(EVENT))


def drop_events(tx: Transaction, session_id: str, before: int) -> Removed:
    """Remove a session's events from before a time, as far as `events_to_drop` says."""
    tx.load([session_id])  # locks it
    tx.flush()
    removed = events_to_drop(tx.connection, tx.namespace, session_id, before)
    if not removed.kept:
        tx.writes += 1
        mine = (EVENT.c.namespace == tx.namespace, EVENT.c.session_id == session_id)
        tx.connection.execute(delete(EVENT).where(*mine, EVENT.c.seq <= removed.last_seq))
        mine = (SESSION.c.namespace == tx.namespace, SESSION.c.session_id == session_id)
        tx.connection.execute(update(SESSION).where(*mine).values(pruned_seq=removed.last_seq))
    return removed


def events_to_drop(connection: Connection, namespace: str, session_id: str, before: int) -> Removed:
    """What removing a session's events from before a time would remove now.

    The log stays whole from `pruned_seq` on; events of a run that is not over, and unexported ones, stay.
    """
    where = (SESSION.c.namespace == namespace, SESSION.c.session_id == session_id)
    if connection.execute(select(SESSION.c.session_id).where(*where)).first() is None:
        return Removed(kept="gone")
    mine = (EVENT.c.namespace == namespace, EVENT.c.session_id == session_id)
    last = connection.execute(select(func.max(EVENT.c.seq)).where(*mine, EVENT.c.at < before)).scalar() or 0
    open_runs = select(RUN.c.run_id).where(
        RUN.c.namespace == namespace, RUN.c.session_id == session_id, RUN.c.finished_at == 0
    )
    first = connection.execute(select(func.min(EVENT.c.seq)).where(*mine, EVENT.c.run_id.in_(open_runs))).scalar()
    limits = [seq for seq in (first, _first_unexported(connection, namespace, [session_id])) if seq is not None]
    last = min([last, *(seq - 1 for seq in limits)])
    events = connection.execute(select(func.count()).select_from(EVENT).where(*mine, EVENT.c.seq <= last)).scalar()
    if not events:
        return Removed(kept="not over" if first else "not exported yet" if limits else "newer")
    return Removed(events=events, last_seq=last)


def _first_unexported(connection: Connection, namespace: str, session_ids: Any) -> int | None:
    """The first `seq` of an event that the metrics' checkpoint or one of the sinks has not taken yet."""
    measured = and_(METRIC_STATE.c.namespace == EVENT.c.namespace, METRIC_STATE.c.writer == EVENT.c.writer)
    slowest = (
        select(EXPORT_CURSOR.c.writer, func.min(EXPORT_CURSOR.c.writer_seq).label("writer_seq"))
        .where(EXPORT_CURSOR.c.namespace == namespace)
        .group_by(EXPORT_CURSOR.c.writer)
        .subquery()
    )
    taken = (func.coalesce(METRIC_STATE.c.writer_seq, 0), func.coalesce(slowest.c.writer_seq, 0))
    statement = (
        select(func.min(EVENT.c.seq))
        .select_from(EVENT.outerjoin(METRIC_STATE, measured).outerjoin(slowest, slowest.c.writer == EVENT.c.writer))
        .where(EVENT.c.namespace == namespace, EVENT.c.session_id.in_(session_ids))
        .where(or_(*(EVENT.c.writer_seq > seq for seq in taken)))
    )
    found: int | None = connection.execute(statement).scalar()
    return found


def unneeded_code(connection: Connection, namespace: str, at: int, without: Collection[str] = ()) -> set[str]:
    """Hashes of the code that no session but those named has needed for a day."""
    return code.unused(connection, namespace, at - DAY, without)


def drop_code(tx: Transaction) -> int:
    """Remove code that no session has needed for a day."""
    return code.drop_unused(tx, tx.now - DAY)
