"""People whom sessions ask, in tests that kill processes meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from understudy.errors import NotAsked

from . import kernel as k

Question = dict[str, Any]
"""What `input_requested` says."""


@asynccontextmanager
async def person(
    kernel: k.Kernel, session_id: str, decide: Callable[[Question], dict[str, Any]]
) -> AsyncIterator[list[Question]]:
    """Somebody who decides about whatever the session asks, and says everything twice; what was asked."""
    seen: list[Question] = []

    async def attend() -> None:
        after = 0
        while True:
            found = await kernel.ask("watch", f"{session_id}/person", {session_id: {"after": after}}, 5.0)
            for event in found["events"]:
                after = event["seq"]
                if event["type"] != "input_requested":
                    continue
                asked = event["data"]
                seen.append(asked)
                said = {"call_id": asked["call_id"], "asked": asked["asked"], **decide(asked)}
                for _ in range(2):
                    with suppress(NotAsked):
                        await kernel.ask("decide", session_id, [said])

    task = asyncio.create_task(attend())
    try:
        yield seen
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
