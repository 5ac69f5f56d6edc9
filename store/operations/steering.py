"""Steering: a message for the run that a session is at, which the model is sent in the run's next round.

It is a row of the session's inbox until its run's process takes it, with the commit that asks the model. A steer may
interrupt: then what the run is at does not go on. Sub-agents do.
"""

from __future__ import annotations

from understudy import events
from understudy.errors import InvalidInput, NotRunning
from understudy.messages import encodable
from understudy.protocol import Steer, Steered
from understudy.records import STEER, Batch, Finish, InboxItem, Interrupted, answered_by
from understudy.workflows import WORKFLOW

from ..db.session_row import SessionRow
from ..transaction import Transaction
from . import questions
from .waiting import CALL_TIMER, hand_in

CANCELLED = "cancelled"
"""Outcome and text of a wait that a steer ended."""


def steer(tx: Transaction, session_id: str, wanted: Steer, request_id: str) -> Steered:
    """Accept a message for the session's current run. It wakes nobody, unless it interrupts.

    Raises:
        UnknownSession: there is no such session.
        NotRunning: it has no run, or one that was asked to end, or that only waits for its sub-agents to end.
        InvalidInput: it is a workflow.
    """
    row = tx.session(session_id)
    if row.kind == WORKFLOW:
        raise InvalidInput("the session is a workflow, which nothing steers: signal it", session_id=session_id)
    if row.run_id is None or row.cancel_reason is not None or row.held is not None:
        what = "no run is at work" if row.run_id is None else f"run {row.run_id!r} is about to end"
        raise NotRunning(what, session_id=session_id)
    accepted = Steered(row.run_id, row.seq)
    tx.put_inbox(row, STEER, request_id, {"content": encodable(wanted.content), "interrupt": wanted.interrupt})
    if wanted.interrupt:
        _interrupt(tx, row)
    return accepted


def _interrupt(tx: Transaction, row: SessionRow) -> None:
    """Have what the run is at not go on. Whoever makes its model call or runs its tools is notified after the commit;
    should that get lost, the run goes on when they have ended."""
    assert row.run_id is not None
    if row.wait in (None, "model"):
        tx.interrupted[row.session_id] = Interrupted(row.run_id, row.incarnation, row.epoch, row.round)
    answer_waits(tx, row)


def answer_waits(tx: Transaction, row: SessionRow) -> None:
    """Give the calls that wait for a person or a time their results; the session goes on, if it waited for these."""
    if not row.calls_open:
        return
    questions.abort(tx, row.session_id)
    answered = answered_by(tx.inbox(row))
    for call in tx.current_calls(row):
        if call["state"] == "waiting" and call["call_id"] not in answered:
            tx.drop_timer(row, CALL_TIMER + call["call_id"])
            said = {"decision": CANCELLED, "text": CANCELLED, "since": call["updated_at"]}
            hand_in(tx, row, call["call_id"], said)


def unread(tx: Transaction, row: SessionRow) -> list[InboxItem]:
    """What was accepted to steer the current run and the model was not sent yet, oldest first."""
    return [item for item in tx.inbox(row) if item.kind == STEER]


def outlives(tx: Transaction, row: SessionRow, finish: Finish | None) -> bool:
    """Whether the current run goes on, although its process wants it to end with its answer: that has not heard of a
    steer, which the model is sent first."""
    if finish is None or finish.status != "completed" or finish.stopped:
        return False
    if row.cancel_reason is not None or not unread(tx, row):
        return False
    row.redone = 1  # hooks saw the end
    return True


def comes_first(tx: Transaction, row: SessionRow, batch: Batch) -> bool:
    """Whether the model call that a batch asks for is not made: its process has not heard of a steer, which the model
    is sent in this very round. What would be committed with that call is prepared again."""
    if batch.wait != "model" or batch.request_purpose or row.cancel_reason is not None:
        return False
    return any(item.id not in batch.inbox_done for item in unread(tx, row))


def is_interrupted(tx: Transaction, row: SessionRow) -> bool:
    """Whether what the current run is at shall not go on: a steer says so that the model was not sent yet."""
    return row.cancel_reason is None and any(item.interrupts for item in tx.inbox(row))


def drop(tx: Transaction, row: SessionRow, status: str) -> None:
    """The current run is about to end as `status`: what was to steer it has no effect, and the log says so."""
    dropped = unread(tx, row)
    if dropped:
        tx.take_inbox(row, [item.id for item in dropped])
        tx.append(row, events.SteerDropped(status=status, steers=[item.key for item in dropped]))
