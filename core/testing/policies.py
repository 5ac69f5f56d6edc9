"""What the offline model answers: policies, pure functions from a request body to a reply."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..messages import ATTACHMENTS_MARK, MEMORY_MARK
from .instances import FINAL_ANSWER, smallest, wanted_schema

MAX_TEXT = 2_000
"""Longest text, in characters, of the default policy's own making."""

_MARKER = re.compile(r"^offline-(policy|script):[ \t]*(\S.*?)[ \t]*$", re.MULTILINE)
_CALL = re.compile(r"^call[ \t]+(\S+)[ \t]*(.*?)[ \t]*$", re.MULTILINE)


@dataclass(frozen=True)
class Reply:
    """One answer of the model.

    Attributes:
        tool_calls: `(name, arguments)`; arguments given as text are sent as they are, readable or not.
        refusal: the model refuses, with this text.
        finish_reason: None for `tool_calls` or `stop`, by content.
        delay: seconds until the first byte, in addition to the server's latency.
        reasoning: what it thinks before it answers.
    """

    text: str | None = None
    tool_calls: tuple[tuple[str, dict[str, Any] | str], ...] = ()
    finish_reason: str | None = None
    delay: float = 0.0
    refusal: str | None = None
    reasoning: str = ""


Policy = Callable[[dict[str, Any]], Reply]
"""A parsed request body to its reply. Must depend on nothing but the body."""


class Refusal(Exception):
    """Raised by a policy to answer with an error in OpenAI's form."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code


_registered: dict[str, Policy] = {}


def register_policy(marker: str, policy: Policy) -> None:
    """Let a line `offline-policy: MARKER` in the system message select `policy` (in this process)."""
    _registered[marker] = policy


def default_policy(body: dict[str, Any]) -> Reply:
    """Answer as the conversation itself asks for; the first that applies of:

    - a line `offline-policy: NAME` in the system message: that policy, registered, or `understudy.module:callable`;
    - a line `offline-script: [...]` there: see `policy_from_script`;
    - lines `call NAME {json}` in the last user message, until they have results: these tool calls, in one round;
    - otherwise a short echo of the last user message, or of the tool results that follow it; where the request asks
      for an answer that fits a JSON Schema, its smallest instance.

    Raises:
        Refusal: (400) the policy or the script named is not usable.
    """
    for kind, value in _MARKER.findall(_system_text(body["messages"])):
        if kind == "policy":
            return _named(value)(body)
        return _scripted(_read_script(value), body)
    user, following = last_turn(body["messages"])
    results = [content_text(message) for message in following if message.get("role") == "tool"]
    if not results:
        calls = tuple((name, _arguments(arguments)) for name, arguments in _CALL.findall(user))
        if calls:
            return Reply(tool_calls=calls)
    return _final(body, f"offline: {' '.join(results) if results else user}"[:MAX_TEXT])


def policy_from_script(script: Sequence[dict[str, Any]]) -> Policy:
    """A policy that plays `script` once per user message, then echoes as the default policy does.

    An element is `{"text": ...}`, `{"tool_calls": [[name, arguments], ...]}` or both, and may have `finish_reason`,
    `refusal`, `reasoning` and `delay`. Which one is due is the number of assistant messages after the last user
    message.
    """
    elements = tuple(script)
    return lambda body: _scripted(elements, body)


def load_policy(path: str) -> Policy:
    """Import the policy at `module:callable`.

    Raises:
        ImportError, AttributeError: there is none.
    """
    module, _, name = path.partition(":")
    policy: Policy = getattr(importlib.import_module(module), name)
    return policy


def content_text(message: dict[str, Any]) -> str:
    """The text of a message in the OpenAI form; parts are joined."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or [] if isinstance(part, dict))


def _system_text(messages: list[dict[str, Any]]) -> str:
    texts = [content_text(message) for message in messages if message.get("role") in ("system", "developer")]
    return "\n".join(texts)


def last_turn(messages: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """The last user message's text, and the messages after it. What an agent is shown of its memory is none, nor is
    what is attached to results of tools."""
    for index in range(len(messages) - 1, -1, -1):
        text = content_text(messages[index])
        if messages[index].get("role") == "user" and not text.startswith((MEMORY_MARK, ATTACHMENTS_MARK)):
            return text, messages[index + 1 :]
    return "", messages


def _named(name: str) -> Policy:
    if name in _registered:
        return _registered[name]
    if not name.startswith("understudy.") or ":" not in name:
        raise Refusal(400, f"offline-policy {name!r} is neither registered nor of the form understudy.MODULE:CALLABLE")
    try:
        return load_policy(name)
    except (ImportError, AttributeError) as error:
        raise Refusal(400, f"offline-policy {name!r} can't be imported: {error}") from error


def _read_script(text: str) -> Sequence[dict[str, Any]]:
    try:
        script = json.loads(text)
    except ValueError as error:
        raise Refusal(400, f"offline-script is not JSON: {error}") from error
    if not isinstance(script, list) or not all(isinstance(element, dict) for element in script):
        raise Refusal(400, "offline-script must be a JSON list of objects")
    return script


def _scripted(script: Sequence[dict[str, Any]], body: dict[str, Any]) -> Reply:
    user, following = last_turn(body["messages"])
    position = sum(message.get("role") == "assistant" for message in following)
    if position >= len(script):
        results = [content_text(message) for message in following if message.get("role") == "tool"]
        return _final(body, f"offline: {' '.join(results) if results else user}"[:MAX_TEXT])
    element = script[position]
    return Reply(
        text=element.get("text"),
        tool_calls=tuple((name, arguments) for name, arguments in element.get("tool_calls") or ()),
        finish_reason=element.get("finish_reason"),
        delay=element.get("delay", 0.0),
        refusal=element.get("refusal"),
        reasoning=element.get("reasoning", ""),
    )


def _final(body: dict[str, Any], text: str) -> Reply:
    """A final answer as the request asks for it: the text, or what fits the schema of a response format or a tool."""
    schema = wanted_schema(body)
    if schema is None:
        return Reply(text=text)
    answer = json.dumps(smallest(schema))
    return Reply(text=answer) if "response_format" in body else Reply(tool_calls=((FINAL_ANSWER, answer),))


def _arguments(text: str) -> dict[str, Any] | str:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return text
    return value if isinstance(value, dict) else text
