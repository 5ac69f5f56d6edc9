"""Queues: which runs wait for a slot, and which get one.

What of a run changes its place in a queue only notes the queue (`Transaction.queues`). When all operations of the
transaction are done, the queue's row is locked, and decided with what is there then who begins. So a slot is given on
in the transaction that gives it back, and how many are taken is never a count that could go wrong: it is how many runs
say so. Queues are locked behind all else, in the order of their names, and whoever has one waits for nobody: a session
that another transaction has locked sends this one back, and the next try locks it first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import bindparam, func, insert, literal_column, select, update
from sqlalchemy import delete as delete_from

from understudy import events
from understudy.errors import Conflict, InvalidInput, UnknownQueue
from understudy.queues import (
    BEGUN,
    BEHIND,
    MOST_QUEUES,
    WAITS,
    Limits,
    NewQueue,
    QueuePlace,
    QueueSet,
    Waiting,
    choose,
    full_keys,
    looks_again,
    period_of,
    recent,
    room,
)
from understudy.records import InboxItem

from ..db.prepared import Row
from ..db.session_row import SessionRow
from ..db.statements import QUEUE, RUN, SCHEDULE
from ..db.tables import IN_QUEUE
from ..transaction import Transaction

OF_QUEUES = " "
"""Instead of a session's id, among the timers: the name is a queue's."""

FIRST = (RUN.c.queue_rank, RUN.c.accepted_at, RUN.c.session_id, RUN.c.run_id)
"""In which order runs begin."""


UPDATE_SLOT = (
    update(RUN)
    .where(
        RUN.c.namespace == bindparam("b_ns"), RUN.c.session_id == bindparam("b_session"),
        RUN.c.run_id == bindparam("b_run"),
    )
    .values(slot=bindparam("b_slot"))
)  # fmt: skip


def request_key(name: str) -> str:
    """Instead of a session's id, in the requests that are remembered: no session has such an id."""
    return f"queue {name}"


# A run and its session.


def enter(tx: Transaction, row: SessionRow, place: QueuePlace | None) -> Row:
    """The columns of a run that is being accepted, which say where it waits.

    Raises:
        UnknownQueue: nowhere, since there is no such queue.
    """
    if place is None:
        return {}
    require(tx, place.queue)
    tx.changed(row)
    row.queued += 1
    slot = WAITS if row.wait == "idle" else BEHIND
    return {"queue": place.queue, "queue_key": place.key, "queue_rank": -place.priority, "slot": slot}


def require(tx: Transaction, name: str) -> None:
    """Refuse a queue that is not there, or is not any more when this is committed. Raises `UnknownQueue`."""
    if tx.connection.execute(select(QUEUE.c.name).where(*_of(tx, name))).first() is None:
        raise _unknown(name)
    tx.queues[name] = True


def begin_next(tx: Transaction, row: SessionRow) -> None:
    """Have a session without a run begin its next input, or wait in the queue of that."""
    item = held_back(tx, row)
    if item is None:
        tx.wake(row)
        return
    wait(tx, row)
    _set_slot(tx, [(row.session_id, item.key)], WAITS)
    tx.queues.setdefault(item.payload["queue"], False)


def wait(tx: Transaction, row: SessionRow) -> None:
    """Have a session without a run wait in the queue of its next input."""
    tx.changed(row)
    row.wait, row.status, row.wait_since = "queue", "waiting_for_queue", tx.now
    row.active, row.redone = 1, 0


def held_back(tx: Transaction, row: SessionRow) -> InboxItem | None:
    """The next input of a session without a run, if that must wait in a queue."""
    if not row.queued or row.queue:
        return None
    first = next(item for item in tx.inbox(row) if item.kind == "input")
    return first if "queue" in first.payload else None


def shown(row: SessionRow, items: tuple[InboxItem, ...]) -> tuple[InboxItem, ...]:
    """What of a session's inbox its process receives: no input that has no slot; without a run, no input behind one."""
    if not row.queued:
        return items
    has_slot, behind, found = row.run_id is None and row.queue != "", False, []
    for item in items:
        waits = item.kind == "input" and "queue" in item.payload
        if waits and has_slot:
            waits = has_slot = False
        behind = behind or (waits and row.run_id is None)
        if not waits and not (behind and item.kind == "input"):
            found.append(item)
    return tuple(found)


def leave(tx: Transaction, row: SessionRow, item: InboxItem) -> None:
    """An input that has not begun has left its session's inbox, with its run's slot if it had one."""
    name = item.payload.get("queue")
    if name is None:
        return
    tx.queues.setdefault(name, False)
    has_slot = row.run_id is None and row.queue != "" and not _queued_before(tx, row, item)
    if has_slot:
        row.queue = ""
    else:
        row.queued -= 1


