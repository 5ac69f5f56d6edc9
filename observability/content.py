"""What was said, as span attributes of the GenAI conventions: only where it was asked for, redacted, not too long."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from understudy.messages import Message

from . import conventions as names
from .span_building import Attributes

TEXT_CHARACTERS = 4_000
"""Of one text at most; its beginning is kept."""

ATTRIBUTE_CHARACTERS = 32_000
"""Of one attribute at most; of messages the last ones are kept."""

LONGEST_SECRET = 16_000
"""So many characters behind the end that is kept are looked at: a secret that is cut is not recognized any more."""

Redact = Callable[[str], str]


def chat_content(before: Sequence[Message], answer: Message | None, redact: Redact) -> Attributes:
    """Attributes of a `chat` span: what the model received, and what it said."""
    if answer is None:
        return {}
    asked, size = list[str](), 2
    for message in reversed(before):
        text = _json(_message(message, redact))
        size += len(text) + 1
        if size > ATTRIBUTE_CHARACTERS:
            break
        asked.append(text)
    reason = (answer.extra or {}).get("finish_reason") or "stop"
    said = _json([{**_message(answer, redact), "finish_reason": "tool_call" if reason == "tool_calls" else reason}])
    return {names.INPUT_MESSAGES: f"[{','.join(reversed(asked))}]", names.OUTPUT_MESSAGES: said}


def tool_content(arguments: str, result: str | None, redact: Redact) -> Attributes:
    """Attributes of an `execute_tool` span: what the tool was asked, and what came of it."""
    found = {names.TOOL_ARGUMENTS: _redacted_start(arguments, redact)} if arguments else {}
    return found | ({names.TOOL_RESULT: _redacted_start(result, redact)} if result is not None else {})


def _message(message: Message, redact: Redact) -> dict[str, Any]:
    text = _redacted_start(message.text, redact)
    if message.role == "tool":
        part = {"type": "tool_call_response", "id": message.tool_call_id, "response": text}
        return {"role": "tool", "parts": [part]}
    parts: list[dict[str, Any]] = [{"type": "text", "content": text}] if text else []
    if isinstance(message.content, list):
        others = [part.get("type", "") for part in message.content if part.get("type") != "text"]
        parts += [{"type": kind, "content": "[left out]"} for kind in others]
    for call in message.tool_calls:
        arguments = _redacted_start(call.arguments, redact)
        parts.append({"type": "tool_call", "id": call.call_id, "name": call.name, "arguments": arguments})
    return {"role": message.role, "parts": parts}


def _redacted_start(text: str, redact: Redact) -> str:
    """The beginning of a text without secrets. What is left out anyway costs no time, however long it is."""
    known = redact(text[: TEXT_CHARACTERS + LONGEST_SECRET])
    left = len(known) - TEXT_CHARACTERS + max(0, len(text) - TEXT_CHARACTERS - LONGEST_SECRET)
    return known if left <= 0 else f"{known[:TEXT_CHARACTERS]}[… {left} characters left out]"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
