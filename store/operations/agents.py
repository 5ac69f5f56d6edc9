"""Sub-agents in the background, as their parent reaches them: it sends to one, and they are jobs of its own.

The answer is a row of the session's inbox, written in the transaction that has the effect, as for wakeups.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import func, select

from understudy.errors import UnderstudyError
from understudy.identifiers import digest
from understudy.jobs import MOST_SHOWN, READ_TEXT, Job
from understudy.protocol import Steer
from understudy.records import Ask
from understudy.wakeups import spoken

from ..db.session_row import SessionRow
from ..db.statements import RUN, SESSION
from ..db.tables import IN_BACKGROUND
from ..transaction import Transaction
from .background import source_of
from .beginnings import TASK, TASK_AT_WORK, accept, timer
from .endings import SHUTDOWN_TIMER, request_cancel
from .steering import steer

STOPPED = "its parent stopped it"


def answer(tx: Transaction, row: SessionRow, asked: Ask) -> tuple[str, str]:
    """`(decision, text)`: the answer to a call of `SEND_TO_AGENT`, which has its effect here."""
    arguments = asked.arguments or {}
    child = _started_by(tx, row, arguments["agent"])
    if child is None:
        return "error", f"you have started no sub-agent {arguments['agent']!r}: give the id that start_agent has said."
    return _send(tx, child, asked.call_id, arguments["message"])


def _send(tx: Transaction, child: SessionRow, call_id: str, message: str) -> tuple[str, str]:
    name = child.session_id
    try:
        if child.run_id is not None:
            steer(tx, name, Steer(message), digest(child.parent_id or "", call_id))
            return "ok", f"sub-agent {name} is at work, and gets the message in its next turn"
        if child.task_open == TASK_AT_WORK:
            return "error", f"sub-agent {name} has not begun its task yet: send the message later."
        accept(tx, name, f"{TASK}-{digest(call_id)}", message, source="parent")
    except UnderstudyError as error:
        return "error", f"sub-agent {name} takes no message: {error.message}. Start another one."
    return "ok", f"sub-agent {name} has the message as a new task"


def jobs(tx: Transaction, row: SessionRow) -> list[Job]:
    """The sub-agents that the session has started in the background, as many as may be shown and one more."""
    columns = ("session_id", "agent", "status", "active", "closed", "run_id", "cancel_reason", "created_at")
    statement = (
        select(*(SESSION.c[name] for name in columns))
        .where(SESSION.c.namespace == tx.namespace, SESSION.c.parent_id == row.session_id, IN_BACKGROUND)
        .order_by(SESSION.c.created_at, SESSION.c.start_order)
    )  # in the order of an index: one that has the status would find all sessions of the store that are at work
    children = sorted(reversed(tx.read(statement).all()), key=lambda child: not child.active)[: MOST_SHOWN + 1]
    tasks: dict[str, Any] = {}
    runs = (
        select(RUN.c.session_id, RUN.c.run_id, RUN.c.status, RUN.c.content, RUN.c.error, RUN.c.accepted_at)
        .add_columns(RUN.c.finished_at, func.substr(RUN.c.text, 1, READ_TEXT + 1).label("text"))
        .where(RUN.c.namespace == tx.namespace, RUN.c.session_id.in_([child.session_id for child in children]))
        .where(RUN.c.run_id.between(TASK, f"{TASK}z"), RUN.c.source == "parent")
    )
    for run in sorted(tx.read(runs) if children else (), key=lambda run: (run.accepted_at, run.run_id)):
        tasks[run.session_id] = run  # the last one counts
    return [_job(child, tasks[child.session_id]) for child in children]


def _job(child: Any, task: Any) -> Job:
    kind = f"sub-agent {child.agent}"
    if child.active:
        state = f"{'told to end' if child.cancel_reason else 'at work'} ({child.status})"
        return Job(child.session_id, kind, task.accepted_at, state, str(task.content))
    text = task.text or (task.error or {}).get("message", "")
    state = task.status if child.closed else f"{task.status}, open"
    return Job(child.session_id, kind, task.finished_at, state, text, ended=True)


def stop(tx: Transaction, row: SessionRow, job: str, grace: float | None) -> str | None:
    """Ask a sub-agent to end what it is at, and what its parent has given it to do after that; what became of it. None
    if the session has started none of this id.

    Args:
        grace: seconds after which it is ended by force, if less than its `shutdown`.
    """
    child = _started_by(tx, row, job)
    if child is None:
        return None
    inputs = [item.key for item in tx.inbox(child) if item.kind == "input"]
    tasks = [run_id for run_id in inputs if source_of(tx, child, run_id) == "parent"]
    stopped = [request_cancel(tx, child, STOPPED, run_id) for run_id in tasks]
    if child.run_id is not None:
        longest = None if grace is None else round(grace * 1e6)
        stopped.append(request_cancel(tx, child, STOPPED, grace=longest))
    if not any(stopped):
        return f"sub-agent {job} is not at work"
    if child.run_id is None:
        return f"sub-agent {job} is stopped"
    by_force = timer(tx, job, SHUTDOWN_TIMER)
    left = f", and has {spoken(max(0, by_force['due_at'] - tx.now))} for it" if by_force else ""
    return f"sub-agent {job} was told to end{left}"


def _started_by(tx: Transaction, row: SessionRow, child_id: str) -> SessionRow | None:
    """A sub-agent that the session has started in the background."""
    child = tx.find(child_id)
    return child if child is not None and child.parent_id == row.session_id and child.background else None
