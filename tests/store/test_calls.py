"""Model calls in flight: each ends in a commit, whatever its answer is like, and no answer makes a session unusable."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from understudy.actors.asking import read_arguments
from understudy.actors.conversation import readable
from understudy.actors.repeats import repeats
from understudy.config import ModelProfile
from understudy.errors import ServiceGone, StoreError
from understudy.messages import Message, ToolCall, Usage, encodable, storable
from understudy.node.calls import Call, Calls
from understudy.node.verdicts import Verdicts
from understudy.prices import Price
from understudy.profiles import Profiles
from understudy.protocol import Attached, CallOrigin, Growth
from understudy.records import CallState, KeptResponse, ModelAnswer, ModelRequest
from understudy.store.reads import queries
from understudy.streams import CALL, REASONING, TEXT, Part

from .test_store import Store, opened

DEEP = "[" * 5_000
"""JSON that nests deeper than Python follows, as a model writes that repeats itself."""


class Answering:
    """A gateway that has this answer for everybody; without one, its endpoint never answers.

    Attributes:
        released: keys of the calls that it was asked to forget.
        lives: how often another one has taken its place.
    """

    def __init__(self, answer: ModelAnswer | None = None) -> None:
        self._answer = answer
        self.held: list[CallOrigin] = []
        self.asked: list[CallOrigin] = []
        self.released: list[str] = []
        self.lives = 1
        self._attachments = 0
        self._ended = asyncio.Event()

    def die(self) -> None:
        """Another one takes its place."""
        self.lives += 1
        self._ended.set()
        self._ended = asyncio.Event()

    async def attach(self, _service: str, _profiles: list[ModelProfile]) -> Attached:
        self._attachments += 1
        return Attached(f"gateway {self.lives}", str(self._attachments), 1, list(self.held))

    async def call(self, number: str, origin: CallOrigin, _request: ModelRequest | None) -> ModelAnswer:
        if number != str(self._attachments):
            raise ServiceGone("another attachment")
        self.asked.append(origin)
        if self._answer is None:
            await self._ended.wait()
            raise ServiceGone("it died")
        return self._answer

    async def abort(self, number: str, key: str) -> None:
        raise AssertionError

    async def release(self, _number: str, keys: list[str]) -> None:
        self.released += keys

    async def heard(self, number: str) -> None:
        """It is well."""


class Aborting(Answering):
    """A gateway whose endpoint never answers; what is aborted has this answer."""

    def __init__(self, answer: ModelAnswer) -> None:
        super().__init__()
        self._aborted: dict[str, asyncio.Event] = {}
        self._partial = answer

    async def call(self, _number: str, origin: CallOrigin, _request: ModelRequest | None) -> ModelAnswer:
        await self._aborted.setdefault(origin.key, asyncio.Event()).wait()
        return self._partial

    async def abort(self, _number: str, key: str) -> None:
        self._aborted.setdefault(key, asyncio.Event()).set()  # the call may be on its way


def call(run_id: str = "r", incarnation: int = 1, attempt: int = 1) -> Call:
    request = ModelRequest(wait_key=f"s/{run_id}/1", profile="p", model="m", messages=b"[]")
    return Call(CallOrigin("s", incarnation, run_id, 1, attempt, "", "s", "p", "m"), request)


async def nothing(*_arguments: Any) -> None:
    """Nothing follows."""


def calls_of(gateway: Any, answered: Any, lost: Any = nothing) -> Calls:
    """Calls at this gateway, which nobody follows."""
    return Calls(
        gateway, "node", Profiles(), answered=answered, identified=nothing, lost=lost, grown=lambda _: None,
        followed=lambda _: False, verdicts=Verdicts(), attended=lambda _: False, unattended=nothing,
    )  # fmt: skip


async def ended(made: Call) -> None:
    """Wait for the end of a call, without a cancellation."""
    assert made.task is not None
    done, _ = await asyncio.wait([made.task], timeout=10)
    assert done


@pytest.mark.parametrize("error", [TypeError("no integer"), RecursionError("too deep")])
async def test_an_answer_that_can_not_be_committed(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """Given an answer that the store can't take, then the session gets an error, the tokens are counted, and nothing
    is in flight any more: else it would be asked for again, for ever."""
    committed: list[ModelAnswer] = []

    async def answered(_call: Call, answer: ModelAnswer) -> None:
        if answer.content is not None:
            raise error
        committed.append(answer)

    usage = Usage(input_tokens=10, output_tokens=5)
    calls = calls_of(Answering(ModelAnswer(content="hi", usage=usage)), answered)
    made = call()
    calls.start(made)
    await ended(made)
    [answer] = committed
    assert answer.error is not None
    assert str(error) in answer.error["message"]
    assert (answer.usage, len(calls), calls.of_session("s")) == (usage, 0, None)
    assert "can't be stored" in caplog.text
    await calls.close()


async def test_one_whose_failure_can_not_be_committed_either(caplog: pytest.LogCaptureFixture) -> None:
    """Given a store that takes nothing at all, then the call is not taken for one in flight."""

    async def answered(_call: Call, _answer: ModelAnswer) -> None:
        raise TypeError("nothing goes")

    calls = calls_of(Answering(ModelAnswer(content="hi")), answered)
    made = call()
    calls.start(made)
    assert made.task is not None
    with pytest.raises(TypeError, match="nothing goes"):
        await asyncio.wait_for(made.task, 10)
    assert (len(calls), calls.of_session("s")) == (0, None)
    await calls.close()


async def test_an_older_call_of_a_session_can_be_aborted() -> None:
    """Given a session with a call in flight of a run that has ended since, one of the current run, and one of the same
    name that a removed session of its id had, when one of them is aborted, then that one ends, and the others go on."""
    over: list[tuple[int, str]] = []

    async def answered(made: Call, _answer: ModelAnswer) -> None:
        over.append((made.origin.incarnation, made.origin.run_id))

    calls = calls_of(Aborting(ModelAnswer(content="so far")), answered)
    removed, older, current = call("r", 1), call("q", 2), call("r", 2)
    for made in (removed, older, current):
        calls.start(made)
    await asyncio.sleep(0.01)
    assert calls.of_session("s") is current
    for made in (removed, older):
        calls.abort("s", made.origin.incarnation, made.origin.run_id)
        await ended(made)
    assert over == [(1, "r"), (2, "q")]
    assert calls.in_flight() == [current]
    assert calls.find(2, "s/r/1") is calls.of_session("s") is current
    await calls.close()


async def test_a_session_does_not_wait_for_an_older_call() -> None:
    """Given a session with a call in flight of a run that has ended, when its latest call is answered, then it has none
    that it could wait for."""
    calls = calls_of(Answering(), nothing)
    older, current = call("q"), call("r")
    for made in (older, current):
        calls.start(made)
    calls.forget(current)
    assert current.task is not None
    current.task.cancel()
    assert (calls.of_session("s"), calls.sessions(), calls.stream("s")) == (None, set(), None)
    assert calls.in_flight() == [older]
    await calls.close()


@pytest.mark.parametrize("end", [lambda calls: calls.abort("s", 1, "r"), lambda calls: calls.drop("s")])
async def test_the_end_of_a_call_does_not_lose_an_answer_that_is_being_committed(end: Callable[[Calls], None]) -> None:
    """Given an answer that has come whole and is being committed, when the call is aborted, or its session shall be
    answered elsewhere, then that commit goes on: the answer was paid for."""
    begun, may_end, committed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def answered(_call: Call, _answer: ModelAnswer) -> None:
        begun.set()
        await may_end.wait()
        committed.set()

    gateway = Aborting(ModelAnswer(content="hi"))
    calls = calls_of(gateway, answered)
    made = call()
    calls.start(made)
    await asyncio.sleep(0.01)
    await gateway.abort("", made.origin.key)
    await begun.wait()
    end(calls)
    await asyncio.sleep(0.01)
    may_end.set()
    await asyncio.wait_for(committed.wait(), 10)
    await calls.close()


async def test_a_call_that_no_gateway_has_yet_is_aborted_without_one() -> None:
    """Given no gateway, when a call is aborted, then it ends at once, and no gateway ever hears of it."""
    answers: list[ModelAnswer] = []

    class Away(Answering):
        async def attach(self, _service: str, _profiles: list[ModelProfile]) -> Attached:
            raise ServiceGone("it is starting")

    async def answered(_call: Call, answer: ModelAnswer) -> None:
        answers.append(answer)

    gateway = Away()
    calls = calls_of(gateway, answered)
    made = call()
    calls.start(made)
    await asyncio.sleep(0.01)
    calls.abort("s", 1, "r")
    await ended(made)
    assert [answer.error and answer.error["code"] for answer in answers] == ["aborted"]
    assert gateway.asked == []
    await calls.close()


async def test_a_call_is_lost_with_its_gateway() -> None:
    """Given a call that a gateway has, when another one takes its place, then the call is not made there: it may have
    been paid for, so it needs another key. What nobody had yet goes to the new one."""
    lost: list[Call] = []

    async def note(made: Call) -> None:
        lost.append(made)

    gateway = Answering()
    calls = calls_of(gateway, nothing, note)
    made = call()
    calls.start(made)
    await asyncio.sleep(0.01)
    gateway.die()
    await ended(made)
    assert (lost, gateway.asked, calls.of_session("s")) == ([made], [made.origin], None)
    again = call(attempt=2)
    calls.start(again)
    await asyncio.sleep(0.01)
    assert gateway.asked == [made.origin, again.origin]
    await calls.close()


async def test_what_a_gateway_has_for_a_service_that_died(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a gateway that holds a call, when a new service attaches to it, then the answer is committed as if it had
    asked itself, and the gateway may forget it. When it attaches again, it wants nothing that it does not know."""
    monkeypatch.setattr("understudy.node.calls.RELEASE_SECONDS", 0.0)
    committed: list[tuple[CallOrigin, str | None]] = []

    async def answered(made: Call, answer: ModelAnswer) -> None:
        committed.append((made.origin, answer.content))

    gateway = Answering(ModelAnswer(content="kept"))
    held, stray = call("r").origin, call("q").origin
    gateway.held = [held]
    calls = calls_of(gateway, answered)
    await calls.link.start()
    found = calls.of_session("s")
    assert found is not None
    await ended(found)
    await asyncio.sleep(0.01)
    assert committed == [(held, "kept")]
    assert gateway.released == [held.key]
    gateway.held = [stray]
    attached = await calls.link.attached()
    calls.link.lost(attached)
    await calls.link.attached()
    await asyncio.sleep(0.01)
    assert gateway.released == [held.key, stray.key]
    assert committed == [(held, "kept")]
    await calls.close()


