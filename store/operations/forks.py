"""Forks: a session that begins with copies of another one's messages (`copies`)."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select

from understudy.errors import InvalidInput, SessionConflict
from understudy.handoffs import present
from understudy.messages import Message
from understudy.protocol import Fork, Spawned
from understudy.workflows import WORKFLOW

from ..db.statements import SESSION
from ..transaction import Transaction
from . import code, copies
from .beginnings import create_session


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
    source = copies.source(session_id, wanted.at)
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
    agent = copies.agent_of(messages, wanted.at, origin)
    placement = present(spec, agent).get("placement", origin.placement)
    create_session(
        tx, wanted.session_id, spec, spec_hash=origin.spec_hash, placement=placement, node_id=node_id,
        metadata={**_metadata(tx, session_id), **source}, forked=wanted.at, origin=session_id, agent=agent,
    )  # fmt: skip
    copies.write(tx, session_id, wanted.session_id, copied)
    return Spawned(True, node_id)


def _metadata(tx: Transaction, session_id: str) -> dict[str, str]:
    statement = select(SESSION.c.metadata_json).where(
        SESSION.c.namespace == tx.namespace, SESSION.c.session_id == session_id
    )
    return dict(tx.read(statement, session_id).scalar() or {})


def _require_whole(messages: Sequence[Message], at: int, session_id: str) -> None:
    """Refuse a place at which a tool call has no result yet, or no message is. Raises `InvalidInput`."""
    allowed = copies.whole_places(messages)
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
