"""Reading a trace: the events of all runs of one tree of sessions that are in it."""

from __future__ import annotations

from sqlalchemy import Connection, and_, select

from understudy.errors import EventsPruned, UnknownRun
from understudy.event_wire import EventWire
from understudy.reads import RunRecord

from ..db.statements import EVENT, RUN, SESSION
from ..entries import event_from_row
from .queries import run_info, session_info

TRACE_PAGE = 5_000
"""Events that are read at once."""


def trace_events(
    connection: Connection, namespace: str, session_id: str, run_id: str | None = None, after: tuple[str, int] = ("", 0)
) -> list[EventWire]:
    """Up to `TRACE_PAGE` events of a run's trace in wire form, by session and `seq`: its tree's other runs in the same
    trace included, sub-agents' above all.

    Args:
        run_id: None for the session's last one.
        after: `(session_id, seq)` of the last event that is known.

    Raises:
        UnknownSession, UnknownRun: there is none.
        EventsPruned: the run's events were removed.
    """
    root_id = session_info(connection, namespace, session_id).root_id
    run = run_info(connection, namespace, session_id, run_id or _last_run(connection, namespace, session_id))
    if not after[0]:
        _require_events(connection, namespace, run)
    found: list[EventWire] = []
    for other_id, run_ids in _runs_in(connection, namespace, root_id, run.trace_id, after[0]).items():
        # One at a time: backends read the whole namespace rather than many sessions in the order of their ids.
        statement = (
            select(EVENT)
            .where(EVENT.c.namespace == namespace, EVENT.c.session_id == other_id, EVENT.c.run_id.in_(run_ids))
            .where(EVENT.c.seq > (after[1] if other_id == after[0] else 0))
            .order_by(EVENT.c.seq)
            .limit(TRACE_PAGE - len(found))
        )
        found += [event_from_row(row).to_wire() for row in connection.execute(statement).mappings()]
        if len(found) >= TRACE_PAGE:
            break
    return found


def _runs_in(connection: Connection, namespace: str, root_id: str, trace_id: str, from_id: str) -> dict[str, list[str]]:
    """The runs of a tree that are in a trace, by session, from a session id on."""
    same = and_(RUN.c.namespace == SESSION.c.namespace, RUN.c.session_id == SESSION.c.session_id)
    statement = (
        select(SESSION.c.session_id, RUN.c.run_id)
        .join(RUN, same)
        .where(SESSION.c.namespace == namespace, SESSION.c.root_id == root_id, RUN.c.trace_id == trace_id)
    )
    found: dict[str, list[str]] = {}
    for session_id, run_id in connection.execute(statement):
        if session_id >= from_id:
            found.setdefault(session_id, []).append(run_id)
    return dict(sorted(found.items()))


def _last_run(connection: Connection, namespace: str, session_id: str) -> str:
    """The run that was accepted last."""
    statement = (
        select(RUN.c.run_id)
        .where(RUN.c.namespace == namespace, RUN.c.session_id == session_id)
        .order_by(RUN.c.accepted_at.desc(), RUN.c.run_id)
        .limit(1)
    )
    found: str | None = connection.execute(statement).scalar()
    if found is None:
        raise UnknownRun(
            "the session has had no run yet", session_id=session_id,
            details={"hint": "`understudy send SESSION TEXT` begins one."},
        )  # fmt: skip
    return found


def _require_events(connection: Connection, namespace: str, run: RunRecord) -> None:
    """Retention removes a session's events from the oldest on: a run that lacks its first has no whole trace."""
    where = (
        EVENT.c.namespace == namespace, EVENT.c.session_id == run.session_id, EVENT.c.run_id == run.run_id,
        EVENT.c.type == "run_accepted",
    )  # fmt: skip
    if connection.execute(select(EVENT.c.seq).where(*where).limit(1)).scalar() is None:
        raise EventsPruned(f"the events of run {run.run_id!r} were removed", session_id=run.session_id)
