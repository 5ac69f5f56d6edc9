"""Secrets never come out: of logs, of events, of captured content; and texts without any are left as they are."""

from __future__ import annotations

import io
import json
import logging
import string
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from understudy import logs, redaction
from understudy.actors.tools import tool
from understudy.errors import ToolError
from understudy.events import ERROR_CHARACTERS, Event, RunFinished, SessionCrashed
from understudy.identifiers import run_span_identifier, tool_span_identifier
from understudy.messages import Message, ToolCall
from understudy.observability.content import (
    ATTRIBUTE_CHARACTERS,
    LONGEST_SECRET,
    TEXT_CHARACTERS,
    chat_content,
    tool_content,
)
from understudy.observability.event_lines import log_events
from understudy.redaction import HIDDEN, Redactor, passwords
from understudy.telemetry import header_values

from . import kernel as k

ALPHANUMERIC = string.ascii_letters + string.digits
BODY = st.text(ALPHANUMERIC, min_size=36, max_size=60).map(lambda text: f"{text}7")
AROUND = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)

SHAPED = st.one_of(
    BODY.map(lambda body: f"sk-{body}"),
    BODY.map(lambda body: f"sk-proj-{body}"),
    BODY.map(lambda body: f"Bearer {body}"),
    BODY.map(lambda body: f"ghp_{body}"),
    st.text(string.ascii_uppercase + string.digits, min_size=16, max_size=16).map(lambda body: f"AKIA{body}"),
    BODY.map(lambda body: f"postgresql://user:{body}@host/db"),
    BODY.map(lambda body: f"https://:{body}@host"),
    BODY.map(lambda body: f"-----BEGIN RSA PRIVATE KEY-----\n{body}\n-----END RSA PRIVATE KEY-----"),
    BODY.map(lambda body: f"-----BEGIN PRIVATE KEY-----\n{body}"),
    BODY.map(lambda body: f"password={body}"),
    BODY.map(lambda body: f"OPENAI_API_KEY={body}"),
    BODY.map(lambda body: f"Authorization: Basic {body}"),
)


def secret_of(planted: str) -> str:
    """The part of a planted text that nobody may see."""
    return max(planted.replace("\n", " ").replace("@", " ").replace(":", " ").replace("=", " ").split(), key=len)


@given(before=AROUND, planted=SHAPED, after=AROUND)
def test_a_secret_of_a_known_shape_never_comes_out(before: str, planted: str, after: str) -> None:
    """Wherever it stands in a text, as long as it stands for itself."""
    out = Redactor().text(f"{before} {planted} {after}")
    assert secret_of(planted) not in out
    assert HIDDEN in out
    assert Redactor().text(out) == out


@given(before=AROUND, secret=st.text(st.characters(exclude_categories=("Cs",)), min_size=8, max_size=40), after=AROUND)
def test_a_known_value_never_comes_out(before: str, secret: str, after: str) -> None:
    """As it is, and as JSON writes it."""
    assume(set(secret) != {"*"})
    redactor = Redactor([secret])
    assert secret not in redactor.text(f"{before}{secret}{after}").replace(HIDDEN, "\x00")
    inner = json.dumps(secret)[1:-1]
    assert inner not in redactor.text(json.dumps({"value": f"{before}{secret}"})).replace(HIDDEN, "\x00")
    data = redactor.data({"a": [{"b": secret}, 1, None], secret: "x"})
    assert secret not in json.dumps(data, ensure_ascii=False).replace(HIDDEN, "")


