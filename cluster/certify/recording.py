"""What the model is asked and answers: recorded once from the endpoint, replayed in every run after it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from understudy.errors import ModelError
from understudy.gateway.course import Course
from understudy.gateway.gateway import Gateway
from understudy.identifiers import digest
from understudy.json_text import from_json
from understudy.node.rounds import split_wait_key
from understudy.records import KeptResponse, ModelAnswer, ModelRequest
from understudy.streams import Piece

Round = tuple[str, int]
"""A session's run, by a name that is the same in every run of the agent (`label_of`), and the round."""

Call = tuple[str, str]
"""A session by its name, and its call (`call_key`)."""

FIRST_RUN, TASK = "certify", "task"
"""Ids of the run that is certified, and of what a sub-agent is given to do. A session's other runs are those that begin
when a sub-agent in the background has ended, and such as wakeups begin."""


@dataclass(frozen=True)
class Entry:
    """A message, without what is different in every run: session ids, the endpoint's ids of calls, times.

    Attributes:
        call: `round/index` of the call that a tool's result belongs to.
        tool: the tool that the result is of.
        calls: `(round/index, tool, arguments)` that an assistant's message asks for.
    """

    role: str
    text: str
    call: str = ""
    tool: str = ""
    calls: tuple[tuple[str, str, str], ...] = ()

    def lines(self) -> list[str]:
        """The entry for a person, and for a diff."""
        label = f"{self.tool} ({self.call})" if self.role == "tool" else self.role
        first, *rest = self.text.splitlines() or [""]
        found = [f"{label}: {first}".rstrip(), *(f"    {line}" for line in rest)] if self.text or not self.calls else []
        return found + [f"{label} calls {tool} ({key}) {arguments}" for key, tool, arguments in self.calls]


@dataclass(frozen=True)
class Asked:
    """A model call, without what is different in every run.

    Attributes:
        offered: hash of the model's name and the tools offered to it.
        session: the name of the one that asks.
    """

    entries: tuple[Entry, ...]
    offered: str
    session: str = ""


@dataclass(frozen=True)
class Recorded:
    """A model call and its answer."""

    asked: Asked
    answer: ModelAnswer


def call_key(call_id: str, names: dict[str, str]) -> str:
    """`round/index` of a call, behind its run if that is not the session's first one."""
    run_id, place = call_id.split("/", 1)
    return place if run_id in (FIRST_RUN, TASK) else f"{named(run_id, names)}: {place}"


def label_of(session: str, run_id: str, names: dict[str, str]) -> str:
    """A session's run: the session's name, with the run if it is not its first one."""
    return session if run_id in (FIRST_RUN, TASK) else f"{session}, {named(run_id, names)}"


def read_request(request: ModelRequest, names: dict[str, str], session: str = "") -> Asked:
    """A request as it compares with those of other runs.

    Its limit of output tokens is left out: a tree's budget lets it depend on the order in which sub-agents finish.
    """
    entries, places, round_number = list[Entry](), dict[str, tuple[str, str]](), 0
    for message in from_json(request.messages):
        text = named(text_of(message.get("content")), names)
        calls: list[tuple[str, str, str]] = []
        if message["role"] == "assistant":
            round_number += 1
            for index, call in enumerate(message.get("tool_calls") or ()):
                key, function = f"{round_number}/{index}", call["function"]
                places[call["id"]] = key, function["name"]
                calls.append((key, function["name"], named(function["arguments"], names)))
        key, tool = places.get(message.get("tool_call_id", ""), ("", ""))
        entries.append(Entry(message["role"], text, key, tool, tuple(calls)))
    offered = digest(request.model, json.dumps(request.tools, sort_keys=True))
    return Asked(tuple(entries), offered, session)


def text_of(content: Any) -> str:
    """A message's content as text; parts as JSON."""
    return content if isinstance(content, str) else json.dumps(content, sort_keys=True) if content else ""


def named(text: str, names: dict[str, str]) -> str:
    """The text with sessions called by their names instead of their ids."""
    for session_id, name in names.items():
        text = text.replace(session_id, name)
    return text


class WatchedGateway(Gateway):
    """The gateway of a run: what is asked is kept, and somebody may do something before it is answered.

    Attributes:
        names: of sessions by id, filled by the run.
        halt: called with the session's id, and what asks, while the call is in flight.
        asked: every call so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, str] = {}
        self.halt: Callable[[str, Round], Awaitable[None]] | None = None
        self.asked: dict[Round, Asked] = {}

    async def call(
        self,
        request: ModelRequest,
        on_delta: Callable[[Piece], None] | None = None,
        on_restart: Callable[[], None] | None = None,
        on_response: Callable[[KeptResponse | None], None] | None = None,
        tree: str = "",
        course: Course | None = None,
    ) -> ModelAnswer:
        session_id, run_id, round_number = split_wait_key(request.wait_key)
        session = self.names.get(session_id, session_id)
        place = label_of(session, run_id, self.names), round_number
        self.asked[place] = read_request(request, self.names, session)
        if self.halt is not None:
            await self.halt(session_id, place)
        return await self.answer(request, place)

    async def answer(self, request: ModelRequest, place: Round) -> ModelAnswer:
        """The answer of the endpoint, or a recorded one."""
        raise NotImplementedError


class Recorder(WatchedGateway):
    """Asks the endpoint, and keeps what it answered.

    Attributes:
        answers: by session and round.
    """

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[Round, ModelAnswer] = {}

    async def answer(self, request: ModelRequest, place: Round) -> ModelAnswer:
        answer = await super(WatchedGateway, self).call(request)
        self.answers[place] = answer
        return answer

    def recording(self) -> dict[Round, Recorded]:
        """The calls that were answered."""
        return {place: Recorded(self.asked[place], answer) for place, answer in self.answers.items()}


class Replayer(WatchedGateway):
    """Answers as the endpoint did at this place, also if it is asked something else: nobody pays a second time."""

    def __init__(self, recording: dict[Round, Recorded]) -> None:
        super().__init__()
        self._recording = recording

    def knows(self, name: str) -> bool:
        return True

    async def answer(self, request: ModelRequest, place: Round) -> ModelAnswer:
        recorded = self._recording.get(place)
        if recorded is None:
            raise ModelError(f"nothing is recorded for round {place[1]} of {place[0]}")
        return replace(recorded.answer, started_at=0, duration=0)
