"""What a person's decision about a tool call makes of it, and what of it a session remembers.

A decision that shall count for the rest of the session is a message of its log that no model is sent: whoever executes
a call reads it there, in whatever process.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from .handoffs import ORIGIN as HANDED_OFF
from .identifiers import COPIED
from .messages import NEVER, Message

APPROVAL = "approval"
"""The kind of a question about a call that may not be executed without an approval; the origin of what is remembered.
"""

QUESTION = "question"
"""The kind of a question of the model's, or of an MCP server's."""

IN_DOUBT = "in_doubt"
"""The kind of a question about a call that had started when a process died that was at it."""

APPROVE, REJECT = "approve", "reject"


class Remembered(NamedTuple):
    """A decision that counts for later calls, too."""

    decision: str
    text: str


def result_of(answer: dict[str, Any]) -> tuple[str, str] | None:
    """Outcome and text of a call that was answered; None if it is to be executed, or goes on."""
    decision, text = answer["decision"], answer["text"]
    if decision in ("rerun", APPROVE) or answer.get("elicitation"):
        return None
    return ("refused", rejection(text)) if decision == REJECT else (decision, text)


def rejection(reason: str) -> str:
    """What the model reads of a call that a person rejected."""
    return f"not executed: it was not approved{f': {reason}' if reason else '.'}"


def arguments_problem(text: str, schema: dict[str, Any]) -> str | None:
    """Why these arguments, as JSON text, don't fit a tool's parameters; None if they do."""
    from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

    try:
        problem = next(Draft202012Validator(schema).iter_errors(json.loads(text)), None)
    except Exception as error:  # no JSON, or the schema's own recursion
        return f"{type(error).__name__}: {error}"
    return f"{problem.json_path}: {problem.message}" if problem is not None else None


def memory(tool: str, arguments: str, decision: str, text: str, remember: str) -> Message:
    """The record of a decision that is to be remembered.

    Args:
        arguments: of the call, as the model wrote them.
        remember: `tool` or `arguments`.
    """
    extra: dict[str, Any] = {"tool": tool, "decision": decision, "text": text}
    if remember == "arguments":
        extra["arguments"] = _canonical(arguments)
    what = "calls like this one" if remember == "arguments" else "calls"
    content = f"{what} of {tool} are {'approved' if decision == APPROVE else 'rejected'} for this session"
    return Message("system", content, origin=APPROVAL, visibility=NEVER, extra=extra)


def remembered(messages: Iterable[Message], tool: str, arguments: str) -> Remembered | None:
    """The latest decision that counts for such a call; what was said of the session that a fork is of does not, nor of
    another agent, whose tool of this name may be another one."""
    found: Remembered | None = None
    of_others: dict[str, Remembered | None] = {}
    for message in messages:
        extra = message.extra or {}
        if message.origin == HANDED_OFF:
            of_others[extra["from"]] = found
            found = of_others.get(extra["to"])
        if message.origin != APPROVAL or extra.get("tool") != tool or (message.run_id or "").startswith(COPIED):
            continue
        if "arguments" not in extra or extra["arguments"] == _canonical(arguments):
            found = Remembered(extra["decision"], extra["text"])
    return found


def _canonical(arguments: str) -> str:
    """The same text for the same arguments, however they are written."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