async def test_of_two_attempts_the_latest_is_taken_over() -> None:
    """Given a gateway that has an attempt still that nobody waits for, and the next one, when a service attaches, then
    it follows the next one, and lets the first go."""
    gateway = Answering()
    earlier, latest = call(attempt=1).origin, call(attempt=2).origin
    gateway.held = [earlier, latest]
    calls = calls_of(gateway, nothing)
    await calls.link.start()
    found = calls.of_session("s")
    assert found is not None
    assert found.origin == latest
    async with asyncio.timeout(10):
        while True:
            if gateway.released:
                break
            await asyncio.sleep(0.005)
    assert gateway.released == [earlier.key]
    await calls.close()


async def test_a_call_that_the_gateway_does_not_have_is_lost() -> None:
    """Given a call that was taken over, when the gateway turns out not to have it, then it is lost, and made again as
    the next attempt: nobody waits for it for ever."""
    lost: asyncio.Future[Call] = asyncio.get_running_loop().create_future()

    class Forgetful(Answering):
        async def call(self, *_arguments: Any) -> ModelAnswer | None:  # type: ignore[override]
            return None

    async def note(made: Call) -> None:
        lost.set_result(made)

    gateway = Forgetful()
    gateway.held = [call().origin]
    calls = calls_of(gateway, nothing, note)
    await calls.link.start()
    assert (await asyncio.wait_for(lost, 10)).origin == call().origin
    assert calls.of_session("s") is None
    await calls.close()


