"""How many frames this node should have: what the supervisor learns of that, and who goes when it says so."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable

from understudy.placement import is_scarce
from understudy.supervisor.capacity import Memory
from understudy.supervisor.pool import Demand
from understudy.supervisor.stock import OUT_OF_MEMORY
from understudy.waiting import is_set_within

from .memory import measure
from .paging import Paging, Slot

DEMAND_PAUSE = 0.05
BUSY_DEMAND_PAUSE = 0.5
"""Seconds until a change of demand is reported: the first at once or nearly so, under constant change now and then."""

MEASURE_SECONDS = 2.0


class Supply:
    """Tells demand, and lets frames go.

    Args:
        let_go: ends the process of a frame that rests; its session, if it has one, leaves it.

    Attributes:
        changed: demand has, since it was reported.
        unschedulable: why no frame of a placement can be started, as the supervisor says.
        cap: the most frames that the supervisor starts now; 0 while it has not said so.
        leaving: how many frames of each placement shall go when they next rest.
    """

    def __init__(self, paging: Paging, let_go: Callable[[Slot], Awaitable[None]]) -> None:
        self._paging = paging
        self._let_go = let_go
        self.changed = asyncio.Event()
        self.unschedulable: dict[str, str] = {}
        self.cap = 0
        self.leaving: Counter[str] = Counter()
        self._memory: Memory | None = None
        self._measured = 0.0
        self._reported_at = 0.0

    async def demand(self, timeout: float) -> dict[str, Demand]:
        """Per placement, as soon as it changes or after `timeout`."""
        if timeout > 0:
            busy = time.monotonic() - self._reported_at < 1.0
            if await is_set_within(self.changed, timeout):
                await asyncio.sleep(BUSY_DEMAND_PAUSE if busy else DEMAND_PAUSE)
            self._reported_at = time.monotonic()
        self.changed.clear()
        found = self._paging.demand()
        for name, demand in found.items():
            demand.frames = [slot.frame_id for slot in self._paging.slots.values() if slot.placement == name]
            demand.taken = self._paging.taken.pop(name, 0)
            since = self._paging.ready_since(name)
            demand.oldest = time.monotonic() - since if since is not None else 0.0
        return found

    async def retire(self, leaving: dict[str, int]) -> None:
        """Let so many frames of each placement go: those that rest now, and others when they next do.

        It replaces what was said before.
        """
        self.leaving = Counter(leaving)
        for slot in sorted(self._paging.slots.values(), key=lambda slot: not slot.stands_by):
            if slot.resting and not slot.guarding and self.must_leave(slot):
                await self._let_go(slot)

    async def dismiss_standbys(self) -> None:
        """Let all frames go that nobody will miss."""
        for slot in list(self._paging.slots.values()):
            if slot.stands_by:
                await self._let_go(slot)

    def must_leave(self, slot: Slot) -> bool:
        """Whether this frame, which comes to rest, is one of those that shall go; it is counted then."""
        if self.leaving[slot.placement] <= 0:
            return False
        self.leaving[slot.placement] -= 1
        return True

    def memory(self) -> Memory:
        """What memory there is, measured every `MEASURE_SECONDS`. Scarce frames may be on other machines."""
        if self._memory is None or time.monotonic() - self._measured > MEASURE_SECONDS:
            slots = self._paging.slots.values()
            self._memory = measure([slot.pid for slot in slots if not is_scarce(slot.placement)])
            self._measured = time.monotonic()
        return self._memory

    @property
    def measured(self) -> Memory | None:
        """What was measured last."""
        return self._memory

    def cause(self, cause: str) -> str:
        """Why a process died: where the kernel has just killed one for want of memory, it was this one."""
        before = self._memory
        if cause != "process_died" or before is None:
            return cause
        self._memory = None
        return OUT_OF_MEMORY if self.memory().killed > before.killed else cause
