"""Events to Prometheus metrics: exact totals over checkpoints, a fixed number of series, a valid exposition."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as parse_plain_text

from understudy.errors import InvalidConfiguration, MetricsPortTaken
from understudy.events import (
    EPHEMERAL,
    EVENT_TYPES,
    Event,
    InputReceived,
    InputRequested,
    ModelCallCompleted,
    ModelCallFailed,
    ModelCallReissued,
    RunFinished,
    RunStarted,
    SessionActivated,
    SessionCrashed,
    SessionCreated,
    SessionMoved,
    SessionQuarantined,
    TimerFired,
    TimerSet,
    ToolFinished,
    ToolInDoubt,
    UnknownEvent,
)
from understudy.observability import conventions as names
from understudy.observability.live_table import LIVE_TABLE
from understudy.observability.metric_page import page
from understudy.observability.metric_table import TABLE
from understudy.observability.metrics import OTHER, Metrics
from understudy.observability.server import MetricsServer, address_of

AT = 1_750_000_000_000_000
TRACE = "0af7651916cd43dd8448eb211c80319c"


def families(metrics: Metrics) -> dict[str, Any]:
    return {
        family.name: family for family in text_string_to_metric_families(generate_latest(metrics.registry).decode())
    }


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families(metrics).values()
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return samples(metrics)[(name, tuple(sorted(labels.items())))]


def numbered(events: list[Event]) -> list[Event]:
    return [replace(event, writer_seq=index) for index, event in enumerate(events, 1)]


def session_events(session: int) -> list[Event]:
    """One session's life with a crash, a failed call and a tool."""
    shared: dict[str, Any] = {
        "session_id": f"session-{session}",
        "run_id": f"run-{session}",
        "trace_id": f"{session + 1:032x}",
        "agent": "lead",
        "at": AT,
    }
    return [
        SessionCreated(**shared),
        RunStarted(**shared, queued=1_500),
        SessionCrashed(**shared, waiting=True),
        SessionActivated(**shared, cause="resume", down=30_000),
        ModelCallCompleted(
            **shared,
            model="m",
            provider="anthropic",
            response_model="m-1",
            usage=[100, 20, 40, 5, False, 1_500, 30],
            duration=500_000,
            first_chunk=90_000,
            waited={"p": 3_000_000, "q": 0},
            currency="EUR",
            retried={"rate_limited": 2, "timeout": 1},
            chunk_times=[75_000, 2, 0, 0, 1],
        ),
        ModelCallFailed(**shared, model="m", duration=1_000_000, error_code="model_refused", waited={"p": 0}),
        ToolFinished(**shared, tool="lookup", duration=20_000),
        RunFinished(**shared, started_at=AT - 3_000_000),
    ]


NAMES = st.sampled_from(["a", "b", "c", "d", "e"])
AMOUNTS = st.integers(0, 10**8)
ANY_EVENT = st.one_of(
    st.builds(SessionCreated, agent=NAMES),
    st.builds(RunStarted, agent=NAMES, queued=AMOUNTS),
    st.builds(RunFinished, agent=NAMES, status=NAMES, started_at=AMOUNTS, at=AMOUNTS),
    st.builds(SessionActivated, cause=st.sampled_from(["ready", "resume"]), down=AMOUNTS),
    st.builds(SessionCrashed, waiting=st.booleans(), unseen=AMOUNTS),
    st.builds(SessionMoved, forced=st.booleans()),
    st.builds(SessionQuarantined, rule=st.sampled_from(["no_progress", "max_restarts"])),
    st.builds(
        ModelCallCompleted,
        agent=NAMES,
        model=NAMES,
        usage=st.none() | st.tuples(AMOUNTS, AMOUNTS, AMOUNTS, AMOUNTS, st.booleans()).map(list),
        duration=AMOUNTS,
        first_chunk=AMOUNTS,
        waited=st.none() | st.dictionaries(NAMES, AMOUNTS),
        retried=st.none() | st.dictionaries(NAMES, st.integers(1, 3)),
        chunk_times=st.none() | st.lists(st.integers(0, 100), min_size=2, max_size=16),
        redone=st.booleans(),
        trace_id=st.sampled_from(["", TRACE]),
    ),
    st.builds(ModelCallFailed, model=NAMES, error_code=NAMES, duration=AMOUNTS),
    st.builds(ModelCallReissued, model=NAMES),
    st.builds(ToolFinished, tool=NAMES, outcome=st.sampled_from(["ok", "error", "unknown_tool"]), duration=AMOUNTS),
    st.builds(ToolInDoubt, tool=NAMES, policy=NAMES),
    st.builds(InputRequested, kind=st.sampled_from(["question", "in_doubt"])),
    st.builds(InputReceived, kind=st.sampled_from(["question", "in_doubt"]), decision=NAMES),
    st.builds(TimerSet, kind=st.sampled_from(["wait", "wakeup"])),
    st.builds(TimerFired, kind=st.sampled_from(["wait", "wakeup"]), late=AMOUNTS),
    st.builds(UnknownEvent, original_type=NAMES),
)


