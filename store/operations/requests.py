"""Requests that may be repeated: what one did is remembered with its effect, so that it has one, and one answer.

A client repeats a request that gets no answer, elsewhere too, and an attempt that was given up may arrive long after
the others. By then the same words may mean something else: another run, another question, another quarantine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from sqlalchemy import and_, delete, exists, select

from ..db.statements import OWNER, REQUEST, RUN, SESSION
from ..transaction import Transaction

AT_ONCE = 500
KEPT = 3_600_000_000
"""How long a request is remembered at least, in microseconds."""

NEWEST = 32
"""So many of a session are remembered however old they are: the clock that says so may be hours ahead."""

Result = TypeVar("Result")


def forget_old(tx: Transaction) -> None:
    """Forget what was asked of sessions that are gone. It is kept for as long as that of others: a request that is
    repeated must find what it did, also where another session has the id by now."""
    old = (REQUEST.c.namespace == tx.namespace, REQUEST.c.session_id != "", REQUEST.c.created_at < tx.now - KEPT)
    lives = exists().where(SESSION.c.namespace == REQUEST.c.namespace, SESSION.c.session_id == REQUEST.c.session_id)
    of_removed = select(REQUEST.c.session_id).where(*old, ~lives).distinct().limit(AT_ONCE)
    gone = set(tx.connection.execute(of_removed).scalars())
    if gone:
        tx.connection.execute(delete(REQUEST).where(*old, REQUEST.c.session_id.in_(sorted(gone))))


def outlive(tx: Transaction, session_ids: Sequence[str]) -> None:
    """Remember the inputs that these sessions, which are about to be removed, took lately.

    While a session lives its runs tell which inputs it has taken, so `send`, of which there are many, needs no row
    here.
    """
    same = and_(
        REQUEST.c.namespace == RUN.c.namespace, REQUEST.c.session_id == RUN.c.session_id,
        REQUEST.c.request_id == RUN.c.request_id,
    )  # fmt: skip
    lately = (RUN.c.namespace == tx.namespace, RUN.c.request_id != "", RUN.c.accepted_at >= tx.now - KEPT)
    columns = (RUN.c.session_id, RUN.c.request_id, RUN.c.accepted_at)
    for start in range(0, len(session_ids), AT_ONCE):
        mine = RUN.c.session_id.in_(session_ids[start : start + AT_ONCE])
        # One that was exported, removed and imported again is remembered already.
        taken = tx.read(select(*columns).where(*lately, mine, ~exists().where(same))).all()
        for session_id, request_id, accepted_at in taken:
            row = {"session_id": session_id, "request_id": request_id, "result": True, "created_at": accepted_at}
            tx.insert(REQUEST, row)


def once(tx: Transaction, session_id: str, request_id: str, operation: Callable[[Transaction], Result]) -> Result:
    """Do what a request asks for, or say again what it did; one that is refused has done nothing, and may be repeated.

    Args:
        session_id: whom it concerns; empty for the whole namespace.
        operation: its result is plain data.
    """
    if session_id:
        tx.load([session_id])
    else:
        tx.connection.execute(tx.locking(select(OWNER.c.holder).where(OWNER.c.namespace == tx.namespace)))
    # Behind that lock: of services that have the same request at once, the second finds what the first did.
    mine = (REQUEST.c.namespace == tx.namespace, REQUEST.c.session_id == session_id)
    done = tx.read(select(REQUEST.c.result).where(*mine, REQUEST.c.request_id == request_id), session_id).first()
    if done is not None:
        return done.result  # type: ignore[no-any-return]
    result = operation(tx)
    newest = select(REQUEST.c.created_at).where(*mine).order_by(REQUEST.c.created_at.desc()).offset(NEWEST - 1).limit(1)
    # With fewer than so many, nothing is older than NULL.
    old = (REQUEST.c.created_at < tx.now - KEPT, REQUEST.c.created_at < newest.correlate(None).scalar_subquery())
    tx.read(delete(REQUEST).where(*mine, *old), session_id)
    row = {"session_id": session_id, "request_id": request_id, "result": result, "created_at": tx.now}
    tx.insert(REQUEST, row)
    return result
