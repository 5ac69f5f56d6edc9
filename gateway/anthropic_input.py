"""A request in the form of Anthropic's Messages API, from the one of chat completions, in which sessions have it."""

from __future__ import annotations

import base64
import binascii
import re
from hashlib import blake2b
from typing import Any

from understudy.json_text import from_json
from understudy.records import ModelRequest

from .provider_data import items_of
from .responses_input import text_of_parts

PROTOCOL = "anthropic"

EPHEMERAL = {"type": "ephemeral"}
"""What marks the end of a beginning that the endpoint shall keep. Four in a request at most."""

NOT_IN_IDS = re.compile(r"[^a-zA-Z0-9_-]")

BEGIN = "(The conversation goes on.)"
"""What stands before an answer with which the messages begin: the endpoint wants an input first."""

LONGEST_REPLIES = ((re.compile(r"claude-3-(opus|sonnet|haiku)"), 4_096), (re.compile(r"claude-3"), 8_192),
                   (re.compile(r"claude"), 32_000))  # fmt: skip
"""The limit of a reply where the agent sets none, by model: the endpoint wants one, and refuses too high a one."""

OTHERS = 8_192
"""The same for any other model."""

CHOICES = {"auto": "auto", "required": "any", "none": "none"}


def body_of(request: ModelRequest, *, profile: str) -> dict[str, Any]:
    """The body of a request; a pure function of its arguments."""
    messages = from_json(request.messages)
    lasting = len(from_json(request.messages[: request.lasting] + b"]")) if request.lasting else 0
    built = _Messages(profile)
    for place, message in enumerate(messages, 1):
        built.add(message)
        if place == lasting:
            built.mark()
    built.mark()
    body: dict[str, Any] = {"model": request.model, "messages": built.messages, "stream": True}
    if built.system:
        built.system[-1]["cache_control"] = EPHEMERAL
        body["system"] = built.system
    if request.tools:
        body["tools"] = [_tool(tool) for tool in request.tools]
        if not built.system:
            body["tools"][-1] = {**body["tools"][-1], "cache_control": EPHEMERAL}
    for name, value in request.parameters.items():
        _set_parameter(body, name, value)
    body.setdefault("max_tokens", next((most for name, most in LONGEST_REPLIES if name.match(request.model)), OTHERS))
    if body.get("tool_choice") == {"type": "none"} and "tools" not in body:
        del body["tool_choice"]
    return body


def _set_parameter(body: dict[str, Any], name: str, value: Any) -> None:
    """Parameters of chat completions that have another form. All that are not known here are sent as they are."""
    if name in ("max_completion_tokens", "max_tokens"):
        body["max_tokens"] = value
    elif name == "stop":
        body["stop_sequences"] = [value] if isinstance(value, str) else value
    elif name == "user":
        body["metadata"] = {"user_id": value}
    elif name == "reasoning_effort":
        body.setdefault("output_config", {})["effort"] = value
    elif name == "response_format":
        described = value.get("json_schema") if isinstance(value, dict) else None
        if isinstance(described, dict):
            form = {"type": "json_schema", "schema": described.get("schema")}
            body.setdefault("output_config", {})["format"] = form
    elif name == "output_config" and isinstance(value, dict):
        body.setdefault("output_config", {}).update(value)
    elif name == "tool_choice":
        named = value.get("function") if isinstance(value, dict) else None
        choice = {"type": "tool", "name": named.get("name")} if isinstance(named, dict) else value
        chosen = {"type": CHOICES[value]} if isinstance(value, str) and value in CHOICES else choice
        body["tool_choice"] = {**body.get("tool_choice", {}), **chosen} if isinstance(chosen, dict) else chosen
    elif name == "parallel_tool_calls":
        if not value:
            body["tool_choice"] = {"type": "auto", **body.get("tool_choice", {}), "disable_parallel_tool_use": True}
    else:
        body[name] = value


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool  # one of the endpoint's own
    found = {"name": function.get("name"), "input_schema": function.get("parameters") or {"type": "object"}}
    return {**found, **{name: function[name] for name in ("description", "strict") if function.get(name)}}


def identifier(given: Any) -> str:
    """A tool call's id as the endpoint takes it: most are. Different ones stay different."""
    text = str(given or "")
    plain = NOT_IN_IDS.sub("_", text)
    return plain if plain == text and text else f"{plain}_{blake2b(text.encode(), digest_size=4).hexdigest()}"


