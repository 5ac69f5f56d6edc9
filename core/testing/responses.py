"""OpenAI's Responses API as the offline model speaks it: requests as those of chat completions, and its events.

It refuses what the real endpoint would refuse of what goes back to it: a reasoning item that was changed on the way, or
one whose content it did not keep and was not sent.
"""

from __future__ import annotations

import json
import time
from hashlib import blake2b
from typing import Any

from .policies import Refusal
from .protocol import Completion, compact, pieces_of

SEALED = "sealed:"
"""How the encrypted content of the offline model's reasoning begins."""

FIRST = 2
"""Events that come at once, before the model has begun: that there is a response, and that it is worked on."""


def response_identifier(digest: str, times: int) -> str:
    """The id of a response: a function of the request's messages, and of how often they came before."""
    return f"resp_{digest}" + (f"_{times}" if times else "")


def seal(text: str) -> str:
    """What stands for a reasoning text that only the endpoint can read."""
    return SEALED + blake2b(text.encode(), digest_size=12).hexdigest()


def chat_body(body: Any) -> Any:
    """The request as one of chat completions. Raises `Refusal` for what the endpoint would refuse."""
    if not isinstance(body, dict) or not isinstance(body.get("input"), (str, list)):
        raise Refusal(400, "Missing required parameter: 'input'.", "missing_required_parameter")
    if body.get("background") and not body.get("store", True):
        raise Refusal(400, "Background mode requires store=true.", "invalid_value")
    items = [{"role": "user", "content": body["input"]}] if isinstance(body["input"], str) else body["input"]
    messages: list[dict[str, Any]] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    for place, item in enumerate(items):
        _add(messages, item, f"input[{place}]", stored=body.get("store", True))
    chat = {"model": body.get("model"), "messages": messages, "stream": body.get("stream", False)}
    names = {"max_output_tokens": "max_completion_tokens", "temperature": "temperature", "n": "n"}
    chat.update({names[name]: body[name] for name in names if name in body})
    if body.get("tools"):
        chat["tools"] = [_tool(tool) for tool in body["tools"]]
    choice = body.get("tool_choice")
    if choice is not None:
        chat["tool_choice"] = choice if isinstance(choice, str) else {"type": "function", "function": choice}
    form = (body.get("text") or {}).get("format")
    if form is not None:
        described = {name: value for name, value in form.items() if name != "type"}
        chat["response_format"] = {"type": form.get("type"), **({"json_schema": described} if described else {})}
    return chat


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function" or "name" not in tool:
        raise Refusal(400, "Missing required parameter: 'tools[0].name'.", "missing_required_parameter")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _add(messages: list[dict[str, Any]], item: dict[str, Any], where: str, *, stored: bool) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        _add_message(messages, item, where)
    elif kind == "function_call":
        call = {
            "id": item["call_id"],
            "type": "function",
            "function": {"name": item["name"], "arguments": item["arguments"]},
        }
        _answer(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = item["output"]
        content = output if isinstance(output, str) else [_part(part, where) for part in output]
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
    elif kind == "reasoning":
        text = "".join(part["text"] for part in item.get("summary") or ())
        if item.get("encrypted_content") != seal(text) and not (stored and "encrypted_content" not in item):
            raise Refusal(400, f"The encrypted content of {where} could not be verified.", "invalid_encrypted_content")
        messages.append({"role": "assistant", "content": None})
    else:
        raise Refusal(400, f"{where}.type {kind!r} is not supported by the offline model", "invalid_value")


def _add_message(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    role, content = item.get("role"), item.get("content")
    if role == "assistant":
        parts = [{"type": "output_text", "text": content}] if isinstance(content, str) else content or []
        answer = _answer(messages)
        for part in parts:
            name = {"output_text": "content", "refusal": "refusal"}.get(str(part.get("type")))
            if name is None:
                raise Refusal(400, f"{where}.content has {part.get('type')!r}, which no answer has", "invalid_value")
            answer[name] = (answer.get(name) or "") + part["text" if name == "content" else "refusal"]
        return
    if isinstance(content, list):
        content = [_part(part, where) for part in content]
    messages.append({"role": role, "content": content})


def _answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer that an item belongs to: items of one follow each other."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _part(part: dict[str, Any], where: str) -> dict[str, Any]:
    kind = part.get("type")
    if kind == "input_text":
        return {"type": "text", "text": part["text"]}
    if kind == "input_image":
        return {"type": "image_url", "image_url": {"url": part["image_url"], "detail": part.get("detail", "auto")}}
    if kind == "input_file":
        return {"type": "file", "file": {name: value for name, value in part.items() if name != "type"}}
    raise Refusal(400, f"{where}.content has the unknown type {kind!r}", "invalid_value")


class Rendered:
    """A completion as a response: its items, its events, and what there is of it at any time."""

    def __init__(self, completion: Completion, body: dict[str, Any], identifier: str) -> None:
        self._completion = completion
        self._body = body
        self.identifier = identifier
        self._created = int(time.time())
        self._items = self._made()

    def whole(self, status: str = "") -> bytes:
        """The response as one object; with a status of one that is not over, without its items."""
        return compact(self._response(status or self._status)).encode()

    def events(self) -> list[bytes]:
        """The events of the stream; each is known by its number, from 0."""
        found: list[dict[str, Any]] = [
            {
                "type": "response.created",
                "response": self._response("queued" if self._body.get("background") else "in_progress"),
            },
            {"type": "response.in_progress", "response": self._response("in_progress")},
        ]
        for place, item in enumerate(self._items):
            found += self._of_item(place, item)
        found.append({"type": f"response.{self._status}", "response": self._response(self._status)})
        return [
            f"event: {event['type']}\ndata: {compact({**event, 'sequence_number': number})}\n\n".encode()
            for number, event in enumerate(found)
        ]

    @property
    def _status(self) -> str:
        return "incomplete" if self._completion.finish_reason in ("length", "content_filter") else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        over = status == self._status
        reasons = {"length": "max_output_tokens", "content_filter": "content_filter"}
        reason = reasons.get(self._completion.finish_reason)
        return {
            "id": self.identifier, "object": "response", "created_at": self._created, "status": status,
            "background": bool(self._body.get("background")), "error": None,
            "incomplete_details": {"reason": reason} if over and reason else None,
            "model": self._completion.model, "output": self._items if over else [],
            "store": self._body.get("store", True), "usage": self._usage() if over else None,
        }  # fmt: skip

    def _usage(self) -> dict[str, Any]:
        usage = self._completion.usage
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "cache_write_tokens": 0,
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }

    def _made(self) -> list[dict[str, Any]]:
        completion, key = self._completion, self.identifier.removeprefix("resp_")
        items: list[dict[str, Any]] = []
        if completion.reasoning:
            summary = [{"type": "summary_text", "text": completion.reasoning}]
            sealed = seal(completion.reasoning)
            items.append({"id": f"rs_{key}", "type": "reasoning", "summary": summary, "encrypted_content": sealed})
        content: list[dict[str, Any]] = []
        if completion.text is not None and (completion.text or not completion.tool_calls):
            content.append({"type": "output_text", "text": completion.text, "annotations": []})
        if completion.refusal is not None:
            content.append({"type": "refusal", "refusal": completion.refusal})
        if content:
            items.append(
                {"id": f"msg_{key}", "type": "message", "role": "assistant", "status": self._status, "content": content}
            )
        for place, call in enumerate(completion.tool_calls):
            items.append(
                {"id": f"fc_{key}_{place}", "type": "function_call", "call_id": call["id"], "status": self._status,
                 "name": call["function"]["name"], "arguments": call["function"]["arguments"]}
            )  # fmt: skip
        return items

    def _of_item(self, place: int, item: dict[str, Any]) -> list[dict[str, Any]]:
        of = {"output_index": place, "item_id": item["id"]}
        empty = {"summary": [], "content": [], "arguments": "", "encrypted_content": ""}
        begun = {**item, **{name: value for name, value in empty.items() if name in item}, "status": "in_progress"}
        found: list[dict[str, Any]] = [{"type": "response.output_item.added", "output_index": place, "item": begun}]
        for index, part in enumerate(item.get("summary") or ()):
            deltas = [{"delta": piece} for piece in pieces_of(part["text"])]
            found += [
                {"type": "response.reasoning_summary_text.delta", "summary_index": index, **of, **delta}
                for delta in deltas
            ]
        for index, part in enumerate(item.get("content") or ()):
            kind = "output_text" if part["type"] == "output_text" else "refusal"
            text = part["text" if kind == "output_text" else "refusal"]
            found += [
                {"type": f"response.{kind}.delta", "content_index": index, "delta": piece, **of}
                for piece in pieces_of(text)
            ]
        if item["type"] == "function_call":
            half = len(item["arguments"]) // 2
            for piece in (item["arguments"][:half], item["arguments"][half:]):
                if piece:
                    found.append({"type": "response.function_call_arguments.delta", "delta": piece, **of})
        return [*found, {"type": "response.output_item.done", "output_index": place, "item": item}]


def cancelled(whole: bytes) -> bytes:
    """A response that was cancelled."""
    return compact({**json.loads(whole), "status": "cancelled"}).encode()
