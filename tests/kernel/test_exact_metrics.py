"""Metrics are exact across any death: what a service shows is what the store's log says, counted by somebody else."""

from __future__ import annotations

import asyncio
import json
import random
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from prometheus_client.samples import Sample
from sqlalchemy import text, update

from understudy.node import adoption, projection
from understudy.node.node_service import NodeService
from understudy.observability import conventions as names
from understudy.observability.export import Export
from understudy.observability.live_table import LIVE_TABLE
from understudy.observability.metric_table import TABLE
from understudy.observability.metrics import Metrics
from understudy.observability.span_files import read_spans
from understudy.observability.span_sink import TRIES_TOGETHER, SpanSink
from understudy.observability.spans import spans_of
from understudy.store.db.statements import ACCOUNT
from understudy.store.journal import Journal
from understudy.store.operations import beginnings, presence, progress
from understudy.store.operations.presence import Log
from understudy.store.reads import queries
from understudy.store.upkeep import retention

from ..prometheus import prometheus
from ..store.test_archive import export, load
from . import kernel as k
from .test_drain import Nodes, cluster
from .test_sinks import Picky

PATIENCE = 30.0
DEATHS = 100
QUEUE_STATES = ("at_work", "waiting", "behind")
Shown = dict[tuple[str, tuple[tuple[str, str], ...]], float]
Row = dict[str, Any]


def shown(metrics: Metrics) -> Shown:
    """Every sample of a scrape."""
    found: list[Sample] = [sample for family in metrics.registry.collect() for sample in family.samples]
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in found}


def total(samples: Shown, name: str, **labels: str) -> float:
    """The sum of a metric's series that have these labels."""
    return sum(value for (of, has), value in samples.items() if of == name and labels.items() <= dict(has).items())


def unbalanced(*scrapes: Shown) -> float:
    """What the conservation rule of docs/metrics.md gives for a cluster; 0 where nothing is lost or counted twice."""

    def each(name: str, **labels: str) -> float:
        return sum(total(scrape, name, **labels) for scrape in scrapes)

    accepted = each("understudy_runs_accepted_total") + each("understudy_runs_carried", state="accepted")
    finished = each("understudy_runs_finished_total") + each("understudy_runs_carried", state="finished")
    return accepted - finished - each("understudy_runs_live")


class EventRows:
    """Every row that the event table ever had, read with SQL of the test's own before somebody prunes it."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self.rows: dict[tuple[str, int], Row] = {}

    def read(self) -> list[Row]:
        statement = text("SELECT session_id, seq, type, body, writer FROM event WHERE namespace = 'tests'")
        with k.opened(self._dsn) as database, database.read() as connection:
            for row in connection.execute(statement).mappings():
                body = json.loads(row["body"]) if isinstance(row["body"], str) else row["body"]
                self.rows[row["session_id"], row["seq"]] = {"type": row["type"], "writer": row["writer"], **body}
        return list(self.rows.values())


def by(*types: str, where: Callable[[Row], bool] = lambda row: True, **labels: str) -> Callable[[list[Row]], Counter]:
    """Counts rows of these types by label: the label's name and the field that it is of."""

    def count(rows: list[Row]) -> Counter:
        found = [row for row in rows if row["type"] in types and where(row)]
        return Counter(tuple(sorted((name, _text(row[field])) for name, field in labels.items())) for row in found)

    return count


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def added(
    field: str, label: str, amount: Callable[[int], int] = lambda number: number
) -> Callable[[list[Row]], Counter]:
    """Adds up what rows have in a field by names, which are the values of a label."""

    def count(rows: list[Row]) -> Counter:
        found: Counter = Counter()
        for row in (row for row in rows if row["type"] in CALLS):
            for name, number in (row.get(field) or {}).items():
                found[((label, name),)] += amount(number)
        return found

    return count


def tokens(index: int) -> Callable[[list[Row]], Counter]:
    def count(rows: list[Row]) -> Counter:
        used = [sum(row["usage"][index : index + 1]) for row in rows if row["type"] in CALLS and row["usage"]]
        return Counter({(): sum(used)})

    return count


