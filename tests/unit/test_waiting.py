"""Waiting for a bounded time."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest

from understudy.waiting import answered_within, is_set_within, ticks


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


@pytest.mark.thorough
async def test_what_is_not_heard_while_standing_still_tells_nothing() -> None:
    """Given a process that stands still beyond the limit, when the answer is there a moment after it goes on, it is
    heard."""
    answer = asyncio.get_running_loop().create_future()

    def stand_still() -> None:
        time.sleep(2.0)
        asyncio.get_running_loop().call_later(0.05, answer.set_result, "answer")

    asyncio.get_running_loop().call_later(0.05, stand_still)
    assert await answered_within(answer, 0.2) == "answer"


async def test_an_answer_that_comes_in_pieces() -> None:
    """Given an answer of which something comes now and then, then it may take longer in all than is waited for the
    next piece; when nothing comes any more, it is given up."""
    heard = [time.monotonic()]

    async def pieces(number: int, last: float) -> str:
        for _ in range(number):
            await asyncio.sleep(0.1)
            heard[0] = time.monotonic()
        await asyncio.sleep(last)
        return "whole"

    assert await answered_within(pieces(6, 0.0), 0.4, lambda: heard[0]) == "whole"
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        await answered_within(pieces(2, 60.0), 0.4, lambda: heard[0])
    assert time.monotonic() - began >= 0.59


@pytest.mark.thorough
async def test_a_pause_right_behind_a_piece_does_not_count() -> None:
    """Given a process that stands still as soon as something has come, for longer than the limit, when it goes on, then
    it waits for the rest."""
    heard, rest = [0.0], asyncio.get_running_loop().create_future()

    def stand_still() -> None:
        heard[0] = time.monotonic()
        time.sleep(2.0)
        asyncio.get_running_loop().call_later(0.2, rest.set_result, "the rest")

    asyncio.get_running_loop().call_later(0.05, stand_still)
    assert await answered_within(rest, 0.6, lambda: heard[0]) == "the rest"


async def test_an_error_that_comes_with_a_cancellation(caplog: pytest.LogCaptureFixture) -> None:
    """Given a call that fails as whoever awaits it is cancelled, then nobody reports that its error was never seen."""
    call = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(answered_within(call, 60.0))
    await asyncio.sleep(0)
    call.set_exception(ValueError("nobody looks"))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    del call, waiting
    gc.collect()
    assert "never retrieved" not in caplog.text


@pytest.mark.thorough
async def test_ticks_say_when_the_process_stood_still() -> None:
    """Given a process that stands still between two ticks, then the second says so, and the next one does not."""
    found = []
    async for stood_still in ticks(0.01):
        found.append(stood_still)
        if len(found) == 1:
            time.sleep(2.1)  # noqa: ASYNC251 (as a process does that is stopped)
        if len(found) == 3:
            break
    assert found == [False, True, False]
