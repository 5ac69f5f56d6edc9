"""Keeping each node's frames in step with its demand."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable

from understudy.identifiers import new_identifier
from understudy.placement import is_scarce
from understudy.tasks import Tasks

from .known import Known, Node
from .pool import Demand
from .ports import Machinery, NodeReport
from .rate_sharing import RateSharing
from .scaling import NodeLoad
from .watching import Watching

log = logging.getLogger(__name__)

DEMAND_SECONDS = 5.0
WANTED_SECONDS = 3600.0
"""A placement that no session used for so long has no standbys any more, until it is wanted again."""


class Staffing:
    """Starts frames and lets them go, as `Stock` decides.

    Args:
        standby: frames of each wanted placement that stand by.
        take_over: tells a node service what it needs that does not act for this supervisor yet.
    """

    def __init__(
        self, machinery: Machinery, known: Known, tasks: Tasks, watching: Watching, rates: RateSharing, standby: int,
        take_over: Callable[[Node], Awaitable[None]],
    ) -> None:  # fmt: skip
        self._machinery = machinery
        self._known = known
        self._tasks = tasks
        self._watching = watching
        self._rates = rates
        self._standby = standby
        self._take_over = take_over
        self._wanted: dict[str, int] = {"": standby}
        self._used: dict[str, float] = {}

    def want(self, placement: str) -> None:
        """Keep standbys for this placement from now on; the store has what they need."""
        self._used[placement] = time.monotonic()
        if placement not in self._wanted:
            self._wanted[placement] = self._standby
            for node in self._known.nodes.values():
                self._tasks.spawn(self._balance_now(node))

    async def serve_demand(self, node: Node, term: int) -> None:
        """Keep a node's pool in step with its demand."""
        patience = 0.0  # what it is like at first is asked for at once
        while self._known.serves(node, term):
            try:
                report: NodeReport = await node.handle.call("demand", patience, node.stock.cap)
                patience = DEMAND_SECONDS
                if not self._known.serves(node, term):
                    return
                # Restarted unnoticed (a `take_over` is repeated too, so the next process can have heard it without all
                # that comes before it), or it did not hear who joined.
                known = (node.handle.pid, *self._known.announced)
                if (report.pid, report.generation, report.nodes) != known:
                    await self._take_over(node)
                self._watching.heed(node, report)
                self._rates.heed(node, report.rates)
                if report.memory is not None:
                    node.stock.measured(report.memory, time.monotonic())
                node.drain, node.load = report.drain, load_of(node, report)
                if report.drain is None:
                    await self._balance(node, report.demand)
            except Exception as error:
                log.warning("demand of node %s unknown: %s", node.handle.node_id[:8], error)
                await asyncio.sleep(0.5)

    async def _balance(self, node: Node, demand: dict[str, Demand]) -> None:
        stock, now = node.stock, time.monotonic()
        known = {frame_id for row in demand.values() for frame_id in row.frames}
        arriving = Counter(placement for frame_id, placement in stock.starting.items() if frame_id not in known)
        for frame in self._known.frames.values():  # alive, but has not called in yet
            if frame.node_id == node.handle.node_id and frame.frame_id not in known:
                arriving[frame.placement] += 1
        self._forget_unused(demand, now)
        decided = stock.decide(demand, arriving, self._wanted, now)
        for placement in node.turns.keys() - demand.keys() - self._wanted.keys() - set(stock.starting.values()):
            del node.turns[placement]
        for placement, count in decided.create.items():
            for _ in range(count):
                frame_id = new_identifier()[-12:]
                stock.starting[frame_id] = placement
                self._tasks.spawn(self._create_frame(node, frame_id, placement))
        if decided.retire or node.leaving:
            node.leaving = decided.retire
            await node.handle.call("retire", decided.retire)

    def _forget_unused(self, demand: dict[str, Demand], now: float) -> None:
        """What sessions of this node use is wanted; the rest was, until nobody has used it for long."""
        used = [name for name, row in demand.items() if row.ready or row.acting or row.waiting]
        self._used.update(dict.fromkeys(self._wanted.keys() & used, now))
        for placement in [name for name, at in self._used.items() if name and now - at > WANTED_SECONDS]:
            del self._used[placement], self._wanted[placement]

    async def _balance_now(self, node: Node) -> None:
        report: NodeReport = await node.handle.call("demand", 0.0)
        if report.drain is None:
            await self._balance(node, report.demand)

    async def _create_frame(self, node: Node, frame_id: str, placement: str) -> None:
        term = self._known.term
        # A process start costs a second of a CPU: all at once they would take what the sessions at work need.
        turn = node.turns.setdefault(placement, asyncio.Semaphore(max(1, int(node.cpus / 2))))
        try:
            async with turn:
                if not self._known.serves(node, term):
                    return
                frame = await self._machinery.create_frame(node.handle, frame_id, placement)
            if node.stock.started(placement):
                self._tasks.spawn(node.handle.call("unschedulable", dict(node.stock.failures)))
        except Exception as error:
            log.warning("a frame of placement %s could not be created: %s", placement or "(default)", error)
            node.stock.failed(placement, str(error), time.monotonic())
            self._tasks.spawn(node.handle.call("unschedulable", dict(node.stock.failures)))
            return
        finally:
            del node.stock.starting[frame_id]
        if term == self._known.term and not self._known.serves(node, term):
            log.warning("node %s was lost while a frame was created there", node.handle.node_id[:8])
            # It knows the service of before only, and would never call in, but be counted as if it were about to.
            await self._machinery.kill(node.handle.node_id, frame.pid, frame)
            return
        self._known.frames[frame.frame_id] = frame
        self._tasks.spawn(self._watching.watch_frame(frame, self._known.term))


def load_of(node: Node, report: NodeReport) -> NodeLoad:
    """What a node has to do, as its service reports."""
    rows = [row for name, row in report.demand.items() if not is_scarce(name)]
    return NodeLoad(
        node.handle.node_id,
        node.cpus,
        node.stock.cap,
        busy=sum(row.acting for row in rows),
        ready=sum(row.ready for row in rows),
        oldest=max((row.oldest for row in rows), default=0.0),
        stays=report.stays,
        drained=report.drain is not None,
    )
