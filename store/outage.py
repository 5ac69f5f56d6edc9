"""What keeps a journal from committing, since when, and when it tries again."""

from __future__ import annotations

import logging
import random
import time

from understudy.errors import StoreBusy, StoreError, StoreUnreachable, UnderstudyError

log = logging.getLogger(__name__)

RETRY_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)

BUSY_SECONDS = (0.01, 0.02, 0.05, 0.1)
"""Pauses after somebody else was in the way; less by chance, or two journals in a deadlock would meet again."""

BUSY_WARNING_SECONDS = 30.0
"""Others that are in the way for longer than this are worth a warning: a transaction of ours that was left open is
ended by PostgreSQL within 5 s, and a node that vanished is noticed within 11 s."""


class Outage:
    """Of one journal.

    Attributes:
        unreachable_since: when the store was first out of reach (monotonic); None while it works.
        busy_since: when others were first in the way of the next group (monotonic); None while nobody is.
        failing_since: when operations first failed though the store answers (monotonic); None since a commit succeeded.
        tries: so many have failed since the store was last in reach.
    """

    def __init__(self) -> None:
        self.unreachable_since: float | None = None
        self.busy_since: float | None = None
        self.failing_since: float | None = None
        self.tries = 0
        self._busy = 0
        self._warned: set[str] = set()  # of these kinds of failures, in this outage

    def unreachable(self, error: StoreUnreachable) -> float:
        """The store is gone, silent, full or only reads; seconds until the next try."""
        if self.unreachable_since is None:
            self.unreachable_since = time.monotonic()
        if error.code not in self._warned:
            self._warned.add(error.code)
            log.warning("store unreachable, retrying: %s", error)
        self.tries += 1
        return RETRY_SECONDS[min(self.tries, len(RETRY_SECONDS)) - 1]

    def busy(self, error: StoreBusy) -> float:
        """Another process is in the way: this is no outage, and nothing was committed. Seconds until the next try."""
        if self.busy_since is None:
            self.busy_since = time.monotonic()
        elif error.code not in self._warned and self.busy_for(BUSY_WARNING_SECONDS):
            self._warned.add(error.code)
            log.warning("others are in the way for %.0f s, retrying: %s", BUSY_WARNING_SECONDS, error)
        self._busy += 1
        return BUSY_SECONDS[min(self._busy, len(BUSY_SECONDS)) - 1] * random.uniform(0.5, 1.0)

    def answered(self, error: Exception | None) -> None:
        """A group is done with: committed, or refused with this error."""
        if not isinstance(error, StoreUnreachable):
            if self.unreachable_since is not None:
                log.warning("store reachable again after %.1f s", time.monotonic() - self.unreachable_since)
            self.unreachable_since = self.busy_since = None
            self._warned.clear()
        if error is None:
            self.failing_since = None
        elif isinstance(error, StoreError) or not isinstance(error, UnderstudyError):
            self.failing_since = self.failing_since or time.monotonic()
        self.tries = self._busy = 0

    def busy_for(self, seconds: float) -> bool:
        """Whether others have been in the way for longer than this."""
        return self.busy_since is not None and time.monotonic() - self.busy_since > seconds

    def unreachable_for(self, seconds: float) -> bool:
        """Whether the store has been out of reach for longer than this."""
        return self.unreachable_since is not None and time.monotonic() - self.unreachable_since > seconds

    def failing(self) -> float:
        """Seconds since operations fail although the store answers; 0 while they don't."""
        since = self.failing_since
        return time.monotonic() - since if since is not None else 0.0

    def seconds(self) -> float:
        """Since nothing is committed, for whatever reason; others in the way are one only after a while."""
        now, busy, away = time.monotonic(), self.busy_since, self.unreachable_since
        waited = now - busy if busy is not None else 0.0
        return max(
            self.failing(), now - away if away is not None else 0.0, waited if waited > BUSY_WARNING_SECONDS else 0.0
        )  # fmt: skip
