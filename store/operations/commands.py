"""Commands in the background: they are the session's, go on when a run of it has completed, and end with the session.

The row is written before the process begins, and says what shall become of it; the node service of `node_id` makes
processes follow rows. The end of each is written once: whoever writes it finds the row open.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import select, update

from understudy import events
from understudy.commands import (
    COMMAND,
    ENDED,
    LOST,
    MOST_COMMANDS,
    RUNNING,
    STOP_SECONDS,
    STOPPED,
    STOPPING,
    CommandEnd,
    StartCommand,
    command_key,
    ending,
    job_identifier,
    news_text,
)
from understudy.errors import InvalidInput, RunConflict, SessionClosed
from understudy.jobs import MOST_SHOWN, SHOWN_TEXT, Job, ago
from understudy.messages import storable
from understudy.records import CALL_ENDED, InboxItem
from understudy.wakeups import spoken

from ..db import statements
from ..db.session_row import SessionRow
from ..transaction import Transaction
from .beginnings import accept, require_open

TABLE = statements.COMMAND
CALLS = statements.TOOL_CALL


def start(tx: Transaction, row: SessionRow, wanted: StartCommand) -> Any:
    """The row of the command that a tool call starts. Key: the call; the same call finds the same row.

    The caller has checked that the session's current activation asks.

    Raises:
        InvalidInput: the run is about to end, the session has as many commands at work as it may have, or one of
            another call has the id.
        SessionClosed: the session takes no more input.
    """
    job = job_identifier(wanted.call_id)
    found = find(tx, row, job)
    if found is not None and found.call_id != wanted.call_id:  # ids are short
        message = f"another command of the session has the id {job}: make the call once more"
        raise InvalidInput(message, session_id=row.session_id)
    if found is not None:
        return found
    require_open(tx, row)
    if row.run_id is None or row.cancel_reason is not None:
        raise InvalidInput("the run is about to end: it starts nothing more", session_id=row.session_id)
    if len(_open(tx, row)) >= MOST_COMMANDS:
        message = f"the session has {MOST_COMMANDS} commands at work, and may have no more: stop one first"
        raise InvalidInput(message, session_id=row.session_id)
    tx.insert(
        TABLE,
        {"session_id": row.session_id, "job": job, "call_id": wanted.call_id, "run_id": row.run_id,
         "key": command_key(tx.namespace, row.session_id, row.first_incarnation, job),
         "node_id": wanted.node_id, "name": storable(wanted.name), "command": storable(wanted.command),
         "state": RUNNING, "started_at": tx.now, "ended_at": 0, "quiet": 0, "stop_at": 0, "exit_code": None,
         "problem": "", "tail": ""},
    )  # fmt: skip
    tx.append(row, events.CommandStarted(job=job, call_id=wanted.call_id, name=wanted.name))
    return find(tx, row, job)


def ended(
    tx: Transaction, session_id: str, key: str, end: CommandEnd | None, *, quiet: bool = False,
    never_begun: bool = False,
) -> bool:  # fmt: skip
    """Write the end of a command, and tell the session of it by an input. Key: the command, while it is open; True if
    it is closed by now.

    Args:
        end: None if nothing is known of it.
        quiet: the session is not notified.
        never_begun: it has no process; nothing is written as long as the call may still be repeated that starts it.
    """
    row = tx.find(session_id)
    found = _one(tx, row, TABLE.c.key == key) if row is not None else None
    if row is None or found is None or found.ended_at:
        return True
    if never_begun and found.state == RUNNING and _may_be_repeated(tx, row, found.call_id):
        return False
    end = end or CommandEnd(lost=True)
    state = STOPPED if found.state == STOPPING else LOST if end.lost else ENDED
    values = {"exit_code": end.exit_code, "tail": storable(end.tail), "problem": storable(end.problem)}
    _change(tx, row, found.job, state=state, ended_at=tx.now, **values)
    duration = max(0, tx.now - found.started_at)
    tx.append(row, events.CommandEnded(job=found.job, state=state, exit_code=end.exit_code, duration=duration))
    if not quiet and not found.quiet:
        how = ending(state, end.exit_code, end.problem)
        _tell(tx, row, found.job, news_text(found.job, shown(found), how, end.tail, lost=end.lost))
    return True


def _tell(tx: Transaction, row: SessionRow, job: str, text: str) -> None:
    """Put the news into the session's inbox, once."""
    try:
        accept(tx, row.session_id, f"news.{job}", storable(text), source=COMMAND, command=job)
    except (SessionClosed, RunConflict):  # a conflict: somebody has used just this id for an input of their own
        pass


def take_over(tx: Transaction, session_id: str, key: str, node_id: str, nodes: Collection[str]) -> bool:
    """Have a node look after a command whose process is on its machine, and whose own node has no service any more;
    False if nobody has to.

    Args:
        nodes: those that have a service.

    Raises:
        StaleGeneration: another supervisor owns the store.
    """
    row = tx.find(session_id)
    tx.require_generation()
    found = _one(tx, row, TABLE.c.key == key) if row is not None else None
    if row is None or found is None or found.ended_at or found.node_id in nodes:
        return False
    _change(tx, row, found.job, node_id=node_id)
    return True


