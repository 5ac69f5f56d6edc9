"""Timers: what is due at a time, whatever dies until then. A node service fires those of the sessions at home there.

| name | what it does |
|---|---|
| `pause` | ends the pause before a crashed session is resumed, or a failed sub-agent is started again |
| `shutdown` | ends a run by force that was told to end and has not |
| `deadline` | tells a run to end whose budget of seconds is used up |
| `call:ID` | ends the wait of a tool call |
| `wakeup:NAME` | is an input to the session; if it recurs, it is set again in the same transaction |
"""

from __future__ import annotations

from . import waiting, wakeups
from .beginnings import PAUSE_TIMER, timer
from .endings import DEADLINE_TIMER, SHUTDOWN_TIMER, out_of_time, shut_down
from .session_row import SessionRow
from .transaction import Transaction


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
        shut_down(tx, row, found["payload"]["run_id"])
    elif name == DEADLINE_TIMER:
        out_of_time(tx, row, found["payload"]["run_id"], due_at)
    elif name.startswith(waiting.CALL_TIMER):
        waiting.over(tx, row, **found["payload"])
    elif name.startswith(wakeups.WAKEUP_TIMER):
        wakeups.fire(tx, row, name.removeprefix(wakeups.WAKEUP_TIMER), found["payload"])


def left(tx: Transaction, row: SessionRow, name: str) -> int:
    """Microseconds until a timer of the session is due, at least 1; 0 if there is none."""
    found = timer(tx, row.session_id, name)
    return max(1, found["due_at"] - tx.now) if found is not None else 0
