"""A run is told to end while a call of it is under way: nothing of that stays, neither for the next run nor at the
endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from understudy.actors.tools import tool

from . import kernel as k


@tool(on_crash="rerun")
async def watched() -> str:
    """Go on until the agent's frame has asked to be told of a cancellation."""
    worker = k.WORKER.get()
    assert worker is not None
    while not worker.kernel.service.interrupts:
        await asyncio.sleep(0.01)
    return "watched"


@pytest.fixture
async def kernel(store: str, tmp_path: Path) -> AsyncIterator[k.Kernel]:
    async with k.running(store, tmp_path) as made:
        yield made


async def test_a_watch_ends_with_its_tool(kernel: k.Kernel) -> None:
    """Given tools that took so long that their frame asked to be told of a cancellation, when they have ended, then
    that call has, too: a service can have only so many."""
    run = await kernel.run("s", k.spec(k.script([("watched", {})], [("watched", {})], "done"), [watched]))
    assert run["status"] == "completed"
    assert not kernel.service.interrupts
    assert kernel._life is not None
    pending = [task.get_coro().__qualname__ for task in kernel._life.tasks]  # type: ignore[union-attr]
    assert [name for name in pending if "interrupted" in name] == []
