"""The Responses API at the gateway: against the offline model over real sockets, and against raw events."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from understudy.actors.conversation import Conversation
from understudy.config import Fallback, ModelProfile
from understudy.errors import InvalidConfiguration, ModelProtocolError, ModelRefused, ModelUnavailable
from understudy.gateway.adapters import EndpointError, Malformed
from understudy.gateway.course import Course
from understudy.gateway.gateway import Gateway
from understudy.gateway.gateway_calls import GatewayCalls
from understudy.gateway.responses import ResponseReading
from understudy.gateway.responses_input import body_of, input_of
from understudy.json_text import from_json, to_json
from understudy.messages import Message, ToolCall, Usage
from understudy.protocol import CallOrigin
from understudy.records import KeptResponse, ModelAnswer, ModelRequest
from understudy.streams import REASONING, TEXT, Piece
from understudy.testing.offline import RESPONSES, Faults, OfflineServer, Reply, policy_from_script

from ..endpoints import KEY, added_up, endpoint, failure_of, gateway, http_answer, request
from ..mcp_calls import until

LOOK = {"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}
SCRIPT = [
    {"reasoning": "I should look.", "text": "I look. " * 20, "tool_calls": [["look", {"at": "ü"}], ["look", {}]]},
    {"text": "Seen."},
]
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True}}


def responses(url: str, **profile: Any) -> Any:
    return gateway(url, protocol="responses", **profile)


def message_of(answer: ModelAnswer, number: int) -> Message:
    """An answer as it is committed."""
    calls = tuple(
        ToolCall(f"r/{number}/{place}", name, arguments, provider)
        for place, (provider, name, arguments) in enumerate(answer.tool_calls)
    )
    return Message("assistant", answer.content, calls, round=number, extra={"provider": answer.extra or {}})


def request_of(messages: list[Message], **more: Any) -> ModelRequest:
    """The request that asks about these messages."""
    conversation = Conversation("Be brief.")
    conversation.extend(messages)
    return request(**more, messages=from_json(conversation.part()["messages"]))


class Heard:
    """What a call's caller receives, in order."""

    def __init__(self) -> None:
        self.received: list[str | Piece] = []
        self.responded = asyncio.Event()

    def respond(self, response: KeptResponse | None) -> None:
        if response is not None:
            assert (response.profile, response.model) == ("p", "offline")
            self.received.append(response.id)
            self.responded.set()

    def call(self, model: Gateway, asked: ModelRequest) -> Any:
        return model.call(asked, self.received.append, lambda: self.received.append("restart"), self.respond)

    @property
    def text(self) -> str:
        return added_up([piece for piece in self.received if isinstance(piece, Piece)]).text(TEXT)

    @property
    def words(self) -> list[str]:
        """Restarts, and ids of responses."""
        return [one for one in self.received if isinstance(one, str)]


# Calls that succeed


async def test_a_call_from_end_to_end() -> None:
    """Given a conversation with a tool call, then each answer has text, calls, usage and what must go back; the next
    request brings that back unchanged, in its place, and instructions, tools and parameters in the protocol's form."""
    with OfflineServer(policy_from_script(SCRIPT), prefix_cache=True) as server:
        async with responses(server.url) as model:
            heard = Heard()
            parameters = {"max_completion_tokens": 900, "response_format": FORM, "reasoning_effort": "low", "top_p": 1}
            asked = Message("user", "hi")
            more: dict[str, Any] = {"tools": [LOOK], "parameters": parameters}
            answer = await heard.call(model, request_of([asked], **more))
            said = [asked, message_of(answer, 1), *(Message("tool", "x", tool_call_id=f"r/1/{n}") for n in range(2))]
            final = await model.call(request_of(said, **more))
        sent, again = server.requests
        stats = server.stats
    assert (answer.content, heard.text) == ("I look. " * 20, "I look. " * 20)
    assert answer.tool_calls == (("call_0", "look", '{"at":"\\u00fc"}'), ("call_1", "look", "{}"))
    assert (answer.finish_reason, answer.provider, answer.background) == ("tool_calls", "openai", False)
    assert answer.response_id.startswith("resp_")
    assert answer.usage.reasoning_tokens > 0
    assert heard.words == []  # nobody can fetch it
    assert (final.content, final.finish_reason) == ("Seen.", "stop")
    assert answer.usage.total_tokens + final.usage.total_tokens == stats.prompt_tokens + stats.completion_tokens
    assert sent.path == RESPONSES
    assert sent.headers["authorization"] == f"Bearer {KEY}"
    assert sent.body == {
        "model": "offline",
        "instructions": "Be brief.",
        "input": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "strict": False, **LOOK["function"]}],
        "max_output_tokens": 900,
        "text": {"format": {"type": "json_schema", **FORM["json_schema"]}},
        "reasoning": {"effort": "low"},
        "include": ["reasoning.encrypted_content"],
        "top_p": 1,
        "store": False,
        "stream": True,
    }
    kinds = [item.get("type") or item["role"] for item in again.body["input"]]
    assert kinds == [
        "user", "reasoning", "message", "function_call", "function_call", "function_call_output", "function_call_output"
    ]  # fmt: skip
    reasoning, message, call = again.body["input"][1:4]
    assert reasoning["summary"] == [{"type": "summary_text", "text": "I should look."}]
    assert (message["id"][:4], call["id"][:3]) == ("msg_", "fc_")


