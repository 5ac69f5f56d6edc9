"""What a run's model calls stream, as a follower of the run receives it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from understudy.events import (
    Event,
    ModelCallCompleted,
    ReasoningDelta,
    StreamRestarted,
    TextDelta,
    ToolCallDelta,
)
from understudy.messages import PROVIDER_DATA, Message
from understudy.streams import CALL, REASONING, REASONING_FIELDS, TEXT, Part, reasoning_of


@dataclass
class _Call:
    """What was streamed of a call: the key of a try (`session/run/round/attempt/try`), and its parts as far as they
    came, by kind and index; of tool calls the tool as well."""

    key: str = ""
    streamed: dict[tuple[str, int], tuple[str, str]] = field(default_factory=dict)
    answered: bool = False


class Streaming:
    """What a follower of a run has received of its answers, and what it receives next.

    Whatever is lost, tried again or answered elsewhere: the deltas of a call, since the last `StreamRestarted`, make up
    its text, its reasoning, and the arguments of its tool calls.
    """

    def __init__(self, session_id: str, run_id: str) -> None:
        self._session_id = session_id
        self._run_id = run_id
        self._calls: dict[str, _Call] = {}

    def pieces(self, key: str, parts: list[Part]) -> Iterator[Event]:
        """What is new of a try's answer."""
        request_key = key.rpartition("/")[0]
        if request_key.split("/")[1] != self._run_id:
            return
        call = self._call(request_key)
        if call.answered:  # its service has not let go of it yet, or has not heard of the answer
            return
        if call.key != key:
            yield from self._restart(call, request_key)
            call.key = key
        for part in parts:
            before = call.streamed.get((part.kind, part.index), ("", ""))[1][: part.offset]
            call.streamed[part.kind, part.index] = part.name, before + part.text
            yield self._delta(request_key, part)

    def rest(self, event: ModelCallCompleted, message: Message) -> Iterator[Event]:
        """What of an answer was committed before it was streamed to here; what was streamed may be of another try."""
        call = self._call(event.request_key)
        whole = _parts_of(message, call.streamed.get((REASONING, 0), ("", ""))[1])
        if call.key.rpartition("/")[0] != event.request_key or not _begins(whole, call.streamed):
            yield from self._restart(call, event.request_key)
        streamed, call.streamed, call.answered = call.streamed, {}, True
        for place, ((kind, index), (name, text)) in enumerate(whole.items()):
            offset = len(streamed.get((kind, index), ("", ""))[1])
            if text[offset:] or (kind == CALL and (kind, index) not in streamed):
                yield self._delta(event.request_key, Part(place, kind, offset, text[offset:], index, name))

    def _call(self, request_key: str) -> _Call:
        return self._calls.setdefault(request_key.rpartition("/")[0], _Call())

    def _restart(self, call: _Call, request_key: str) -> Iterator[Event]:
        if call.streamed:
            call.streamed = {}
            yield StreamRestarted(request_key=request_key, session_id=self._session_id, run_id=self._run_id)

    def _delta(self, request_key: str, part: Part) -> Event:
        whose: dict[str, Any] = {"request_key": request_key, "session_id": self._session_id, "run_id": self._run_id}
        if part.kind == CALL:
            return ToolCallDelta(
                index=part.index, tool=part.name, offset=part.offset, arguments=part.text, **whose
            )  # fmt: skip
        kind = ReasoningDelta if part.kind == REASONING else TextDelta
        return kind(offset=part.offset, text=part.text, **whose)


def _parts_of(message: Message, reasoning: str) -> dict[tuple[str, int], tuple[str, str]]:
    """What a committed answer streams as. Of an endpoint that sends the reasoning twice, one was streamed: the one that
    begins with what came of it."""
    extra = (message.extra or {}).get("provider") or {}
    thought = [extra[name] for name in REASONING_FIELDS if isinstance(extra.get(name), str)]
    found = {}
    if PROVIDER_DATA in extra:
        thought.append(reasoning_of(extra[PROVIDER_DATA]) or reasoning)
    if any(thought):
        found[REASONING, 0] = "", next((text for text in thought if text.startswith(reasoning)), thought[0])
    found[TEXT, 0] = "", message.text
    for index, call in enumerate(message.tool_calls):
        found[CALL, index] = call.name, call.arguments
    return found


def _begins(whole: dict[tuple[str, int], tuple[str, str]], streamed: dict[tuple[str, int], tuple[str, str]]) -> bool:
    """Whether all that was streamed is a beginning of the answer."""
    return all(
        part in whole and whole[part][0] == name and whole[part][1].startswith(text)
        for part, (name, text) in streamed.items()
    )
