"""Reading: what clients, the command line and the projection ask of the store. Nothing here changes anything."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

from msgspec.structs import replace
from sqlalchemy import Connection, Select, and_, bindparam, case, func, or_, select

from understudy.errors import InvalidInput, UnknownRun, UnknownSession
from understudy.events import Event
from understudy.messages import Message
from understudy.notes import HEAD, SCOPES, TODO_KEY
from understudy.reads import DrainInfo, Note, OwnerRecord, PendingInput, RunRecord, SessionRecord, Wakeup
from understudy.records import PAGE

from ..db import tables
from ..db.prepared import Row, first, objects, read
from ..db.session_row import ActiveSession
from ..db.statements import (
    CODE_BLOB,
    COMMAND,
    DRAIN,
    EVENT,
    EXPORT_CURSOR,
    LOADED_AT_ONCE,
    MESSAGE,
    METRIC_STATE,
    NOTE,
    QUESTION,
    RUN,
    SELECT_CALLS,
    SESSION,
    TIMER,
    calls_of_round,
    columns_of,
    table_of,
)
from ..entries import event_from_row
from ..operations.wakeups import WAKEUP_TIMER
from .pending import below

OWNER = table_of(tables.Owner)


class DueTimer(NamedTuple):
    """A session's timer."""

    session_id: str
    name: str
    due_at: int


class NodeCommand(NamedTuple):
    """A command of a node, at work or not.

    Attributes:
        node_id: whose service looks after it.
        closed: 1 if its session takes no more input.
    """

    session_id: str
    node_id: str
    key: str
    call_id: str
    state: str
    stop_at: int
    ended_at: int
    closed: int


class Checkpoint(NamedTuple):
    """A writer's metric totals, up to an event of its log."""

    writer_seq: int
    state: dict[str, Any]


# Of a session at work the store hears when its process ends. One that has nothing to do may rest in a process, and when
# that is killed, or everything ends, nobody may write so.
AT_WORK_IN = case((SESSION.c.active == 1, SESSION.c.actor_pid)).label("actor_pid")
INFO_COLUMNS = [AT_WORK_IN if column.name == "actor_pid" else column for column in columns_of(SESSION, SessionRecord)]
RUN_COLUMNS = columns_of(RUN, RunRecord)
ACTIVE_COLUMNS = columns_of(SESSION, ActiveSession)


def _of_session(table: Any) -> tuple[Any, Any]:
    """The rows of one session."""
    return table.c.namespace == bindparam("ns"), table.c.session_id == bindparam("session")


def _of_writer(table: Any) -> tuple[Any, Any]:
    """The rows of one journal."""
    return table.c.namespace == bindparam("ns"), table.c.writer == bindparam("writer")


