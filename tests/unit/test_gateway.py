"""The gateway: against the offline model over real sockets, and against endpoints that misbehave."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from email.utils import formatdate
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.config import Fallback, ModelProfile
from understudy.errors import (
    InvalidConfiguration,
    ModelProfileMissing,
    ModelProtocolError,
    ModelRefused,
    ModelUnavailable,
)
from understudy.gateway.adapters import Malformed
from understudy.gateway.backoff import retry_after_seconds
from understudy.gateway.chat import Completion
from understudy.gateway.course import Course
from understudy.gateway.gateway import Gateway
from understudy.gateway.sse import EventStream
from understudy.messages import Usage
from understudy.records import ModelAnswer
from understudy.streams import CALL, REASONING, TEXT, Part, Piece
from understudy.testing.offline import Faults, OfflineServer, Refusal, Reply, policy_from_script

from ..endpoints import KEY, added_up, endpoint, failure_of, gateway, http_answer, request


def stream_of(*deltas: dict[str, Any], finish: str | None = "stop", done: bool = True) -> str:
    """A stream with these deltas."""
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    if finish:
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + ("data: [DONE]\n\n" if done else "")


def whole(usage: dict[str, Any] | None = None, finish: Any = "stop", **message: Any) -> str:
    """An answer in one piece."""
    choice = {"index": 0, "finish_reason": finish, "message": {"content": "hi", **message}}
    return json.dumps({"id": "x", "model": "m", "choices": [choice], "usage": usage or {}})


# The event stream


@given(st.data())
def test_event_stream_does_not_depend_on_chunks(data: st.DataObject) -> None:
    """However the bytes are cut, the events are the same, for every kind of line end."""
    line = st.sampled_from(
        [
            "data: a",
            "data:  b",
            "data",
            "data:é€😀",
            ": comment",
            "event: error",
            "event:",
            "id: 1",
            "retry: 5",
            "x",
            "",
            "",
        ]
    )
    lines = data.draw(st.lists(st.tuples(line, st.sampled_from(["\n", "\r", "\r\n"])), max_size=30))
    raw = "".join(text + end for text, end in lines).encode()
    if data.draw(st.booleans()):
        raw = b"\xef\xbb\xbf" + raw
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    stream = EventStream()
    events = [e for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True) for e in stream.feed(raw[a:b])]
    bytewise = EventStream()
    assert events == EventStream().feed(raw) == [e for i in range(len(raw)) for e in bytewise.feed(raw[i : i + 1])]
    assert events == expected_events(raw)


def expected_events(raw: bytes) -> list[str]:
    """The HTML standard's algorithm, on the whole text at once: each event's data."""
    text = raw.decode().removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    events, data = [], ""
    for line in text.split("\n")[:-1]:
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if line == "":
            if data:
                events.append(data.removesuffix("\n"))
            data = ""
        elif field == "data":
            data += value + "\n"
    return events


def test_event_stream_limits_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line without end is refused before it fills the memory."""
    monkeypatch.setattr("understudy.gateway.sse.MAX_LINE", 10)
    with pytest.raises(Malformed, match="10 bytes"):
        EventStream().feed(b"data: 0123456789")


def test_completion_merges_tool_calls_of_all_dialects() -> None:
    """Tool calls are distinguished by index, or by id where the index is missing or always 0."""

    def calls(*deltas: dict[str, Any]) -> list[tuple[str, str, str]]:
        completion = Completion()
        for delta in deltas:
            completion.add(json.dumps({"choices": [{"delta": {"tool_calls": [delta]}}]}))
        return list(completion.tool_calls)

    two = [("a", "f", '{"x":1}'), ("b", "g", "{}")]
    first = {"id": "a", "function": {"name": "f", "arguments": '{"x"'}}
    rest, second = {"function": {"arguments": ":1}"}}, {"id": "b", "function": {"name": "g", "arguments": {}}}
    whole = {"id": "b", "function": {"name": "g", "arguments": "{}"}}
    assert calls({"index": 0, **first}, {"index": 1, **whole}, {"index": 0, **rest}) == two
    assert calls({"index": 0, **first}, {"index": 0, **rest}, {"index": 0, **whole}) == two
    assert calls(first, rest, whole) == two
    assert calls({**second, "function": {"name": "g", "arguments": {"k": 1}}}) == [("b", "g", '{"k": 1}')]
    same_id = [{"index": i, "id": "call_0", "function": {"name": "f", "arguments": "{}"}} for i in range(2)]
    assert calls(*same_id) == [("call_0", "f", "{}")] * 2


