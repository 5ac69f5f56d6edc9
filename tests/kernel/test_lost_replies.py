"""A commit whose reply is lost: it happened, nobody knows, and it is repeated. Nothing may be missing or doubled."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from understudy.errors import StoreUnreachable
from understudy.events import ModelCallCompleted, RunFinished
from understudy.store.journal import Committed, Journal
from understudy.store.reads import queries

from ..unit.test_metrics import value
from . import kernel as k

pytestmark = pytest.mark.conformance

MODEL_CALLS = 3


class Broken:
    """Loses the reply to a journal's next commit but `after`."""

    def __init__(self, journal: Journal, after: int) -> None:
        self.left = after
        self.lost = False
        self._transaction = journal._transaction
        journal._transaction = self.transaction  # type: ignore[method-assign]

    def transaction(self, group: Any) -> Committed:
        committed = self._transaction(group)
        self.left -= 1
        if self.left < 0 and not self.lost:
            self.lost = True
            raise StoreUnreachable("the connection was lost before the reply to COMMIT")
        return committed


@pytest.mark.thorough
async def test_the_reply_to_any_commit_may_be_lost(store: str, tmp_path: Path) -> None:
    """Given a session of three rounds, when the reply to its n-th commit is lost, then a client that waits learns of
    its end, its transcript is the same, and metrics and the log of spans have every event once, for every n."""
    notes = tmp_path / "notes"
    script = k.script(*([("look", {"path": str(notes), "text": "x"})] for _ in range(MODEL_CALLS - 1)), "done")
    async with k.running(store, tmp_path) as kernel:
        await kernel.run("clean", k.spec(script, [k.look]))
        wanted = await kernel.transcript("clean")
        service, number, broken = kernel.service, 0, None
        while broken is None or broken.lost:
            broken = Broken(service.journal, number)
            session_id = f"s{number}"
            ended = await kernel.run(session_id, k.spec(script, [k.look]))
            service.journal._transaction = broken._transaction  # type: ignore[method-assign]
            assert ended["status"] == "completed"
            watched = await kernel.ask("watch", f"{session_id}/again", {session_id: {"after": 0, "ends": True}}, 5.0)
            assert [event["run_id"] for event in watched["events"]] == ["r"], f"commit {number}"
            assert await kernel.transcript(session_id) == wanted, f"commit {number}"
            number += 1
        assert number > 2 * MODEL_CALLS
        await kernel.quiet()
        stored = await service.reading.query(queries.writer_events, service.config.writer, 0, 100_000)
        assert [event.writer_seq for event in stored] == list(range(1, len(stored) + 1))
        for cursor in range(0, len(stored), 7):
            read = await service.projection.read_events(cursor, 5)
            assert [event.writer_seq for event in read] == [event.writer_seq for event in stored[cursor : cursor + 5]]
        finished = sum(isinstance(event, RunFinished) for event in stored)
        answered = sum(isinstance(event, ModelCallCompleted) for event in stored)
        assert (finished, answered) == (number + 1, (number + 1) * MODEL_CALLS)
        metrics = service.projection.metrics
        while metrics.writer_seq < len(stored):  # noqa: ASYNC110 - what the store has and nobody sent is caught up in the background
            await asyncio.sleep(0.01)
        assert value(metrics, "understudy_runs_finished_total", status="completed") == finished
        assert value(metrics, "understudy_model_calls_total", outcome="ok") == answered