@pytest.mark.thorough
@given(events=st.lists(ANY_EVENT, max_size=40).map(numbered), data=st.data())
def test_checkpoint_and_replay_give_the_totals_of_a_process_that_never_stopped(
    events: list[Event], data: st.DataObject
) -> None:
    """Wherever it is split and whatever is applied again, restore + replay equals one pass, label limit included."""
    whole = Metrics(max_label_values=3)
    whole.apply(events)
    split = data.draw(st.integers(0, len(events)), label="split")
    before = Metrics(max_label_values=3)
    before.apply(events[:split])
    after = Metrics(max_label_values=3)
    after.restore(json.loads(json.dumps(before.checkpoint())))
    position = split
    while position < len(events):
        again = data.draw(st.integers(0, position), label="applied again from")
        position = data.draw(st.integers(position + 1, len(events)), label="applied up to")
        after.apply(events[again:position])
        after.apply(events[again:position])
    assert after.checkpoint() == whole.checkpoint()
    assert samples(after) == samples(whole)


def test_events_become_the_amounts_they_tell_of() -> None:
    """Durations are shown in seconds, tokens and outcomes counted under their labels."""
    metrics = Metrics()
    metrics.apply(numbered(session_events(0)))
    answered = inference(gen_ai_provider_name="anthropic", gen_ai_response_model="m-1")
    failed = inference(gen_ai_provider_name="openai", gen_ai_response_model="")
    duration, first_chunk, per_chunk = (
        f"gen_ai_client_inference_{name}_seconds"
        for name in ("duration", "time_to_first_chunk", "time_per_output_chunk")
    )
    assert value(metrics, f"{duration}_sum", **answered, error_type="") == 0.5
    assert value(metrics, f"{duration}_count", **failed, error_type="model_refused") == 1
    assert value(metrics, f"{first_chunk}_bucket", **answered, le="0.08") == 0
    assert value(metrics, f"{first_chunk}_bucket", **answered, le="0.16") == 1
    assert value(metrics, f"{per_chunk}_sum", **answered) == 0.075
    assert [value(metrics, f"{per_chunk}_bucket", **answered, le=le) for le in ("0.01", "0.04", "0.08")] == [2, 2, 3]
    tokens, used = "gen_ai_client_inference_usage_{}_tokens_total", {"gen_ai_agent_name": "lead"}
    counted = (("input", 100), ("output", 20), ("cache_read_input", 40), ("cache_write_input", 30))
    for kind, amount in (*counted, ("reasoning_output", 5)):
        assert value(metrics, tokens.format(kind), **used, **answered, gen_ai_token_modality="unknown") == amount
        assert value(metrics, tokens.format(kind), **used, **failed, gen_ai_token_modality="unknown") == 0
    assert value(metrics, "understudy_model_cost_total", agent="lead", model="m", currency="EUR") == 0.0015
    assert value(metrics, "understudy_model_call_wait_seconds_sum", profile="p") == 3
    assert value(metrics, "understudy_model_call_wait_seconds_count", profile="p") == 2
    assert value(metrics, "understudy_model_call_wait_seconds_count", profile="q") == 1
    run = {"gen_ai_agent_name": "lead", "understudy_run_status": "completed", "error_type": ""}
    assert value(metrics, "gen_ai_invoke_agent_duration_seconds_sum", **run) == 3
    tool = {"gen_ai_tool_name": "lookup", "gen_ai_tool_type": "function", "error_type": ""}
    assert value(metrics, "gen_ai_execute_tool_duration_seconds_sum", **tool) == 0.02
    assert value(metrics, "understudy_events_total", type="model_call_completed") == 1
    assert value(metrics, "understudy_events_total", type="timer_set") == 0
    assert value(metrics, "understudy_restore_duration_seconds_sum") == 0.03
    assert value(metrics, "understudy_session_crashes_total", cause="process_died", waiting="true") == 1
    assert value(metrics, "understudy_session_crashes_total", cause="process_died", waiting="false") == 0
    assert value(metrics, "understudy_model_retries_total", model="m", reason="rate_limited") == 2
    assert value(metrics, "understudy_model_retries_total", model="m", reason="timeout") == 1
    assert value(metrics, "understudy_model_calls_total", outcome="ok") == 1
    assert value(metrics, "understudy_tokens_redone_total") == 0


