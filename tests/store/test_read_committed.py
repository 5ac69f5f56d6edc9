"""Operations beside others on PostgreSQL: what was read before somebody else's commit is not acted on after it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest

from understudy.errors import CannotDrain, StaleGeneration, StoreOwned
from understudy.ports import Verdict
from understudy.store.operations import activation, code, draining, timers, wakeups
from understudy.store.reads import queries
from understudy.store.transaction import Transaction
from understudy.store.upkeep import retention

from ..processes.test_store_faults import PATIENCE, eventually
from .test_store import FRAME, MINUTE, Store, opened

pytestmark = pytest.mark.conformance


@pytest.fixture
async def db(postgres: str) -> AsyncIterator[Store]:
    """A store on PostgreSQL that a supervisor of generation 1 owns."""
    async with opened(postgres) as made, asyncio.timeout(PATIENCE):
        await made.own()
        yield made


@asynccontextmanager
async def overtaken(db: Store, *statements: str) -> AsyncIterator[None]:
    """What begins in this context is held up by these statements of somebody else, and goes on after their commit."""
    waits = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with psycopg.connect(db.database.dsn) as peer, psycopg.connect(db.database.dsn, autocommit=True) as watch:
        for statement in statements:
            peer.execute(statement)
        yield
        await eventually(lambda: watch.execute(waits).fetchone() is not None)


def owner(db: Store) -> tuple[str, int]:
    row = db.read(queries.owner)
    return row.holder, row.generation


TAKEOVER = "UPDATE owner SET generation = 2, holder = 'you'"


async def test_an_owner_that_was_overtaken_does_not_renew(db: Store) -> None:
    """Given a takeover under way, when the owner before it renews its lease, then it is refused; the new one owns."""
    async with overtaken(db, TAKEOVER):
        renewed = asyncio.create_task(db.do(activation.renew, 1, "me", MINUTE))
    with pytest.raises(StaleGeneration, match="2"):
        await renewed
    assert owner(db) == ("you", 2)


async def test_of_two_first_owners_one_waits(db: Store) -> None:
    """Given a namespace that nobody owned, when two become its owner at once, then the second finds the first."""
    await db.journal.submit(lambda tx: tx.connection.exec_driver_sql("DELETE FROM owner"))
    lease = "9000000000000000"
    async with overtaken(db, f"INSERT INTO owner VALUES ('tests', 1, 'you', {lease})"):
        acquired = asyncio.create_task(db.do(activation.acquire, "me", MINUTE, may_take=lambda _: False))
    with pytest.raises(StoreOwned):
        await acquired
    assert owner(db) == ("you", 1)


STALE: dict[str, Callable[[Transaction], Any]] = {
    "activate": lambda tx: activation.activate(tx, "s", FRAME),
    "crash": lambda tx: activation.crash(
        tx, tx.session("s").activation, lambda _: Verdict("resume"), cause="process_died", pid=1, policy={}
    ),
    "adopt": lambda tx: activation.adopt(tx, "node-2", ["node-2"]),
}  # fmt: skip


@pytest.mark.parametrize("name", STALE)
async def test_a_takeover_before_the_sessions_lock_is_seen(db: Store, name: str) -> None:
    """Given an operation of a supervisor that waits for a session's row, when the next supervisor has taken over and
    changed that row, then the operation is refused and changes nothing."""
    await db.create("s")
    await db.accept("s")
    await db.activate("s")
    moved = "UPDATE session SET node_id = 'node-3', updated_at = 1"
    async with overtaken(db, moved, TAKEOVER):
        submitted = asyncio.create_task(db.journal.submit(STALE[name]))
    with pytest.raises(StaleGeneration):
        await submitted
    row = db.session()
    assert (row["node_id"], row["updated_at"], row["epoch"]) == ("node-3", 1, 1)


async def test_who_has_locked_a_session_waits_for_no_other(db: Store) -> None:
    """Given somebody who has locked session b, when an operation that has locked session s needs b as well, then it
    lets go of s before it waits: whoever has b can get s, and afterwards the operation is done."""
    await db.create("s")
    await db.create("b")

    def both(tx: Transaction) -> list[str]:
        return [tx.session(session_id).session_id for session_id in ("s", "b")]

    lock = "SELECT 1 FROM session WHERE session_id = %s FOR UPDATE"
    waits = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with psycopg.connect(db.database.dsn) as peer, psycopg.connect(db.database.dsn, autocommit=True) as watch:
        peer.execute("SET deadlock_timeout = '10ms'")
        peer.execute(lock, ["b"])
        submitted = asyncio.create_task(db.journal.submit(both))
        await eventually(lambda: watch.execute(waits).fetchone() is not None)
        peer.execute(lock, ["s"])
    assert await submitted == ["s", "b"]


async def test_a_wakeup_that_is_cancelled_meanwhile_does_not_fire(db: Store) -> None:
    """Given a wakeup that fires while its cancellation is committed, then it does nothing."""
    await db.create("s")
    due_at = (await db.do(wakeups.schedule, "s", "w", "wake up", 1.0, None)).due_at
    async with overtaken(db, "SELECT 1 FROM session FOR UPDATE", "DELETE FROM timer"):
        fired = asyncio.create_task(db.do(timers.fire, "s", "wakeup:w", due_at))
    await fired
    assert db.read(queries.runs, "s") == []


async def test_of_two_deadlines_of_a_drain_the_earlier_holds(db: Store) -> None:
    """Also where both are given at once."""
    await db.do(draining.begin, "node-1", 100, reason="spot")
    async with overtaken(db, "UPDATE drain SET deadline = 10"):
        begun = asyncio.create_task(db.do(draining.begin, "node-1", 50, reason="spot"))
    await begun
    assert [row.deadline for row in db.read(queries.drains)] == [10]


async def test_a_tree_that_grows_while_it_is_removed_stays(db: Store) -> None:
    """Given a sub-agent that came to a tree after its sessions were looked up, when it gets an input, then the tree is
    kept as at work."""
    await db.create("s")
    peer = psycopg.connect(db.database.dsn)

    def drop(tx: Transaction) -> retention.Removed:
        load = tx.load

        def grown(ids: Any) -> None:
            load(ids)
            if peer.info.transaction_status is psycopg.pq.TransactionStatus.IDLE:
                peer.execute("CREATE TEMP TABLE copied AS SELECT * FROM session")
                peer.execute("UPDATE copied SET session_id = 'kid'")
                peer.execute("INSERT INTO session SELECT * FROM copied")
                peer.commit()
                peer.execute("UPDATE session SET inbox_count = 1 WHERE session_id = 'kid'")

        tx.load = grown  # type: ignore[method-assign]
        return retention.drop_tree(tx, "s", tx.now + MINUTE)

    await db.journal.submit(lambda tx: tx.connection.exec_driver_sql("DELETE FROM event"))
    with peer:
        dropped = asyncio.create_task(db.journal.submit(drop))
        with psycopg.connect(db.database.dsn, autocommit=True) as watch:
            waits = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            await eventually(lambda: watch.execute(waits).fetchone() is not None)
    assert (await dropped).kept == "at work"
    assert db.session("kid")["inbox_count"] == 1


async def test_two_drains_at_once_leave_somebody(store: str) -> None:
    """Given two nodes, when each is to be drained and nobody had seen the other's drain, then the second is refused."""
    async with opened(store) as db:
        await db.own()
        await db.do(draining.begin, "a", 1 << 60, reason="", nodes=("a", "b"))
        with pytest.raises(CannotDrain):
            await db.do(draining.begin, "b", 1 << 60, reason="", nodes=("a", "b"))
        assert [row.node_id for row in db.read(queries.drains)] == ["a"]


