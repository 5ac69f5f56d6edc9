"""Every statement that the product executes finds its rows by an index, on a store with a million messages.

No statement is listed here: sessions work, die and are read in a small store, and what reaches the driver there is
recorded. On the large store each is explained, and executed, for a typical session and for the one with the longest
history. What a plan says is checked as well as what it costs: rows that an index brings and a filter drops show only
in the work done.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, event, insert, select, text

from understudy.identifiers import child_identifier
from understudy.node.paging import Slot
from understudy.node.requests import READS
from understudy.queues import WAITS
from understudy.store.db import schema
from understudy.store.db.engine import Database
from understudy.store.db.prepared import defaults
from understudy.store.db.statements import RUN, SESSION
from understudy.store.db.tables import metadata
from understudy.store.reads import gauges, queries
from understudy.testing.offline import OfflineServer

from .. import plans
from ..kernel import kernel as k

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(240)]

LARGE = {"message", "event", "tool_call", "run", "session", "inbox", "account", "reservation"}
EXPECTED = 60
"""Fewer distinct statements than this, however long their lists are, and something was not recorded."""


# Work: everything that sessions, services and clients do to a store, once.


async def work(dsn: str, directory: Path) -> None:
    """Sessions of two nodes, one of which is lost; tools, children, a budget, deaths, cancels, reads."""
    with OfflineServer() as server:
        lost, kernel = (k.Kernel(dsn, server, directory, node_id=name) for name in ("node2", "node1"))
        for each in (lost, kernel):  # the proof reads everything, as it should
            each.check = lambda *_: None  # type: ignore[method-assign]
        await lost.start(1)
        await lost.spawn("s-orphan", k.spec(k.script({"text": "late", "delay": 0.5})))
        await lost.send("s-orphan")
        await lost.until("s-orphan", "model_call_started")
        await lost.lose()
        await kernel.start(2)
        try:
            await kernel.end("s-orphan")
            await rounds(kernel, directory)
            await deaths(kernel, directory)
            await endings(kernel)
            await questions(kernel)
            await timers(kernel)
            await jobs(kernel)
            await notes(kernel)
            await loops(kernel)
            await queues(kernel)
            await reads(kernel)
        finally:
            await kernel.stop()


async def rounds(kernel: k.Kernel, directory: Path) -> None:
    """Tools, children with their parent's budget, and code that travels by value."""
    arguments = {"path": str(directory / "notes"), "text": "x"}
    trees: list[list[Any]] = []

    def read_tree(_number: int, label: str, _worker: k.Worker | None) -> None:
        if label == "tool begins":
            with kernel.service.database.read() as connection:
                trees.append(queries.tree(connection, kernel.namespace, "s-tools"))

    kernel.on_point = read_tree
    await kernel.run("s-tools", k.spec(k.script([("look", arguments), ("note", arguments)], "done"), [k.look, k.note]))
    kernel.on_point = None
    assert ["look", "note"] in [row.tools for tree in trees for row in tree]
    child = k.spec(k.script([("look", arguments)], "back"), [k.look], name="worker", hash="worker")
    spawns = [("spawn_agent", {"agent": "worker", "task": "go"})] * 2
    lead = k.spec(k.script(spawns, "done"), ["spawn_agent"], agents={"worker": child}, budget={"tokens": 100_000})
    assert (await kernel.run("s-lead", lead))["status"] == "completed"
    session = {"session_id": "s-code", "spec": k.spec(), "placement": "", "metadata": {}}
    await kernel.ask("spawn", session, {"digest": b"code"})
    assert await kernel.service.blob("digest") == b"code"


