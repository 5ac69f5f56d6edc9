"""Requests that may be repeated: what one did is remembered with its effect, so that it has one, and one answer.

A client repeats a request that gets no answer, elsewhere too, and an attempt that was given up may arrive long after
the others. By then the same words may mean something else: another run, another question, another quarantine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import delete, select

from .statements import OWNER, REQUEST
from .transaction import Transaction

KEPT = 3_600_000_000
"""How long a request is remembered at least, in microseconds."""

Result = TypeVar("Result")


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
    tx.read(delete(REQUEST).where(*mine, REQUEST.c.created_at < tx.now - KEPT), session_id)
    row = {"session_id": session_id, "request_id": request_id, "result": result, "created_at": tx.now}
    tx.insert(REQUEST, row)
    return result
