"""Reading: what clients, the command line and the projection ask of the store. Nothing here changes anything."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, and_, bindparam, func, or_, select

from understudy.errors import UnknownRun, UnknownSession
from understudy.events import ENVELOPE, Event
from understudy.records import PAGE

from . import tables
from .statements import (
    CODE_BLOB,
    DRAIN,
    EVENT,
    EXPORT_CURSOR,
    LOADED_AT_ONCE,
    MESSAGE,
    METRIC_STATE,
    QUESTION,
    RUN,
    SELECT_CALLS,
    SESSION,
    TIMER,
    calls_of_round,
    table_of,
)
from .transaction import Row
from .wakeups import WAKEUP_TIMER

OWNER = table_of(tables.Owner)

INFO = (
    "session_id", "agent", "kind", "status", "parent_id", "root_id", "depth", "call_id", "epoch", "seq", "actor_pid",
    "frame_id", "node_id", "restarts", "tokens_used", "tokens_redone", "cost_used", "created_at", "updated_at",
    "metadata_json", "error", "run_id", "round", "closed", "active", "wait", "wait_attempt", "placement",
)  # fmt: skip
INFO_COLUMNS = [SESSION.c[name] for name in INFO]
SELECT_RUN = select(RUN).where(
    RUN.c.namespace == bindparam("ns"), RUN.c.session_id == bindparam("session"), RUN.c.run_id == bindparam("run")
)


def event_from_row(row: Any) -> Event:
    """Restore an event from its row."""
    body = dict(row["body"])
    envelope = dict(zip(ENVELOPE[4:], body.pop("_"), strict=True))
    return Event.from_wire(
        {"type": row["type"], "seq": row["seq"], "at": row["at"], "session_id": row["session_id"],
         "run_id": row["run_id"], "writer_seq": row["writer_seq"], **envelope, "data": body}
    )  # fmt: skip


def session_info(connection: Connection, namespace: str, session_id: str) -> Row:
    """One session. Raises `UnknownSession`."""
    statement = select(*INFO_COLUMNS).where(SESSION.c.namespace == namespace, SESSION.c.session_id == session_id)
    row = connection.execute(statement).mappings().first()
    if row is None:
        raise UnknownSession(f"there is no session {session_id!r} in this store", session_id=session_id)
    return dict(row) | _asked(connection, namespace, dict(row))


def session_list(
    connection: Connection, namespace: str, *, live_only: bool = False, roots_only: bool = False, limit: int = 100
) -> list[Row]:
    """Sessions, newest first."""
    statement = select(*INFO_COLUMNS).where(SESSION.c.namespace == namespace)
    newest_first: Any = SESSION.c.created_at.desc()
    if roots_only:
        # Ordered by the parent, which they all lack, because PostgreSQL does not see then that the index is in order.
        statement = statement.where(SESSION.c.parent_id.is_(None)).order_by(SESSION.c.parent_id.desc())
    if live_only:
        # The few are sorted: SQLite would rather walk all sessions in order, so it must not see that an index has it.
        statement, newest_first = statement.where(SESSION.c.active == 1), (SESSION.c.created_at + 0).desc()
    statement = statement.order_by(newest_first, SESSION.c.session_id).limit(limit)
    rows = [dict(row) for row in connection.execute(statement).mappings()]
    return [row | _asked(connection, namespace, row) for row in rows]


def _asked(connection: Connection, namespace: str, row: Row) -> Row:
    """What a session waits for, if it does wait for a person."""
    if row["status"] != "waiting_for_input":
        return {}
    return {"pending": questions(connection, namespace, row["session_id"])}


def questions(connection: Connection, namespace: str, session_id: str) -> list[Row]:
    """What the current run of a session asks people and has no answer to, oldest first; nothing if it shall end."""
    names = ("call_id", "asked", "run_id", "kind", "prompt", "options", "asked_at")
    same_run = and_(
        SESSION.c.namespace == QUESTION.c.namespace, SESSION.c.session_id == QUESTION.c.session_id,
        SESSION.c.run_id == QUESTION.c.run_id,
    )  # fmt: skip
    statement = (
        select(*(QUESTION.c[name] for name in names))
        .join(SESSION, same_run)
        .where(QUESTION.c.namespace == namespace, QUESTION.c.session_id == session_id, QUESTION.c.answered_at == 0)
        .where(SESSION.c.cancel_reason.is_(None))
        .order_by(QUESTION.c.asked_at, QUESTION.c.call_id)
    )
    return [dict(row) for row in connection.execute(statement).mappings()]


def asked(connection: Connection, namespace: str, session_id: str, call_id: str) -> int:
    """How many times a call has asked people, answered or not: the number of its last question."""
    where = (QUESTION.c.namespace == namespace, QUESTION.c.session_id == session_id, QUESTION.c.call_id == call_id)
    return connection.execute(select(func.max(QUESTION.c.asked)).where(*where)).scalar() or 0


def wakeups(connection: Connection, namespace: str, session_id: str) -> list[Row]:
    """The wakeups of a session, the first that is due first. Raises `UnknownSession`."""
    session_info(connection, namespace, session_id)
    where = (TIMER.c.namespace == namespace, TIMER.c.session_id == session_id, TIMER.c.name.startswith(WAKEUP_TIMER))
    statement = select(TIMER.c.name, TIMER.c.payload).where(*where).order_by(TIMER.c.due_at, TIMER.c.name)
    names = ("prompt", "due_at", "every")
    return [
        {"name": row.name.removeprefix(WAKEUP_TIMER), **{name: row.payload[name] for name in names}}
        for row in connection.execute(statement)
    ]


def tree(connection: Connection, namespace: str, session_id: str) -> list[Row]:
    """The session and all below it, parents before children, with the tool each is at."""
    root_id = session_info(connection, namespace, session_id)["root_id"]
    statement = (
        select(*INFO_COLUMNS, SESSION.c.calls_open)
        .where(SESSION.c.namespace == namespace, SESSION.c.root_id == root_id)
        .order_by(SESSION.c.depth, SESSION.c.created_at, SESSION.c.call_id)
    )
    rows = [dict(row) for row in connection.execute(statement).mappings()]
    kept: set[str] = set()
    found = []
    for row in rows:
        if row["session_id"] == session_id or row["parent_id"] in kept:
            kept.add(row["session_id"])
            asked = _asked(connection, namespace, row)
            found.append({**row, **asked, "tools": _open_tools(connection, namespace, row)})
    return found


def _open_tools(connection: Connection, namespace: str, row: Row) -> list[str]:
    """The tools that the session is at; `row` is changed."""
    if not row.pop("calls_open") or not row["active"]:
        return []

    def stored(keys: Row) -> list[Row]:
        key = {"ns": namespace, "session": row["session_id"], **keys}
        return [dict(call) for call in connection.execute(SELECT_CALLS, key).mappings()]

    calls = calls_of_round(stored, row["run_id"], row["round"])
    return [call["tool"] for call in calls if call["state"] in ("requested", "started")]


def messages(connection: Connection, namespace: str, session_id: str, after: int = 0, limit: int = PAGE) -> list[Row]:
    """Messages of a session in order, in wire form."""
    session_info(connection, namespace, session_id)
    statement = (
        select(MESSAGE.c.seq, MESSAGE.c.body)
        .where(MESSAGE.c.namespace == namespace, MESSAGE.c.session_id == session_id, MESSAGE.c.seq > after)
        .order_by(MESSAGE.c.seq)
        .limit(limit)
    )
    return [{**row["body"], "seq": row["seq"]} for row in connection.execute(statement).mappings()]


def session_events(
    connection: Connection, namespace: str, session_id: str, after: int = 0, limit: int = PAGE
) -> list[Event]:
    """Events of a session in order."""
    statement = (
        select(EVENT)
        .where(EVENT.c.namespace == namespace, EVENT.c.session_id == session_id, EVENT.c.seq > after)
        .order_by(EVENT.c.seq)
        .limit(limit)
    )
    return [event_from_row(row) for row in connection.execute(statement).mappings()]


def writer_events(connection: Connection, namespace: str, writer: str, after: int, limit: int) -> list[Event]:
    """Events that one journal committed, in its order."""
    statement = (
        select(EVENT)
        .where(EVENT.c.namespace == namespace, EVENT.c.writer == writer, EVENT.c.writer_seq > after)
        .order_by(EVENT.c.writer_seq)
        .limit(limit)
    )
    return [event_from_row(row) for row in connection.execute(statement).mappings()]


def run_info(connection: Connection, namespace: str, session_id: str, run_id: str) -> Row:
    """One run, with what it waits for if it is paused. Raises `UnknownSession` or `UnknownRun`."""
    key = {"ns": namespace, "session": session_id, "run": run_id}
    row = connection.execute(SELECT_RUN, key).mappings().first()
    if row is None:
        session_info(connection, namespace, session_id)
        raise UnknownRun(f"the session has no run {run_id!r}", session_id=session_id)
    return dict(row) | _asked(connection, namespace, dict(row))


def runs(connection: Connection, namespace: str, session_id: str) -> list[Row]:
    """All runs of a session, oldest first."""
    session_info(connection, namespace, session_id)
    statement = (
        select(RUN).where(RUN.c.namespace == namespace, RUN.c.session_id == session_id).order_by(RUN.c.accepted_at)
    )
    return [dict(row) for row in connection.execute(statement).mappings()]


def homes(connection: Connection, namespace: str, session_ids: list[str]) -> dict[str, tuple[str, int]]:
    """The node that looks after each of these sessions, and its `seq`; those that don't exist are left out."""
    statement = select(SESSION.c.session_id, SESSION.c.node_id, SESSION.c.seq).where(
        SESSION.c.namespace == namespace, SESSION.c.session_id.in_(session_ids)
    )
    return {session_id: (node_id, seq) for session_id, node_id, seq in connection.execute(statement)}


