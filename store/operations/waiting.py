"""Tool calls that the store answers itself: a wait when its time is over, what is asked about wakeups or notes at once.

The answer goes into the session's inbox, as a person's does, and so becomes the call's result once, whatever dies.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import or_, select

from understudy import events
from understudy.errors import UnderstudyError
from understudy.identifiers import digest
from understudy.notes import NOTE_TOOLS
from understudy.recall import READ_MESSAGE, RECALL
from understudy.records import Ask
from understudy.wakeups import CANCEL_WAKEUP, LIST_WAKEUPS, SCHEDULE_WAKEUP, WAIT, microseconds, spoken

from ..db.session_row import SessionRow
from ..db.statements import TIMER
from ..transaction import Transaction
from . import notes, recall, wakeups

CALL_TIMER = "call:"
"""The timer of a call that waits, with its id behind it."""

QUESTION_TIMER = "question:"
"""The timer of a call that asks a person, with its id behind it: of some, since not every question has a time-out."""

LATE = 5_000_000
"""A wait that lasted so much longer than asked for (microseconds) has a result that says so."""

STORE_ANSWERS = (WAIT, SCHEDULE_WAKEUP, LIST_WAKEUPS, CANCEL_WAKEUP, RECALL, READ_MESSAGE, *NOTE_TOOLS)


def ask(tx: Transaction, row: SessionRow, asked: Ask) -> None:
    """Let a tool call of the current run wait for its time, or answer it."""
    calls = tx.current_calls(row)
    # Nothing has changed the call since the model asked for it: the time counts from then, whatever died meanwhile.
    # Not from a time in the future, of a clock that was set back since: the wait would be longer by as much.
    since = min(tx.now, next(call["updated_at"] for call in calls if call["call_id"] == asked.call_id))
    tx.update_call(
        row.session_id, asked.call_id, state="waiting", epoch=row.epoch, executions=asked.executions, result=None,
        child_id=None,
    )  # fmt: skip
    arguments = asked.arguments or {}
    if asked.kind != WAIT:
        if asked.kind in NOTE_TOOLS:
            decision, text = notes.answer(tx, row, asked)
        elif asked.kind in (RECALL, READ_MESSAGE):
            decision, text = recall.answer(tx, row, asked.kind, arguments)
        else:
            decision, text = _about_wakeups(tx, row, asked, arguments)
        hand_in(tx, row, asked.call_id, {"decision": decision, "text": text, "since": since})
        return
    wanted = microseconds(arguments["seconds"])
    payload = {"call_id": asked.call_id, "run_id": row.run_id, "since": since, "wanted": wanted}
    tx.set_timer(row, CALL_TIMER + asked.call_id, since + wanted, payload)
    tx.append(row, events.TimerSet(kind="wait", name=asked.call_id, due_at=since + wanted))


def _about_wakeups(tx: Transaction, row: SessionRow, asked: Ask, arguments: dict[str, Any]) -> tuple[str, str]:
    """`(decision, text)`: the answer to a call that sets, lists or cancels wakeups."""
    if asked.kind == LIST_WAKEUPS:
        return "ok", wakeups.described(tx, row)
    name = arguments.get("name") or digest(asked.call_id, size=4)
    if asked.kind == CANCEL_WAKEUP:
        if wakeups.cancel(tx, row.session_id, name):
            return "ok", f"wakeup {name} is cancelled"
        return "error", f"there is no wakeup {name}. {wakeups.described(tx, row)}"
    try:
        prompt, seconds, every = (arguments[part] for part in ("prompt", "seconds", "every"))
        found = wakeups.schedule(tx, row.session_id, name, prompt, seconds, every)
    except UnderstudyError as error:
        return "error", error.message
    what = {"scheduled": "is scheduled", "replaced": "is scheduled anew", "unchanged": "was scheduled before"}
    again = f", then every {spoken(microseconds(every))}" if every else ""
    return "ok", f"wakeup {name} {what[found.outcome]}: it is due in {spoken(found.due_at - tx.now)}{again}"


def over(tx: Transaction, row: SessionRow, call_id: str, run_id: str, since: int, wanted: int) -> None:
    """The time of a wait is over: its call has a result."""
    if row.run_id != run_id:
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