SELECT_INFO = select(*INFO_COLUMNS).where(*_of_session(SESSION))
SELECT_QUESTIONS = (
    select(*columns_of(QUESTION, PendingInput))
    .join(
        SESSION,
        and_(
            SESSION.c.namespace == QUESTION.c.namespace, SESSION.c.session_id == QUESTION.c.session_id,
            SESSION.c.run_id == QUESTION.c.run_id,
        ),
    )
    .where(*_of_session(QUESTION), QUESTION.c.answered_at == 0, SESSION.c.cancel_reason.is_(None))
    .order_by(QUESTION.c.asked_at, QUESTION.c.call_id)
)  # fmt: skip
SELECT_LAST_ASKED = select(func.max(QUESTION.c.asked).label("asked")).where(
    *_of_session(QUESTION), QUESTION.c.call_id == bindparam("call")
)
SELECT_WAKEUPS = (
    select(TIMER.c.name, TIMER.c.payload)
    .where(*_of_session(TIMER), TIMER.c.name.startswith(WAKEUP_TIMER))
    .order_by(TIMER.c.due_at, TIMER.c.name)
)
SELECT_NOTES = (
    select(*columns_of(NOTE, Note))
    .where(
        NOTE.c.namespace == bindparam("ns"), NOTE.c.scope == bindparam("scope"), NOTE.c.owner == bindparam("owner"),
        NOTE.c.key.not_in((HEAD, TODO_KEY)),
    )
    .order_by(NOTE.c.updated_at, NOTE.c.key)
)  # fmt: skip
SELECT_TREE = (
    select(*INFO_COLUMNS, SESSION.c.calls_open)
    .where(SESSION.c.namespace == bindparam("ns"), SESSION.c.root_id == bindparam("root"))
    .order_by(SESSION.c.depth, SESSION.c.created_at, SESSION.c.call_id)
)
SELECT_MESSAGES = (
    select(MESSAGE.c.seq, MESSAGE.c.body)
    .where(*_of_session(MESSAGE), MESSAGE.c.seq > bindparam("after"))
    .order_by(MESSAGE.c.seq)
    .limit(bindparam("limit"))
)
SELECT_EVENTS = (
    select(EVENT)
    .where(*_of_session(EVENT), EVENT.c.seq > bindparam("after"))
    .order_by(EVENT.c.seq)
    .limit(bindparam("limit"))
)
SELECT_WRITER_EVENTS = (
    select(EVENT)
    .where(*_of_writer(EVENT), EVENT.c.writer_seq > bindparam("after"))
    .order_by(EVENT.c.writer_seq)
    .limit(bindparam("limit"))
)
SELECT_RUN = select(*RUN_COLUMNS).where(*_of_session(RUN), RUN.c.run_id == bindparam("run"))
SELECT_RUNS = select(*RUN_COLUMNS).where(*_of_session(RUN)).order_by(RUN.c.accepted_at)
SELECT_HOMES = select(SESSION.c.session_id, SESSION.c.node_id, SESSION.c.seq).where(
    SESSION.c.namespace == bindparam("ns"), SESSION.c.session_id.in_(bindparam("sessions", expanding=True))
)
SELECT_ACTIVATIONS = select(*ACTIVE_COLUMNS).where(
    SESSION.c.namespace == bindparam("ns"), SESSION.c.session_id.in_(bindparam("sessions", expanding=True))
)
SELECT_TIMERS = (
    select(*columns_of(TIMER, DueTimer))
    .join(SESSION, and_(SESSION.c.namespace == TIMER.c.namespace, SESSION.c.session_id == TIMER.c.session_id))
    .where(
        TIMER.c.namespace == bindparam("ns"), TIMER.c.due_at <= bindparam("until"),
        SESSION.c.node_id == bindparam("node"),
    )
    .order_by(TIMER.c.due_at)
)  # fmt: skip
SELECT_COMMANDS = (
    select(*columns_of(COMMAND, NodeCommand), SESSION.c.closed)
    .join(SESSION, and_(SESSION.c.namespace == COMMAND.c.namespace, SESSION.c.session_id == COMMAND.c.session_id))
    .where(
        COMMAND.c.namespace == bindparam("ns"),
        or_(COMMAND.c.node_id == bindparam("node"), COMMAND.c.key.in_(bindparam("keys", expanding=True))),
        or_(COMMAND.c.ended_at == 0, COMMAND.c.ended_at > bindparam("since")),
    )
    .order_by(COMMAND.c.ended_at > 0, COMMAND.c.ended_at.desc(), COMMAND.c.key)
)  # fmt: skip
SELECT_BLOB = select(CODE_BLOB.c.data).where(
    CODE_BLOB.c.namespace == bindparam("ns"), CODE_BLOB.c.digest == bindparam("digest")
)
SELECT_METRIC_STATE = select(*columns_of(METRIC_STATE, Checkpoint)).where(*_of_writer(METRIC_STATE))
SELECT_EXPORT_CURSOR = select(EXPORT_CURSOR.c.writer_seq).where(
    *_of_writer(EXPORT_CURSOR), EXPORT_CURSOR.c.sink == bindparam("sink")
)
SELECT_OWNER = select(*columns_of(OWNER, OwnerRecord)).where(OWNER.c.namespace == bindparam("ns"))


