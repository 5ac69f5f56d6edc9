"""The shared vocabulary: errors, identifiers, messages, events, records, settings, specifications."""

import dataclasses
import json
import math
import os
import pickle
import re
import uuid
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict

from understudy import errors, records
from understudy.config import (
    ModelProfile,
    Settings,
    check_store,
    differences,
    is_secret_name,
    kept_settings,
    model_profile_from_environment,
    redact,
)
from understudy.errors import InvalidConfiguration, InvalidInput, InvalidSpec, UnderstudyError, error_classes
from understudy.events import (
    EVENT_TYPES,
    CustomEvent,
    Event,
    ToolFinished,
    ToolInDoubt,
    ToolProgress,
    ToolStarted,
    UnknownEvent,
)
from understudy.identifiers import check_identifier, child_identifier, digest, new_identifier
from understudy.messages import Message, ToolCall, Usage
from understudy.ports import Node
from understudy.prices import Price
from understudy.protocol import FrameIdentity, Input, NewSession, NewWakeup, StepCall, Work, packed, unpacked
from understudy.scaling import Scaling
from understudy.spec import AgentSpec, Budget, RestartPolicy
from understudy.transport.signatures import signature_of

ERRORS = sorted(
    {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, UnderstudyError)},
    key=lambda kind: kind.__name__,
)

texts = st.text(max_size=20)
words = st.text(min_size=1, max_size=20)
counts = st.integers(min_value=0, max_value=2**53)
json_values = st.recursive(
    st.none() | st.booleans() | counts | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
json_objects = st.dictionaries(texts, json_values, max_size=3)
usages = st.builds(Usage, counts, counts, counts, counts, st.booleans())
tool_calls = st.builds(ToolCall, words, words, texts, texts)
messages = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=st.none() | texts | st.lists(json_objects, max_size=3),
    tool_calls=st.lists(tool_calls, max_size=3).map(tuple),
    tool_call_id=st.none() | words,
    name=st.none() | words,
    run_id=st.none() | words,
    round=counts,
    seq=counts,
    created_at=counts,
    extra=st.none() | st.dictionaries(words, json_values, min_size=1, max_size=3),
)

FIELD_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "int": counts,
    "int | None": st.none() | counts,
    "str": texts,
    "bool": st.booleans(),
    "float | None": st.none() | st.floats(0, 1),
    "Any": json_values,
    "str | None": st.none() | words,
    "list[Any] | None": st.none() | usages.map(Usage.to_wire),
    "list[str] | None": st.none() | st.lists(texts, max_size=3),
    "list[str]": st.lists(texts, max_size=3),
    "tuple[str, ...]": st.lists(texts, max_size=3).map(tuple),
    "dict[str, Any] | None": st.none() | json_objects,
    "list[dict[str, str]]": st.lists(st.dictionaries(texts, texts, max_size=2), max_size=3),
}


