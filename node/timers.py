"""The timers of a node's sessions, schedules and queues: fires what is due, in time, whatever died since it was set."""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections.abc import Callable, Iterable

from understudy.errors import UnderstudyError
from understudy.identifiers import home_of
from understudy.store.db.engine import now
from understudy.store.operations import queues, schedules, timers
from understudy.store.reads.queues import due_queues
from understudy.store.reads.schedules import due_schedules
from understudy.waiting import is_set_within

from .basis import NodeBasis

log = logging.getLogger(__name__)

HORIZON_SECONDS = 30.0
"""Timers that are due within this time are kept in memory; the sweep looks for the others long before they are."""

REPEAT_SECONDS = 1.0
CHUNK = 200
"""So many of those due at the same time are fired before whoever else waits for the event loop gets it."""

LATE_SECONDS = 5.0
"""A schedule that is late by more than this is fired by whoever sees it: its own node may be gone."""

Key = tuple[str, str]
"""A session's id and the name of its timer; `OF_SCHEDULES` and the name of a schedule, `OF_QUEUES` and a queue's."""

OF_NAMES = {schedules.OF_SCHEDULES: "schedule", queues.OF_QUEUES: "queue"}


class Timers:
    """Keeps what is due soon, and one task that waits for the first of it.

    Any service may fire any schedule; each of them looks after its share, and after what is late.

    A timer that was dropped or set again since does nothing when it fires: the store decides. So it may be noted twice.
    Once noted, a timer waits by the monotonic clock: it is neither early nor late when the machine's clock is set.
    """

    def __init__(self, node: NodeBasis, clock: Callable[[], int] = now) -> None:
        self._node = node
        self._now = clock
        self._noted: set[tuple[Key, int]] = (
            set()
        )  # not the last one of each: what was read may be older than what is set
        self._order: list[tuple[float, int, Key]] = []
        self._changed = asyncio.Event()

    def note(self, found: Iterable[tuple[Key, int]]) -> None:
        """Timers of sessions at home here, with the time each is due (microseconds); those due later are left."""
        clock, monotonic = self._now(), time.monotonic()
        for key, due_at in found:
            seconds = (due_at - clock) / 1e6
            if seconds <= HORIZON_SECONDS and (key, due_at) not in self._noted:
                self._noted.add((key, due_at))
                heapq.heappush(self._order, (monotonic + seconds, due_at, key))
                self._changed.set()

    async def look(self) -> None:
        """Note what the store has, of sessions that this node is the home of, and is due soon."""
        horizon = self._now() + int(HORIZON_SECONDS * 1e6)
        found = await self._node.reading.timers(self._node.config.node_id, horizon)
        self.note(((timer.session_id, timer.name), timer.due_at) for timer in found)

    async def look_at_schedules(self) -> None:
        """Note the schedules and the queues that are due soon: this service's share, and what is late."""
        clock = self._now()
        late = clock - int(LATE_SECONDS * 1e6)
        for kind, look in ((schedules.OF_SCHEDULES, due_schedules), (queues.OF_QUEUES, due_queues)):
            due = await self._node.reading.query(look, clock + int(HORIZON_SECONDS * 1e6))
            mine = ((name, due_at) for name, due_at in due if due_at < late or self._is_mine(name))
            self.note(((kind, name), due_at) for name, due_at in mine)

    def _is_mine(self, name: str) -> bool:
        """Whether this service is the one that looks after a schedule, or a queue."""
        homes = self._node.homes
        return home_of(name, homes.available or [homes.here]) == homes.here

    async def firing(self) -> None:
        """Fire what is due, for as long as the service lives."""
        while True:
            self._changed.clear()
            pause = self._order[0][0] - time.monotonic() if self._order else None
            if pause is None or pause > 0:
                await is_set_within(self._changed, pause)
                continue
            for _ in range(min(len(self._order), CHUNK)):
                at, due_at, key = self._order[0]
                if at > time.monotonic():
                    break
                heapq.heappop(self._order)
                self._noted.remove((key, due_at))
                self._node.spawn_task(self._fire(key, due_at))
            await asyncio.sleep(0)

    async def _fire(self, key: Key, due_at: int) -> None:
        session_id, name = key
        homes = self._node.homes
        try:
            if session_id == schedules.OF_SCHEDULES:
                await self._node.journal.submit(lambda tx: schedules.fire(tx, name, due_at, homes))
            elif session_id == queues.OF_QUEUES:
                await self._node.journal.submit(lambda tx: queues.look(tx, name))
            else:
                await self._node.journal.submit(lambda tx: timers.fire(tx, session_id, name, due_at), session_id)
        except UnderstudyError as error:
            of_session = session_id not in OF_NAMES
            what = f"timer {name} of session {session_id}" if of_session else f"{OF_NAMES[session_id]} {name}"
            log.warning("%s is put off: %s", what, error)
            await asyncio.sleep(REPEAT_SECONDS)
            self.note([(key, due_at)])
