"""The gateway's calls: made once, whoever asks again; kept until they are released; only for the latest service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from understudy.config import ModelProfile
from understudy.errors import InvalidConfiguration, InvalidInput, ModelProfileMissing, ServiceGone
from understudy.gateway import gateway_calls
from understudy.gateway.course import Course
from understudy.gateway.gateway import Gateway
from understudy.gateway.gateway_calls import GatewayCalls
from understudy.gateway.gateway_socket import GatewaySocket
from understudy.messages import Usage
from understudy.prices import Price
from understudy.protocol import CallOrigin, Growth
from understudy.records import KeptResponse, ModelAnswer, ModelRequest
from understudy.redaction import redacted
from understudy.streams import CALL, REASONING, TEXT, Part, Piece
from understudy.transport import one_service
from understudy.transport.channel import Channel
from understudy.transport.remote_gateway import RemoteGateway
from understudy.transport.remote_node import SocketCalls

from .. import service_clock

ORIGIN = CallOrigin("s", 1, "r", 1, 1, "", "s", "p", "m")
REQUEST = ModelRequest(wait_key="s/r/1", profile="p", model="m", messages=b'[{"role":"user","content":"hi"}]')
PROFILE = ModelProfile("p", "sk-secret-0123456789", "http://127.0.0.1:1/v1", prices={"m": Price(1, 2, 3)})
ANSWER = ModelAnswer(
    content="half \ud83d", tool_calls=(("1", "t", "{}"),), usage=Usage(3, 4), started_at=5, extra={"n": 1 << 80},
    server_address="127.0.0.1", server_port=1,
)  # fmt: skip
RESPONSE, ANOTHER = KeptResponse("resp-1", "p", "m"), KeptResponse("resp-2", "p", "m")


class Endpoint(Gateway):
    """A gateway whose calls a test answers.

    Attributes:
        made: calls so far.
        ended: how many of them were cancelled.
        hear: gets pieces of the latest call's answer.
        again: starts it over.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made = 0
        self.ended = 0
        self.asked = asyncio.Event()
        self.answer: asyncio.Future[ModelAnswer] = asyncio.get_running_loop().create_future()

    def profiles(self) -> list[ModelProfile]:
        """Those that calls can be made with."""
        return [endpoint.profile for endpoint in self._endpoints.values()]

    def say(self, text: str) -> None:
        """More of its text comes."""
        self.hear(Piece(TEXT, text))

    async def call(
        self,
        request: ModelRequest,
        on_delta: Callable[[Piece], None] | None = None,
        on_restart: Callable[[], None] | None = None,
        on_response: Callable[[KeptResponse | None], None] | None = None,
        tree: str = "",
        course: Course | None = None,
    ) -> ModelAnswer:
        assert on_delta is not None
        assert on_restart is not None
        assert on_response is not None
        self.made += 1
        self.hear, self.again, self.identify = on_delta, on_restart, on_response
        self.asked.set()
        try:
            return await asyncio.shield(self.answer)
        except asyncio.CancelledError:
            self.ended += 1
            raise


async def begun(calls: GatewayCalls, endpoint: Endpoint) -> tuple[str, asyncio.Task[ModelAnswer | None]]:
    """A call in flight, and the number of the attachment that it is made for."""
    attached = await calls.attach("one", [PROFILE])
    call = asyncio.create_task(calls.call(attached.number, ORIGIN, REQUEST))
    await endpoint.asked.wait()
    return attached.number, call


async def test_a_call_is_made_once_and_kept() -> None:
    """Given a call in flight, when a service asks again, or the next one attaches and asks without a request, then the
    endpoint is asked once, all have the answer, and it is there until it is released."""
    endpoint = Endpoint()
    calls = GatewayCalls(endpoint)
    number, first = await begun(calls, endpoint)
    second = asyncio.create_task(calls.call(number, ORIGIN, REQUEST))
    await asyncio.sleep(0)
    attached = await calls.attach("two", [])
    assert attached.held == [ORIGIN]
    endpoint.answer.set_result(ANSWER)
    assert await asyncio.gather(first, second) == [ANSWER, ANSWER]
    assert await calls.call(attached.number, ORIGIN, None) == ANSWER
    assert (endpoint.made, calls.held) == (1, 1)
    await calls.release(attached.number, [ORIGIN.key, "unknown"])
    assert calls.held == 0
    assert await calls.call(attached.number, ORIGIN, None) is None
    await calls.close()


