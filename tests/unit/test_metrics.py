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

from understudy.errors import InvalidConfiguration
from understudy.events import (
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
from understudy.observability.server import address_of, serve_metrics

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
            **shared, model="m", usage=[100, 20, 40, 5, False], duration=500_000, first_chunk=90_000, retries=2
        ),
        ModelCallFailed(**shared, model="m", duration=1_000_000, error_code="model_refused"),
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
        retries=st.integers(0, 3),
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
    assert value(metrics, "gen_ai_client_inference_duration_seconds_sum", model="m", error_type="") == 0.5
    assert value(metrics, "gen_ai_client_inference_duration_seconds_count", model="m", error_type="model_refused") == 1
    first_chunk = "gen_ai_client_inference_time_to_first_chunk_seconds_bucket"
    assert value(metrics, first_chunk, model="m", le="0.08") == 0
    assert value(metrics, first_chunk, model="m", le="0.16") == 1
    tokens = "gen_ai_client_inference_usage_{}_tokens_total"
    for kind, amount in (("input", 100), ("output", 20), ("cache_read_input", 40), ("reasoning_output", 5)):
        assert value(metrics, tokens.format(kind), agent="lead", model="m") == amount
    assert value(metrics, "gen_ai_invoke_agent_duration_seconds_sum", agent="lead", status="completed") == 3
    assert value(metrics, "gen_ai_execute_tool_duration_seconds_sum", tool="lookup", outcome="ok") == 0.02
    assert value(metrics, "understudy_restore_duration_seconds_sum") == 0.03
    assert value(metrics, "understudy_session_crashes_total", cause="process_died", waiting="true") == 1
    assert value(metrics, "understudy_session_crashes_total", cause="process_died", waiting="false") == 0
    assert value(metrics, "understudy_model_retries_total", model="m") == 2
    assert value(metrics, "understudy_model_calls_total", outcome="ok") == 1
    assert value(metrics, "understudy_tokens_redone_total") == 0


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
    measured = {kind.type for row in TABLE for kind in row.measures}
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
        measured = seen.get(("gen_ai_client_inference_duration_seconds_count", (("error_type", ""), ("model", "m"))), 0)
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
    port, stop = serve_metrics(metrics.registry, 0)
    yield f"http://127.0.0.1:{port}"
    stop()


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
    """`/healthz` and `/readyz` say ok; an unknown path is told where to look."""
    assert fetch(f"{served}/healthz")[1] == "ok\n"
    assert fetch(f"{served}/readyz")[1] == "ok\n"
    with pytest.raises(urllib.error.HTTPError, match="404") as refused:
        fetch(f"{served}/other")
    refused.value.close()


def test_the_endpoint_tells_targets_why_it_is_not_ready_and_that_it_is_scraped() -> None:
    """`/readyz` is 503 with the reason; `/targets` is JSON as Prometheus takes it; a scrape is noted."""
    targets, scrapes = [{"targets": ["10.0.0.1:9464"], "labels": {}}], [0]
    port, stop = serve_metrics(
        Metrics().registry, 0, ready=lambda: "no store", targets=lambda: targets, scraped=lambda: scrapes.append(1)
    )
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
        stop()


def test_addresses_are_as_urls_want_them() -> None:
    """An IPv6 address has brackets, a name and an IPv4 address have none."""
    assert [address_of(host, 9) for host in ("10.0.0.1", "fd00::1", "node-1")] == [
        "10.0.0.1:9",
        "[fd00::1]:9",
        "node-1:9",
    ]


def test_a_port_that_is_taken_is_replaced_by_a_free_one(caplog: pytest.LogCaptureFixture) -> None:
    """A second node on one machine still starts, serves its metrics, and says where."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port, stop = serve_metrics(Metrics().registry, taken.getsockname()[1])
        try:
            assert port != taken.getsockname()[1]
            assert "understudy_runs_finished_total" in fetch(f"http://127.0.0.1:{port}/metrics")[1]
        finally:
            stop()
    assert f"they are on port {port}" in caplog.text


def test_an_address_of_another_machine_is_refused() -> None:
    """A host that can't be listened on is a mistake in the configuration, told as one."""
    with pytest.raises(InvalidConfiguration, match=re.escape("192.0.2.1")):
        serve_metrics(Metrics().registry, 0, "192.0.2.1")
