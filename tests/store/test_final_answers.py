"""Answers that end their runs in the transaction that commits them: no process of the agent has to see them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from understudy.messages import Message, Usage
from understudy.records import ModelAnswer
from understudy.store.check.check import check
from understudy.store.operations import endings, model_calls
from understudy.store.reads import queries

from .test_store import FRAME, Store, opened

pytestmark = pytest.mark.conformance

DONE = ModelAnswer(content="done", usage=Usage(10, 5))


@pytest.fixture
async def db(store: str) -> AsyncIterator[Store]:
    """A store that this test owns."""
    async with opened(store) as made:
        yield made


async def final(db: Store) -> model_calls.AnswerResult:
    """The answer to the first call of a session, which has nothing to see in it."""
    incarnation = db.held("s", 0).incarnation
    found: model_calls.AnswerResult = await db.do(
        model_calls.answer, "s", "r", 1, 1, "m", DONE, incarnation=incarnation, ends_run=True
    )
    return found


async def test_a_run_ends_with_its_final_answer(db: Store) -> None:
    """Given a session that waits for its model, when the final answer is committed, then its run is over with that text
    in the same transaction, and the session rests in its frame."""
    await db.asking()
    result = await final(db)
    assert (result.won, result.ended) == (True, True)
    run, row = db.read(queries.run_info, "s", "r"), db.session()
    assert (run.status, run.text, run.rounds) == ("completed", "done", 1)
    assert (row["status"], row["active"], row["run_id"], row["frame_id"]) == ("idle", 0, None, FRAME.frame_id)
    assert [kind for _, kind in db.log()][-3:] == ["assistant", "model_call_completed", "run_finished"]
    with db.database.read() as connection:
        assert check(connection, db.namespace) == []


async def test_a_final_answer_that_is_committed_again_changes_nothing(db: Store) -> None:
    """Given a commit whose outcome was not known, when it is tried again, then nothing is added, also once the next run
    has begun."""
    await db.asking()
    await final(db)
    before = db.dump()
    assert (await final(db)).repeated
    assert db.dump() == before
    await db.accept("s", "q")
    await db.commit("s", 1, 2, start_run="q", entries=(Message("user", "more", run_id="q"),))
    before = db.dump()
    assert not (await final(db)).message
    assert db.dump() == before


async def test_a_final_answer_wakes_the_next_run(db: Store) -> None:
    """Given an input that arrived meanwhile, when the run ends with its answer, then the session goes on with that."""
    await db.asking()
    await db.accept("s", "q")
    await final(db)
    row = db.session()
    assert (row["active"], row["wait"], row["run_id"]) == (1, None, None)
    await db.commit("s", 1, 2, start_run="q", entries=(Message("user", "more", run_id="q"),))
    assert db.session()["run_id"] == "q"


async def test_a_run_that_was_cancelled_before_its_final_answer_is_cancelled(db: Store) -> None:
    """Whichever is committed first counts."""
    await db.asking()
    await db.journal.submit(lambda tx: endings.request_cancel(tx, tx.session("s"), "stop"))
    await final(db)
    run = db.read(queries.run_info, "s", "r")
    assert (run.status, run.text) == ("cancelled", "done")