def lost(tx: Transaction, nodes: Collection[str]) -> int:
    """Write that the commands of nodes are lost which have no service any more; how many they are.

    Args:
        nodes: those that have one.

    Raises:
        StaleGeneration: another supervisor owns the store.
    """
    where = (TABLE.c.namespace == tx.namespace, TABLE.c.ended_at == 0, TABLE.c.node_id.not_in(list(nodes)))
    columns = (TABLE.c.session_id, TABLE.c.key, TABLE.c.node_id)
    sessions = {row.session_id: None for row in tx.read(select(*columns).where(*where).order_by(TABLE.c.key))}
    tx.load(sessions)
    tx.require_generation()
    # Before they were loaded some may have been taken over.
    found = tx.read(select(*columns).where(*where, TABLE.c.session_id.in_(sessions)).order_by(TABLE.c.key)).all()
    for row in found:
        tx.commands[row.node_id] = None
        ended(tx, row.session_id, row.key, None)
    return len(found)


def stop_all(tx: Transaction, row: SessionRow, run_id: str | None) -> None:
    """Have a session's commands end without notifying it: those that a run has started, or all (None)."""
    for found in _open(tx, row):
        if run_id in (None, found.run_id):
            _stop(tx, row, found, STOP_SECONDS, quiet=True)


def news(tx: Transaction, row: SessionRow, run_id: str) -> list[InboxItem]:
    """The inputs, not taken yet, about the ends of the commands that a run of the session has started."""
    items = [item for item in tx.inbox(row) if item.kind == "input" and item.payload.get("command")]
    found = {item.id: find(tx, row, item.payload["command"]) for item in items}
    return [item for item in items if (command := found[item.id]) is not None and command.run_id == run_id]


def jobs(tx: Transaction, row: SessionRow) -> list[Job]:
    """The session's commands, as many as may be shown and one more."""
    where = (TABLE.c.namespace == tx.namespace, TABLE.c.session_id == row.session_id)
    order = (TABLE.c.ended_at > 0, TABLE.c.started_at.desc(), TABLE.c.job)
    found = tx.read(select(TABLE).where(*where).order_by(*order).limit(MOST_SHOWN + 1), row.session_id).all()
    return [_job(command) for command in found]


def _job(found: Any) -> Job:
    if not found.ended_at:
        state = "at work" if found.state == RUNNING else "told to end"
        return Job(found.job, "command", found.started_at, state, shown(found))
    how = ending(found.state, found.exit_code, found.problem)
    return Job(found.job, "command", found.ended_at, how, shown(found), ended=True)


def shown(found: Any) -> str:
    """What a command is about: its name and its first line."""
    first, *more = found.command.strip().splitlines()
    text = f"{first[:SHOWN_TEXT]}…" if more or len(first) > SHOWN_TEXT else first
    return f"{found.name}: {text}" if found.name else text


def stop(tx: Transaction, row: SessionRow, job: str, grace: float | None) -> str | None:
    """Ask a command to end; what became of it. None if the session has started none of this id.

    Args:
        grace: seconds after which it is ended by force; None for `STOP_SECONDS`.
    """
    found = find(tx, row, job)
    if found is None:
        return None
    if found.ended_at:
        how = ending(found.state, found.exit_code, found.problem)
        return f"command {job} is not at work: it {how}, {ago(found.ended_at, tx.now)}"
    stop_at = _stop(tx, row, found, STOP_SECONDS if grace is None else grace)
    return f"command {job} was told to end, and has {spoken(max(0, stop_at - tx.now))} for it"


def _stop(tx: Transaction, row: SessionRow, found: Any, grace: float, *, quiet: bool = False) -> int:
    """Note that a command shall end, and until when; a later time than it had before changes nothing."""
    stop_at = tx.now + round(grace * 1e6)
    if found.state == STOPPING:
        stop_at = min(stop_at, found.stop_at)
    _change(tx, row, found.job, state=STOPPING, stop_at=stop_at, quiet=max(found.quiet, int(quiet)))
    tx.commands[found.node_id] = None
    return stop_at


def find(tx: Transaction, row: SessionRow, job: str) -> Any:
    """The row of a command of the session; None if there is none."""
    return _one(tx, row, TABLE.c.job == job)


def _one(tx: Transaction, row: SessionRow, wanted: Any) -> Any:
    where = (TABLE.c.namespace == tx.namespace, TABLE.c.session_id == row.session_id, wanted)
    return tx.read(select(TABLE).where(*where), row.session_id).first()


def _open(tx: Transaction, row: SessionRow) -> list[Any]:
    where = (TABLE.c.namespace == tx.namespace, TABLE.c.session_id == row.session_id, TABLE.c.ended_at == 0)
    statement = select(TABLE).where(*where).order_by(TABLE.c.started_at, TABLE.c.job)
    return list(tx.read(statement, row.session_id).all())


def _may_be_repeated(tx: Transaction, row: SessionRow, call_id: str) -> bool:
    where = (CALLS.c.namespace == tx.namespace, CALLS.c.session_id == row.session_id, CALLS.c.call_id == call_id)
    state = tx.read(select(CALLS.c.state).where(*where), row.session_id).scalar()
    return row.run_id is not None and state is not None and state not in CALL_ENDED


def _change(tx: Transaction, row: SessionRow, job: str, **values: Any) -> None:
    tx.changed(row)
    where = (TABLE.c.namespace == tx.namespace, TABLE.c.session_id == row.session_id, TABLE.c.job == job)
    tx.read(update(TABLE).where(*where).values(**values), row.session_id)