def inference(**labels: str) -> dict[str, str]:
    """Labels that the conventions ask for."""
    return {"gen_ai_operation_name": "chat", "gen_ai_request_model": "m", **labels}


def test_errors_are_labelled_as_in_the_conventions() -> None:
    """A failed run has its error's code or its status, a tool call its outcome; a cancelled run has not failed."""
    metrics = Metrics()
    at = {"started_at": AT, "at": AT + 1_000_000, "agent": "a"}
    runs = [
        RunFinished(**at, status="failed", error_code="model_refused"),
        RunFinished(**at, status="round_limit"),
        RunFinished(**at, status="cancelled"),
    ]
    metrics.apply(numbered([*runs, ToolFinished(tool="t", outcome="timeout", duration=5)]))
    counted = {
        tuple(
            dict(labels).get(name, "") for name in ("understudy_run_status", "gen_ai_tool_name", "error_type")
        ): amount
        for (name, labels), amount in samples(metrics).items()
        if name in ("gen_ai_invoke_agent_duration_seconds_count", "gen_ai_execute_tool_duration_seconds_count")
    }
    assert counted == {
        ("failed", "", "model_refused"): 1,
        ("round_limit", "", "round_limit"): 1,
        ("cancelled", "", ""): 1,
        ("", "t", "timeout"): 1,
    }


def test_durations_have_buckets_for_an_hour() -> None:
    """What can take an hour has bounds beyond it, after those that the conventions advise."""
    advised = {names.INVOKE_AGENT_DURATION: (0.1, 409.6, 13)}
    for row in TABLE:
        if row.name in (names.INFERENCE_DURATION, names.EXECUTE_TOOL_DURATION, names.RUN_QUEUED, names.MODEL_CALL_WAIT):
            advised[row.name] = (0.01, 81.92, 14)
        if row.name in advised:
            first, last, number = advised[row.name]
            assert (row.buckets[0], row.buckets[number - 1]) == (first, last)
            assert row.buckets[-1] > 3_600
    assert len(advised) == 5


def test_every_type_of_event_is_counted() -> None:
    """What is committed is counted by its type, one of a newer version as `unknown`; what never is has no series."""
    metrics = Metrics()
    metrics.apply(numbered([kind() for kind in EVENT_TYPES.values()]))
    counted = {
        dict(labels)["type"]: amount
        for (name, labels), amount in samples(metrics).items()
        if name == "understudy_events_total"
    }
    assert counted == dict.fromkeys(set(EVENT_TYPES) - {kind.type for kind in EPHEMERAL}, 1)


def test_redone_tokens_are_counted() -> None:
    """An answer paid a second time adds its whole usage to the tokens re-done."""
    metrics = Metrics()
    metrics.apply(numbered([ModelCallCompleted(model="m", usage=[100, 20, 40, 5, False], redone=True)]))
    assert value(metrics, "understudy_tokens_redone_total") == 120