def _queued_before(tx: Transaction, row: SessionRow, item: InboxItem) -> bool:
    return any(other.kind == "input" and other.id < item.id and "queue" in other.payload for other in tx.inbox(row))


def give_back(tx: Transaction, row: SessionRow) -> None:
    """The session's current run has ended, and says so in its own row: so it has no slot."""
    if row.queue:
        tx.queues.setdefault(row.queue, False)
        row.queue = ""


# Who begins.


def give_slots(tx: Transaction) -> None:
    """Give slots to those that may have them by now, in all queues that something has happened to.

    Raises:
        UnknownQueue: a run was accepted, or a schedule set, for a queue that has been removed meanwhile.
    """
    for name in sorted(tx.queues):
        locked = tx.locking(select(QUEUE).where(*_of(tx, name)))
        row = tx.read(locked).mappings().first()
        if row is not None:
            _admit(tx, dict(row))
        elif tx.queues[name]:
            raise _unknown(name)
    tx.queues.clear()


def look(tx: Transaction, name: str) -> None:
    """Something may begin in a queue by now; nothing if it is gone."""
    tx.queues.setdefault(name, False)


def look_soon(tx: Transaction, names: Iterable[str]) -> None:
    """The same for runs that an archive brings: their sessions are nobody's yet, so whoever sweeps looks."""
    for name in sorted(names):
        row = _locked(tx, name)
        if row is not None and not row["due_at"]:
            _write(tx, name, {"due_at": tx.now})


def _admit(tx: Transaction, row: Row) -> None:
    name, limits, now = row["name"], _limits(row), tx.now
    counted = select(RUN.c.queue_key, func.count()).where(*_at(tx, name, BEGUN)).group_by(RUN.c.queue_key)
    at_work = {key: number for key, number in tx.connection.execute(counted)}
    left, begun, others = room(limits, sum(at_work.values()), now), 0, True
    while left > 0 and others:
        found = _waiting(tx, name, full_keys(limits, at_work), left)
        chosen = choose(limits, at_work, found, left)
        _begin(tx, name, chosen)
        others = len(found) == left
        begun, left = begun + len(chosen), left - len(chosen)
    begins = recent(limits, now) + [now] * begun if limits.rate else []
    limits = limits._replace(begins=begins)
    due_at = looks_again(limits, sum(at_work.values()), now) if others else 0
    if due_at and not _waiting(tx, name, full_keys(limits, at_work), 1):
        due_at = 0
    if (begins, due_at) != (row["begins"] or [], row["due_at"]):
        _write(tx, name, {"begins": begins, "due_at": due_at})
    if due_at:  # also if it was, and who noted it came too early
        tx.timers[OF_QUEUES, name] = due_at


def _waiting(tx: Transaction, name: str, full: list[str], most: int) -> list[Waiting]:
    """Those that wait, the first of them first, but for those of keys of which no more may begin."""
    statement = select(RUN.c.session_id, RUN.c.run_id, RUN.c.queue_key).where(*_at(tx, name, WAITS))
    if full:
        statement = statement.where(RUN.c.queue_key.not_in(full))
    return [Waiting(*found) for found in tx.connection.execute(statement.order_by(*FIRST).limit(most))]


def _begin(tx: Transaction, name: str, runs: list[Waiting]) -> None:
    """Give these runs their slots: their sessions go on with them."""
    tx.load((run.session_id for run in runs), wait=False)
    for run in runs:
        row = tx.session(run.session_id)
        item = held_back(tx, row)
        if item is None or item.key != run.run_id:
            raise RuntimeError(f"run {run.run_id!r} of session {run.session_id!r} waits in no queue")
        tx.changed(row)
        row.queue, row.queued = name, row.queued - 1
        given = item.payload
        event = events.RunAdmitted(
            run_id=run.run_id, trace_id=given["trace_id"], sampled=given.get("sampled"), queue=name,
            waited=max(0, tx.now - given["accepted_at"]),
        )  # fmt: skip
        tx.append(row, event)
        tx.wake(row)
    _set_slot(tx, [(run.session_id, run.run_id) for run in runs], BEGUN)


def _set_slot(tx: Transaction, runs: list[tuple[str, str]], slot: int) -> None:
    if runs:
        tx.flush()
        keys = [{"b_ns": tx.namespace, "b_session": session_id, "b_run": run_id} for session_id, run_id in runs]
        tx.connection.execute(UPDATE_SLOT, [{**key, "b_slot": slot} for key in keys])


# The queue itself.