def session_info(connection: Connection, namespace: str, session_id: str) -> SessionRecord:
    """One session. Raises `UnknownSession`."""
    found = objects(connection, SELECT_INFO, SessionRecord, ns=namespace, session=session_id)
    if not found:
        raise UnknownSession(f"there is no session {session_id!r} in this store", session_id=session_id)
    return replace(found[0], pending=_pending(connection, namespace, session_id, found[0].status))


def session_list(
    connection: Connection, namespace: str, *, live_only: bool = False, roots_only: bool = False, limit: int = 100
) -> list[SessionRecord]:
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
    rows = connection.execute(statement).mappings().all()
    return [
        SessionRecord(**row, pending=_pending(connection, namespace, row["session_id"], row["status"])) for row in rows
    ]


def _pending(connection: Connection, namespace: str, session_id: str, status: str) -> list[PendingInput] | None:
    """What a session waits for, if it does wait for a person."""
    return questions(connection, namespace, session_id) if status == "waiting_for_input" else None


def questions(connection: Connection, namespace: str, session_id: str) -> list[PendingInput]:
    """What the current run of a session asks people and has no answer to, oldest first; nothing if it shall end."""
    rows = read(connection, SELECT_QUESTIONS, ns=namespace, session=session_id)
    return [PendingInput(**{**row, "options": tuple(row["options"] or ())}) for row in rows]


def asked(connection: Connection, namespace: str, session_id: str, call_id: str) -> int:
    """How many times a call has asked people, answered or not: the number of its last question."""
    [row] = read(connection, SELECT_LAST_ASKED, ns=namespace, session=session_id, call=call_id)
    return row["asked"] or 0


def wakeups(connection: Connection, namespace: str, session_id: str) -> list[Wakeup]:
    """The wakeups of a session, the first that is due first. Raises `UnknownSession`."""
    session_info(connection, namespace, session_id)
    found = []
    for row in read(connection, SELECT_WAKEUPS, ns=namespace, session=session_id):
        set_to = row["payload"]
        name = row["name"].removeprefix(WAKEUP_TIMER)
        found.append(Wakeup(name, set_to["prompt"], set_to["due_at"], set_to["every"]))
    return found


def notes(connection: Connection, namespace: str, scope: str, owner: str) -> list[Note]:
    """The notes of a session, an agent or a project, or the board of a tree, the one that was written last at the end.

    Raises:
        InvalidInput: there is no such scope.
    """
    if scope not in SCOPES:
        raise InvalidInput(f"scope is {scope!r}, and must be one of {', '.join(SCOPES)}")
    rows = read(connection, SELECT_NOTES, ns=namespace, scope=scope, owner=owner)
    return [Note(**{**row, "pinned": bool(row["pinned"])}) for row in rows]


def tree(connection: Connection, namespace: str, session_id: str) -> list[SessionRecord]:
    """The session and all below it, parents before children, with the tool each is at."""
    root_id = session_info(connection, namespace, session_id).root_id
    rows = read(connection, SELECT_TREE, ns=namespace, root=root_id)
    kept: set[str] = set()
    found = []
    for row in rows:
        if row["session_id"] == session_id or row["parent_id"] in kept:
            kept.add(row["session_id"])
            tools = _open_tools(connection, namespace, row)
            pending = _pending(connection, namespace, row["session_id"], row["status"])
            found.append(SessionRecord(**row, pending=pending, tools=tools))
    return found


def _open_tools(connection: Connection, namespace: str, row: Row) -> list[str]:
    """The tools that the session is at; `row` is changed."""
    if not row.pop("calls_open") or not row["active"]:
        return []

    def stored(keys: Row) -> list[Row]:
        return read(connection, SELECT_CALLS, ns=namespace, session=row["session_id"], **keys)

    calls = calls_of_round(stored, row["run_id"], row["round"])
    return [call["tool"] for call in calls if call["state"] in ("requested", "approved", "started")]


