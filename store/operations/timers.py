"""Timers: what is due at a time, whatever dies until then. A node service fires those of the sessions at home there.

| name | what it does |
|---|---|
| `pause` | ends the pause before a crashed session is resumed, or a failed sub-agent is started again |
| `shutdown` | ends a run by force that was asked to end and has not |
| `deadline` | asks a run to end whose budget of seconds is used up |
| `call:ID` | ends the wait of a tool call |
| `question:ID` | answers the question of a tool call, as its specification says |
| `wakeup:NAME` | is an input to the session; if it recurs, it is set again in the same transaction |
"""

from __future__ import annotations

from ..db.session_row import SessionRow
from ..transaction import Transaction
from . import questions, waiting, wakeups
from .beginnings import PAUSE_TIMER, outlasting, timer
from .charging import deadline
from .endings import DEADLINE_TIMER, SHUTDOWN_TIMER, end_by_force, request_cancel


def fire(tx: Transaction, session_id: str, name: str, due_at: int) -> None:
    """Do what was due at this time; nothing if the timer was dropped, or set again for another."""
    row = tx.find(session_id)  # first: who sets or drops the timer has locked it
    found = timer(tx, session_id, name)
    if found is None or row is None or found["due_at"] != due_at:
        return
    tx.drop_timer(row, name)
    if name == PAUSE_TIMER and row.wait == "timer":
        tx.wake(row)
    elif name == SHUTDOWN_TIMER:
        shut_down(tx, row, **found["payload"])
    elif name == DEADLINE_TIMER:
        out_of_time(tx, row, found["payload"]["run_id"], due_at)
    elif name.startswith(waiting.CALL_TIMER):
        waiting.over(tx, row, **found["payload"])
    elif name.startswith(waiting.QUESTION_TIMER):
        questions.time_out(tx, row, **found["payload"])
    elif name.startswith(wakeups.WAKEUP_TIMER):
        wakeups.fire(tx, row, name.removeprefix(wakeups.WAKEUP_TIMER), found["payload"])


def shut_down(tx: Transaction, row: SessionRow, run_id: str, grace: int | None = None) -> None:
    """The time is over (`grace`, in microseconds) that a run had to end. While it only waits for its children, which
    have times of their own, it is given as much again. Timers of earlier versions do not say it."""
    if row.run_id != run_id or row.cancel_reason is None or row.shutdown is None:
        return
    grace = row.shutdown if grace is None else grace
    if row.wait == "timer" and (left := outlasting(tx, row)):  # what its last process may begin is over only then
        # The pause may be over, and its timer not have been noticed yet where the session has just gone to.
        tx.set_timer(row, SHUTDOWN_TIMER, tx.now + max(left, 1_000_000), {"run_id": run_id, "grace": grace})
    elif row.wait == "child" and row.children_open > 0:
        tx.set_timer(row, SHUTDOWN_TIMER, tx.now + max(grace, 1_000_000), {"run_id": run_id, "grace": grace})
    else:
        end_by_force(tx, row, grace)


def out_of_time(tx: Transaction, row: SessionRow, run_id: str, due_at: int) -> None:
    """A budget of seconds is used up: the run is asked to end. Where it was raised since, the timer is set again."""
    found = deadline(tx, row) if row.run_id == run_id else None
    if found is None:
        return
    if found.due_at > due_at:
        tx.set_timer(row, DEADLINE_TIMER, found.due_at, {"run_id": run_id})
        return
    error = found.refusal.error(row.session_id)
    ending = {"status": "budget_exceeded", "code": error["code"], "details": error["details"]}
    request_cancel(tx, row, error["message"], ending=ending)


def left(tx: Transaction, row: SessionRow, name: str) -> int:
    """Microseconds until a timer of the session is due, at least 1; 0 if there is none."""
    found = timer(tx, row.session_id, name)
    return max(1, found["due_at"] - tx.now) if found is not None else 0
