"""Code that travels by value: which of it a session needs, keeping it, and letting go of what nobody needs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from understudy.manifest import below, functions

from ..db.statements import CODE_BLOB, SCHEDULE, SESSION
from ..transaction import Transaction

LATELY = 3_600_000_000
"""What was needed so many microseconds ago is not written again, or spawns of two nodes would wait for each other's
locks. Retention leaves it alone: that takes a day."""


def digests(spec: dict[str, Any], placement: str) -> set[str]:
    """The code that sessions of this specification and placement refer to, by hash."""
    # After a handoff the session's placement is the other agent's, and it may come back.
    found = ({placement, spec.get("placement") or ""} - {""}) | set(spec.get("packages") or ())
    found |= {function["source"]["blob"] for _, function in functions(spec) if "blob" in function["source"]}
    found |= {skill["blob"] for skill in spec.get("skills") or ()}
    for agent in below(spec):
        found |= digests(agent, agent.get("placement", ""))
    return found


def waiting(next_spec: dict[str, Any] | None) -> set[str]:
    """The same for a specification that waits for a run's end (`upgrades.take_on`)."""
    return digests(next_spec["spec"], next_spec["placement"]) if next_spec else set()


def touch(tx: Transaction, digest: str) -> bool:
    """Note that a piece of code was needed again; False if it is not there."""
    where = (CODE_BLOB.c.namespace == tx.namespace, CODE_BLOB.c.digest == digest)
    needed_at = tx.connection.execute(select(CODE_BLOB.c.created_at).where(*where)).scalar()
    if needed_at is None or needed_at > tx.now - LATELY:
        return needed_at is not None
    tx.writes += 1
    # Retention, which may be removing it at this moment, is waited for by this.
    return bool(tx.connection.execute(update(CODE_BLOB).where(*where).values(created_at=tx.now)).rowcount)


def put(tx: Transaction, digest: str, data: bytes) -> None:
    """Keep a piece of code; where it is kept already, note that it was needed again."""
    if not touch(tx, digest):
        values = {"namespace": tx.namespace, "digest": digest, "data": data, "created_at": tx.now}
        tx.connection.execute(insert(CODE_BLOB).values(values))


def unused(connection: Connection, namespace: str, before: int, without: Collection[str] = ()) -> set[str]:
    """Hashes of the code that no session (but those in `without`) and no schedule refers to, and that was last put
    before a time."""
    old = (CODE_BLOB.c.namespace == namespace, CODE_BLOB.c.created_at < before)
    left = set(connection.execute(select(CODE_BLOB.c.digest).where(*old)).scalars())
    columns = (SESSION.c.session_id, SESSION.c.spec, SESSION.c.placement, SESSION.c.next_spec)
    sessions = select(*columns).where(SESSION.c.namespace == namespace)
    with connection.execute(sessions.execution_options(yield_per=500)) as found:
        for session_id, spec, placement, next_spec in found:
            if session_id not in without:
                left -= digests(spec or {}, placement) | waiting(next_spec)
    definitions = select(SCHEDULE.c.definition).where(SCHEDULE.c.namespace == namespace)
    for definition in connection.execute(definitions).scalars():
        left -= digests(definition.get("spec") or {}, definition.get("placement", ""))
    return left


def drop_unused(tx: Transaction, before: int) -> int:
    """Remove code that is unused and was last put before a time; returns how many pieces that were."""
    tx.flush()
    old = (CODE_BLOB.c.namespace == tx.namespace, CODE_BLOB.c.created_at < before)
    removed = 0
    for digest in unused(tx.connection, tx.namespace, before):
        tx.writes += 1
        removed += tx.connection.execute(delete(CODE_BLOB).where(*old, CODE_BLOB.c.digest == digest)).rowcount
    return removed
