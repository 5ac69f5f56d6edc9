"""Sub-agents in the background: their parent does not wait for them, and their ends reach it as inputs of its own."""

from __future__ import annotations

from typing import Any

from sqlalchemy import bindparam, select

from understudy import events
from understudy.agents import CHILD, news_identifier, news_text
from understudy.errors import RunConflict, SessionClosed
from understudy.messages import storable
from understudy.records import Finish, InboxItem

from ..db.session_row import SessionRow
from ..db.statements import RUN, SESSION
from ..transaction import Transaction
from .beginnings import TASK, TASK_AT_WORK, accept, mark_reported
from .partial import of_worktree, tools_used

SELECT_SOURCE = select(RUN.c.source).where(
    RUN.c.namespace == bindparam("ns"), RUN.c.session_id == bindparam("session"), RUN.c.run_id == bindparam("run")
)


def at_work(tx: Transaction, parent: SessionRow, run_id: str | None = None) -> list[SessionRow]:
    """The sub-agents in the background whose tasks have not ended and whose ends shall be reported to the parent, in
    the order of their start.

    Args:
        run_id: only those that this run has started.
    """
    statement = select(SESSION.c.session_id).where(
        SESSION.c.namespace == tx.namespace,
        SESSION.c.parent_id == parent.session_id,
        SESSION.c.task_open == TASK_AT_WORK,
        SESSION.c.background == 1,
        SESSION.c.abandoned == 0,
    )
    if run_id is not None:
        statement = statement.where(SESSION.c.parent_run_id == run_id)
    ids = list(tx.read(statement).scalars())
    tx.load(ids)
    rows = [row for row in map(tx.session, ids) if row.task_open == TASK_AT_WORK]
    return sorted(rows, key=lambda row: (row.start_order, row.session_id))


def news(tx: Transaction, parent: SessionRow, run_id: str) -> list[InboxItem]:
    """The inputs, not taken yet, about the ends of the sub-agents that a run of the parent has started."""
    found = []
    for item in tx.inbox(parent):
        child = tx.find(item.payload.get("child_id") or "") if item.kind == "input" else None
        if child is not None and child.parent_run_id == run_id and child.on_parent_end != "wait":
            found.append(item)
    return found


def task_ended(
    tx: Transaction, parent: SessionRow, child: SessionRow, status: str, finish: Finish, error: dict[str, Any] | None
) -> None:
    """A sub-agent's first task has ended: the parent is notified, if it still can be."""
    mark_reported(tx, child)
    if child.abandoned:
        return
    if _tell(tx, parent, child, TASK, status, finish, error):
        event = events.ChildFinished(call_id=child.call_id or "", child_id=child.session_id, status=status)
        tx.append(parent, event)
    else:
        child.abandoned = 1


def run_ended(
    tx: Transaction, parent: SessionRow, child: SessionRow, run_id: str, status: str, finish: Finish,
    error: dict[str, Any] | None,
) -> None:  # fmt: skip
    """Another run of a sub-agent has ended: the parent is notified if it was a task that it gave."""
    if source_of(tx, child, run_id) == "parent":
        _tell(tx, parent, child, run_id, status, finish, error)


def source_of(tx: Transaction, row: SessionRow, run_id: str) -> str | None:
    """Where the input of a run came from; None if there is no such run."""
    source: str | None = tx.read_one(SELECT_SOURCE, row.session_id, session=row.session_id, run=run_id)
    return source


def _tell(
    tx: Transaction, parent: SessionRow, child: SessionRow, run_id: str, status: str, finish: Finish,
    error: dict[str, Any] | None,
) -> bool:  # fmt: skip
    """Put the news into the parent's inbox, once: an input that its current run takes at its next round, or that begins
    one. False if the parent takes no input any more."""
    rounds = child.round if child.run_id == run_id else 0
    payload = {
        "child_id": child.session_id, "status": status, "text": finish.text, "output": finish.output, "error": error,
        "tools": [] if status == "completed" else tools_used(tx, child, run_id, rounds),
        **of_worktree(tx, child, status, finish),
    }  # fmt: skip
    content = storable(news_text(child.agent, payload))
    try:
        accept(
            tx, parent.session_id, news_identifier(child.session_id, run_id, TASK), content, source=CHILD,
            child_id=child.session_id,
        )  # fmt: skip
    except (SessionClosed, RunConflict):  # a conflict: somebody has used just this id for an input of their own
        return False
    return True
