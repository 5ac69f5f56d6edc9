"""Wakeups: timers of a session that, when due, are an input to it. They outlive runs, and end with the session."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from sqlalchemy import select

from understudy import events
from understudy.errors import InvalidInput, RunConflict, UnderstudyError
from understudy.identifiers import digest
from understudy.jobs import Job, ago
from understudy.messages import storable
from understudy.protocol import Scheduled
from understudy.records import Ask
from understudy.wakeups import MOST_WAKEUPS, microseconds, next_due, run_identifier, run_prefix, spoken

from ..db.prepared import Row
from ..db.session_row import SessionRow
from ..db.statements import RUN, TIMER
from ..transaction import Transaction
from .beginnings import accept, linked_to_closed, require_open

WAKEUP_TIMER = "wakeup:"
"""The timer of a wakeup, with its name behind it."""

PUT_OFF = 60_000_000
"""What is due while its session is quarantined is tried again after so long (microseconds)."""


def schedule(
    tx: Transaction, session_id: str, name: str, prompt: str, seconds: float, every: float | None
) -> Scheduled:
    """Have the session get an input later, once or again and again. Key: the name, while a wakeup of it is waited for.

    Raises:
        UnknownSession: there is no such session.
        SessionClosed: it takes no more input, or is linked to a session that does not.
        InvalidInput: it is an ephemeral sub-agent's, or has as many wakeups as it may have.
    """
    row = tx.session(session_id)
    require_open(tx, row)
    if row.parent_id is not None and row.lifecycle == "ephemeral":
        message = (
            "an ephemeral sub-agent can't be woken: its session ends with its task. Say in your answer what is due"
        )
        raise InvalidInput(message, session_id=session_id)
    known = {item["name"]: item["payload"] for item in _timers(tx, row)}
    content = {"prompt": storable(prompt), "seconds": seconds, "every": every}
    before = known.get(name)
    if before is not None and {part: before[part] for part in content} == content:
        return Scheduled("unchanged", before["due_at"])
    if before is None and len(known) >= MOST_WAKEUPS:
        message = f"the session has {MOST_WAKEUPS} wakeups, and may have no more: cancel one first"
        raise InvalidInput(message, session_id=session_id)
    due_at = tx.now + microseconds(seconds)
    _set(tx, row, name, due_at, {**content, "due_at": due_at, "run_id": None, "set_at": tx.now})
    return Scheduled("replaced" if before is not None else "scheduled", due_at)


def cancel(tx: Transaction, session_id: str, name: str) -> bool:
    """Give a wakeup up; what it has begun goes on. True if there was one. Raises `UnknownSession`."""
    row = tx.session(session_id)
    if all(item["name"] != name for item in _timers(tx, row)):
        return False
    tx.drop_timer(row, WAKEUP_TIMER + name)
    tx.append(row, events.TimerCancelled(name=name))
    return True


def answer(tx: Transaction, row: SessionRow, asked: Ask) -> tuple[str, str]:
    """`(decision, text)`: the answer to a call that sets a wakeup."""
    arguments = asked.arguments or {}
    name = arguments["name"] or digest(asked.call_id, size=4)
    try:
        prompt, seconds, every = (arguments[part] for part in ("prompt", "seconds", "every"))
        found = schedule(tx, row.session_id, name, prompt, seconds, every)
    except UnderstudyError as error:
        return "error", error.message
    what = {"scheduled": "is scheduled", "replaced": "is rescheduled", "unchanged": "was scheduled before"}
    return "ok", f"wakeup {name} {what[found.outcome]}: it is {_due(found.due_at, every, tx.now)}"


def jobs(tx: Transaction, row: SessionRow) -> list[Job]:
    """The session's wakeups that are to come."""
    return [
        Job(
            item["name"],
            "wakeup",
            wakeup.get("set_at", tx.now),  # timers of earlier versions do not say it
            _due(wakeup["due_at"], wakeup["every"], tx.now),
            wakeup["prompt"],
        )
        for item in _timers(tx, row)
        for wakeup in [item["payload"]]
    ]


