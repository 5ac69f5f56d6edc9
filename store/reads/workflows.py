"""What workflows let others see."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, bindparam, select

from understudy.workflows import ORIGIN, PUBLISHED

from ..db.prepared import read
from ..db.statements import MESSAGE
from .queries import session_info

AT_ONCE = 200
"""Records that are read at a time, from the end of a log."""

SELECT_RECORDS = (
    select(MESSAGE.c.seq, MESSAGE.c.body)
    .where(
        MESSAGE.c.namespace == bindparam("ns"),
        MESSAGE.c.session_id == bindparam("session"),
        MESSAGE.c.role == bindparam("role"),
        MESSAGE.c.seq < bindparam("before"),
    )
    .order_by(MESSAGE.c.seq.desc())
    .limit(AT_ONCE)
)


def published(connection: Connection, namespace: str, session_id: str, name: str) -> dict[str, Any]:
    """`{"value": …}` that a workflow has published last under a name; empty if it has not. Raises `UnknownSession`."""
    before = session_info(connection, namespace, session_id).seq + 1
    while True:
        rows = read(connection, SELECT_RECORDS, ns=namespace, session=session_id, role="system", before=before)
        for row in rows:
            extra = row["body"].get("extra") or {}
            if row["body"].get("origin") == ORIGIN and extra.get("name") == PUBLISHED + name:
                return {"value": extra.get("value")}
        if len(rows) < AT_ONCE:
            return {}
        before = rows[-1]["seq"]
