"""What a workflow is at, and how the session sees it whose model has written it."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import Connection, bindparam, select

from understudy.messages import Message
from understudy.reads import OpenStep, StepDone
from understudy.records import Ask
from understudy.workflows import WORKFLOW, step_path

from ..db.prepared import read
from ..db.session_row import SessionRow
from ..db.statements import MESSAGE, SELECT_STEPS, SESSION
from ..transaction import Transaction
from .beginnings import TASK

SELECT_OWN = select(SESSION.c.status, SESSION.c.ended_as, SESSION.c.parent_id, SESSION.c.kind).where(
    SESSION.c.namespace == bindparam("ns"), SESSION.c.session_id == bindparam("session")
)
SELECT_RECORDS = (
    select(MESSAGE.c.seq, MESSAGE.c.body)
    .where(
        MESSAGE.c.namespace == bindparam("ns"),
        MESSAGE.c.session_id == bindparam("session"),
        MESSAGE.c.role == bindparam("role"),
        MESSAGE.c.seq < bindparam("before"),
    )
    .order_by(MESSAGE.c.seq.desc())
    .limit(bindparam("limit"))
)

LAST_STEPS = 10
"""Steps with a result that a status has."""

SHOWN = 500
"""Characters of arguments and results that a status has."""

FROM_THE_END = 2**62
"""Behind the last message of any log."""


def open_steps(connection: Connection, namespace: str, session_id: str, run_id: str) -> list[OpenStep]:
    """The steps of a run that have no result yet."""
    return [
        OpenStep(
            step_path(run_id, row["call_id"]), row["tool"], row["arguments"][:SHOWN], row["state"], row["updated_at"],
            row["child_id"],
        )
        for row in read(connection, SELECT_STEPS, ns=namespace, session=session_id)
        if row["run_id"] == run_id and row["state"] != "done"
    ]  # fmt: skip


def last_steps(connection: Connection, namespace: str, session_id: str, run_id: str) -> list[StepDone]:
    """The last steps of a run that have a result, the latest first."""
    where = {"ns": namespace, "session": session_id, "before": FROM_THE_END}
    rows = read(connection, SELECT_RECORDS, **where, role="tool", limit=LAST_STEPS)
    said = [Message.from_wire(row["body"]) for row in rows]
    return [_done(run_id, message) for message in said if message.run_id == run_id]


def _done(run_id: str, message: Message) -> StepDone:
    outcome = (message.extra or {}).get("outcome", "ok")
    path = step_path(run_id, message.tool_call_id or "")
    return StepDone(path, message.name or "", outcome, message.text[:SHOWN], message.created_at)


def answer(tx: Transaction, row: SessionRow, asked: Ask) -> tuple[str, str]:
    """`(decision, text)`: the answer to a call of `workflow_status`. What another transaction does to the workflow
    meanwhile it may have or not."""
    workflow = (asked.arguments or {})["workflow"]
    own = tx.read(SELECT_OWN.params(ns=tx.namespace, session=workflow), workflow).first()
    if own is None or own.parent_id != row.session_id or own.kind != WORKFLOW:
        return "error", f"you have written no workflow {workflow!r}: give the id that create_workflow has said."
    at = tx.connection, tx.namespace, workflow, TASK  # its only run
    lines = [f"Workflow {workflow}: {own.ended_as or own.status}"]
    lines += _listed("Open steps:", [_line(s.path, s.tool, s.state, s.arguments) for s in open_steps(*at)])
    said = [_line(s.path, s.tool, s.outcome, s.text) for s in last_steps(*at)]
    return "ok", "\n".join([*lines, *_listed("Last results, the latest first:", said)])


def _listed(title: str, lines: list[str]) -> Iterator[str]:
    yield title if lines else f"{title} none"
    yield from lines


def _line(path: str, tool: str, state: str, text: str) -> str:
    return f"- {path} {tool} ({state}): {text}"
