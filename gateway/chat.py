"""Chat completions: the protocol in which sessions have their messages, so requests are sent without being read."""

from __future__ import annotations

import json
from typing import Any

from understudy.config import ModelProfile
from understudy.json_text import to_json
from understudy.messages import Usage
from understudy.records import ModelRequest
from understudy.streams import CALL, REASONING, REASONING_FIELDS, TEXT, Piece

from .adapters import EndpointError, Malformed, count_of, object_of, text_of
from .provider_data import without_provider_data


class ChatCompletions:
    """An `Adapter` for OpenAI's chat completions, and whatever is compatible with them."""

    provider = "openai"
    described = "chat completion"
    path = "chat/completions"
    keeps = False

    def headers(self, _profile: ModelProfile) -> None:
        """Those of the `openai` package."""

    def content(self, request: ModelRequest) -> bytes:
        body: dict[str, Any] = {
            **request.parameters,
            "model": request.model,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.tools:
            body["tools"] = request.tools
        messages = without_provider_data(request.messages)
        return b'%b,"messages":%b}' % (to_json(body).encode()[:-1], messages)

    def begin(self, _request: ModelRequest, _response_id: str = "") -> Completion:
        return Completion()


class _Call:
    """A tool call under construction."""

    __slots__ = ("arguments", "delivered", "extra", "identifier", "index", "name")

    def __init__(self, index: int) -> None:
        self.index = index
        self.identifier = ""
        self.name = ""
        self.arguments: list[str] = []
        self.delivered = 0
        self.extra: dict[str, Any] = {}


class Completion:
    """The answer that the chunks of a stream, or one whole response, add up to.

    Attributes:
        extra: fields of the message beyond the protocol's core (`reasoning_content`, `refusal`, …), to go back with it;
            the same of tool calls under `tool_calls`, a list with one object per call.
        usage: None until the endpoint has reported it.
        done: the endpoint said that the answer is complete.
    """

    continuation = ""
    progress = 0
    pending = False

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
        chunk = object_of(data)
        if chunk.get("error"):
            raise EndpointError(chunk["error"])
        self.identifier = text_of(chunk, "id") or self.identifier
        self.model = text_of(chunk, "model") or self.model
        added: list[Piece] = []
        try:
            if chunk.get("usage"):
                self.usage = read_usage(chunk["usage"])
            for choice in chunk.get("choices") or ():
                if choice.get("index"):
                    continue  # only one was asked for
                self.finish_reason = text_of(choice, "finish_reason") or self.finish_reason
                added += self._merge(choice.get("delta") or choice.get("message") or {})
        except (AttributeError, TypeError) as error:
            raise Malformed(f"not a chat completion: {error}") from None
        return added

    def reroute(self, _status: int | None) -> bool:
        """There is no other way to a completion than to ask for it."""
        return False

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
        index, identifier = delta.get("index"), text_of(delta, "id")
        call = self._by_index.get(index)
        # Some endpoints send no index, or 0 for every call: then only a new id tells a new call.
        if call is None or (identifier and call.identifier and identifier != call.identifier):
            call = self._by_index[index] = _Call(len(self._calls))
            self._calls.append(call)
        call.identifier = call.identifier or identifier
        function = delta.get("function") or {}
        call.name = call.name or text_of(function, "name")
        arguments = function.get("arguments")
        if arguments:
            call.arguments.append(arguments if isinstance(arguments, str) else json.dumps(arguments))
        for name, value in delta.items():
            if name not in ("index", "id", "type", "function") and value is not None:
                _accumulate(call.extra, name, value)
        if not call.name:  # nobody could say of what these arguments are
            return []
        new, call.delivered = call.arguments[call.delivered :], len(call.arguments)
        return [Piece(CALL, "".join(new), call.index, call.name)]


def read_usage(data: dict[str, Any]) -> Usage:
    """Token counts in the endpoint's form; what it leaves out is 0. Raises `Malformed` for what is no count."""
    prompt_details = data.get("prompt_tokens_details") or {}
    completion_details = data.get("completion_tokens_details") or {}
    return Usage(
        input_tokens=count_of(data, "prompt_tokens"),
        output_tokens=count_of(data, "completion_tokens"),
        cached_tokens=count_of(prompt_details, "cached_tokens"),
        reasoning_tokens=count_of(completion_details, "reasoning_tokens"),
    )


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
