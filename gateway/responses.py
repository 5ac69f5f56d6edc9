"""OpenAI's Responses API: requests, and the answer that the events of a stream, or a whole response, add up to.

With `ModelProfile.background` the endpoint makes a response whoever listens, and keeps it: a call whose connection is
lost goes on where it was, by the response's id and the number of the last event.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

from understudy.config import ModelProfile
from understudy.json_text import to_json
from understudy.messages import CUT_OFF, PROVIDER_DATA, Usage
from understudy.records import ModelRequest
from understudy.streams import CALL, REASONING, TEXT, Piece

from .adapters import EndpointError, Malformed, count_of, object_of, text_of
from .provider_data import stamped
from .responses_input import PROTOCOL, body_of

WORKING = frozenset({"queued", "in_progress"})
"""Statuses of a response that is not over."""

SPOKEN = {"response.output_text.delta": TEXT, "response.reasoning_summary_text.delta": REASONING,
          "response.reasoning_text.delta": REASONING}  # fmt: skip
"""Events that add to a text."""

ENDS = frozenset({"response.completed", "response.incomplete", "response.failed", "response.cancelled"})

UNREADABLE = frozenset({400, 404, 405, 406, 410, 422, 501})
"""Statuses by which an endpoint refuses to send a response that it keeps, as a stream or at all."""

GONE = frozenset({404, 410})


class Responses:
    """An `Adapter` for the Responses API."""

    provider = "openai"
    described = "response"
    path = "responses"

    def __init__(self, profile: ModelProfile) -> None:
        self._profile = profile.name
        self.keeps = profile.background

    def headers(self, _profile: ModelProfile) -> None:
        """Those of the `openai` package."""

    def content(self, request: ModelRequest) -> bytes:
        return to_json(self._body(request)).encode()

    def begin(self, request: ModelRequest, response_id: str = "") -> ResponseReading:
        reading = ResponseReading(
            profile=self._profile, model=request.model, background=self.keeps, stored=self._is_stored(request)
        )
        if self.keeps:
            reading.identifier = response_id
        return reading

    def _body(self, request: ModelRequest) -> dict[str, Any]:
        return body_of(request, profile=self._profile, background=self.keeps)

    def _is_stored(self, request: ModelRequest) -> bool:
        return self.keeps or bool(request.parameters.get("store"))


def cancel_path(response_id: str) -> str:
    """Where a response in background mode is cancelled, below the base URL."""
    return f"responses/{quote(response_id, safe='')}/cancel"


class ResponseReading:
    """A `Reading` of a response.

    Args:
        profile, model: of the request.
        background: the endpoint keeps the response while it is made, under its id.
        stored: it keeps what it made, so that a reasoning item can go back without its content.
    """

    def __init__(self, *, profile: str, model: str, background: bool, stored: bool) -> None:
        self.identifier = ""
        self.model = ""
        self.finish_reason = ""
        self.usage: Usage | None = None
        self.done = False
        self.pending = False
        self.progress = 0
        self._asked = profile, model
        self._background = background
        self._stored = stored
        self._last = -1  # number of the last event
        self._polls = False
        self._over = False
        self._output: list[dict[str, Any]] = []
        self._items: dict[int, dict[str, Any]] = {}
        self._calls: dict[int, int] = {}  # which place of the output has which of the calls
        self._streamed: dict[int, int] = {}  # so many characters of each item were streamed

    def add(self, data: str) -> list[Piece]:
        """See `Reading.add`."""
        if data == "[DONE]":  # of some that are compatible
            return []
        event = object_of(data)
        try:
            if event.get("object") == "response":
                return self._whole(event)
            return self._event(event)
        except (AttributeError, TypeError, KeyError) as error:
            raise Malformed(f"not a response: {error}") from None

    @property
    def complete(self) -> bool:
        return self.done

    @property
    def content(self) -> str | None:
        texts = [text for item in self._output if item.get("type") == "message" for text in _texts_of(item)]
        return "".join(texts) if texts else None

    @property
    def tool_calls(self) -> tuple[tuple[str, str, str], ...]:
        found = [item for item in self._output if item.get("type") == "function_call"]
        return tuple((text_of(item, "call_id"), text_of(item, "name"), _arguments(item)) for item in found)

    @property
    def extra(self) -> dict[str, Any] | None:
        extra: dict[str, Any] = {}
        messages = [item for item in self._output if item.get("type") == "message"]
        refusals = [part["refusal"] for item in messages for part in _parts_of(item) if part.get("type") == "refusal"]
        if refusals:
            extra["refusal"] = "".join(refusals)
        items = self._kept()
        if items:
            extra[PROVIDER_DATA] = stamped(PROTOCOL, *self._asked, items)
        return extra or None

    @property
    def continuation(self) -> str:
        if not self._background or not self.identifier or self._over:
            return ""
        path = f"responses/{quote(self.identifier, safe='')}"
        if self._polls:
            return path
        return f"{path}?stream=true" + (f"&starting_after={self._last}" if self._last >= 0 else "")

    def reroute(self, status: int | None) -> bool:
        if not self.continuation or (status is not None and status not in UNREADABLE):
            return False
        if status in GONE or (self._polls and status is not None):  # nothing is left but to ask again
            self._over = True
        self._polls = True
        return True

    def _event(self, event: dict[str, Any]) -> list[Piece]:
        kind = text_of(event, "type")
        if not kind:
            if event.get("error"):
                raise EndpointError(event["error"])
            raise Malformed("an event without a type")
        number = event.get("sequence_number")
        if self._background and isinstance(number, int):
            if number <= self._last:  # of before the place from which the stream was asked for
                return []
            self._last = number
        self.progress += 1
        if kind == "error":
            raise EndpointError(event["error"] if isinstance(event.get("error"), dict) else event)
        if kind in ENDS:
            return self._end(event["response"])
        if kind in SPOKEN:
            return self._spoken(event, SPOKEN[kind])
        if kind == "response.function_call_arguments.delta":
            return self._argued(event)
        if kind in ("response.output_item.added", "response.output_item.done"):
            return self._item(event, done=kind.endswith("done"))
        if kind == "response.reasoning_summary_part.added" and event.get("summary_index"):
            return [Piece(REASONING, "\n\n")]
        if isinstance(event.get("response"), dict):
            self._note(event["response"])
        return []

    def _note(self, response: dict[str, Any]) -> None:
        self.identifier = text_of(response, "id") or self.identifier
        self.model = text_of(response, "model") or self.model

    def _spoken(self, event: dict[str, Any], kind: str) -> list[Piece]:
        text = text_of(event, "delta")
        place = event.get("output_index", 0)
        self._streamed[place] = self._streamed.get(place, 0) + len(text)
        return [Piece(kind, text)] if text else []

    def _argued(self, event: dict[str, Any]) -> list[Piece]:
        place, text = event.get("output_index", 0), text_of(event, "delta")
        item = self._items.get(place)
        if item is None:  # nobody could say of what these arguments are
            return []
        self._streamed[place] = self._streamed.get(place, 0) + len(text)
        return [Piece(CALL, text, self._calls[place], text_of(item, "name"))]

    def _item(self, event: dict[str, Any], *, done: bool) -> list[Piece]:
        """An item of the output, as it begins or in full; what of it was not streamed is added."""
        place, item = event.get("output_index", len(self._items)), event["item"]
        known = place in self._items
        self._items[place] = item
        if item["type"] == "function_call":
            if not known:
                self._calls[place] = len(self._calls)
            rest = _arguments(item) if done and not self._streamed.get(place) else ""
            if rest or not known:
                return [Piece(CALL, rest, self._calls[place], text_of(item, "name"))]
        if item["type"] == "message" and done and not self._streamed.get(place):
            return [Piece(TEXT, text) for text in _texts_of(item) if text]
        return []

    def _whole(self, response: dict[str, Any]) -> list[Piece]:
        """A response that is not streamed: perhaps it is not over, then it has to be asked for again."""
        self._note(response)
        self.pending = self._background and response.get("status") in WORKING
        if self.pending:
            self._polls = True
            return []
        self._items, self._calls, self._streamed = {}, {}, {}
        self._end(response)
        pieces = []
        for place, item in enumerate(self._output):
            pieces += self._item({"output_index": place, "item": item}, done=True)
        return pieces

    def _end(self, response: dict[str, Any]) -> list[Piece]:
        self._note(response)
        status = response.get("status")
        if status in ("failed", "cancelled") or (status is None and response.get("error")):
            self._over = True
            raise EndpointError(response.get("error") or {"message": f"the response was {status}"})
        if response.get("usage"):
            self.usage = read_usage(response["usage"])
        if status == "incomplete":
            reason = text_of(response.get("incomplete_details") or {}, "reason")
            self.finish_reason = CUT_OFF if reason == "max_output_tokens" else reason or CUT_OFF
        self._output = response.get("output") or [item for _, item in sorted(self._items.items())]
        self.done = True
        _ = self.content, self.tool_calls, self.extra  # what can't be read is found while it is read
        return []

    def _kept(self) -> list[dict[str, Any]]:
        """What goes back to the endpoint: its own items as they are, and where text and tool calls stood among them.

        Reasoning that the endpoint neither keeps nor has sent encrypted can't go back, nor then what belongs to it.
        """
        kept: list[dict[str, Any]] = []
        whole = True
        for item in self._output:
            kind = text_of(item, "type")
            if kind == "message":
                lengths = sum(len(text) for text in _texts_of(item))
                if lengths:
                    kept.append({name: item[name] for name in ("type", "id", "phase") if item.get(name)})
                    kept[-1]["characters"] = lengths
            elif kind == "function_call":
                kept.append({name: item[name] for name in ("type", "id") if item.get(name)})
            elif kind == "reasoning" and not self._stored and not item.get("encrypted_content"):
                whole = False
            else:
                kept.append(item)
        own = any(item["type"] not in ("message", "function_call") or "phase" in item for item in kept)
        return kept if own and whole else []


def _parts_of(item: dict[str, Any]) -> list[dict[str, Any]]:
    return [part for part in item.get("content") or () if isinstance(part, dict)]


def _texts_of(item: dict[str, Any]) -> list[str]:
    return [text_of(part, "text") for part in _parts_of(item) if part.get("type") == "output_text"]


def _arguments(item: dict[str, Any]) -> str:
    arguments = item.get("arguments")
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {})


def read_usage(data: dict[str, Any]) -> Usage:
    """Token counts in the endpoint's form; what it leaves out is 0. Raises `Malformed` for what is no count."""
    into, out = data.get("input_tokens_details") or {}, data.get("output_tokens_details") or {}
    return Usage(
        input_tokens=count_of(data, "input_tokens"),
        output_tokens=count_of(data, "output_tokens"),
        cached_tokens=count_of(into, "cached_tokens"),
        reasoning_tokens=count_of(out, "reasoning_tokens"),
        cache_write_tokens=count_of(into, "cache_write_tokens"),
    )
