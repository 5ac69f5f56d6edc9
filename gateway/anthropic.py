"""Anthropic's Messages API: requests, and the answer that the events of a stream, or a whole message, add up to.

Its package is not used: a request is one POST with three headers, and to make objects of each event would cost more CPU
than all the rest of a call.
"""

from __future__ import annotations

from typing import Any

from understudy.config import ModelProfile
from understudy.json_text import from_json, to_json
from understudy.messages import CUT_OFF, PROVIDER_DATA, Usage
from understudy.records import ModelRequest
from understudy.streams import CALL, REASONING, TEXT, Piece

from .adapters import EndpointError, Malformed, count_of, object_of, text_of
from .anthropic_input import PROTOCOL, body_of
from .provider_data import stamped

VERSION = "2023-06-01"
"""Of the API; each request names it."""

REFUSAL = "refusal"

FINISHED = {"end_turn": "stop", "stop_sequence": "stop", "pause_turn": "stop", "tool_use": "tool_calls",
            "max_tokens": CUT_OFF, "model_context_window_exceeded": CUT_OFF, REFUSAL: "stop"}  # fmt: skip
"""Why an answer ends, in the words of chat completions."""

DELTAS = {"text_delta": ("text", TEXT), "thinking_delta": ("thinking", REASONING), "input_json_delta": ("input", CALL),
          "signature_delta": ("signature", "")}  # fmt: skip
"""What a delta adds to which field of its block, and how it is streamed."""

DELTA_FIELDS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json",
                "signature_delta": "signature"}  # fmt: skip


class Messages:
    """An `Adapter` for the Messages API."""

    provider = "anthropic"
    described = "message"
    keeps = False

    def __init__(self, profile: ModelProfile) -> None:
        self._profile = profile.name
        path = (profile.base_url or "").partition("?")[0].rstrip("/")
        self.path = "messages" if path.endswith("/v1") else "v1/messages"

    def headers(self, profile: ModelProfile) -> dict[str, str]:
        return {"x-api-key": profile.api_key, "anthropic-version": VERSION, "content-type": "application/json"}

    def content(self, request: ModelRequest) -> bytes:
        return to_json(body_of(request, profile=self._profile)).encode()

    def begin(self, request: ModelRequest, _response_id: str = "") -> MessageReading:
        return MessageReading(profile=self._profile, model=request.model)