async def deaths(kernel: k.Kernel, directory: Path) -> None:
    """A session that dies of its tool until it is given up, and goes on; a node service that dies while a model is
    asked.
    """

    def die(_number: int, label: str, worker: k.Worker | None) -> None:
        if label == "tool begins" and worker is not None:
            kernel.kill(worker)

    arguments = {"path": str(directory / "notes"), "text": "x"}
    doomed = k.spec(k.script([("look", arguments)], [("look", arguments)], "done"), [k.look])
    kernel.on_point = die
    assert (await kernel.run("s-doomed", doomed))["status"] == "quarantined"
    assert await kernel.ask("resume", "s-doomed")
    paused = {**doomed, "restart": {**k.POLICY, "backoff": 600, "backoff_max": 600}}
    await kernel.spawn("s-paused", paused)
    await kernel.send("s-paused")
    await kernel.until("s-paused", "session_crashed", 2)
    kernel.on_point = None
    await kernel.quiet()
    [row] = await kernel.service.reading.active(None, session_ids=["s-paused"])
    slot = Slot("gone", 1, "node1", "")
    await kernel.service.deaths.crashed(slot, row.activation, "process_died", 0)  # reported again
    await kernel.spawn("s-slow", k.spec(k.script({"text": "late", "delay": 0.5})))
    await kernel.send("s-slow")
    await kernel.until("s-slow", "model_call_started")
    kernel.kill_node()
    await kernel.quiet()
    await kernel.end("s-slow")
    await kernel.service.deaths.frame_died("unknown", "process_died")
    await kernel.service.sweep.run(0)


async def endings(kernel: k.Kernel) -> None:
    """A tree that is cancelled, an input that is cancelled before its turn, a session that is closed at work."""
    slow = k.spec(k.script({"text": "late", "delay": 30}), name="worker", hash="worker")
    spawns = [("spawn_agent", {"agent": "worker", "task": "go"})]
    await kernel.spawn("s-cancel", k.spec(k.script(spawns, "done"), ["spawn_agent"], agents={"worker": slow}))
    await kernel.send("s-cancel")
    await kernel.until("s-cancel", "child_spawned")
    await kernel.send("s-cancel", "more", "queued")
    assert await kernel.ask("cancel", "s-cancel", "queued", "enough")
    assert await kernel.ask("cancel", "s-cancel", None, "enough")
    assert (await kernel.end("s-cancel"))["status"] == "cancelled"
    await kernel.spawn("s-close", k.spec(k.script({"text": "late", "delay": 30})))
    await kernel.send("s-close")
    await kernel.until("s-close", "model_call_started")
    assert await kernel.ask("close", "s-close", "enough")
    await kernel.end("s-close")
    await kernel.ask("renew", kernel.generation, "tests", k.LEASE)


async def questions(kernel: k.Kernel) -> None:
    """A session that asks, is answered, asks and learns that nobody will, and asks again."""
    question = ("request_user_input", {"prompt": "Well?"})
    asking = k.spec(k.script([question], [question], [question], "done"), ["request_user_input"])
    await kernel.spawn("s-asking", asking)
    await kernel.send("s-asking")
    await kernel.until("s-asking", "input_requested")
    assert await kernel.ask("answer", "s-asking", "r/1/0", "ok", "yes", 1)
    await kernel.until("s-asking", "input_requested", 2)
    assert await kernel.ask("abort_pending", "s-asking", None)
    await kernel.until("s-asking", "input_requested", 3)
    await kernel.paused("s-asking")


async def timers(kernel: k.Kernel) -> None:
    """A session that waits, and is cancelled while it works; wakeups that are set, fire, and go with their session."""
    waiting = [("wait", {"seconds": 3600})]
    await kernel.spawn("s-waiting", k.spec(k.script(waiting, "done"), ["wait"]))
    await kernel.send("s-waiting")
    await kernel.until("s-waiting", "timer_set")
    wakeup = {"name": "w", "prompt": "again", "seconds": 0.01, "every": 1000}
    await kernel.spawn("s-woken", k.spec())
    await kernel.ask("schedule", "s-woken", wakeup)
    await kernel.until("s-woken", "run_finished")
    assert await kernel.ask("cancel_wakeup", "s-woken", "w")
    await kernel.ask("schedule", "s-woken", wakeup)
    await kernel.ask("close", "s-woken", "enough")


async def jobs(kernel: k.Kernel) -> None:
    """A sub-agent in the background and a wakeup that are listed and stopped; what is no job, or has fired."""
    asleep = k.spec(k.script([("wait", {"seconds": 3600})]), ["wait"], name="worker", hash="worker")
    child = child_identifier("s-jobs", "r/1/0")
    steps = [
        [("start_agent", {"task": "go"}), ("schedule_wakeup", {"prompt": "x", "seconds": 3600, "name": "w"})],
        [("list_jobs", {}), ("send_to_agent", {"agent": child, "message": "more"})],
        [("stop_job", {"job": child, "grace": 1}), ("stop_job", {"job": "w"}), ("stop_job", {"job": "x"})],
    ]
    tools = ["agents", "jobs", "schedule_wakeup"]
    await kernel.spawn("s-jobs", k.spec(k.script(*steps, "done"), tools, agents={"worker": asleep}))
    await kernel.send("s-jobs")
    assert (await kernel.end("s-jobs"))["status"] == "completed"
    await kernel.until("s-jobs", "child_finished")


