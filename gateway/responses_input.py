"""A request in the form of OpenAI's Responses API, from the one of chat completions, in which sessions have it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from understudy.json_text import from_json
from understudy.records import ModelRequest

from .provider_data import items_of

PROTOCOL = "responses"
ENCRYPTED = "reasoning.encrypted_content"

RENAMED = {"max_completion_tokens": "max_output_tokens", "max_tokens": "max_output_tokens"}
"""Parameters of chat completions that have another name. All that are not known here are sent as they are."""


def body_of(request: ModelRequest, *, profile: str, background: bool) -> dict[str, Any]:
    """The body of a request; a pure function of its arguments.

    What the endpoint keeps is said by `store`: without it a response is kept in background mode only, and reasoning
    comes back encrypted.
    """
    body: dict[str, Any] = {"model": request.model}
    instructions, items = input_of(from_json(request.messages), profile=profile, model=request.model)
    if instructions:
        body["instructions"] = instructions
    body["input"] = items
    if request.tools:
        body["tools"] = [_tool(tool) for tool in request.tools]
    for name, value in request.parameters.items():
        _set_parameter(body, name, value)
    body.setdefault("store", background)
    if not body["store"] and "reasoning" in body:
        body["include"] = [*(kept for kept in body.get("include") or () if kept != ENCRYPTED), ENCRYPTED]
    if background:
        body.update(background=True, store=True)
    body["stream"] = True
    return body


def _set_parameter(body: dict[str, Any], name: str, value: Any) -> None:
    if name == "response_format":
        body.setdefault("text", {})["format"] = _format(value)
    elif name == "verbosity":
        body.setdefault("text", {})["verbosity"] = value
    elif name == "text" and isinstance(value, dict):
        body.setdefault("text", {}).update(value)
    elif name == "reasoning_effort":
        body.setdefault("reasoning", {})["effort"] = value
    elif name == "reasoning" and isinstance(value, dict):
        body.setdefault("reasoning", {}).update(value)
    elif name == "tool_choice" and isinstance(value, dict) and isinstance(value.get("function"), dict):
        body["tool_choice"] = {"type": "function", "name": value["function"].get("name")}
    else:
        body[RENAMED.get(name, name)] = value


def _format(value: Any) -> Any:
    described = value.get("json_schema") if isinstance(value, dict) else None
    return {"type": "json_schema", **described} if isinstance(described, dict) else value


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool  # one of the endpoint's own
    return {"type": "function", "strict": False, **function}  # what chat completions take for granted


def input_of(messages: list[dict[str, Any]], *, profile: str, model: str) -> tuple[str, list[dict[str, Any]]]:
    """The instructions, which are the system message at the beginning, and the items of the input."""
    instructions, items = "", []
    for place, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if place == 0 and role == "system" and isinstance(content, str):
            instructions = content
        elif role == "tool":
            output = _parts(content) if isinstance(content, list) else content or ""
            items.append({"type": "function_call_output", "call_id": message.get("tool_call_id"), "output": output})
        elif role == "assistant":
            items += _answer(message, items_of(message, PROTOCOL, profile, model))
        else:
            items.append({"role": role, "content": _parts(content) if isinstance(content, list) else content or ""})
    return instructions, items


def _parts(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_part(part) for part in parts]


def _part(part: dict[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind == "text":
        return {"type": "input_text", "text": part.get("text") or ""}
    if kind == "image_url" and isinstance(part.get("image_url"), dict):
        image = part["image_url"]
        return {"type": "input_image", "image_url": image.get("url"), "detail": image.get("detail") or "auto"}
    if kind == "file" and isinstance(part.get("file"), dict):
        return {"type": "input_file", **part["file"]}
    return part


def text_of_parts(content: Any) -> str:
    """The text of an assistant message."""
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if part.get("type") == "text")
    return content or ""


def _answer(message: dict[str, Any], kept: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """An assistant message: in the order and with the ids that the endpoint gave its items, if they fit what the
    message says by now, else in a new order and without what else the endpoint had made of it."""
    text, calls = text_of_parts(message.get("content")), list(message.get("tool_calls") or ())
    refusal = message.get("refusal") if isinstance(message.get("refusal"), str) else ""
    texts = _texts(text, [item for item in kept if item.get("type") == "message"])
    if texts is None or refusal or sum(item.get("type") == "function_call" for item in kept) != len(calls):
        kept = []
    if not kept:
        if refusal:
            yield {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": refusal}]}
        if text:
            yield {"role": "assistant", "content": text}
        yield from (_call(call) for call in calls)
        return
    for item in kept:
        if item.get("type") == "message":
            assert texts is not None
            part = {"type": "output_text", "text": texts.pop(0), "annotations": []}
            known: dict[str, Any] = {name: item[name] for name in ("id", "phase") if name in item}
            yield {"type": "message", "role": "assistant", "status": "completed", "content": [part], **known}
        elif item.get("type") == "function_call":
            yield {**_call(calls.pop(0)), **({"id": item["id"]} if "id" in item else {})}
        else:
            yield item


def _texts(text: str, messages: list[dict[str, Any]]) -> list[str] | None:
    """The texts of an answer's messages; None if these are not what the answer consisted of."""
    if len(messages) <= 1:
        return [text] if bool(text) == bool(messages) else None
    lengths = [item.get("characters") for item in messages]
    if not all(isinstance(length, int) for length in lengths) or sum(lengths) != len(text):  # type: ignore[arg-type]
        return None
    texts, start = [], 0
    for length in lengths:
        assert isinstance(length, int)
        texts.append(text[start : start + length])
        start += length
    return texts


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments") or "{}"
    return {
        "type": "function_call",
        "call_id": call.get("id"),
        "name": function.get("name"),
        "arguments": arguments,
    }