def instances(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Instances of a class whose field types are all in `FIELD_VALUES`."""
    return st.builds(kind, **{name: FIELD_VALUES[annotation(kind, name)] for name in kind.__struct_fields__})


def annotation(kind: type[Any], name: str) -> str:
    """What is written behind a field's name, where it is declared."""
    return next(str(base.__annotations__[name]) for base in kind.__mro__ if name in base.__annotations__)


events = st.one_of([instances(kind) for kind in EVENT_TYPES.values()])
call_states = instances(records.CallState)
SAID = (ToolStarted, ToolProgress, CustomEvent, ToolFinished, ToolInDoubt)
finishes = st.builds(
    records.Finish, st.sampled_from(records.RUN_STATUSES), texts, output=json_values, error=st.none() | json_objects
)
batches = st.builds(
    records.Batch,
    session_id=words,
    incarnation=counts,
    epoch=counts,
    batch_no=counts,
    entries=st.lists(messages | st.one_of(map(instances, SAID)), max_size=4).map(tuple),
    calls=st.lists(call_states, max_size=3).map(tuple),
    asks=st.lists(instances(records.Ask), max_size=2).map(tuple),
    spawns=st.lists(st.builds(records.Spawn, words, words, json_objects, texts), max_size=2).map(tuple),
    inbox_done=st.lists(counts, max_size=3).map(tuple),
    start_run=st.none() | words,
    finish=st.none() | finishes,
    wait=st.sampled_from([None, "model", "child", "input", "idle"]),
    request_round=counts,
    request_model=texts,
    request_profile=texts,
)
requests = st.builds(
    records.ModelRequest,
    wait_key=words,
    profile=texts,
    model=words,
    messages=st.binary(max_size=20),
    tools=st.lists(json_objects, max_size=2),
    parameters=json_objects,
    deadline=st.floats(min_value=0.1, max_value=1e5),
)
acks = st.builds(
    records.Ack,
    seq=counts,
    first_seq=counts,
    inbox=st.lists(st.builds(records.InboxItem, counts, words, words, json_objects), max_size=3).map(tuple),
    cancel=st.none() | texts,
    replayed=st.booleans(),
)
steps = st.builds(
    StepCall,
    frame=st.builds(FrameIdentity, words, counts, words, texts),
    number=counts,
    activation=st.none() | st.builds(records.ActivationId, words, counts, counts),
    root_id=texts,
    known_seq=counts,
    batch=st.none() | batches,
    request=st.none() | requests,
    leave=st.booleans(),
)
works = st.builds(
    Work,
    **dict.fromkeys(["session_id", "root_id", "trace_id"], words),
    **dict.fromkeys(["incarnation", "epoch", "batch_no", "after_seq", "seq", "depth", "round"], counts),
    **dict.fromkeys(["run_id", "wait", "cancel"], st.none() | words),
    model_error=st.none() | json_objects,
    messages=st.lists(messages, max_size=2).map(tuple),
    calls=st.lists(call_states, max_size=2).map(tuple),
    inbox=st.lists(st.builds(records.InboxItem, counts, words, words, json_objects), max_size=2).map(tuple),
    spec=st.none() | json_objects,
)
BATCH = records.Batch("s", 1, 1, 1)


def over_the_wire(value: Any) -> Any:
    """What arrives when a value's wire form is sent or stored as JSON."""
    return json.loads(json.dumps(value.to_wire()))


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_error_survives_pickle_and_wire(kind: type[UnderstudyError]) -> None:
    """An error keeps its class, message, session and details through pickling and through its wire form."""
    error = kind("it broke", session_id="s-1", details={"field": ["a", 1]})
    for copy in (pickle.loads(pickle.dumps(error)), UnderstudyError.from_wire(over_the_wire(error))):
        assert type(copy) is kind
        assert (copy.message, copy.session_id, copy.details) == ("it broke", "s-1", {"field": ["a", 1]})
        assert str(copy) == str(error)


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_error_says_code_and_what_happened(kind: type[UnderstudyError]) -> None:
    """An error's text has its code, message, session and hint; its class has a docstring."""
    text = str(kind("it broke", session_id="s-1"))
    assert text == f"[{kind.code}] it broke (session s-1)" + (f". {kind.hint}" if kind.hint else "")
    assert kind.__doc__ != UnderstudyError.__doc__ or kind is UnderstudyError


def test_error_codes_are_unique() -> None:
    """Every error class has a code of its own, in the form that scripts rely on."""
    codes = [kind.code for kind in ERRORS]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", code) for code in codes)
    assert {kind.code: kind for kind in ERRORS}.items() <= error_classes().items()


def test_a_subclass_without_a_code_of_its_own_replaces_none() -> None:
    """Given the class that Ray derives from ours for an error that a task raised, whose constructor is another, when
    such an error is restored, then it is of our class."""

    class OfATask(InvalidInput):
        def __init__(self, cause: Exception) -> None:
            super().__init__(str(cause))

    error = UnderstudyError.from_wire(OfATask(ValueError("it broke")).to_wire())
    assert type(error) is InvalidInput
    assert error.message == "it broke"


def test_unknown_error_code_becomes_the_base_class() -> None:
    """An error of a newer version arrives as a plain `UnderstudyError` with its message and details."""
    error = UnderstudyError.from_wire({"code": "from_the_future", "message": "it broke", "details": {"a": 1}})
    assert (type(error), error.message, error.details) == (UnderstudyError, "it broke", {"a": 1})


@given(messages)
def test_message_survives_the_wire(message: Message) -> None:
    """A message is the same after a trip through JSON."""
    assert Message.from_wire(over_the_wire(message)) == message


def test_message_text_joins_the_text_parts() -> None:
    """`text` is the content's text; parts of other types are left out."""
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {}},
        {"type": "text", "text": "b"},
    ]
    assert [Message("user", content).text for content in (None, "plain", parts)] == ["", "plain", "ab"]


