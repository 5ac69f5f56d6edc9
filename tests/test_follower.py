"""The client's follower: what it does when a node service dies under its watch. No Ray."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from understudy.cluster import client
from understudy.cluster import follower as following
from understudy.cluster.follower import Follower
from understudy.errors import ServiceGone
from understudy.events import RunFinished

PATIENCE = 20.0


class Nodes:
    """One node whose service dies once; what it is asked about homes gets no answer from then on."""

    def __init__(self) -> None:
        self.died = False

    async def home(self, _session_id: str) -> str:
        return "a"

    async def homes(self, _session_ids: list[str]) -> dict[str, tuple[str, int]]:
        await asyncio.Event().wait()
        raise AssertionError

    async def learn(self) -> None:
        return None

    async def call(self, _node_id: str, *_request: Any, timeout: float) -> dict[str, Any]:
        if not self.died:
            self.died = True
            raise ServiceGone("killed")
        event = RunFinished(session_id="s", seq=1, run_id="r", status="completed")
        return {"events": [event.to_wire()], "streams": {}, "runs": {"s/r": {"status": "completed"}}}


async def test_an_end_is_told_while_homes_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a watch that was lost with its service, when nobody can say whether the session moved, then the next watch
    tells of the run's end all the same."""
    monkeypatch.setattr(following, "COMPARE_SECONDS", 0.05)
    follower = Follower(Nodes())  # type: ignore[arg-type]
    async with follower.follow("s", ends=True) as subscription, asyncio.timeout(PATIENCE):
        kind, event, row = await subscription.queue.get()
    await follower.close()
    assert (kind, event.run_id, row) == ("event", "r", {"status": "completed"})


def test_all_pages_of_a_long_log_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given more than the services tell at a time, then nothing is missing, and nothing comes twice."""
    log = [{"seq": number} for number in range(3, 24)]
    asked: list[int] = []

    def read(after: int) -> list[dict[str, Any]]:
        asked.append(after)
        return [row for row in log if row["seq"] > after][:10]

    monkeypatch.setattr(client, "PAGE", 10)
    assert list(client._pages(read, 0)) == log
    assert asked == [0, 12, 22]