@given(st.text(st.sampled_from("abc déf 123 .,;:!?()[]{}<>=\"'\n\t/-_*#+@€漢"), max_size=300))
def test_text_without_secrets_is_unchanged(text: str) -> None:
    """Nothing is taken out that only looks a little like one."""
    assume("://" not in text)
    assert Redactor(["secret-value-1"]).text(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "the bearer of this letter", "Bearer authentication-is-used-here", "basic understanding",
        "task-1234567890123456",
        "https://example.com/a:b@c", "ask-me-anything-about-sklearn", "sk-learn-is-a-library-for-people",
        "c-0123456789abcdef0123456789abcdef", "0af7651916cd43dd8448eb211c80319c", "http://host:8080/path@2",
        "run_id=0190a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5b", "-----BEGIN CERTIFICATE-----\nabc\n-----END CERTIFICATE-----",
        "password: none", "AKIA is a prefix", "tokens=12345678",
    ],
)  # fmt: skip
def test_what_only_looks_like_one_stays(text: str) -> None:
    """Ids, hashes, addresses, words."""
    assert Redactor().text(text) == text


def test_rules_of_the_users_own() -> None:
    """Regular expressions from UNDERSTUDY_REDACT come on top."""
    assert Redactor(rules=[r"ACME-\d+"]).text("order ACME-123 for Bob") == f"order {HIDDEN} for Bob"


def test_passwords_of_a_store() -> None:
    """As written, and decoded; so are the values of headers."""
    assert passwords("postgresql://me:p%40ss%20word@h1,h2/db") == ["p%40ss%20word", "p@ss word"]
    assert passwords("sqlite:////tmp/x.db") == []
    headers = {"OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20x,x-key=abc", "OTEL_SERVICE_NAME": "a=b"}
    assert header_values(headers) == ["Bearer%20x", "abc", "Bearer x", "abc"]