@pytest.mark.parametrize("cached", [0, 10, 25])
def test_an_answer_never_costs_less_than_nothing(cached: int) -> None:
    """Also where an endpoint counts more tokens from its cache than it was sent."""
    cost = Price(1_000_000, 500_000, 2_000_000).cost(Usage(input_tokens=10, output_tokens=5, cached_tokens=cached))
    assert cost >= 10


def test_arguments_that_nest_too_deeply() -> None:
    """They are a mistake of the model's like any other: it reads so, and history can be sent."""
    assert json.loads(readable(DEEP)) == {"unreadable": DEEP}
    assert "not readable JSON" in str(read_arguments(CallState("c", "requested", "t", DEEP, "p", 0)))
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
    [message] = [m for m in db.read(queries.messages, "s") if m.role == "assistant"]
    return message.extra["provider"]


class Streaming(Answering):
    """A gateway whose endpoint never answers, and says these things at a time."""

    def __init__(self, *growths: Growth) -> None:
        super().__init__()
        self._growths = list(growths)
        self.had: list[tuple[int, list[int]]] = []

    async def growth(self, _number: str, _key: str, restarts: int, lengths: list[int]) -> Growth:
        self.had.append((restarts, list(lengths)))
        return self._growths.pop(0)


async def test_an_answer_is_read_as_it_grows() -> None:
    """Given a call that is followed, then what comes of its answer is put together, each time from where it was; when a
    new try begins nothing of the one before is kept, and it has another key."""
    first = Growth(0, [Part(0, REASONING, 0, "I "), Part(1, CALL, 0, "", 0, "f")])
    second = Growth(0, [Part(0, REASONING, 2, "see"), Part(1, CALL, 0, "{", 0, "f")])
    gateway = Streaming(first, second, Growth(1, [Part(0, TEXT, 0, "Hi")], ended=True))
    seen, over = list[Any](), asyncio.Event()

    def grown(session_id: str) -> None:
        found = calls.stream(session_id)
        assert found is not None
        key, parts = found
        seen.append((key, parts.after([])))
        if len(seen) == 3:
            over.set()

    calls = Calls(
        gateway, "node", Profiles(), answered=nothing, identified=nothing, lost=nothing, grown=grown,
        followed=lambda _: True, verdicts=Verdicts(), attended=lambda _: False, unattended=nothing,
    )  # type: ignore[arg-type]  # fmt: skip
    calls.start(call())
    async with asyncio.timeout(10):
        await over.wait()
    assert gateway.had == [(0, []), (0, [2, 0]), (0, [5, 1])]
    assert seen == [
        ("s/r/1/1/0", first.parts),
        ("s/r/1/1/0", [Part(0, REASONING, 0, "I see"), Part(1, CALL, 0, "{", 0, "f")]),
        ("s/r/1/1/1", [Part(0, TEXT, 0, "Hi")]),
    ]
    await calls.close()