async def notes(kernel: k.Kernel) -> None:
    """Notes and an entry of a board that are added, changed and removed, and shown as memory; a client's note."""
    entry = {"key": "k", "text": "x"}
    steps = [
        [("add_note", entry), ("post_to_board", entry), ("todo", {"items": []})],
        [("update_note", entry), ("update_board", {**entry, "expected_version": 1}), ("list_notes", {})],
        [("delete_note", {"key": "k"}), ("read_board", {})],
    ]
    memory = {"scopes": ["session"], "project": None, "max_tokens": 100, "share": 0.1, "providers": []}
    compiled = k.spec(k.script(*steps, "done"), ["notes", "board", "todo"], memory={**memory, "timeout": 1.0})
    await kernel.spawn("s-noting", compiled)
    await kernel.ask("set_note", "s-noting", {"key": "house", "text": "x"})
    await kernel.send("s-noting")
    assert (await kernel.end("s-noting"))["status"] == "completed"
    assert await kernel.ask("delete_note", "s-noting", "house")


async def loops(kernel: k.Kernel) -> None:
    """A loop whose run fails, and is tried again with success; what clients read and do of it."""
    loop = {"name": "loop", "content": "go", "timing": {"every": 3600}, "memory": True, "place": {"queue": "loops"}}
    await kernel.ask("set_queue", {"name": "loops", "concurrency": 1})
    for compiled in (k.spec(budget=[{"scope": "tree", "tokens": 1}], hash="poor"), k.spec(hash="rich")):
        await kernel.ask("set_schedule", {**loop, "spec": compiled}, {})
        found = await kernel.ask("read", "triage", [], {})
        asked = ("retry_triage", found[0]["id"]) if found else ("trigger_schedule", "loop")
        fired = await kernel.ask(*asked)
        await kernel.end(fired["session_id"], fired["run_id"])
    [entry] = await kernel.ask("read", "triage", [], {"resolved": True})
    assert entry["resolved_at"]
    await kernel.ask("read", "triage_entry", [entry["id"]], {})
    await kernel.ask("read", "loop_memory", ["loop"], {})
    await kernel.ask("resolve_triage", entry["id"])
    await kernel.ask("reset_loop", "loop")
    await kernel.ask("delete_schedule", "loop")
    await kernel.ask("remove_queue", "loops")


async def queues(kernel: k.Kernel) -> None:
    """A run that waits, and another behind it."""
    await kernel.ask("set_queue", {"name": "q", "per_key": 1})
    await kernel.ask("pause_queue", "q", True)
    for name in ("s-queued", "s-behind"):
        await kernel.spawn(name, k.spec())
        await kernel.ask("send", name, {"run_id": "r", "content": "go", "place": {"queue": "q", "key": "a"}})
    [found] = await kernel.ask("read", "waits_in", ["s-behind"], {})
    assert (found["place"], found["waiting"]) == (2, 2)
    await kernel.ask("pause_queue", "q", False)
    await kernel.end("s-behind")


VALUES = {
    "session_id": "s-lead", "run_id": "r", "session_ids": ["s-lead", "s-tools"], "writer": "writer-node1",
    "after": 0, "limit": 100, "nodes": ["node1"], "digest": "digest", "sink": "spans", "node_id": "node1",
    "until": 1 << 60, "since": 0, "frame_id": "f0", "call_id": "r/1/0",
    "scope": "session", "owner": "s-noting", "keys": ["a-key", "another"],
}  # fmt: skip


def every_read() -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """Every function of `store/queries.py`, with each of its switches."""
    for function in filter(inspect.isfunction, vars(queries).values()):
        if function.__module__ != queries.__name__:
            continue
        parameters = inspect.signature(function).parameters
        if "connection" not in parameters or function.__name__.startswith("_"):
            continue
        switches = [name for name, parameter in parameters.items() if parameter.annotation == "bool"]
        given = {name: VALUES[name] for name in parameters if name not in ("connection", "namespace", *switches)}
        for state in product((False, True), repeat=len(switches)):
            yield function, {**given, **dict(zip(switches, state, strict=True))}


