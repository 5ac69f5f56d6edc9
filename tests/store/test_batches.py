"""A batch of an activation is committed in its turn or not at all, whatever becomes of the task that sent it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from understudy.errors import BatchLost, Fenced
from understudy.events import ToolFinished, ToolStarted
from understudy.node.turns import Ready
from understudy.ports import Death
from understudy.records import Ack, Ask, Batch, CallState
from understudy.store.operations import activation, batches, draining, timers
from understudy.store.reads import queries
from understudy.supervisor.restarts import Verdict

from ..kernel import kernel as k
from .test_store import MINUTE, Store, opened


@pytest.fixture
async def db(tmp_path: Path) -> AsyncIterator[Store]:
    async with opened(f"sqlite:///{tmp_path}/rows.db") as made:
        yield made


@pytest.mark.parametrize("arrived", [False, True], ids=["on the way", "committed"])
async def test_a_batch_outlives_the_task_that_sent_it(tmp_path: Path, arrived: bool) -> None:
    """Given a cancel that comes while a tool waits for the commit of its start, whether that has arrived or not, then
    the start is committed once, before what follows, and the tool does not run."""
    sent, path = asyncio.Event(), tmp_path / "notes"
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path) as kernel:
        committing = kernel.service.commit

        async def commit(frame_id: str, batch: Batch) -> Ack:
            first = not sent.is_set()
            ack = await committing(frame_id, batch) if arrived or not first else Ack(0)
            sent.set()
            if first:
                await k.never()
            return ack

        kernel.service.commit = commit  # type: ignore[method-assign]
        tools = [("note", {"path": str(path), "text": "x"})]
        await kernel.spawn("s", k.spec(k.script(tools, "done"), [k.note]))
        await kernel.send("s")
        await sent.wait()
        await kernel.ask("cancel", "s", "r", "enough")
        assert (await kernel.end("s"))["status"] == "cancelled"
        found = [event for event in await kernel.types("s") if event.startswith("tool_")]
        assert (found, k.notes(path)) == (["tool_started", "tool_finished"], [])


async def test_a_batch_behind_a_lost_one_is_refused(db: Store) -> None:
    """The store takes the next batch of an activation or one that it has, never one behind a gap; nothing is changed,
    and the error says which is missing."""
    await db.asking()
    await db.answer("s", content="on it", tool_calls=(("p", "t", "{}"),))
    before = db.dump()
    with pytest.raises(BatchLost, match=r"batch 3 .* batch 1"):
        await db.commit("s", 1, 3, entries=(ToolStarted(call_id="r/1/0", tool="t"),))
    assert db.dump() == before
    assert (await db.commit("s", 1, 2, entries=(ToolStarted(call_id="r/1/0", tool="t"),))).ack.first_seq


async def test_an_inbox_row_that_nobody_takes_voids_no_wait(db: Store) -> None:
    """Given a row whose call has its result already, when the session waits for a person, then it waits."""
    await db.asking()
    await db.answer("s", content="", tool_calls=(("p", "t", "{}"), ("q", "request_user_input", "{}")))
    await db.journal.submit(lambda tx: tx.put_inbox(tx.session("s"), "child_result", "r/1/0", {}))
    result = {"outcome": "ok", "content": "", "duration": 0, "started_at": 0}
    finished = CallState("r/1/0", "finished", executions=1, result=result)
    asks = (Ask("r/1/1", "question", "Go on?"),)
    entries = (ToolFinished(call_id="r/1/0", tool="t"),)
    committed = await db.commit("s", 1, 2, entries=entries, calls=(finished,), asks=asks, wait="input")
    assert (committed.wait, db.session()["status"]) == ("input", "waiting_for_input")


async def test_what_was_resumed_has_not_been_down_since(db: Store) -> None:
    """Given a session whose process died, and that was resumed after a pause, when it moves before it has done
    anything, then the time that it was down is over, and is not counted again."""
    await db.own()
    await db.create("s")
    await db.accept("s")
    await db.activate("s")

    def paused(death: Death) -> Verdict:
        return Verdict("resume", deaths=(death.at,), delay=MINUTE)

    await db.do(activation.crash, db.held("s", 1), paused, cause="process_died", pid=1, policy={})
    [due_at] = [timer.due_at for timer in db.read(queries.timers, "node-1", 1 << 62)]
    await db.do(timers.fire, "s", "pause", due_at)
    row = await db.journal.submit(lambda tx: tx.session("s"))
    assert Ready.of(row, "ready").cause == "resume"
    await db.activate("s")
    await db.journal.submit(lambda tx: draining.leave(tx, tx.session("s"), "node-1", ["node-2"], forced=True))
    found = Ready.of(await db.journal.submit(lambda tx: tx.session("s")), "ready")
    assert (found.cause, found.down_since) == ("ready", 0)


async def test_a_batch_that_arrives_after_the_death_of_its_frame_is_refused(db: Store) -> None:
    """Given a death that was noted, after which the open calls were given up, when a batch arrives that the process had
    sent before, then it is refused, and nothing is changed."""
    await db.asking()
    await db.answer("s", content="", tool_calls=(("p", "t", "{}"),))
    await db.do(
        activation.crash,
        db.held("s", 1),
        lambda _: Verdict("abort", reason="given up"),
        cause="process_died",
        pid=1,
        policy={},
    )
    before = db.dump()
    with pytest.raises(Fenced, match="left its frame"):
        await db.commit("s", 1, 2, entries=(ToolStarted(call_id="r/1/0", tool="t"),))
    assert db.dump() == before


async def test_a_frame_whose_batch_is_lost_turns_to_no_other_session(store: str, tmp_path: Path) -> None:
    """Given a session that queues for the only frame, when the batch with which that would turn to it can't follow its
    last one, then the frame's process ends, which counts as a death, and both sessions go on in another frame."""
    tools = [("note", {"path": str(tmp_path / "notes"), "text": "x"})]
    commit = batches.commit

    def lose(tx: Any, batch: Batch, frame_id: str, **more: Any) -> batches.CommitResult:
        if batch.session_id == "s" and batch.epoch == 1 and batch.wait == "model" and batch.batch_no > 1:
            raise BatchLost("batch 4 can't follow", session_id="s")
        return commit(tx, batch, frame_id, **more)

    async with k.running(store, tmp_path, frames=1) as kernel:
        [worker] = kernel.workers.values()
        begun, may_end = k.held_at_effect(kernel)
        await kernel.spawn("s", k.spec(k.script(tools, "done"), [k.note]))
        await kernel.send("s")
        await begun.wait()
        await kernel.spawn("next", k.spec(k.script("done")))
        await kernel.send("next")
        with patch.object(batches, "commit", lose):
            may_end.set()
            with pytest.raises(BatchLost):
                await worker.task
        kernel.kill(worker)
        assert (await kernel.end("next"))["status"] == (await kernel.end("s"))["status"] == "completed"
        assert "session_crashed" in await kernel.types("s")
        for name in ("s", "next"):
            frames = [event["data"]["frame_id"] for event in await kernel.events(name) if "frame_id" in event["data"]]
            assert (worker.frame_id in frames) == (name == "s")