CALLS = ("model_call_completed", "model_call_failed")
EXECUTED = ("ok", "error", "timeout", "interrupted", "cancelled")
EXPECTED: dict[str, tuple[str, Callable[[list[Row]], Counter]]] = {
    names.INFERENCE_DURATION: ("_count", by(*CALLS, gen_ai_request_model="model")),
    names.INFERENCE_FIRST_CHUNK: (
        "_count", by(CALLS[0], where=lambda row: row["first_chunk"] > 0, gen_ai_request_model="model"),
    ),
    names.INFERENCE_PER_CHUNK: (
        "_count",
        lambda rows: Counter({(): sum(sum((row.get("chunk_times") or [0])[1:]) for row in rows)}),
    ),
    names.INFERENCE_INPUT_TOKENS: ("_total", tokens(0)),
    names.INFERENCE_OUTPUT_TOKENS: ("_total", tokens(1)),
    names.INFERENCE_CACHED_TOKENS: ("_total", tokens(2)),
    names.INFERENCE_CACHE_WRITE_TOKENS: ("_total", tokens(6)),
    names.INFERENCE_REASONING_TOKENS: ("_total", tokens(3)),
    names.MODEL_COST: ("_total", lambda rows: Counter()),
    names.INVOKE_AGENT_DURATION: (
        "_count", by("run_finished", where=lambda row: row["started_at"] > 0, understudy_run_status="status"),
    ),
    names.EXECUTE_TOOL_DURATION: (
        "_count", by("tool_finished", where=lambda row: row["outcome"] in EXECUTED, gen_ai_tool_name="tool"),
    ),
    names.MODEL_CALL_WAIT: ("_count", added("waited", "profile", lambda _waited: 1)),
    names.EVENTS: (
        "_total", lambda rows: Counter((("type", row["type"]),) for row in rows),
    ),
    names.SESSIONS_CREATED: ("_total", by("session_created")),
    names.RUNS_ACCEPTED: ("_total", by("run_accepted")),
    names.RUNS_FINISHED: ("_total", by("run_finished", status="status")),
    names.RUN_QUEUED: ("_count", by("run_started")),
    names.QUEUE_WAITED: ("_count", by("run_admitted", queue="queue")),
    names.ACTIVATIONS: ("_total", by("session_activated", cause="cause")),
    names.SESSION_CRASHES: ("_total", by("session_crashed", cause="cause", waiting="waiting")),
    names.CRASH_DETECTION: ("_count", by("session_crashed", where=lambda row: row["unseen"] > 0)),
    names.RESTORE_DURATION: ("_count", by("session_activated", where=lambda row: row["cause"] == "resume")),
    names.TOKENS_REDONE: (
        "_total",
        lambda rows: Counter({(): sum(sum(row["usage"][:2]) for row in rows if row.get("redone") and row["usage"])}),
    ),
    names.MODEL_CALLS: ("_total", by(*CALLS)),
    names.MODEL_RETRY_COUNT: ("_total", added("retried", "reason")),
    names.MODEL_CALLS_REISSUED: ("_total", by("model_call_reissued")),
    names.TOOL_CALLS: ("_total", by("tool_finished", tool="tool", outcome="outcome")),
    names.TOOLS_IN_DOUBT: ("_total", by("tool_in_doubt", tool="tool", policy="policy")),
    names.INPUTS_REQUESTED: ("_total", by("input_requested", kind="kind")),
    names.INPUTS_RECEIVED: ("_total", by("input_received", kind="kind", decision="decision")),
    names.TIMERS_SET: ("_total", by("timer_set", kind="kind")),
    names.TIMERS_FIRED: ("_total", by("timer_fired", kind="kind")),
    names.TIMER_LATENESS: ("_count", by("timer_fired", kind="kind")),
    names.MEMORY_FAILURES: ("_total", by("memory_failed", what="what")),
    names.CHILDREN_SPAWNED: ("_total", by("child_spawned")),
    names.CHILD_RESTARTS: ("_total", by("child_restarted")),
    names.SESSIONS_MOVED: ("_total", by("session_moved", forced="forced")),
    names.SESSIONS_MIGRATED: ("_total", by("session_migrated")),
    names.SESSIONS_QUARANTINED: ("_total", by("session_quarantined")),
    names.CANCEL_REQUESTS: ("_total", by("cancel_requested")),
}  # fmt: skip
"""For each metric that comes from events: the sample to look at, and what it must be, from the rows alone."""


def differences(samples: Shown, rows: list[Row]) -> list[str]:
    """Where a scrape is not what the rows say."""
    units = {row.name: row.unit for row in TABLE}
    wrong = []
    for name, (suffix, expected) in EXPECTED.items():
        sample = names.prometheus_name(name, units[name]) + suffix
        found = expected(rows)
        for labels, number in found.items():
            if total(samples, sample, **dict(labels)) != number:
                wrong.append(f"{sample}{dict(labels)}: {total(samples, sample, **dict(labels))}, not {number}")
        if total(samples, sample) != found.total():
            wrong.append(f"{sample}: {total(samples, sample)} in all, not {found.total()}")
    return wrong


