"""What was said in model calls and tool calls, for spans that shall have it. Nothing of it is stored a second time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from understudy.events import Event, ModelCallCompleted, ToolFinished
from understudy.messages import Message, text_of

from ..db.statements import MESSAGE, TOOL_CALL

LAST_MESSAGES = 50
"""So many messages before an answer are read: no span can hold a long history."""


@dataclass(frozen=True)
class Said:
    """The content of one call: of a model's `before` and `answer`, of a tool's `arguments` and `result`."""

    before: tuple[Message, ...] = ()
    answer: Message | None = None
    arguments: str = ""
    result: str | None = None


def said(connection: Connection, namespace: str, event: Event) -> Said:
    """What was said in the call that ended with this event; nothing for other events, or a tree that was removed."""
    if isinstance(event, ModelCallCompleted) and not event.late:
        return _in_model_call(connection, namespace, event)
    if isinstance(event, ToolFinished):
        return _in_tool_call(connection, namespace, event)
    return Said()


def _in_model_call(connection: Connection, namespace: str, event: ModelCallCompleted) -> Said:
    """The answer is the message right before its event: one transaction has both."""
    statement = (
        select(MESSAGE.c.body)
        .where(MESSAGE.c.namespace == namespace, MESSAGE.c.session_id == event.session_id, MESSAGE.c.seq < event.seq)
        .order_by(MESSAGE.c.seq.desc())
        .limit(LAST_MESSAGES + 1)
    )
    messages = [Message.from_wire(body) for body in connection.execute(statement).scalars()][::-1]
    if not messages or messages[-1].role != "assistant" or messages[-1].run_id != event.run_id:
        return Said()
    return Said(tuple(messages[:-1]), messages[-1])


def _in_tool_call(connection: Connection, namespace: str, event: ToolFinished) -> Said:
    """A result is in the call's row until it becomes a message; the text is the same."""
    columns = (TOOL_CALL.c.arguments, TOOL_CALL.c.result, TOOL_CALL.c.run_id, TOOL_CALL.c.round)
    statement = select(*columns).where(
        TOOL_CALL.c.namespace == namespace, TOOL_CALL.c.session_id == event.session_id,
        TOOL_CALL.c.call_id == event.call_id,
    )  # fmt: skip
    call = connection.execute(statement).mappings().first()
    if call is None:
        return Said()
    if call["result"] is not None:
        return Said(arguments=call["arguments"], result=text_of(call["result"].get("content")))
    results = (
        select(MESSAGE.c.body)
        .where(MESSAGE.c.namespace == namespace, MESSAGE.c.session_id == event.session_id, MESSAGE.c.role == "tool")
        .where(MESSAGE.c.run_id == call["run_id"], MESSAGE.c.round == call["round"], MESSAGE.c.seq > event.seq)
        .order_by(MESSAGE.c.seq)
    )
    bodies: Iterable[Any] = connection.execute(results).scalars()
    text = next((text_of(body["content"]) for body in bodies if body.get("tool_call_id") == event.call_id), None)
    return Said(arguments=call["arguments"], result=text)
