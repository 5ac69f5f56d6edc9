"""A session's messages as a model is sent them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from understudy.identifiers import new_identifier
from understudy.json_text import to_json
from understudy.messages import ALWAYS, INTERRUPTED, Message

WORTH_KEEPING = 32 * 1024
"""In bytes: what is shorter goes to the gateway whole, each time, which costs a tenth of a millisecond."""


class Conversation:
    """The messages in the OpenAI chat completions form, as JSON text that grows with them: what was written once is not
    written again in the next round, nor sent to the gateway again, so a round does not cost more the longer the history
    is.

    Endpoints repeat their tool call ids and refuse a call without a result: a repeated id is made unique, and a call
    that never got a result gets one that says so. History therefore never makes a session unusable.
    """

    def __init__(self, instructions: str) -> None:
        self._text = bytearray(b"[")
        self._seen: set[str] = set()
        self._open: dict[str, str] = {}
        self._name = new_identifier()
        self._sent = 0  # so much of the text, which lasts, was in a request
        if instructions:
            self._add({"role": "system", "content": instructions})

    def extend(self, messages: Iterable[Message]) -> None:
        """Add what was committed, in order."""
        for message in messages:
            if message.visibility != ALWAYS:
                continue
            if message.role == "tool":
                provider_id = self._open.pop(message.tool_call_id or "", None)
                if provider_id is not None:
                    self._add({"role": "tool", "tool_call_id": provider_id, "content": message.content or ""})
                continue
            self._close()
            if message.role == "assistant":
                self._add(self._answer(message))
            else:
                self._add({"role": message.role, "content": message.content})

    def part(
        self, drafted: Iterable[Message] = (), passing: Iterable[Message] = (), *, whole: bool = True
    ) -> dict[str, Any]:  # fmt: skip
        """What a `ModelRequest` says of its messages: all of them, and those behind them that will be committed with
        the call, inputs and results of tools.

        Args:
            passing: messages for this request only. They come last, so that what comes before them is the beginning of
                the next request, too: endpoints keep what they made of it.
            whole: leave nothing out.
        """
        length, still_open = len(self._text), dict(self._open)
        left_out, self._sent = 0 if whole else self._sent, length if length >= WORTH_KEEPING else 0
        try:
            self.extend(drafted)
            self._close()
            for message in passing:
                self._add({"role": message.role, "content": message.content})
            with memoryview(self._text) as text:
                messages = b"".join((text[left_out:], b"]"))
        finally:
            del self._text[length:]
            self._open = still_open
        return {
            "messages": messages,
            "left_out": left_out,
            "lasting": self._sent,
            "text": self._name if self._sent else "",
        }  # fmt: skip

    def _add(self, message: dict[str, Any]) -> None:
        if len(self._text) > 1:
            self._text += b","
        self._text += to_json(message).encode()

    def _close(self) -> None:
        """Nobody answers the calls any more that have no result."""
        for provider_id in self._open.values():
            self._add({"role": "tool", "tool_call_id": provider_id, "content": INTERRUPTED})
        self._open.clear()

    def _answer(self, message: Message) -> dict[str, Any]:
        wire: dict[str, Any] = {"role": "assistant", "content": message.content}
        provider = dict((message.extra or {}).get("provider") or {})
        call_extras = provider.pop("tool_calls", None) or [{}] * len(message.tool_calls)
        wire.update(provider)
        calls: list[dict[str, Any]] = []
        for call, call_extra in zip(message.tool_calls, call_extras, strict=False):
            provider_id = call.provider_id or call.call_id
            if provider_id in self._seen:
                provider_id = f"{provider_id}_{message.seq}_{len(calls)}"
            self._seen.add(provider_id)
            self._open[call.call_id] = provider_id
            function = {"name": call.name, "arguments": readable(call.arguments)}
            calls.append({**call_extra, "id": provider_id, "type": "function", "function": function})
        if calls:
            wire["tool_calls"] = calls
        elif not wire["content"]:
            wire["content"] = ""
        return wire


def readable(arguments: str) -> str:
    """The arguments if they are JSON, else a JSON object that quotes them: endpoints refuse unreadable history."""
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return json.dumps({"unreadable": arguments})
    return arguments