def test_the_number_of_series_does_not_depend_on_the_number_of_sessions() -> None:
    """A thousand sessions have the series of one, and no label names a session or a run."""
    metrics = Metrics()
    metrics.apply(numbered(session_events(0)))
    few = samples(metrics).keys()
    metrics.apply(numbered([event for session in range(1_000) for event in session_events(session)]))
    assert samples(metrics).keys() == few
    assert not re.search(r"session-\d|run-\d", generate_latest(metrics.registry).decode())


def test_label_values_beyond_the_limit_are_counted_together() -> None:
    """Agents that make up names can't blow up the number of series, and nothing goes uncounted."""
    metrics = Metrics(max_label_values=2)
    metrics.apply(numbered([SessionCreated(agent=name) for name in ("a", "b", "c", "d", "a")]))
    counted = {
        dict(labels)["agent"]: amount
        for (name, labels), amount in samples(metrics).items()
        if name == "understudy_sessions_created_total"
    }
    assert counted == {"a": 2, "b": 1, OTHER: 2}


def test_tool_names_a_model_made_up_share_one_label_value() -> None:
    """Calls of unknown tools don't use up the label values that real tools need."""
    metrics = Metrics()
    metrics.apply(numbered([ToolFinished(tool=f"made-up-{n}", outcome="unknown_tool") for n in range(3)]))
    assert value(metrics, "understudy_tool_calls_total", tool="unknown", outcome="unknown_tool") == 3
    assert "made-up" not in generate_latest(metrics.registry).decode()


def test_buckets_and_counters_carry_the_trace_as_exemplar() -> None:
    """From a slow bucket one click leads to the trace that fell into it."""
    metrics = Metrics()
    metrics.apply([ModelCallCompleted(trace_id=TRACE, at=AT, model="m", duration=700_000, writer_seq=1)])
    (bucket,) = [
        sample
        for sample in families(metrics)["gen_ai_client_inference_duration_seconds"].samples
        if sample.exemplar is not None
    ]
    assert bucket.labels["le"] == "1.28"
    assert bucket.exemplar.labels == {"trace_id": TRACE}
    assert bucket.exemplar.value == 0.7
    assert float(bucket.exemplar.timestamp) == AT / 1_000_000


def test_every_metric_of_the_table_is_in_the_exposition_with_help() -> None:
    """The exposition is complete and readable by the OpenMetrics parser even before the first event."""
    shown = families(Metrics())
    assert len(shown) == len(TABLE)
    assert all(family.documentation for family in shown.values())
    assert all(not row.measures or row.measures.keys() <= set(EVENT_TYPES.values()) for row in TABLE)