def drains(connection: Connection, namespace: str) -> list[Row]:
    """The nodes that are drained, or were, and how many sessions with work each still has (`left`)."""
    here = and_(SESSION.c.namespace == namespace, SESSION.c.active == 1, SESSION.c.node_id == DRAIN.c.node_id)
    left = select(func.count()).select_from(SESSION).where(here).scalar_subquery()
    statement = select(DRAIN, left.label("left")).where(DRAIN.c.namespace == namespace).order_by(DRAIN.c.started_at)
    return [dict(row) for row in connection.execute(statement).mappings()]


ACTIVE = (
    "session_id", "root_id", "placement", "epoch", "frame_id", "actor_pid", "wait", "wait_since", "wait_holder",
    "node_id", "cancel_reason", "updated_at", "incarnation", "deaths", "round", "run_usage", "run_id",
)  # fmt: skip
"""What a node service must know of a session that it takes up, or gives away."""


def active_sessions(
    connection: Connection,
    namespace: str,
    nodes: Iterable[str] | None,
    *,
    session_ids: Iterable[str] | None = None,
    frame_id: str | None = None,
    may_be_ready: bool = False,
) -> list[Row]:
    """Sessions with work to do, for a node service that takes them up, the one that was written longest ago first.

    Args:
        nodes, session_ids, frame_id: only those at home there, only these, only those in that frame.
        may_be_ready: leave out those that wait for something else than a model, unless they were asked to end.
    """
    where = [SESSION.c.namespace == namespace, SESSION.c.active == 1]
    if nodes is not None:
        where.append(SESSION.c.node_id.in_(list(nodes)))
    if session_ids is not None:
        where.append(SESSION.c.session_id.in_(list(session_ids)))
    if frame_id is not None:
        where.append(SESSION.c.frame_id == frame_id)
    if may_be_ready:
        where.append(or_(SESSION.c.wait.is_(None), SESSION.c.wait == "model", SESSION.c.cancel_reason.is_not(None)))
    statement = select(*(SESSION.c[name] for name in ACTIVE)).where(*where)
    return [dict(row) for row in connection.execute(statement.order_by(SESSION.c.updated_at)).mappings()]


