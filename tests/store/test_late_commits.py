"""Commits that take effect after they were given up, since PostgreSQL waits for a standby; commits that all fail."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import text

from understudy.node.hosting import NodeHost
from understudy.store.db import postgresql
from understudy.store.db.failures import StoreRace
from understudy.store.reads import queries
from understudy.store.transaction import Transaction
from understudy.supervisor import probing

from ..kernel import kernel as k
from ..postgres import PostgresServer
from ..processes.test_store_faults import PATIENCE, eventually
from .test_store import Store, opened

pytestmark = pytest.mark.conformance


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server that waits for a standby as soon as one is named."""
    with PostgresServer() as made:
        yield made


@pytest.fixture
def dsn(server: PostgresServer) -> Iterator[str]:
    yield server.database()
    name_standby(server, "")


def name_standby(server: PostgresServer, name: str) -> None:
    """Let commits wait for a standby of this name; for none, those that wait take effect."""
    server.query(f"ALTER SYSTEM SET synchronous_standby_names = '{name}'")
    server.query("SELECT pg_reload_conf()")


async def waits(server: PostgresServer, event: str, count: int = 1) -> None:
    """Until so many connections of ours wait for this."""
    statement = "SELECT 1 FROM pg_stat_activity WHERE application_name = 'understudy' AND wait_event LIKE %s"
    await eventually(lambda: len(server.query(statement, event)) >= count)


def numbers(db: Store) -> list[int]:
    return [event.writer_seq for event in db.read(queries.writer_events, "w", 0, 1000)]


@asynccontextmanager
async def impatient(dsn: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Store]:
    """A journal that gives a COMMIT up after a second."""
    monkeypatch.setattr(postgresql, "JOURNAL_SECONDS", 2.0)
    monkeypatch.setattr(postgresql, "SILENCE_MARGIN", -1.0)
    async with opened(dsn) as db, asyncio.timeout(PATIENCE):
        yield db


@pytest.mark.thorough
async def test_a_commit_takes_effect_while_its_repetition_waits_for_it(
    server: PostgresServer, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a COMMIT that was given up, when it takes effect while the next try waits for its row locks, then what
    follows is committed at the first try, and the journal's log has no gap."""
    async with impatient(dsn, monkeypatch) as db:
        await db.create("s")
        name_standby(server, "absent")
        accepted = asyncio.create_task(db.accept("s", "first"))
        await waits(server, "SyncRep")
        await eventually(lambda: db.journal.outage.unreachable_since is not None)
        await waits(server, "transactionid")
        name_standby(server, "")
        assert await accepted is False, "it had happened"
        assert db.commits[-1].repeated
        assert await db.accept("s", "second")
        assert not db.commits[-1].repeated
        assert numbers(db) == [1, 2, 3]


HANGING = """
import asyncio, sys
from understudy.store.operations import beginnings
from understudy.store.db.engine import Database
from understudy.store.journal import Journal

async def main(dsn):
    journal = Journal(Database(dsn), "tests", "w", lambda committed: None)
    journal.start()
    await journal.submit(lambda tx: beginnings.accept(tx, "s", "r", "go"))

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.thorough
async def test_a_predecessors_commit_takes_effect_after_the_start(
    server: PostgresServer, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a service that died in its COMMIT, when that takes effect after the next one of the same log has started
    and committed, then the next one's events follow, whichever sessions they are of."""
    async with opened(dsn) as before:
        await before.create("s")
        await before.create("other")
    name_standby(server, "absent")
    predecessor = await asyncio.create_subprocess_exec(sys.executable, "-c", HANGING, dsn, stderr=subprocess.DEVNULL)
    try:
        await waits(server, "SyncRep")
    finally:
        predecessor.kill()
        await predecessor.wait()
    async with opened(dsn) as db, asyncio.timeout(PATIENCE):
        assert await db.journal.submit(lambda tx: True)
        accepted = asyncio.create_task(db.accept("other"))
        await waits(server, "transactionid")
        name_standby(server, "")
        assert await accepted
        assert numbers(db) == [1, 2, 3, 4]
        assert db.commits[-1].repeated, "what the predecessor did was not reported"
        assert await db.accept("s") is False


async def test_each_part_of_a_group_that_is_split_may_be_a_repetition(
    server: PostgresServer, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a group whose COMMIT was given up, when its repetition is split because one of them fails, then what is
    committed of it is reported as possibly repeated, each part of it."""
    broken = False

    def operation(tx: Transaction) -> bool:
        if broken:
            tx.append(tx.session("c"), None)  # type: ignore[arg-type]
        return True

    async with impatient(dsn, monkeypatch) as db:
        for session_id in "abc":
            await db.create(session_id)
        name_standby(server, "absent")
        parts = [asyncio.create_task(task) for task in (db.accept("a"), db.accept("b"), db.do(operation))]
        await waits(server, "SyncRep")
        await eventually(lambda: db.journal.outage.unreachable_since is not None)
        broken = True
        await waits(server, "transactionid")
        reported = len(db.commits)
        name_standby(server, "")
        results = await asyncio.gather(*parts, return_exceptions=True)
        assert results[:2] == [False, False]
        assert isinstance(results[2], AttributeError)
        assert [commit.repeated for commit in db.commits[reported:]] == [True, True]


async def test_a_service_whose_commits_fail_says_so(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While every commit fails although the store answers, the service is not ready, and its probe tells since when:
    who finds it so for long replaces it. One that succeeds ends that."""
    refuse = "CREATE TRIGGER refused BEFORE INSERT ON event BEGIN SELECT RAISE(ABORT, 'no'); END"
    allow = "DROP TRIGGER refused"
    if store.startswith("postgresql"):
        refuse, allow = (
            "ALTER TABLE event ADD CONSTRAINT refused CHECK (seq < 0) NOT VALID",
            "ALTER TABLE event DROP CONSTRAINT refused",
        )
    async with k.running(store, tmp_path, frames=0) as kernel:
        service = kernel.service
        host = object.__new__(NodeHost)
        host._started, host._service, host._last_beat = True, service, time.monotonic()

        async def probe() -> dict[str, float]:
            return host.health()

        node: Any = SimpleNamespace(probe=probe)
        await kernel.spawn("before", k.spec())
        await service.projection.counting.count()
        assert service.projection.counting.obstacle() == ""
        monkeypatch.setattr(probing, "JOURNAL_LIMIT", 1e-9)
        with k.opened(store) as database:
            with database.write() as connection:
                connection.execute(text(refuse))
            with pytest.raises(StoreRace):
                await kernel.spawn("s", k.spec())
            assert "have failed for" in service.projection.counting.obstacle()
            assert service.projection.counting.outage() > 0
            assert host.health()["failing"] > 0
            assert await probing.node_hangs(node) == "its operations fail though the store answers"
            with database.write() as connection:
                connection.execute(text(allow))
        await kernel.spawn("s", k.spec())
        assert service.projection.counting.obstacle() == ""
        assert host.health()["failing"] == 0
