"""What the supervisor knows of the cluster: its nodes and their frames."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace

from .ports import DrainReport, FrameHandle, NodeHandle
from .scaling import NodeLoad
from .stock import Stock


@dataclass
class Node:
    """A node that has a service.

    Attributes:
        turns: who may create a frame of a placement now.
        leaving: how many frames of each placement were asked to leave when they rest.
        ending: frames whose deaths are being reported to this service.
        load: as it was reported last; None before the first report.
        drain: the same, of its drain.
    """

    handle: NodeHandle
    cpus: float
    stock: Stock
    turns: dict[str, asyncio.Semaphore] = field(default_factory=dict)
    leaving: dict[str, int] = field(default_factory=dict)
    ending: set[str] = field(default_factory=set)
    heard: float = field(default_factory=lambda: time.monotonic())
    joined: float = field(default_factory=lambda: time.monotonic())
    load: NodeLoad | None = None
    drain: DrainReport | None = None

    def expects(self, sessions: int) -> None:
        """So many sessions come here that wait for a frame: until the next report they count as here."""
        if self.load is not None:
            self.load = replace(self.load, ready=self.load.ready + sessions)


class Known:
    """Nodes and frames, as they were found when the current term began, and what has become of them since.

    Attributes:
        term: rises with each start; what began in an earlier one is void.
        released: the CPUs of nodes that were given back, and that the cluster still has: they get no service.
        well: when each frame was last known to be well (monotonic).
        stopped: nothing is restarted any more.
        announced: the generation, and the nodes that act for it: both change together.
    """

    def __init__(self) -> None:
        self.term = 0
        self.nodes: dict[str, Node] = {}
        self.frames: dict[str, FrameHandle] = {}
        self.released: dict[str, float] = {}
        self.well: dict[str, float] = {}
        self.announced = (0, list[str]())
        self.stopped = False

    def begin(self) -> None:
        """A term begins: nothing is known."""
        self.term += 1
        self.nodes, self.frames, self.released, self.well = {}, {}, {}, {}

    def serves(self, node: Node, term: int) -> bool:
        """Whether the node is still part of the cluster that was found when this term began."""
        return term == self.term and self.nodes.get(node.handle.node_id) is node

    def frames_of(self, node: Node) -> set[str]:
        """All frames that are watched, and those of this node that are about to be, or whose deaths are reported."""
        return {*self.frames, *node.stock.starting, *node.ending}