def test_no_metric_is_left_out() -> None:
    """Every metric that comes from events is counted here by somebody else, too."""
    assert EXPECTED.keys() == {row.name for row in TABLE if row.measures}


async def pruned(service: NodeService, session_id: str) -> None:
    """Remove a session's events, as far as they may be."""
    await service.journal.submit(lambda tx: retention.drop_events(tx, session_id, 1 << 62))


class Deaths:
    """Kills frames and the node service at random points, `DEATHS` times; looks at the metrics around each."""

    def __init__(self, kernel: k.Kernel, seed: int) -> None:
        self.kernel = kernel
        self.left = DEATHS
        self.of_services = 0
        self.before: list[Shown] = []
        self._random = random.Random(seed)
        kernel.on_point = self.at

    def at(self, _number: int, _label: str, worker: k.Worker | None) -> None:
        if not self.left or not self.kernel.is_up or self._random.random() > 0.06:
            return
        if worker is not None and not worker.dead and self._random.random() < 0.9:
            self.left -= 1
            self.kernel.kill(worker)
        elif self._random.random() < 0.2:
            self.left -= 1
            self.of_services += 1
            self.before.append(counters(shown(self.kernel.service.projection.metrics)))
            self.kernel.kill_node()


def counters(samples: Shown) -> Shown:
    """Those that come from events."""
    units = {row.name: row.unit for row in TABLE}
    known = {names.prometheus_name(name, units[name]) + suffix for name, (suffix, _) in EXPECTED.items()}
    return {key: value for key, value in samples.items() if key[0] in known}


@pytest.mark.thorough
@pytest.mark.timeout(240)
async def test_a_hundred_deaths_leave_every_counter_exact(tmp_path: Path) -> None:
    """Given deaths of frames and services at random points, with retention and checkpoints between them, then every
    counter is what the rows say, never went back, and no run is lost or counted twice.
    """
    dsn = f"sqlite:///{tmp_path}/store.db"
    arguments = {"path": str(tmp_path / "notes"), "text": "x"}
    child = k.spec(k.script([("look", arguments)], "back"), [k.look], name="worker", hash="worker")
    spawn = [("spawn_agent", {"agent": "worker", "task": "go"})]
    steps = [("note", arguments), ("look", arguments), ("careful", arguments), ("wait", {"seconds": 0.01})]
    lead = k.spec(
        k.script(steps, spawn, "done"), [k.note, k.look, k.careful, "wait", "spawn_agent"], agents={"worker": child}
    )
    events, scrapes = EventRows(dsn), list[Shown]()
    async with k.running(dsn, tmp_path, frames=3) as kernel:
        deaths, number = Deaths(kernel, seed=5), 0
        while deaths.left:
            sessions = [f"s{number + index}" for index in range(4)]
            number += 4
            await asyncio.gather(*(kernel.run(session_id, lead) for session_id in sessions))
            await kernel.quiet()
            events.read()
            await kernel.remote(lambda service: service.projection._checkpoint())
            for session_id in sessions:  # what is exported may go, the rest stays
                await kernel.remote(lambda service, s=session_id: pruned(service, s))
            scrapes += [*deaths.before, counters(shown(kernel.service.projection.metrics))]
            deaths.before.clear()
        kernel.on_point = None
        await kernel.ask("set_queue", {"name": "narrow", "concurrency": 1})
        for session_id in ("queued-1", "queued-2"):
            await kernel.spawn(session_id, k.spec())
            await kernel.ask("send", session_id, {"run_id": "r", "content": "go", "place": {"queue": "narrow"}})
        await kernel.end("queued-2")
        await kernel.spawn("open", lead)
        await kernel.stop_frames()
        for run_id in ("a", "b"):
            await kernel.send("open", "go", run_id)
        kernel.kill_node()
        await kernel.quiet()
        projection = kernel.service.projection
        await projection.counting.count()
        last = shown(projection.metrics)
        assert differences(last, events.read()) == []
        assert total(last, "understudy_runs_live") == 2
        await projection.adoption.look()
        assert unbalanced(shown(projection.metrics)) == 0
    assert deaths.of_services > 3
    assert total(last, "understudy_session_crashes_total") > 20
    assert total(last, "understudy_queue_waited_seconds_count", queue="narrow") == 2
    for earlier, later in zip(scrapes, [*scrapes[1:], last], strict=True):
        assert [key for key, value in earlier.items() if later.get(key, 0) < value] == []