class MessageReading:
    """A `Reading` of a message.

    Args:
        profile, model: of the request.
    """

    continuation = ""
    progress = 0
    pending = False

    def __init__(self, *, profile: str, model: str) -> None:
        self.identifier = ""
        self.model = ""
        self.finish_reason = ""
        self.usage: Usage | None = None
        self.done = False
        self._asked = profile, model
        self._refuses = False
        self._counts: dict[str, Any] = {}
        self._blocks: dict[int, dict[str, Any]] = {}
        self._texts: dict[tuple[int, str], list[str]] = {}  # of each block's fields, as they come
        self._calls: dict[int, int] = {}  # which block is which of the calls
        self._ordered: list[dict[str, Any]] = []

    def reroute(self, _status: int | None) -> bool:
        """There is no other way to a message than to ask for it."""
        return False

    def add(self, data: str) -> list[Piece]:
        """See `Reading.add`."""
        event = object_of(data)
        try:
            return self._event(event)
        except (AttributeError, TypeError, KeyError) as error:
            raise Malformed(f"not a message: {error}") from None

    @property
    def complete(self) -> bool:
        return self.done

    @property
    def content(self) -> str | None:
        return None if self._refuses else self._text()

    def _text(self) -> str | None:
        texts = [block["text"] for block in self._ordered if block["type"] == "text"]
        return "".join(texts) if texts else None

    @property
    def tool_calls(self) -> tuple[tuple[str, str, str], ...]:
        found = [block for block in self._ordered if block["type"] == "tool_use"]
        return tuple((text_of(block, "id"), text_of(block, "name"), block["input"]) for block in found)

    @property
    def extra(self) -> dict[str, Any] | None:
        """Thinking with its signatures, and whatever else is the endpoint's own, and where it stood: of text and tool
        calls, which the message has, only that. Thinking without a signature can't go back."""
        kept: list[dict[str, Any]] = []
        for block in self._ordered:
            if block["type"] == "text":
                if block["text"].strip() and not any(one["type"] == "text" for one in kept):
                    kept.append({"type": "text"})
            elif block["type"] == "tool_use":
                kept.append({"type": "tool_use"})
            elif block["type"] != "thinking" or block.get("signature"):
                kept.append(block)
        extra: dict[str, Any] = {}
        if self._refuses:
            extra[REFUSAL] = self._text() or ""
        if any(block["type"] not in ("text", "tool_use") for block in kept):
            extra[PROVIDER_DATA] = stamped(PROTOCOL, *self._asked, kept)
        return extra or None

    def _event(self, event: dict[str, Any]) -> list[Piece]:
        kind = text_of(event, "type")
        if kind == "content_block_delta":
            return self._delta(event["index"], event["delta"])
        if kind == "content_block_start":
            return self._start(event["index"], event["content_block"])
        if kind == "message_start":
            self._note(event["message"])
        elif kind == "message_delta":
            self._note({**event["delta"], "usage": event.get("usage")})
        elif kind == "message_stop":
            self._end()
        elif kind == "message":
            return self._whole(event)
        elif kind == "error" or event.get("error"):
            error = event.get("error")
            raise EndpointError({**error, "code": error.get("type")} if isinstance(error, dict) else error)
        elif not kind:
            raise Malformed("an event without a type")
        return []

    def _note(self, message: dict[str, Any]) -> None:
        self.identifier = text_of(message, "id") or self.identifier
        self.model = text_of(message, "model") or self.model
        reason = text_of(message, "stop_reason")
        self._refuses = self._refuses or reason == REFUSAL
        self.finish_reason = FINISHED.get(reason, reason) or self.finish_reason
        if message.get("usage"):
            self._counts.update({name: count for name, count in message["usage"].items() if count is not None})

    def _start(self, index: int, block: dict[str, Any]) -> list[Piece]:
        kind = text_of(block, "type")
        self._blocks[index] = dict(block)
        if kind == "tool_use":
            self._calls[index] = len(self._calls)
            self._blocks[index]["input"] = ""
            return [Piece(CALL, "", self._calls[index], text_of(block, "name"))]
        text = text_of(block, kind) if kind in ("text", "thinking") else ""
        return [Piece(TEXT if kind == "text" else REASONING, text)] if text else []

    def _delta(self, index: int, delta: dict[str, Any]) -> list[Piece]:
        kind = text_of(delta, "type")
        if kind not in DELTAS:
            return []
        field, part = DELTAS[kind]
        block, text = self._blocks[index], text_of(delta, DELTA_FIELDS[kind])
        self._texts.setdefault((index, field), []).append(text)
        if part == CALL and index in self._calls:
            return [Piece(CALL, text, self._calls[index], text_of(block, "name"))] if text else []
        return [Piece(part, text)] if text and part in (TEXT, REASONING) else []

    def _whole(self, message: dict[str, Any]) -> list[Piece]:
        self._note(message)
        pieces = []
        for index, block in enumerate(message["content"]):
            pieces += self._start(index, block)
            if block["type"] == "tool_use":
                arguments = to_json(block.get("input") or {})
                pieces += self._delta(index, {"type": "input_json_delta", "partial_json": arguments})
        self._end()
        return pieces

    def _end(self) -> None:
        for (index, field), texts in self._texts.items():
            block, text = self._blocks[index], "".join(texts)
            if field == "input" and index not in self._calls:  # a call that the endpoint makes itself
                block[field] = _read(text)
            else:
                block[field] = text_of(block, field) + text
        for index in self._calls:
            self._blocks[index]["input"] = self._blocks[index]["input"] or "{}"
        for block in self._blocks.values():
            if block["type"] == "text":
                block["text"] = text_of(block, "text")
        if self._counts:
            self.usage = read_usage(self._counts)
        self._ordered = [block for _, block in sorted(self._blocks.items())]
        _ = self.content, self.tool_calls, self.extra  # what can't be read is found while it is read
        self.done = True


def _read(text: str) -> Any:
    try:
        return from_json(text or "{}")
    except (ValueError, RecursionError) as error:
        raise Malformed(f"not JSON: {error}") from None


def read_usage(data: dict[str, Any]) -> Usage:
    """Token counts in the endpoint's form, which counts apart what it has in its cache, or takes into it."""
    cached, written = count_of(data, "cache_read_input_tokens"), count_of(data, "cache_creation_input_tokens")
    return Usage(
        input_tokens=count_of(data, "input_tokens") + cached + written,
        output_tokens=count_of(data, "output_tokens"),
        cached_tokens=cached,
        reasoning_tokens=count_of(data.get("output_tokens_details") or {}, "thinking_tokens"),
        cache_write_tokens=written,
    )
