"""Steps of workflows: calls that a session's code asks for instead of a model, and the events that they wait for."""

from __future__ import annotations

from sqlalchemy import literal_column, select

from understudy.errors import InvalidInput, NotRunning
from understudy.json_text import from_json, to_json
from understudy.messages import encodable, storable
from understudy.protocol import Signal
from understudy.records import CALL_ENDED, Ask, CallState, InboxItem, answered_by
from understudy.wakeups import microseconds
from understudy.workflows import (
    EVENT_STEP,
    MOST_SIGNALS,
    SIGNAL,
    TIMEOUT_STEP,
    WORKFLOW,
    step_identifier,
    step_path,
)

from ..db.prepared import Row
from ..db.session_row import SessionRow
from ..db.statements import TOOL_CALL
from ..transaction import Transaction
from . import queues
from .waiting import CALL_TIMER, hand_in

LONGEST_PAYLOAD = 1_000_000
"""Characters of a signal's payload, as JSON."""

NOTHING_CAME = "the event did not come in time"


def begin(tx: Transaction, row: SessionRow, wanted: tuple[CallState, ...]) -> None:
    """Note the calls that a workflow's code asks for. Each has one row, and its batch is committed once."""
    for call in wanted:
        row.calls_open += 1
        tx.insert(
            TOOL_CALL,
            {"session_id": row.session_id, "call_id": call.call_id, "run_id": row.run_id, "round": row.round,
             "index": call.index, "tool": storable(call.tool), "arguments": storable(call.arguments),
             "provider_id": "", "state": "requested", "epoch": row.epoch, "executions": 0, "updated_at": tx.now,
             "open": 1},
        )  # fmt: skip


def inbox(tx: Transaction, row: SessionRow) -> tuple[InboxItem, ...]:
    """What of its inbox a session's process receives: not the signals that wait, of which the store makes answers, and
    not what waits in a queue."""
    found = queues.shown(row, tx.inbox(row))
    return tuple(item for item in found if item.kind != SIGNAL) if row.kind == WORKFLOW else found


def await_event(tx: Transaction, row: SessionRow, asked: Ask, since: int) -> None:
    """Let a step wait for an event: the oldest signal of that name that nobody took, or the next one.

    Args:
        since: when the step was asked for; its time-out counts from then.
    """
    name, seconds = ((asked.arguments or {})[part] for part in ("name", "seconds"))
    known = next((item for item in tx.inbox(row) if item.kind == SIGNAL and item.key == name), None)
    if known is not None and not is_out_of_time(tx, row, asked.call_id):
        tx.take_inbox(row, [known.id])
        _come(tx, row, asked.call_id, known.payload["text"], since)
    elif seconds is not None:
        wanted = microseconds(seconds)
        payload = {"call_id": asked.call_id, "run_id": row.run_id, "since": since, "wanted": wanted}
        tx.set_timer(row, CALL_TIMER + asked.call_id, since + wanted, {**payload, "nothing": NOTHING_CAME})


def signal(tx: Transaction, session_id: str, wanted: Signal) -> bool:
    """Accept a signal: for the step that has waited longest for one of this name, else it is kept for the next; True if
    a step waited for it.

    Raises:
        UnknownSession: there is no such session.
        InvalidInput: it is no workflow, the payload is too long, or as many signals as may be are kept for it.
        NotRunning: it has no run, or one that is about to end.
    """
    row = tx.session(session_id)
    if row.kind != WORKFLOW:
        raise InvalidInput("the session is no workflow: only these wait for signals", session_id=session_id)
    inbox = tx.inbox(row)
    ends = row.cancel_reason is not None or row.held is not None
    if ends or (row.run_id is None and all(item.kind != "input" for item in inbox)):
        raise NotRunning("no run is at work, or it is about to end", session_id=session_id)
    text = to_json(encodable(wanted.payload))
    if len(text) > LONGEST_PAYLOAD:
        message = f"the payload has {len(text)} characters as JSON, and may have {LONGEST_PAYLOAD}"
        raise InvalidInput(message, session_id=session_id)
    answered = answered_by(inbox)
    waiting = [call for call in _waiting(tx, row, wanted.name) if call["call_id"] not in answered]
    for call in sorted(waiting, key=lambda one: (one["updated_at"], one["call_id"])):
        if is_out_of_time(tx, row, call["call_id"]):
            continue
        tx.drop_timer(row, CALL_TIMER + call["call_id"])
        _come(tx, row, call["call_id"], text, call["updated_at"])
        return True
    if sum(item.kind == SIGNAL for item in inbox) >= MOST_SIGNALS:
        raise InvalidInput(f"{MOST_SIGNALS} signals wait for the workflow: it takes none", session_id=session_id)
    tx.put_inbox(row, SIGNAL, wanted.name, {"text": text})
    return False


def is_out_of_time(tx: Transaction, row: SessionRow, call_id: str) -> bool:
    """Whether the time of a step is over (`WorkflowContext.within`), though the session's process has not given it up
    yet. What came for the step now would be lost."""
    path = step_path(row.run_id or "", call_id).split(".")
    # The timer is the first step of branch 0, and what has so much time is branch 1.
    limits = [".".join([*path[:at], "0", "0"]) for at, part in enumerate(path) if part == "1"]
    if row.kind != WORKFLOW or not limits:
        return False
    timers = [step_identifier(row.run_id or "", limit) for limit in limits]
    found = tx.read(
        select(TOOL_CALL.c.call_id, TOOL_CALL.c.state).where(
            TOOL_CALL.c.namespace == tx.namespace, TOOL_CALL.c.session_id == row.session_id,
            TOOL_CALL.c.call_id.in_(timers), TOOL_CALL.c.tool == TIMEOUT_STEP,
        ),
        row.session_id,
    ).all()  # fmt: skip
    answered = answered_by(tx.inbox(row)) if found else set()
    return any(timer in answered or state in CALL_ENDED for timer, state in found)


def _come(tx: Transaction, row: SessionRow, call_id: str, text: str, since: int) -> None:
    hand_in(tx, row, call_id, {"decision": "ok", "text": text, "since": since})


def _waiting(tx: Transaction, row: SessionRow, name: str) -> list[Row]:
    """The steps of the current run that wait for events of this name. There may be many others."""
    if row.run_id is None:
        return []
    columns = TOOL_CALL.c.call_id, TOOL_CALL.c.arguments, TOOL_CALL.c.updated_at
    of_session = TOOL_CALL.c.namespace == tx.namespace, TOOL_CALL.c.session_id == row.session_id
    waits = TOOL_CALL.c.open == literal_column("1"), TOOL_CALL.c.tool == EVENT_STEP, TOOL_CALL.c.state == "waiting"
    found = tx.read(select(*columns).where(*of_session, *waits), row.session_id).mappings()
    return [dict(call) for call in found if from_json(call["arguments"]).get("name") == name]