async def test_no_run_is_unaccounted_for_between_two_counts(tmp_path: Path) -> None:
    """Given live runs that were counted, when others are accepted, and some end, before they are counted again, then
    each scrape shows as many live ones as were accepted and have not ended: the alert knows no other reason."""
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, frames=1) as kernel:
        projection = kernel.service.projection
        await kernel.run("before", k.spec())
        await projection.counting.count()
        with patch.object(projection.counting, "count"):
            await kernel.stop_frames()
            await kernel.spawn("s", k.spec())
            for number in range(3):
                await kernel.send("s", "go", f"r{number}")
                scrape = shown(projection.metrics)
                assert (total(scrape, "understudy_runs_live"), unbalanced(scrape)) == (number + 1, 0)
            kernel.add_frame()
            await kernel.end("s", "r2")
            scrape = shown(projection.metrics)
            assert (total(scrape, "understudy_runs_live"), unbalanced(scrape)) == (0, 0)


# Logs of services that are gone.


def logs(dsn: str) -> dict[str, Log]:
    with k.opened(dsn) as database, database.read() as connection:
        return {log.writer: log for log in presence.logs(connection, "tests")}


def state(dsn: str, writer: str) -> dict[str, Any]:
    with k.opened(dsn) as database, database.read() as connection:
        row = queries.metric_state(connection, "tests", writer)
    return row.state if row is not None else {}


async def expected_state(kernel: k.Kernel, writer: str) -> dict[str, Any]:
    """The checkpoint of a service that measured this writer's whole log in one go."""
    metrics = Metrics()
    metrics.apply(await kernel.service.reading.query(queries.writer_events, writer, 0, 1_000_000))
    found: dict[str, Any] = json.loads(json.dumps(metrics.checkpoint()))
    return found


async def lost(nodes: Nodes, directory: Path) -> k.Kernel:
    """Work on nodes `a` and `b`, then the loss of `b`, whose last events are neither measured nor exported."""
    a, b = nodes.kernels
    arguments = {"path": str(directory / "notes"), "text": "x"}
    for exporting in b.service.projection.exports.values():
        exporting._aborted = True  # from the start: however slow this machine is, it exports nothing of its work
    for kernel in (a, b):
        await kernel.run(f"on-{kernel.node_id}", k.spec(k.script([("look", arguments)], "done"), [k.look]))
    await b.service.projection._checkpoint()
    await b.stop_frames()
    await b.spawn("queued", k.spec("x"))  # at home on `a` or `b`, and never activated there
    await b.send("queued")
    nodes.kernels.remove(b)
    nodes.names.remove("b")
    await b.lose()
    return b


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what no event reports."""
    async with asyncio.timeout(PATIENCE):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


async def completed(dsn: str, writer: str) -> None:
    """Wait until nothing of a writer's log is left to do."""
    await until(lambda: logs(dsn)[writer].is_done())


@pytest.mark.thorough
async def test_the_first_service_completes_the_log_of_one_that_is_gone(
    postgres: str, server: k.OfflineServer, tmp_path: Path
) -> None:
    """Given a lost node whose last events were not dealt with, then the first service measures and exports them and
    shows its runs, retention may remove its events, and all runs are accounted for.
    """
    async with cluster(postgres, server, tmp_path, "a", "b") as nodes:
        [a, _] = nodes.kernels
        b = await lost(nodes, tmp_path)
        assert not logs(postgres)["writer-b"].is_done()
        await a.take_over(a.generation, ["a"])
        await completed(postgres, "writer-b")
        assert state(postgres, "writer-b") == await expected_state(a, "writer-b")
        await nodes.end("queued")
        projection = a.service.projection
        await projection.counting.count()
        await projection.adoption.look()
        scrape = shown(projection.metrics)
        assert total(scrape, "understudy_runs_carried", state="accepted") == 2
        assert total(scrape, "understudy_runs_carried", state="finished") == 1
        assert unbalanced(scrape) == 0
        assert await not_exported(a, "writer-b", tmp_path) == set()
        kept = await a.service.journal.submit(
            lambda tx: retention.events_to_drop(tx.connection, "tests", "on-b", 1 << 62)
        )
        assert not kept.kept
        await comes_back(b, nodes, postgres)


