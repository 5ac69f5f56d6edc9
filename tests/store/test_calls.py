"""Model calls in flight: each ends in a commit, whatever its answer is like, and no answer makes a session unusable."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from understudy.actors.asking import read_arguments
from understudy.actors.repeats import repeats
from understudy.actors.spawning import read_spawn
from understudy.actors.window import readable
from understudy.messages import Message, ToolCall, Usage, encodable, storable
from understudy.node.calls import Call, Calls
from understudy.prices import Price
from understudy.records import CallState, ModelAnswer, ModelRequest
from understudy.store import queries

from .test_store import Store, opened

DEEP = "[" * 5_000
"""JSON that nests deeper than Python follows, as a model writes that repeats itself."""


class OneAnswer:
    """A gateway that has this answer for everybody."""

    def __init__(self, answer: ModelAnswer, price: Any = None) -> None:
        self._answer, self._price = answer, price

    def knows(self, _profile: str) -> bool:
        return True

    def price(self, _profile: str, _model: str) -> Any:
        return self._price

    async def call(self, *_arguments: Any) -> ModelAnswer:
        return self._answer


class NoAnswer(OneAnswer):
    """A gateway whose endpoint never answers."""

    def __init__(self) -> None:
        super().__init__(ModelAnswer())

    async def call(self, *_arguments: Any) -> ModelAnswer:
        await asyncio.Event().wait()
        raise AssertionError


def call(run_id: str = "r", incarnation: int = 1) -> Call:
    request = ModelRequest(wait_key=f"s/{run_id}/1", profile="p", model="m", messages=[])
    return Call("s", incarnation, run_id, 1, 1, "", "s", request)


async def nothing(*_arguments: Any) -> None:
    """Nobody listens, and nothing must be prepared."""


@pytest.mark.parametrize("error", [TypeError("no integer"), RecursionError("too deep")])
async def test_an_answer_that_can_not_be_committed(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """Given an answer that the store can't take, then the session is told, the tokens are counted, and nothing is in
    flight any more: else it would be asked for again, for ever."""
    committed: list[ModelAnswer] = []

    async def answered(_call: Call, answer: ModelAnswer) -> None:
        if answer.content is not None:
            raise error
        committed.append(answer)

    usage = Usage(input_tokens=10, output_tokens=5)
    calls = Calls(OneAnswer(ModelAnswer(content="hi", usage=usage)), answered, lambda _: None, nothing)  # type: ignore[arg-type]
    made = call()
    calls.start(made)
    assert made.task is not None
    await asyncio.wait_for(made.task, 10)
    [answer] = committed
    assert answer.error is not None
    assert str(error) in answer.error["message"]
    assert (answer.usage, len(calls), calls.of_session("s")) == (usage, 0, None)
    assert "can't be stored" in caplog.text


async def test_one_that_can_not_be_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """Given a store that takes nothing at all, then the call is not taken for one in flight."""

    async def answered(_call: Call, _answer: ModelAnswer) -> None:
        raise TypeError("nothing goes")

    calls = Calls(OneAnswer(ModelAnswer(content="hi")), answered, lambda _: None, nothing)  # type: ignore[arg-type]
    made = call()
    calls.start(made)
    assert made.task is not None
    with pytest.raises(TypeError, match="nothing goes"):
        await asyncio.wait_for(made.task, 10)
    assert (len(calls), calls.of_session("s")) == (0, None)


async def test_an_older_call_of_a_session_can_be_aborted() -> None:
    """Given a session with a call in flight of a run that has ended since, one of the current run, and one of the same
    name that a removed session of its id had, when one of them is aborted, then that one ends, and the others go on."""
    ended: list[tuple[int, str]] = []

    async def answered(made: Call, _answer: ModelAnswer) -> None:
        ended.append((made.incarnation, made.run_id))

    calls = Calls(NoAnswer(), answered, lambda _: None, nothing)  # type: ignore[arg-type]
    removed, older, current = call("r", 1), call("q", 2), call("r", 2)
    for made in (removed, older, current):
        calls.start(made)
    await asyncio.sleep(0)
    assert calls.of_session("s") is current
    for made in (removed, older):
        calls.abort("s", made.incarnation, made.run_id)
        assert made.task is not None
        done, _ = await asyncio.wait([made.task], timeout=10)  # which cancels nothing itself
        assert done
    assert ended == [(1, "r"), (2, "q")]
    assert calls.in_flight() == [current]
    assert calls.find(2, "s/r/1") is calls.of_session("s") is current
    await calls.close()


async def test_a_session_does_not_wait_for_an_older_call() -> None:
    """Given a session with a call in flight of a run that has ended, when its latest call is answered, then it has none
    that it could wait for."""

    async def answered(_made: Call, _answer: ModelAnswer) -> None:
        return None

    calls = Calls(NoAnswer(), answered, lambda _: None, nothing)  # type: ignore[arg-type]
    older, current = call("q"), call("r")
    for made in (older, current):
        calls.start(made)
    calls.forget(current)
    assert current.task is not None
    current.task.cancel()
    assert (calls.of_session("s"), calls.sessions(), calls.stream("s")) == (None, set(), None)
    assert calls.in_flight() == [older]
    await calls.close()


async def test_an_abort_does_not_lose_an_answer_that_is_being_committed() -> None:
    """Given an answer that has come whole and is being committed, when the call is aborted, then that commit goes on:
    the answer was paid for."""
    begun, may_end, committed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def answered(_call: Call, _answer: ModelAnswer) -> None:
        begun.set()
        await may_end.wait()
        committed.set()

    calls = Calls(OneAnswer(ModelAnswer(content="hi")), answered, lambda _: None, nothing)  # type: ignore[arg-type]
    made = call()
    calls.start(made)
    await begun.wait()
    calls.abort("s", 1, "r")
    assert made.task is not None
    await asyncio.wait([made.task], timeout=10)
    may_end.set()
    await asyncio.wait_for(committed.wait(), 10)


@pytest.mark.parametrize("cached", [0, 10, 25])
def test_an_answer_never_costs_less_than_nothing(cached: int) -> None:
    """Also where an endpoint counts more tokens from its cache than it was sent."""
    cost = Price(1_000_000, 500_000, 2_000_000).cost(Usage(input_tokens=10, output_tokens=5, cached_tokens=cached))
    assert cost >= 10


def test_arguments_that_nest_too_deeply() -> None:
    """They are a mistake of the model's like any other: it reads so, and history can be sent."""
    assert json.loads(readable(DEEP)) == {"unreadable": DEEP}
    assert "not readable JSON" in str(read_arguments(CallState("c", "requested", "t", DEEP, "p", 0)))
    assert "not readable JSON" in str(read_spawn(DEEP, {})[0])
    calls = (ToolCall("r/1/0", "t", DEEP),)
    assert repeats([Message("assistant", None, calls, run_id="r", round=1)], "r/1/0") == 1


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("whole \U0001f600", "whole \U0001f600"),
        ("in two pieces \ud83d" + "\ude00", "in two pieces \U0001f600"),
        ("half \ud83d only", "half ? only"),
        ("\ude00\ud83d", "??"),
        ("é", "é"),
    ],
)
def test_halves_of_characters(given: str, kept: str) -> None:
    """What an endpoint cuts in the middle of a character is put together; a half alone can't be encoded."""
    assert (storable(given), encodable(given)) == (kept, kept)
    assert encodable({given: [given, {"a": given}]}) == {kept: [kept, {"a": kept}]}


def test_numbers_that_are_none() -> None:
    """JSON has no NaN: with one in it, a message could never be sent again."""
    assert encodable({"score": float("nan"), "all": [float("inf"), 1.5, 2, True, None]}) == {
        "score": None, "all": [None, 1.5, 2, True, None],
    }  # fmt: skip


async def test_what_goes_back_to_the_provider_can_be_sent(store: str) -> None:
    """Given fields of a message that nobody can encode, when it is stored, then the next request can be made of it."""
    async with opened(store) as db:
        await db.asking()
        await db.answer("s", extra={"reasoning_content": "\ud83d" + "\ude00", "score": float("nan")})
        assert provider_data(db) == {"reasoning_content": "\U0001f600", "score": None}


def provider_data(db: Store) -> Any:
    [message] = [m for m in db.read(queries.messages, "s") if m["role"] == "assistant"]
    return message["extra"]["provider"]
