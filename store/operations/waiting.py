"""Tool calls that wait: their timers, and how what they wait for becomes their answer."""

from __future__ import annotations

from typing import Any

from sqlalchemy import or_, select

from understudy import events
from understudy.records import Ask
from understudy.wakeups import microseconds, spoken

from ..db.session_row import SessionRow
from ..db.statements import TIMER
from ..transaction import Transaction

CALL_TIMER = "call:"
"""The timer of a call that waits, with its id behind it."""

QUESTION_TIMER = "question:"
"""The timer of a call that asks a person, with its id behind it: of some, since not every question has a time-out."""

LATE = 5_000_000
"""A wait that lasted so much longer than asked for (microseconds) has a result that says so."""


def begin(tx: Transaction, row: SessionRow, asked: Ask, since: int) -> None:
    """Let a tool call of the current run wait for its time: until then, or so many seconds from `since`."""
    arguments = asked.arguments or {}
    until = arguments.get("until")
    wanted = microseconds(arguments["seconds"]) if until is None else max(1, until - since)
    payload = {"call_id": asked.call_id, "run_id": row.run_id, "since": since, "wanted": wanted}
    tx.set_timer(row, CALL_TIMER + asked.call_id, since + wanted, payload)
    tx.append(row, events.TimerSet(kind="wait", name=asked.call_id, due_at=since + wanted))


def over(
    tx: Transaction, row: SessionRow, call_id: str, run_id: str, since: int, wanted: int, nothing: str = ""
) -> None:  # fmt: skip
    """The time of a wait is over: its call has a result.

    Args:
        nothing: what is said of a call that waited for something else, which has not come in time.
    """
    if row.run_id != run_id:
        return
    if nothing:
        hand_in(tx, row, call_id, {"decision": "timeout", "text": nothing, "since": since})
        return
    late = tx.now - since - wanted
    text = f"waited {spoken(wanted)}"
    if late >= LATE:
        text = f"waited {spoken(tx.now - since)}: {spoken(late)} longer than you asked for"
    hand_in(tx, row, call_id, {"decision": "ok", "text": text, "since": since})
    tx.append(row, events.TimerFired(kind="wait", name=call_id, late=late))


def hand_in(tx: Transaction, row: SessionRow, call_id: str, said: dict[str, Any]) -> None:
    """Put the answer to a call into the inbox; a session that waits for answers goes on."""
    tx.put_inbox(row, "answer", call_id, said)
    go_on(tx, row)


def go_on(tx: Transaction, row: SessionRow) -> None:
    """A call was answered: a session that waits for answers goes on."""
    if row.wait == "input":
        tx.wake(row)


def drop_all(tx: Transaction, row: SessionRow) -> None:
    """The round ends before its calls have waited their time, or were answered."""
    where = (TIMER.c.namespace == tx.namespace, TIMER.c.session_id == row.session_id)
    of_calls = or_(TIMER.c.name.startswith(CALL_TIMER), TIMER.c.name.startswith(QUESTION_TIMER))
    names = select(TIMER.c.name).where(*where, of_calls)
    for name in list(tx.read(names, row.session_id).scalars()):
        tx.drop_timer(row, name)
