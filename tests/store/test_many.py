"""What an operation costs on a session with many of something: it reads no more often than with few."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from unittest.mock import patch

import pytest

from understudy.events import RunFinished
from understudy.messages import Message
from understudy.records import CallState, Finish, Spawn
from understudy.store import pending
from understudy.store.db.prepared import Prepared
from understudy.store.operations import activation, beginnings, endings
from understudy.store.reads import queries
from understudy.store.transaction import Transaction

from .test_steps import Counted
from .test_store import Store, opened, spec

pytestmark = pytest.mark.conformance

FEW, MANY = 3, 100


@pytest.fixture
async def db(store: str) -> AsyncIterator[Store]:
    async with opened(store) as made:
        await made.own()
        yield made


async def close(db: Store, session_id: str) -> None:
    await db.do(endings.close, session_id, "enough")


async def quarantine(db: Store, session_id: str) -> None:
    await db.do(lambda tx: activation.quarantine(tx, tx.session(session_id), "poison_session", "enough"))


async def end_closed(db: Store, session_id: str) -> None:
    """A run ends whose session was closed without its queued inputs: by an earlier version, say."""

    def end(tx: Transaction) -> None:
        row = tx.session(session_id)
        row.closed = 1
        endings.finish_run(tx, row, Finish("completed", "it"))

    await db.do(end)


ENDS = [(close, False), (close, True), (quarantine, False), (quarantine, True), (end_closed, True)]


@pytest.mark.parametrize(("end", "at_work"), ENDS, ids=[f"{end.__name__}-{at_work}" for end, at_work in ENDS])
async def test_the_end_of_many_queued_inputs_reads_the_inbox_as_often_as_that_of_few(
    db: Store, end: Callable[[Store, str], Awaitable[None]], at_work: bool
) -> None:
    """A session that ends with a hundred queued inputs costs as many SELECTs as one with three, and ends each run."""
    counts = []
    for session_id, count in (("few", FEW), ("many", MANY)):
        await db.create(session_id)

        def accept(tx: Transaction, session_id: str = session_id, count: int = count) -> None:
            for number in range(count):
                beginnings.accept(tx, session_id, f"r{number}", "go")

        await db.do(accept)
        if at_work:
            await db.activate(session_id)
            await db.commit(session_id, 1, 1, start_run="r0", entries=(Message("user", "go", run_id="r0"),))
        with Counted(db) as counted:
            await end(db, session_id)
        counts.append(counted.selects)
        events = db.read(queries.session_events, session_id)
        ended = {event.run_id for event in events if isinstance(event, RunFinished)}
        waits_for_its_process = at_work and end is close
        assert ended == {f"r{number}" for number in range(count)} - ({"r0"} if waits_for_its_process else set())
        assert db.session(session_id)["inbox_count"] == 0
    assert counts[0] == counts[1]


class Written:
    """Counts what the transactions of a store write: statements, and how often a session's row is looked at for it."""

    def __init__(self) -> None:
        self.statements = self.rows = 0
        write, mutable = Prepared.write, pending._mutable

        def counted(prepared: Prepared, cursor: Any, rows: Any) -> None:
            self.statements += 1
            write(prepared, cursor, rows)

        def looked_at(row: Any) -> tuple[Any, ...]:
            self.rows += 1
            return mutable(row)

        self._spies = (patch.object(Prepared, "write", counted), patch.object(pending, "_mutable", looked_at))

    def __enter__(self) -> Written:
        for spy in self._spies:
            spy.start()
        return self

    def __exit__(self, *_error: object) -> None:
        for spy in self._spies:
            spy.stop()


BUDGET = [{"scope": "tree", "tokens": 1_000_000}]


@pytest.mark.parametrize("budget", [None, BUDGET], ids=["without a budget", "with a budget"])
async def test_many_sub_agents_are_created_in_as_many_statements_as_few(db: Store, budget: Any) -> None:
    """The commit that creates a hundred sub-agents writes in as many statements as the one that creates three, and
    looks at each row at most twice."""
    statements, rows = [], []
    for session_id, count in (("few", FEW), ("many", MANY)):
        await db.create(session_id, spec(kind="workflow", budget=budget))
        await db.accept(session_id, content="{}")
        await db.activate(session_id)
        asked = tuple(CallState(f"r/{number}", "requested", "agent", "{}", index=number) for number in range(count))
        message = (Message("user", "{}", run_id="r"),)
        await db.commit(session_id, 1, 1, start_run="r", entries=message, steps=asked)
        child = spec("child", budget=budget)
        spawns = tuple(Spawn(call.call_id, f"{session_id}.{call.index}", child, "go") for call in asked)
        with Written() as written:
            await db.commit(session_id, 1, 2, spawns=spawns)
        statements.append(written.statements)
        rows.append(written.rows / (count + 1))
        assert db.session(session_id)["children_open"] == count
    assert statements[0] == statements[1]
    assert all(looks <= 2 for looks in rows), rows


async def test_a_read_writes_only_what_is_unwritten_first(db: Store) -> None:
    """A transaction that changes a hundred sessions, and reads something of each, looks at a row as seldom as one that
    changes three; what an operation goes on changing after that is written in the end."""
    counts = []
    for name, count in (("few", FEW), ("many", MANY)):
        ids = [f"{name}-{number}" for number in range(count)]

        def create(tx: Transaction, ids: list[str] = ids) -> None:
            for session_id in ids:
                options = {"spec_hash": spec()["hash"], "placement": "", "node_id": "node-1", "metadata": {}}
                beginnings.create_session(tx, session_id, spec(), **options)
                beginnings.accept(tx, session_id, "r", "go")
            for session_id in ids:
                tx.session(session_id).progress = 7  # which nobody says

        with Written() as written:
            await db.do(create)
        counts.append(written.rows / count)
        assert {db.session(session_id)["progress"] for session_id in ids} == {7}
    assert all(looks <= 4 for looks in counts), counts