async def reads(kernel: k.Kernel) -> None:
    """What is read; by a client's request too, where clients may."""
    for function, options in every_read():
        await kernel.service.reading.query(function, **options)
        if function in READS.values():
            name = next(name for name, read in READS.items() if read is function)
            await kernel.ask("read", name, [], options)
    await kernel.service.reading.query(queries.active_sessions, None)
    await kernel.events("s-lead")


# Recording and explaining.


class Case:
    """A backend: what was recorded there, and its large store."""

    def __init__(self, database: Database, recorder: plans.Recorder, session_ids: set[str]) -> None:
        self.database = database
        self.statements = recorder.statements
        self._session_ids = session_ids

    def aimed(self, target: str) -> list[tuple[str, Any]]:
        """Each statement with parameters that name this session of the large store."""
        return [(sql, self._aim(parameters, target)) for sql, parameters in self.statements.items()]

    def _aim(self, parameters: Any, target: str) -> Any:
        if isinstance(parameters, dict):
            return {name: self._aim(value, target) for name, value in parameters.items()}
        if isinstance(parameters, (tuple, list)):
            return tuple(self._aim(value, target) for value in parameters)
        return target if isinstance(parameters, str) and parameters in self._session_ids else parameters


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    directory = tmp_path_factory.mktemp("plans")
    if request.param == "sqlite":
        yield from prepared(f"sqlite:///{directory}/small.db", f"sqlite:///{directory}/large.db", directory)
        return
    make: Callable[[], Any] = request.getfixturevalue("new_postgres")
    with make() as small, make() as large:
        yield from prepared(small, large, directory)


def prepared(small: str, large: str, directory: Path) -> Iterator[Case]:
    """Record on one store, fill the other."""
    database = Database(small)
    database.prepare()  # migrations may go over whole tables
    database.close()
    with plans.recording() as recorder:
        asyncio.run(work(small, directory))
    for migration in schema.migrations():  # they run once, and read what they change
        for statement in migration.statements("sqlite" if small.startswith("sqlite") else "postgresql"):
            recorder.statements.pop(" ".join(statement.split()), None)
    counting = {
        sql for sql in recorder.statements if gauges.MARK in sql
    }  # in the background, and paced by what they take
    assert counting
    for sql in counting:
        del recorder.statements[sql]
    database = Database(small)
    with database.read() as connection:
        session_ids = set(connection.execute(select(SESSION.c.session_id)).scalars())
    database.close()
    database = Database(large)
    try:
        database.prepare()
        if database.is_sqlite:
            event.listen(database.writer, "connect", lambda connection, _: connection.execute("PRAGMA synchronous=OFF"))
        plans.fill(database)
        yield Case(database, recorder, session_ids)
    finally:
        database.close()


@pytest.mark.thorough
def test_every_table_is_reached(case: Case) -> None:
    """The recording is not empty by mistake: all tables are in it, and as many statements as there must be."""
    reached = set().union(*map(plans.tables_in, case.statements))
    assert reached >= metadata.tables.keys()
    verbs = {(sql.split()[0], table) for sql in case.statements for table in plans.tables_in(sql)}
    read = {("SELECT", table) for table in metadata.tables}
    assert read - verbs == set()
    distinct = {re.sub(r"IN \([^()]*(\([^()]*\)[^()]*)*\)", "IN (…)", sql) for sql in case.statements}
    assert len(distinct) >= EXPECTED, "\n".join(sorted(distinct))
    with case.database.read() as connection:
        assert connection.execute(text("SELECT COUNT(*) FROM message")).scalar_one() >= 1_000_000


@pytest.mark.parametrize("target", [plans.TYPICAL, plans.LONGEST], ids=["typical", "longest"])
def test_no_statement_reads_more_than_it_needs(case: Case, target: str) -> None:
    """No scan of a large table, no sort of more than is found, and work in proportion to what is found."""
    explain = _on_sqlite if case.database.is_sqlite else _on_postgresql
    problems = []
    for sql, parameters in case.aimed(target):
        with case.database.writer.connect() as connection:
            problems += [f"{problem}\n    {sql}\n    {parameters}" for problem in explain(connection, sql, parameters)]
            connection.rollback()
    assert not problems, f"{len(problems)} of {len(case.statements)}:\n" + "\n".join(problems)


