"""A token bucket, and a count of what was used lately. Plain data; the caller says what time it is."""

from __future__ import annotations

import math

from understudy.rates import MINUTE

BURST_SECONDS = 0.05
"""So much of its rate a bucket holds: enough for an event loop that is late, too little for a storm after a pause."""

LATELY = 15.0
"""Seconds over which use is averaged."""


class Bucket:
    """Lets through so much per minute.

    Guarantees: within any time `t` no more than `rate * t` and what it holds (`burst`), and what the last one took that
    needed more than that.

    Args:
        least: what it holds at least.
    """

    def __init__(self, least: float, now: float) -> None:
        self._least = least
        self._rate: float | None = None
        self._level = least
        self._at = now

    @property
    def burst(self) -> float:
        """What it holds when it is full."""
        return max(self._least, (self._rate or 0.0) * BURST_SECONDS / MINUTE)

    def fill(self, rate: float | None, now: float) -> None:
        """Time has passed; from now on it fills at this rate (None: no limit)."""
        if self._rate is not None:
            self._level += self._rate * max(0.0, now - self._at) / MINUTE
        self._rate, self._at = rate, now
        self._level = min(self._level, self.burst)

    def wait(self, amount: float) -> float:
        """Seconds until so much may be taken: where it is more than the bucket holds, until that is full."""
        missing = min(amount, self.burst) - self._level
        if self._rate is None or missing <= 1e-9:
            return 0.0
        return missing * MINUTE / self._rate if self._rate > 0 else math.inf

    def take(self, amount: float) -> None:
        """Take it, also what is not there: then the next one waits longer."""
        if self._rate is not None:
            self._level -= amount

    def give_back(self, amount: float) -> None:
        """So much was not needed; below 0: so much more was."""
        if self._rate is not None:
            self._level = min(self._level + amount, self.burst)


class Lately:
    """How much was used, per minute, of late."""

    def __init__(self, now: float) -> None:
        self._sum = 0.0
        self._at = now

    def add(self, amount: float, now: float) -> None:
        """So much was used."""
        self._sum = self._faded(now) + amount
        self._at = now

    def per_minute(self, now: float) -> float:
        """What was used lately, of a whole minute."""
        return self._faded(now) * MINUTE / LATELY

    def _faded(self, now: float) -> float:
        return self._sum * math.exp(-max(0.0, now - self._at) / LATELY)
