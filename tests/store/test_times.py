"""Times that a journal writes: the clock's, also after it was set back; no two commits of a journal share one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from understudy.records import ActivationId
from understudy.store import journal
from understudy.store.reads import queries

from .test_store import MINUTE, Store, opened

HOUR = 60 * MINUTE


class Clock:
    """What the journal takes for the time."""

    def __init__(self) -> None:
        self.at = 1_700_000_000_000_000

    def __call__(self) -> int:
        return self.at


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(journal, "now", made)
    return made


@pytest.fixture
async def db(tmp_path: Path) -> AsyncIterator[Store]:
    async with opened(f"sqlite:///{tmp_path}/store.db") as made:
        yield made


def times(db: Store) -> list[int]:
    return [event.at for event in db.read(queries.session_events, "s")]


async def test_times_follow_a_clock_that_is_set_back(db: Store, clock: Clock) -> None:
    """Given a clock that was an hour ahead, when it is set back, then what is committed from then on has its time."""
    clock.at += HOUR
    await db.create("s")
    clock.at -= HOUR
    await db.accept("s")
    assert times(db) == [clock.at + HOUR, clock.at]


async def test_commits_of_a_journal_never_share_a_time(db: Store, clock: Clock) -> None:
    """Where the clock stands still, or is slowed down by a little, times go on by a microsecond."""
    await db.create("s")
    await db.accept("s", "first")
    clock.at -= 1_000
    await db.accept("s", "second")
    assert times(db) == [clock.at + 1_000, clock.at + 1_001, clock.at + 1_002]


async def test_an_id_that_is_used_again_is_a_later_incarnation(db: Store, clock: Clock) -> None:
    """Given a session that was removed, and a clock that is set back, when another one is made under its id, then
    whatever is left of the first is older than the second."""
    await db.asking()
    removed = db.held("s", 1)
    clock.at -= HOUR
    await db.journal.submit(lambda tx: tx.drop(["s"]))
    await db.create("s")
    row = db.session()
    assert ActivationId(*(row[name] for name in ActivationId._fields)) > removed
    assert row["created_at"] == clock.at + 1