@given(usages, usages)
def test_usage_adds_up_and_survives_the_wire(one: Usage, other: Usage) -> None:
    """A sum counts every token once, is estimated if a part is, and is the same after a trip through JSON."""
    total = one + other
    assert total.total_tokens == one.total_tokens + other.total_tokens
    assert total.estimated == (one.estimated or other.estimated)
    assert Usage.from_wire(over_the_wire(total)) == total
    assert Usage.from_wire(None) == Usage()


@given(events)
def test_event_survives_the_wire(event: Event) -> None:
    """An event of any type is the same after a trip through JSON."""
    assert Event.from_wire(over_the_wire(event)) == event


@given(events, json_values)
def test_event_of_a_newer_version_is_no_error(event: Event, novelty: Any) -> None:
    """A field that this version does not know is left out; an unknown type keeps its name, envelope and data."""
    wire = over_the_wire(event)
    wire["data"]["from_the_future"] = novelty
    assert Event.from_wire(wire) == event
    wire["type"] = "from_the_future"
    unknown = Event.from_wire(wire)
    assert isinstance(unknown, UnknownEvent)
    assert (unknown.original_type, unknown.data) == ("from_the_future", wire["data"])
    assert (unknown.seq, unknown.session_id, unknown.writer_seq) == (event.seq, event.session_id, event.writer_seq)


def test_event_types_are_unique() -> None:
    """Every event class has a type of its own, and a docstring that is its meaning."""
    kinds = Event.__subclasses__()
    assert len({kind.type for kind in kinds}) == len(kinds) == len(EVENT_TYPES)
    assert all(kind.type and kind.__doc__ and not kind.__doc__.startswith(f"{kind.__name__}(") for kind in kinds)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "strategy", [batches, requests, acks, steps, works], ids=["batch", "request", "ack", "step", "work"]
)
@given(data=st.data())
def test_a_message_between_processes_survives_its_way(strategy: st.SearchStrategy[Any], data: st.DataObject) -> None:
    """A message between session actor and node service is the same after a trip through a socket, and through Ray."""
    message = data.draw(strategy)
    sent = packed(message)
    for arrived in (msgspec.msgpack.decode(msgspec.msgpack.encode(sent)), pickle.loads(pickle.dumps(sent))):
        assert unpacked(arrived, type(message), "it") == message


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"number": "1"}, r"Expected `int`, got `str` - at `\$.number`"),
        ({"frame": {"frame_id": "f"}}, r"missing required field `pid` - at `\$.frame`"),
        ({"activation": ["s", 1]}, r"length 3, got 2 - at `\$.activation`"),
        ({"batch": {**packed(BATCH), "entries": [{"type": "run_started"}]}}, r"`\$.batch.entries\[0\].type`"),
        ({"batch": {**packed(BATCH), "calls": [{"call_id": "c"}]}}, r"field `state` - at `\$.batch.calls\[0\]`"),
    ],
    ids=["type", "missing", "length", "event of the store's", "inner"],
)
def test_a_wrong_message_is_refused_where_it_is_wrong(change: dict[str, Any], where: str) -> None:
    """What is no message of its kind is an error that says which place of it is wrong; a process can't write events
    that are the store's to write."""
    right = packed(StepCall(FrameIdentity("f", 1, "n", ""), 1))
    with pytest.raises(InvalidInput, match=f"call of step is not understood: .*{where}"):
        signature_of(Node.step).arguments([{**right, **change}])