async def test_a_responses_id_is_known_before_its_answer() -> None:
    """Given a call whose response the endpoint keeps, when its id is known, or another response is made, then whoever
    waits for it has it, and so has who asks later; of a call that ends without, is released or is not known, it is
    empty."""
    endpoint = Endpoint()
    calls = GatewayCalls(endpoint)
    number, call = await begun(calls, endpoint)
    asked = asyncio.create_task(calls.response(number, ORIGIN.key, None))
    await asyncio.sleep(0)
    endpoint.identify(RESPONSE)
    assert (await asked, await calls.response(number, ORIGIN.key, None)) == (RESPONSE, RESPONSE)
    asked = asyncio.create_task(calls.response(number, ORIGIN.key, RESPONSE))
    await asyncio.sleep(0)
    endpoint.identify(ANOTHER)
    assert await asked == ANOTHER
    await calls.release(number, [ORIGIN.key])
    assert await calls.response(number, ORIGIN.key, None) is None
    await asyncio.wait({call})
    for end in ("answered", "released"):
        endpoint = Endpoint()
        calls = GatewayCalls(endpoint)
        number, call = await begun(calls, endpoint)
        asked = asyncio.create_task(calls.response(number, ORIGIN.key, None))
        await asyncio.sleep(0)
        if end == "answered":
            endpoint.answer.set_result(ANSWER)
        else:
            await calls.release(number, [ORIGIN.key])
        assert await asked is None, end
        await asyncio.wait({call})
        await calls.close()


async def test_a_service_that_was_replaced_is_refused() -> None:
    """Given a second service, when a message of the first one arrives late, then nothing follows from it: its call
    would be made for nobody."""
    endpoint = Endpoint()
    calls = GatewayCalls(endpoint)
    late = (await calls.attach("one", [PROFILE])).number
    await calls.attach("two", [])
    asked: list[Any] = [
        calls.call(late, ORIGIN, REQUEST), calls.abort(late, ORIGIN.key), calls.release(late, [ORIGIN.key]),
        calls.growth(late, ORIGIN.key, 0, []), calls.heard(late), calls.register(late, PROFILE),
        calls.response(late, ORIGIN.key, ""),
    ]  # fmt: skip
    for attempt in asked:
        with pytest.raises(ServiceGone, match="another node service"):
            await attempt
    with pytest.raises(ServiceGone, match="taken this one's place"):
        await calls.attach("one", [])
    assert (calls.held, endpoint.made) == (0, 0)
    await calls.close()


