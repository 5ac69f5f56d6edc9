"""Streamed answers as a program sees it that iterates over a run: what it receives makes up the answer. No Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from understudy.cluster.client.follower import Follower
from understudy.cluster.client.run_handle import Run
from understudy.events import Event, ModelCallCompleted, ReasoningDelta, RunFinished, ToolCallDelta
from understudy.messages import Message, ToolCall
from understudy.protocol import Watched, packed
from understudy.streams import CALL, REASONING, TEXT, Part

IDS: dict[str, Any] = {"session_id": "s", "run_id": "r"}
TOOL_CALL, ANSWER = 5, 8
"""Where these messages are in the log."""


class Connection:
    """What the node service tells: a text or an event at a time, through the product's follower."""

    def __init__(self, answer: str, **more: Any) -> None:
        self.messages = [
            Message("tool", "of a tool", run_id="r", round=1, seq=TOOL_CALL),
            Message("assistant", answer, run_id="r", round=1, seq=ANSWER, **more),
        ]
        self.news: list[dict[str, Any]] = []
        self.follower = SimpleNamespace(follow=self.follow)

    def text(self, key: str, offset: int, text: str) -> None:
        """A watch tells of streamed text."""
        self.stream(key, Part(0, TEXT, offset, text))

    def stream(self, key: str, *parts: Part) -> None:
        """A watch tells of what has streamed."""
        self.news.append(packed(Watched(streams={"s": (key, list(parts))})))

    def event(self, event: Event) -> None:
        """A watch tells of an event."""
        self.news.append({"events": [event.to_wire()], "streams": {}, "runs": {}})

    @asynccontextmanager
    async def follow(self, _session_id: str, **_options: Any) -> AsyncIterator[Any]:
        nodes: Any = SimpleNamespace(home=self._home, call=self._call)
        follower = Follower(nodes)
        async with follower.follow("s", stream=True) as subscription:
            yield subscription
        await follower.close()

    async def _home(self, _session_id: str) -> str:
        return "node"

    async def _call(self, *_request: Any, timeout: float) -> dict[str, Any]:
        if not self.news:
            await asyncio.Event().wait()
        return self.news.pop(0)

    async def read(self, _kind: Any, what: str, _session_id: str, after: int, limit: int) -> list[Message]:
        assert what == "messages"
        return [message for message in self.messages if message.seq > after][:limit]


def completed(attempt: int, seq: int = ANSWER + 1) -> Event:
    return ModelCallCompleted(request_key=f"s/r/1/{attempt}", attempt=attempt, round=1, seq=seq, **IDS)


async def printed(connection: Connection) -> list[str]:
    """What a program prints, piece by piece, up to the run's end."""
    connection.event(RunFinished(status="completed", seq=20, **IDS))
    run = Run(connection, "s", "r", 0)  # type: ignore[arg-type]
    found = []
    async with asyncio.timeout(20):
        async for event in run._events():
            if isinstance(event, ToolCallDelta):
                found.append(f"{event.index} {event.tool}[{event.offset}] {event.arguments}")
            elif isinstance(event, ReasoningDelta):
                found.append(f"({event.offset}) {event.text}")
            elif event.type in ("text_delta", "stream_restarted"):
                found.append(getattr(event, "text", "RESTARTED"))
    return found


async def test_the_rest_of_an_answer_follows_what_has_streamed() -> None:
    """Given an answer that was committed before all its text had streamed, then the rest of it follows."""
    connection = Connection("Hello world")
    connection.text("s/r/1/1/0", 0, "Hello")
    connection.text("s/r/1/1/0", 5, " wor")
    connection.event(completed(1))
    assert await printed(connection) == ["Hello", " wor", "ld"]


async def test_the_answer_of_another_attempt_starts_over() -> None:
    """Given the text of an attempt that was lost, when the next one's answer is committed before any of its text
    had streamed, then what had streamed is void, and all of the answer follows, also if it begins alike."""
    for answer in ("Goodbye, friend", "Hello world"):
        connection = Connection(answer)
        connection.text("s/r/1/1/0", 0, "Hello wor")
        connection.event(completed(2))
        assert await printed(connection) == ["Hello wor", "RESTARTED", answer]


