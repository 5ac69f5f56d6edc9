"""Anthropic's Messages API as the offline model speaks it: requests as those of chat completions, and its events.

It refuses what the real endpoint would refuse: messages that do not take turns, calls without results, texts without
anything in them, thinking that was changed on the way, more than four marks of what to keep.
"""

from __future__ import annotations

import json
from typing import Any

from .policies import Refusal
from .protocol import Completion, compact, pieces_of
from .responses import seal

MOST_MARKS = 4
STOPPED = {"tool_calls": "tool_use", "length": "max_tokens", "content_filter": "refusal"}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def refused(message: str) -> Refusal:
    return Refusal(400, message, "invalid_request_error")


def chat_body(body: Any) -> Any:
    """The request as one of chat completions. Raises `Refusal` for what the endpoint would refuse."""
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise refused("messages: Field required")
    if not isinstance(body.get("max_tokens"), int):
        raise refused("max_tokens: Field required")
    if compact(body).count('"cache_control"') > MOST_MARKS:
        raise refused(f"A maximum of {MOST_MARKS} blocks with cache_control may be provided.")
    messages: list[dict[str, Any]] = []
    system = body.get("system") or []
    if system:
        texts = [system] if isinstance(system, str) else [block["text"] for block in system]
        messages.append({"role": "system", "content": "\n".join(texts)})
    open_calls: list[str] = []
    for place, message in enumerate(body["messages"]):
        if message.get("role") != ("user", "assistant")[place % 2]:
            raise refused(f"messages.{place}: roles must alternate between user and assistant, and begin with user")
        content = message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not blocks:
            raise refused(f"messages.{place}: content must be non-empty")
        given = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
        if sorted(given) != sorted(open_calls):
            raise refused(f"messages.{place}: each tool_use block must have one tool_result block in the next message")
        answer = message["role"] == "assistant"
        messages += [_answer(blocks, place)] if answer else _inputs(blocks, place)
        open_calls = [block["id"] for block in blocks if block["type"] == "tool_use"]
    if open_calls:
        raise refused("the last message has tool_use blocks without tool_result blocks")
    chat = {"model": body.get("model"), "messages": messages, "stream": body.get("stream", False)}
    chat["max_completion_tokens"] = body["max_tokens"]
    if body.get("tools"):
        chat["tools"] = [_tool(tool) for tool in body["tools"]]
    choice = body.get("tool_choice") or {}
    if choice.get("type") in CHOICES:
        chat["tool_choice"] = CHOICES[choice["type"]]
    form = (body.get("output_config") or {}).get("format")
    if form is not None:
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": form["schema"]}}
    return chat


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _text(block: dict[str, Any], place: int) -> str:
    if not block["text"].strip():
        raise refused(f"messages.{place}: text content blocks must contain non-whitespace text")
    return str(block["text"])


def _answer(blocks: list[dict[str, Any]], place: int) -> dict[str, Any]:
    answer: dict[str, Any] = {"role": "assistant", "content": None}
    for block in blocks:
        if block["type"] == "text":
            answer["content"] = (answer["content"] or "") + _text(block, place)
        elif block["type"] == "tool_use":
            if not isinstance(block["input"], dict):
                raise refused(f"messages.{place}: tool_use.input must be an object")
            function = {"name": block["name"], "arguments": compact(block["input"])}
            answer.setdefault("tool_calls", []).append({"id": block["id"], "type": "function", "function": function})
        elif block["type"] == "thinking":
            if block.get("signature") != seal(block["thinking"]):
                raise refused(f"messages.{place}: Invalid `signature` in `thinking` block")
        else:
            raise refused(f"messages.{place}: unexpected block {block['type']!r} in an answer")
    return answer


def _inputs(blocks: list[dict[str, Any]], place: int) -> list[dict[str, Any]]:
    results = [block for block in blocks if block["type"] == "tool_result"]
    found: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": block["tool_use_id"], "content": _plain(block.get("content") or "", place)}
        for block in results
    ]
    rest = [block for block in blocks if block["type"] != "tool_result"]
    if blocks[: len(results)] != results:
        raise refused(f"messages.{place}: tool_result blocks must come first")
    return [*found, *({"role": "user", "content": _plain([block], place)} for block in rest)]


