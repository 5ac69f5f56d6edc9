"""Reading a chat completion as it arrives: server-sent events, and the answer that they add up to."""

from __future__ import annotations

import json
from typing import Any

from understudy.json_text import from_json
from understudy.messages import Usage, storable
from understudy.streams import CALL, REASONING, REASONING_FIELDS, TEXT, Piece

MAX_LINE = 16 * 1024 * 1024
"""Bytes of one line; an endpoint that sends more is not speaking the protocol."""

MOST_TOKENS = 10**12
"""In one answer: what counts more does not count tokens. Sums of such numbers fit every store."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventStream:
    """Incremental parser of a `text/event-stream`, as the HTML standard defines it.

    What it gives does not depend on how the bytes are cut. `event`, `id` and `retry` are ignored: what an event of a
    completion is, its data say, and a completion can't be resumed.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._first = True
        self._after_return = False
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[str]:
        """The data of the events that `chunk` completes. What the stream ends without completing is dropped.

        Raises:
            Malformed: a line is longer than `MAX_LINE`.
        """
        if self._after_return and chunk.startswith(b"\n"):
            chunk = chunk[1:]  # the second half of a line end that was cut in two
            self._after_return = False
        if not chunk:
            return []
        self._after_return = chunk.endswith(b"\r")
        whole = self._rest + chunk
        lines = whole.splitlines()
        self._rest = b"" if whole.endswith((b"\n", b"\r")) else lines.pop()
        if len(self._rest) > MAX_LINE:
            raise Malformed(f"a line of more than {MAX_LINE} bytes")
        return self._take(lines)

    def _take(self, lines: list[bytes]) -> list[str]:
        events = []
        for line in lines:
            if self._first:
                self._first = False
                line = line.removeprefix(_BYTE_ORDER_MARK)
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" ").decode("utf-8", "replace"))
            elif not line and self._data:
                events.append("\n".join(self._data))
                self._data = []
        return events


MAX_ANSWER = 64 << 20
"""Bytes of an answer as it arrives: a stream says a token in some 300 of them, so this is more than any model says."""


class Malformed(Exception):
    """What arrived is not the protocol; the message says why."""


class EndpointError(Exception):
    """The endpoint reported an error where an answer was due. `body` is the value of its `error` field."""

    def __init__(self, body: Any) -> None:
        super().__init__("the endpoint reported an error")
        self.body = body


class _Call:
    """A tool call under construction."""

    __slots__ = ("arguments", "extra", "identifier", "index", "name", "told")

    def __init__(self, index: int) -> None:
        self.index = index
        self.identifier = ""
        self.name = ""
        self.arguments: list[str] = []
        self.told = 0
        self.extra: dict[str, Any] = {}


