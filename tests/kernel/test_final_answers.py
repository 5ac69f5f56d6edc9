"""Answers that end their runs: in the commit that holds them, unless a hook has to see them first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from understudy import HookContext, hook
from understudy.actors.hooks import describe_hook
from understudy.records import ModelAnswer
from understudy.store.db.statements import SESSION
from understudy.store.journal import Journal
from understudy.store.operations import model_calls

from . import kernel as k

pytestmark = pytest.mark.conformance


@hook("after_model")
def sees_answers(_context: HookContext) -> None:
    """Nothing comes of it."""


@hook("run_end")
def sees_ends(_context: HookContext) -> None:
    """Nothing comes of it."""


@hook("before_model")
def sees_requests(_context: HookContext) -> None:
    """Nothing comes of it."""


def batches_of(kernel: k.Kernel) -> int:
    """How many batches the session's only activation has committed."""
    with kernel.service.database.read() as connection:
        return int(connection.execute(select(SESSION.c.batch_no)).scalar_one())


@pytest.mark.parametrize(
    ("point", "expected"), [(None, 1), (sees_requests, 1), (sees_answers, 2), (sees_ends, 2)],
    ids=["no hook", "before_model", "after_model", "run_end"],
)  # fmt: skip
async def test_what_takes_a_process_to_end_a_run(store: str, tmp_path: Path, point: Any, expected: int) -> None:
    """Given an agent with a hook, or without one, when its model gives the final answer, then its process commits the
    end only where the hook sees the answer or the end."""
    hooks = [describe_hook(point, pickle=None)[0]] if point is not None else []
    async with k.running(store, tmp_path, frames=1) as kernel:
        run = await kernel.run("s", k.spec(k.script("done"), hooks=hooks))
        assert (run["status"], run["text"]) == ("completed", "done")
        assert batches_of(kernel) == expected
        kernel.check("s")


async def test_a_run_ends_without_any_process(store: str, tmp_path: Path) -> None:
    """Given a session that waits for its model, when its process dies, there is no other, and the final answer comes,
    then the run is completed; the next one begins when there is a process again."""
    async with k.running(store, tmp_path, frames=1) as kernel:
        await kernel.spawn("s", k.spec(k.script("done")))
        kernel.server.hold()
        await kernel.send("s")
        await kernel.until("s", "model_call_started")
        [worker] = kernel.workers.values()
        kernel.kill(worker, replace=False)
        kernel.server.release()
        run = await kernel.end("s")
        assert (run["status"], run["text"], batches_of(kernel)) == ("completed", "done", 1)
        await kernel.send("s", run_id="q")
        kernel.add_frame()
        assert (await kernel.end("s", "q"))["status"] == "completed"
        assert [message["role"] for message in await kernel.messages("s")] == ["user", "assistant"] * 2
        kernel.check("s")


async def test_runs_that_follow_each_other_take_no_standby(store: str, tmp_path: Path) -> None:
    """Given a session with inputs that wait, when its runs end with their answers, then its frame goes on with the next
    one each time: it is no standby that was taken."""
    async with k.running(store, tmp_path, frames=1) as kernel:
        await kernel.spawn("s", k.spec(k.script("done")))
        kernel.server.hold()
        for number in range(4):
            await kernel.send("s", run_id=f"r{number}")
        kernel.server.release()
        for number in range(4):
            assert (await kernel.end("s", f"r{number}"))["status"] == "completed"
        assert kernel.service.frames.paging.standbys_taken == 1
        kernel.check("s")


async def test_an_answer_that_another_service_committed_lets_the_next_run_begin(store: str, tmp_path: Path) -> None:
    """Given a session whose frame waits for its model, and an input behind that, when the final answer turns out to be
    committed, by a service that died before it notified anybody, then the next run begins at once, without a sweep."""
    async with k.running(store, tmp_path, frames=1) as kernel:
        await kernel.spawn("s", k.spec(k.script("done")))
        kernel.server.hold()
        await kernel.send("s")
        await kernel.until("s", "model_call_started")
        await kernel.send("s", run_id="q")
        service = kernel.service
        [call] = service.calls.in_flight()
        answer, of = ModelAnswer("done"), call.origin
        with k.opened(kernel.dsn) as database:
            other = Journal(database, kernel.namespace, "other", lambda _: None)
            other.start()
            await other.submit(
                lambda tx: model_calls.answer(
                    tx, of.session_id, of.run_id, of.round, of.attempt, of.model, answer, incarnation=of.incarnation,
                    ends_run=True,
                )
            )  # fmt: skip
            await other.close()
        swept = service.sweep.swept
        await service.answers.answered(call, answer)
        kernel.server.release()
        assert (await kernel.end("s", "q"))["status"] == "completed"
        assert service.sweep.swept == swept
