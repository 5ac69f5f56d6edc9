"""Ids that are used again: what belongs to a session that was removed does nothing to the next one of its id."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from understudy.errors import Fenced
from understudy.messages import Message, Usage
from understudy.ports import Verdict
from understudy.records import ActivationId, Batch, ModelAnswer
from understudy.store.operations import activation, batches, beginnings, model_calls

from ..kernel import kernel as k
from .test_store import FRAME, Store, opened, spec

pytestmark = pytest.mark.conformance

ANSWER = ModelAnswer("of the removed session", usage=Usage(10, 5))


async def made_again(db: Store) -> ActivationId:
    """Two sessions of one id, one after the other, both of which wait for their first model call under epoch 1; the
    removed one's activation."""
    await db.asking()
    removed = db.held("s", 1)
    await db.journal.submit(lambda tx: tx.drop(["s"]))
    await db.asking()
    assert db.held("s", 1) != removed
    return removed


FENCED: dict[str, Callable[[Any, ActivationId], Any]] = {
    "commit": lambda tx, old: batches.commit(tx, Batch(*old, 2, entries=(Message("user", "ghost"),)), FRAME.frame_id),
    "replay": lambda tx, old: batches.commit(tx, Batch(*old, 1), FRAME.frame_id),
    "reissue": lambda tx, old: model_calls.reissue(tx, old, FRAME.frame_id, "h", "m"),
}


@pytest.mark.parametrize("name", FENCED)
async def test_an_activation_of_a_removed_session_is_fenced(store: str, name: str) -> None:
    """Given a session that was made again under its id and has the same epoch, when the removed one's activation
    commits, repeats a commit or issues its call again, then it is fenced and writes nothing."""
    async with opened(store) as db:
        removed = await made_again(db)
        before = db.dump()
        with pytest.raises(Fenced, match="another incarnation"):
            await db.journal.submit(lambda tx: FENCED[name](tx, removed))
        assert db.dump() == before


async def test_news_of_a_removed_session_change_nothing(store: str) -> None:
    """Its death, its leaving its frame and the answer to its model call are nothing to the next session of its id."""
    async with opened(store) as db:
        removed = await made_again(db)
        before = db.dump()
        crash = {"cause": "process_died", "pid": 1, "policy": {}}
        assert await db.do(activation.crash, removed, lambda _: Verdict("resume"), **crash) is None
        await db.do(activation.park, removed)
        options = {"incarnation": removed.incarnation}
        assert not (await db.do(model_calls.answer, "s", "r", 1, 1, "m", ANSWER, **options)).won
        assert db.dump() == before


async def test_a_death_under_an_older_epoch_changes_nothing(store: str) -> None:
    """Given a session that was activated again, when its last process is reported dead, then it goes on."""
    async with opened(store) as db:
        await db.own()
        await db.create("s")
        await db.accept("s")
        await db.activate("s")
        await db.activate("s")
        before = db.dump()
        crash = {"cause": "process_died", "pid": 1, "policy": {}}
        assert await db.do(activation.crash, db.held("s", 1), lambda _: Verdict("resume"), **crash) is None
        assert db.dump() == before


async def test_an_answer_from_before_a_migration_is_counted(store: str) -> None:
    """Given a session that has another specification since it asked, which makes it another incarnation, when the
    answer to a run that was ended arrives, then its tokens are counted, and nothing else follows from it."""
    async with opened(store) as db:
        await db.asking()
        before = db.held("s", 1)
        await db.do(lambda tx: activation.quarantine(tx, tx.session("s"), "no_progress", "hopeless"))
        await db.do(activation.resume, "s")
        await db.create("s", spec("other", on_change="migrate"))
        row = db.session()
        assert row["incarnation"] != before.incarnation
        options = {"incarnation": before.incarnation}
        assert not (await db.do(model_calls.answer, "s", "r", 1, 1, "m", ANSWER, **options)).won
        assert (db.session()["tokens_used"], db.session()["status"]) == (15, row["status"])


async def test_each_specification_of_a_session_is_an_incarnation(store: str) -> None:
    """Also where it is given in the transaction that made the session."""
    async with opened(store) as db:
        options = {"placement": "", "node_id": "node-1", "metadata": {}}

        def create(name: str) -> Callable[[Any], bool]:
            given = spec(name, on_change="migrate")
            return lambda tx: beginnings.create_session(tx, "s", given, spec_hash=given["hash"], **options)

        seen: list[int] = []

        def look(tx: Any) -> None:
            seen.append(tx.session("s").incarnation)

        await db.journal.submit_all([create("one"), look, create("two"), look])
        assert seen[0] < seen[1] == db.session()["incarnation"]


async def test_what_frames_ask_names_the_incarnation(tmp_path: Path) -> None:
    """A frame that holds a removed session learns that its activation is over, whatever the epoch is now."""
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, frames=0) as kernel:
        service = kernel.service
        await kernel.spawn("s", k.spec())
        await kernel.send("s")
        await service.journal.submit(lambda tx: activation.activate(tx, "s", FRAME))
        [row] = await service.reading.active(None, session_ids=["s"])
        held = row.activation
        assert (await service.reload(FRAME.frame_id, held)).epoch == 1
        old = held._replace(incarnation=held.incarnation - 1)
        with pytest.raises(Fenced, match="another incarnation"):
            await service.reload(FRAME.frame_id, old)
        with pytest.raises(Fenced, match="another incarnation"):
            await service.interrupted(FRAME.frame_id, old, "r", 1)


@pytest.mark.parametrize("again", [False, True], ids=["gone", "made again"])
async def test_a_removed_sessions_model_call_is_ended(tmp_path: Path, again: bool) -> None:
    """Given a model call in flight of a session that is removed, when its node service looks at what it has in flight,
    then the connection is closed: nobody will have the answer, also if there is another session of that id."""
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path) as kernel, asyncio.timeout(60):
        kernel.server.hold()
        await kernel.spawn("s", k.spec())
        await kernel.send("s")
        await asyncio.to_thread(kernel.server.wait, lambda stats: stats.in_flight == 1)
        tasks = [call.task for call in kernel.service.calls.in_flight()]
        await kernel.service.journal.submit(lambda tx: tx.drop(["s"]))
        if again:
            await kernel.spawn("s", k.spec())
        await kernel.service.sweep.run(0)
        await asyncio.to_thread(kernel.server.wait, lambda stats: stats.in_flight == 0)
        [task] = tasks
        assert task is not None
        await task
        assert kernel.service.calls.in_flight() == []
