"""Messages and events as rows of the session's log."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from understudy.event_wire import ENVELOPE
from understudy.events import ERROR_CHARACTERS, Event
from understudy.messages import WIRE_VERSION, Message
from understudy.redaction import redacted

from .db.prepared import Row
from .db.session_row import SessionRow


def message_row(session_id: str, seq: int, message: Message, at: int) -> Row:
    """A message's row."""
    body = {**message.to_wire(), "created_at": at}
    return {
        "session_id": session_id, "seq": seq, "v": WIRE_VERSION, "run_id": message.run_id, "round": message.round,
        "role": message.role, "body": body, "created_at": at,
    }  # fmt: skip


def stamped(event: Event, row: SessionRow, at: int, writer_seq: int) -> Event:
    """An event with all that its session's row says of it. What it does not say itself is of the current run."""
    message: str = getattr(event, "error_message", "")
    if message:
        event = replace(event, error_message=redacted(message)[:ERROR_CHARACTERS])
    trace_id, sampled = event.trace_id, event.sampled
    if not trace_id:
        trace_id, sampled = row.trace_id, row.recorded
    return replace(
        event, seq=row.seq, at=at, session_id=row.session_id, run_id=event.run_id or row.run_id,
        round=event.round or row.round, epoch=row.epoch, trace_id=trace_id, sampled=sampled, agent=row.agent,
        parent_id=row.parent_id, root_id=row.root_id, writer_seq=writer_seq,
    )  # fmt: skip


def event_row(event: Event, writer: str) -> Row:
    """A stamped event's row, in the log of the journal that writes it."""
    body = event.body()
    body["_"] = [getattr(event, name) for name in ENVELOPE[4:]]
    return {
        "session_id": event.session_id, "seq": event.seq, "v": WIRE_VERSION, "writer": writer,
        "writer_seq": event.writer_seq, "type": event.type, "at": event.at, "run_id": event.run_id, "body": body,
    }  # fmt: skip


def event_from_row(row: Any) -> Event:
    """Restore an event from its row."""
    body = dict(row["body"])
    # The last one came later than the others: events that were written before lack it.
    envelope = dict(zip(ENVELOPE[4:], body.pop("_"), strict=False))
    return Event.from_wire(
        {"type": row["type"], "seq": row["seq"], "at": row["at"], "session_id": row["session_id"],
         "run_id": row["run_id"], "writer_seq": row["writer_seq"], **envelope, "data": body}
    )  # fmt: skip
