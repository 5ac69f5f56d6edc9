"""Schedules: what fires at due times, each of which is dealt with in one transaction, once.

Whoever finds that one is due has it fired by its name and time, however many do: the first one moves `due_at` on, under
the lock of the schedule's row, and the others find another time there.
"""

from __future__ import annotations

from typing import Any, Protocol

from msgspec.structs import replace
from sqlalchemy import delete as delete_from
from sqlalchemy import func, insert, select, update

from understudy.due_times import AT_ONCE, Step, fires_at, first_after, step, timing_problem
from understudy.errors import InvalidInput, SessionClosed, UnderstudyError, UnknownSchedule, UnknownSession
from understudy.loops import with_memory
from understudy.messages import encodable
from understudy.protocol import packed, unpacked
from understudy.schedules import (
    ALL,
    CANCEL,
    MOST_SCHEDULES,
    QUEUE,
    SOURCE,
    Fired,
    NewSchedule,
    ScheduleSet,
    firing_identifier,
)

from ..db.prepared import Row
from ..db.statements import RUN, SCHEDULE, SESSION
from ..transaction import Transaction
from . import loops, queues, triage
from .beginnings import accept, create_session
from .endings import request_cancel

OF_SCHEDULES = ""
"""Instead of a session's id, among the timers: the name is a schedule's."""

QUEUE_MICROSECONDS = 5_000_000
"""What waits for the last firing's run looks for its end again after so long."""

CHANGED = (
    "next_at", "due_at", "missed", "fired", "skipped", "failed", "last_at", "last_session", "last_run", "problem",
    "updated_at",
)  # fmt: skip
"""The columns that a firing changes."""

COUNTS = ("fired", "skipped", "missed", "failed", "triggered")


class Homes(Protocol):
    """Where sessions are at home (`understudy.node.homes.Homes`)."""

    def home_for(self, root_id: str) -> str:
        """The node of a new session."""

    def take_in(self, tx: Transaction, session_id: str) -> None:
        """Give a session that is being written a home, if its own is gone."""


def request_key(name: str) -> str:
    """Instead of a session's id, in the requests that are remembered: no session has such an id."""
    return f"schedule {name}"


def put(tx: Transaction, wanted: NewSchedule) -> ScheduleSet:
    """Set a schedule. Key: its name; the same definition again changes nothing, not even when it is due.

    Raises:
        InvalidInput: it is no schedule, is never due, or there are as many as there may be.
        UnknownSession, SessionClosed: its session is not there, or takes no more input.
        UnknownQueue: there is no such queue.
    """
    wanted = replace(wanted, content=encodable(wanted.content))
    definition = packed(wanted)
    timing = wanted.timing
    if problem := timing_problem(timing):
        raise InvalidInput(problem)
    row = _locked(tx, wanted.name)
    if row is not None and _same(row["definition"], definition):
        return ScheduleSet("unchanged")
    if wanted.session_id:
        _require_session(tx, wanted.session_id)
    if wanted.place is not None:
        queues.require(tx, wanted.place.queue)
    anchor = timing.start or tx.now
    # Also where the clock was set back: a due time that was dealt with under this name is not due again.
    next_at = first_after(timing, anchor, max(tx.now, row["last_at"] if row is not None else 0))
    if next_at is None:
        raise InvalidInput("the schedule would never be due: its times are all over. Give later ones")
    values = {
        "definition": definition, "anchor": anchor, "first_at": next_at, "next_at": next_at,
        "due_at": fires_at(wanted.name, timing, next_at), "problem": "", "set_by": tx.by, "updated_at": tx.now,
        "queue": wanted.place.queue if wanted.place is not None else "", **dict.fromkeys(COUNTS, 0),
    }  # fmt: skip
    if row is None:
        _require_room(tx)
        others = {"paused": 0, "last_at": 0, "last_session": "", "last_run": "", "created_at": tx.now}
        tx.writes += 1
        tx.connection.execute(
            insert(SCHEDULE).values(namespace=tx.namespace, name=wanted.name, **others, **values)
        )  # fmt: skip
        tx.timers[OF_SCHEDULES, wanted.name] = values["due_at"]
        return ScheduleSet("created")
    _write(tx, wanted.name, values)
    return ScheduleSet("replaced")


