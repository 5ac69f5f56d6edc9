"""Signals to workflows: what becomes of those that no step has taken."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from understudy.errors import NotRunning
from understudy.protocol import Signal
from understudy.store.check.check import check
from understudy.store.operations import endings, steps

from .test_store import Store, opened, spec

pytestmark = pytest.mark.conformance


@pytest.fixture
async def db(store: str) -> AsyncIterator[Store]:
    async with opened(store) as made:
        yield made


@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_signals_go_with_the_run_that_was_to_begin(db: Store, how: str) -> None:
    """A signal that came before a workflow's run has begun is dropped when that is cancelled: nobody will take it, and
    no later run may."""
    await db.own()
    await db.create("w", spec(kind="workflow"))
    await db.accept("w", content="{}")
    assert not await db.do(steps.signal, "w", Signal("go", 1))
    if how == "cancel":
        assert await db.do(lambda tx: endings.request_cancel(tx, tx.session("w"), "enough"))
    else:
        assert await db.do(endings.close, "w", "enough")
    assert await db.do(lambda tx: len(tx.inbox(tx.session("w")))) == 0
    with db.database.snapshot() as connection:
        assert list(map(str, check(connection, db.namespace))) == []
    with pytest.raises(NotRunning):
        await db.do(steps.signal, "w", Signal("go", 2))
