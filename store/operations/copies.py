"""Copies of a session's messages, with which another one begins: a fork, or a sub-agent that goes on from another.

The copies have the `seq` of the originals, so a model is sent the very same beginning, and what refers to messages by
their `seq` stays right. What else the original's log has at these places is missing, as if retention had removed it.
Copies are of runs, and of tool calls, that the copy itself never had: their ids begin with `COPIED`, as no id does that
a caller may choose. Nothing of them is charged to the copy.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace
from sqlalchemy import select

from understudy.handoffs import ORIGIN as HANDED_OFF
from understudy.handoffs import agent_at
from understudy.identifiers import COPIED
from understudy.messages import Message, ToolCall

from ..db.session_row import SessionRow
from ..db.statements import MESSAGE, TOOL_CALL
from ..entries import message_row
from ..transaction import Transaction

FROM, AT = "forked_from", "forked_at"
"""What a copy's metadata say of its origin."""


def source(session_id: str, at: int) -> dict[str, str]:
    """The metadata of what begins with a session's messages up to one of them."""
    return {FROM: session_id, AT: str(at)}


def whole_places(messages: Sequence[Message]) -> list[int]:
    """The places up to which messages can be copied: no tool call is left without its result."""
    allowed, waiting = [0], set[str]()
    for message in messages:
        waiting |= {call.call_id for call in message.tool_calls}
        waiting.discard(message.tool_call_id or "")
        if not waiting:
            allowed.append(message.seq)
    return allowed


def agent_of(messages: Sequence[Message], at: int, origin: SessionRow) -> str:
    """The agent that a session was under at a place."""
    records = ((message.seq, message.extra or {}) for message in messages if message.origin == HANDED_OFF)
    return agent_at(records, at, origin.agent)


def write(tx: Transaction, session_id: str, copy_id: str, messages: Sequence[Message]) -> None:
    """Let another session have these messages, and their tool calls."""
    for message in messages:
        tx.insert(MESSAGE, message_row(copy_id, message.seq, _copy(message), message.created_at))
    _copy_calls(tx, session_id, copy_id, messages)


def _copy(message: Message) -> Message:
    """A message as the other session has it. A model is sent the same: calls keep the ids under which it knows them."""
    calls = tuple(
        ToolCall(COPIED + call.call_id, call.name, call.arguments, call.provider_id or call.call_id)
        for call in message.tool_calls
    )
    run_id = COPIED + message.run_id if message.run_id is not None else None
    answered = COPIED + message.tool_call_id if message.tool_call_id is not None else None
    return replace(message, run_id=run_id, tool_calls=calls, tool_call_id=answered)


def _copy_calls(tx: Transaction, session_id: str, copy_id: str, messages: Sequence[Message]) -> None:
    """The rows of the calls that these messages have, each with its result."""
    wanted = {call.call_id for message in messages for call in message.tool_calls}
    if not wanted:
        return
    statement = select(TOOL_CALL).where(TOOL_CALL.c.namespace == tx.namespace, TOOL_CALL.c.session_id == session_id)
    for row in tx.read(statement.order_by(TOOL_CALL.c.call_id), session_id).mappings().all():
        if row["call_id"] in wanted:
            tx.insert(
                TOOL_CALL,
                {**row, "session_id": copy_id, "call_id": COPIED + row["call_id"], "run_id": COPIED + row["run_id"],
                 "provider_id": row["provider_id"] or row["call_id"], "state": "done", "epoch": 0, "result": None,
                 "child_id": None},
            )  # fmt: skip