class Completion:
    """The answer that the chunks of a stream, or one whole response, add up to.

    Attributes:
        extra: fields of the message beyond the protocol's core (`reasoning_content`, `refusal`, …), to go back with it;
            the same of tool calls under `tool_calls`, a list with one object per call.
        usage: None while the endpoint has not told.
        done: the endpoint said that the answer is complete.
    """

    def __init__(self) -> None:
        self.identifier = ""
        self.model = ""
        self.finish_reason = ""
        self.usage: Usage | None = None
        self.done = False
        self._text: list[str] = []
        self._calls: list[_Call] = []
        self._by_index: dict[int | None, _Call] = {}
        self._extra: dict[str, Any] = {}
        self._reasoning = ""

    def add(self, data: str) -> list[Piece]:
        """Take the data of one event, or a whole response; returns what it adds.

        Raises:
            Malformed: it is not a chat completion (chunk).
            EndpointError: it is an error report.
        """
        if data == "[DONE]":
            self.done = True
            return []
        try:
            chunk = from_json(data)
        except (ValueError, RecursionError) as error:
            raise Malformed(f"not JSON: {error}") from None
        if not isinstance(chunk, dict):
            raise Malformed("not a JSON object")
        if chunk.get("error"):
            raise EndpointError(chunk["error"])
        self.identifier = _text(chunk, "id") or self.identifier
        self.model = _text(chunk, "model") or self.model
        added: list[Piece] = []
        try:
            if chunk.get("usage"):
                self.usage = read_usage(chunk["usage"])
            for choice in chunk.get("choices") or ():
                if choice.get("index"):
                    continue  # only one was asked for
                self.finish_reason = _text(choice, "finish_reason") or self.finish_reason
                added += self._merge(choice.get("delta") or choice.get("message") or {})
        except (AttributeError, TypeError) as error:
            raise Malformed(f"not a chat completion: {error}") from None
        return added

    @property
    def complete(self) -> bool:
        """Whether the answer may end here; otherwise the stream was cut."""
        return self.done or bool(self.finish_reason)

    @property
    def content(self) -> str | None:
        return "".join(self._text) if self._text else None

    @property
    def tool_calls(self) -> tuple[tuple[str, str, str], ...]:
        """`(provider id, name, arguments)`, in order of appearance."""
        return tuple((call.identifier, call.name, "".join(call.arguments)) for call in self._calls)

    @property
    def extra(self) -> dict[str, Any] | None:
        extra = self._extra
        if any(call.extra for call in self._calls):
            extra = {**extra, "tool_calls": [call.extra for call in self._calls]}
        return extra or None

    def _merge(self, delta: dict[str, Any]) -> list[Piece]:
        added = []
        for name, value in delta.items():
            if value is None or name == "role":
                continue
            if name == "content":
                text = value if isinstance(value, str) else _text_of_parts(value)
                if text:
                    self._text.append(text)
                    added.append(Piece(TEXT, text))
            elif name == "tool_calls":
                for call in value:
                    added += self._merge_call(call)
            else:
                _accumulate(self._extra, name, value)
                if name in REASONING_FIELDS and isinstance(value, str) and value:
                    self._reasoning = self._reasoning or name
                    if name == self._reasoning:
                        added.append(Piece(REASONING, value))
        return added

    def _merge_call(self, delta: dict[str, Any]) -> list[Piece]:
        index, identifier = delta.get("index"), _text(delta, "id")
        call = self._by_index.get(index)
        # Some endpoints send no index, or 0 for every call: then only a new id tells a new call.
        if call is None or (identifier and call.identifier and identifier != call.identifier):
            call = self._by_index[index] = _Call(len(self._calls))
            self._calls.append(call)
        call.identifier = call.identifier or identifier
        function = delta.get("function") or {}
        call.name = call.name or _text(function, "name")
        arguments = function.get("arguments")
        if arguments:
            call.arguments.append(arguments if isinstance(arguments, str) else json.dumps(arguments))
        for name, value in delta.items():
            if name not in ("index", "id", "type", "function") and value is not None:
                _accumulate(call.extra, name, value)
        if not call.name:  # nobody could say of what these arguments are
            return []
        new, call.told = call.arguments[call.told :], len(call.arguments)
        return [Piece(CALL, "".join(new), call.index, call.name)]


def read_usage(data: dict[str, Any]) -> Usage:
    """Token counts in the endpoint's form; what it leaves out is 0. Raises `Malformed` for what is no count."""
    prompt_details = data.get("prompt_tokens_details") or {}
    completion_details = data.get("completion_tokens_details") or {}
    return Usage(
        input_tokens=_count(data, "prompt_tokens"),
        output_tokens=_count(data, "completion_tokens"),
        cached_tokens=_count(prompt_details, "cached_tokens"),
        reasoning_tokens=_count(completion_details, "reasoning_tokens"),
    )


def _text(data: dict[str, Any], name: str) -> str:
    """A field that is text, as it can be stored; empty where it is left out."""
    value = data.get(name)
    if value is not None and not isinstance(value, str):
        raise Malformed(f"{name} is no text: {value!r:.80}")
    return storable(value or "")


def _count(data: dict[str, Any], name: str) -> int:
    """A field that is a number of tokens; 0 where it is left out."""
    value = data.get(name)
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST_TOKENS:
        raise Malformed(f"{name} is no number of tokens: {value!r:.80}")
    return value


def _accumulate(target: dict[str, Any], name: str, value: Any) -> None:
    """Merge a streamed field: text and lists grow, anything else is replaced."""
    known = target.get(name)
    if isinstance(known, str) and isinstance(value, str):
        target[name] = known + value
    elif isinstance(known, list) and isinstance(value, list):
        target[name] = [*known, *value]
    elif value != "":
        target[name] = value


def _text_of_parts(parts: list[dict[str, Any]]) -> str:
    return "".join(part.get("text") or "" for part in parts if part.get("type") == "text")
