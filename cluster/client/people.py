"""What people say of tool calls that wait for them: for which session each decision is, and the request that has it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from understudy.approvals import APPROVAL
from understudy.errors import InvalidInput
from understudy.protocol import REMEMBER, Decision
from understudy.reads import PendingInput

from .client_connection import ClientConnection

Calls = str | PendingInput | Sequence[str | PendingInput] | None
"""Calls by their ids within a session, or as they are pending, of whatever session; None for all approvals that are
pending in a session and below it."""

Remember = bool | Literal["tool", "arguments"]


async def pending(connection: ClientConnection, session_id: str, *, below: bool) -> list[PendingInput]:
    """What a session asks, and perhaps what the sub-agents ask that it waits for."""
    own = await connection.read(list[PendingInput], "questions", session_id)
    return [*own, *await connection.read(list[PendingInput], "asked_below", session_id)] if below else own


async def located(connection: ClientConnection, session_id: str, call: str | PendingInput) -> tuple[str, str, int]:
    """Session, call, and which time it asked.

    Of a call that is named by its id that is the last time, answered or not: the request must not answer a question
    that comes after it.
    """
    if isinstance(call, PendingInput):
        return call.session_id or session_id, call.call_id, call.asked
    return session_id, call, await connection.read(int, "asked", session_id, call)


async def decide(
    connection: ClientConnection, session_id: str, calls: Calls, decision: str, text: str, remember: Remember
) -> list[str]:
    """Say the same of some calls: for each session in one transaction. Returns the calls of which it is new."""
    if calls is None:
        asked = await pending(connection, session_id, below=True)
        calls = [item for item in asked if item.kind == APPROVAL]
    elif isinstance(calls, str | PendingInput):
        calls = [calls]
    if text and decision == "approve" and len(calls) != 1:
        raise InvalidInput(f"arguments are for one call; these are {len(calls)}", session_id=session_id)
    if remember not in (True, False, *REMEMBER):
        raise InvalidInput(f"remember is True, False, {' or '.join(map(repr, REMEMBER))}", session_id=session_id)
    kept = "tool" if remember is True else remember or ""
    if kept and text and decision == "approve":
        raise InvalidInput("arguments that a person edited can't be remembered", session_id=session_id)
    by_session: dict[str, list[Decision]] = {}
    for call in calls:
        whose, call_id, asked_times = await located(connection, session_id, call)
        by_session.setdefault(whose, []).append(Decision(call_id, asked_times, decision, text, kept))
    new: list[str] = []
    for whose, decisions in by_session.items():
        new += await connection.change(list[str], "decide", whose, decisions)
    return new


def arguments_text(arguments: dict[str, Any] | None, session_id: str) -> str:
    """Arguments as JSON; empty for those of the model. Raises `InvalidInput`."""
    if arguments is None:
        return ""
    try:
        text = json.dumps(arguments, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"the arguments can't be said in JSON: {error}", session_id=session_id) from None
    if not isinstance(arguments, dict):
        raise InvalidInput("the arguments must be a table by name", session_id=session_id)
    return text
