"""Waiting for an event for a bounded time."""

from __future__ import annotations

import asyncio


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