def pause(tx: Transaction, name: str, paused: bool) -> bool:
    """Have a schedule's due times pass, or fire again; True if that is a change. Raises `UnknownSchedule`."""
    row = _known(tx, name)
    if bool(row["paused"]) == paused:
        return False
    _write(tx, name, {"paused": int(paused), "updated_at": tx.now})
    return True


def delete(tx: Transaction, name: str) -> bool:
    """Remove a schedule; what it has begun goes on. True if there was one."""
    if _locked(tx, name) is None:
        return False
    tx.writes += 1
    tx.connection.execute(delete_from(SCHEDULE).where(*_of(tx, name)))
    tx.timers.pop((OF_SCHEDULES, name), None)
    return True


def trigger(tx: Transaction, name: str, homes: Homes) -> Fired:
    """Fire a schedule beside its due times, also one that is paused or has ended. By its `overlap` it may be skipped:
    it waits for nothing. Raises `UnknownSchedule`."""
    row = _known(tx, name)
    at = tx.now + row["triggered"]  # all operations of a transaction have one time
    done = _fire(tx, row, firing_identifier(name, f"t{at}"), homes)
    if done.outcome == "fired":
        last = {"last_session": done.session_id, "last_run": done.run_id, "triggered": row["triggered"] + 1}
        _write(tx, name, {**last, "updated_at": tx.now})
    return replace(done, outcome="skipped") if done.outcome == "queued" else done


def retry(tx: Transaction, entry_id: str, homes: Homes) -> Fired:
    """Trigger the schedule of an entry in triage, which is resolved if that run completes. Raises
    `UnknownTriageEntry`, `UnknownSchedule`."""
    entry = triage.known(tx, entry_id)
    done = trigger(tx, entry.schedule, homes)
    if done.outcome == "fired":
        triage.tried_again(tx, entry_id, done.run_id)
    return done


def fire(tx: Transaction, name: str, due_at: int, homes: Homes) -> None:
    """Do what is due at this time; nothing if the schedule is gone, or due at another time by now, or if somebody else
    is writing it just then: who sweeps looks again."""
    row = _locked(tx, name, skip=True)
    if row is None or not due_at or row["due_at"] != due_at:
        return
    now = max(tx.now, due_at)  # who waits for a time waits by a clock of its own: where the two differ, it has come
    for _ in range(AT_ONCE):  # of due times of which nothing begins, many may have passed
        before, row = row, _dealt_with(tx, row, now, homes)
        without_effect = row["skipped"] + row["failed"] > before["skipped"] + before["failed"]
        if not without_effect or not 0 < row["due_at"] <= now:
            break
    _write(tx, name, {column: row[column] for column in CHANGED})


def _dealt_with(tx: Transaction, row: Row, now: int, homes: Homes) -> Row:
    """Do what is due of a schedule; its row then."""
    wanted, name = _wanted(row), row["name"]
    passed = step(wanted, row["anchor"], row["next_at"], now)
    values: Row = {"missed": row["missed"] + passed.missed, "updated_at": tx.now}
    if passed.at is not None:
        run_id = firing_identifier(name, passed.at)
        done = Fired("skipped", problem="it is paused") if row["paused"] else _fire(tx, row, run_id, homes)
        if done.outcome == "queued":
            put_off = {"next_at": passed.at, "due_at": now + QUEUE_MICROSECONDS, "problem": done.problem}
            return {**row, **values, **put_off}
        if done.outcome == "failed":
            triage.add(tx, name, done.code, done.problem)
        values |= {done.outcome: row[done.outcome] + 1, "last_at": passed.at, "problem": done.problem}
        if done.outcome == "fired":
            values |= {"last_session": done.session_id, "last_run": done.run_id}
    return {**row, **values, **_following(wanted, passed, {**row, **values}["fired"])}


def _following(wanted: NewSchedule, passed: Step, fired: int) -> Row:
    """The due time that comes next, if one does."""
    if passed.following is None or (wanted.max_firings and fired >= wanted.max_firings):
        return {"next_at": 0, "due_at": 0}
    due_at = fires_at(wanted.name, wanted.timing, passed.following)
    return {"next_at": passed.following, "due_at": due_at}


