"""Forks: a session that begins with copies of another one's messages.

The copies have the `seq` of the originals, so a model is sent the very same beginning, and what refers to messages by
their `seq` stays right. What else the original's log has at these places is missing, as if retention had removed it.
Copies are of runs, and of tool calls, that the fork itself never had: their ids begin with `COPIED`, as no id does that
a caller may choose. Nothing of them is charged to the fork.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace
from sqlalchemy import select

from understudy.errors import InvalidInput, SessionConflict
from understudy.handoffs import ORIGIN as HANDED_OFF
from understudy.handoffs import agent_at, present
from understudy.identifiers import COPIED
from understudy.messages import Message, ToolCall
from understudy.protocol import Fork, Spawned
from understudy.workflows import WORKFLOW

from ..db.statements import MESSAGE, SESSION, TOOL_CALL
from ..entries import message_row
from ..transaction import Transaction
from . import code
from .beginnings import create_session

FROM, AT = "forked_from", "forked_at"
"""What a fork's metadata say of its origin."""


def fork(tx: Transaction, session_id: str, wanted: Fork, node_id: str) -> Spawned:
    """Make a session with another one's specification and its messages up to one of them, under the agent that it had
    there. Key: the fork's id.

    The original may be at work, closed or quarantined: it is only read.

    Args:
        node_id: where the fork is at home.

    Raises:
        UnknownSession: there is no session to fork.
        InvalidInput: there is no message with this `seq`, or a tool call would be left without its result.
        SessionConflict: the fork's id is another session's.
    """
    origin = tx.session(session_id)
    source = {FROM: session_id, AT: str(wanted.at)}
    existing = tx.find(wanted.session_id)
    if existing is not None:
        known = _metadata(tx, wanted.session_id)
        if {name: known.get(name) for name in source} != source:
            text = f"session {wanted.session_id!r} exists, and is no fork of {session_id!r} at {wanted.at}"
            raise SessionConflict(text, session_id=wanted.session_id, details={"hint": "Use another session_id."})
        return Spawned(False, existing.node_id)
    if origin.kind == WORKFLOW:
        raise InvalidInput("the session is a workflow: it can't be forked", session_id=session_id)
    messages = tx.messages(session_id, 0)
    _require_whole(messages, wanted.at, session_id)
    copied = [message for message in messages if message.seq <= wanted.at]
    spec = tx.specification(session_id)
    for needed in sorted(code.digests(spec, origin.placement)):
        code.touch(tx, needed)
    records = ((message.seq, message.extra or {}) for message in messages if message.origin == HANDED_OFF)
    agent = agent_at(records, wanted.at, origin.agent)
    placement = present(spec, agent).get("placement", origin.placement)
    create_session(
        tx, wanted.session_id, spec, spec_hash=origin.spec_hash, placement=placement, node_id=node_id,
        metadata={**_metadata(tx, session_id), **source}, forked=wanted.at, origin=session_id, agent=agent,
    )  # fmt: skip
    for message in copied:
        copy = _copy(message)
        tx.insert(MESSAGE, message_row(wanted.session_id, message.seq, copy, message.created_at))
    _copy_calls(tx, session_id, wanted.session_id, copied)
    return Spawned(True, node_id)


def _metadata(tx: Transaction, session_id: str) -> dict[str, str]:
    statement = select(SESSION.c.metadata_json).where(
        SESSION.c.namespace == tx.namespace, SESSION.c.session_id == session_id
    )
    return dict(tx.read(statement, session_id).scalar() or {})


def _require_whole(messages: Sequence[Message], at: int, session_id: str) -> None:
    """Refuse a place at which a tool call has no result yet, or no message is. Raises `InvalidInput`."""
    allowed, waiting = [0], set[str]()
    for message in messages:
        waiting |= {call.call_id for call in message.tool_calls}
        waiting.discard(message.tool_call_id or "")
        if not waiting:
            allowed.append(message.seq)
    if at in allowed:
        return
    near = [*[seq for seq in allowed if seq < at][-1:], *[seq for seq in allowed if seq > at][:1]]
    known = any(message.seq == at for message in messages)
    what = "would leave a tool call without its result" if known else "is no message's seq"
    raise InvalidInput(
        f"the session can't be forked at {at}: it {what}. The nearest places are {' and '.join(map(str, near))}.",
        session_id=session_id,
        details={"allowed": near},
    )


def _copy(message: Message) -> Message:
    """A message as the fork has it. A model is sent the same: calls keep the ids under which it knows them."""
    calls = tuple(
        ToolCall(COPIED + call.call_id, call.name, call.arguments, call.provider_id or call.call_id)
        for call in message.tool_calls
    )
    run_id = COPIED + message.run_id if message.run_id is not None else None
    answered = COPIED + message.tool_call_id if message.tool_call_id is not None else None
    return replace(message, run_id=run_id, tool_calls=calls, tool_call_id=answered)


def _copy_calls(tx: Transaction, session_id: str, fork_id: str, messages: Sequence[Message]) -> None:
    """The rows of the calls that these messages have, each with its result."""
    wanted = {call.call_id for message in messages for call in message.tool_calls}
    if not wanted:
        return
    statement = select(TOOL_CALL).where(TOOL_CALL.c.namespace == tx.namespace, TOOL_CALL.c.session_id == session_id)
    for row in tx.read(statement.order_by(TOOL_CALL.c.call_id), session_id).mappings().all():
        if row["call_id"] in wanted:
            tx.insert(
                TOOL_CALL,
                {**row, "session_id": fork_id, "call_id": COPIED + row["call_id"], "run_id": COPIED + row["run_id"],
                 "provider_id": row["provider_id"] or row["call_id"], "state": "done", "epoch": 0, "result": None,
                 "child_id": None},
            )  # fmt: skip