def test_what_a_completion_streams() -> None:
    """Text, reasoning and each tool call's arguments are passed on as they come, a call once its tool is known; of
    reasoning that an endpoint sends under two names, one is passed on."""
    deltas: list[dict[str, Any]] = [
        {"reasoning": "th", "reasoning_content": "th"},
        {"reasoning": "ink", "reasoning_content": "ink"},
        {"content": "Hi"},
        {"tool_calls": [{"index": 0, "id": "a", "function": {"arguments": '{"x'}}]},
        {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": '"'}},
                        {"index": 1, "id": "b", "function": {"name": "g"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]},
    ]  # fmt: skip
    completion = Completion()
    streamed = [completion.add(json.dumps({"choices": [{"delta": delta}]})) for delta in deltas]
    assert streamed == [
        [Piece(REASONING, "th")],
        [Piece(REASONING, "ink")],
        [Piece(TEXT, "Hi")],
        [],
        [Piece(CALL, '{"x"', 0, "f"), Piece(CALL, "", 1, "g")],
        [Piece(CALL, ":1}", 0, "f")],
    ]
    parts = added_up([piece for pieces in streamed for piece in pieces])
    assert parts.lengths == [5, 2, 7, 0]
    assert parts.after([5, 1, 4]) == [
        Part(1, TEXT, 1, "i"), Part(2, CALL, 4, ":1}", 0, "f"), Part(3, CALL, 0, "", 1, "g")
    ]  # fmt: skip
    assert parts.after(parts.lengths) == []


def test_completion_keeps_what_must_go_back() -> None:
    """Reasoning, refusals and signatures of tool calls are kept, text joined; `role` and empty fields are not."""
    completion = Completion()
    call = {"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}, "extra_content": {"signature": "s"}}
    for delta in (
        {"role": "assistant", "content": "", "reasoning_content": "think", "refusal": None},
        {"reasoning_content": "ing", "details": [1]},
        {"details": [2], "tool_calls": [call]},
    ):
        completion.add(json.dumps({"choices": [{"delta": delta}]}))
    assert completion.content is None
    assert completion.extra == {
        "reasoning_content": "thinking",
        "details": [1, 2],
        "tool_calls": [{"extra_content": {"signature": "s"}}],
    }


# Calls that succeed


async def test_a_call_from_end_to_end() -> None:
    """The answer has text, tool calls, usage and times; the deltas add up to the text; the request is as given."""
    script = [{"text": "héllo " * 30, "tool_calls": [["f", {"a": "ü"}], ["g", {}]]}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    with OfflineServer(policy_from_script(script), chunk_delay=0.001) as server:
        async with gateway(server.url) as model:
            deltas: list[Piece] = []
            before = time.time_ns() // 1_000
            answer = await model.call(request(tools=tools, parameters={"temperature": 0.5}), deltas.append)
            after = time.time_ns() // 1_000
        sent = server.requests[0]
    parts = added_up(deltas)
    assert answer.content == parts.text(TEXT) == "héllo " * 30
    assert len(deltas) > 3
    assert answer.tool_calls == (("call_0", "f", '{"a":"\\u00fc"}'), ("call_1", "g", "{}"))
    assert [call[1:] for call in answer.tool_calls] == [call[1:] for call in parts.calls()]
    assert (answer.finish_reason, answer.retries, answer.provider) == ("tool_calls", 0, "openai")
    assert answer.usage == Usage(server.stats.prompt_tokens, server.stats.completion_tokens)
    assert answer.response_model == "offline"
    assert answer.response_id.startswith("chatcmpl-")
    assert before <= answer.started_at <= answer.started_at + answer.duration <= after
    assert 0 < answer.first_chunk < answer.duration
    assert sent.body == {
        "model": "offline",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": tools,
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert sent.headers["authorization"] == f"Bearer {KEY}"


async def test_the_environment_of_the_process_is_not_the_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Organization and project of the process that runs the gateway are not sent to a profile's endpoint."""
    monkeypatch.setenv("OPENAI_ORG_ID", "org-of-someone-else")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "project-of-someone-else")
    with OfflineServer() as server:
        async with gateway(server.url) as model:
            await model.call(request())
        assert not [value for value in server.requests[0].headers.values() if "someone-else" in value]


async def test_a_header_of_the_environment_does_not_replace_the_profiles_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers that the openai package takes from the environment are sent; the key is the profile's, and is sent once,
    however they are written."""
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "authorization: Bearer of-someone-else\nX-Team: red")
    with OfflineServer() as server:
        async with gateway(server.url) as model:
            sent = model._endpoints["p"]._headers
            assert (sent.get_list("authorization"), sent["x-team"]) == ([f"Bearer {KEY}"], "red")
            await model.call(request())
        assert server.requests[0].headers["authorization"] == f"Bearer {KEY}"


async def test_a_proxy_is_not_asked_for_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint on this machine is reached directly, whatever the proxy variables say."""
    async with endpoint(b"") as nobody:
        monkeypatch.setenv("HTTP_PROXY", nobody)
        monkeypatch.setenv("http_proxy", nobody)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with OfflineServer() as server:
        async with gateway(server.url) as model:
            assert (await model.call(request())).retries == 0


async def test_json_although_streaming_was_asked_for() -> None:
    """An endpoint that does not stream is understood; the text arrives as one delta."""
    message = {"role": "assistant", "content": "whole", "reasoning_content": "r"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 5}}
    body = json.dumps({"id": "x", "model": "m", "choices": [choice], "usage": usage})
    async with endpoint(http_answer(body, "application/json; charset=utf-8")) as url, gateway(url) as model:
        deltas: list[Piece] = []
        answer = await model.call(request(), deltas.append)
    assert (answer.content, answer.extra) == ("whole", {"reasoning_content": "r"})
    assert deltas == [Piece(TEXT, "whole"), Piece(REASONING, "r")]
    assert answer.usage == Usage(7, 3, cached_tokens=5)


async def test_missing_usage_is_estimated() -> None:
    """Where the endpoint does not count, a token for three bytes is assumed, and marked as estimated."""
    async with endpoint(http_answer(stream_of({"content": "x" * 40}))) as url, gateway(url) as model:
        answer = await model.call(request("y" * 400))
    assert answer.usage.estimated
    assert answer.usage.output_tokens == 14
    assert 133 <= answer.usage.input_tokens <= 160


@pytest.mark.parametrize(
    "stream",
    [
        stream_of({"content": "ok"}, finish=None),
        stream_of({"content": "ok"}, done=False),
        ": ping\r\n\r\n" + stream_of({"content": "ok"}).replace("\n", "\r\n"),
    ],
    ids=["no finish_reason", "no [DONE]", "comments and CRLF"],
)
async def test_streams_of_other_dialects(stream: str) -> None:
    """Either of finish_reason and [DONE] ends an answer."""
    async with endpoint(http_answer(stream)) as url, gateway(url) as model:
        answer = await model.call(request())
    assert (answer.content, answer.finish_reason, answer.retries) == ("ok", "stop", 0)


async def test_a_connection_left_open_after_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint that does not end the response after [DONE] costs a short wait, not the deadline."""
    monkeypatch.setattr("understudy.gateway.tries.TRAILER_TIMEOUT", 0.01)
    closed = asyncio.Event()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    async with (
        endpoint(head + stream_of({"content": "ok"}).encode(), on_close=closed) as url,
        gateway(url) as model,
    ):
        assert (await model.call(request())).content == "ok"
        await asyncio.wait_for(closed.wait(), 10)


# Retries


@pytest.mark.parametrize("status", [408, 409, 429, 500, 503])
async def test_retries_what_may_pass(status: int) -> None:
    """Statuses that may pass are retried, at most `retries` times."""
    with OfflineServer(faults=Faults(fail_first=3, fail_status=status)) as server:
        async with gateway(server.url) as model:
            assert (await model.call(request())).retries == 3
    with OfflineServer(faults=Faults(fail_first=4, fail_status=status)) as server:
        async with gateway(server.url) as model:
            error = await failure_of(model.call(request()), ModelUnavailable)
        assert server.count == 4
    assert error.details["status"] == status
    assert error.details["retries"] == 3
    assert error.details["base_url"] == server.url
    assert error.details["duration"] > 0
    assert f"{status}" in error.message


@pytest.mark.parametrize(
    ("failed", "reason"),
    [
        (http_answer("{}", "application/json", "429 Too Many Requests"), "rate_limited"),
        (http_answer("{}", "application/json", "408 Request Timeout"), "timeout"),
        (http_answer("{}", "application/json", "409 Conflict"), "conflict"),
        (http_answer("{}", "application/json", "502 Bad Gateway"), "server_error"),
        (b"", "connection"),
        (http_answer('data: {"error": {"message": "overloaded"}}\n\n'), "stream_error"),
        (http_answer(stream_of({"content": "o"}, finish=None, done=False)), "stream_ended"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_retry_has_its_reason(failed: bytes, reason: str) -> None:
    """Tries that fail, and are followed by another one, are counted by what was wrong, also of a call that fails."""
    answered = http_answer(stream_of({"content": "ok"}))
    async with endpoint(failed, failed, answered) as url, gateway(url) as model:
        assert (await model.call(request())).retried == {reason: 2}
    course = Course()
    async with endpoint(failed) as url, gateway(url) as model:
        await failure_of(model.call(request(), course=course), ModelUnavailable)
    assert course.measured(ModelAnswer()).retried == {reason: 3}


async def test_silence_is_a_timeout() -> None:
    """An endpoint that says nothing for too long is a reason of its own."""
    with OfflineServer(faults=Faults(stall=0.5)) as server:
        async with gateway(server.url) as model:
            answers = [await model.call(request(stall=0.2)) for _ in range(2)]
    assert sorted(tuple(answer.retried.items()) for answer in answers) == [(), (("timeout", 1),)]


async def test_tries_of_all_endpoints_are_one_calls() -> None:
    """Given a fallback that answers, then the tries of the endpoint before it are counted as well, and the times that
    the call waited are reported by profile."""
    with OfflineServer(faults=Faults(fail_first=4)) as broken, OfflineServer() as server:
        async with gateway(broken.url, fallbacks=(Fallback("q"),)) as model:
            model.register(ModelProfile("q", KEY, server.url))
            answer = await model.call(request())
    assert (answer.profile, answer.retried, sorted(answer.waited)) == ("q", {"server_error": 3}, ["p", "q"])


async def test_chunks_are_timed() -> None:
    """Given a stream, then the times between its chunks with output are counted; one that comes whole has none."""
    script = [{"text": "word " * 40}]
    with OfflineServer(policy_from_script(script), chunk_delay=0.001) as server:
        async with gateway(server.url) as model:
            deltas: list[Piece] = []
            answer = await model.call(request(), deltas.append)
    total, *counts = answer.chunk_times
    assert sum(counts) in (len(deltas), len(deltas) - 1)  # the first chunk of all may have no output
    assert 0 < total <= answer.duration - answer.first_chunk
    async with endpoint(http_answer(whole(), "application/json")) as url, gateway(url) as model:
        answer = await model.call(request())
    assert (answer.content, answer.chunk_times, answer.first_chunk) == ("hi", (), 0)


async def test_cut_stream_restarts() -> None:
    """A stream that ends in the middle is tried again; who got text learns that it starts over."""
    whole = http_answer(stream_of({"content": "com"}, {"content": "plete"}))
    ended = http_answer(stream_of({"content": "com"}, finish=None, done=False))
    broken = whole[: whole.index(b"plete")]
    for cut in (ended, broken):
        async with endpoint(cut, whole) as url, gateway(url) as model:
            seen: list[str] = []

            def see(piece: Piece, seen: list[str] = seen) -> None:
                seen.append(piece.text)

            answer = await model.call(request(), see, lambda seen=seen: seen.append("RESTART"))  # type: ignore[misc]
        assert (answer.content, answer.retries) == ("complete", 1)
        assert seen == ["com", "RESTART", "com", "plete"]


async def test_no_restart_without_text() -> None:
    """A try that delivered nothing is repeated silently."""
    with OfflineServer(faults=Faults(fail_first=1)) as server:
        async with gateway(server.url) as model:
            restarts: list[int] = []
            await model.call(request(), lambda text: None, lambda: restarts.append(1))
    assert restarts == []


async def test_nobody_listens() -> None:
    """A refused connection is retried, then reported with its address."""
    async with endpoint(b"") as url:
        pass
    async with gateway(url) as model:
        error = await failure_of(model.call(request()), ModelUnavailable)
    assert url in error.message
    assert "Connect" in error.message


async def test_retry_after_is_obeyed() -> None:
    """A retry is never earlier than the endpoint asks for, and none is made that would be past the deadline."""
    with OfflineServer(faults=Faults(fail_first=1, retry_after=0.2)) as server:
        async with gateway(server.url) as model:
            answer = await model.call(request())
    assert answer.duration >= 200_000
    with OfflineServer(faults=Faults(fail_first=1, fail_status=429, retry_after=60)) as server:
        async with gateway(server.url) as model:
            error = await failure_of(model.call(request(deadline=30.0)), ModelUnavailable)
        assert server.count == 1
    assert "past the deadline" in error.message


def test_retry_after_forms() -> None:
    """Milliseconds come first, then seconds, then a date; what is unreadable or past is ignored."""
    now = 1_700_000_000.0
    date = formatdate(now + 90, usegmt=True)
    assert retry_after_seconds({"retry-after-ms": "1500", "retry-after": "9"}, now) == 1.5
    assert retry_after_seconds({"retry-after-ms": "x", "retry-after": "9"}, now) == 9
    assert retry_after_seconds({"retry-after": date}, now) == 90
    for text in ("soon", "-1", "inf", "nan", formatdate(now - 90, usegmt=True), ""):
        assert retry_after_seconds({"retry-after": text}, now) is None
    assert retry_after_seconds({}, now) is None


async def test_the_deadline_bounds_all_tries() -> None:
    """A call that hangs ends with its deadline, and its connection is closed."""
    with OfflineServer() as server:
        server.hold()
        async with gateway(server.url) as model:
            error = await failure_of(model.call(request(deadline=0.5)), ModelUnavailable)
            await asyncio.to_thread(server.wait, lambda stats: stats.aborted == 1)
    assert "0.5 s" in error.message


@pytest.mark.parametrize("begun", [False, True])
async def test_a_stream_that_stalls_is_given_up(begun: bool) -> None:
    """An endpoint that keeps a connection open and says nothing, before its answer or in the midst of it, is asked
    again; what had been streamed is void. In the end the error says so."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    started = stream_of({"content": "so far"}, finish=None, done=False).encode()
    heard: list[str] = []
    async with (
        endpoint(head + started if begun else b"", on_close=asyncio.Event()) as url,
        gateway(url) as model,
    ):
        hear: Callable[[Piece], None] = lambda piece: heard.append(piece.text)  # noqa: E731
        call = model.call(request(stall=0.3), on_delta=hear, on_restart=lambda: heard.append("again"))
        error = await failure_of(call, ModelUnavailable)
    assert "said nothing for 0.3 s" in error.message
    assert error.details["retries"] == 3
    assert heard == (["so far", "again"] * 3 + ["so far"] if begun else [])


@pytest.mark.thorough
@pytest.mark.parametrize("limit", [{"stall": 0.7}, {"deadline": 0.7}])
async def test_a_pause_of_this_process_is_not_the_endpoints(limit: dict[str, float]) -> None:
    """Given an answer that comes while this process stands still, for longer than an endpoint may be silent and a call
    may take, then it is read: it is paid for."""
    with OfflineServer() as server:
        server.hold()
        async with gateway(server.url) as model:
            call = asyncio.ensure_future(model.call(request(**limit)))
            await asyncio.to_thread(server.wait, lambda stats: stats.requests == 1)
            await asyncio.sleep(0)
            server.release()
            time.sleep(3.0)  # noqa: ASYNC251 (as a process does that is stopped)
            assert (await call).retries == 0
        assert server.count == 1


# Refusals and garbage


def refusing(status: int, message: str, code: str | None = None) -> Callable[[dict[str, Any]], Reply]:
    def policy(body: dict[str, Any]) -> Reply:
        raise Refusal(status, message, code)

    return policy


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, None),
        (401, "invalid_api_key"),
        (403, None),
        (404, "model_not_found"),
        (422, None),
        (429, "insufficient_quota"),
    ],
)
async def test_refusals_are_final(status: int, code: str | None) -> None:
    """What repeating can't cure is not repeated; the endpoint's words are passed on, without the key it may quote."""
    with OfflineServer(refusing(status, f"no, not with {KEY}!", code)) as server:
        async with gateway(server.url) as model:
            error = await failure_of(model.call(request()), ModelRefused)
        assert server.count == 1
    assert "no, not with ***!" in error.message
    assert (error.details["status"], error.details.get("provider_code")) == (status, code)


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (http_answer("<html>It works!</html>", "text/html; charset=utf-8"), "text/html"),
        (http_answer("<html>Not found</html>", "text/html", "404 Not Found"), "404"),
        (http_answer('{"detail": "Not Found"}', "application/json", "404 Not Found"), "404"),
        (http_answer("hello", "text/plain"), "text/plain"),
        (http_answer("[]", "application/json"), "not a JSON object"),
        (http_answer("{}", "application/json"), "without an answer"),
        (http_answer("data: {oops\n\n"), "not JSON"),
        (http_answer('data: {"choices": [1]}\n\n'), "not a chat completion"),
        (http_answer("data: " + "[" * 5_000 + "\n\n"), "not JSON"),
        (http_answer(whole(tool_calls=[{"id": 5, "function": {"name": "f"}}]), "application/json"), "id is no text: 5"),
        (http_answer(whole(tool_calls=[{"function": {"name": ["f"]}}]), "application/json"), "name is no text: ['f']"),
        (http_answer(whole({"prompt_tokens": "10"}), "application/json"), "prompt_tokens is no number of tokens: '10'"),
        (http_answer(whole({"prompt_tokens": 10**20}), "application/json"), "is no number of tokens"),
        (http_answer(whole({"completion_tokens": -1}), "application/json"), "is no number of tokens: -1"),
        (http_answer(whole(finish={"type": "stop"}), "application/json"), "finish_reason is no text"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "not HTTP"),
    ],
)
async def test_garbage_is_named(answer: bytes, word: str) -> None:
    """What is no chat completion is reported with address, status and content type, and not repeated."""
    async with endpoint(answer) as url, gateway(url) as model:
        error = await failure_of(model.call(request()), ModelProtocolError)
    assert word in error.message
    assert url in error.message
    assert "/v1" in str(error)
    assert error.details["retries"] == 0