def put(tx: Transaction, wanted: NewQueue) -> QueueSet:
    """Set a queue. Key: its name; the same limits again change nothing. Runs that are at work go on under any.

    Raises:
        InvalidInput: there are as many as there may be.
    """
    rate, period = period_of(wanted.rate)
    limits = {"concurrency": wanted.concurrency, "per_key": wanted.per_key, "rate": rate, "period": period}
    row = _locked(tx, wanted.name)
    if row is None:
        _require_room(tx)
        tx.writes += 1
        others = {"paused": 0, "begins": [], "due_at": 0, "created_at": tx.now}
        values = {**limits, **others, "updated_at": tx.now, "set_by": tx.by}
        tx.connection.execute(insert(QUEUE).values(namespace=tx.namespace, name=wanted.name, **values))
        tx.queues.setdefault(wanted.name, False)  # an archive may have brought runs of it
        return QueueSet("created")
    if {name: row[name] for name in limits} == limits:
        return QueueSet("unchanged")
    _write(tx, wanted.name, {**limits, "updated_at": tx.now, "set_by": tx.by})
    tx.queues.setdefault(wanted.name, False)
    return QueueSet("changed")


def pause(tx: Transaction, name: str, paused: bool) -> bool:
    """Have no run of a queue begin, or begin again; True if that is a change. Raises `UnknownQueue`."""
    row = _known(tx, name)
    if bool(row["paused"]) == paused:
        return False
    _write(tx, name, {"paused": int(paused), "updated_at": tx.now})
    tx.queues.setdefault(name, False)
    return True


def remove(tx: Transaction, name: str) -> bool:
    """Remove a queue; True if there was one.

    Raises:
        Conflict: runs wait in it or are at work, or a schedule names it.
    """
    if _locked(tx, name) is None:
        return False
    counted = select(RUN.c.slot, func.count()).where(*_of_runs(tx, name)).group_by(RUN.c.slot)
    numbers = {slot: number for slot, number in tx.read(counted)}
    if numbers:
        waiting, at_work = numbers.get(WAITS, 0) + numbers.get(BEHIND, 0), numbers.get(BEGUN, 0)
        raise Conflict(f"{waiting} runs wait in queue {name!r}, and {at_work} of it are at work: let them end first")
    by_schedule = tx.read(select(SCHEDULE.c.name).where(*_of_schedules(tx, name)).limit(1)).scalar()
    if by_schedule is not None:
        raise Conflict(f"schedule {by_schedule!r} names queue {name!r}: delete it, or set it without that, first")
    tx.writes += 1
    tx.connection.execute(delete_from(QUEUE).where(*_of(tx, name)))
    tx.timers.pop((OF_QUEUES, name), None)
    return True


def _require_room(tx: Transaction) -> None:
    counted = select(func.count()).select_from(QUEUE).where(QUEUE.c.namespace == tx.namespace)
    if (tx.connection.execute(counted).scalar() or 0) >= MOST_QUEUES:
        raise InvalidInput(f"there are {MOST_QUEUES} queues, and may be no more: remove one first, or use keys")


def _unknown(name: str) -> UnknownQueue:
    return UnknownQueue(f"there is no queue {name!r} in this store")


# Rows. What is read here is not kept in the transaction: it is written at once.


def _of(tx: Transaction, name: str) -> tuple[Any, ...]:
    return QUEUE.c.namespace == tx.namespace, QUEUE.c.name == name


def _of_runs(tx: Transaction, name: str) -> tuple[Any, ...]:
    return RUN.c.namespace == tx.namespace, RUN.c.queue == name, IN_QUEUE


def _of_schedules(tx: Transaction, name: str) -> tuple[Any, ...]:
    return SCHEDULE.c.namespace == tx.namespace, SCHEDULE.c.queue == name


def _at(tx: Transaction, name: str, slot: int) -> tuple[Any, ...]:
    return *_of_runs(tx, name), RUN.c.slot == literal_column(str(slot))


def _known(tx: Transaction, name: str) -> Row:
    row = _locked(tx, name)
    if row is None:
        raise _unknown(name)
    return row


def _locked(tx: Transaction, name: str) -> Row | None:
    """The queue's row, which nobody else writes until the commit. Other operations follow in this transaction, so it
    waits for nobody: where another one has this lock, `StoreBusy` has the whole transaction tried again."""
    statement = select(QUEUE).where(*_of(tx, name))
    if tx.connection.dialect.name != "sqlite":
        statement = statement.with_for_update(nowait=True)
    found = tx.connection.execute(statement).mappings().first()
    return dict(found) if found is not None else None


def _limits(row: Row) -> Limits:
    return Limits(
        row["concurrency"], row["per_key"], row["rate"], row["period"], bool(row["paused"]), list(row["begins"] or ())
    )


def _write(tx: Transaction, name: str, values: Row) -> None:
    tx.writes += 1
    tx.connection.execute(update(QUEUE).where(*_of(tx, name)).values(**values))
