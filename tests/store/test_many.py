"""What an operation costs on a session with many of something: it reads no more often than with few."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from understudy.events import RunFinished
from understudy.messages import Message
from understudy.records import Finish
from understudy.store.operations import activation, beginnings, endings
from understudy.store.reads import queries
from understudy.store.transaction import Transaction

from .test_steps import Counted
from .test_store import Store, opened

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
