"""What a provider wants back with an answer of its own (reasoning items, signatures), and nobody else may be sent.

It is kept in the answer's message, in a field of the assistant message in the request (`PROVIDER_DATA`), with a stamp
that says whose it is. Who is not that provider leaves it out.
"""

from __future__ import annotations

from typing import Any

from understudy.json_text import from_json, to_json
from understudy.messages import PROVIDER_DATA

_MARK = b'"provider_data":'
"""How the field is found in JSON text without reading it: in a text, the quotes would be escaped."""


def stamped(protocol: str, profile: str, model: str, items: list[Any]) -> dict[str, Any]:
    """The field's value.

    Args:
        model: that was asked for.
    """
    return {"protocol": protocol, "profile": profile, "model": model, "items": items}


def items_of(message: dict[str, Any], protocol: str, profile: str, model: str | None = None) -> list[dict[str, Any]]:
    """What an assistant message has for this provider; nothing if it has none, or another one's.

    Args:
        model: None for any.
    """
    data = message.get(PROVIDER_DATA)
    if not isinstance(data, dict) or (data.get("protocol"), data.get("profile")) != (protocol, profile):
        return []
    if model is not None and data.get("model") != model:
        return []
    items = data.get("items")
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def without_provider_data(messages: bytes) -> bytes:
    """The messages of a request, a JSON array, without such fields. Most have none, and are not read."""
    if _MARK not in messages:
        return messages
    found = from_json(messages)
    for message in found:
        message.pop(PROVIDER_DATA, None)
    return to_json(found).encode()