def messages(
    connection: Connection, namespace: str, session_id: str, after: int = 0, limit: int = PAGE
) -> list[Message]:
    """Messages of a session in order."""
    session_info(connection, namespace, session_id)
    rows = read(connection, SELECT_MESSAGES, ns=namespace, session=session_id, after=after, limit=limit)
    return [Message.from_wire({**row["body"], "seq": row["seq"]}) for row in rows]


def session_events(
    connection: Connection, namespace: str, session_id: str, after: int = 0, limit: int = PAGE
) -> list[Event]:
    """Events of a session in order."""
    rows = read(connection, SELECT_EVENTS, ns=namespace, session=session_id, after=after, limit=limit)
    return [event_from_row(row) for row in rows]


def writer_events(connection: Connection, namespace: str, writer: str, after: int, limit: int) -> list[Event]:
    """Events that one journal committed, in its order."""
    rows = read(connection, SELECT_WRITER_EVENTS, ns=namespace, writer=writer, after=after, limit=limit)
    return [event_from_row(row) for row in rows]


def run_info(connection: Connection, namespace: str, session_id: str, run_id: str) -> RunRecord:
    """One run, with what it waits for if it is paused: by its own questions, or by those of sub-agents that it waits
    for. One whose input is a part of another run is paused with that. Raises `UnknownSession` or `UnknownRun`."""
    found = objects(connection, SELECT_RUN, RunRecord, ns=namespace, session=session_id, run=run_id)
    if not found:
        session_info(connection, namespace, session_id)
        raise UnknownRun(f"the session has no run {run_id!r}", session_id=session_id)
    run = replace(found[0], pending=_pending(connection, namespace, session_id, found[0].status))
    if run.merged_into and not run.finished_at:
        of = run_info(connection, namespace, session_id, run.merged_into)
        return replace(run, status=of.status, pending=of.pending) if of.status == "waiting_for_input" else run
    asked = below(connection, namespace, session_id, run_id) if run.started_at and not run.finished_at else []
    return replace(run, status="waiting_for_input", pending=[*(run.pending or ()), *asked]) if asked else run


def runs(connection: Connection, namespace: str, session_id: str) -> list[RunRecord]:
    """All runs of a session, oldest first."""
    session_info(connection, namespace, session_id)
    return objects(connection, SELECT_RUNS, RunRecord, ns=namespace, session=session_id)


def homes(connection: Connection, namespace: str, session_ids: list[str]) -> dict[str, tuple[str, int]]:
    """The node that looks after each of these sessions, and its `seq`; those that don't exist are left out."""
    rows = read(connection, SELECT_HOMES, ns=namespace, sessions=session_ids)
    return {row["session_id"]: (row["node_id"], row["seq"]) for row in rows}


def drains(connection: Connection, namespace: str) -> list[DrainInfo]:
    """The nodes that are drained, or were, and how many sessions with work each still has."""
    here = and_(SESSION.c.namespace == namespace, SESSION.c.active == 1, SESSION.c.node_id == DRAIN.c.node_id)
    left = select(func.count()).select_from(SESSION).where(here).scalar_subquery()
    columns = (DRAIN.c.node_id, DRAIN.c.reason, left, DRAIN.c.started_at, DRAIN.c.deadline, DRAIN.c.finished_at)
    statement = select(*columns).where(DRAIN.c.namespace == namespace).order_by(DRAIN.c.started_at)
    return [DrainInfo(*row) for row in connection.execute(statement)]


