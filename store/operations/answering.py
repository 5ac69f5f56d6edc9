"""Tool calls that the store answers, in the transaction of the batch that asks: each has its effect and answer once.

The answer goes into the session's inbox, as a person's does, and so becomes the call's result once, whatever dies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from understudy.agents import SEND_TO_AGENT
from understudy.jobs import JOB_TOOLS
from understudy.notes import NOTE_TOOLS
from understudy.recall import READ_MESSAGE, RECALL
from understudy.records import Ask
from understudy.wakeups import SCHEDULE_WAKEUP, WAIT
from understudy.workflows import EVENT_STEP, WORKFLOW_STATUS

from ..db.session_row import SessionRow
from ..transaction import Transaction
from . import agents, jobs, notes, recall, steps, waiting, wakeups, workflows

ANSWERS: dict[str, Callable[[Transaction, SessionRow, Ask], tuple[str, str]]] = {
    SCHEDULE_WAKEUP: wakeups.answer,
    **dict.fromkeys((RECALL, READ_MESSAGE), recall.answer),
    **dict.fromkeys(NOTE_TOOLS, notes.answer),
    SEND_TO_AGENT: agents.answer,
    **dict.fromkeys(JOB_TOOLS, jobs.answer),
    WORKFLOW_STATUS: workflows.answer,
}
"""What answers a call at once, by what it asks: `(decision, text)`."""

STORE_ANSWERS = frozenset({WAIT, EVENT_STEP, *ANSWERS})


def ask(tx: Transaction, row: SessionRow, asks: Sequence[Ask]) -> None:
    """Answer tool calls of the current run, or let them wait for their times."""
    # Nothing has changed a call since the model asked for it: the time counts from then, whatever died meanwhile.
    # Not from a time in the future, of a clock that was set back since: the wait would be longer by as much.
    since = {call["call_id"]: min(tx.now, call["updated_at"]) for call in tx.current_calls(row)} if asks else {}
    for asked in asks:
        _ask(tx, row, asked, since[asked.call_id])


def _ask(tx: Transaction, row: SessionRow, asked: Ask, since: int) -> None:
    tx.update_call(
        row.session_id, asked.call_id, state="waiting", epoch=row.epoch, executions=asked.executions, result=None,
        child_id=None,
    )  # fmt: skip
    if asked.kind == WAIT:
        waiting.begin(tx, row, asked, since)
        return
    if asked.kind == EVENT_STEP:
        steps.await_event(tx, row, asked, since)
        return
    decision, text = ANSWERS[asked.kind](tx, row, asked)
    waiting.hand_in(tx, row, asked.call_id, {"decision": decision, "text": text, "since": since})