def test_the_page_has_the_whole_table() -> None:
    """docs/metrics.md is what the table says: `python -m understudy.observability.metric_page` prints its part."""
    assert page() in (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    for row in (*TABLE, *LIVE_TABLE.values()):
        total = "_total" if row.kind == "counter" else ""
        assert f"| `{names.prometheus_name(row.name, row.unit)}{total}` |" in page()


def test_every_event_is_measured_or_said_to_be_left_out() -> None:
    """A new type of event is not forgotten in the table."""
    measured = {kind.type for row in TABLE if row.name != names.EVENTS for kind in row.measures}
    left_out = {"unknown", "text_delta", "reasoning_delta", "tool_call_delta", "stream_restarted"}  # never committed
    left_out |= {"tool_progress", "custom"}  # of people's own: who wants to count them has them in the log
    left_out |= {"model_call_started", "tool_started"}  # counted when they end
    left_out |= {
        "session_resumed",
        "session_closed",
        "child_finished",
        "child_asked",
        "shutdown_forced",
        "run_merged",
        "steer_dropped",
    }
    left_out |= {"timer_cancelled", "todo_updated", "memory_recalled"}  # for whoever follows the session
    left_out |= {"command_started", "command_ended"}  # as well
    left_out |= {"mcp_server_listed", "mcp_server_failed"}  # the same
    left_out |= {"worktree_ended"}  # a part of how a run ends
    left_out |= {"agent_handed_off"}  # a call of its tool, which is counted
    assert measured | left_out == set(EVENT_TYPES)
    assert not measured & left_out


def test_label_values_are_escaped() -> None:
    """No name, however odd, makes the exposition unreadable."""
    odd = 'say "hi"\\\n{x}\ud800'
    metrics = Metrics()
    metrics.apply([SessionCreated(agent=odd, writer_seq=1)])
    assert value(metrics, "understudy_sessions_created_total", agent=odd.replace("\ud800", "?")) == 1


def test_an_event_that_cannot_be_measured_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A damaged event is logged; the ones after it count."""
    metrics = Metrics()
    damaged = ModelCallCompleted(model="m", usage=["?"], redone=True, writer_seq=1)
    metrics.apply([damaged, SessionCreated(agent="a", writer_seq=2)])
    assert value(metrics, "understudy_sessions_created_total", agent="a") == 1
    assert metrics.writer_seq == 2
    assert "not fully measured" in caplog.text


def test_a_metric_that_changed_shape_starts_at_zero(caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint of another version neither breaks the start nor mixes into other labels; the rest is kept."""
    old = Metrics()
    old.apply(numbered(session_events(0)))
    checkpoint = old.checkpoint()
    checkpoint["totals"]["understudy.sessions_created"]["labels"] = ["agent", "kind"]
    checkpoint["totals"]["understudy.restore_duration"]["bounds"] = [1, 2]
    checkpoint["totals"]["understudy.no_longer_there"] = {"labels": [], "series": []}
    metrics = Metrics()
    metrics.restore(checkpoint)
    assert value(metrics, "understudy_restore_duration_seconds_count") == 0
    assert value(metrics, "understudy_model_calls_total", outcome="ok") == 1
    assert caplog.text.count("another shape") == 2


def test_process_local_metrics_are_in_no_checkpoint() -> None:
    """Commit times and fenced writes tell of this process and start at 0 with the next."""
    metrics = Metrics()
    untouched = metrics.checkpoint()
    metrics.observe_commit(0.0012, 3)
    metrics.count_fenced()
    assert value(metrics, "understudy_commit_duration_seconds_sum") == 0.0012
    assert value(metrics, "understudy_commit_operations_bucket", le="2.0") == 0
    assert value(metrics, "understudy_commit_operations_bucket", le="4.0") == 1
    assert value(metrics, "understudy_fenced_writes_total") == 1
    assert metrics.checkpoint() == untouched


def test_live_metrics_are_read_at_every_scrape(caplog: pytest.LogCaptureFixture) -> None:
    """A gauge shows the state of now, a live counter gets its suffix; one that raises leaves the others alone."""
    metrics = Metrics()
    state = {("idle",): 2.0}
    metrics.show(LIVE_TABLE[names.SESSIONS], lambda: state)
    metrics.show(LIVE_TABLE[names.STANDBYS_TAKEN], lambda: {(): 3})
    metrics.show(LIVE_TABLE[names.RUNS_LIVE], lambda: {(): 1 / 0})
    assert value(metrics, "understudy_sessions", status="idle") == 2
    assert value(metrics, "understudy_standbys_taken_total") == 3
    state[("idle",)] = 5
    assert value(metrics, "understudy_sessions", status="idle") == 5
    assert "understudy.runs_live can't be read" in caplog.text


def test_a_scrape_sees_one_moment_while_events_are_applied() -> None:
    """Metrics of one event always agree with each other, however a scrape falls between commits."""
    metrics = Metrics()
    done = threading.Event()
    answered = inference(gen_ai_provider_name="openai", gen_ai_response_model="", error_type="")
    labels = tuple(sorted(answered.items()))

    def journal() -> None:
        for number in range(1, 20_001):
            metrics.apply([ModelCallCompleted(model="m", duration=number, writer_seq=number)])
        done.set()

    thread = threading.Thread(target=journal)
    thread.start()
    last = 0.0
    while not done.is_set():
        seen = samples(metrics)
        calls = seen[("understudy_model_calls_total", (("outcome", "ok"),))]
        measured = seen.get(("gen_ai_client_inference_duration_seconds_count", labels), 0)
        assert calls == measured
        assert calls >= last
        last = calls
    thread.join()
    assert value(metrics, "understudy_model_calls_total", outcome="ok") == 20_000


def test_metrics_come_without_the_opentelemetry_sdk() -> None:
    """A process that only counts does not load the tracing SDK."""
    script = (
        "import sys, understudy.observability.metrics, understudy.observability.server;"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.fixture
def served() -> Iterator[str]:
    metrics = Metrics()
    metrics.apply(numbered(session_events(0)))
    server = MetricsServer(metrics.registry, 0)
    server.start()
    yield f"http://127.0.0.1:{server.port}"
    server.close()


def fetch(url: str, accept: str = "*/*") -> tuple[str, str]:
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request) as response:
        return response.headers["Content-Type"], response.read().decode()


def test_the_endpoint_speaks_what_the_client_asks_for(served: str) -> None:
    """OpenMetrics with exemplars for Prometheus, plain text for everybody else."""
    kind, text = fetch(f"{served}/metrics", "application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert "# {trace_id=" in text
    assert list(text_string_to_metric_families(text))
    kind, text = fetch(f"{served}/metrics")
    assert kind.startswith("text/plain")
    assert "trace_id" not in text
    assert list(parse_plain_text(text))


def test_the_endpoint_answers_probes_and_nothing_else(served: str) -> None:
    """`/healthz` and `/readyz` say ok; an unknown path is answered with 404."""
    assert fetch(f"{served}/healthz")[1] == "ok\n"
    assert fetch(f"{served}/readyz")[1] == "ok\n"
    with pytest.raises(urllib.error.HTTPError, match="404") as refused:
        fetch(f"{served}/other")
    refused.value.close()


def test_the_endpoint_tells_targets_why_it_is_not_ready_and_that_it_is_scraped() -> None:
    """`/readyz` is 503 with the reason; `/targets` is JSON as Prometheus takes it; a scrape is noted."""
    targets, scrapes = [{"targets": ["10.0.0.1:9464"], "labels": {}}], [0]
    server = MetricsServer(
        Metrics().registry, 0, ready=lambda: "no store", targets=lambda: targets, scraped=lambda: scrapes.append(1)
    )
    server.start()
    port = server.port
    try:
        kind, text = fetch(f"http://127.0.0.1:{port}/targets")
        assert kind == "application/json"
        assert json.loads(text) == targets
        with pytest.raises(urllib.error.HTTPError, match="503") as refused:
            fetch(f"http://127.0.0.1:{port}/readyz")
        with refused.value as answer:
            assert answer.read() == b"no store\n"
        assert fetch(f"http://127.0.0.1:{port}/healthz")[1] == "ok\n"
        assert scrapes == [0]
        fetch(f"http://127.0.0.1:{port}/metrics")
        assert scrapes == [0, 1]
    finally:
        server.close()


def test_addresses_are_as_urls_want_them() -> None:
    """An IPv6 address has brackets, a name and an IPv4 address have none."""
    assert [address_of(host, 9) for host in ("10.0.0.1", "fd00::1", "node-1")] == [
        "10.0.0.1:9",
        "[fd00::1]:9",
        "node-1:9",
    ]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_is_taken_is_an_error(host: str) -> None:
    """Who asks for a port gets that or none: the text names it, and says what to do."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MetricsPortTaken, match=rf"port {port} .*UNDERSTUDY_METRICS_PORT") as refused:
            MetricsServer(Metrics().registry, port, host)
    assert refused.value.code == "metrics_port_taken"


def test_a_port_is_had_again_while_connections_to_the_one_before_linger() -> None:
    """A service that is started again has its port at once, though the kernel still waits for the end of connections
    that the dead one has closed."""
    first = MetricsServer(Metrics().registry, 0)
    first.start()
    with socket.create_connection(("127.0.0.1", first.port)) as scraper:
        scraper.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        while scraper.recv(1 << 16):  # the server closes first: its end of the connection lingers
            pass
    first.close()
    second = MetricsServer(Metrics().registry, first.port)
    second.start()
    try:
        assert fetch(f"http://127.0.0.1:{first.port}/healthz")[1] == "ok\n"
    finally:
        second.close()


def test_an_address_of_another_machine_is_refused() -> None:
    """A host that can't be listened on is a mistake in the configuration, reported as one."""
    with pytest.raises(InvalidConfiguration, match=re.escape("192.0.2.1")):
        MetricsServer(Metrics().registry, 0, "192.0.2.1")
