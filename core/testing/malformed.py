"""A model that gives answers which are not just the JSON text that was asked for."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from typing import Any

from .instances import smallest, wanted_schema
from .policies import Reply, default_policy, last_turn


def _cut(text: str) -> Reply:
    return Reply(text=text[: len(text) // 2], finish_reason="length")


FORMS: dict[str, Callable[[str], Reply]] = {
    "fenced": lambda text: Reply(text=f"```json\n{text}\n```"),
    "surrounded": lambda text: Reply(text=f"Here you are: {text} Anything else?"),
    "unclosed": lambda text: Reply(text=text.rstrip().removesuffix("}")),
    "cut": _cut,
    "twice": lambda text: Reply(text=f"{text}\n{text}"),
    "prose": lambda _text: Reply(text="I have done it."),
    "empty": lambda _text: Reply(text=""),
    "quoted": lambda text: Reply(text=json.dumps(text)),
    "other": lambda _text: Reply(text='{"no such property": true}'),
    "list": lambda text: Reply(text=f"[{text}]"),
    "not_a_number": lambda _text: Reply(text='{"value": NaN}'),
    "single_quotes": lambda text: Reply(text=text.replace('"', "'") if '"' in text else "{'a': 1}"),
    "trailing_comma": lambda text: Reply(text=f"{text[:-1]},}}"),
    "refused": lambda _text: Reply(refusal="I can't help with that."),
}
"""Ways in which an answer is not just the JSON text that was asked for; some of them may be accepted."""


def malformed(body: dict[str, Any]) -> Reply:
    """The policy of a model that gives an answer in one of `FORMS`, chosen by the input, where a response format is
    asked for; once a message says that this is not accepted, and in all else, it is as `default_policy`."""
    reply, schema = default_policy(body), wanted_schema(body)
    user, _ = last_turn(body["messages"])
    if reply.tool_calls or schema is None or user.startswith("This is not accepted"):
        return reply
    names = sorted(FORMS)
    return FORMS[names[zlib.crc32(user.encode()) % len(names)]](json.dumps(smallest(schema)))
