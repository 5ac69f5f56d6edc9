"""What a person looks at: the sessions at work, what happened lately, pages of sessions and events, budgets.

Each query reads a bounded number of rows, however much the store holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from sqlalchemy import Connection, case, func, or_, select

from understudy.errors import InvalidInput
from understudy.event_wire import EventWire
from understudy.events import (
    ChildRestarted,
    InputRequested,
    ModelCallCompleted,
    ModelCallFailed,
    ModelCallReissued,
    RunAccepted,
    RunFinished,
    SessionActivated,
    SessionCrashed,
    SessionMoved,
    SessionQuarantined,
    ShutdownForced,
    ToolInDoubt,
)
from understudy.messages import Usage
from understudy.reads import (
    AccountRecord,
    Activity,
    NodeSessions,
    RunSummary,
    SessionAtWork,
    SessionPage,
    SessionRecord,
    Totals,
    Working,
)

from ..budgets import owners
from ..db.engine import now
from ..db.statements import ACCOUNT, EVENT, RUN, SESSION, columns_of
from ..entries import event_from_row
from ..operations.presence import log_ends
from .queries import INFO_COLUMNS, session_info

LATEST = 1_000
"""Sessions, newest first, among which those are counted that have ended."""

BEHIND = 10_000
"""Places in a log by which whoever looks at what happens can be behind; older ones are left out then."""

SCANNED = 5_000
"""Sessions that one page of a search looks at."""

ACTIVITY_TYPES = tuple(
    kind.type
    for kind in (
        ChildRestarted, InputRequested, ModelCallCompleted, ModelCallFailed, ModelCallReissued, RunAccepted,
        RunFinished, SessionActivated, SessionCrashed, SessionMoved, SessionQuarantined, ShutdownForced, ToolInDoubt,
    )
)  # fmt: skip
"""Events that tell how a cluster is doing."""

WORKING_COLUMNS = [*INFO_COLUMNS, SESSION.c.wait_since, SESSION.c.stuck, SESSION.c.cancel_reason]


def working(connection: Connection, namespace: str, limit: int = 500) -> Working:
    """Sessions with work, those first that want attention, and how many have each status."""
    here = (SESSION.c.namespace == namespace, SESSION.c.active == 1)
    counted = select(SESSION.c.status, func.count()).where(*here).group_by(SESSION.c.status)
    urgent = case((SESSION.c.status == "waiting_for_input", 0), (SESSION.c.stuck > 0, 0), else_=1)
    listed = select(*WORKING_COLUMNS).where(*here).order_by(urgent, SESSION.c.updated_at.desc()).limit(limit)
    return Working(
        [SessionAtWork(**row) for row in connection.execute(listed).mappings()],
        {status: count for status, count in connection.execute(counted)},
    )


def holders(connection: Connection, namespace: str) -> list[tuple[str, int]]:
    """The processes that hold a session with work, as `(node_id, pid)`."""
    here = (SESSION.c.namespace == namespace, SESSION.c.active == 1, SESSION.c.actor_pid.is_not(None))
    return [
        (node_id, pid)
        for node_id, pid in connection.execute(select(SESSION.c.node_id, SESSION.c.actor_pid).where(*here))
    ]


def totals(connection: Connection, namespace: str) -> Totals:
    """How many sessions there are, and the statuses of the newest that have nothing to do."""
    number = select(func.count()).select_from(SESSION).where(SESSION.c.namespace == namespace)
    newest = (
        select(SESSION.c.status, SESSION.c.active)
        .where(SESSION.c.namespace == namespace)
        .order_by(SESSION.c.created_at.desc())
        .limit(LATEST)
        .subquery()
    )
    counted = select(newest.c.status, func.count()).where(newest.c.active == 0).group_by(newest.c.status)
    latest = {status: count for status, count in connection.execute(counted.order_by(newest.c.status))}
    return Totals(connection.execute(number).scalar() or 0, latest)


def activity(
    connection: Connection, namespace: str, cursors: dict[str, int] | None = None, limit: int = 1_000
) -> Activity:  # fmt: skip
    """What happened since the last look, of the types `ACTIVITY_TYPES`.

    Args:
        cursors: what the last look returned, the place in each journal's own log; None begins with the latest events.
        limit: places in each log that one look covers; what is left comes with the next, unless the log grows faster
            than anybody looks.
    """
    found: dict[str, int] = {}
    events: list[EventWire] = []
    for writer, last in log_ends(connection, namespace).items():
        after = max(0, last - limit) if cursors is None else max(cursors.get(writer, 0), last - BEHIND)
        found[writer] = end = min(last, after + limit)
        if end <= after:  # as with all whose node is gone
            continue
        log = (EVENT.c.namespace == namespace, EVENT.c.writer == writer)
        some = select(EVENT).where(*log, EVENT.c.writer_seq > after, EVENT.c.writer_seq <= end)
        wanted = some.where(EVENT.c.type.in_(ACTIVITY_TYPES)).order_by(EVENT.c.writer_seq)
        events += [event_from_row(row).to_wire() for row in connection.execute(wanted).mappings()]
    return Activity(found, events)


def page(
    connection: Connection,
    namespace: str,
    *,
    text: str = "",
    statuses: Iterable[str] = (),
    outcomes: Iterable[str] = (),
    agent: str = "",
    root_id: str = "",
    by: str = "created_at",
    since: int = 0,
    until: int = 0,
    cursor: tuple[int, str] | None = None,
    limit: int = 50,
) -> SessionPage:
    """A page of sessions, the latest first.

    A search looks at `SCANNED` sessions at a time, so that a page can have fewer than `limit`, and yet a next one. An
    index finds those that it looks at: by the time, and if that is `created_at` by `agent` or `root_id` too. The other
    conditions choose among these.

    Args:
        text: only sessions whose id, agent or tree has it, in any case.
        statuses: only those with one of these; none for all.
        outcomes: only those whose last run ended with one of these, and that are at no other; none for all.
        agent: only those of this agent.
        root_id: only those of this tree.
        by: the time that orders them, and that `since` and `until` are about: `created_at`, or `ended_at` for those
            of which a run has ended.
        since, until: microseconds since 1970 UTC, both within; 0 for no bound.

    Raises:
        InvalidInput: `by` is another.
    """
    if by not in ("created_at", "ended_at"):
        raise InvalidInput(f"sessions are ordered by created_at or ended_at, not by {by!r}")
    time = SESSION.c[by]
    here = [SESSION.c.namespace == namespace]
    exact = {name: value for name, value in (("agent", agent), ("root_id", root_id)) if value}
    indexed = by == "created_at"  # by an index of both
    here += [SESSION.c[name] == value for name, value in exact.items()] if indexed else []
    earliest = since or (1 if by == "ended_at" else 0)
    here += [time >= earliest] if earliest else []
    # One bound on each side: with a second one SQLite takes the index of the time alone.
    latest = min(filter(None, (until, cursor[0] if cursor else 0)), default=0)
    here += [time <= latest] if latest else []
    here += [or_(time != cursor[0], SESSION.c.session_id > cursor[1])] if cursor else []
    order = (time.desc(), SESSION.c.session_id)
    few = select(*INFO_COLUMNS).where(*here).order_by(*order).limit(SCANNED).subquery()
    found = select(few).order_by(few.c[by].desc(), few.c.session_id).limit(limit)
    if not indexed:
        found = found.where(*(few.c[name] == value for name, value in exact.items()))
    if text:
        wanted = text.lower()
        holds = (
            func.lower(few.c[name]).contains(wanted, autoescape=True) for name in ("session_id", "agent", "root_id")
        )
        found = found.where(or_(*holds))
    if statuses:
        found = found.where(few.c.status.in_(list(statuses)))
    if outcomes:
        found = found.where(few.c.ended_as.in_(list(outcomes)), few.c.active == 0)
    rows = [SessionRecord(*row) for row in connection.execute(found)]
    if len(rows) == limit:
        return SessionPage(rows, (getattr(rows[-1], by), rows[-1].session_id))
    ids = select(time, SESSION.c.session_id).where(*here).order_by(*order)
    end = connection.execute(ids.offset(SCANNED - 1).limit(1)).first()
    return SessionPage(rows, (end[0], end.session_id) if end is not None else None)


def node_sessions(connection: Connection, namespace: str) -> list[NodeSessions]:
    """How many sessions with work each node has, by status."""
    here = (SESSION.c.namespace == namespace, SESSION.c.active == 1)
    held = case((SESSION.c.actor_pid.is_not(None), 1), else_=0).label("held")
    counted = select(SESSION.c.node_id, SESSION.c.status, held, func.count()).where(*here)
    grouped = counted.group_by(SESSION.c.node_id, SESSION.c.status, held)
    return [NodeSessions(*row) for row in connection.execute(grouped)]


def event_page(
    connection: Connection, namespace: str, session_id: str, before: int | None = None, limit: int = 200
) -> list[EventWire]:
    """The last events of a session before a `seq`, in order and in wire form. Raises `UnknownSession`."""
    session_info(connection, namespace, session_id)
    found = select(EVENT).where(EVENT.c.namespace == namespace, EVENT.c.session_id == session_id)
    if before is not None:
        found = found.where(EVENT.c.seq < before)
    rows = connection.execute(found.order_by(EVENT.c.seq.desc()).limit(limit)).mappings()
    return [event_from_row(row).to_wire() for row in rows][::-1]


def latest_runs(connection: Connection, namespace: str, session_id: str, limit: int = 50) -> list[RunSummary]:
    """The latest runs of a session, newest first, without what went in and came out."""
    found = select(*columns_of(RUN, RunSummary))
    found = found.where(RUN.c.namespace == namespace, RUN.c.session_id == session_id)
    rows = connection.execute(found.order_by(RUN.c.accepted_at.desc()).limit(limit)).mappings()
    return [RunSummary(**{**row, "usage": Usage.from_wire(row["usage"]).to_wire()}) for row in rows]


def budgets(connection: Connection, namespace: str, session_id: str) -> list[AccountRecord]:
    """The accounts that a session is charged to: its own, and those of the sessions above it, nearest first.

    Of `seconds`, `allowed` and `spent` are microseconds; `spent` is the time since the scope began.

    Raises:
        UnknownSession: there is no such session.
    """
    session_info(connection, namespace, session_id)
    key = (SESSION.c.namespace == namespace, SESSION.c.session_id == session_id)
    holders = [owner for owner, _ in owners(connection.execute(select(SESSION.c.accounts).where(*key)).scalar())]
    if not holders:
        return []
    found = select(*columns_of(ACCOUNT, AccountRecord))
    found = found.where(ACCOUNT.c.namespace == namespace, ACCOUNT.c.session_id.in_(holders))
    at = now()
    kept = []
    for account in (AccountRecord(*row) for row in connection.execute(found)):
        if account.session_id != session_id and account.scope != "tree":
            continue  # those above are charged to their trees only
        if account.resource == "seconds" and account.since:
            account = replace(account, spent=at - account.since)
        kept.append(account)
    return sorted(kept, key=lambda account: (holders.index(account.session_id), account.scope, account.resource))