async def queued(dsn: str, directory: Path) -> None:
    """Two runs of a queue of one at a time."""
    async with k.running(dsn, directory) as kernel:
        await kernel.ask("set_queue", {"name": "q", "concurrency": 1})
        for name in ("s-first", "s-second"):
            await kernel.spawn(name, k.spec())
            await kernel.ask("send", name, {"run_id": "r", "content": "go", "place": {"queue": "q"}})
        await kernel.end("s-second")


def test_who_begins_is_found_among_many_that_wait(store: str, tmp_path: Path) -> None:
    """Given a queue in which many runs wait, when a slot is free, then what finds the next one reads no others."""
    with plans.recording() as recorder:
        asyncio.run(queued(store, tmp_path))
    with k.opened(store) as database:
        same = {"namespace": "tests", "run_id": "r", "queue": "q", "slot": WAITS}
        rows = [
            {**defaults(RUN), **same, "session_id": f"w{number}", "accepted_at": number} for number in range(20_000)
        ]
        with database.write() as connection:
            connection.execute(insert(RUN), rows)
        explain = _on_sqlite if database.is_sqlite else _on_postgresql
        found = {sql: given for sql, given in recorder.statements.items() if "ORDER BY run.queue_rank" in sql}
        assert found
        with database.write() as connection:
            if not database.is_sqlite:
                connection.exec_driver_sql("ANALYZE run")
            assert [explain(connection, sql, given) for sql, given in found.items()] == [[]] * len(found)


def _on_sqlite(connection: Connection, sql: str, parameters: Any) -> list[str]:
    connection.exec_driver_sql("SELECT 1")  # begins the transaction
    driver = connection.connection.driver_connection
    assert driver is not None
    plan = [row[3] for row in driver.execute(f"EXPLAIN QUERY PLAN {sql}", parameters)]
    problems = [f"a scan: {line}" for line in plan if re.match(r"SCAN \w+", line) and line.split()[1] in LARGE]
    if sql.startswith("INSERT"):
        return problems
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 100

    driver.set_progress_handler(count, 100)
    try:
        cursor = driver.execute(sql, parameters)
        rows = len(cursor.fetchall()) or max(0, cursor.rowcount)
    finally:
        driver.set_progress_handler(None, 0)
    # What is walked in vain may be a session's children, of which most are done, but no session's history.
    if steps > 6_000 + 100 * rows:
        problems.append(f"{steps} steps for {rows} rows: {plan}")
    return problems


def _on_postgresql(connection: Connection, sql: str, parameters: Any) -> list[str]:
    driver = connection.connection.driver_connection
    assert driver is not None
    options = "FORMAT JSON" if sql.startswith("INSERT") else "ANALYZE, BUFFERS, FORMAT JSON"
    [plan] = [row[0][0]["Plan"] for row in driver.execute(f"EXPLAIN ({options}) {sql}", parameters)]
    nodes = list(_nodes(plan))
    problems = [
        f"a scan: {node['Relation Name']}"
        for node in nodes
        if node["Node Type"] == "Seq Scan" and node["Relation Name"] in LARGE
    ]
    if sql.startswith("INSERT"):
        return problems
    rows = plan["Actual Rows"] or sum(node["Actual Rows"] for node in nodes if "Relation Name" in node)
    read = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
    kinds = [f"{node['Node Type']} {node.get('Index Name', '')}" for node in nodes]
    for node in nodes:
        # Where half of a long history is wanted, sorting all of it may be the better plan.
        if node["Node Type"] == "Sort" and (sorted_rows := node["Plans"][0]["Actual Rows"]) > max(2 * rows, 1):
            problems.append(f"a sort of {sorted_rows} rows for {rows}: {kinds}")
    if read > 60 + 5 * rows:
        problems.append(f"{read} blocks for {rows} rows: {kinds}")
    # An estimate: the keys of the longest session are expected to be found more often than they are.
    if plan["Total Cost"] > 2_000 + 2 * rows:
        problems.append(f"a cost of {plan['Total Cost']} for {rows} rows: {kinds}")
    return problems


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for part in plan.get("Plans", ()):
        yield from _nodes(part)