@pytest.mark.parametrize(
    ("kind", "message", "problem"),
    [
        (Input, {"run_id": "a/b", "content": "go"}, "run_id 'a/b' must be 1 to 128"),
        (Input, {"run_id": "r", "content": None}, "must be a text"),
        (Input, {"run_id": "r", "content": []}, "must not be empty"),
        (Input, {"run_id": "r", "content": " \n"}, "must not be empty"),
        (NewWakeup, {"name": "w", "prompt": "go", "seconds": math.nan}, "seconds is nan"),
        (NewWakeup, {"name": "w/x", "prompt": "go", "seconds": 1.0}, "name is 'w/x'"),
        (NewWakeup, {"name": "w", "prompt": "go", "seconds": 1.0, "every": 0.0}, "every is 0.0"),
        (NewSession, {"session_id": "bad id", "spec": {}}, "session_id 'bad id' must be"),
        (NewSession, {"session_id": "s", "spec": {"name": "a", "model": "m"}}, "has no hash, profile"),
    ],
)
def test_a_request_of_a_client_that_checks_nothing_is_refused(
    kind: type, message: dict[str, Any], problem: str
) -> None:
    """What our client would not send is refused by who gets it, before anything is done: an id that is none, no
    content, a time that is none, a specification that is not compiled."""
    with pytest.raises(InvalidInput, match=f"run is not understood: .*{re.escape(problem)}"):
        unpacked(message, kind, "run")


def test_a_message_has_room_for_what_a_newer_version_says() -> None:
    """Fields that are not known are left out; texts of other libraries' classes arrive as plain ones."""

    class Markup(str):
        pass

    call = StepCall(FrameIdentity(Markup("f"), 1, "n", ""), 1)
    arrived = unpacked({**packed(call), "novelty": 1}, StepCall, "it")
    assert arrived == call
    assert type(arrived.frame.frame_id) is str


def test_new_identifiers_are_uuids_that_sort_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new id is a valid UUIDv7; ids of later milliseconds sort after earlier ones."""
    clock = iter(range(1_700_000_000_000_000_000, 1_700_000_001_000_000_000, 1_000_000))
    monkeypatch.setattr("time.time_ns", lambda: next(clock))
    found = [new_identifier() for _ in range(500)]
    assert found == sorted(found)
    assert len(set(found)) == 500
    assert {(uuid.UUID(value).version, uuid.UUID(value).variant) for value in found} == {(7, uuid.RFC_4122)}
    assert all(check_identifier(value, "session_id") == value for value in found)


@pytest.mark.parametrize("value", ["", "a" * 129, "a/b", "a b", "ä", "a\n", None, 7])
def test_identifiers_with_other_characters_are_refused(value: Any) -> None:
    """A caller's id has 1 to 128 characters of a fixed alphabet; the refusal names what it is for."""
    with pytest.raises(InvalidInput, match="run_id"):
        check_identifier(value, "run_id")


@given(st.lists(texts, max_size=4), st.lists(texts, max_size=4))
def test_digests_tell_parts_apart(one: list[str], other: list[str]) -> None:
    """A digest depends on the parts and on where they are cut."""
    assert (digest(*one) == digest(*other)) == (one == other)


def test_child_identifier_is_an_identifier_and_stable() -> None:
    """The same call of the same parent always names the same child, with an id that a caller could have chosen."""
    found = child_identifier("p" * 128, "run/1/0")
    assert found == child_identifier("p" * 128, "run/1/0") != child_identifier("p" * 128, "run/1/1")
    assert check_identifier(found, "session_id") == found


def test_settings_have_defaults_that_need_nothing() -> None:
    """With an empty environment the store is a file of the user and the model is the offline one."""
    settings = Settings.from_environment({})
    assert settings.store.startswith("sqlite:////")
    assert (settings.model, settings.namespace, settings.standby) == ("offline", "default", 2)
    assert model_profile_from_environment({}) is None