@pytest.mark.thorough
async def test_a_span_that_is_always_refused_does_not_keep_a_lost_log_open(
    postgres: str, server: k.OfflineServer, tmp_path: Path
) -> None:
    """Given a lost node's log with a span that the collector refuses, then the others are exported, and it ends."""
    async with cluster(postgres, server, tmp_path, "a", "b") as nodes:
        [a, _] = nodes.kernels
        await lost(nodes, tmp_path)
        events = await a.service.reading.query(queries.writer_events, "writer-b", 0, 1_000)
        after = logs(postgres)["writer-b"].exported.get("spans", 0)
        spans = [span.context for event in events if event.writer_seq > after for span in spans_of(event)]
        wanted = [f"{context.span_id:016x}" for context in spans if context is not None]
        assert len(wanted) > 2
        picky = Picky(wanted[1])
        looks = a.service.projection.adoption
        looks._exporters = lambda events, _: {"spans": Export(events, SpanSink(picky), "spans")}
        a.service.homes.nodes = ["a"]
        for _ in range(TRIES_TOGETHER + 1):
            await looks.look()
        assert logs(postgres)["writer-b"].is_done()
        assert set(picky.accepted) == {*wanted} - {wanted[1]}
        await looks.look()
        assert not looks._exports


@pytest.mark.thorough
async def test_the_nodes_are_shown_as_they_stand(postgres: str, server: k.OfflineServer, tmp_path: Path) -> None:
    """Given three nodes, when one is drained and goes, then none is missing; when another one is lost, then one is."""
    async with cluster(postgres, server, tmp_path, "a", "b", "c") as nodes:
        [a, _, c] = nodes.kernels

        def states() -> list[float]:
            found = shown(a.service.projection.metrics)
            return [total(found, "understudy_nodes", state=state) for state in ("serving", "drained", "missing")]

        assert states() == [3, 0, 0]
        await nodes.drain(c)
        assert states() == [2, 1, 0]
        await a.take_over(a.generation, ["a", "b"])
        assert states() == [2, 0, 0]
        await a.take_over(a.generation, ["a"])
        assert states() == [1, 0, 1]


async def not_exported(kernel: k.Kernel, writer: str, directory: Path) -> set[str]:
    """Spans of a writer's events that are in no file."""
    events = await kernel.service.reading.query(queries.writer_events, writer, 0, 1_000_000)
    contexts = [span.get_span_context() for event in events for span in spans_of(event)]
    wanted = {f"{context.span_id:016x}" for context in contexts if context is not None}
    assert wanted
    traces = {event.trace_id for event in events if event.trace_id}
    return wanted - {record.span_id for trace_id in traces for record in read_spans(directory, trace_id)}


async def comes_back(b: k.Kernel, nodes: Nodes, dsn: str) -> None:
    """The lost node's service starts again: it goes on from there, and the other shows its runs no more."""
    again = k.Kernel(dsn, b.server, b.directory, node_id="b")
    await again.boot()
    nodes.kernels.append(again)
    nodes.names.append("b")
    await nodes.tell()
    for kernel in nodes.kernels:
        await kernel.service.projection.counting.count()
        await kernel.service.projection.adoption.look()
    scrapes = [shown(kernel.service.projection.metrics) for kernel in nodes.kernels]
    assert total(scrapes[1], "understudy_runs_accepted_total") == 2
    assert [total(scrape, "understudy_runs_carried") for scrape in scrapes] == [0, 0]
    assert unbalanced(*scrapes) == 0


