"""What a session's own model asks of its log, which has all messages, also those that it is not sent any more."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Text, cast, func, select

from understudy.messages import ALWAYS, Message
from understudy.recall import READ_MESSAGE, RECALL
from understudy.records import Ask

from ..db.session_row import SessionRow
from ..db.statements import MESSAGE
from ..transaction import Transaction

TOOLS = (RECALL, READ_MESSAGE)
EXCERPT = 300
"""Characters of a message that was found which are shown."""


def answer(tx: Transaction, row: SessionRow, asked: Ask) -> tuple[str, str]:
    """`(decision, text)`: the answer to a call of `recall` or `read_message`."""
    arguments = asked.arguments or {}
    if asked.kind == RECALL:
        return "ok", _found(tx, row, **arguments)
    return _read(tx, row, **arguments)


def _found(tx: Transaction, row: SessionRow, query: str, limit: int, before: int | None) -> str:
    words = query.lower().split()
    numbered = _numbered(tx, row)
    statement = select(numbered.c.body, numbered.c.number).order_by(numbered.c.number.desc())
    if before is not None:
        statement = statement.where(numbered.c.number < before)
    for word in words:
        if word.isascii() and word.isprintable() and not set(word) & set('"\\'):  # else it is written otherwise
            statement = statement.where(func.lower(cast(numbered.c.body, Text)).contains(word, autoescape=True))
    lines: list[str] = []
    last = 0
    for found in tx.read(statement, row.session_id):
        message = Message.from_wire(found.body)
        text = _whole(message)
        asking = (message.run_id, message.round) == (row.run_id, row.round) or message.name in TOOLS
        if asking or message.visibility != ALWAYS or not all(word in text.lower() for word in words):
            continue
        if len(lines) == limit:
            lines.append(f"There is more: search with before {last}.")
            break
        lines.append(f"message {found.number}, {_who(message)}: {_excerpt(text, words)}")
        last = found.number
    return "\n\n".join(lines) or f"No message has all of: {' '.join(words)}."


def _read(tx: Transaction, row: SessionRow, number: int, offset: int, length: int) -> tuple[str, str]:
    numbered = _numbered(tx, row)
    body = tx.read(select(numbered.c.body).where(numbered.c.number == number), row.session_id).scalar()
    message = Message.from_wire(body) if body is not None else None
    if message is None or message.visibility != ALWAYS:
        return "error", f"there is no message {number}. recall finds messages and says their numbers."
    text = _whole(message)
    piece = text[offset : offset + length]
    if not piece:
        return "error", f"message {number} has {len(text)} characters: there is nothing at {offset}."
    return "ok", f"{_who(message)}, characters {offset} to {offset + len(piece)} of {len(text)}:\n{piece}"


def _numbered(tx: Transaction, row: SessionRow) -> Any:
    """The session's messages with their numbers."""
    number = func.row_number().over(order_by=MESSAGE.c.seq).label("number")
    where = (MESSAGE.c.namespace == tx.namespace, MESSAGE.c.session_id == row.session_id)
    return select(MESSAGE.c.body, number).where(*where).subquery()


def _whole(message: Message) -> str:
    """The text of a message, with the calls that it asks for, but those that look for messages."""
    calls = [f"{call.name} {call.arguments}" for call in message.tool_calls if call.name not in TOOLS]
    return "\n".join([*([message.text] if message.text else []), *calls])


def _who(message: Message) -> str:
    return f"result of {message.name}" if message.role == "tool" else message.role


def _excerpt(text: str, words: list[str]) -> str:
    """A part of the text that has the first of the words."""
    start = max(0, text.lower().find(words[0]) - EXCERPT // 3)
    end = start + EXCERPT
    return f"{'…' if start else ''}{text[start:end]}{'…' if end < len(text) else ''}"