def active_sessions(
    connection: Connection,
    namespace: str,
    nodes: Iterable[str] | None,
    *,
    session_ids: Iterable[str] | None = None,
    frame_id: str | None = None,
    may_be_ready: bool = False,
) -> list[ActiveSession]:
    """Sessions with work to do, for a node service that takes them over, the one that was written longest ago first.

    Args:
        nodes, session_ids, frame_id: only those at home there, only these, only those in that frame.
        may_be_ready: leave out those that wait for something else than a model, unless they were asked to end.
    """
    lists: dict[str, Iterable[str] | None] = {"nodes": nodes, "sessions": session_ids}
    given: dict[str, Any] = {name: list(values) for name, values in lists.items() if values is not None}
    if frame_id is not None:
        given["frame"] = frame_id
    statement = select_active(frozenset(given), may_be_ready)
    return objects(connection, statement, ActiveSession, ns=namespace, **given)


@cache
def select_active(given: frozenset[str], may_be_ready: bool) -> Select[Any]:
    """The statement of `active_sessions` for these parameters: nodes, sessions, frame."""
    where = [SESSION.c.namespace == bindparam("ns"), SESSION.c.active == 1]
    if "nodes" in given:
        where.append(SESSION.c.node_id.in_(bindparam("nodes", expanding=True)))
    if "sessions" in given:
        where.append(SESSION.c.session_id.in_(bindparam("sessions", expanding=True)))
    if "frame" in given:
        where.append(SESSION.c.frame_id == bindparam("frame"))
    if may_be_ready:
        where.append(or_(SESSION.c.wait.is_(None), SESSION.c.wait == "model", SESSION.c.cancel_reason.is_not(None)))
    return select(*ACTIVE_COLUMNS).where(*where).order_by(SESSION.c.updated_at)


def activations(connection: Connection, namespace: str, session_ids: Iterable[str]) -> dict[str, ActiveSession]:
    """The same of sessions by their ids, also of those without work."""
    found: dict[str, ActiveSession] = {}
    wanted = list(session_ids)
    for start in range(0, len(wanted), LOADED_AT_ONCE):  # an IN has as many parameters as a statement may have
        some = wanted[start : start + LOADED_AT_ONCE]
        rows = objects(connection, SELECT_ACTIVATIONS, ActiveSession, ns=namespace, sessions=some)
        found |= {row.session_id: row for row in rows}
    return found


def timers(connection: Connection, namespace: str, node_id: str, until: int) -> list[DueTimer]:
    """Timers of sessions at home on a node that are due by a time (microseconds), the first one first."""
    return objects(connection, SELECT_TIMERS, DueTimer, ns=namespace, node=node_id, until=until)


def commands_of_node(
    connection: Connection, namespace: str, node_id: str, keys: list[str], since: int
) -> list[NodeCommand]:
    """The commands of a node, and others of these keys: first those at work, then those that have ended since a time
    (microseconds), the last one first."""
    return objects(connection, SELECT_COMMANDS, NodeCommand, ns=namespace, node=node_id, keys=keys, since=since)


def blob(connection: Connection, namespace: str, digest: str) -> bytes | None:
    """Code by its hash."""
    row = first(connection, SELECT_BLOB, ns=namespace, digest=digest)
    return bytes(row["data"]) if row is not None else None


def metric_state(connection: Connection, namespace: str, writer: str) -> Checkpoint | None:
    """The last checkpoint of a writer's metric totals."""
    return next(iter(objects(connection, SELECT_METRIC_STATE, Checkpoint, ns=namespace, writer=writer)), None)


def export_cursor(connection: Connection, namespace: str, writer: str, sink: str) -> int:
    """How far a sink has taken a writer's events."""
    row = first(connection, SELECT_EXPORT_CURSOR, ns=namespace, writer=writer, sink=sink)
    return row["writer_seq"] if row is not None else 0


def owner(connection: Connection, namespace: str) -> OwnerRecord | None:
    """Who owns the namespace."""
    return next(iter(objects(connection, SELECT_OWNER, OwnerRecord, ns=namespace)), None)
