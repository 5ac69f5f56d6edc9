"""Waiting for a bounded time."""

from __future__ import annotations

import asyncio
import time

import pytest

from understudy.waiting import answered_within, is_set_within


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


async def test_an_answer_is_awaited_for_a_bounded_time() -> None:
    """An answer and an error are passed on; without either the call is cancelled, and `TimeoutError` is raised."""

    async def fails() -> None:
        raise ValueError("no such thing")

    assert await answered_within(asyncio.sleep(0, "answer"), 1.0) == "answer"
    with pytest.raises(ValueError, match="no such thing"):
        await answered_within(fails(), 1.0)
    call = asyncio.create_task(asyncio.Event().wait())
    with pytest.raises(TimeoutError):
        await answered_within(call, 0.01)
    assert call.cancelled()


async def test_what_is_not_heard_while_standing_still_tells_nothing() -> None:
    """Given a process that stands still beyond the limit, when the answer is there a moment after it goes on, it is
    heard."""
    answer = asyncio.get_running_loop().create_future()

    def stand_still() -> None:
        time.sleep(2.0)
        asyncio.get_running_loop().call_later(0.05, answer.set_result, "answer")

    asyncio.get_running_loop().call_later(0.05, stand_still)
    assert await answered_within(answer, 0.2) == "answer"
