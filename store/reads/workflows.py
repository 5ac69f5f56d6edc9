"""What workflows let others see: the values that they publish, and what they are at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection

from understudy.errors import InvalidInput
from understudy.json_text import to_json
from understudy.reads import PublishedValue, WorkflowStatus
from understudy.workflows import ORIGIN, PUBLISHED, WORKFLOW

from ..db.prepared import read
from ..operations.workflows import SELECT_RECORDS, last_steps, open_steps
from .queries import runs, session_info

AT_ONCE = 200
"""Records that are read at a time, from the end of a log."""


def published(connection: Connection, namespace: str, session_id: str, name: str) -> PublishedValue:
    """The value that a workflow has published last under a name. Raises `UnknownSession`."""
    before = session_info(connection, namespace, session_id).seq + 1
    for extra in _records(connection, namespace, session_id, before):
        if extra.get("name") == PUBLISHED + name:
            return PublishedValue(to_json(extra.get("value")))
    return PublishedValue()


def status(connection: Connection, namespace: str, session_id: str) -> WorkflowStatus:
    """What a workflow is at.

    Raises:
        UnknownSession: there is no such session.
        InvalidInput: it is no workflow.
    """
    info = session_info(connection, namespace, session_id)
    if info.kind != WORKFLOW:
        raise InvalidInput(
            "the session is no workflow; `understudy show SESSION` has what it is at", session_id=session_id
        )
    begun = [run.run_id for run in runs(connection, namespace, session_id) if run.started_at]
    run_id = info.run_id or (begun[-1] if begun else None)
    if run_id is None:
        return WorkflowStatus(None)
    before = info.seq + 1
    values: dict[str, Any] = {}
    for extra in _records(connection, namespace, session_id, before, run_id):
        if str(extra.get("name")).startswith(PUBLISHED):
            values.setdefault(str(extra["name"]).removeprefix(PUBLISHED), extra.get("value"))
    at = connection, namespace, session_id, run_id
    return WorkflowStatus(run_id, tuple(open_steps(*at)), tuple(last_steps(*at)), values)


def _records(
    connection: Connection, namespace: str, session_id: str, before: int, run_id: str | None = None
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """The values that a workflow has taken, the latest first: all, or those of its last run, which this is."""
    while True:
        where: dict[str, Any] = {"ns": namespace, "session": session_id, "before": before}
        rows = read(connection, SELECT_RECORDS, **where, role="system", limit=AT_ONCE)
        for row in rows:
            if run_id is not None and row["body"].get("run_id") != run_id:
                return
            if row["body"].get("origin") == ORIGIN:
                yield row["body"].get("extra") or {}
        if len(rows) < AT_ONCE:
            return
        before = rows[-1]["seq"]
