"""How many nodes a cluster should have, and which sessions move to another: pure functions of what the nodes report.

A node is added when sessions wait for a frame that no node has, and is given back when the others could do its work for
long enough. Before either, what one node can't take at once goes to another that can. All times are seconds of one
clock that never goes back.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from understudy.scaling import Scaling

SHARE_SECONDS = 1.0
"""A session that has waited so long for a frame may go to another node: frames of its own start sooner than that."""

LOW = 0.6
"""A node is given back when its work would fill no more than this share of the frames that are left."""


@dataclass(frozen=True)
class NodeLoad:
    """What a node has to do. Sessions that ask for resources or labels do not count: their frames are anywhere.

    Attributes:
        cpus: of the node.
        cap: the most frames it may have.
        busy: frames at work.
        ready: sessions that wait for a frame.
        oldest: seconds that one of these has waited, the longest of all.
        stays: something runs there that would be lost with the node, such as a command in the background.
        drained: it gives its sessions away, or has.
    """

    node_id: str
    cpus: float
    cap: int
    busy: int = 0
    ready: int = 0
    oldest: float = 0.0
    stays: bool = False
    drained: bool = False

    @property
    def spare(self) -> int:
        """Sessions that it could take besides those that wait there."""
        return 0 if self.drained else max(0, self.cap - self.busy - self.ready)

    @property
    def excess(self) -> int:
        """Sessions that wait there, and that it has no frame for."""
        return min(self.ready, max(0, self.busy + self.ready - self.cap))


@dataclass(frozen=True)
class Share:
    """So many sessions that wait for a frame go from one node to another."""

    count: int
    giver: str
    taker: str


def shares(loads: Sequence[NodeLoad]) -> list[Share]:
    """Which nodes give sessions away that they have no frame for, to those that have one. Who waits longest goes first.

    A node that is drained gives away what it has by itself.
    """
    spare = {load.node_id: load.spare for load in loads if load.spare}
    found = []
    for load in sorted(loads, key=lambda load: (-load.oldest, load.node_id)):
        excess = load.excess if load.oldest >= SHARE_SECONDS and not load.drained else 0
        while excess and spare:
            taker = max(sorted(spare), key=lambda node_id: spare[node_id])
            count = min(excess, spare[taker])
            found.append(Share(count, load.node_id, taker))
            excess -= count
            spare[taker] -= count
            if not spare[taker]:
                del spare[taker]
    return found


@dataclass(frozen=True)
class Decision:
    """What should change.

    Attributes:
        nodes: how many there should be.
        serving: how many there are that are not drained.
        keep: nodes to take back that were given up and are still there.
        give_up: a node to drain and then give back; empty for none.
    """

    nodes: int
    serving: int
    keep: list[str] = field(default_factory=list)
    give_up: str = ""


class Sizing:
    """Decides how many nodes there should be, from one report to the next. No I/O, no clock of its own.

    Args:
        own: the node that is never given up: the supervisor's.
    """

    def __init__(self, scaling: Scaling, own: str, now: float) -> None:
        self._scaling = scaling
        self._own = own
        self._wanted = 0
        self._changed = now
        self._low_since: float | None = None

    def decide(self, loads: Sequence[NodeLoad], given_up: Collection[str], now: float) -> Decision:
        """What should change now.

        Args:
            loads: of all nodes that have a service.
            given_up: nodes that this decided to give back, drained or about to be, and that the cluster still has.
        """
        serving = [load for load in loads if not load.drained and load.node_id not in given_up]
        count = len(serving)
        short = self._short(serving)
        if not short:
            self._wanted = count
        elif now - self._changed >= self._scaling.up_after or count > self._wanted:
            more = math.ceil(short / max(1.0, sum(load.cap for load in serving) / count))
            wanted = min(self._scaling.most, count + more)
            if wanted > self._wanted:
                self._wanted, self._changed = wanted, now
        # There may be more than the limit says, but no more are asked for when some of these go.
        wanted = max(self._scaling.least, min(self._wanted, max(self._scaling.most, count)))
        if wanted > count:
            self._low_since = None
            return Decision(wanted, count, sorted(given_up)[: wanted - count])
        if given_up or short or not self._is_low(serving, now):  # one at a time
            return Decision(wanted, count)
        self._changed, self._low_since = now, None
        return Decision(count - 1, count, give_up=self._weakest(serving))

    def _short(self, serving: Sequence[NodeLoad]) -> int:
        """How many sessions have waited for long, and find no frame anywhere."""
        late = sum(load.excess for load in serving if load.oldest >= self._scaling.up_after)
        return max(0, late - sum(load.spare for load in serving))

    def _is_low(self, serving: Sequence[NodeLoad], now: float) -> bool:
        """Whether the others have been able to do the work of the weakest node for long, and nothing has changed."""
        weakest = self._weakest(serving)
        left = sum(load.cap for load in serving if load.node_id != weakest)
        busy = sum(load.busy + load.ready for load in serving)
        if not weakest or len(serving) <= self._scaling.least or busy > LOW * left:
            self._low_since = None
            return False
        if self._low_since is None:
            self._low_since = now
        return now - max(self._low_since, self._changed) >= self._scaling.down_after

    def _weakest(self, serving: Sequence[NodeLoad]) -> str:
        """The node that has least to do, of those that can go; empty if there is none."""
        others = [load for load in serving if load.node_id != self._own and not load.stays]
        weakest = min(others, key=lambda load: (load.busy + load.ready, load.cap, load.node_id), default=None)
        return weakest.node_id if weakest is not None else ""
