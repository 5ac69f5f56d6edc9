"""The same conversations through all model protocols: what is said, and what the model is sent, is the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.actors.conversation import Conversation
from understudy.config import Fallback, ModelProfile
from understudy.errors import ContextOverflow, ModelProtocolError, ModelRefused, ModelUnavailable
from understudy.gateway.adapters import EndpointError, Malformed
from understudy.gateway.anthropic import MessageReading
from understudy.gateway.anthropic_input import BEGIN, body_of, identifier
from understudy.gateway.provider_data import without_provider_data
from understudy.json_text import from_json, to_json
from understudy.messages import PROVIDER_DATA, Message, ToolCall
from understudy.rates import Rates
from understudy.records import ModelAnswer, ModelRequest
from understudy.streams import CALL, REASONING, TEXT, Piece
from understudy.testing.http import CALLS
from understudy.testing.messages_api import chat_body
from understudy.testing.offline import MESSAGES, Faults, OfflineServer, RateLimit, Refusal, policy_from_script

from ..endpoints import KEY, added_up, endpoint, failure_of, gateway, http_answer, request

PROTOCOLS = ("chat", "responses", "anthropic")
LOOK = {"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object", "required": ["a"]}}}


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
    part = conversation.part()
    return request(messages=from_json(part["messages"]), tools=[LOOK], **more)


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "a word": [{"text": "Hello there. " * 30}],
    "tools, twice": [
        {"text": "I look.", "tool_calls": [["look", {"at": "ü"}], ["look", {}]]},
        {"tool_calls": [["look", {"at": [1, {"b": None}]}]]},
        {"text": "Seen."},
    ],
    "reasoning": [
        {"reasoning": "First. " * 40, "tool_calls": [["look", {}]]},
        {"reasoning": "Then.", "text": "So.", "tool_calls": [["look", {"x": 1}]]},
        {"reasoning": "Last.", "text": "Done."},
    ],
    "a refusal": [{"refusal": "I can't help with that."}],
}


async def transcript(protocol: str, script: list[dict[str, Any]], **more: Any) -> tuple[Any, ...]:
    """What is said, streamed and counted in a conversation, and which messages its model was sent."""
    sent: list[Any] = []
    play = policy_from_script(script)

    def policy(body: dict[str, Any]) -> Any:
        sent.append(
            [(m["role"], m.get("content") or m.get("refusal") or None, m.get("tool_calls")) for m in body["messages"]]
        )
        return play(body)

    said = [Message("user", "hi"), Message("user", [{"type": "text", "text": "see"}, IMAGE])]
    with OfflineServer(policy, chunk_delay=0.0005) as server:
        async with gateway(server.url, protocol=protocol) as model:
            answers = []
            for number, _ in enumerate(script, 1):
                pieces: list[Piece] = []
                answer = await model.call(request_of(said, **more), pieces.append)
                parts = added_up(pieces)
                streamed = [(parts.text(kind)) for kind in (TEXT, REASONING, CALL)]
                streamed[0] = streamed[0] or (answer.extra or {}).get("refusal", "")
                answers.append((answer.content, answer.tool_calls, answer.finish_reason, answer.usage, streamed))
                said.append(message_of(answer, number))
                said += [
                    Message("tool", f"{n}!", tool_call_id=call.call_id) for n, call in enumerate(said[-1].tool_calls)
                ]
    return answers, sent


def flat(sent: list[Any]) -> list[Any]:
    """The messages that a model was sent, each text for itself: one protocol merges what the other keeps apart."""
    found = []
    for role, content, calls in sent:
        for part in content if isinstance(content, list) else [content]:
            text = part["text"] if isinstance(part, dict) and part["type"] == "text" else part
            if isinstance(text, dict):
                text = text["image_url"]["url"]
            found.append(
                (
                    role,
                    text,
                    [(c["id"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls or ()],
                )
            )
    return found


@pytest.mark.parametrize("name", CONVERSATIONS)
async def test_the_same_conversation_through_all_protocols(name: str) -> None:
    """Answers, streams, tool calls, ends and counts are the same, and so is what the model is sent in each round."""
    found = {protocol: await transcript(protocol, CONVERSATIONS[name]) for protocol in PROTOCOLS}
    answers, sent = found["chat"]
    for protocol in PROTOCOLS[1:]:
        others, received = found[protocol]
        for one, other in zip(answers, others, strict=True):
            assert (*other[:3], other[4]) == (*one[:3], one[4]), protocol
            assert other[3].output_tokens == one[3].output_tokens
            assert other[3].reasoning_tokens == one[3].reasoning_tokens
        assert [flat(messages) for messages in received] == [flat(messages) for messages in sent], protocol


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_lengths_forms_and_errors(protocol: str) -> None:
    """A limit cuts a reply off, a response format is obeyed, what is worth it is tried again, a refusal is final, and a
    request that is too long is one, in each protocol; no error has the key."""
    with OfflineServer(policy_from_script([{"text": "word " * 100}])) as server:
        async with gateway(server.url, protocol=protocol) as model:
            answer = await model.call(request(parameters={"max_tokens": 20}))
            assert (answer.content, answer.finish_reason) == (("word " * 100)[:80], "length")
    with OfflineServer(faults=Faults(fail_first=1, fail_status=529)) as server:
        async with gateway(server.url, protocol=protocol) as model:
            answer = await model.call(request(parameters={"response_format": FORM}))
            assert (json.loads(answer.content or ""), answer.retries) == ({"a": None}, 1)

    def refuse(_body: dict[str, Any]) -> Any:
        raise Refusal(401, f"not with {KEY}")

    with OfflineServer(refuse) as server:
        async with gateway(server.url, protocol=protocol) as model:
            error = await failure_of(model.call(request()), ModelRefused)
    assert "not with ***" in error.message
    with OfflineServer(window=10) as server:
        async with gateway(server.url, protocol=protocol) as model:
            error = await failure_of(model.call(request("long " * 100)), ContextOverflow)
    assert error.details["window"] == 10


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_faults(protocol: str) -> None:
    """Given streams that are cut, fall silent or have garbage in them, then the first two are made again, and what was
    streamed is void; the last is reported."""
    script = [{"text": "word " * 100, "tool_calls": [["look", {"a": 1}]]}]
    for faults in (Faults(cut_stream=0.5, cut_at=4), Faults(stall=0.5)):
        with OfflineServer(policy_from_script(script), faults=faults, chunk_delay=0.0005) as server:
            async with gateway(server.url, protocol=protocol) as model:
                pieces: list[Piece] = []
                for _ in range(3):
                    pieces.clear()
                    answer = await model.call(request(stall=0.3), pieces.append, pieces.clear)
                    assert added_up(pieces).text(TEXT) == answer.content == "word " * 100
            assert server.stats.requests > 3
    with OfflineServer(policy_from_script(script), faults=Faults(malformed=1.0)) as server:
        async with gateway(server.url, protocol=protocol) as model:
            await failure_of(model.call(request()), ModelProtocolError)


async def test_what_one_provider_made_goes_to_no_other() -> None:
    """Given a history with reasoning of each protocol, then each gets its own back, and nobody gets another's; chat
    completions get none of it, and other messages are sent as they are, without being read."""
    script = [{"reasoning": "Hm.", "tool_calls": [["look", {}]]}, {"text": "ok"}]
    said = [Message("user", "hi")]
    servers = {protocol: OfflineServer(policy_from_script(script)).start() for protocol in PROTOCOLS}
    try:
        for number, protocol in enumerate(PROTOCOLS, 1):
            async with gateway(servers[protocol].url, protocol=protocol) as model:
                said += [message_of(await model.call(request_of(said)), number)]
                said += [Message("tool", "x", tool_call_id=f"r/{number}/0"), Message("user", f"again {number}")]
        for protocol, server in servers.items():
            async with gateway(server.url, protocol=protocol) as model:
                await model.call(request_of(said))
            sent = json.dumps(server.requests[-1].body)
            assert PROVIDER_DATA not in sent
            assert ("sealed:" in sent, sent.count("Hm.")) == (protocol != "chat", 1)
            assert ('"thinking"' in sent, '"reasoning"' in sent) == (protocol == "anthropic", protocol == "responses")
    finally:
        for server in servers.values():
            server.stop()
    plain = b'[{"role":"user","content":"say \\"provider_data\\": 1"}]'
    assert without_provider_data(plain) is plain


# Anthropic's own


async def test_a_message_from_end_to_end() -> None:
    """The request has the endpoint's headers, a limit, system, tools and marks of what to keep; thinking goes back with
    its signature before the call that followed it."""
    script = [{"reasoning": "Hm.", "text": "I look.", "tool_calls": [["look", {"a": 1}]]}, {"text": "ok"}]
    with OfflineServer(policy_from_script(script), prefix_cache=True) as server:
        async with gateway(server.url, protocol="anthropic") as model:
            said = [Message("user", "hi " * 2_000)]
            parameters = {"tool_choice": "required", "parallel_tool_calls": False, "stop": "END", "top_k": 5}
            answer = await model.call(request_of(said, parameters=parameters))
            said += [message_of(answer, 1), Message("tool", "x", tool_call_id="r/1/0")]
            final = await model.call(request_of(said))
        first, second = server.requests
    assert (answer.provider, answer.finish_reason, answer.response_id[:4]) == ("anthropic", "tool_calls", "msg_")
    assert 0 < final.usage.cached_tokens < final.usage.input_tokens
    assert (first.path, first.headers["x-api-key"], "authorization" in first.headers) == (MESSAGES, KEY, False)
    assert first.headers["anthropic-version"] == "2023-06-01"
    kept = {"cache_control": {"type": "ephemeral"}}
    assert first.body == {
        "model": "offline",
        "max_tokens": 8_192,
        "system": [{"type": "text", "text": "Be brief.", **kept}],
        "tools": [{"name": "look", "input_schema": {"type": "object"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi " * 2_000, **kept}]}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "stop_sequences": ["END"],
        "top_k": 5,
        "stream": True,
    }
    assert [block["type"] for block in second.body["messages"][1]["content"]] == ["thinking", "text", "tool_use"]
    elsewhere = body_of(request_of(said), profile="another")["messages"][1]["content"]
    assert [block["type"] for block in elsewhere] == ["text", "tool_use"]
    assert second.body["messages"][2]["content"] == [
        {"type": "tool_result", "tool_use_id": "call_0", "content": [{"type": "text", "text": "x"}], **kept}
    ]


def test_documents_ids_and_what_nobody_can_see() -> None:
    """PDF and text files are documents; an id is one that the endpoint takes, and different ones stay different; texts
    without anything in them are left out, and an answer is never the beginning."""
    pdf = {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERi0="}}
    text = {"type": "file", "file": {"file_data": "data:text/plain;base64,aGk="}}
    web = {"type": "image_url", "image_url": {"url": "https://host/a.png"}}
    messages = [{"role": "assistant", "content": "hi"}, {"role": "user", "content": [pdf, text, web]},
                {"role": "assistant", "content": ""}, {"role": "user", "content": " "}]  # fmt: skip
    body = body_of(request(messages=messages, model="claude-opus-4-5"), profile="p")
    begin, answer, given = body["messages"]
    assert (begin["role"], answer["content"]) == ("user", [{"type": "text", "text": "hi"}])
    assert given["content"] == [
        {"type": "document", "title": "a.pdf",
         "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}},
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "hi"}},
        {"type": "image", "source": {"type": "url", "url": "https://host/a.png"},
         "cache_control": {"type": "ephemeral"}},
    ]  # fmt: skip
    assert body["max_tokens"] == 32_000
    assert identifier("toolu_1-A") == "toolu_1-A"
    assert len({identifier(one) for one in ("r/1/0", "r_1_0", "r:1:0", "")}) == 4


def test_the_history_is_marked_where_it_lasts() -> None:
    """What is in the next request as well ends with a mark, and so does the request: memory comes and goes after it."""
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "m"},
    ]
    lasting = len(to_json(messages[:2])) - 1
    body = body_of(request(messages=messages, lasting=lasting), profile="p")
    marked = ["cache_control" in block for message in body["messages"] for block in message["content"]]
    assert marked == [False, True, True]


@settings(max_examples=30)
@given(st.data())
def test_a_request_is_a_function_of_its_messages(data: st.DataObject) -> None:
    """Whatever was said, the same messages make the same bytes, the endpoint takes them, and nothing that can be seen
    is lost."""
    text = st.text(max_size=5)
    messages: list[Message] = [Message("user", data.draw(text))]
    for number in range(data.draw(st.integers(0, 4))):
        many = data.draw(st.integers(0, 2))
        calls = tuple(ToolCall(f"r/{number}/{n}", "look", data.draw(text), f"call_{n}") for n in range(many))
        messages.append(Message("assistant", data.draw(text), calls, round=number))
        messages += [Message("tool", data.draw(text), tool_call_id=call.call_id) for call in calls]
        if data.draw(st.booleans()):
            messages.append(Message("user", data.draw(text)))
    messages.append(Message("user", "."))
    one, other = (to_json(body_of(request_of(messages), profile="p")) for _ in range(2))
    assert one == other
    read = flat([(m["role"], m.get("content"), m.get("tool_calls")) for m in chat_body(from_json(one))["messages"]])
    seen = "".join(text or "" for _, text, _ in read if text)
    assert seen.replace(BEGIN, "") == "Be brief." + "".join(
        message.text for message in messages if message.text.strip()
    )


ERRORS = {"overloaded_error": ModelUnavailable, "api_error": ModelUnavailable, "invalid_request_error": ModelRefused,
          "authentication_error": ModelRefused}  # fmt: skip


@pytest.mark.parametrize("kind", ERRORS)
async def test_errors_in_the_stream(kind: str) -> None:
    """An error's type decides whether the call is made again."""
    error = {"type": "error", "error": {"type": kind, "message": f"it is {kind}"}}
    async with (
        endpoint(http_answer(f"event: error\ndata: {json.dumps(error)}\n\n")) as url,
        gateway(url, protocol="anthropic") as model,
    ):
        found = await failure_of(model.call(request()), ERRORS[kind])
    assert found.details["provider_code"] == kind


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_key_does_not_follow_a_redirect_to_another_host(protocol: str) -> None:
    """Where the key's header would go wherever the endpoint redirects to, the call fails and says where that is; else
    the other host is sent no key."""
    with OfflineServer() as other:
        path = CALLS[PROTOCOLS.index(protocol)]
        place = other.url.replace("127.0.0.1", "localhost").removesuffix("/v1") + path
        answer = http_answer(b"", status=f"307 Temporary Redirect\r\nlocation: {place}")
        async with endpoint(answer) as url, gateway(url, protocol=protocol) as model:
            if protocol == "anthropic":
                error = await failure_of(model.call(request()), ModelProtocolError)
                assert f"redirects to {place}" in error.message
                assert other.count == 0
            else:
                await model.call(request())
                assert KEY not in str(other.requests[0].headers)