async def test_reasoning_streams_and_a_reply_that_is_cut_off_says_so() -> None:
    """Reasoning is passed on as it comes; an incomplete response is one that reached its longest length."""
    script = [{"reasoning": "long thoughts " * 10, "text": "words " * 100}]
    with OfflineServer(policy_from_script(script)) as server:
        async with responses(server.url) as model:
            heard = Heard()
            answer = await heard.call(model, request(parameters={"max_tokens": 50}))
    pieces = added_up([piece for piece in heard.received if isinstance(piece, Piece)])
    assert pieces.text(REASONING) == "long thoughts " * 10
    assert (answer.content, answer.finish_reason) == (("words " * 100)[:200], "length")
    assert answer.usage.cached_tokens == 0


async def test_a_refusal_is_kept_and_goes_back() -> None:
    """A refusal is where it is with chat completions, and a refusal again when it goes back."""
    with OfflineServer(policy_from_script([{"refusal": "I can't."}])) as server:
        async with responses(server.url) as model:
            answer = await model.call(request())
            assert (answer.content, answer.extra) == (None, {"refusal": "I can't."})
            await model.call(request_of([Message("user", "a"), message_of(answer, 1), Message("user", "b")]))
        assert server.requests[1].body["input"][1]["content"] == [{"type": "refusal", "refusal": "I can't."}]