class _Messages:
    """The messages as they are built: answers and inputs in turn, whatever is between them."""

    def __init__(self, profile: str) -> None:
        self.system: list[dict[str, Any]] = []
        self.messages: list[dict[str, Any]] = []
        self._profile = profile

    def add(self, message: dict[str, Any]) -> None:
        """The next message."""
        role, content = message.get("role"), message.get("content")
        if role in ("system", "developer") and not self.messages:
            self.system += [block for block in _blocks(content) if block.get("type") == "text"]
        elif role == "assistant":
            blocks = _answer(message, items_of(message, PROTOCOL, self._profile))
            if blocks and not self.messages:
                self._put("user", [{"type": "text", "text": BEGIN}])
            self._put("assistant", blocks)
        elif role == "tool":
            result = {"type": "tool_result", "tool_use_id": identifier(message.get("tool_call_id"))}
            shown = _blocks(content)
            self._put("user", [{**result, "content": shown} if shown else result])
        else:
            self._put("user", _blocks(content))

    def mark(self) -> None:
        """The endpoint shall keep what it made of the messages up to here."""
        if self.messages:
            blocks = self.messages[-1]["content"]
            if blocks[-1].get("type") not in ("thinking", "redacted_thinking"):
                blocks[-1] = {**blocks[-1], "cache_control": EPHEMERAL}

    def _put(self, role: str, blocks: list[dict[str, Any]]) -> None:
        if not blocks:
            return
        if self.messages and self.messages[-1]["role"] == role:
            self.messages[-1]["content"] += blocks
        else:
            self.messages.append({"role": role, "content": blocks})


def _blocks(content: Any) -> list[dict[str, Any]]:
    """An input's or a result's parts; the endpoint refuses texts of which nothing can be seen."""
    if not isinstance(content, list):
        content = [{"type": "text", "text": content or ""}]
    return [block for block in map(_block, content) if block.get("type") != "text" or block["text"].strip()]


def _block(part: dict[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind == "text":
        return {"type": "text", "text": part.get("text") or ""}
    if kind == "image_url" and isinstance(part.get("image_url"), dict):
        return {"type": "image", "source": _source(str(part["image_url"].get("url") or ""))}
    if kind == "file" and isinstance(part.get("file"), dict):
        return _document(part["file"])
    return part


def _document(file: dict[str, Any]) -> dict[str, Any]:
    title = {"title": file["filename"]} if file.get("filename") else {}
    if file.get("file_id"):
        return {"type": "document", "source": {"type": "file", "file_id": file["file_id"]}, **title}
    source = _source(str(file.get("file_data") or ""))
    if source.get("media_type", "").startswith("text/"):
        try:
            text = base64.b64decode(source["data"]).decode("utf-8", "replace")
        except (binascii.Error, ValueError):
            text = ""
        source = {"type": "text", "media_type": "text/plain", "data": text}
    return {"type": "document", "source": source, **title}


def _source(url: str) -> dict[str, str]:
    head, separator, data = url.partition(";base64,")
    if url.startswith("data:") and separator:
        return {"type": "base64", "media_type": head.removeprefix("data:").partition(";")[0], "data": data}
    return {"type": "url", "url": url}


def _answer(message: dict[str, Any], kept: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """An assistant message: with what the endpoint wants back of it in its place, if that fits what the message says by
    now, else without."""
    text = text_of_parts(message.get("content")) or (message.get("refusal") or "")
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    spoken = [{"type": "text", "text": text}] if text.strip() else []
    kinds = [item.get("type") for item in kept]
    if kinds.count("text") != len(spoken) or kinds.count("tool_use") != len(calls):
        kept = []
    if not kept:
        return [*spoken, *calls]
    left = {"text": iter(spoken), "tool_use": iter(calls)}
    return [next(left[item["type"]]) if item["type"] in left else item for item in kept]


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    try:
        given = from_json(function.get("arguments") or "{}")
    except (ValueError, RecursionError):
        given = {"unreadable": function.get("arguments")}
    if not isinstance(given, dict):
        given = {"arguments": given}
    return {"type": "tool_use", "id": identifier(call.get("id")), "name": function.get("name"), "input": given}