def _fire(tx: Transaction, row: Row, run_id: str, homes: Homes) -> Fired:
    """Begin a run, unless the last firing's has not ended and the schedule says otherwise."""
    wanted, last = _wanted(row), (row["last_session"], row["last_run"])
    if wanted.overlap != ALL and _is_open(tx, *last):
        if wanted.overlap != CANCEL:
            problem = f"run {last[1]} of session {last[0]} has not ended"
            return Fired("queued" if wanted.overlap == QUEUE else "skipped", problem=problem)
        request_cancel(tx, tx.session(last[0]), f"schedule {wanted.name} is due again", last[1])
    session_id, before = wanted.session_id or run_id, tx.writes
    memory = loops.memory(tx, wanted.name) if wanted.memory else None
    content = wanted.content
    if memory is not None:
        content = with_memory(content, memory, triage.open_of(tx, wanted.name))
    try:
        if wanted.spec is not None:
            create_session(
                tx, session_id, wanted.spec, spec_hash=wanted.spec["hash"], placement=wanted.placement,
                node_id=homes.home_for(session_id), metadata=wanted.metadata,
            )  # fmt: skip
        accept(tx, session_id, run_id, content, source=SOURCE, place=wanted.place)
    except UnderstudyError as error:
        if tx.writes != before:
            raise
        return Fired("failed", problem=error.message, code=error.code)
    if memory is not None:
        loops.run_begun(tx, memory, run_id)
    homes.take_in(tx, session_id)
    return Fired("fired", session_id, run_id)


def _is_open(tx: Transaction, session_id: str, run_id: str) -> bool:
    """Whether a run has not ended; one that was removed with its session has. It is not locked: if it ends just now,
    that was after this."""
    if not run_id:
        return False
    where = (RUN.c.namespace == tx.namespace, RUN.c.session_id == session_id, RUN.c.run_id == run_id)
    finished_at: int | None = tx.read(select(RUN.c.finished_at).where(*where), session_id).scalar()
    return finished_at == 0


def _require_session(tx: Transaction, session_id: str) -> None:
    """Refuse a session that could not take an input. It is only read: a firing looks again, and locks it."""
    where = (SESSION.c.namespace == tx.namespace, SESSION.c.session_id == session_id)
    found = tx.read(select(SESSION.c.closed).where(*where), session_id).first()
    if found is None:
        raise UnknownSession(f"there is no session {session_id!r} in this store", session_id=session_id)
    if found.closed:
        raise SessionClosed("the session is closed", session_id=session_id)


def _require_room(tx: Transaction) -> None:
    counted = select(func.count()).select_from(SCHEDULE).where(SCHEDULE.c.namespace == tx.namespace)
    if (tx.connection.execute(counted).scalar() or 0) >= MOST_SCHEDULES:
        message = f"there are {MOST_SCHEDULES} schedules, and may be no more: delete one first"
        raise InvalidInput(message)


def _same(stored: Row, definition: Row) -> bool:
    """Whether two definitions are the same; of specifications their hashes say so."""
    return _identity(stored) == _identity(definition)


def _identity(definition: Row) -> Row:
    spec = definition.get("spec")
    return {**definition, "spec": spec and spec["hash"]}


def _wanted(row: Row) -> NewSchedule:
    found: NewSchedule = unpacked(row["definition"], NewSchedule, f"schedule {row['name']}")
    return found


# Rows. What is read here is not kept in the transaction: it is written at once.


def _of(tx: Transaction, name: str) -> tuple[Any, ...]:
    return SCHEDULE.c.namespace == tx.namespace, SCHEDULE.c.name == name


def _known(tx: Transaction, name: str) -> Row:
    row = _locked(tx, name)
    if row is None:
        raise UnknownSchedule(f"there is no schedule {name!r} in this store")
    return row


def _locked(tx: Transaction, name: str, *, skip: bool = False) -> Row | None:
    """The schedule's row, which nobody else writes until the commit.

    It waits for nobody, since this transaction may have sessions locked: where another one has this lock, `StoreBusy`
    has the whole transaction tried again, unless such a row is to be skipped, as if it were not there.
    """
    statement = select(SCHEDULE).where(*_of(tx, name))
    if tx.connection.dialect.name != "sqlite":
        statement = statement.with_for_update(nowait=not skip, skip_locked=skip)
    found = tx.connection.execute(statement).mappings().first()
    return dict(found) if found is not None else None


def _write(tx: Transaction, name: str, values: Row) -> None:
    tx.writes += 1
    tx.connection.execute(update(SCHEDULE).where(*_of(tx, name)).values(**values))
    if values.get("due_at"):
        tx.timers[OF_SCHEDULES, name] = values["due_at"]
