"""What tools report and what answers stream, as it must be: between start and result, once, in order, and whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from understudy.cluster.client.streaming import Streaming
from understudy.events import (
    CustomEvent,
    Event,
    ModelCallCompleted,
    ReasoningDelta,
    StreamRestarted,
    TextDelta,
    ToolCallDelta,
    ToolFinished,
    ToolProgress,
    ToolStarted,
)
from understudy.messages import Message
from understudy.streams import CALL, REASONING, REASONING_FIELDS, TEXT, Part

from .tools import POLICY_OF

if TYPE_CHECKING:
    from understudy.actors.tools import ToolContext


class Reported:
    """Compares what tools have reported with what is committed of it."""

    def __init__(self, violated: Callable[[str], None]) -> None:
        self._violated = violated
        self._emitted: dict[tuple[str, int], list[int]] = {}
        self._committed: dict[str, list[int]] = {}
        self._started: set[str] = set()
        self._ended: set[str] = set()
        self._count = 0

    def report(self, context: ToolContext, fraction: float) -> None:
        """A tool reports: its progress, and an event of its own."""
        self._count += 1
        number = self._count
        context.progress(fraction, context.call_id)
        context.emit("report", {"number": number})
        self._emitted.setdefault((context.call_key, context.epoch), []).append(number)

    def event(self, event: Event) -> None:
        """It is committed."""
        if isinstance(event, ToolStarted):
            self._started.add(f"{event.session_id}/{event.call_id}")
        elif isinstance(event, ToolProgress | CustomEvent):
            self._reported(event)
        elif isinstance(event, ToolFinished):
            key = f"{event.session_id}/{event.call_id}"
            self._ended.add(key)
            if event.outcome == "ok":
                missing = set(self._emitted.get((key, event.epoch), ())) - set(self._committed.get(key, ()))
                if missing:
                    self._violated(f"{key} has its result, and its events {sorted(missing)} are not in the log")

    def _reported(self, event: ToolProgress | CustomEvent) -> None:
        key = f"{event.session_id}/{event.call_id}"
        if key in self._ended:
            self._violated(f"{key} has its result, and reports {event.body()}")
        if POLICY_OF.get(event.tool) != "rerun" and key not in self._started:
            self._violated(f"{key} has not started, and reports {event.body()}")
        if isinstance(event, CustomEvent):
            committed, number = self._committed.setdefault(key, []), event.data["number"]
            if committed and number <= committed[-1]:
                self._violated(f"{key}: event {number} is in the log after {committed}")
            committed.append(number)

    def forget(self, session_ids: set[str]) -> None:
        """Sessions were removed."""
        for key in [key for key in self._committed if key.partition("/")[0] in session_ids]:
            del self._committed[key]
        for known in [known for known in self._emitted if known[0].partition("/")[0] in session_ids]:
            del self._emitted[known]
        for keys in (self._started, self._ended):
            keys -= {key for key in keys if key.partition("/")[0] in session_ids}


class Heard:
    """Puts together what a client receives of a session's answers, and compares it with what is committed."""

    def __init__(self, session_id: str, violated: Callable[[str], None]) -> None:
        self._session_id = session_id
        self._violated = violated
        self._runs: dict[str, Streaming] = {}
        self._parts: dict[str, dict[tuple[str, int], str]] = {}
        self.pieces = 0

    def stream(self, key: str, parts: list[Part]) -> None:
        """More of a try's answer has come."""
        self.pieces += len(parts)
        for event in self._of(key.split("/")[1]).pieces(key, parts):
            self._receive(event)

    def completed(self, event: ModelCallCompleted, message: Message) -> None:
        """The answer is committed."""
        for piece in self._of(event.run_id or "").rest(event, message):
            self._receive(piece)
        parts = self._parts.pop(event.request_key.rpartition("/")[0], {})
        extra = (message.extra or {}).get("provider") or {}
        thought = next((extra[name] for name in REASONING_FIELDS if isinstance(extra.get(name), str)), "")
        whole = {(TEXT, 0): message.text, (REASONING, 0): thought}
        whole |= {(CALL, index): call.arguments for index, call in enumerate(message.tool_calls)}
        if {part for part in parts if part[0] == CALL} != {part for part in whole if part[0] == CALL}:
            self._violated(f"{event.request_key}: a client received the tool calls {sorted(parts)}")
        for part, text in whole.items():
            if parts.get(part, "") != text:
                self._violated(f"{event.request_key}: a client received {parts.get(part)!r:.300}, not {text!r:.300}")

    def _of(self, run_id: str) -> Streaming:
        return self._runs.setdefault(run_id, Streaming(self._session_id, run_id))

    def _receive(self, event: Event) -> None:
        if isinstance(event, StreamRestarted):
            self._parts.pop(event.request_key.rpartition("/")[0], None)
        elif isinstance(event, TextDelta):
            self._add(event.request_key, (TEXT, 0), event.offset, event.text)
        elif isinstance(event, ReasoningDelta):
            self._add(event.request_key, (REASONING, 0), event.offset, event.text)
        elif isinstance(event, ToolCallDelta):
            self._add(event.request_key, (CALL, event.index), event.offset, event.arguments)

    def _add(self, request_key: str, part: tuple[str, int], offset: int, text: str) -> None:
        parts = self._parts.setdefault(request_key.rpartition("/")[0], {})
        if offset != len(parts.get(part, "")):
            self._violated(f"{request_key}: a piece of {part} begins at {offset}, behind {len(parts.get(part, ''))}")
        parts[part] = parts.get(part, "") + text
