"""What a session asks about the sub-agents that it has started in the background: list them, send to one, stop one.

The answer is a row of the session's inbox, written in the transaction that has the effect, as for wakeups.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import select

from understudy.agents import LIST_AGENTS, SEND_TO_AGENT, SHOWN_ANSWER
from understudy.errors import UnderstudyError
from understudy.identifiers import digest
from understudy.protocol import Steer
from understudy.records import Ask

from ..db.session_row import SessionRow
from ..db.statements import RUN, SESSION, same_session
from ..transaction import Transaction
from .beginnings import TASK, TASK_AT_WORK, accept
from .endings import request_cancel
from .steering import steer

STOPPED = "its parent stopped it"


def answer(tx: Transaction, row: SessionRow, asked: Ask) -> tuple[str, str]:
    """`(decision, text)`: the answer to a call of one of `AGENT_TOOLS`, which has its effect here."""
    arguments = asked.arguments or {}
    if asked.kind == LIST_AGENTS:
        return "ok", _described(tx, row)
    child = tx.find(arguments["agent"])
    if child is None or child.parent_id != row.session_id or not child.background:
        return "error", f"you have started no sub-agent {arguments['agent']!r}. {_described(tx, row)}"
    if asked.kind == SEND_TO_AGENT:
        return _send(tx, child, asked.call_id, arguments["message"])
    return _stop(tx, child)


def _send(tx: Transaction, child: SessionRow, call_id: str, message: str) -> tuple[str, str]:
    name = child.session_id
    try:
        if child.run_id is not None:
            steer(tx, name, Steer(message), digest(child.parent_id or "", call_id))
            return "ok", f"sub-agent {name} is at work, and gets the message in its next turn"
        if child.task_open == TASK_AT_WORK:
            return "error", f"sub-agent {name} has not begun its task yet: send the message later."
        accept(tx, name, f"task-{digest(call_id)}", message, source="parent")
    except UnderstudyError as error:
        return "error", f"sub-agent {name} takes no message: {error.message}. Start another one."
    return "ok", f"sub-agent {name} has the message as a new task"


def _stop(tx: Transaction, child: SessionRow) -> tuple[str, str]:
    if request_cancel(tx, child, STOPPED):
        return "ok", f"sub-agent {child.session_id} was told to end"
    return "ok", f"sub-agent {child.session_id} is not at work"


def _described(tx: Transaction, row: SessionRow) -> str:
    """The sub-agents as a model reads them, a line for each."""
    columns = (SESSION.c.session_id, SESSION.c.agent, SESSION.c.status, SESSION.c.closed, RUN.c.status.label("task"))
    statement = (
        select(*columns, RUN.c.text, RUN.c.finished_at)
        .join(RUN, same_session(RUN, SESSION))
        .where(
            SESSION.c.namespace == tx.namespace, SESSION.c.parent_id == row.session_id, SESSION.c.background == 1,
            RUN.c.run_id == TASK,
        )
        .order_by(SESSION.c.start_order, SESSION.c.session_id)
    )  # fmt: skip
    return "\n".join(map(_line, tx.read(statement))) or "You have started no sub-agents in the background."


def _line(found: Any) -> str:
    who = f"{found.session_id} ({found.agent})"
    if not found.finished_at:
        return f"{who}: at work ({found.status})"
    text = found.text or ""
    said = f": {text[:SHOWN_ANSWER]}{'…' if len(text) > SHOWN_ANSWER else ''}" if text else ""
    at = "" if found.closed else ", open" if found.status == "idle" else ", at work again"
    return f"{who}: {found.task}{at}{said}"
