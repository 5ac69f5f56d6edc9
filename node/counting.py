"""What a node service shows of the store: counted in the background, so that no scrape waits for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from understudy.reads import QueueInfo
from understudy.records import SESSION_STATUSES
from understudy.store.operations import presence
from understudy.store.operations.presence import Announced
from understudy.store.reads import gauges, queues, triage
from understudy.store.reads.gauges import Counts
from understudy.waiting import is_set_within

from .basis import NodeBasis

log = logging.getLogger(__name__)

COUNT_SECONDS = 15.0
SCRAPED_COUNT_SECONDS = 5.0
"""The same while somebody scrapes."""

SCRAPED_WITHIN = 60.0
SHARE = 0.02
"""Counting may take this share of the time; so may counting the sessions without work, which reads them all."""

LONGEST_PAUSE, LONGEST_PASSIVE_PAUSE = 60.0, 600.0
"""A store that stood still took long to answer as well: that must not leave old numbers for an hour."""


class Counting:
    """Counts, and remembers what was counted. Where the store fails, the last numbers stay.

    Args:
        announce: notes in the store that the service is there.
        runs_open: `Metrics.runs_open`, of this service.

    Attributes:
        services: the node services that the store knows of.
        queues: as they stood when they were counted; none where another service counts them.
        triage: how many entries are open there, by schedule; in the same way.
        counted: when it last succeeded (monotonic); None before the first time.
        failing_since: when it first failed since then (monotonic).
        scraped: when somebody last looked (monotonic).
    """

    def __init__(
        self, node: NodeBasis, announce: Callable[[], Awaitable[None]], runs_open: Callable[[], int]
    ) -> None:  # fmt: skip
        self._node = node
        self._announce = announce
        self._runs_open = runs_open
        self._runs = (0, 0)
        self._changed = asyncio.Event()
        self._passive: dict[str, int] = {}
        self._passive_of: Any = None
        self._passive_due = 0.0
        self.counts = Counts()
        self.services: list[Announced] = []
        self.queues: list[QueueInfo] = []
        self.triage: dict[str, int] = {}
        self.counted: float | None = None
        self.failing_since: float | None = None
        self.scraped = 0.0

    def note_scrape(self) -> None:
        """Somebody looks. May be called in any thread."""
        self.scraped = time.monotonic()

    def nodes_changed(self) -> None:
        """Count now."""
        self._changed.set()

    async def run(self) -> None:
        """Count now and then, for as long as the service lives."""
        while True:
            self._changed.clear()
            began = time.monotonic()
            await self.count()
            ended = time.monotonic()
            pause = SCRAPED_COUNT_SECONDS if ended - self.scraped < SCRAPED_WITHIN else COUNT_SECONDS
            if self.failing_since is None:  # else the service is not ready until it has succeeded again
                pause = max(pause, min((ended - began) / SHARE, LONGEST_PAUSE))
            await is_set_within(self._changed, pause)

    async def count(self) -> None:
        """Count once. Never raises."""
        try:
            await self._count()
        except Exception as error:
            if self.failing_since is None:
                self.failing_since = time.monotonic()
                log.warning("what metrics show of the store is not counted: %s", error)
        else:
            self.counted, self.failing_since = time.monotonic(), None

    async def _count(self) -> None:
        node = self._node
        home = node.config.node_id
        others = tuple(sorted({*node.homes.nodes} - {home})) if node.homes.leads else None
        self.services = await node.reading.query(presence.services)
        if not any(service.node_id == home for service in self.services):
            await self._announce()  # it was given up, and forgotten, while it could not be heard
        before = self._runs_open()
        counts = await node.reading.query(gauges.at_work, home, others)
        self.queues = await node.reading.query(queues.queues) if others is not None else []
        self.triage = await node.reading.query(triage.open_entries) if others is not None else {}
        open_then = (before + self._runs_open()) // 2
        began = time.monotonic()
        if began >= self._passive_due or self._passive_of != (home, others):
            self._passive = await node.reading.query(gauges.passive, home, others)
            self._passive_of = (home, others)
            self._passive_due = began + min((time.monotonic() - began) / SHARE, LONGEST_PASSIVE_PAUSE)
        self.counts, self._runs = counts, (counts.runs, open_then)

    def runs(self) -> int:
        """Live runs: as they were counted last, and what has begun or ended by this service since. Of all services
        together that is exact at any moment, which those of old numbers would not be while a backlog is worked off.
        Of one it may be less than 0 for a moment: a service also ends runs that another one counts."""
        counted, open_then = self._runs
        return counted + self._runs_open() - open_then

    def sessions(self) -> dict[str, int]:
        """Sessions by status."""
        counts, passive = self.counts.sessions, self._passive
        return {status: counts.get(status, 0) + passive.get(status, 0) for status in SESSION_STATUSES}

    def outage(self) -> float:
        """Seconds since the store works no more, for writing or for reading; 0 while it does."""
        since = self.failing_since
        return max(self._node.journal.outage.seconds(), time.monotonic() - since if since is not None else 0.0)

    def obstacle(self) -> str:
        """Why the service is not ready; empty if it is."""
        if self._node.supervisor_heard is None:
            return "no supervisor has called yet"
        seconds = self._node.journal.outage.failing()
        if seconds:
            return f"the store answers, but operations on it have failed for {seconds:.0f} s: see this service's log"
        seconds = self.outage()
        if seconds:
            return f"the store has not worked for {seconds:.0f} s"
        return "the store has not answered yet" if self.counted is None else ""

    def targets(self) -> list[dict[str, Any]]:
        """The node services that there are, as Prometheus' HTTP service discovery wants them."""
        node = self._node
        nodes = {*node.homes.nodes, node.config.node_id}
        return [
            {
                "targets": [service.address],
                "labels": {
                    "__meta_understudy_node_id": service.node_id,
                    "__meta_understudy_namespace": node.config.namespace,
                },
            }
            for service in self.services
            if service.node_id in nodes and service.address
        ]
