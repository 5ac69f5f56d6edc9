"""Tells the nodes their shares of rate limits: what is decided in `rate_shares`, is said here."""

from __future__ import annotations

import asyncio
import logging
import time

from understudy.errors import UnderstudyError
from understudy.rates import RateReport, RateShares
from understudy.tasks import Tasks
from understudy.waiting import answered_within

from .known import Known, Node
from .rate_shares import RateLedger

log = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0
"""A node that gives no answer for so long is sent its shares again after its next report."""

PAUSE_SECONDS = 0.2
"""A node is sent new shares no more often."""


class RateSharing:
    """Heeds what nodes report, and tells them what they may use. Never on a round's path."""

    def __init__(self, known: Known, tasks: Tasks) -> None:
        self._known = known
        self._tasks = tasks
        self._ledger = RateLedger(0)
        self._term = 0

    def heed(self, node: Node, report: RateReport | None) -> None:
        """A node's service has reported."""
        if report is not None:
            self._update()
            self._ledger.heard(node.handle.node_id, report, time.monotonic())
            self._look()

    def greeting(self) -> RateShares:
        """What a node is sent before it begins to act: how many nodes there are, and no share of anything."""
        self._update()
        return RateShares(self._known.announced[0], self._ledger.number(), 0.0, len(self._known.nodes))

    def _update(self) -> None:
        if self._term != self._known.term:
            self._term = self._known.term
            self._ledger = RateLedger(self._known.announced[0])
        self._ledger.between(self._known.nodes.keys(), time.monotonic())

    def _look(self) -> None:
        """Tell every node that is to have other shares."""
        for node in self._known.nodes.values():
            self._tasks.alone(("rates", node.handle.node_id), self._tell, node, self._known.term)

    async def _tell(self, node: Node, term: int) -> None:
        name = node.handle.node_id
        while self._known.serves(node, term):
            self._update()
            shares = self._ledger.due(name, time.monotonic(), self._known.announced[0])
            if shares is None:
                return
            try:
                report = await answered_within(node.handle.call("share_rates", shares), ANSWER_SECONDS)
            except (TimeoutError, UnderstudyError) as error:
                log.info("node %s did not get its shares of rate limits: %s", name[:8], error)
                return
            if report is not None and self._known.serves(node, term):
                self._ledger.heard(name, report, time.monotonic())
                self._look()
            await asyncio.sleep(PAUSE_SECONDS)