async def test_errors_under_status_200() -> None:
    """An error in the stream is retried unless its code says that it is final."""
    good = http_answer(stream_of({"content": "ok"}))
    passing = http_answer('data: {"error": {"message": "overloaded", "code": 503}}\n\n')
    async with endpoint(passing, good) as url, gateway(url) as model:
        assert (await model.call(request())).retries == 1
    final = http_answer('{"error": {"message": "no such model", "code": 404}}', "application/json")
    async with endpoint(final) as url, gateway(url) as model:
        error = await failure_of(model.call(request()), ModelRefused)
    assert "no such model" in error.message


async def test_the_query_of_a_base_url_is_not_shown() -> None:
    """The query of a base URL, which can hold a key, stays out of messages and details."""
    async with endpoint(http_answer("no", "text/plain")) as url, gateway(f"{url}?key=pa55word") as model:
        error = await failure_of(model.call(request()), ModelProtocolError)
    assert "pa55word" not in str(error) + json.dumps(error.details)
    assert error.details["base_url"] == url


# Profiles, concurrency, cancellation


async def test_profiles() -> None:
    """Unknown profiles are an error of their own; keys and URLs that can't be used are refused at registration."""
    model = Gateway()
    with pytest.raises(ModelProfileMissing, match="'p'"):
        await model.call(request())
    for key in ("", " ", "a\nb", "schlüssel"):
        with pytest.raises(InvalidConfiguration) as caught:
            model.register(ModelProfile("p", key, "http://127.0.0.1:1/v1"))
        assert key.strip() == "" or key not in str(caught.value)
    for url in ("localhost:8000/v1", "http://", "ftp://host/v1", "http://user:pa55word@host/v1", "http://host:x/v1"):
        with pytest.raises(InvalidConfiguration, match="OPENAI_BASE_URL") as caught:
            model.register(ModelProfile("p", KEY, url))
        assert "pa55word" not in str(caught.value)
        assert "@" in url or url in str(caught.value)
    assert not model.knows("p")
    model.register(ModelProfile("p", "k", "http://127.0.0.1:1/v1"))
    assert model.knows("p")
    model.register(ModelProfile("q", "k", "http://127.0.0.1:1/team@work/v1"))  # no password: it is in the path
    assert model.knows("q")
    await model.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"base_url": "http://10.0.0.256:8000/v1"}, {"max_concurrency": -1}, {"max_concurrency": 0},
        {"requests_per_minute": 0},
    ],
)  # fmt: skip
def test_a_profile_that_no_endpoint_can_be_made_of(wrong: dict[str, Any]) -> None:
    """Given such a profile, then it is refused before anybody keeps it: who does can't start any more."""
    model = Gateway()
    with pytest.raises(InvalidConfiguration):
        model.register(ModelProfile(**{"name": "p", "api_key": KEY, "base_url": "http://127.0.0.1:1/v1", **wrong}))
    assert not model.knows("p")