async def test_a_dead_services_late_word_shuts_nobody_out_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a service that attached, when that of one arrives late which died before, then the living one is refused
    until nothing more has come of the dead one for a while; it has the gateway again then."""
    monkeypatch.setattr(one_service, "REPLACED_SECONDS", 0.2)
    calls = GatewayCalls(Endpoint())
    await calls.attach("two", [])
    await calls.attach("one", [])
    with pytest.raises(ServiceGone, match="taken this one's place"):
        await calls.attach("two", [])
    async with asyncio.timeout(20):
        while True:
            try:
                number = (await calls.attach("two", [])).number
                break
            except ServiceGone:
                await asyncio.sleep(0.01)
    await calls.heard(number)
    with pytest.raises(ServiceGone, match="taken this one's place"):
        await calls.attach("one", [])
    await calls.close()


async def test_a_released_call_ends() -> None:
    """Given a call in flight, when it is released, then its connection is closed, and its waiter gets an error."""
    endpoint = Endpoint()
    calls = GatewayCalls(endpoint)
    number, call = await begun(calls, endpoint)
    await calls.release(number, [ORIGIN.key])
    with pytest.raises(ServiceGone, match="released"):
        await call
    await asyncio.sleep(0)
    assert endpoint.ended == 1
    await calls.close()


@pytest.mark.parametrize("said", [{TEXT: "so far"}, {TEXT: "so far", REASONING: "r" * 30}, {REASONING: "r" * 30}, {}])
async def test_what_came_is_the_answer_of_an_aborted_call(said: dict[str, str]) -> None:
    """Given a call in flight, when it is aborted, then the text that came so far is its answer; if none came, an error.
    Its tokens are estimated from all that came: reasoning, and arguments of tool calls, too."""
    endpoint = Endpoint()
    calls = GatewayCalls(endpoint)
    number, call = await begun(calls, endpoint)
    endpoint.say("void")
    endpoint.again()
    for kind, text in said.items():
        endpoint.hear(Piece(kind, text))
    if REASONING in said:
        endpoint.hear(Piece(CALL, "{" + "x" * 28, 0, "f"))
    await calls.abort(number, ORIGIN.key)
    answer = await call
    assert answer is not None
    length = sum(map(len, said.values())) + (30 if REASONING in said else 0)
    assert (answer.usage.output_tokens, answer.usage.estimated) == (-(-length // 3), bool(said))
    if TEXT in said:
        assert (answer.content, answer.finish_reason) == (said[TEXT], "aborted")
    else:
        assert answer.error is not None
        assert answer.error["code"] == "aborted"
    await calls.abort(number, ORIGIN.key)
    assert endpoint.ended == 1
    await calls.close()


async def test_an_answer_as_it_grows() -> None:
    """Given a call in flight, then who follows it gets what is new, and learns when it starts over and when it ends."""
    endpoint = Endpoint()
    calls = GatewayCalls(endpoint)
    number, call = await begun(calls, endpoint)
    waiting = asyncio.create_task(calls.growth(number, ORIGIN.key, 0, []))
    await asyncio.sleep(0)
    assert not waiting.done()
    endpoint.say("one ")
    assert await waiting == Growth(0, [Part(0, TEXT, 0, "one ")])
    endpoint.say("two")
    endpoint.hear(Piece(CALL, "", 0, "f"))
    endpoint.hear(Piece(CALL, '{"a', 0, "f"))
    new = [Part(0, TEXT, 4, "two"), Part(1, CALL, 0, '{"a', 0, "f")]
    assert await calls.growth(number, ORIGIN.key, 0, [4]) == Growth(0, new)
    endpoint.again()
    endpoint.say("anew")
    assert await calls.growth(number, ORIGIN.key, 0, [7, 3]) == Growth(1, [Part(0, TEXT, 0, "anew")])
    waiting = asyncio.create_task(calls.growth(number, ORIGIN.key, 1, [4]))
    endpoint.answer.set_result(ANSWER)
    assert (await waiting).ended
    assert await call == ANSWER
    assert await calls.growth(number, "unknown", 0, []) == Growth(0, [])
    await calls.close()


async def test_credentials_may_come_after_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a call whose profile is not known yet, when it comes, then the call is made; if it does not, it fails."""
    endpoint = Endpoint()
    calls = GatewayCalls(endpoint)
    number = (await calls.attach("one", [])).number
    call = asyncio.create_task(calls.call(number, ORIGIN, REQUEST))
    await asyncio.sleep(0.01)
    assert endpoint.made == 0
    await calls.register(number, PROFILE)
    endpoint.answer.set_result(ANSWER)
    assert await call == ANSWER
    assert "sk-secret" not in redacted(f"key {PROFILE.api_key}")
    monkeypatch.setattr(gateway_calls, "PROFILE_SECONDS", 0.01)
    other = ModelRequest(wait_key="t/r/1", profile="q", model="m", messages=b"[]")
    answer = await calls.call(number, CallOrigin("t", 1, "r", 1, 1, "", "t", "q", "m"), other)
    assert answer is not None
    assert answer.error is not None
    assert answer.error["code"] == ModelProfileMissing.code
    await calls.close()


async def test_a_profile_that_is_refused_keeps_nobody_from_attaching() -> None:
    """Given a service that has a profile which can't be used, then it attaches all the same, and has the others."""
    endpoint = Endpoint()
    calls = GatewayCalls(endpoint)
    attached = await calls.attach("one", [ModelProfile("q", "key", "no url"), PROFILE])
    assert (attached.profiles, endpoint.profiles()) == ([PROFILE], [PROFILE])
    await calls.close()


