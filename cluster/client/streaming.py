"""The text that a run's model calls stream, as one who follows the run is told it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from understudy.events import Event, ModelCallCompleted, StreamRestarted, TextDelta
from understudy.messages import Message


@dataclass
class _Call:
    """What was told of a call: the key of a try (`session/run/round/attempt/try`), and its text as far as it came."""

    key: str = ""
    told: str = ""
    answered: bool = False


class Streaming:
    """What a follower of a run was told of its answers, and what it is to be told next.

    Whatever is lost, tried again or answered elsewhere: the deltas of a call, since the last `StreamRestarted`, make up
    its text.
    """

    def __init__(self, session_id: str, run_id: str) -> None:
        self._session_id = session_id
        self._run_id = run_id
        self._calls: dict[str, _Call] = {}

    def piece(self, key: str, offset: int, text: str) -> Iterator[Event]:
        """Part of a try's text."""
        request_key = key.rpartition("/")[0]
        if request_key.split("/")[1] != self._run_id:
            return
        call = self._call(request_key)
        if call.answered:  # its service has not let go of it yet, or has not heard of the answer
            return
        if call.key != key:
            yield from self._restart(call, request_key)
            call.key = key
        if text:
            call.told = call.told[:offset] + text
            yield self._delta(request_key, offset, text)

    def rest(self, event: ModelCallCompleted, message: Message) -> Iterator[Event]:
        """What of an answer was committed before it was streamed to here; what was streamed may be of another try."""
        call = self._call(event.request_key)
        if call.key.rpartition("/")[0] != event.request_key or not message.text.startswith(call.told):
            yield from self._restart(call, event.request_key)
        offset, call.told, call.answered = len(call.told), "", True
        if message.text[offset:]:
            yield self._delta(event.request_key, offset, message.text[offset:])

    def _call(self, request_key: str) -> _Call:
        return self._calls.setdefault(request_key.rpartition("/")[0], _Call())

    def _restart(self, call: _Call, request_key: str) -> Iterator[Event]:
        if call.told:
            call.told = ""
            yield StreamRestarted(request_key=request_key, session_id=self._session_id, run_id=self._run_id)

    def _delta(self, request_key: str, offset: int, text: str) -> Event:
        return TextDelta(
            request_key=request_key, offset=offset, text=text, session_id=self._session_id, run_id=self._run_id
        )