def _due(due_at: int, every: float | None, now: int) -> str:
    again = f", then every {spoken(microseconds(every))}" if every else ""
    return f"due in {spoken(max(0, due_at - now))}{again}"


def stop(tx: Transaction, row: SessionRow, job: str, _grace: float | None) -> str | None:
    """Give a wakeup up, for which no time is needed; what became of it. None if it is neither to come nor has fired."""
    last = _last_fired(tx, row, job)
    waits = last is not None and any(item.kind == "input" and item.key == last.run_id for item in tx.inbox(row))
    comes = ": its prompt is still to come to you, once" if waits else ""
    if cancel(tx, row.session_id, job):
        return f"wakeup {job} is stopped" + (f", after it has fired{comes}" if comes else "")
    return f"wakeup {job} has fired {ago(last.accepted_at, tx.now)}{comes}" if last is not None else None


def _last_fired(tx: Transaction, row: SessionRow, name: str) -> Any:
    """The run that a wakeup of this name has begun last; None if there is none."""
    prefix = run_prefix(name)
    mine = (RUN.c.namespace == tx.namespace, RUN.c.session_id == row.session_id, RUN.c.source == "timer")
    # Numbers are before letters however a database compares texts; what else is between is another wakeup's.
    statement = select(RUN.c.run_id, RUN.c.accepted_at).where(*mine, RUN.c.run_id.between(prefix, f"{prefix}z"))
    found = [run for run in tx.read(statement, row.session_id) if run.run_id.removeprefix(prefix).isdigit()]
    return max(found, key=lambda run: run.accepted_at, default=None)


def fire(tx: Transaction, row: SessionRow, name: str, wakeup: Row) -> None:
    """A wakeup is due: its prompt is accepted as an input, unless the last one that it brought has not even begun."""
    if row.closed or linked_to_closed(tx, row):
        return
    if row.status == "quarantined":  # it takes no input until a person says so
        tx.set_timer(row, WAKEUP_TIMER + name, tx.now + PUT_OFF, wakeup)
        return
    run_id = wakeup["run_id"]
    waits = any(item.kind == "input" and item.key == run_id for item in tx.inbox(row))
    if not waits:
        run_id = run_identifier(name, wakeup["due_at"])
        with suppress(RunConflict):  # somebody has used just this id for an input of their own
            accept(tx, row.session_id, run_id, wakeup["prompt"], source="timer")
    event = events.TimerFired(kind="wakeup", name=name, late=tx.now - wakeup["due_at"], run_id=run_id)
    tx.append(row, event)
    if wakeup["every"]:
        due_at = next_due(wakeup["due_at"], microseconds(wakeup["every"]), tx.now)
        _set(tx, row, name, due_at, {**wakeup, "due_at": due_at, "run_id": run_id})


def drop_all(tx: Transaction, row: SessionRow) -> None:
    """The session takes no more input."""
    for item in _timers(tx, row):
        tx.drop_timer(row, WAKEUP_TIMER + item["name"])


def _set(tx: Transaction, row: SessionRow, name: str, due_at: int, wakeup: Row) -> None:
    tx.set_timer(row, WAKEUP_TIMER + name, due_at, wakeup)
    tx.append(row, events.TimerSet(kind="wakeup", name=name, due_at=due_at))


def _timers(tx: Transaction, row: SessionRow) -> list[Row]:
    """`name` and `payload` of each, the first that is due first."""
    where = (TIMER.c.namespace == tx.namespace, TIMER.c.session_id == row.session_id)
    statement = select(TIMER.c.name, TIMER.c.payload).where(*where, TIMER.c.name.startswith(WAKEUP_TIMER))
    found = tx.read(statement.order_by(TIMER.c.due_at, TIMER.c.name), row.session_id).mappings()
    return [{"name": item["name"].removeprefix(WAKEUP_TIMER), "payload": item["payload"]} for item in found]
