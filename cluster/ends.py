"""Ends of processes of this machine. No Ray."""

from __future__ import annotations

import asyncio
import time

import psutil

FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.005
"""Seconds between two looks: most processes end at once."""


async def has_ended(pid: int, seconds: float) -> bool:
    """Whether a process of this machine ends within this time; False if it can't be seen from here."""
    deadline, pause = time.monotonic() + seconds, FIRST_PAUSE
    while pid > 0:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(pause)
        pause = min(LONGEST_PAUSE, 2 * pause)
    return False
