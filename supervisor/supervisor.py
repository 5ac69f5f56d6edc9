"""The supervisor: owns the store's generation, places sessions, watches every process, replaces what dies or hangs.

It is never on a round's path. What it needs from the cluster it gets through the `Machinery` port, so this class knows
nothing of Ray. It keeps nothing that a successor could not find out: frames and node services go on without it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from understudy.errors import (
    InvalidConfiguration,
    MetricsPortTaken,
    StaleGeneration,
    StoreOwned,
    StoreUnreachable,
    UnderstudyError,
)
from understudy.identifiers import new_identifier
from understudy.profiles import check
from understudy.protocol import FrameIdentity, ServiceDirectory, ServiceProcess, unpacked
from understudy.reads import OwnerRecord
from understudy.scaling import Scaling
from understudy.tasks import Tasks
from understudy.waiting import answered_within, is_set_within

from .drains import Drains
from .known import Known, Node
from .ports import Machinery, NodeHandle
from .rate_sharing import RateSharing
from .scaler import Scaler
from .staffing import Staffing
from .stock import Stock
from .watching import PROBE_SECONDS, Watching

log = logging.getLogger(__name__)

LEASE_SECONDS = 10.0
RENEW_SECONDS = 3.0
ASK_SECONDS = 60.0
ANSWER_SECONDS = 5.0
"""How long one node service is waited for where another could do the same."""

REASSURE_SECONDS = 60.0
CENSUS_SECONDS = 1.0
LOST_SECONDS = 10.0
"""A node whose service was not heard of for so long is lost, whatever Ray says: a service restarts in less."""

FENCE = "fence"
"""The change of the generation after a loss."""


class Supervisor:
    """One per cluster.

    Guarantees: it acts only while it owns the store (generation and lease); a frame or node service that dies is
    replaced, one that hangs is killed first; sessions are resumed only after their process is known to be gone. A node
    that is lost is the exception: nobody can say what became of its processes, so they are fenced (`_lose`).
    """

    def __init__(
        self,
        machinery: Machinery,
        holder: str,
        *,
        standby: int,
        max_actors: int | None,
        profiles: list[Any] | None = None,
        scaling: Scaling | None = None,
    ) -> None:
        self.machinery = machinery
        self.holder = holder
        self.standby = standby
        self.max_actors = max_actors
        self.generation = 0
        self.state = "starting"
        self.problem: UnderstudyError | None = None
        self.last_beat = time.monotonic()
        self.profiles: dict[str, Any] = {profile.name: profile for profile in profiles or []}
        self._joining: set[str] = set()
        self._numbers = 0
        self._reassured = time.monotonic()
        self._failure: Exception | None = None
        self._ready = asyncio.Event()
        self._known = Known()
        self._tasks = Tasks(log)
        self._watching = Watching(machinery, self._known, self._tasks, self._take_over_node)
        self._rates = RateSharing(self._known, self._tasks)
        self._staffing = Staffing(
            machinery, self._known, self._tasks, self._watching, self._rates, standby, self._take_over_node
        )
        self.drains = Drains(self._ask, self._tell_all, lambda: list(self._known.nodes))
        self._scaler = Scaler(machinery, self._known, self._tasks, self.drains, scaling, self._lose)

    async def run(self) -> None:
        """Supervise until `stop`. Waits while another cluster owns the store."""
        self._tasks.spawn(self._beat())
        while not self._known.stopped:
            try:
                await self._start()
                await self._tending()
            except StaleGeneration as error:
                log.warning("lost the store: %s", error)
                self.problem = error
            except StoreOwned as error:
                self.problem = error
            except UnderstudyError as error:
                log.warning("can't supervise yet: %s", error)
                self.problem = error
            except Exception as error:
                log.exception("can't supervise yet")
                self.problem = UnderstudyError.of(error)
            if self._ready.is_set():
                self._reassured = time.monotonic()
            self.state = "waiting"
            self._ready.clear()
            await asyncio.sleep(1.0)

    async def ready(self, timeout: float) -> ServiceDirectory:
        """Wait until it supervises; returns the directory of services.

        Raises:
            StoreOwned: another cluster owns the store. Raised early: if that were dead, its lease would have been over.
            MetricsPortTaken: raised early as well, since the node service has waited for its port.
            UnderstudyError: what kept it from starting.
        """
        began = time.monotonic()
        while not self._ready.is_set():
            waited = time.monotonic() - began
            is_early = isinstance(self.problem, (StoreOwned, MetricsPortTaken))
            left = (min(timeout, 2 * LEASE_SECONDS) if is_early else timeout) - waited
            if left <= 0:
                raise self.problem or UnderstudyError(f"the supervisor is still starting after {timeout:.0f} s")
            await is_set_within(self._ready, min(0.25, left))
        return self.directory()

    def directory(self) -> ServiceDirectory:
        """Who runs where."""
        return ServiceDirectory(
            self.generation,
            self.state,
            [ServiceProcess(node.handle.node_id, node.handle.pid) for node in self._known.nodes.values()],
            [FrameIdentity(f.frame_id, f.pid, f.node_id, f.placement) for f in self._known.frames.values()],
            self.problems(),
        )

    def problems(self) -> dict[str, str]:
        """Placements that no frame can be started for, and why."""
        return {name: reason for node in self._known.nodes.values() for name, reason in node.stock.failures.items()}

    def want(self, placement: str) -> None:
        """Keep standbys for this placement from now on; the store has what they need."""
        self._staffing.want(placement)

    async def register(self, profile: Any) -> None:
        """Learn a model profile and tell the node services. Its credentials stay in their memory.

        Raises:
            InvalidConfiguration: it can't be used (`profiles.check`); no node service gets it.
        """
        check(profile)
        self.profiles[profile.name] = profile = profile.after(self.profiles.get(profile.name))
        calls = [
            asyncio.wait_for(node.handle.call("register", profile), ANSWER_SECONDS)
            for node in self._known.nodes.values()
        ]
        await asyncio.gather(*calls, return_exceptions=True)  # one without an answer gets it at its takeover

    async def stop(self) -> None:
        """Give the store up, as far as it can be reached within 5 s; nothing is killed."""
        self._known.stopped, self.state = True, "stopped"
        self._ready.clear()
        self._tasks.cancel()
        await self._scaler.stop()
        try:
            await asyncio.wait_for(self._renew(0), 5.0)
        except Exception as error:
            log.warning("the store could not be given up: %s", error)

    async def _ask(self, method: str, *arguments: Any) -> Any:
        """Have a node service do what any of them could do: one after the other until one answers."""
        deadline = time.monotonic() + ASK_SECONDS
        turn = 0  # so many have been asked
        while self._known.nodes and time.monotonic() < deadline:
            node = list(self._known.nodes.values())[turn % len(self._known.nodes)]
            turn += 1
            try:
                return await asyncio.wait_for(node.handle.call(method, *arguments), ANSWER_SECONDS)
            except TimeoutError:
                continue
            except StoreUnreachable:  # from its machine; from others it may be reached
                if turn >= len(self._known.nodes):
                    raise
        raise UnderstudyError(f"no node service has an answer to {method}")

    async def _start(self) -> None:
        """Take the next generation, adopt what lives, resume what does not."""
        own, *others = await self.machinery.node_ids()
        first = await self.machinery.node_service(own)
        self._tasks.alone("reassure", self._reassuring)
        alive = self._tasks.spawn(_say_alive(first))
        try:
            await self._take_over(first, own, others)
        finally:
            alive.cancel()

    async def _reassuring(self) -> None:
        """Until it supervises, probe the frames now and then: those that no supervisor calls for long end themselves,
        and this one may have to wait for the store longer than that. Not while another cluster owns the store: they are
        over then."""
        while not await is_set_within(self._ready, self._reassured + REASSURE_SECONDS - time.monotonic()):
            self._reassured = time.monotonic()
            if isinstance(self.problem, StoreOwned):
                continue
            try:
                for node_id in await self.machinery.node_ids():
                    frames = await self.machinery.frames(node_id)
                    probes = [answered_within(frame.probe(), ANSWER_SECONDS) for frame in frames]
                    await asyncio.gather(*probes, return_exceptions=True)
            except Exception as error:
                log.warning("the session actors can't be probed: %s", error)

    async def _take_over(self, first: NodeHandle, own: str, others: list[str]) -> None:
        done = await first.call("request", "read", "owner", [], {})
        owner: OwnerRecord | None = unpacked(done, OwnerRecord | None, "what was read of owner")
        may_take = owner is None or self.machinery.holder_is_dead(owner.holder)
        dead = owner.holder if owner is not None and may_take else ""
        wanted = (self.holder, int(LEASE_SECONDS * 1e6), dead, new_identifier())
        self.generation = await first.call("acquire", *wanted)
        log.info("generation %d", self.generation)
        self._tasks.drop_alone()
        self._tasks.alone("reassure", self._reassuring)  # which that has ended as well
        self._failure = None
        self._known.begin()
        self._scaler.begin(own)
        await self._join(own)
        joined = [answered_within(self._join(node_id), LOST_SECONDS) for node_id in others]
        await asyncio.gather(*joined, return_exceptions=True)  # the census tries again those that are late
        self._known.announced = self.generation, list(self._known.nodes)
        await self._take_over_node(self._known.nodes[own])
        for node_id, node in self._known.nodes.items():
            if node_id != own:
                self._tasks.spawn(self._take_over_node(node))
            self._attend(node)
        self._tasks.spawn(self._watching.probing(self._known.term))
        self.state, self.problem = "supervising", None
        self._ready.set()

    async def _join(self, node_id: str) -> None:
        """Make a node part of the cluster: start its service if there is none, adopt its frames."""
        term = self._known.term
        handle = await self.machinery.node_service(node_id)
        frames = await self.machinery.frames(node_id)
        if term != self._known.term:
            return
        cpus = self.machinery.cpus(node_id)
        self._known.nodes[node_id] = Node(handle, cpus, Stock(cpus, self.max_actors, self.standby))
        for frame in frames:
            self._known.frames[frame.frame_id] = frame
            self._tasks.spawn(self._watching.watch_frame(frame, term))

    def _attend(self, node: Node) -> None:
        self._tasks.spawn(self._watching.watch_node(node, self._known.term))
        self._tasks.spawn(self._staffing.serve_demand(node, self._known.term))

    async def _take_over_node(self, node: Node) -> None:
        """Tell a node service whom it acts for, beside whom, and which credentials there are."""
        await node.handle.meet()
        learned = [profile for profile in await node.handle.call("profiles") if profile.name not in self.profiles]
        self.profiles.update((profile.name, profile) for profile in learned)
        await self._inform(node, list(self.profiles.values()))
        for other in [*self._known.nodes.values()] if learned else ():  # its services may have died with this one's
            if other is not node:
                self._tasks.spawn(self._inform(other, learned))
        await node.handle.call("share_rates", self._rates.greeting())
        generation, nodes = self._known.announced
        if self._tasks.under_way(FENCE) or node.handle.node_id not in nodes:  # its turn is with the next generation
            return
        self._numbers += 1
        found = await node.handle.call("take_over", generation, self._numbers, nodes)
        node.heard = time.monotonic()
        log.info("node %s: %s", node.handle.node_id[:8], found)

    async def _inform(self, node: Node, profiles: Iterable[Any]) -> None:
        """Tell a node service which credentials there are."""
        for profile in profiles:
            try:
                await node.handle.call("register", profile)
            except InvalidConfiguration as error:  # its sessions get the error when they call a model; others go on
                log.warning("model profile %s is refused: %s", profile.name, error)

    async def _tell_all(self) -> None:
        """Have all node services look at what the store says of nodes; one without an answer does so with its sweep."""
        calls = [asyncio.wait_for(self._take_over_node(node), ANSWER_SECONDS) for node in self._known.nodes.values()]
        await asyncio.gather(*calls, return_exceptions=True)

    async def _tending(self) -> None:
        """Keep the lease, and notice which nodes come and go. Nothing that may take long is waited for here."""
        renewed = time.monotonic()
        while not self._known.stopped:
            slept = time.monotonic()
            await asyncio.sleep(CENSUS_SECONDS)
            if self.state == "stopped":
                return
            if self._failure is not None:
                raise self._failure
            if time.monotonic() - slept > LOST_SECONDS / 3:  # it stood still itself: what it did not hear tells nothing
                for node in self._known.nodes.values():
                    node.heard = time.monotonic()
            if time.monotonic() - renewed >= RENEW_SECONDS:
                renewed = time.monotonic()
                self._tasks.alone("renew", self._keep)
            await self._census()

    async def _keep(self) -> None:
        """Renew the lease."""
        generation = self.generation
        try:
            await self._renew(LEASE_SECONDS)
        except StaleGeneration as error:
            own_doing = generation != self.generation or self._tasks.under_way(FENCE)
            self._failure = self._failure if own_doing else error
        except UnderstudyError as error:
            log.warning("the lease could not be renewed: %s", error)

    async def _renew(self, lease: float) -> None:
        await self._ask("request", "renew", self.generation, self.holder, int(lease * 1e6))

    async def _census(self) -> None:
        """Compare the nodes that there are with those that have a service."""
        try:
            own, *others = await asyncio.wait_for(self.machinery.node_ids(), RENEW_SECONDS)
            notices = await asyncio.wait_for(self.machinery.notices(), RENEW_SECONDS)
        except Exception as error:  # Ray's head is away: nothing can be said about nodes
            log.warning("the nodes are unknown: %s", error)
            return
        for node in list(self._known.nodes.values()):
            gone = node.handle.node_id not in others
            if node.handle.node_id != own and (gone or time.monotonic() - node.heard > LOST_SECONDS):
                log.warning("node %s is lost", node.handle.node_id[:8])
                self._lose(node)
        for node_id in self._known.released.keys() - set(others):
            del self._known.released[node_id]
        for node_id in set(others) - self._known.nodes.keys() - self._joining - self._known.released.keys():
            self._tasks.spawn(self._welcome(node_id))
        if notices:
            self._tasks.spawn(self.drains.heed(notices))
        self._scaler.look()

    def _lose(self, node: Node) -> None:
        """A node is gone, or cut off, or was drained and is given back: the others adopt what is left there.

        If it is only cut off its processes may live on. That is harmless: under the next generation its service
        activates nothing more, and with its next activation elsewhere a session has an epoch under which its old frame
        can commit nothing, so it can start no tool either (that takes a commit), and model calls are not its own. Only
        what it was allowed to start before may still begin: those sessions wait until that lease is over.
        """
        node_id = node.handle.node_id
        del self._known.nodes[node_id]
        lost = [frame for frame in self._known.frames.values() if frame.node_id == node_id]
        for frame in lost:
            del self._known.frames[frame.frame_id]
            self._known.well.pop(frame.frame_id, None)
        self.machinery.abandon(node.handle, lost)
        self._tasks.alone(FENCE, self._fence, self._known.term)

    async def _fence(self, term: int) -> None:
        """Take the next generation, and tell the nodes that are left. One that is lost meanwhile is left out."""
        wanted = (self.holder, int(LEASE_SECONDS * 1e6), self.holder, new_identifier())
        try:
            generation = await self._ask("acquire", *wanted)
        except Exception as error:
            self._failure = error
            return
        if term != self._known.term:
            return
        self.generation = generation
        self._known.announced = generation, list(self._known.nodes)
        self._tasks.over(FENCE)
        for other in self._known.nodes.values():
            self._tasks.spawn(self._take_over_node(other))

    async def _welcome(self, node_id: str) -> None:
        """A node has come, or come back.

        It learns whom it acts for under the next generation only: one that has not heard of it yet would take what is
        at work there for a lost node's, and can no longer.
        """
        term = self._known.term
        self._joining.add(node_id)
        try:
            await self._join(node_id)
        except Exception as error:
            log.warning("node %s can't join yet: %s", node_id[:8], error)
            return
        finally:
            self._joining.discard(node_id)
        if term == self._known.term and node_id in self._known.nodes:
            self._tasks.alone(FENCE, self._fence, term)
            self._attend(self._known.nodes[node_id])

    async def _beat(self) -> None:
        while True:
            self.last_beat = time.monotonic()
            await asyncio.sleep(0.5)


async def _say_alive(service: NodeHandle) -> None:
    """Probe the service of the supervisor's own machine until all are probed: it would take one for hung that must wait
    for others while it starts, and kill it."""
    while True:
        with suppress(Exception):  # it is not there yet, or no more: the start itself fails then
            await service.probe()
        await asyncio.sleep(PROBE_SECONDS)