async def test_the_answer_of_another_try_starts_over() -> None:
    """Given the text of a try that the endpoint cut off, when the same attempt's next try is the answer, then the same
    holds; also if the answer has no text."""
    for answer in ("Goodbye, friend", ""):
        connection = Connection(answer)
        connection.text("s/r/1/1/0", 0, "Hello wor")
        connection.event(completed(1))
        assert await printed(connection) == ["Hello wor", "RESTARTED", *filter(None, [answer])]


async def test_a_try_that_starts_over_is_reported_as_such() -> None:
    """Given the text of a try, when that of another follows, then what had streamed is void."""
    connection = Connection("Goodbye, friend")
    connection.text("s/r/1/1/0", 0, "Hello")
    connection.text("s/r/1/2/0", 0, "Goodbye")
    connection.event(completed(2))
    assert await printed(connection) == ["Hello", "RESTARTED", "Goodbye", ", friend"]


async def test_an_answer_that_came_too_late_has_no_text() -> None:
    """Given an attempt whose answer came after another one's, right behind a tool's result, then neither that nor any
    streamed text that still comes is taken for its text."""
    connection = Connection("Hello world")
    connection.messages[0] = Message("tool", "of a tool", run_id="r", round=1, seq=ANSWER + 2)
    connection.messages.reverse()
    connection.event(completed(1))
    connection.event(completed(2, seq=ANSWER + 3))
    connection.text("s/r/1/2/0", 0, "Hello")
    assert await printed(connection) == ["Hello world"]


THOUGHT: dict[str, Any] = {
    "extra": {"provider": {"reasoning_content": "I look it up"}},
    "tool_calls": (ToolCall("r/1/0", "look", '{"at": 1}'), ToolCall("r/1/1", "tick", "")),
}


async def test_reasoning_and_tool_calls_stream_beside_the_text() -> None:
    """Given an answer that reasons, speaks and calls tools, when part of it streamed, then each part arrives by its own
    offsets, and the rest of each follows when it is committed; a call without arguments arrives once."""
    connection = Connection("So:", **THOUGHT)
    connection.stream("s/r/1/1/0", Part(0, REASONING, 0, "I look"))
    connection.stream("s/r/1/1/0", Part(0, REASONING, 4, "ok it up"), Part(1, TEXT, 0, "So"))
    connection.stream("s/r/1/1/0", Part(2, CALL, 0, '{"at', 0, "look"), Part(3, CALL, 0, "", 1, "tick"))
    connection.stream("s/r/1/1/0", Part(2, CALL, 4, '": ', 0, "look"))
    connection.event(completed(1))
    assert await printed(connection) == [
        "(0) I look", "(6)  it up", "So", '0 look[0] {"at', "1 tick[0] ", '0 look[4] ": ', ":", "0 look[7] 1}",
    ]  # fmt: skip


async def test_who_comes_late_gets_all_of_an_answer() -> None:
    """Given an answer of which nothing had streamed before it was committed, then all of it follows."""
    connection = Connection("So:", **THOUGHT)
    connection.event(completed(1))
    assert await printed(connection) == ["(0) I look it up", "So:", '0 look[0] {"at": 1}', "1 tick[0] "]


async def test_a_restart_voids_all_parts() -> None:
    """Given reasoning and a tool call of a try that was cut off, when the answer has others, or none, then what
    had streamed is void once, and all of the answer follows."""
    for more, last in ((THOUGHT, ["(0) I look it up", "So:", '0 look[0] {"at": 1}', "1 tick[0] "]), ({}, ["So:"])):
        for attempt in ("1/1", "2/0"):
            connection = Connection("So:", **more)
            connection.stream("s/r/1/1/0", Part(0, REASONING, 0, "I look"), Part(1, CALL, 0, "{", 0, "walk"))
            if attempt == "1/1":
                connection.stream(f"s/r/1/{attempt}")
            connection.event(completed(int(attempt[0])))
            assert await printed(connection) == ["(0) I look", "0 walk[0] {", "RESTARTED", *last]


async def test_reasoning_that_is_committed_under_two_names_arrives_once() -> None:
    """Given an endpoint that sends the reasoning twice, differently, then the rest is of the one that streamed."""
    connection = Connection("So:", extra={"provider": {"reasoning_content": "long thoughts", "reasoning": "short"}})
    connection.stream("s/r/1/1/0", Part(0, REASONING, 0, "sh"))
    connection.event(completed(1))
    assert await printed(connection) == ["(0) sh", "(2) ort", "So:"]
