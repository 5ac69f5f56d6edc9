"""What the supervisor needs of a cluster, as Protocols: it knows nothing of Ray."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, Protocol

import msgspec

from understudy.rates import RateReport

from .capacity import Memory
from .pool import Demand

ADOPT_SECONDS = 4.0
"""A frame that is adopted is waited for no longer; well below the time after which a node counts as lost."""


class DrainReport(msgspec.Struct):
    """A node is drained: why, whether nothing is left there, and whether all services are about to stop."""

    reason: str
    finished: bool
    stop: bool = False


class NodeReport(msgspec.Struct):
    """What a node service tells its supervisor of itself.

    Attributes:
        pid: of its process.
        generation, nodes: whom it acts for, and beside whom; 0 and none before a supervisor has said so.
        drain: None while it is not drained.
        demand: per placement.
        condemned: frames that the supervisor shall kill.
        named: all frames that are known there, with their pids (0: not known, or another machine's).
        memory: None where it was not measured.
        rates: how the rate limits of endpoints are used there; None before its gateway has said so.
        stays: something runs there that would be lost with the node, such as a command in the background.
    """

    pid: int
    generation: int
    nodes: list[str]
    drain: DrainReport | None = None
    demand: dict[str, Demand] = {}
    condemned: list[str] = []
    named: dict[str, int] = {}
    memory: Memory | None = None
    rates: RateReport | None = None
    stays: bool = False


class TakenOver(msgspec.Struct):
    """What a node service found when it began to act for a supervisor: sessions at work at home there, how many of them
    it resumed, and how many had no home before."""

    active: int = 0
    resumed: int = 0
    adopted: int = 0


class FrameHandle(Protocol):
    """A session actor, seen from outside."""

    frame_id: str
    node_id: str
    placement: str
    pid: int

    async def watch(self) -> str:
        """Return why it left, or raise when its process is gone."""

    async def probe(self) -> dict[str, float]:
        """Its health (`Frame.health`)."""


class NodeHandle(Protocol):
    """A node service, seen from outside."""

    node_id: str
    pid: int

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call one of its methods; waits for a restart if it is just dying."""

    async def meet(self) -> None:
        """Learn the pid of the process that it is now."""

    async def watch(self) -> None:
        """Raise when its process is gone."""

    async def probe(self) -> dict[str, float]:
        """Seconds since its event loop and its journal turned, and since its operations fail though the store
        answers: `{"silent", "journal", "failing"}`."""


class Machinery(Protocol):
    """What a cluster must be able to do for its supervisor."""

    async def node_ids(self) -> list[str]:
        """The nodes that should have a service and are not known to be gone; the supervisor's own first."""

    async def notices(self) -> dict[str, float | None]:
        """Nodes that the cluster will end, with the seconds until then; None where it does not say when."""

    async def node_service(self, node_id: str) -> NodeHandle:
        """The service of a node, started if there is none; returns when it answers."""

    async def frames(self, node_id: str, known: Container[str] = ()) -> Sequence[FrameHandle]:
        """The frames of a node that have a process, whoever created them, but for those known. Their pids are known,
        also of those that give no answer within `ADOPT_SECONDS`: these may be well, or have to be killed."""

    async def frame_ids(self, node_id: str) -> set[str]:
        """The ids of the node's frames that the cluster knows: one that did run and is not among them is dead."""

    async def create_frame(self, node: NodeHandle, frame_id: str, placement: str) -> FrameHandle:
        """Start a frame; returns when it is ready."""

    async def kill(self, node_id: str, pid: int, handle: Any) -> bool:
        """Have a process ended; whether it is known to be gone. One whose machine is not reached may live on.

        Args:
            pid: on that node's machine; 0 if it is not known, or may be another machine's.
            handle: of the frame or node service; None if the cluster has none any more.
        """

    def abandon(self, node: NodeHandle, frames: Sequence[FrameHandle]) -> None:
        """Have the processes of a lost node ended as far as they can still be reached; waits for nothing."""

    async def request_nodes(self, cpus: list[float]) -> None:
        """Have the cluster come to have nodes of so many CPUs each at least, all of its nodes counted, in place of what
        was asked for before; with none nothing is asked for. Whether and when it does is the cluster's business."""

    def cpus(self, node_id: str) -> float:
        """CPUs of a node."""

    def holder_is_dead(self, holder: str) -> bool:
        """Whether the owner that wrote `holder` is certainly gone."""
