"""The OpenAI chat completions protocol as the offline model speaks it: checks, bodies, stream events."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from .policies import Refusal, Reply

PIECE = 48
"""Characters of text in one stream event, if that makes no more than `MAX_PIECES` events."""
MAX_PIECES = 16

CACHE_UNIT = 128
"""Tokens: a prefix is cached in units of so many."""

compact = json.JSONEncoder(separators=(",", ":")).encode
"""JSON without spaces."""


def estimate_tokens(characters: int) -> int:
    """Tokens billed for so many characters: a quarter, rounded up, at least one."""
    return max(1, (characters + 3) // 4)


def cached_tokens(characters: int) -> int:
    """Tokens that an endpoint with prefix caching finds again of so many equal characters: whole units."""
    return characters // 4 // CACHE_UNIT * CACHE_UNIT


def pieces_of(text: str) -> list[str]:
    """A text in the pieces in which it is streamed."""
    size = max(PIECE, -(-len(text) // MAX_PIECES))
    return [text[at : at + size] for at in range(0, len(text), size)]


def check_body(body: Any) -> list[dict[str, Any]]:
    """Return the messages of a request, refusing what the real endpoint would refuse.

    Raises:
        Refusal: (400) above all when tool calls and tool messages do not pair up.
    """
    if not isinstance(body, dict) or not isinstance(body.get("model"), str):
        raise Refusal(400, "you must provide a model parameter", "missing_required_parameter")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(item, dict) for item in messages):
        raise Refusal(400, "messages must be a non-empty array of objects", "invalid_type")
    if body.get("n") not in (None, 1):
        raise Refusal(400, "the offline model makes one choice only", "unsupported_value")
    open_calls: list[str] = []
    for index, message in enumerate(messages):
        role = message.get("role")
        if role == "tool":
            if message.get("tool_call_id") not in open_calls:
                raise Refusal(
                    400,
                    f"messages[{index}] with role 'tool' must be a response to a preceding message with 'tool_calls'",
                )
            open_calls.remove(message["tool_call_id"])
            continue
        if open_calls:
            raise Refusal(
                400,
                "An assistant message with 'tool_calls' must be followed by tool messages responding to each "
                f"'tool_call_id'. The following tool_call_ids did not have response messages: {', '.join(open_calls)}",
            )
        if role not in ("system", "developer", "user", "assistant"):
            raise Refusal(400, f"messages[{index}].role {role!r} is not supported", "invalid_value")
        if role == "assistant":
            open_calls = [call["id"] for call in message.get("tool_calls") or ()]
    if open_calls:
        raise Refusal(400, f"tool_call_ids without response messages: {', '.join(open_calls)}")
    return messages


def error_body(status: int, message: str, code: str | None = None) -> bytes:
    """An error as OpenAI's API words it."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return compact({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()


@dataclass(frozen=True, slots=True)
class Completion:
    """A reply in full: what the endpoint sends, streamed or not."""

    identifier: str
    model: str
    text: str | None
    tool_calls: tuple[dict[str, Any], ...]
    finish_reason: str
    usage: dict[str, Any]
    refusal: str | None = None
    reasoning: str = ""

    @classmethod
    def of(
        cls, reply: Reply, body: dict[str, Any], identifier: str, prompt_characters: int, cached_characters: int = 0
    ) -> Completion:
        """Complete `reply`: tool call ids (`call_0`, ..., the same in every round), token counts, the length limit.

        Args:
            cached_characters: so many of the prompt, from its beginning, are known from a request before.
        """
        text, reason = reply.text, reply.finish_reason
        calls: tuple[dict[str, Any], ...] = tuple(
            {
                "id": f"call_{index}",
                "type": "function",
                "function": {"name": name, "arguments": given if isinstance(given, str) else compact(given)},
            }
            for index, (name, given) in enumerate(reply.tool_calls)
        )
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        if text and limit and len(text) > limit * 4:
            text, calls, reason = text[: limit * 4], (), reason or "length"
        asked = sum(len(call["function"]["name"]) + len(call["function"]["arguments"]) for call in calls)
        if limit and len(text or "") + asked > limit * 4:  # no room for the calls: cut before the first
            text, calls, reason = text or "", (), reason or "length"
        prompt = estimate_tokens(prompt_characters)
        characters = sum(len(call["function"]["name"]) + len(call["function"]["arguments"]) for call in calls)
        reasoning = estimate_tokens(len(reply.reasoning)) if reply.reasoning else 0
        output = estimate_tokens(len(text or "") + characters) + reasoning
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached_tokens(cached_characters)},
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        }
        reason = reason or ("tool_calls" if calls else "stop")
        return cls(identifier, body["model"], text, calls, reason, usage, reply.refusal, reply.reasoning)

    def whole(self) -> bytes:
        """The body of an answer that is not streamed."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text, "refusal": self.refusal}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self.finish_reason}
        return compact(
            {
                "id": self.identifier,
                "object": "chat.completion",
                "created": int(time.time()),
                "model": self.model,
                "choices": [choice],
                "usage": self.usage,
            }
        ).encode()

    def events(self, include_usage: bool) -> list[bytes]:
        """The server-sent events of a streamed answer, `[DONE]` included."""
        head = (
            f'data: {{"id":"{self.identifier}","object":"chat.completion.chunk","created":{int(time.time())},'
            f'"model":{compact(self.model)},"choices":['
        )
        start = f'{head}{{"index":0,"delta":'
        end = ',"logprobs":null,"finish_reason":%s}]' + (',"usage":null}\n\n' if include_usage else "}\n\n")
        going_on = end % "null"
        text, calls = self.text or "", self.tool_calls
        deltas = ['{"role":"assistant","content":%s}' % ("null" if self.text is None else '""')]
        deltas += [f'{{"reasoning_content":{compact(piece)}}}' for piece in pieces_of(self.reasoning)]
        deltas += [f'{{"content":{compact(piece)}}}' for piece in pieces_of(text)]
        if self.refusal is not None:
            deltas.append(f'{{"refusal":{compact(self.refusal)}}}')
        for index, call in enumerate(calls):
            function = call["function"]
            opening = {**call, "index": index, "function": {"name": function["name"], "arguments": ""}}
            half = len(function["arguments"]) // 2
            pieces = [function["arguments"][:half], function["arguments"][half:]]
            steps = [opening, *({"index": index, "function": {"arguments": piece}} for piece in pieces if piece)]
            deltas += [f'{{"tool_calls":[{compact(step)}]}}' for step in steps]
        events = [f"{start}{delta}{going_on}".encode() for delta in deltas]
        events.append(f"{start}{{}}{end % compact(self.finish_reason)}".encode())
        if include_usage:
            events.append(f'{head}],"usage":{compact(self.usage)}}}\n\n'.encode())
        events.append(b"data: [DONE]\n\n")
        return events