@pytest.mark.thorough
@pytest.mark.parametrize("kill_at", range(4))
async def test_a_death_in_the_middle_of_it_changes_nothing(
    postgres: str, server: k.OfflineServer, tmp_path: Path, kill_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a first service that dies at a write of the adoption, before it or after it, then the next one's result is
    the same.
    """
    async with cluster(postgres, server, tmp_path, "a", "b") as nodes:
        [a, _] = nodes.kernels
        await lost(nodes, tmp_path)
        service, turns = a.service, [0]

        def dying(save: Callable[..., None]) -> Callable[..., None]:
            def operation(tx: Any, writer: str, *values: Any) -> None:
                save(tx, writer, *values)
                if writer == "writer-b" and a.service is service:
                    turns[0] += 1
                    if turns[0] == kill_at // 2 + 1:
                        kill()

            return operation

        def kill() -> None:
            loop.call_soon_threadsafe(a.kill_node)
            if kill_at % 2 == 0:
                raise RuntimeError("it dies before its commit")

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(adoption.progress, "save_metrics", dying(progress.save_metrics))
        monkeypatch.setattr(adoption.progress, "save_cursor", dying(progress.save_cursor))
        await a.take_over(a.generation, ["a"])
        await until(lambda: a.service is not service and a.is_up)
        await a.quiet()
        await completed(postgres, "writer-b")
        assert turns[0]
        assert state(postgres, "writer-b") == await expected_state(a, "writer-b")
        assert await not_exported(a, "writer-b", tmp_path) == set()
        assert logs(postgres)["writer-b"].measured == logs(postgres)["writer-b"].last


async def test_what_a_paused_predecessor_commits_is_measured(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a service that was taken for dead and only paused, when it commits after the next one has begun, then that
    one measures it, although it commits nothing itself."""
    monkeypatch.setattr(projection, "CHECKPOINT_SECONDS", 0.05)
    async with k.running(store, tmp_path, frames=0) as kernel:
        service = kernel.service
        with k.opened(kernel.dsn) as database:
            paused = Journal(database, kernel.namespace, service.config.writer, lambda _: None)
            paused.start()
            options = {"spec_hash": "hash", "placement": "", "node_id": kernel.node_id, "metadata": {}}
            await paused.submit(lambda tx: beginnings.create_session(tx, "s", k.spec(), **options))
            end = paused.writer_seq
            await paused.close()
        async with asyncio.timeout(PATIENCE):
            while service.projection.metrics.writer_seq < end:  # noqa: ASYNC110 - no event says so
                await asyncio.sleep(0.01)


async def test_what_is_noted_as_done_never_goes_back(store: str, tmp_path: Path) -> None:
    """Of two checkpoints or cursors of a writer the further one stays, whichever comes last."""
    async with k.running(store, tmp_path, frames=0) as kernel:
        submit = kernel.service.journal.submit
        for seq in (5, 9, 7):
            await submit(lambda tx, seq=seq: progress.save_metrics(tx, "w", seq, {"at": seq}))
            await submit(lambda tx, seq=seq: progress.save_cursor(tx, "w", "spans", seq))
    assert state(store, "w") == {"at": 9}
    assert logs(store)["w"] == Log("w", 0, 9, {"spans": 9})


async def test_imported_runs_are_counted_once(store: str, server: k.OfflineServer, tmp_path: Path) -> None:
    """Given a session that had ended one run and had another queued, when it goes on in another store, then the runs
    that came along are accounted for there, before the open one ends and after it.
    """
    source = f"sqlite:///{tmp_path}/source.db"
    async with k.running(source, tmp_path, server=server) as kernel:
        await kernel.run("moved", k.spec())
        await kernel.stop_frames()
        await kernel.send("moved", "again", "open")
    await load(store, export(source, "moved"), resume=True)
    for frames, live in ((0, 1), (1, 0)):
        async with k.running(store, tmp_path, frames=frames, server=server) as kernel:
            if frames:
                await kernel.end("moved", "open")
            projection = kernel.service.projection
            await projection.counting.count()
            await projection.adoption.look()
            scrape = shown(projection.metrics)
            assert total(scrape, "understudy_runs_live") == live
            assert total(scrape, "understudy_runs_carried", state="accepted") == 2
            assert unbalanced(scrape) == 0


# What is counted in the store, and who learns of it.


@pytest.fixture
def server() -> Iterator[k.OfflineServer]:
    with k.OfflineServer() as running:
        yield running


async def test_the_store_is_counted_as_it_is(store: str, tmp_path: Path) -> None:
    """Sessions by status, live runs, inboxes, timers and budgets of this node; those of a node that is gone too, by the
    first service only.
    """
    async with k.running(store, tmp_path, frames=1) as kernel:
        counting, metrics = kernel.service.projection.counting, kernel.service.projection.metrics
        await kernel.run("done", k.spec())
        await kernel.spawn("asks", k.spec(k.script([("request_user_input", {"prompt": "?"})]), ["request_user_input"]))
        await kernel.send("asks")
        await kernel.paused("asks")
        await kernel.spawn("waits", k.spec(k.script([("wait", {"seconds": 600})]), ["wait"]))
        await kernel.send("waits")
        await kernel.until("waits", "timer_set")
        await kernel.stop_frames()
        await kernel.spawn("queued", k.spec(budget={"tokens": 1_000}))
        for run_id in ("a", "b"):
            await kernel.send("queued", "go", run_id)
        expected = {"idle": 1, "waiting_for_input": 1, "waiting_for_timer": 1, "running": 1}
        statuses: dict[str, float] = {}
        async with asyncio.timeout(PATIENCE):
            while statuses != expected:  # sessions without work are not counted every time
                await counting.count()
                found = shown(metrics)
                statuses = {
                    dict(of)["status"]: n for (name, of), n in found.items() if name == "understudy_sessions" and n
                }
        assert total(found, "understudy_runs_live") == 4
        assert total(found, "understudy_inbox_items") == 2
        assert 0 <= total(found, "understudy_inbox_oldest_seconds") < 60
        assert total(found, "understudy_timers_pending") == 1
        assert total(found, "understudy_budget_tokens", state="allowed") == 1_000
        assert total(found, "understudy_budgets_near_limit", resource="tokens") == 0
        assert unbalanced(found) == 0
        families = {family.name for family in metrics.registry.collect()}
        assert {names.prometheus_name(row.name, row.unit) for row in LIVE_TABLE.values()} <= families
        await kernel.service.journal.submit(lambda tx: _rehome(tx, "queued", "elsewhere"))
        await counting.count()
        assert total(shown(metrics), "understudy_runs_live") == 4
        kernel.service.homes.nodes = ["elsewhere", "node1"]
        await counting.count()
        assert total(shown(metrics), "understudy_runs_live") == 2
        kernel.service.homes.nodes = ["node1"]
        await kernel.service.journal.submit(lambda tx: _rehome(tx, "queued", "node1"))
        for spent, near in ((900, 1), (899, 0), (0, 0)):
            await kernel.service.journal.submit(partial(_spend, session_id="queued", amount=spent))
            await counting.count()
            assert total(shown(metrics), "understudy_budgets_near_limit", resource="tokens") == near


async def test_queues_and_triage_are_counted(store: str, tmp_path: Path) -> None:
    """Given a queue with runs at work and waiting, and failures of a schedule, then one service shows how many of each
    there are; what is resolved is shown no more."""
    async with k.running(store, tmp_path, frames=1) as kernel:
        counting, metrics = kernel.service.projection.counting, kernel.service.projection.metrics
        poor = k.spec(budget=[{"scope": "tree", "tokens": 1}])
        wanted = {"name": "looks", "content": "go", "timing": {"every": 3600}, "spec": poor}
        await kernel.ask("set_schedule", wanted, {})
        fired = await kernel.ask("trigger_schedule", "looks")
        await kernel.end(fired["session_id"], fired["run_id"])
        await kernel.ask("set_queue", {"name": "q", "concurrency": 1})
        await kernel.stop_frames()
        for name in ("a", "b", "c"):
            await kernel.spawn(name, k.spec())
            await kernel.ask("send", name, {"run_id": "r", "content": "go", "place": {"queue": "q"}})
        await counting.count()
        found = shown(metrics)
        states = {state: total(found, "understudy_queue_runs", queue="q", state=state) for state in QUEUE_STATES}
        assert states == {"at_work": 1, "waiting": 2, "behind": 0}
        assert total(found, "understudy_triage_open", schedule="looks") == 1
        [entry] = await kernel.ask("read", "triage", [], {})
        await kernel.ask("resolve_triage", entry["id"])
        await counting.count()
        assert total(shown(metrics), "understudy_triage_open") == 0


def _spend(tx: Any, session_id: str, amount: int) -> None:
    tx.writes += 1
    tx.connection.execute(update(ACCOUNT).where(ACCOUNT.c.session_id == session_id).values(spent=amount))


def _rehome(tx: Any, session_id: str, node_id: str) -> None:
    row = tx.session(session_id)
    tx.changed(row)
    row.node_id = node_id


async def test_where_the_store_fails_the_last_numbers_stay(store: str, tmp_path: Path) -> None:
    """A count that fails raises nothing; the numbers stay, and the service says that it is not ready, and why."""
    async with k.running(store, tmp_path, frames=0) as kernel:
        counting, metrics = kernel.service.projection.counting, kernel.service.projection.metrics
        await kernel.spawn("s", k.spec())
        async with asyncio.timeout(PATIENCE):
            while not total(shown(metrics), "understudy_sessions", status="idle"):  # it is not counted every time
                await counting.count()
        assert counting.obstacle() == ""
        assert total(shown(metrics), "understudy_store_outage_seconds") == 0

        async def fails(*_: Any, **__: Any) -> Any:
            raise ConnectionError("gone")

        query, kernel.service.reading.query = kernel.service.reading.query, fails  # type: ignore[method-assign]
        await counting.count()
        assert total(shown(metrics), "understudy_sessions", status="idle") == 1
        assert total(shown(metrics), "understudy_store_outage_seconds") > 0
        assert "the store has not worked" in counting.obstacle()
        kernel.service.reading.query = query  # type: ignore[method-assign]
        await counting.count()
        assert counting.obstacle() == ""
        kernel.service.supervisor_heard = None
        assert "supervisor" in counting.obstacle()


async def test_counting_goes_on_at_once_when_the_store_is_back(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a store that answers after long, and with an error, then it is asked again as soon as ever."""
    for name, value in (("COUNT_SECONDS", 0.05), ("SCRAPED_COUNT_SECONDS", 0.05), ("SHARE", 1e-9)):
        monkeypatch.setattr(f"understudy.node.counting.{name}", value)
    monkeypatch.setattr("understudy.node.counting.LONGEST_PAUSE", 0.1)
    async with k.running(store, tmp_path, frames=0) as kernel:
        counting = kernel.service.projection.counting
        await until(lambda: counting.counted is not None)

        async def fails(*_: Any, **__: Any) -> Any:
            raise ConnectionError("gone")

        query, kernel.service.reading.query = kernel.service.reading.query, fails  # type: ignore[method-assign]
        await until(lambda: counting.failing_since is not None)
        kernel.service.reading.query = query  # type: ignore[method-assign]
        await until(lambda: counting.failing_since is None)
        assert counting.obstacle() == ""


async def test_a_service_that_was_forgotten_announces_itself(store: str, tmp_path: Path) -> None:
    """Given a service that was given up for a while, so that the first one removed its row, then it is found."""
    async with k.running(store, tmp_path, frames=0) as kernel:
        service, counting = kernel.service, kernel.service.projection.counting
        await service.journal.submit(lambda tx: presence.forget(tx, [service.config.node_id]))
        await counting.count()
        await counting.count()
        [row] = counting.services
        assert (row.node_id, row.writer) == (service.config.node_id, service.config.writer)
        assert row.address == service.projection.address


async def test_the_lag_of_a_sink_is_what_it_has_not_taken(store: str, tmp_path: Path) -> None:
    """While a sink refuses spans its lag grows in events and in time; when it accepts them there is none."""
    async with k.running(store, tmp_path, frames=1) as kernel:
        projection = kernel.service.projection
        [export] = projection.exports.values()
        sink, export._pause = export._sink, 0.0
        refusing = type("Refusing", (), {"export": lambda *_: None, "shutdown": lambda _: None})()
        export._sink, export._retry = refusing, (0.01, 0.01)
        await kernel.run("s", k.spec())
        await until(lambda: export.failures > 0)
        found = shown(projection.metrics)
        assert 0 < total(found, "understudy_projection_lag_events", sink="spans") <= kernel.service.journal.writer_seq
        assert total(found, "understudy_projection_lag_seconds", sink="spans") > 0
        assert total(found, "understudy_export_failures_total", sink="spans") > 0
        export._sink = sink
        await until(lambda: not total(shown(projection.metrics), "understudy_projection_lag_events"))
        found = shown(projection.metrics)
        assert total(found, "understudy_projection_lag_seconds", sink="spans") == 0
        assert total(found, "understudy_exported_total", sink="spans") > 0


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        return str(response.read().decode())


@pytest.mark.thorough
async def test_prometheus_finds_and_scrapes_every_node_service(
    postgres: str, server: k.OfflineServer, tmp_path: Path
) -> None:
    """Given two node services and a Prometheus that knows one of them, then both are scraped, exemplars lead to traces,
    and the conservation rule of docs/metrics.md is 0 in its own words.
    """
    kernels = [k.Kernel(postgres, server, tmp_path, node_id=name) for name in ("a", "b")]
    for kernel in kernels:
        kernel.serves = True
        await kernel.start(1)
    nodes = Nodes(kernels)
    try:
        await nodes.tell()
        for kernel in kernels:
            await kernel.run(f"on-{kernel.node_id}", k.spec())
            await kernel.service.projection.counting.count()
        addresses = [kernel.service.projection.address for kernel in kernels]
        assert len(json.loads(await asyncio.to_thread(get, f"http://{addresses[0]}/targets"))) == 2
        assert await asyncio.to_thread(get, f"http://{addresses[1]}/readyz") == "ok\n"
        page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
        [rule] = [block for block in page.split("```\n") if block.startswith("sum(understudy_runs_accepted_total)")]
        await asyncio.to_thread(_scraped, tmp_path, addresses, rule)
    finally:
        await asyncio.gather(*(kernel.stop() for kernel in kernels))


def _scraped(directory: Path, addresses: list[str], rule: str) -> None:
    with prometheus(directory / "prometheus", discovery=f"http://{addresses[0]}/targets") as found:
        wanted = {f"http://{address}/metrics": "up" for address in addresses}
        found.until(lambda: found.targets() == wanted, "both services are up")
        found.until(lambda: found.query("sum(understudy_runs_finished_total)") == {(): 2.0}, "both runs")
        assert found.value(rule) == 0
        bucket = "gen_ai_client_inference_duration_seconds_bucket"
        found.until(lambda: bool(found.exemplars(bucket)), "exemplars")
        assert all(len(exemplar["labels"]["trace_id"]) == 32 for exemplar in found.exemplars(bucket))
        assert found.value("count(understudy_build_info)") == 2