async def test_everything_goes_through_a_socket() -> None:
    """Given a gateway behind its socket, then profiles, requests, answers and errors arrive as they were sent; another
    service that comes ends the first one's connection, and who has no ticket is not let in."""
    endpoint = Endpoint()
    calls = GatewayCalls(endpoint)
    server = GatewaySocket("node1", calls)

    async def nowhere(*_arguments: Any) -> Any:
        raise AssertionError

    def service() -> RemoteGateway:
        return RemoteGateway(SocketCalls(server.admit, nowhere, "the gateway"))

    first = service()
    attached = await first.attach("one", [PROFILE])
    assert endpoint.profiles() == [PROFILE]
    made = asyncio.create_task(first.call(attached.number, ORIGIN, REQUEST))
    await endpoint.asked.wait()
    with pytest.raises(InvalidConfiguration, match="base URL"):
        await first.register(attached.number, ModelProfile("q", "key", "no url"))
    second = service()
    again = await second.attach("two", [])
    assert (again.gateway, again.held, again.profiles) == (attached.gateway, [ORIGIN], [PROFILE])
    with pytest.raises(ServiceGone):
        await made
    endpoint.say("text")
    assert await second.growth(again.number, ORIGIN.key, 0, []) == Growth(0, [Part(0, TEXT, 0, "text")])
    endpoint.answer.set_result(ANSWER)
    assert await second.call(again.number, ORIGIN, None) == ANSWER
    await second.heard(again.number)
    await second.release(again.number, [ORIGIN.key])
    assert (endpoint.made, calls.held) == (1, 0)
    ticket = await server.admit()
    with pytest.raises(ServiceGone):
        await Channel.connect(ticket._replace(token="guessed"))
    with pytest.raises(InvalidInput, match="no method"):
        await server.answer("", "close")
    await server.close()
    await calls.close()


async def test_a_gateway_that_nobody_needs_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a gateway that its service asks now and then, when that stops, then it learns that it is abandoned."""
    looks = service_clock.looks(monkeypatch)
    calls = GatewayCalls(Endpoint())
    number = (await calls.attach("one", [])).number
    abandoned = asyncio.create_task(calls.abandoned(300.0))
    for _ in range(8):
        looks.put_nowait(200.0)
        await looks.join()
        await calls.heard(number)
    assert not abandoned.done()
    looks.put_nowait(301.0)
    await asyncio.wait_for(abandoned, 10)
    await calls.close()


async def test_a_fallbacks_answer_is_not_of_the_response_that_failed() -> None:
    """Given a response that was begun in the background, when a fallback gives the answer, then that has not its id:
    another attempt's answer with that id would count for nothing."""
    endpoint = Endpoint()
    calls = GatewayCalls(endpoint)
    _, call = await begun(calls, endpoint)
    endpoint.identify(RESPONSE)
    endpoint.answer.set_result(replace(ANSWER, response_id="", profile="q"))
    answer = await call
    assert answer is not None
    assert (answer.response_id, answer.background) == ("", False)
    await calls.close()


async def test_a_fetch_that_is_aborted_before_it_begins_ends_the_response() -> None:
    """Given a call that fetches a response, when it is aborted at once, then the endpoint is asked to end that."""
    endpoint, cancelled = Endpoint(), asyncio.Event()

    async def cancel(response: KeptResponse) -> None:
        assert response == RESPONSE
        cancelled.set()

    endpoint.cancel = cancel  # type: ignore[method-assign]
    calls = GatewayCalls(endpoint)
    number = (await calls.attach("one", [PROFILE])).number
    call = asyncio.create_task(calls.call(number, ORIGIN, structs.replace(REQUEST, response=RESPONSE)))
    await asyncio.sleep(0)  # it is there, and has not begun
    await calls.abort(number, ORIGIN.key)
    answer = await call
    assert answer is not None
    assert answer.error is not None
    assert (answer.error["code"], answer.response_id, endpoint.made) == ("aborted", "resp-1", 0)
    await asyncio.wait_for(cancelled.wait(), 10)
    await calls.close()