async def test_code_that_was_needed_lately_is_not_locked(db: Store) -> None:
    """Given a piece of code that was needed within the hour, when it is needed again, then nobody has to wait for that,
    so spawns of two nodes can't wait for each other; only an older piece is written, and locked against retention."""
    await db.do(code.put, "tool", b"x")
    with psycopg.connect(db.database.dsn, autocommit=True) as peer:

        def locked(tx: Transaction) -> bool:
            assert code.touch(tx, "tool")
            try:
                peer.execute("SELECT 1 FROM code_blob FOR UPDATE NOWAIT")
            except psycopg.errors.LockNotAvailable:
                return True
            return False

        assert not await db.do(locked)
        peer.execute("UPDATE code_blob SET created_at = 1")
        assert await db.do(locked)
        assert not await db.do(locked)


async def test_a_late_end_of_a_drain_does_not_end_the_next(store: str) -> None:
    """Given a drain that was taken back, and another of its node, when the end of the first is noted late, then the
    second goes on; its own end is noted."""

    async def begun(db: Store) -> int:
        await db.do(draining.begin, "node-1", 1 << 60, reason="")
        return int(db.read(queries.drains)[0].started_at)

    async with opened(store) as db:
        await db.own()
        first = await begun(db)
        await db.do(draining.end, ["node-1"])
        second = await begun(db)
        await db.do(draining.finish, "node-1", first)
        assert not db.read(queries.drains)[0].finished_at
        await db.do(draining.finish, "node-1", second)
        assert db.read(queries.drains)[0].finished_at