def test_a_key_from_a_file(tmp_path: Path) -> None:
    """A key from a file is the same profile as one from the environment, which goes first; a file that can't be read,
    or is empty, is an error that names it."""
    path = tmp_path / "key"
    path.write_text(" sk-1\n")
    env = {"OPENAI_API_KEY_FILE": str(path)}
    assert model_profile_from_environment(env) == model_profile_from_environment({"OPENAI_API_KEY": "sk-1"})
    assert Settings.from_environment(env).model == Settings.from_environment({"OPENAI_API_KEY": "sk-1"}).model
    assert model_profile_from_environment({**env, "OPENAI_API_KEY": "sk-2"}).api_key == "sk-2"  # type: ignore[union-attr]
    for content in (b" \n", b"\xff"):
        path.write_bytes(content)
        with pytest.raises(InvalidConfiguration, match="OPENAI_API_KEY_FILE"):
            model_profile_from_environment(env)
    with pytest.raises(InvalidConfiguration, match="No such file"):
        model_profile_from_environment({"OPENAI_API_KEY_FILE": str(tmp_path / "missing")})


def test_settings_are_read_from_the_environment() -> None:
    """Every variable reaches its setting; an explicit store wins over the variable."""
    environ = {
        "UNDERSTUDY_STORE": "postgres://me:secret@db/agents",
        "UNDERSTUDY_MODEL": "gpt-5",
        "UNDERSTUDY_NAMESPACE": "team-a",
        "UNDERSTUDY_STANDBY": "0",
        "UNDERSTUDY_MAX_ACTORS": "8",
        "UNDERSTUDY_METRICS_PORT": "9100",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318",
    }
    telemetry = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}
    expected = Settings("postgresql://me:secret@db/agents", "gpt-5", "team-a", 0, 8, 9100, telemetry=telemetry)
    assert Settings.from_environment(environ) == expected
    assert Settings.from_environment(environ, store="sqlite:////data/a.db").store == "sqlite:////data/a.db"


def test_other_settings_of_running_services_are_named_without_secrets(tmp_path: Path) -> None:
    """Each variable that services took and that says otherwise now is named, with both values unless they are
    telemetry's or prices; the model is the client's."""
    headers = "OTEL_EXPORTER_OTLP_HEADERS"
    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps({"offline": {"input": 1, "output": 2}}))
    first = {"UNDERSTUDY_STANDBY": "4", "UNDERSTUDY_MODEL": "a", headers: "authorization=hunter22"}
    second = {"UNDERSTUDY_MAX_ACTORS": "8", "UNDERSTUDY_MODEL": "b", headers: "authorization=hunter33"}
    second["UNDERSTUDY_LOG_FORMAT"] = "json"
    running = Settings.from_environment({**first, "UNDERSTUDY_STORE": "postgresql://me:hunter44@db/x"}).of_services()
    here = Settings.from_environment({**second, "UNDERSTUDY_PRICES": str(prices)}).of_services()
    assert differences(running, running) == []
    assert differences(None, here) == ["the settings of another version"]
    assert differences(running, here) == [
        "OTEL_EXPORTER_OTLP_HEADERS=… (this environment says otherwise)",
        "no UNDERSTUDY_LOG_FORMAT (this environment says …)",
        "no UNDERSTUDY_MAX_ACTORS (this environment says 8)",
        "no UNDERSTUDY_PRICES (this environment says …)",
        "UNDERSTUDY_STANDBY=4 (this environment says 2)",
    ]
    assert differences(here, running)[3:] == [
        "UNDERSTUDY_PRICES=… (this environment says none)",
        "UNDERSTUDY_STANDBY=2 (this environment says 4)",
    ]
    assert "hunter" not in f"{running} {here}"
    assert "they keep theirs until `understudy down`" in kept_settings(differences(running, here))


