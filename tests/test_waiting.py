"""Waiting for an event for a bounded time."""

from __future__ import annotations

import asyncio

import pytest

from understudy.waiting import is_set_within


async def test_it_tells_whether_the_event_was_set() -> None:
    """True at once for one that is set, also without time; False when the time is over first."""
    event = asyncio.Event()
    assert not await is_set_within(event, 0.001)
    event.set()
    assert await is_set_within(event, 0)
    assert await is_set_within(event, None)


@pytest.mark.parametrize("turns", [0, 1])
async def test_a_cancellation_is_never_swallowed(turns: int) -> None:
    """Given a loop that waits, when it is cancelled as the event is set, or a turn of the loop later, then it ends."""
    event = asyncio.Event()

    async def loop() -> None:
        while True:
            event.clear()
            await is_set_within(event, 60.0)

    task = asyncio.create_task(loop())
    await asyncio.sleep(0)
    event.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5.0)