@pytest.mark.parametrize("kind", ["text/event-stream", "application/json"])
async def test_an_answer_without_end(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given an endpoint that sends more than any model says, then the call fails, and the gateway keeps its memory."""
    monkeypatch.setattr("understudy.gateway.tries.MAX_ANSWER", 1_000)
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\n\r\n".encode()
    closed = asyncio.Event()
    async with endpoint(head + b"data: 1\n" * 1_000, on_close=closed) as url, gateway(url) as model:
        async with asyncio.timeout(20):
            with pytest.raises(ModelProtocolError):
                await model.call(request())
            await closed.wait()


async def test_replacing_a_profile_spares_calls_under_way() -> None:
    """A call goes on with the profile it began with; the next one uses the new key."""
    with OfflineServer() as server:
        async with gateway(server.url) as model:
            server.hold()
            first = asyncio.create_task(model.call(request("one")))
            await asyncio.to_thread(server.wait, lambda stats: stats.in_flight == 1)
            model.register(ModelProfile("p", "sk-new", server.url))
            second = asyncio.create_task(model.call(request("two")))
            await asyncio.to_thread(server.wait, lambda stats: stats.in_flight == 2)
            await asyncio.to_thread(server.release)
            assert [(await task).retries for task in (first, second)] == [0, 0]
        assert [r.headers["authorization"] for r in server.requests] == [f"Bearer {KEY}", "Bearer sk-new"]


async def test_cancelling_closes_the_connection() -> None:
    """A cancelled call is aborted at the endpoint, and not repeated."""
    with OfflineServer() as server:
        server.hold()
        async with gateway(server.url) as model:
            task = asyncio.create_task(model.call(request()))
            await asyncio.to_thread(server.wait, lambda stats: stats.in_flight == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(server.wait, lambda stats: (stats.aborted, stats.requests) == (1, 1))


async def test_max_concurrency_is_first_come_first_served() -> None:
    """No more calls than allowed are in flight; the others follow in order, and waiting costs no deadline."""
    most = 0

    def policy(body: dict[str, Any]) -> Reply:
        nonlocal most
        most = max(most, server.in_flight + 1)
        return Reply(text=body["messages"][0]["content"], delay=0.01)

    with OfflineServer(policy) as server:
        async with gateway(server.url, max_concurrency=2) as model:
            server.hold()
            tasks = [asyncio.create_task(model.call(request(str(number), deadline=5.0))) for number in range(8)]
            await asyncio.to_thread(server.wait, lambda stats: stats.in_flight == 2)
            await asyncio.to_thread(server.release)
            answers = await asyncio.gather(*tasks)
        order = [int(r.body["messages"][0]["content"]) for r in server.requests]
    assert [answer.content for answer in answers] == [str(number) for number in range(8)]
    assert most == 2
    assert all(abs(place - number) <= 1 for place, number in enumerate(order))  # two connections may overtake by one


async def test_requests_per_minute_paces() -> None:
    """Requests keep their distance; the first goes at once."""
    with OfflineServer() as server:
        async with gateway(server.url, requests_per_minute=1_200) as model:  # one in 50 ms
            answers = await asyncio.gather(*(model.call(request(str(number))) for number in range(4)))
    starts = [answer.started_at for answer in answers]
    assert all(later - earlier >= 49_000 for earlier, later in pairwise(starts))


@pytest.mark.thorough
async def test_a_thousand_calls_at_once() -> None:
    """1,024 calls are in flight at the same time; later ones use the same connections."""
    with OfflineServer() as server:
        async with gateway(server.url) as model:
            for number in (1_024, 100):
                server.hold()
                tasks = [asyncio.create_task(model.call(request(f"{number} {n}"))) for n in range(number)]
                await asyncio.to_thread(server.wait, lambda stats, number=number: stats.in_flight == number)
                connections = len(server.connections)
                await asyncio.to_thread(server.release)
                answers = await asyncio.gather(*tasks)
                assert [answer.content for answer in answers] == [f"offline: {number} {n}" for n in range(number)]
                assert connections == 1_024
        assert (server.stats.completed, server.stats.repeats, server.stats.aborted) == (1_124, 0, 0)
