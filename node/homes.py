"""Where sessions are at home: which nodes there are, and which of them are drained."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from understudy.identifiers import home_of
from understudy.store.operations.draining import Drain
from understudy.store.transaction import Transaction

MISSED_SECONDS = 6 * 3600.0
"""A node that is gone for so long, and in whose place no other has come, is not missed any more."""


class Homes:
    """The nodes that sessions can be at home on, as the supervisor and the store say.

    Args:
        here: this node.
        acts: whether its service acts for a supervisor.

    Attributes:
        nodes: those that have a node service, as the supervisor said last.
        drain: of this node, as the store has it; None while it is not drained.
    """

    def __init__(self, here: str, acts: Callable[[], bool]) -> None:
        self.here = here
        self._acts = acts
        self.nodes: list[str] = []
        self.drain: Drain | None = None
        self._drains: Mapping[str, Drain] = {}
        self._left: dict[str, float] = {}  # when each was gone (monotonic), the first one first

    @property
    def leads(self) -> bool:
        """Whether this service does what one of all must do: it is the first that the supervisor named."""
        return self.nodes[:1] == [self.here]

    @property
    def is_drained(self) -> bool:
        """Whether this node is drained, and acts for somebody."""
        return self.drain is not None and self._acts()

    @property
    def available(self) -> list[str]:
        """The nodes that have a service and are not drained."""
        return [node_id for node_id in self.nodes if node_id not in self._drains]

    @property
    def missing(self) -> int:
        """How many nodes left without a drain, and in whose place no other has come.

        This service knows what has happened while it lived; where several services differ the largest number is right.
        """
        now = time.monotonic()
        return sum(now - left < MISSED_SECONDS for left in list(self._left.values()))

    def elsewhere(self, node_id: str) -> bool:
        """Whether this is another node that has a service."""
        return node_id != self.here and node_id in self.nodes

    def learn_nodes(self, nodes: list[str]) -> None:
        """Which nodes have a node service, as the supervisor says. What is drained must be known beforehand or
        reported at once afterwards."""
        for node_id in self.nodes:
            if node_id not in nodes and node_id not in self._drains:
                self._left[node_id] = time.monotonic()
        for node_id in nodes if self.nodes else ():
            if node_id not in self.nodes and self._left:  # it comes back, or takes the place of the first one
                del self._left[node_id if node_id in self._left else next(iter(self._left))]
        self.nodes = list(nodes)

    def learn_drains(self, drains: Mapping[str, Drain]) -> None:
        """Which nodes are drained, as the store says."""
        self._drains = drains
        for node_id in drains:
            self._left.pop(node_id, None)
        self.drain = drains.get(self.here)

    def home_for(self, root_id: str) -> str:
        """Where a session without a home goes: it stays here, unless this node is drained and another one is not."""
        return home_of(root_id, self.available) if self.is_drained and self.available else self.here

    def take_in(self, tx: Transaction, session_id: str) -> None:
        """Give a session that is being written a home, if its own is gone or drained: this node, unless it is too.

        Not one that may be at work, with a run or about to begin one: a drained node gives it away when it can be, a
        lost one's is adopted under the generation that follows from the loss. A node that is not known here may also
        have only just joined.
        """
        row = tx.session(session_id)
        if not self.nodes or row.node_id in self.available:
            return
        rested = row.run_id is None and (session_id in tx.woken or not row.active)
        at_work = row.node_id in self.nodes or row.frame_id is not None or row.wait == "model"
        if at_work and not rested:
            return
        tx.changed(row)
        row.frame_id = row.actor_pid = None  # the frame that it rests in will not call in elsewhere
        row.node_id = self.home_for(row.root_id)