def test_images_files_and_results_with_parts() -> None:
    """Parts of inputs and of tool results are sent in the protocol's form; what is not known goes as it is."""
    parts = [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,AA"}},
        {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
    ]
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": parts[:2]},
        {"role": "system", "content": "later"},
    ]
    _, (user, call, result, later) = input_of(messages, profile="p", model="m")
    assert user["content"] == [
        {"type": "input_text", "text": "see"},
        {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "low"},
        {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,AA"},
        parts[3],
    ]
    assert call == {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    assert result == {"type": "function_call_output", "call_id": "c", "output": user["content"][:2]}
    assert later == {"role": "system", "content": "later"}


ITEMS = [
    {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "e"},
    {"type": "message", "id": "m1", "role": "assistant", "phase": "commentary",
     "content": [{"type": "output_text", "text": "one ", "annotations": []}]},
    {"type": "function_call", "id": "fc", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "message", "id": "m2", "role": "assistant",
     "content": [{"type": "output_text", "text": "two", "annotations": []}]},
]  # fmt: skip


def read(items: list[dict[str, Any]], *, stored: bool = False, background: bool = False) -> ResponseReading:
    """A response with these items."""
    reading = ResponseReading(profile="p", model="m", background=background, stored=stored)
    reading.add(json.dumps({"object": "response", "id": "r", "status": "completed", "output": items}))
    return reading


def test_what_goes_back_and_to_whom() -> None:
    """The endpoint gets its items back in their order and with their ids; another profile, another model, and a message
    that does not say the same any more get none of it. Reasoning that nobody could read goes to nobody."""
    reading = read(ITEMS)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": reading.content, "tool_calls": [call], **(reading.extra or {})}
    (_, back), plain = input_of([message], profile="p", model="m"), [
        {"role": "assistant", "content": "one two"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    ]  # fmt: skip
    assert [item.get("id") for item in back] == ["rs", "m1", "fc", "m2"]
    assert back[0] == ITEMS[0]
    assert [part["text"] for item in back if item["type"] == "message" for part in item["content"]] == ["one ", "two"]
    assert (back[1]["phase"], "phase" in back[3]) == ("commentary", False)
    for other in ({"profile": "q", "model": "m"}, {"profile": "p", "model": "n"}):
        assert input_of([message], **other)[1] == plain
    assert input_of([{**message, "content": "short"}], profile="p", model="m")[1][0]["content"] == "short"
    unread = [{"type": "reasoning", "id": "rs", "summary": []}, *ITEMS[2:]]
    assert read(unread).extra is None
    assert read(unread, stored=True).extra is not None


@settings(max_examples=30)
@given(st.data())
def test_a_request_is_a_function_of_its_messages(data: st.DataObject) -> None:
    """Whatever was said, the same messages make the same bytes, each call keeps its result, and no text is lost."""
    text = st.text(max_size=5)
    messages: list[Message] = [Message("user", data.draw(text))]
    for number in range(data.draw(st.integers(0, 4))):
        calls = tuple(
            ToolCall(f"r/{number}/{place}", "f", '{"a":1}', f"call_{place}")
            for place in range(data.draw(st.integers(0, 2)))
        )
        messages.append(Message("assistant", data.draw(text), calls, round=number))
        messages += [Message("tool", data.draw(text), tool_call_id=call.call_id) for call in calls]
        messages.append(Message("user", data.draw(text)))
    said = [message.text for message in messages if message.text]
    asked = request_of(messages)
    bodies = [body_of(one, profile="p", background=False) for one in (asked, request_of(messages))]
    assert to_json(bodies[0]) == to_json(bodies[1])
    items = bodies[0]["input"]
    calls_made = [item["call_id"] for item in items if item.get("type") == "function_call"]
    assert len(set(calls_made)) == len(calls_made)
    assert calls_made == [item["call_id"] for item in items if item.get("type") == "function_call_output"]
    assert [shown for item in items if (shown := item.get("content") or item.get("output"))] == said


# In the background


@pytest.mark.parametrize("events", [1, 2, 3, 7, 50])
async def test_a_lost_connection_is_no_lost_response(events: int) -> None:
    """Given connections that are lost after some events each, then the model is asked once, the id is reported first,
    and what follows goes on where it was."""
    faults = Faults(cut_stream=1.0, cut_at=events)
    with OfflineServer(policy_from_script(SCRIPT), chunk_delay=0.0005, faults=faults) as server:
        async with responses(server.url, background=True) as model:
            heard = Heard()
            answer = await heard.call(model, request())
        assert (server.stats.requests, server.requests[0].body["background"]) == (1, True)
        assert server.stats.fetches > 0 or events == 50
    assert heard.received[0] == answer.response_id
    assert heard.words == [answer.response_id]
    assert heard.text == answer.content == "I look. " * 20
    assert (answer.background, len(answer.tool_calls)) == (True, 2)


async def test_events_that_come_again_are_not_passed_on_again() -> None:
    """Given an endpoint that sends a response from its beginning again, then nothing is passed on twice."""
    delta = {"type": "response.output_text.delta", "sequence_number": 1, "delta": "one "}
    begun = [{"type": "response.created", "sequence_number": 0, "response": {"id": "r"}}, delta]
    over = {"type": "response.completed", "sequence_number": 2, "response": {"id": "r", "output": ITEMS[1:2]}}
    async with (
        endpoint(events_of(*begun), events_of(*begun, over)) as url,
        responses(url, background=True) as model,
    ):
        heard = Heard()
        answer = await heard.call(model, request())
    assert heard.received == ["r", Piece(TEXT, "one ")]
    assert (answer.content, answer.retries) == ("one ", 1)


async def test_another_gateway_fetches_the_response() -> None:
    """Given a gateway that dies during a call, then another one is given the response by its id: the same answer, all
    of its text, and no second request."""
    with OfflineServer(policy_from_script(SCRIPT)) as server:
        server.hold()
        async with responses(server.url, background=True) as model:
            heard = Heard()
            call = asyncio.create_task(heard.call(model, request()))
            await heard.responded.wait()
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        assert server.stats.cancelled == 0  # it lives
        server.release()
        async with responses(server.url, background=True) as model:
            again = Heard()
            answer = await again.call(model, request(response=KeptResponse(heard.words[0], "p", "offline")))
        assert (server.stats.requests, server.stats.repeats) == (1, 0)
    assert answer.response_id == heard.words[0]
    assert again.words == []  # its id is known
    assert again.text == answer.content == "I look. " * 20


async def test_a_fetch_needs_a_place_but_no_turn_of_the_limit() -> None:
    """Given a limit that is stopped, then a response that the endpoint keeps is fetched at once, with one of the places
    and without another request to the model, and the limit knows nothing of it."""
    with OfflineServer() as server:
        async with responses(server.url, background=True) as first:
            asked = request("x", deadline=5.0)
            made = await first.call(asked)
        async with responses(server.url, background=True, max_concurrency=1, requests_per_minute=60.0) as second:
            admission = second.limits.of("p")
            admission._line("").pace.refuse(60.0, 0.0, time.monotonic())
            async with admission.turn(asked, "t", Course(), fetches=True):
                call = asyncio.create_task(
                    second.call(replace(asked, response=KeptResponse(made.response_id, "p", "offline")))
                )
                done, _ = await asyncio.wait((call,), timeout=0.1)
                assert not done  # the only place is taken
            answer = await call
            (use,) = second.limits.report().uses
    assert answer.content == made.content
    assert server.stats.requests == 1
    assert (use.waiting, use.used.requests) == (0, 0.0)


async def test_a_response_that_is_lost_is_asked_for_again() -> None:
    """Given an id that the endpoint does not know (any more), then the call is made again, and its id is reported."""
    with OfflineServer(policy_from_script(SCRIPT), faults=Faults(lost_ids=0.7, cut_stream=0.7)) as server:
        async with responses(server.url, background=True) as model:
            heard = Heard()
            answer = await heard.call(model, request(response=KeptResponse("resp_unknown", "p", "offline")))
        assert server.stats.requests >= 2
        assert server.stats.missed >= 2
    assert heard.words == [answer.response_id] or "restart" in heard.words
    assert heard.words[-1] == answer.response_id


async def test_an_endpoint_that_falls_silent_is_asked_for_the_whole() -> None:
    """Given a stream of which nothing more comes, then the response is asked for by its id until it is there: what was
    streamed is void, and comes whole."""
    faults = Faults(stall=1.0, cut_at=5)
    with OfflineServer(policy_from_script(SCRIPT), faults=faults) as server:
        async with responses(server.url, background=True) as model:
            heard = Heard()
            answer = await heard.call(model, request(stall=0.2))
        assert server.stats.requests == 1
    assert heard.words == [answer.response_id, "restart"]
    rest = heard.received[heard.received.index("restart") :]
    assert added_up([piece for piece in rest if isinstance(piece, Piece)]).text(TEXT) == answer.content


async def test_an_endpoint_that_does_not_stream_is_polled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given an endpoint that answers with the response as it is, then it is asked again until it is over."""
    monkeypatch.setattr("understudy.gateway.tries.POLL_SECONDS", 0.01)
    working = http_answer(json.dumps({"object": "response", "id": "r/1", "status": "queued"}), "application/json")
    done = {"object": "response", "id": "r/1", "status": "completed", "output": ITEMS[1:2]}
    over = http_answer(json.dumps(done), "application/json")
    async with endpoint(working, working, over) as url, responses(url, background=True) as model:
        heard = Heard()
        answer = await heard.call(model, request())
    assert (heard.words, answer.content, answer.retries) == (["r/1"], "one ", 0)


async def test_an_aborted_call_is_cancelled_at_the_endpoint() -> None:
    """Given a call in the background that is aborted, then the endpoint is asked to end it, and what came is kept; a
    gateway that ends leaves it to the next one."""
    asked = request()
    origin = CallOrigin("s", 1, "r", 1, 1, "", "s", "p", "offline")
    for aborts in (True, False):
        with OfflineServer(lambda _body: Reply(text="word " * 100), chunk_delay=0.05) as server:
            calls = GatewayCalls(Gateway())
            profile = ModelProfile("p", KEY, server.url, protocol="responses", background=True)
            number = (await calls.attach("one", [profile])).number
            call = asyncio.create_task(calls.call(number, origin, asked))
            await asyncio.to_thread(server.wait, lambda stats: stats.in_flight == 1)
            await calls.growth(number, origin.key, 0, [])
            if aborts:
                await calls.abort(number, origin.key)
                answer = await call
                assert answer is not None
                assert (answer.content or "").startswith("word")
                assert (answer.finish_reason, answer.background) == ("aborted", True)
                await asyncio.to_thread(server.wait, lambda stats: stats.cancelled == 1)
            await calls.close()
            await asyncio.gather(call, return_exceptions=True)
            assert server.stats.cancelled == aborts


@pytest.mark.parametrize("fallback", ["has it", "has lost it", "fails", "is not known"])
async def test_a_fallbacks_response_is_fetched_there(fallback: str) -> None:
    """Given a call with a response of a fallback, then it is fetched there, and no model is asked; if the fallback does
    not have it any more, its model is asked again; where that fails, or nobody knows it, the call is made again."""
    with OfflineServer() as own, OfflineServer() as spare:
        profile = ModelProfile("q", KEY, spare.url, protocol="responses", background=True)
        async with responses(own.url, background=True, fallbacks=(Fallback("q", "other"),)) as model:
            model.register(ModelProfile("p", KEY, spare.url, protocol="responses", background=True))
            made = await model.call(request(model="other"))
        asked = request(response=KeptResponse(made.response_id, "q", "other"))
        if fallback == "has lost it":
            spare.forget()
        elif fallback == "fails":
            spare.faults = Faults(status_500=1.0)
            spare.forget()
        async with responses(own.url, background=True, fallbacks=(Fallback("q", "other"),)) as model:
            if fallback != "is not known":
                model.register(profile)
            reported: list[KeptResponse | None] = []
            answer = await model.call(asked, on_response=reported.append)
        counts = own.count, spare.count
    if fallback == "has it":
        assert (answer.response_id, counts, reported) == (made.response_id, (0, 1), [])
    elif fallback == "has lost it":
        assert (counts, reported) == ((0, 2), [KeptResponse(answer.response_id, "q", "other")])
    else:
        own_response = KeptResponse(answer.response_id, "p", "offline")
        assert (counts[0], reported[-1]) == (1, own_response)
        assert reported[:-1] == [None]
    assert (answer.profile, answer.model) == (("q", "other") if fallback in ("has it", "has lost it") else ("", ""))


@pytest.mark.parametrize("profile", ["unknown", "p", "q"])
async def test_an_answer_is_not_of_a_response_that_nobody_can_fetch(profile: str) -> None:
    """Given a response at a profile that this gateway does not know, or that keeps no responses any more, be it the
    request's own, then who asks learns, before anything comes, that the call has no response, and its own endpoint
    is asked."""
    with OfflineServer() as server:
        async with gateway(server.url) as model:
            model.register(ModelProfile("q", KEY, server.url))
            received: list[object] = []
            asked = request(response=KeptResponse("resp-1", profile, "m"))
            answer = await model.call(asked, received.append, None, received.append)
    assert received[0] is None
    assert (answer.profile, server.count) == ("", 1)


async def test_a_response_is_cancelled_where_a_call_fails_for_good() -> None:
    """Given a response that is being made, when its call fails for what the endpoint has sent, or since time is up,
    also one that was only fetched, then the endpoint is asked to end it, while a fallback may answer. One that is over
    is left alone."""
    created = {"type": "response.created", "sequence_number": 0, "response": {"id": "r"}}
    ended = http_answer(json.dumps({"object": "response", "id": "r"}), "application/json")
    garbled = events_of(created, {"type": "response.output_item.added", "item": []})
    lines: list[str] = []
    with OfflineServer() as spare:
        fallbacks = (Fallback("q", on=("refused",)),)
        async with (
            endpoint(garbled, ended, heads=lines) as url,
            responses(url, background=True, fallbacks=fallbacks) as model,
        ):
            model.register(ModelProfile("q", KEY, spare.url))
            assert (await model.call(request())).profile == "q"
            await until(lambda: len(lines) == 2)
    assert lines == ["POST /v1/responses HTTP/1.1", "POST /v1/responses/r/cancel HTTP/1.1"]
    with OfflineServer() as server:
        server.hold()
        async with responses(server.url, background=True) as model:
            reported: list[KeptResponse | None] = []
            await failure_of(model.call(request(deadline=0.2), on_response=reported.append), ModelUnavailable)
            await asyncio.to_thread(server.wait, lambda stats: stats.cancelled == 1)
        async with responses(server.url, background=True) as model:
            call = asyncio.create_task(model.call(request("x"), on_response=reported.append))
            await until(lambda: len(reported) == 2)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            await failure_of(model.call(request("x", deadline=0.2, response=reported[1])), ModelUnavailable)
            await asyncio.to_thread(server.wait, lambda stats: stats.cancelled == 2)
        server.release()
    over = {"type": "response.failed", "response": {"id": "r", "status": "failed", "error": {"code": "invalid_prompt"}}}
    lines.clear()
    async with endpoint(events_of(created, over), ended, heads=lines) as url, responses(url, background=True) as model:
        await failure_of(model.call(request()), ModelRefused)
    assert lines == ["POST /v1/responses HTTP/1.1"]


def test_background_needs_responses() -> None:
    """A profile whose protocol knows no background mode, or that nobody knows, is refused when it is registered."""
    for wrong, word in (({"background": True}, "background"), ({"protocol": "smtp"}, "smtp")):
        with pytest.raises(InvalidConfiguration, match=word):
            Gateway().register(ModelProfile("p", KEY, "http://127.0.0.1:1/v1", **wrong))  # type: ignore[arg-type]


# Errors and garbage


def events_of(*events: dict[str, Any]) -> bytes:
    return http_answer("".join(f"data: {json.dumps(event)}\n\n" for event in events))


async def test_errors_in_the_stream() -> None:
    """A response that failed is made again, unless its error is final; so is one that was cancelled."""
    created = {"type": "response.created", "sequence_number": 0, "response": {"id": "r"}}
    good = events_of(created, {"type": "response.completed", "response": {"id": "r", "output": ITEMS[1:2]}})

    def failed(code: str) -> bytes:
        error = {"code": code, "message": f"it is {code} with {KEY}"}
        return events_of(created, {"type": "response.failed", "response": {"status": "failed", "error": error}})

    overloaded = {"type": "error", "code": "server_error", "message": "overloaded", "sequence_number": 1}
    for bad in (failed("server_error"), failed("rate_limit_exceeded"), events_of(created, overloaded)):
        for background in (False, True):
            async with endpoint(bad, good) as url, responses(url, background=background) as model:
                assert (await model.call(request())).content == "one "
    for code in ("invalid_prompt", "insufficient_quota"):
        async with endpoint(failed(code)) as url, responses(url) as model:
            error = await failure_of(model.call(request()), ModelRefused)
            assert error.details["provider_code"] == code
    async with endpoint(events_of(created)) as url, responses(url) as model:
        assert "ended in the middle" in (await failure_of(model.call(request()), ModelUnavailable)).message


def completed(*output: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"type": "response.completed", "response": {"output": list(output), **more}}]


@pytest.mark.parametrize(
    "events",
    [
        [{"no": "type"}],
        [{"type": 5}],
        [[1]],
        [{"type": "response.completed"}],
        completed({"type": "message", "content": [{"type": "output_text", "text": 5}]}),
        completed({"type": "function_call", "call_id": 5}),
        completed(7),
        completed(usage={"input_tokens": "10"}),
        [{"type": "response.output_item.added", "item": []}],
        [{"type": "response.output_text.delta", "delta": {}}],
    ],
)
async def test_garbage_is_named(events: list[Any]) -> None:
    """What is no response is reported as such, and not repeated."""
    async with endpoint(events_of(*events)) as url, responses(url) as model:
        error = await failure_of(model.call(request()), ModelProtocolError)
    assert "which is no response" in error.message
    assert error.details["retries"] == 0


odd = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=30)
@given(st.data())
def test_malformed_events_never_crash(data: st.DataObject) -> None:
    """Whatever is in an event's fields, it is an answer, an error report or no response: nothing else is raised."""
    kinds = ["error", "response.created", "response.completed", "response.failed", "response.output_item.added",
             "response.output_item.done", "response.output_text.delta",
             "response.function_call_arguments.delta"]  # fmt: skip
    fields: dict[str, Any] = {name: odd for name in ("content", "arguments", "name", "call_id", "id")}
    made = st.fixed_dictionaries({"type": st.sampled_from(["message", "function_call"])}, optional=fields)
    item = st.sampled_from(ITEMS) | odd | made
    about: dict[str, Any] = {name: odd for name in ("id", "usage", "error", "incomplete_details")}
    about |= {"status": odd | st.just("incomplete"), "output": odd | st.lists(item, max_size=3)}
    response = odd | st.fixed_dictionaries({}, optional=about)
    numbers: dict[str, Any] = {name: odd for name in ("delta", "output_index", "sequence_number", "error")}
    event = st.fixed_dictionaries(
        {"type": st.sampled_from(kinds) | odd}, optional={"response": response, "item": item, **numbers}
    )
    reading = ResponseReading(profile="p", model="m", background=data.draw(st.booleans()), stored=False)
    for one in data.draw(st.lists(event, max_size=5)):
        try:
            reading.add(json.dumps(one))
        except (Malformed, EndpointError):
            return
    _ = reading.complete, reading.content, reading.tool_calls, reading.extra, reading.continuation
    assert isinstance(reading.usage, Usage | None)
