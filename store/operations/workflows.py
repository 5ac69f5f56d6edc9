"""Workflows that a session's model has written, as it sees them."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import bindparam, select

from understudy.reads import OpenStep, StepDone, WorkflowStatus
from understudy.records import Ask
from understudy.workflows import WORKFLOW

from ..db.session_row import SessionRow
from ..db.statements import SESSION
from ..reads.workflows import status
from ..transaction import Transaction

SELECT_OWN = select(SESSION.c.status, SESSION.c.ended_as, SESSION.c.parent_id, SESSION.c.kind).where(
    SESSION.c.namespace == bindparam("ns"), SESSION.c.session_id == bindparam("session")
)


def answer(tx: Transaction, row: SessionRow, asked: Ask) -> tuple[str, str]:
    """`(decision, text)`: the answer to a call of `workflow_status`. What another transaction does to the workflow
    meanwhile it may have or not."""
    workflow = (asked.arguments or {})["workflow"]
    own = tx.read(SELECT_OWN.params(ns=tx.namespace, session=workflow), workflow).first()
    if own is None or own.parent_id != row.session_id or own.kind != WORKFLOW:
        return "error", f"you have written no workflow {workflow!r}: give the id that create_workflow has said."
    state = own.ended_as or own.status
    return "ok", "\n".join([f"Workflow {workflow}: {state}", *_lines(status(tx.connection, tx.namespace, workflow))])


def _lines(found: WorkflowStatus) -> Iterator[str]:
    for title, steps in (("Open steps:", found.open), ("Last results, the latest first:", found.done)):
        yield title if steps else f"{title} none"
        yield from map(_line, steps)


def _line(step: OpenStep | StepDone) -> str:
    if isinstance(step, OpenStep):
        return f"- {step.path} {step.tool} ({step.state}): {step.arguments}"
    return f"- {step.path} {step.tool} ({step.outcome}): {step.text}"