def test_whatever_services_take_is_compared() -> None:
    """A setting that is added belongs to what services took, or names the services, or is the client's."""
    known = {"store", "namespace", "model"}
    one = Settings("sqlite:////a.db", "m")
    other: dict[str, Any] = {
        "standby": 5, "max_actors": 5, "metrics_port": 5, "offline_latency": 5.0, "schema_policy": "verify",
        "prices": {"m": Price(1, 2, 3)}, "telemetry": {"OTEL_SERVICE_NAME": "s"}, "scaling": Scaling(1, 3),
    }  # fmt: skip
    assert known | set(other) == {field.name for field in dataclasses.fields(Settings)}
    for name, value in other.items():
        changed = dataclasses.replace(one, **{name: value}).of_services()
        assert len(differences(one.of_services(), changed)) == 1
    not_text = os.fsdecode(b"caf\xe9")  # as Python reads a variable that is no UTF-8
    assert dataclasses.replace(one, telemetry={"UNDERSTUDY_REDACT": not_text}).of_services() != one.of_services()


@pytest.mark.parametrize("store", ["mysql://me:hunter2@db/x", "sqlite://"])
def test_all_bad_settings_are_named_at_once(store: str) -> None:
    """One error names every variable that can't be used, and shows no password."""
    environ = {
        "UNDERSTUDY_STORE": store,
        "UNDERSTUDY_NAMESPACE": "a b",
        "UNDERSTUDY_STANDBY": "-1",
        "UNDERSTUDY_MAX_ACTORS": "many",
        "UNDERSTUDY_METRICS_PORT": "70000",
    }
    with pytest.raises(InvalidConfiguration) as caught:
        Settings.from_environment(environ)
    assert len(caught.value.details["problems"]) == len(environ)
    assert [name for name in environ if name not in str(caught.value)] == []
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "dsn",
    ["", "sqlite:", "sqlite:///", "sqlite://x", "sqlite:///:memory:", "mysql://h/d", "postgresql:db", "db", "x://["],
)
def test_unusable_stores_are_refused(dsn: str) -> None:
    """A DSN that is neither a SQLite file nor PostgreSQL is refused, with the variable to set."""
    with pytest.raises(InvalidConfiguration, match=r"UNDERSTUDY_STORE|sqlite:///"):
        check_store(dsn)


@pytest.mark.parametrize("dsn", ["sqlite:///a.db", "sqlite:////data/a.db", "postgresql+psycopg://u@h/d"])
def test_canonical_stores_stay_as_they_are(dsn: str) -> None:
    """The canonical form of a canonical DSN is itself, so one store has one name."""
    assert check_store(check_store(dsn)) == check_store(dsn)


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://me:hunter2@db:5432/agents",
        "postgresql://me:hunter2@db/agents?sslmode=require",
        "postgresql://:hunter2@db/agents",
        "postgresql://me:a#hunter2@db/agents",
        "postgresql://db/agents?user=me&password=hunter2",
        "postgresql://db/agents?sslpassword=hunter2",
    ],
)
def test_passwords_are_never_shown(dsn: str) -> None:
    """Neither the redacted DSN nor the settings' representation has the password, however it is written."""
    assert "hunter2" not in redact(dsn)
    assert "db" in redact(dsn)
    assert "hunter2" not in repr(Settings.from_environment({"UNDERSTUDY_STORE": dsn}))


MISREAD = ["me:a@hunter2@db/agents", "me:a/hunter2@db/agents", "me:1/hunter2@db/agents", "me:a?b/hunter2@db/agents",
           "me@tenant:hunter2@db/agents"]  # fmt: skip


@pytest.mark.parametrize("rest", MISREAD)
def test_a_password_that_would_be_read_as_something_else(rest: str) -> None:
    """A password with an unencoded @, / or ?, of which libpq would take a part for the host: refused, and not shown."""
    with pytest.raises(InvalidConfiguration, match="percent-encoded") as refused:
        Settings.from_environment({"UNDERSTUDY_STORE": f"postgresql://{rest}"})
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("user", ["app", "app@tenant", "", "a/b"])
@given(password=st.text(min_size=2) | st.text("ab1@:/?#%=&[] ", min_size=2))
def test_no_part_of_a_password_is_shown(user: str, password: str) -> None:
    """Whatever is in a password, encoded or not: what is shown of the DSN is the same as for any other password."""
    shown = redact(f"postgresql://{user}:{password}@host/db")
    assert shown in (f"postgresql://{user}:***@host/db", f"postgresql://{user}:***")


