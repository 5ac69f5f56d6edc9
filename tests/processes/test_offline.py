"""The offline model: protocol, default policy, faults, counters, process."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Any

import pytest

from understudy.testing.offline import Faults, OfflineServer, Reply, policy_from_script, register_policy


def body_of(*messages: Any, **more: Any) -> dict[str, Any]:
    """A request; a text stands for a user message."""
    made = [{"role": "user", "content": item} if isinstance(item, str) else item for item in messages]
    return {"model": "offline", "messages": made, **more}


def post(server: OfflineServer, body: Any, path: str = "/chat/completions") -> tuple[int, str, dict[str, str]]:
    """Status, text and headers of the answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(server.url + path, data)) as response:
            return response.status, response.read().decode(), dict(response.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), {name.lower(): text for name, text in error.headers.items()}


def ask(server: OfflineServer, *messages: Any, **more: Any) -> dict[str, Any]:
    """The message of an answer that must succeed."""
    status, text, _ = post(server, body_of(*messages, **more))
    assert status == 200, text
    message: dict[str, Any] = json.loads(text)["choices"][0]["message"]
    return message


def calls_of(message: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]]


def assistant(*identifiers: str) -> dict[str, Any]:
    calls = [
        {"id": identifier, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        for identifier in identifiers
    ]
    return (
        {"role": "assistant", "content": None, "tool_calls": calls} if calls else {"role": "assistant", "content": ""}
    )


def result(text: str, identifier: str = "call_0") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": identifier, "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def test_echo(server: OfflineServer) -> None:
    """Without instructions in the conversation the last user message is echoed, within 2,000 characters."""
    assert ask(server, "one", "two") == {"role": "assistant", "content": "offline: two", "refusal": None}
    assert len(ask(server, "x" * 5_000)["content"]) == 2_000


def test_calls_in_the_user_message(server: OfflineServer) -> None:
    """`call NAME {json}` lines become tool calls of one round; unreadable arguments go out as they are."""
    text = 'please\ncall read {"path": "a"}\ncall list\ncall bad {oops'
    calls = calls_of(ask(server, text))
    assert calls == [("call_0", "read", '{"path":"a"}'), ("call_1", "list", "{}"), ("call_2", "bad", "{oops")]
    message = ask(server, text, assistant("call_0", "call_1"), result("A"), result("B", "call_1"))
    assert message["content"] == "offline: A B"


def test_script_in_the_system_message(server: OfflineServer) -> None:
    """A script is played by the number of assistant messages since the last user message, then the echo follows."""
    script = system('be good\noffline-script: [{"tool_calls": [["f", {"n": 1}]]}, {"text": "fine"}]\nmore')
    assert calls_of(ask(server, script, "old", assistant(), "go")) == [("call_0", "f", '{"n":1}')]
    turn = [script, "go", assistant("call_0"), result("r")]
    assert ask(server, *turn)["content"] == "fine"
    assert "tool_calls" in ask(server, *turn, assistant(), "next")
    assert ask(server, *turn, assistant())["content"] == "offline: r"


def test_policy_named_in_the_system_message(server: OfflineServer) -> None:
    """A marker selects a registered policy or one by its path, but nothing outside `understudy.`."""
    register_policy("shout", lambda body: Reply(text=body["messages"][-1]["content"].upper()))
    assert ask(server, system("offline-policy: shout"), "hey")["content"] == "HEY"
    status, text, _ = post(server, body_of(system("offline-policy: os:system"), "hey"))
    assert (status, "neither registered" in text) == (400, True)
    status, text, _ = post(server, body_of(system("offline-policy: understudy.nothing:here"), "hey"))
    assert (status, "can't be imported" in text) == (400, True)


def test_policy_from_script_and_failing_policy() -> None:
    """A script can be a server's policy; a policy that raises is reported to the client, and not as retryable."""
    with OfflineServer(policy_from_script([{"text": "a", "finish_reason": "length"}])) as server:
        choice = json.loads(post(server, body_of("hi"))[1])["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("a", "length")
    with OfflineServer(policy_from_script([{"tool_calls": [["only a name"]]}])) as server:
        status, text, _ = post(server, body_of("hi"))
        assert (status, "policy failed" in json.loads(text)["error"]["message"]) == (400, True)


@pytest.mark.parametrize("delay", [0.0, 0.001])
def test_stream_equals_whole(delay: float) -> None:
    """The deltas of a stream add up to the answer that is not streamed, with usage only when asked for."""
    script = [{"text": "héllo " * 40, "tool_calls": [["f", {"a": "ü"}], ["g", {}]]}]
    with OfflineServer(policy_from_script(script), chunk_delay=delay) as server:
        whole = json.loads(post(server, body_of("go"))[1])
        _, text, headers = post(server, body_of("go", stream=True, stream_options={"include_usage": True}))
        _, bare, _ = post(server, body_of("go", stream=True))
    assert headers["content-type"] == "text/event-stream"
    lines = text.removesuffix("\n\n").split("\n\n")
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert "usage" not in bare
    content, calls = "", {}
    for delta in (chunk["choices"][0]["delta"] for chunk in chunks[:-1]):
        content += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            known = calls.setdefault(call["index"], [call.get("id"), call["function"].get("name"), ""])
            known[2] += call["function"]["arguments"]
    message = whole["choices"][0]["message"]
    assert content == message["content"]
    assert [tuple(call) for call in calls.values()] == calls_of(message)
    assert chunks[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "tool_calls"


def test_usage_and_length_limit(server: OfflineServer) -> None:
    """Tokens are a quarter of the characters; `max_tokens` cuts the text and says so."""
    answer = json.loads(post(server, body_of("x" * 100, max_tokens=5))[1])
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["message"]["content"] == "offline: xxxxxxxxxxx"
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 5


@pytest.mark.parametrize(
    ("messages", "word"),
    [
        ([], "non-empty"),
        (["hi", result("orphan")], "must be a response to a preceding message"),
        (["hi", assistant("call_0"), "again"], "must be followed by tool messages"),
        (["hi", assistant("call_0")], "without response"),
        (["hi", assistant("call_0"), result("a"), result("b")], "must be a response"),
        ([{"role": "robot", "content": "hi"}], "not supported"),
    ],
)
def test_refuses_what_the_real_endpoint_refuses(server: OfflineServer, messages: list[Any], word: str) -> None:
    """Broken conversations get a 400 in OpenAI's form; above all calls without results and results without calls."""
    status, text, _ = post(server, body_of(*messages))
    error = json.loads(text)["error"]
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert word in error["message"]


def test_other_paths_and_bodies(server: OfflineServer) -> None:
    """Models are listed; unknown paths are 404, wrong methods 405, unreadable bodies 400."""
    with urllib.request.urlopen(server.url + "/models") as response:
        assert json.load(response)["data"][0]["id"] == "offline"
    assert post(server, {}, "/nothing")[0] == 404
    assert post(server, {}, "/models")[0] == 405
    assert post(server, b"{")[0] == 400
    assert post(server, {"messages": []})[0] == 400


def test_keep_alive_and_pipelining(server: OfflineServer) -> None:
    """One connection serves many requests, also when they arrive in one packet or byte by byte."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.connect()
    payload = json.dumps(body_of("hi")).encode()
    raw = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(payload), payload)
    connection.sock.sendall(raw + raw)
    for byte in raw:
        connection.sock.sendall(bytes([byte]))
    received = connection.sock.makefile("rb")
    for _ in range(3):
        assert received.readline() == b"HTTP/1.1 200 OK\r\n"
        headers = dict(line.decode().strip().split(": ") for line in iter(received.readline, b"\r\n"))
        assert b"offline: hi" in received.read(int(headers["content-length"]))
    received.close()
    connection.close()
    assert server.count == 3


def test_faults_are_even_and_deterministic() -> None:
    """Shares hold over any stretch of requests, and the same request number always has the same fault."""
    faults = Faults(status_429=0.1, status_500=0.2, cut_stream=0.1)
    made = [faults.of(number) for number in range(1, 1_001)]
    assert made == [faults.of(number) for number in range(1, 1_001)]
    for fault, share in ((429, 100), (500, 200), ("cut", 100), (None, 600)):
        assert abs(made.count(fault) - share) <= 3
    assert [Faults(fail_first=2, fail_status=429).of(number) for number in (1, 2, 3)] == [429, 429, None]


def test_fault_answers() -> None:
    """Failures have OpenAI's form and the retry headers; a cut stream ends in the middle; HTML is HTML."""
    with OfflineServer(faults=Faults(fail_first=1, fail_status=429, retry_after=1.5)) as server:
        status, text, headers = post(server, body_of("hi"))
        assert (status, json.loads(text)["error"]["code"]) == (429, "rate_limit_exceeded")
        assert (headers["retry-after"], headers["retry-after-ms"]) == ("2", "1500")
        assert post(server, body_of("hi"))[0] == 200
        assert (server.stats.failed, server.stats.completed, server.stats.repeats) == (1, 1, 0)
    with OfflineServer(faults=Faults(cut_stream=1.0)) as server, pytest.raises(http.client.IncompleteRead):
        post(server, body_of("hi", stream=True))
    with OfflineServer(faults=Faults(html=True)) as server:
        _, text, headers = post(server, body_of("hi"))
        assert (headers["content-type"], text[:9]) == ("text/html; charset=utf-8", "<!doctype")


def test_counters_and_repeats(server: OfflineServer) -> None:
    """A request counts as repeated when its messages were answered before, whatever its other fields."""
    for more in ({}, {"max_tokens": 7}, {"stream": True}):
        post(server, body_of("same", **more))
    post(server, body_of("other"))
    with urllib.request.urlopen(server.url.removesuffix("/v1") + "/stats") as response:
        stats = json.load(response)
    assert {name: stats[name] for name in ("requests", "completed", "failed", "aborted", "in_flight", "repeats")} == {
        "requests": 4,
        "completed": 4,
        "failed": 0,
        "aborted": 0,
        "in_flight": 0,
        "repeats": 2,
    }
    assert [request.body["messages"][0]["content"] for request in server.requests] == ["same"] * 3 + ["other"]
    assert server.requests[0].headers["content-length"] == str(len(json.dumps(body_of("same"))))


def test_hold_and_abort(server: OfflineServer) -> None:
    """Held requests are in flight until released; a client that leaves is counted as aborted."""
    server.hold()
    payload = json.dumps(body_of("hi"))
    stays, leaves = (http.client.HTTPConnection("127.0.0.1", server.port) for _ in range(2))
    for connection in (stays, leaves):
        connection.request("POST", "/v1/chat/completions", payload)
    server.wait(lambda stats: stats.in_flight == 2)
    leaves.close()
    server.wait(lambda stats: stats.aborted == 1)
    server.release()
    with stays.getresponse() as response:
        assert response.status == 200
        response.read()
    stays.close()
    server.wait(lambda stats: (stats.completed, stats.in_flight) == (1, 0))
    with pytest.raises(TimeoutError, match="requests=2"):
        server.wait(lambda stats: stats.requests == 3, timeout=0.01)


def test_import_is_light() -> None:
    """Importing the offline model loads neither openai nor pydantic."""
    code = "import sys, understudy.testing.offline; print({'openai', 'pydantic', 'httpx2', 'ray'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_process_options_and_sigterm() -> None:
    """As a process it prints its URL when it is ready, takes a policy by path, and ends cleanly on SIGTERM."""
    options = ["--policy", "understudy.testing.policies:default_policy", "--fault-429", "1", "--retry-after", "3"]
    command = [sys.executable, "-m", "understudy.testing", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert ready["pid"] == process.pid
        with pytest.raises(urllib.error.HTTPError, match="429") as caught:
            urllib.request.urlopen(ready["url"] + "/chat/completions", json.dumps(body_of("hi")).encode())
        assert caught.value.headers["retry-after"] == "3"
        caught.value.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def test_process_dies_with_its_parent() -> None:
    """With `--parent-death` it ends when the process that started it is killed, not when only a thread of it ends."""
    code = (
        "import subprocess, sys, threading, time\n"
        "def start(): subprocess.Popen([sys.executable, '-m', 'understudy.testing', '--parent-death'])\n"
        "thread = threading.Thread(target=start); thread.start(); thread.join(); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        ready = json.loads(parent.stdout.readline())
        with urllib.request.urlopen(ready["url"] + "/models") as response:
            assert response.status == 200
        parent.kill()
        assert parent.stdout.read() == ""  # ends when the last holder of the pipe, the server, is gone
