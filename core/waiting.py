"""Waiting for a bounded time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

TICK_SECONDS = 1.0

STOOD_STILL = 2.0
"""Seconds by which a tick is late when its process was stopped, not only busy."""

Answer = TypeVar("Answer")


async def is_set_within(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait until the event is set; False if that takes longer than `seconds` (None: without limit).

    Not `asyncio.wait_for`, which before Python 3.12 can swallow a cancellation that comes at the same moment
    (https://github.com/python/cpython/issues/86296): a loop that waits so would go on after its end.
    """
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def answered_within(
    call: Awaitable[Answer], seconds: float, heard: Callable[[], float] | None = None
) -> Answer:  # fmt: skip
    """Await an answer of another process, for so many seconds in which this process runs.

    While this one stands still (stopped, its machine frozen or overloaded) it hears nothing, and what it did not hear
    tells nothing of the other: such a second does not count. Unless it stands still all the time.

    Args:
        heard: when something last came of the answer (`time.monotonic()`): the seconds start over then.

    Raises:
        TimeoutError: there is no answer; the call is cancelled.
    """
    task = asyncio.ensure_future(call)
    left, stood_still = seconds, False
    last = heard() if heard is not None else 0.0
    try:
        while left > 0:
            tick, began = min(left, TICK_SECONDS), time.monotonic()
            done, _ = await asyncio.wait((task,), timeout=tick)
            if done:
                return task.result()
            late = time.monotonic() - began > tick + TICK_SECONDS / 2
            if not late or stood_still:
                left -= tick
            stood_still = late
            if heard is not None and heard() != last:
                last = heard()
                left = seconds - (0.0 if late else time.monotonic() - last)
    except asyncio.CancelledError:
        await _give_up(task)
        raise
    await _give_up(task)
    raise TimeoutError


async def _give_up(task: asyncio.Future[Any]) -> None:
    if not task.done():
        task.cancel()
        await asyncio.wait((task,))
    retrieve_error(task)  # nobody wants it; it may have come at the moment of the cancellation


async def ticks(seconds: float) -> AsyncIterator[bool]:
    """One item every so many seconds: whether this process stood still since the last one, and may have heard nothing.

    What is done between two of them counts as if it had.
    """
    ticked = time.monotonic()
    while True:
        await asyncio.sleep(seconds)
        ticked, before = time.monotonic(), ticked
        yield ticked - before > seconds + STOOD_STILL


def retrieve_error(task: asyncio.Future[Any]) -> None:
    """Take note of the error of a task that has ended, if it has one: whoever awaited it may be gone, and asyncio would
    report the error as never seen."""
    if not task.cancelled():
        task.exception()