async def test_a_responses_id_is_committed_until_it_is() -> None:
    """Given a response that the endpoint keeps, when the transaction that notes its id fails, then it is noted by the
    next one: until then, a death would have the response paid again."""
    profiles, noted, failures = Profiles(), asyncio.Event(), 2
    profiles.learn(ModelProfile("p", "key-of-a-test", protocol="responses", background=True))
    said: list[str] = []

    class Keeping(Answering):
        async def response(self, _number: str, _key: str, known: KeptResponse | None) -> KeptResponse:
            if known is not None:
                await asyncio.Event().wait()
            return KeptResponse("resp-1", "p", "m")

    async def identified(_origin: CallOrigin, response: KeptResponse) -> None:
        said.append(response.id)
        if len(said) <= failures:
            raise StoreError("could not serialize access")
        noted.set()

    gateway = Keeping()
    calls = Calls(
        gateway, "node", profiles, answered=nothing, identified=identified, lost=nothing, grown=lambda _: None,
        followed=lambda _: False, verdicts=Verdicts(), attended=lambda _: False, unattended=nothing,
    )  # type: ignore[arg-type]  # fmt: skip
    calls.start(call())
    await asyncio.wait_for(noted.wait(), 10)
    assert said == ["resp-1"] * 3
    await calls.close()