@given(password=st.text("ab1@:/?#%=&[] ", min_size=2))
@example("%a1")
def test_a_password_is_read_as_it_was_meant_or_refused(password: str) -> None:
    """Whatever is in a password that was not encoded: libpq finds the host where it was meant, or refuses."""
    try:
        found = conninfo_to_dict(check_store(f"postgresql://app:{password}@host/db"))
    except (InvalidConfiguration, ProgrammingError):
        return
    assert (found["user"], found["host"], found["dbname"]) == ("app", "host", "db")


def test_an_empty_store_is_not_the_default() -> None:
    """`--store ""` is a variable of a script that was not set: an error. An empty UNDERSTUDY_STORE is as none."""
    with pytest.raises(InvalidConfiguration):
        Settings.from_environment({}, store="")
    assert Settings.from_environment({"UNDERSTUDY_STORE": ""}).store == Settings.from_environment({}).store


def test_model_profiles_hide_the_key_and_never_mix_keys() -> None:
    """A profile's representation lacks the key; another key or endpoint is another profile."""
    keys, endpoints = ("sk-one", "sk-two"), ("http://a/v1", "http://b/v1", "")
    profiles = [
        model_profile_from_environment({"OPENAI_API_KEY": key, "OPENAI_BASE_URL": url})
        for key in keys
        for url in endpoints
    ]
    assert len({profile.name for profile in profiles if profile}) == len(keys) * len(endpoints)
    assert not any(key in f"{profile!r} {profile and profile.name}" for key in keys for profile in profiles)
    assert "sk-one" not in repr(ModelProfile("p", "sk-one"))


def test_secret_names_are_known() -> None:
    """Variables that carry credentials are secrets; ordinary ones are not."""
    secrets = [
        "OPENAI_API_KEY",
        "github_token",
        "AWS_SECRET_ACCESS_KEY",
        "PGPASSWORD",
        "SENTRY_DSN",
        "UNDERSTUDY_STORE",
    ]
    assert [name for name in secrets if not is_secret_name(name)] == []
    ordinary = ["PATH", "HOME", "OPENAI_BASE_URL", "UNDERSTUDY_MODEL", "PWD", "OLDPWD", "SSH_AUTH_SOCK"]
    assert [name for name in ordinary if is_secret_name(name)] == []


def test_spec_tells_all_problems_at_once() -> None:
    """Every mistake is named with its field in one error, in nested parts too, and unknown fields are mistakes."""
    with pytest.raises(InvalidSpec) as caught:
        AgentSpec(
            name="no spaces allowed",
            max_rounds=0,
            tools="files",
            parameters={"model": "other"},
            budget={"tokens": 0},
            agents=[{"name": "child", "tool_timeout": -1}],
            colour="red",
        )
    fields = [problem["field"] for problem in caught.value.details["problems"]]
    assert sorted(fields) == [
        "agents.0.tool_timeout", "budget.tokens", "colour", "max_rounds", "name", "parameters", "tools",
    ]  # fmt: skip
    assert [field for field in fields if field not in str(caught.value)] == []


@pytest.mark.parametrize(
    "build", [lambda: Budget(tokens=0), lambda: RestartPolicy(period=0), lambda: AgentSpec.parse(None)]
)
def test_invalid_parts_of_a_spec_are_our_errors(build: Any) -> None:
    """Mistakes in a part, or something that is no table at all, raise `InvalidSpec` too, and it survives pickling."""
    with pytest.raises(InvalidSpec) as caught:
        build()
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_spec_is_immutable() -> None:
    """A spec can't change after its check; equal specs are equal."""
    spec = AgentSpec(name="lead", tools=["files"], budget=Budget(tokens=10))
    with pytest.raises(ValueError, match="frozen"):
        spec.name = "other"
    assert spec == AgentSpec.parse({"name": "lead", "tools": ["files"], "budget": {"tokens": 10}})
