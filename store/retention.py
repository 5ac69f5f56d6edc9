"""Retention: what may be removed, and when. Each tree, and each session's events, go in a transaction of their own.

Nothing is removed that a sink has not taken yet: metric totals and exported spans stay exact. A session's messages go
only with its whole tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, and_, delete, func, or_, select, update

from understudy.errors import InvalidInput, SessionActive

from . import code
from .progress import SPANS
from .statements import EVENT, EXPORT_CURSOR, METRIC_STATE, RUN, SESSION
from .transaction import Row, Transaction

DAY = 86_400_000_000


@dataclass(frozen=True)
class Removed:
    """What one operation removed; `kept` says why nothing was, if nothing was."""

    sessions: int = 0
    events: int = 0
    kept: str = ""


def finished_trees(connection: Connection, namespace: str, before: int) -> list[str]:
    """Roots of trees without any work, in which nothing happened since `before` (microseconds since 1970 UTC)."""
    statement = (
        select(SESSION.c.root_id)
        .where(SESSION.c.namespace == namespace)
        .group_by(SESSION.c.root_id)
        .having(and_(func.max(SESSION.c.updated_at) < before, *_idle()))
        .order_by(func.max(SESSION.c.updated_at))
    )
    return list(connection.execute(statement).scalars())


def _idle() -> tuple[Any, ...]:
    return func.max(SESSION.c.active) == 0, func.sum(SESSION.c.inbox_count) == 0


def sessions_with_events(connection: Connection, namespace: str, before: int) -> list[str]:
    """Sessions that have events from before a time."""
    statement = (
        select(SESSION.c.session_id)
        .where(SESSION.c.namespace == namespace, SESSION.c.created_at < before, SESSION.c.pruned_seq < SESSION.c.seq)
        .order_by(SESSION.c.created_at)
    )
    return list(connection.execute(statement).scalars())


def drop_tree(tx: Transaction, root_id: str, before: int | None = None) -> Removed:
    """Remove a whole tree.

    Args:
        before: only if nothing happened in it since then; None for no matter when.

    Raises:
        UnknownSession: there is no such session.
        InvalidInput: it is not the root of its tree.
        SessionActive: it, or one below it, has work to do (only without `before`).
    """
    root = tx.find(root_id)
    if root is None and before is not None:
        return Removed(kept="gone")
    root = tx.session(root_id)
    if root["parent_id"] is not None:
        raise InvalidInput(f"it belongs to the tree of {root['root_id']}, which goes as a whole", session_id=root_id)
    tree = select(SESSION.c.session_id).where(SESSION.c.namespace == tx.namespace, SESSION.c.root_id == root_id)
    ids = sorted(tx.read(tree).scalars())
    tx.load(ids)
    rows: list[Row] = [tx.session(session_id) for session_id in ids]
    busy = next((row for row in rows if row["active"] or row["inbox_count"]), None)
    if busy is not None and before is None:
        raise SessionActive(f"session {busy['session_id']} has work to do", session_id=root_id)
    if busy is not None or (before is not None and max(row["updated_at"] for row in rows) >= before):
        return Removed(kept="at work")
    if _first_unexported(tx, tree):
        return Removed(kept="not exported yet")
    where = (EVENT.c.namespace == tx.namespace, EVENT.c.session_id.in_(tree))
    events = tx.connection.execute(select(func.count()).select_from(EVENT).where(*where)).scalar() or 0
    tx.drop(ids)
    return Removed(len(ids), events)


def drop_events(tx: Transaction, session_id: str, before: int) -> Removed:
    """Remove a session's events from before a time.

    The log stays whole from `pruned_seq` on; events of a run that is not over, and unexported ones, stay.
    """
    row = tx.find(session_id)
    if row is None:
        return Removed(kept="gone")
    mine = (EVENT.c.namespace == tx.namespace, EVENT.c.session_id == session_id)
    cut = tx.read(select(func.max(EVENT.c.seq)).where(*mine, EVENT.c.at < before), session_id).scalar() or 0
    open_runs = select(RUN.c.run_id).where(
        RUN.c.namespace == tx.namespace, RUN.c.session_id == session_id, RUN.c.finished_at == 0
    )
    first = tx.read(select(func.min(EVENT.c.seq)).where(*mine, EVENT.c.run_id.in_(open_runs)), session_id).scalar()
    limits = [seq for seq in (first, _first_unexported(tx, [session_id])) if seq is not None]
    cut = min([cut, *(seq - 1 for seq in limits)])
    events = tx.connection.execute(delete(EVENT).where(*mine, EVENT.c.seq <= cut)).rowcount
    if events <= 0:
        return Removed(kept="not over" if first else "not exported yet" if limits else "newer")
    tx.writes += 1
    mine = (SESSION.c.namespace == tx.namespace, SESSION.c.session_id == session_id)
    tx.connection.execute(update(SESSION).where(*mine).values(pruned_seq=cut))
    return Removed(0, events)


def _first_unexported(tx: Transaction, session_ids: Any) -> int | None:
    """The first `seq` of an event that the metrics' checkpoint or the span exporter has not taken yet."""
    measured = and_(METRIC_STATE.c.namespace == EVENT.c.namespace, METRIC_STATE.c.writer == EVENT.c.writer)
    exported = and_(
        EXPORT_CURSOR.c.namespace == EVENT.c.namespace, EXPORT_CURSOR.c.writer == EVENT.c.writer,
        EXPORT_CURSOR.c.sink == SPANS,
    )  # fmt: skip
    taken = (func.coalesce(METRIC_STATE.c.writer_seq, 0), func.coalesce(EXPORT_CURSOR.c.writer_seq, 0))
    statement = (
        select(func.min(EVENT.c.seq))
        .select_from(EVENT.outerjoin(METRIC_STATE, measured).outerjoin(EXPORT_CURSOR, exported))
        .where(EVENT.c.namespace == tx.namespace, EVENT.c.session_id.in_(session_ids))
        .where(or_(*(EVENT.c.writer_seq > seq for seq in taken)))
    )
    found: int | None = tx.read(statement).scalar()
    return found


def drop_code(tx: Transaction) -> int:
    """Remove code that no session has needed for a day."""
    return code.drop_unused(tx, tx.now - DAY)