def activations(connection: Connection, namespace: str, session_ids: Iterable[str]) -> dict[str, Row]:
    """Which activation and which run sessions have, by id; also of those without work."""
    names = ("session_id", "incarnation", "epoch", "run_id", "updated_at")
    found: dict[str, Row] = {}
    wanted = list(session_ids)
    for start in range(0, len(wanted), LOADED_AT_ONCE):  # an IN has as many parameters as a statement may have
        where = (SESSION.c.namespace == namespace, SESSION.c.session_id.in_(wanted[start : start + LOADED_AT_ONCE]))
        rows = connection.execute(select(*(SESSION.c[name] for name in names)).where(*where)).mappings()
        found |= {row["session_id"]: dict(row) for row in rows}
    return found


def timers(connection: Connection, namespace: str, node_id: str, until: int) -> list[Row]:
    """Timers of sessions at home on a node that are due by a time (microseconds), the first one first."""
    of_session = and_(SESSION.c.namespace == TIMER.c.namespace, SESSION.c.session_id == TIMER.c.session_id)
    statement = (
        select(TIMER.c.session_id, TIMER.c.name, TIMER.c.due_at)
        .join(SESSION, of_session)
        .where(TIMER.c.namespace == namespace, TIMER.c.due_at <= until, SESSION.c.node_id == node_id)
        .order_by(TIMER.c.due_at)
    )
    return [dict(row) for row in connection.execute(statement).mappings()]


def blob(connection: Connection, namespace: str, digest: str) -> bytes | None:
    """Code by its hash."""
    statement = select(CODE_BLOB.c.data).where(CODE_BLOB.c.namespace == namespace, CODE_BLOB.c.digest == digest)
    data: bytes | None = connection.execute(statement).scalar()
    return data


def metric_state(connection: Connection, namespace: str, writer: str) -> Row | None:
    """The last checkpoint of a writer's metric totals."""
    statement = select(METRIC_STATE).where(METRIC_STATE.c.namespace == namespace, METRIC_STATE.c.writer == writer)
    row = connection.execute(statement).mappings().first()
    return dict(row) if row else None


def export_cursor(connection: Connection, namespace: str, writer: str, sink: str) -> int:
    """How far a sink has taken a writer's events."""
    statement = select(EXPORT_CURSOR.c.writer_seq).where(
        EXPORT_CURSOR.c.namespace == namespace, EXPORT_CURSOR.c.writer == writer, EXPORT_CURSOR.c.sink == sink
    )
    return connection.execute(statement).scalar() or 0


def owner(connection: Connection, namespace: str) -> Row | None:
    """Who owns the namespace."""
    row = connection.execute(select(OWNER).where(OWNER.c.namespace == namespace)).mappings().first()
    return dict(row) if row else None