@pytest.fixture
def known_secrets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Secrets that this process knows, for the length of a test."""
    monkeypatch.setattr(redaction, "_known", set())
    monkeypatch.setattr(redaction, "_rules", [])
    monkeypatch.setattr(redaction, "_current", None)
    monkeypatch.setenv("SOME_API_KEY", "of-the-environment")
    redaction.know("given-by-a-client")
    yield
    redaction._current = None


def lines_of(variables: dict[str, str], write: object) -> list[str]:
    stream = io.StringIO()
    logger = logging.getLogger("understudy")
    before = (logger.level, logger.propagate, logging.getLogger("opentelemetry").propagate)
    logs.set_up("node", variables, stream)
    try:
        assert callable(write)
        write(logging.getLogger("understudy.somewhere"))
    finally:
        for name in ("understudy", "opentelemetry"):
            other = logging.getLogger(name)
            for handler in [handler for handler in other.handlers if handler.get_name() == "understudy"]:
                other.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate, logging.getLogger("opentelemetry").propagate = before[1:]
    return stream.getvalue().splitlines()


@pytest.mark.usefixtures("known_secrets")
def test_log_lines_are_json_with_ids_and_without_secrets() -> None:
    """One object per line: what is logged within a run has its ids, its own win; exceptions are in the object."""

    def write(log: logging.Logger) -> None:
        with logs.about(session_id="s", run_id="r", trace_id="", span_id="x"):
            log.warning("key %s and %s", "of-the-environment", "given-by-a-client", extra={"span_id": "y"})
        try:
            raise ValueError("Bearer abcdefghij1234567890")
        except ValueError:
            log.exception("failed")
        log.debug("quiet")

    first, second = map(json.loads, lines_of({"UNDERSTUDY_LOG_FORMAT": "json"}, write))
    assert {name: first[name] for name in ("level", "role", "session_id", "run_id", "span_id")} == {
        "level": "warning", "role": "node", "session_id": "s", "run_id": "r", "span_id": "y",
    }  # fmt: skip
    assert first["message"] == "key *** and ***"
    assert "trace_id" not in first
    assert "session_id" not in second
    assert "ValueError: Bearer ***" in second["error"]


@pytest.mark.usefixtures("known_secrets")
def test_text_lines_and_levels() -> None:
    """Text by default; the level is the variable's; a rule of the user's applies."""
    variables = {"UNDERSTUDY_LOG_LEVEL": "debug", "UNDERSTUDY_REDACT": "ACME-\\d+"}

    def write(log: logging.Logger) -> None:
        with logs.about(session_id="s"):
            log.debug("order ACME-77")

    (line,) = lines_of(variables, write)
    assert line.endswith("DEBUG understudy.somewhere: order *** session_id=s")


@pytest.mark.usefixtures("known_secrets")
def test_events_are_log_lines_without_content() -> None:
    """A crash is logged at INFO with its ids; the rest only for debugging; texts of people and models never."""
    envelope = {"session_id": "s", "run_id": "r", "trace_id": "a" * 32, "agent": "lead"}
    events: list[Event] = [
        SessionCrashed(**envelope, pid=7), RunFinished(**envelope, status="failed", error_message="private"),
    ]  # fmt: skip
    (line,) = lines_of({"UNDERSTUDY_LOG_FORMAT": "json"}, lambda _log: log_events(events))
    found = json.loads(line)
    assert found["message"].startswith("session_crashed lead cause=process_died pid=7")
    assert (found["trace_id"], found["span_id"]) == ("a" * 32, run_span_identifier("s", "r"))
    both = lines_of({"UNDERSTUDY_LOG_LEVEL": "debug"}, lambda _log: log_events(events))
    assert len(both) == 2
    assert "private" not in "".join(both)


# Content in spans.


def test_content_has_the_conventions_form() -> None:
    """Messages as role and parts; calls and their results in them; secrets hidden before anything is cut."""
    call = ToolCall("r/1/0", "look", '{"key":"sk-abcdefghijklmnop1234"}')
    before = [
        Message("user", "hello"),
        Message("assistant", None, (call,)),
        Message("tool", "seen", tool_call_id="r/1/0"),
    ]
    answer = Message("assistant", "done", extra={"finish_reason": "stop"})
    found = chat_content(before, answer, Redactor().text)
    asked = json.loads(found["gen_ai.input.messages"])
    assert [message["role"] for message in asked] == ["user", "assistant", "tool"]
    assert asked[0]["parts"] == [{"type": "text", "content": "hello"}]
    assert asked[1]["parts"] == [{"type": "tool_call", "id": "r/1/0", "name": "look", "arguments": '{"key":"***"}'}]
    assert asked[2]["parts"] == [{"type": "tool_call_response", "id": "r/1/0", "response": "seen"}]
    assert json.loads(found["gen_ai.output.messages"]) == [
        {"role": "assistant", "parts": [{"type": "text", "content": "done"}], "finish_reason": "stop"}
    ]
    assert tool_content('{"a":1}', None, str) == {"gen_ai.tool.call.arguments": '{"a":1}'}
    assert chat_content(before, None, str) == {}


def test_content_is_bounded() -> None:
    """A long text is cut, and of a long history the last messages are kept."""
    before = [Message("user", f"{number} " + "x" * 10_000) for number in range(40)]
    found = chat_content(before, Message("assistant", "y" * 10_000), str)
    asked = json.loads(found["gen_ai.input.messages"])
    assert len(found["gen_ai.input.messages"]) <= ATTRIBUTE_CHARACTERS
    assert asked[-1]["parts"][0]["content"].startswith("39 ")
    assert "characters left out" in found["gen_ai.output.messages"]
    assert len(found["gen_ai.output.messages"]) < TEXT_CHARACTERS + 200
    half = "z" * (TEXT_CHARACTERS - 6) + " sk-abcdefghijklmnop1234"
    assert "sk-ab" not in tool_content("{}", half, Redactor().text)["gen_ai.tool.call.result"]


def test_what_is_left_out_is_not_looked_through() -> None:
    """Of a text of any length no more is searched for secrets than what is kept and one secret behind it."""
    looked: list[int] = []

    def redact(text: str) -> str:
        looked.append(len(text))
        return text

    found = tool_content("{}", "x" * 1_000_000, redact)["gen_ai.tool.call.result"]
    assert max(looked) == TEXT_CHARACTERS + LONGEST_SECRET
    assert found.endswith(f"[… {1_000_000 - TEXT_CHARACTERS} characters left out]")


async def test_content_does_not_hold_up_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets are looked for outside the event loop, and of one call at a time."""
    threads: list[bool] = []

    def redact(text: str) -> str:
        threads.append(threading.current_thread() is threading.main_thread())
        return text

    monkeypatch.setattr("understudy.node.projection.redacted", redact)
    telemetry = {"OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "true"}
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path / "spans", telemetry=telemetry) as kernel:
        await kernel.run("s", k.spec(k.script("done")), PRIVATE)
    assert threads
    assert not any(threads)


