"""How many frames fit on a node, and how many should stand by: pure functions of what was measured and what happened.

Memory bounds the frames in two ways. What is free now says how many more fit. And where processes were killed for want
of memory although they seemed to fit, the bound is halved, and then rises again by one frame every `RISE_SECONDS`: as
TCP finds out what a network carries. All times are seconds of one clock that never goes back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

FRAME_BYTES = 64 << 20
"""What a frame takes at least, before anything was measured."""

RESERVE = 0.08
"""The share of a node's memory that frames leave free: Ray kills processes when less than 5 % is left."""

RISE_SECONDS = 30.0
BURST_SECONDS = 10.0
"""Kills within this time of the last decrease have the same cause, and lower nothing more."""

HALF_LIFE_SECONDS = 600.0
SCARCE_HALF_LIFE_SECONDS = 10.0
"""A frame that holds what others need, such as a GPU, stands by for moments only."""

FORGOTTEN = 0.05
LEVEL_LIMIT = 64


@dataclass(frozen=True)
class Memory:
    """What a node service measured.

    Attributes:
        total, free: bytes of the node, or of the container that it is in; free is what processes could still take.
        frame: bytes that a frame takes for itself, the mean; 0 while there is none.
        killed: how many processes the kernel has killed there for want of memory.
    """

    total: int
    free: int
    frame: int = 0
    killed: int = 0


def fitting(frames: int, memory: Memory) -> int:
    """How many frames fit, given how many there are: fewer than those when the reserve is being used up. At least 1."""
    room = memory.free - int(RESERVE * memory.total)
    return max(1, frames + room // max(FRAME_BYTES, memory.frame))


@dataclass(frozen=True)
class Bound:
    """What processes killed for want of memory have taught.

    Attributes:
        limit: the most frames at the time `since`; None while nothing was killed.
    """

    limit: int | None = None
    since: float = 0.0

    def at(self, now: float) -> int | None:
        """The most frames now; None for no bound."""
        if self.limit is None:
            return None
        return self.limit + int((now - self.since) / RISE_SECONDS)

    def after_kill(self, frames: int, now: float) -> Bound:
        """A process was killed for want of memory while there were so many frames, itself included."""
        current = self.at(now)
        if current is not None and now - self.since < BURST_SECONDS:
            return self
        most = frames if current is None else min(frames, current)
        return Bound(max(1, most // 2), now)


def cap(wanted: int, frames: int, memory: Memory | None, bound: Bound, now: float) -> int:
    """The most frames a node should have: what was asked for, as far as it fits. At least 1.

    Args:
        wanted: `UNDERSTUDY_MAX_ACTORS`, or what the CPUs say.
        frames: how many there are.
    """
    learnt = bound.at(now)
    limits = [wanted, fitting(frames, memory) if memory else wanted, wanted if learnt is None else learnt]
    return max(1, min(limits))


@dataclass(frozen=True)
class Standbys:
    """How many frames of a placement should stand by: as many as were taken lately.

    Attributes:
        most: how many were asked for; so many are created at most.
        level: frames taken by sessions or lost by death; each counts half after `half_life` seconds.
    """

    most: int
    level: float
    since: float
    half_life: float = HALF_LIFE_SECONDS

    def after(self, taken: int, now: float) -> Standbys:
        """So many frames were taken or lost since."""
        left = self.level * 0.5 ** (max(0.0, now - self.since) / self.half_life)
        return replace(self, level=min(float(LEVEL_LIMIT), left + taken), since=now)

    def keep(self, now: float) -> int:
        """More than so many need not stand by."""
        level = self.after(0, now).level
        return math.ceil(level - FORGOTTEN) if level > FORGOTTEN else 0

    def wanted(self, now: float) -> int:
        """So many are created, 0 to `most`."""
        return min(self.most, self.keep(now))
