"""The frames of one node: what happened to them, what was measured, and what follows. No I/O, no clock of its own."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from msgspec.structs import replace

from understudy.placement import is_scarce

from .capacity import HALF_LIFE_SECONDS, SCARCE_HALF_LIFE_SECONDS, Bound, Memory, Standbys, cap
from .pool import NO_DEMAND, Demand, Plan, default_cap, plan

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds until frames of a placement that could not be started are tried again; doubled with each failure."""

UNUSED_SECONDS = 30.0
"""Standbys of a placement that no session used for so long make room for those of others."""

OUT_OF_MEMORY = "out_of_memory"


class Stock:
    """Decides which frames a node should start and let go.

    Attributes:
        starting: placements of the frames that are being created, by their ids.
        failures: why frames of a placement can't be started, as it was last time; empty once one was.
        cap: the most frames there may be, as it was last decided.
    """

    def __init__(self, cpus: float, max_actors: int | None, standby: int) -> None:
        self.starting: dict[str, str] = {}
        self.failures: dict[str, str] = {}
        self._most = self.cap = max_actors or default_cap(cpus) + standby
        self._memory: Memory | None = None
        self._bound = Bound()
        self._standbys: dict[str, Standbys] = {}
        self._tried: dict[str, tuple[int, float]] = {}
        self._turns: dict[str, int] = {}
        self._used: dict[str, float] = {}
        self._alive = 0

    def measured(self, memory: Memory, now: float) -> None:
        """What the node service has measured; processes killed by the kernel since the last time count."""
        if self._memory is not None and memory.killed > self._memory.killed:
            self._killed(now)
        self._memory = memory

    def died(self, placement: str, cause: str, now: float) -> None:
        """A frame's process is gone. One that was asked to leave was not lost."""
        if cause == OUT_OF_MEMORY:
            self._killed(now)
        if cause != "exit" and placement in self._standbys:
            self._standbys[placement] = self._standbys[placement].after(1, now)

    def _killed(self, now: float) -> None:
        before = self._bound
        self._bound = before.after_kill(max(1, self._alive), now)
        if self._bound != before:
            log.warning("memory is short: at most %s frames for now", self._bound.limit)

    def started(self, placement: str) -> bool:
        """A frame of this placement is there; True if that failed last time."""
        self._tried.pop(placement, None)
        return self.failures.pop(placement, None) is not None

    def failed(self, placement: str, reason: str, now: float) -> None:
        """A frame could not be started. Others of its placement are tried later, those of others now."""
        count, until = self._tried.get(placement, (0, now))
        if now >= until:  # else it was started together with one that failed before
            self._tried[placement] = count + 1, now + min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(count, 10))
        self.failures[placement] = reason

    def decide(self, demand: dict[str, Demand], arriving: Counter[str], wanted: dict[str, int], now: float) -> Plan:
        """What to create and to retire.

        Args:
            demand: as reported by the node service, per placement.
            arriving: frames that are alive or being created and have not called in yet, per placement.
            wanted: the most standbys, per placement.
        """
        for placement in demand.keys() | wanted.keys():
            self._note(placement, demand.get(placement, NO_DEMAND), wanted.get(placement, 0), now)
        rows = {name: replace(row) for name, row in demand.items()}
        self._alive = sum(row.alive for row in rows.values()) + arriving.total()
        standbys = {name: self._standbys[name].wanted(now) for name in wanted}
        for placement, row in rows.items():
            if is_scarce(placement) and not row.alive:
                row.ready = min(1, row.ready)  # perhaps there is none to be had
        for placement, (_, until) in self._tried.items():
            # One frame is enough to see whether they can be started again.
            most = 0 if now < until or placement in self.starting.values() else 1
            standbys[placement] = min(most, standbys.get(placement, 0))
            if placement in rows:
                rows[placement].ready = min(most, rows[placement].ready)
        keep = {name: self._standbys[name].keep(now) for name in demand}
        self.cap = cap(self._most, self._alive - len(self.starting), self._memory, self._bound, now)
        unused = [name for name, at in self._used.items() if now - at > UNUSED_SECONDS]
        decided = plan(rows, arriving, standbys, self.cap, keep=keep, turns=self._turns, unused=unused)
        used = demand.keys() | wanted.keys() | set(self.starting.values())
        tables: list[dict[str, Any]] = [self._standbys, self._tried, self._turns, self._used, self.failures]
        for known in tables:
            for placement in known.keys() - used:
                del known[placement]
        for placement in decided.create:
            self._turns[placement] = max(self._turns.values(), default=0) + 1
        return decided

    def _note(self, placement: str, row: Demand, most: int, now: float) -> None:
        known = self._standbys.get(placement)
        if known is None or known.most != most:
            level = known.after(0, now).level if known is not None else 0.0
            half_life = SCARCE_HALF_LIFE_SECONDS if is_scarce(placement) else HALF_LIFE_SECONDS
            level = max(level, most, row.alive)
            self._standbys[placement] = known = Standbys(most, float(level), now, half_life)
        if row.taken or row.ready or row.acting or row.waiting:
            self._used[placement] = now
        self._used.setdefault(placement, now)
        if row.taken:
            self._standbys[placement] = known.after(row.taken, now)