odd = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=30)
@given(st.data())
def test_malformed_events_never_crash(data: st.DataObject) -> None:
    """Whatever is in an event's fields, it is an answer, an error report or no message: nothing else is raised."""
    kinds = ["message_start", "content_block_start", "content_block_delta", "message_delta", "message_stop", "message",
             "error"]  # fmt: skip
    types = st.sampled_from(["text", "thinking", "tool_use", "server_tool_use"])
    names: dict[str, Any] = {name: odd for name in ("text", "thinking", "signature", "input", "id", "name")}
    block = odd | st.fixed_dictionaries({"type": types}, optional=names)
    deltas = st.sampled_from(["text_delta", "thinking_delta", "input_json_delta", "signature_delta"])
    parts: dict[str, Any] = {name: odd for name in ("text", "partial_json", "thinking", "stop_reason")}
    delta = odd | st.fixed_dictionaries({"type": deltas}, optional=parts)
    index = st.integers(0, 1) | odd
    some: dict[str, Any] = {"message": odd, "usage": odd, "error": odd, "content": odd | st.lists(block, max_size=2)}
    event = st.fixed_dictionaries(
        {"type": st.sampled_from(kinds) | odd, "index": index, "content_block": block, "delta": delta}, optional=some
    )
    reading = MessageReading(profile="p", model="m")
    for one in data.draw(st.lists(event, max_size=5)):
        try:
            reading.add(json.dumps(one))
        except (Malformed, EndpointError):
            return
    _ = reading.complete, reading.content, reading.tool_calls, reading.extra, reading.usage


# Rate limits


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_limits_are_learned_and_kept_through_every_protocol(protocol: str) -> None:
    """Given an endpoint with a limit that nobody has given, then it is learned from the first answer's headers, and a
    request that is refused waits for another turn, which is no reason to ask a fallback."""
    with OfflineServer(rate_limit=RateLimit(2, window=1.0)) as server:
        async with gateway(server.url, protocol=protocol, fallbacks=(Fallback("q"),)) as model:
            model.register(ModelProfile("q", KEY, server.url))
            answers = [await model.call(request("0"))]
            (use,) = [use for use in model.limits.report().uses if use.profile == "p"]
            assert use.limit == Rates(2.0, None)
            server.rate_limit = None
            server.faults = Faults(fail_first=2, fail_status=429, retry_after=0.1)
            model.limits.of("p").update(ModelProfile("p", KEY, requests_per_minute=6_000.0))
            answers.append(await model.call(request("1", deadline=5.0)))
    assert [(answer.profile, answer.retries) for answer in answers] == [("", 0), ("", 1)]
    assert server.stats.failed == 1