def _plain(content: Any, place: int) -> Any:
    """Parts as chat completions have them; text alone as text."""
    if isinstance(content, str):
        return content
    parts = [_part(block, place) for block in content]
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _part(block: dict[str, Any], place: int) -> dict[str, Any]:
    if block["type"] == "text":
        return {"type": "text", "text": _text(block, place)}
    source = block.get("source") or {}
    url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
    if block["type"] == "image":
        return {"type": "image_url", "image_url": {"url": url}}
    if block["type"] == "document":
        return {"type": "file", "file": {"filename": block.get("title", ""), "file_data": url}}
    raise refused(f"messages.{place}: unexpected block {block['type']!r} in an input")


class RenderedMessage:
    """A completion as a message."""

    def __init__(self, completion: Completion, identifier: str) -> None:
        self._completion = completion
        self._identifier = identifier
        self._blocks = self._made()

    def whole(self) -> bytes:
        """The message as one object."""
        blocks = [
            {**block, "input": json.loads(block["input"])} if block["type"] == "tool_use" else block
            for block in self._blocks
        ]
        return compact(self._message(blocks, self._stop_reason, self._usage())).encode()

    def events(self) -> list[bytes]:
        """The events of the stream."""
        begun = {**self._usage(), "output_tokens": 1}
        found: list[dict[str, Any]] = [{"type": "message_start", "message": self._message([], None, begun)}]
        for index, block in enumerate(self._blocks):
            found += self._of_block(index, block)
        delta = {"stop_reason": self._stop_reason, "stop_sequence": None}
        counted = {"output_tokens": self._completion.usage["completion_tokens"]}
        found += [{"type": "message_delta", "delta": delta, "usage": counted}, {"type": "message_stop"}]
        found.insert(1, {"type": "ping"})
        return [f"event: {event['type']}\ndata: {compact(event)}\n\n".encode() for event in found]

    @property
    def _stop_reason(self) -> str:
        reason = self._completion.finish_reason
        return "refusal" if self._completion.refusal is not None else STOPPED.get(reason, "end_turn")

    def _message(self, blocks: list[dict[str, Any]], reason: str | None, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._identifier, "type": "message", "role": "assistant", "model": self._completion.model,
            "content": blocks, "stop_reason": reason, "stop_sequence": None, "usage": usage,
        }  # fmt: skip

    def _usage(self) -> dict[str, Any]:
        usage = self._completion.usage
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached, "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0, "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
        }  # fmt: skip

    def _made(self) -> list[dict[str, Any]]:
        completion = self._completion
        blocks: list[dict[str, Any]] = []
        if completion.reasoning:
            thought = completion.reasoning
            blocks.append({"type": "thinking", "thinking": thought, "signature": seal(thought)})
        said = (completion.text or "") + (completion.refusal or "")
        if said:
            blocks.append({"type": "text", "text": said})
        for call in completion.tool_calls:
            function = call["function"]
            blocks.append(
                {"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]}
            )
        return blocks

    def _of_block(self, index: int, block: dict[str, Any]) -> list[dict[str, Any]]:
        kind = block["type"]
        if kind == "tool_use":
            begun, half = {**block, "input": {}}, len(block["input"]) // 2
            pieces = (block["input"][:half], block["input"][half:])
            deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in pieces]
        elif kind == "thinking":
            begun = {"type": kind, "thinking": "", "signature": ""}
            deltas = [{"type": "thinking_delta", "thinking": piece} for piece in pieces_of(block["thinking"])]
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
        else:
            begun = {"type": kind, "text": ""}
            deltas = [{"type": "text_delta", "text": piece} for piece in pieces_of(block["text"])]
        return [
            {"type": "content_block_start", "index": index, "content_block": begun},
            *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
            {"type": "content_block_stop", "index": index},
        ]


def error_body(status: int, message: str, code: str | None = None) -> bytes:
    """An error as Anthropic's API words it."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 529: "overloaded_error"}
    kind = code or kinds.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return compact({"type": "error", "error": {"type": kind, "message": message}}).encode()
