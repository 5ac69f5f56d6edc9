"""Carries out what `scaling` decides: sessions that wait move, nodes are asked for, and those without work go."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from understudy.errors import UnderstudyError
from understudy.identifiers import new_identifier
from understudy.scaling import SCALED_DOWN, Scaling
from understudy.tasks import Tasks

from .drains import Drains
from .known import Known, Node
from .ports import Machinery, NodeReport
from .scaling import Decision, Share, Sizing, shares

log = logging.getLogger(__name__)

DRAIN_SECONDS = 24 * 3600.0
"""Long: nothing is interrupted, or done again, only to save a node."""

ASK_SECONDS = 10.0
CHANGE = "change the nodes"
"""One at a time: a node is given up, given back or taken back."""

REPORT_SECONDS = 15.0
"""So long a node that has joined is waited for. One that can't report keeps nobody else waiting."""

REPEAT_SECONDS = 30.0
"""So often a request is made again: Ray's head may have lost it."""


class Scaler:
    """Looks at the load of all nodes, once a second. It keeps nothing that its successor would miss: which nodes it has
    given up stands in the store, as the reason of their drains.

    Args:
        end: ends the services of a node that is drained, which is not welcome from then on.
        scaling: None where the number of nodes does not follow the load; then sessions only move.
    """

    def __init__(
        self, machinery: Machinery, known: Known, tasks: Tasks, drains: Drains, scaling: Scaling | None,
        end: Callable[[Node], None],
    ) -> None:  # fmt: skip
        self._machinery = machinery
        self._known = known
        self._tasks = tasks
        self._drains = drains
        self._scaling = scaling
        self._end = end
        self._sizing: Sizing | None = None
        self._requested: list[float] = []
        self._requested_at = 0.0
        self._giving_up = ""

    def begin(self, own: str) -> None:
        """A term begins: nothing was decided yet, and what a supervisor before this one has asked for is void."""
        self._giving_up, self._requested_at = "", 0.0
        if self._scaling is not None:
            self._sizing = Sizing(self._scaling, own, time.monotonic())

    def look(self) -> None:
        """Decide again. Nothing is waited for here."""
        nodes, now = self._known.nodes.values(), time.monotonic()
        if any(node.load is None and now - node.joined < REPORT_SECONDS for node in nodes):  # it has frames to spare
            return
        if any(node.drain is not None and node.drain.stop for node in nodes):  # the services are about to stop
            return
        loads = [node.load for node in nodes if node.load is not None]
        for share in shares(loads):
            self._tasks.alone(f"share {share.giver}", self._share, share)
        drained = [node for node in nodes if node.drain and node.drain.reason == SCALED_DOWN]
        if self._sizing is None:
            if drained:  # by a supervisor before this one, which had other settings
                self._tasks.alone(CHANGE, self._keep, [node.handle.node_id for node in drained])
            return
        given_up = {node.handle.node_id for node in drained} | self._known.released.keys()
        if self._giving_up:
            given_up.add(self._giving_up)
        decided = self._sizing.decide(loads, given_up, now)
        if decided.give_up:
            self._tasks.alone(CHANGE, self._give_up, decided.give_up)
        elif decided.keep:
            self._tasks.alone(CHANGE, self._keep, decided.keep)
        for node in drained if not decided.keep else ():
            if node.drain and node.drain.finished:
                self._tasks.alone(CHANGE, self._release, node)
        self._request(decided)

    async def stop(self) -> None:
        """Ask for no nodes any more: what was asked for would come, and stay, while nothing runs."""
        if self._requested:
            self._requested = []
            await self._ask([])

    async def _share(self, share: Share) -> None:
        giver, taker = self._known.nodes.get(share.giver), self._known.nodes.get(share.taker)
        if giver is None or taker is None:
            return
        try:
            async with asyncio.timeout(ASK_SECONDS):
                moved = await giver.handle.call("give", share.count, share.taker, new_identifier())
        except (UnderstudyError, TimeoutError) as error:
            log.info("node %s gives nothing away: %s", share.giver[:8], error)
            return
        taker.expects(moved)
        if moved:
            log.info("%d sessions go from node %s to %s", moved, share.giver[:8], share.taker[:8])

    async def _keep(self, node_ids: list[str]) -> None:
        for node_id in node_ids:
            try:
                await self._drains.undo(node_id, new_identifier())
            except (UnderstudyError, TimeoutError) as error:
                log.warning("node %s can't be taken back: %s", node_id[:8], error)
                continue
            self._known.released.pop(node_id, None)
            if node_id in self._known.nodes:
                self._known.nodes[node_id].drain = None
            log.warning("node %s is needed again", node_id[:8])

    async def _give_up(self, node_id: str) -> None:
        self._giving_up = node_id
        try:
            await self._drains.begin([node_id], DRAIN_SECONDS, new_identifier(), reason=SCALED_DOWN)
        except (UnderstudyError, TimeoutError) as error:
            log.warning("node %s can't be given back: %s", node_id[:8], error)
        finally:
            self._giving_up = ""

    async def _release(self, node: Node) -> None:
        """Nothing is left there: without services, which never rest to Ray, its autoscaler takes the node away.

        It is asked once more: the drain may have been taken back since it said so.
        """
        term, node_id = self._known.term, node.handle.node_id
        try:
            async with asyncio.timeout(ASK_SECONDS):
                report: NodeReport = await node.handle.call("demand", 0.0)
        except (UnderstudyError, TimeoutError) as error:
            log.info("node %s is not given back yet: %s", node_id[:8], error)
            return
        node.drain = report.drain
        over = report.drain is not None and report.drain.reason == SCALED_DOWN and report.drain.finished
        if over and not report.stays and self._known.serves(node, term):
            log.warning("node %s is given back", node_id[:8])
            self._known.released[node_id] = node.cpus
            self._end(node)

    def _request(self, decided: Decision) -> None:
        """Ask for so many nodes in all, as long as there are fewer; then for none. What there is keeps itself: its
        services never rest to Ray. A request that named these nodes would keep those that shall go."""
        more = decided.nodes - decided.serving - len(decided.keep)
        request: list[float] = []
        if more > 0:
            # Of the smallest size: one of a group that is full, or of none, would be asked for in vain.
            nodes = [node.cpus for node in self._known.nodes.values()]
            request = [*nodes, *self._known.released.values(), *([min(nodes)] * more)]
        now = time.monotonic()
        if request != self._requested or now - self._requested_at > REPEAT_SECONDS:
            if len(request) > len(self._requested):
                log.warning("%d nodes are asked for, there are %d", decided.nodes, decided.serving)
            self._requested, self._requested_at = request, now
            self._tasks.spawn(self._ask(request))

    async def _ask(self, request: list[float]) -> None:
        try:
            await asyncio.wait_for(self._machinery.request_nodes(request), ASK_SECONDS)
        except Exception as error:
            log.warning("the autoscaler can't be asked for nodes: %s", error)
            self._requested_at = 0.0
