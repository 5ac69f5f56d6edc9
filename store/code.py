"""Code that travels by value: which of it a session needs, keeping it, and letting go of what nobody needs."""

from __future__ import annotations

from typing import Any

from sqlalchemy import delete, insert, select

from .statements import CODE_BLOB, SESSION
from .transaction import Transaction


def digests(spec: dict[str, Any], placement: str) -> set[str]:
    """The code that sessions of this specification and placement refer to, by hash."""
    found = {placement} if placement else set()
    found |= {tool["source"]["blob"] for tool in spec.get("tools") or () if "blob" in tool["source"]}
    for agent in (spec.get("agents") or {}).values():
        found |= digests(agent, "")
    return found


def put(tx: Transaction, digest: str, data: bytes) -> None:
    """Keep a piece of code; nothing if it is there."""
    statement = select(CODE_BLOB.c.digest).where(CODE_BLOB.c.namespace == tx.namespace, CODE_BLOB.c.digest == digest)
    if tx.connection.execute(statement).scalar() is None:
        tx.writes += 1
        values = {"namespace": tx.namespace, "digest": digest, "data": data, "created_at": tx.now}
        tx.connection.execute(insert(CODE_BLOB).values(values))


def drop_unused(tx: Transaction) -> int:
    """Remove code that no session refers to; returns how many pieces that were.

    Node services remember what they have stored: only for a namespace that no cluster owns.
    """
    stored = select(CODE_BLOB.c.digest).where(CODE_BLOB.c.namespace == tx.namespace)
    unused = set(tx.connection.execute(stored).scalars())
    sessions = select(SESSION.c.spec, SESSION.c.placement).where(SESSION.c.namespace == tx.namespace)
    with tx.connection.execute(sessions.execution_options(yield_per=500)) as found:
        for spec, placement in found:
            unused -= digests(spec or {}, placement)
    for digest in unused:
        tx.writes += 1
        where = (CODE_BLOB.c.namespace == tx.namespace, CODE_BLOB.c.digest == digest)
        tx.connection.execute(delete(CODE_BLOB).where(*where))
    return len(unused)
