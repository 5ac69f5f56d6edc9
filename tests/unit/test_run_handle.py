"""Waiting for a run's end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from understudy.cluster.client.run_handle import Run
from understudy.errors import DeadlineExceeded
from understudy.events import RunFinished

from ..records import run_record

SECONDS = 0.02


class Connection:
    """Follows a session's queue."""

    def __init__(self) -> None:
        self.queue = asyncio.Queue[Any]()
        self.follower = SimpleNamespace(follow=self.follow)

    async def read(self, *_arguments: Any) -> Any:
        """What the session waits for."""
        return SimpleNamespace(error={"message": "no node has a GPU"})

    @asynccontextmanager
    async def follow(self, _session_id: str, **_options: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(queue=self.queue)


@pytest.mark.parametrize("early", [0.0, 0.0001, 0.0003, 0.0006])
async def test_a_time_out_holds_although_another_run_ends_at_that_moment(early: float) -> None:
    """Given a run that waits behind another one, when that one ends as the time is over, then the time is over.
    `asyncio.wait_for` within another one swallowed that before Python 3.12."""
    for _ in range(5):
        connection = Connection()
        run = Run(connection, "s", "behind", 0)  # type: ignore[arg-type]
        ended = RunFinished(session_id="s", seq=1, run_id="before", status="completed")
        asyncio.get_running_loop().call_later(
            SECONDS - early, connection.queue.put_nowait, ("event", ended, run_record(run_id="before"))
        )
        async with asyncio.timeout(10):
            with pytest.raises(DeadlineExceeded, match=r"has not ended after 0\.02 s: no node has a GPU"):
                await run._result(SECONDS, check=False)