@tool(on_crash="rerun")
async def stumble() -> str:
    """Fail, and say too much."""
    raise ToolError("no access with given-by-a-client nor sk-abcdefghijklmnop1234")


PRIVATE = "Tell nobody of the heron"


@pytest.mark.parametrize("asked_for", [False, True])
async def test_content_leaves_only_when_asked_for(tmp_path: Path, asked_for: bool) -> None:
    """Prompt, answer, arguments and result are in the exported spans with the variable, and nowhere without it."""
    telemetry = {"OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "true"} if asked_for else {}
    telemetry["UNDERSTUDY_EVENT_LOG"] = str(tmp_path / "log")
    look = [("look", {"path": str(tmp_path / "notes"), "text": "the heron's arguments"})]
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path / "spans", telemetry=telemetry) as kernel:
        await kernel.run("s", k.spec(k.script(look, "the heron's answer"), [k.look]), PRIVATE)
    (file,) = (tmp_path / "spans").glob("*.jsonl")
    exported = file.read_text()
    events = "".join(path.read_text() for path in (tmp_path / "log").iterdir())
    assert "heron" not in events
    assert "run_finished" in events
    if not asked_for:
        assert "heron" not in exported
        return
    for text in (PRIVATE, "the heron's answer", "the heron's arguments", "noted the heron's arguments"):
        assert text in exported
    spans = [json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"][0] for line in exported.splitlines()]
    tool = next(span for span in spans if span["spanId"] == tool_span_identifier("s", "r/1/0"))
    assert {item["key"] for item in tool["attributes"]} >= {"gen_ai.tool.call.arguments", "gen_ai.tool.call.result"}


@pytest.mark.usefixtures("known_secrets")
async def test_error_messages_are_redacted_on_their_way_into_events(tmp_path: Path) -> None:
    """What a tool's error quotes is not in the log: neither a known shape nor a value that the service knows."""
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path / "spans") as kernel:
        await kernel.run("s", k.spec(k.script([("stumble", {})], "done"), [stumble]))
        (event,) = [event for event in await kernel.events("s") if event["type"] == "tool_finished"]
    assert "no access with *** nor ***" in event["data"]["error_message"]


@tool(on_crash="rerun")
async def ramble(before: int) -> str:
    """Fail, and say too much after a while."""
    raise ToolError("-" * before + "given-by-a-client")


@pytest.mark.usefixtures("known_secrets")
async def test_no_part_of_a_secret_is_left_where_a_message_is_cut(tmp_path: Path) -> None:
    """Given an error whose text is cut within a secret, then nothing of the secret is in the events."""
    calls = [("ramble", {"before": before}) for before in (285, 295, 485, 495)]
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path / "spans") as kernel:
        await kernel.run("s", k.spec(k.script(calls, "done"), [ramble]))
        found = [event["data"] for event in await kernel.events("s") if event["type"] == "tool_finished"]
    assert len(found) == 4
    assert all(len(data["error_message"]) <= ERROR_CHARACTERS for data in found)
    assert not [data["error_message"] for data in found if data["error_message"].strip("TolEr: *-")]


@pytest.mark.usefixtures("known_secrets")
def test_a_secret_may_come_while_texts_are_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a thread that prepares to redact while another learns a secret, then it is kept out from then on."""
    learning = threading.Thread(target=redaction.know, args=("learnt-meanwhile",))

    def prepare(values: Iterable[str], rules: Iterable[str]) -> Redactor:
        found = Redactor(values, rules)
        learning.start()
        learning.join(0.2)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(redaction, "Redactor", prepare)
        redaction.redacted("text")
    learning.join()
    assert redaction.redacted("learnt-meanwhile") == HIDDEN
