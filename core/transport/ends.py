"""Processes of this machine: which they are, and whether they have ended. No Ray."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

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


def machine_identity() -> str:
    """A boot of a machine, and a namespace of pids: containers of one machine have pids of their own."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{Path('/proc/self/ns/pid').stat().st_ino}"


def process_identity(pid: int) -> str:
    """The identity of a process, which no later one with the same pid has: `where:pid:ticks`.

    Where is `machine_identity`. The ticks are those from that boot to its start: a time of day would move when the
    clock is set.
    """
    where = machine_identity()
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return f"{where}:{pid}:gone"  # or another user's, on a machine that hides those
    # Field 22; the second one is the program's name, in which anything may be, and ends with the last parenthesis.
    return f"{where}:{pid}:{int(stat.rpartition(b')')[2].split()[19])}"


def is_gone(process: str) -> bool:
    """Whether the process of this identity would be seen here, and lives no more."""
    where, pid, _ = process.split(":")
    here = machine_identity()
    alive = (process, f"{where}:{pid}:gone")
    return where == here and (not psutil.pid_exists(int(pid)) or process_identity(int(pid)) not in alive)
