"""The supervisor: owns the store's generation, places sessions, watches every process, replaces what dies or hangs.

It is never on a round's path. What it needs from the cluster it gets through the `Machinery` port, so this class knows
nothing of Ray. It keeps nothing that a successor could not find out: frames and node services go on without it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from understudy.errors import StaleGeneration, StoreOwned, UnderstudyError
from understudy.identifiers import new_identifier
from understudy.waiting import answered_within, is_set_within

from .drains import Drains
from .pool import Demand
from .ports import FrameHandle, Machinery, NodeHandle, NodeReport
from .probing import frame_hangs, node_hangs
from .stock import Stock

log = logging.getLogger(__name__)

LEASE_SECONDS = 10.0
RENEW_SECONDS = 3.0
ASK_SECONDS = 60.0
ANSWER_SECONDS = 5.0
"""How long one node service is waited for where another could do the same."""

ANNOUNCE_SECONDS = 1.0
"""How long the kill of a silent frame waits for its node's service to hear why."""

CENSUS_SECONDS = 1.0
LOST_SECONDS = 10.0
"""A node whose service was not heard of for so long is lost, whatever Ray says: a service restarts in less."""

REPEAT_SECONDS = 0.5
PROBE_SECONDS = 2.0
DEMAND_SECONDS = 5.0
WANTED_SECONDS = 3600.0
"""A placement that no session used for so long has no standbys any more, until it is wanted again."""


FENCE = "fence"
"""The change of the generation after a loss."""


@dataclass
class _Node:
    """A node that has a service.

    Attributes:
        turns: who may create a frame of a placement now.
        leaving: how many frames of each placement were told to leave when they rest.
        ending: frames whose deaths are being told to this service.
    """

    handle: NodeHandle
    cpus: float
    stock: Stock
    turns: dict[str, asyncio.Semaphore] = field(default_factory=dict)
    leaving: dict[str, int] = field(default_factory=dict)
    ending: set[str] = field(default_factory=set)
    heard: float = field(default_factory=lambda: time.monotonic())


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
        self._wanted: dict[str, int] = {"": standby}
        self._used: dict[str, float] = {}
        self._term = 0
        self._joining: set[str] = set()
        self._nodes: dict[str, _Node] = {}
        self._told = (0, list[str]())  # the generation, and the nodes that act for it: both change together
        self._numbers = 0
        self._frames: dict[str, FrameHandle] = {}
        self._well: dict[str, float] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._under_way: dict[Any, asyncio.Task[Any]] = {}
        self._failure: Exception | None = None
        self._ready = asyncio.Event()
        self._stopped = False
        self.drains = Drains(self._ask, self._tell_all, lambda: list(self._nodes))

    async def run(self) -> None:
        """Supervise until `stop`. Waits while another cluster owns the store."""
        self._spawn(self._beat())
        while not self._stopped:
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
            self.state = "waiting"
            self._ready.clear()
            await asyncio.sleep(1.0)

    async def ready(self, timeout: float) -> dict[str, Any]:
        """Wait until it supervises; returns the directory of services.

        Raises:
            StoreOwned: another cluster owns the store. Told early: if that were dead, its lease would have been over.
            UnderstudyError: what kept it from starting.
        """
        began = time.monotonic()
        while not self._ready.is_set():
            waited = time.monotonic() - began
            left = (min(timeout, 2 * LEASE_SECONDS) if isinstance(self.problem, StoreOwned) else timeout) - waited
            if left <= 0:
                raise self.problem or UnderstudyError(f"the supervisor is still starting after {timeout:.0f} s")
            await is_set_within(self._ready, min(0.25, left))
        return self.directory()

    def directory(self) -> dict[str, Any]:
        """Who runs where."""
        return {
            "generation": self.generation,
            "state": self.state,
            "nodes": [{"node_id": n.handle.node_id, "pid": n.handle.pid} for n in self._nodes.values()],
            "frames": [
                {"frame_id": f.frame_id, "pid": f.pid, "node_id": f.node_id, "placement": f.placement}
                for f in self._frames.values()
            ],
            "problems": self.problems(),
        }

    def problems(self) -> dict[str, str]:
        """Placements that no frame can be started for, and why."""
        return {name: reason for node in self._nodes.values() for name, reason in node.stock.failures.items()}

    def want(self, placement: str) -> None:
        """Keep standbys for this placement from now on; the store has what they need."""
        self._used[placement] = time.monotonic()
        if placement not in self._wanted:
            self._wanted[placement] = self.standby
            for node in self._nodes.values():
                self._spawn(self._balance_now(node))

    async def register(self, profile: Any) -> None:
        """Learn a model profile and tell the node services. Its credentials stay in their memory."""
        self.profiles[profile.name] = profile = profile.after(self.profiles.get(profile.name))
        told = [
            asyncio.wait_for(node.handle.call("register", profile), ANSWER_SECONDS) for node in self._nodes.values()
        ]
        await asyncio.gather(*told, return_exceptions=True)  # one without an answer is told when it is taken up

    async def stop(self) -> None:
        """Give the store up, as far as it can be reached within 5 s; nothing is killed."""
        self._stopped, self.state = True, "stopped"
        self._ready.clear()
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.wait_for(self._renew(0), 5.0)
        except Exception as error:
            log.warning("the store could not be given up: %s", error)

    async def _ask(self, method: str, *arguments: Any) -> Any:
        """Have a node service do what any of them could do: one after the other until one answers."""
        deadline = time.monotonic() + ASK_SECONDS
        turn = 0
        while self._nodes and time.monotonic() < deadline:
            node = list(self._nodes.values())[turn % len(self._nodes)]
            turn += 1
            try:
                return await asyncio.wait_for(node.handle.call(method, *arguments), ANSWER_SECONDS)
            except TimeoutError:
                continue
        raise UnderstudyError(f"no node service has an answer to {method}")

    async def _start(self) -> None:
        """Take the next generation, adopt what lives, resume what does not."""
        own, *others = await self.machinery.node_ids()
        first = await self.machinery.node_service(own)
        alive = self._spawn(_say_alive(first))
        try:
            await self._take_over(first, own, others)
        finally:
            alive.cancel()

    async def _take_over(self, first: NodeHandle, own: str, others: list[str]) -> None:
        owner = await first.call("request", "read", "owner", [], {})
        may_take = owner is None or self.machinery.holder_is_dead(owner["holder"])
        dead = owner["holder"] if owner is not None and may_take else ""
        wanted = (self.holder, int(LEASE_SECONDS * 1e6), dead, new_identifier())
        self.generation = await first.call("acquire", *wanted)
        log.info("generation %d", self.generation)
        self._term += 1
        for task in list(self._under_way.values()):
            task.cancel()
        self._under_way, self._failure = {}, None
        self._nodes, self._frames, self._well = {}, {}, {}
        await self._join(own)
        joined = [answered_within(self._join(node_id), LOST_SECONDS) for node_id in others]
        await asyncio.gather(*joined, return_exceptions=True)  # the census tries again those that are late
        self._told = self.generation, list(self._nodes)
        await self._take_up(self._nodes[own])
        for node_id, node in self._nodes.items():
            if node_id != own:
                self._spawn(self._take_up(node))
            self._attend(node)
        self._spawn(self._probing(self._term))
        self.state, self.problem = "supervising", None
        self._ready.set()

    async def _join(self, node_id: str) -> None:
        """Make a node part of the cluster: start its service if there is none, adopt its frames."""
        term = self._term
        handle = await self.machinery.node_service(node_id)
        frames = await self.machinery.frames(node_id)
        if term != self._term:
            return
        cpus = self.machinery.cpus(node_id)
        self._nodes[node_id] = _Node(handle, cpus, Stock(cpus, self.max_actors, self.standby))
        for frame in frames:
            self._frames[frame.frame_id] = frame
            self._spawn(self._watch_frame(frame, term))

    def _attend(self, node: _Node) -> None:
        self._spawn(self._watch_node(node, self._term))
        self._spawn(self._serve_demand(node, self._term))

    def _serves(self, node: _Node, term: int) -> bool:
        """Whether the node is still part of the cluster that was found when this term began."""
        return term == self._term and self._nodes.get(node.handle.node_id) is node

    async def _take_up(self, node: _Node) -> None:
        """Tell a node service whom it acts for, beside whom, and which credentials there are."""
        await node.handle.meet()
        for profile in await node.handle.call("profiles"):
            self.profiles.setdefault(profile.name, profile)
        for profile in self.profiles.values():
            await node.handle.call("register", profile)
        generation, nodes = self._told
        if FENCE in self._under_way or node.handle.node_id not in nodes:  # it is told with the next generation
            return
        self._numbers += 1
        found = await node.handle.call("take_up", generation, self._numbers, nodes)
        node.heard = time.monotonic()
        log.info("node %s: %s", node.handle.node_id[:8], found)

    async def _tell_all(self) -> None:
        """Have all node services look at what the store says of nodes; one without an answer does so with its sweep."""
        told = [asyncio.wait_for(self._take_up(node), ANSWER_SECONDS) for node in self._nodes.values()]
        await asyncio.gather(*told, return_exceptions=True)

    async def _tending(self) -> None:
        """Keep the lease, and notice which nodes come and go. Nothing that may take long is waited for here."""
        renewed = time.monotonic()
        while not self._stopped:
            slept = time.monotonic()
            await asyncio.sleep(CENSUS_SECONDS)
            if self.state == "stopped":
                return
            if self._failure is not None:
                raise self._failure
            if time.monotonic() - slept > LOST_SECONDS / 3:  # it stood still itself: what it did not hear tells nothing
                for node in self._nodes.values():
                    node.heard = time.monotonic()
            if time.monotonic() - renewed >= RENEW_SECONDS:
                renewed = time.monotonic()
                self._alone("renew", self._keep)
            await self._census()

    async def _keep(self) -> None:
        """Renew the lease."""
        generation = self.generation
        try:
            await self._renew(LEASE_SECONDS)
        except StaleGeneration as error:
            if generation == self.generation and FENCE not in self._under_way:  # else it was this supervisor's doing
                self._failure = error
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
        for node in list(self._nodes.values()):
            gone = node.handle.node_id not in others
            if node.handle.node_id != own and (gone or time.monotonic() - node.heard > LOST_SECONDS):
                self._lose(node)
        for node_id in set(others) - self._nodes.keys() - self._joining:
            self._spawn(self._welcome(node_id))
        if notices:
            self._spawn(self.drains.heed(notices))

    def _lose(self, node: _Node) -> None:
        """A node is gone, or cut off: the others take up its sessions.

        If it is only cut off its processes may live on. That is harmless: under the next generation its service
        activates nothing more, and with its next activation elsewhere a session has an epoch under which its old frame
        can commit nothing, so it can start no tool either (that takes a commit), and model calls are not its own. Only
        what it was allowed to start before may still begin: those sessions wait until that lease is over.
        """
        node_id = node.handle.node_id
        log.warning("node %s is lost", node_id[:8])
        del self._nodes[node_id]
        lost = [frame for frame in self._frames.values() if frame.node_id == node_id]
        for frame in lost:
            del self._frames[frame.frame_id]
            self._well.pop(frame.frame_id, None)
        self.machinery.abandon(node.handle, lost)
        self._alone(FENCE, self._fence, self._term)

    async def _fence(self, term: int) -> None:
        """Take the next generation, and tell the nodes that are left. One that is lost meanwhile is not told of it."""
        wanted = (self.holder, int(LEASE_SECONDS * 1e6), self.holder, new_identifier())
        try:
            generation = await self._ask("acquire", *wanted)
        except Exception as error:
            self._failure = error
            return
        if term != self._term:
            return
        self.generation = generation
        self._told = generation, list(self._nodes)
        del self._under_way[FENCE]
        for other in self._nodes.values():
            self._spawn(self._take_up(other))

    async def _welcome(self, node_id: str) -> None:
        """A node has come, or come back.

        It is told whom it acts for under the next generation only: one that has not heard of it yet would take what is
        at work there for a lost node's, and can no longer.
        """
        term = self._term
        self._joining.add(node_id)
        try:
            await self._join(node_id)
        except Exception as error:
            log.warning("node %s can't join yet: %s", node_id[:8], error)
            return
        finally:
            self._joining.discard(node_id)
        if term == self._term and node_id in self._nodes:
            self._alone(FENCE, self._fence, term)
            self._attend(self._nodes[node_id])

    async def _watch_frame(self, frame: FrameHandle, term: int, patience: float | None = None) -> None:
        """Await a frame's end, for `patience` seconds if that is given; then have its session resumed."""
        self._well.setdefault(frame.frame_id, time.monotonic())
        try:
            async with asyncio.timeout(patience) as limit:
                cause = await frame.watch()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if limit.expired():
                return
            log.info("frame %s (pid %d) died: %s", frame.frame_id, frame.pid, error)
            cause = getattr(error, "details", {}).get("cause", "process_died")
        if term != self._term or self._frames.pop(frame.frame_id, None) is None:
            return
        seen = self._well.pop(frame.frame_id, time.monotonic())
        if frame.node_id in self._nodes:
            self._nodes[frame.node_id].stock.died(frame.placement, cause, time.monotonic())
        # Also where Ray reported a death: a loop that failed leaves a process, and a session is resumed only after it.
        await self._end_frame(term, frame.node_id, frame.frame_id, frame.pid, frame, cause, seen)

    async def _end_frame(
        self, term: int, node_id: str, frame_id: str, pid: int, frame: FrameHandle | None, cause: str, seen: float
    ) -> None:  # fmt: skip
        """End what is left of a frame's process, then have its session resumed."""
        home = self._nodes.get(node_id)
        if home is not None:
            home.ending.add(frame_id)
        try:
            gone = await self.machinery.kill(node_id, pid, frame)
            # Its node's service must hear of it, and may have just been restarted itself, or be without its store.
            while (node := self._nodes.get(node_id)) is not None and self._serves(node, term):
                try:
                    silence = time.monotonic() - seen if seen else 0.0
                    await node.handle.call("frame_died", frame_id, cause, silence, not gone)
                    return
                except UnderstudyError as error:
                    log.warning("the death of frame %s is told again: %s", frame_id, error)
                    await asyncio.sleep(REPEAT_SECONDS)
        finally:
            if home is not None:
                home.ending.discard(frame_id)

    async def _watch_node(self, node: _Node, term: int) -> None:
        """Await a node service's death; Ray restarts it, and it must be told what it needs."""
        while self._serves(node, term):
            try:
                await node.handle.watch()
            except asyncio.CancelledError:
                raise
            except Exception as error:
                log.warning("node service %s died: %s", node.handle.node_id[:8], error)
            if not self._serves(node, term) or self._stopped:
                return
            try:
                await self._take_up(node)
            except Exception as error:
                log.warning("node service %s is not back yet: %s", node.handle.node_id[:8], error)
                await asyncio.sleep(0.5)

    async def _serve_demand(self, node: _Node, term: int) -> None:
        """Keep a node's pool in step with its demand."""
        while self._serves(node, term):
            try:
                report: NodeReport = await node.handle.call("demand", DEMAND_SECONDS, node.stock.cap)
                if not self._serves(node, term):
                    return
                # Restarted unnoticed (a `take_up` is repeated too, so the next process can have heard it without all
                # that comes before it), or it did not hear who joined.
                known = (node.handle.pid, *self._told)
                if (report.pid, report.generation, report.nodes) != known:
                    await self._take_up(node)
                if report.named.keys() - self._known(node):
                    self._alone(("strangers", node.handle.node_id), self._meet_strangers, node, report.named)
                for frame_id in report.condemned:
                    self._alone(f"kill {frame_id}", self._kill_frame, frame_id, "its run was ended by force")
                if report.memory is not None:
                    node.stock.measured(report.memory, time.monotonic())
                if not report.draining:
                    await self._balance(node, report.demand)
            except Exception as error:
                log.warning("demand of node %s unknown: %s", node.handle.node_id[:8], error)
                await asyncio.sleep(0.5)

    async def _meet_strangers(self, node: _Node, named: dict[str, int]) -> None:
        """A node's service names frames that are not known: a supervisor that was overtaken made them, they were not
        seen to start, or they died unnoticed.

        Those that live are watched from now on; of the others the service hears that they are gone. They are looked for
        only after they were named, so that one which is not found did live, and does no more.
        """
        term, known = self._term, self._known(node)
        found = await self.machinery.frames(node.handle.node_id, known)
        listed = await self.machinery.frame_ids(node.handle.node_id)
        if not self._serves(node, term):
            return
        for frame in found:
            if frame.frame_id not in self._known(node):
                self._frames[frame.frame_id] = frame
                self._spawn(self._watch_frame(frame, term))
        # One that was known before was not looked for; it may have become unknown since.
        for frame_id in sorted(named.keys() - listed - known - self._known(node)):
            ended = self._end_frame(term, node.handle.node_id, frame_id, named[frame_id], None, "process_died", 0.0)
            self._spawn(ended)

    def _known(self, node: _Node) -> set[str]:
        """Frames that are watched, or that are about to be, or whose deaths are being told."""
        return {*self._frames, *node.stock.starting, *node.ending}

    async def _balance(self, node: _Node, demand: dict[str, Demand]) -> None:
        stock, now = node.stock, time.monotonic()
        known = {frame_id for row in demand.values() for frame_id in row.frames}
        arriving = Counter(placement for frame_id, placement in stock.starting.items() if frame_id not in known)
        for frame in self._frames.values():  # alive, but has not called in yet
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
                self._spawn(self._create_frame(node, frame_id, placement))
        if decided.retire or node.leaving:
            node.leaving = decided.retire
            await node.handle.call("retire", decided.retire)

    def _forget_unused(self, demand: dict[str, Demand], now: float) -> None:
        """What sessions of this node use is wanted; the rest was, until nobody has used it for long."""
        used = [name for name, row in demand.items() if row.ready or row.acting or row.waiting]
        self._used.update(dict.fromkeys(self._wanted.keys() & used, now))
        for placement in [name for name, at in self._used.items() if name and now - at > WANTED_SECONDS]:
            del self._used[placement], self._wanted[placement]

    async def _balance_now(self, node: _Node) -> None:
        report: NodeReport = await node.handle.call("demand", 0.0)
        if not report.draining:
            await self._balance(node, report.demand)

    async def _create_frame(self, node: _Node, frame_id: str, placement: str) -> None:
        term = self._term
        # A process start costs a second of a CPU: all at once they would take what the sessions at work need.
        turn = node.turns.setdefault(placement, asyncio.Semaphore(max(1, int(node.cpus / 2))))
        try:
            async with turn:
                if not self._serves(node, term):
                    return
                frame = await self.machinery.create_frame(node.handle, frame_id, placement)
            if node.stock.started(placement):
                self._spawn(node.handle.call("unschedulable", dict(node.stock.failures)))
        except Exception as error:
            log.warning("a frame of placement %s could not be created: %s", placement or "(default)", error)
            node.stock.failed(placement, str(error), time.monotonic())
            self._spawn(node.handle.call("unschedulable", dict(node.stock.failures)))
            return
        finally:
            del node.stock.starting[frame_id]
        self._frames[frame.frame_id] = frame
        self._spawn(self._watch_frame(frame, self._term))

    async def _probing(self, term: int) -> None:
        """Find what hangs: a process that does not answer, or one that answers but does not progress."""
        while term == self._term:
            await asyncio.sleep(PROBE_SECONDS)
            for frame in self._frames.values():
                self._alone(frame, self._probe_frame, frame)
            for node in self._nodes.values():
                self._alone(node.handle, self._probe_node, node)

    async def _probe_frame(self, frame: FrameHandle) -> None:
        try:
            reason = await frame_hangs(frame)
        except Exception:  # its watch tells of a death; unless it was lost itself, then another one fails at once
            if frame.frame_id in self._frames:  # unless that is lost as well: the next probe tries again
                self._alone(("watch", frame.frame_id), self._watch_frame, frame, self._term, PROBE_SECONDS)
            return
        if reason:
            await self._announce(frame)
            await self._kill_frame(frame.frame_id, reason)
        elif frame.frame_id in self._well:
            self._well[frame.frame_id] = time.monotonic()

    async def _announce(self, frame: FrameHandle) -> None:
        """Say since when a frame is silent. Its node's service hears of its end from its socket, before this supervisor
        can tell: only what was said before the kill gets into the event."""
        node, seen = self._nodes.get(frame.node_id), self._well.get(frame.frame_id)
        if node is None or seen is None:
            return
        with suppress(TimeoutError, UnderstudyError):
            async with asyncio.timeout(ANNOUNCE_SECONDS):
                await node.handle.call("frame_hangs", frame.frame_id, time.monotonic() - seen)

    async def _kill_frame(self, frame_id: str, reason: str) -> None:
        frame = self._frames.get(frame_id)
        if frame is not None:
            log.warning("frame %s (pid %d) is killed: %s", frame_id, frame.pid, reason)
            await self.machinery.kill(frame.node_id, frame.pid, frame)

    async def _probe_node(self, node: _Node) -> None:
        try:
            reason = await node_hangs(node.handle)
        except Exception:  # its watch tells of a death; one that is silent for long is lost
            return
        if not reason:
            node.heard = time.monotonic()
            return
        log.warning("node service %s (pid %d) hangs: %s", node.handle.node_id[:8], node.handle.pid, reason)
        await self.machinery.kill(node.handle.node_id, node.handle.pid, node.handle)

    async def _beat(self) -> None:
        while True:
            self.last_beat = time.monotonic()
            await asyncio.sleep(0.5)

    def _alone(self, what: Any, begin: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        """Have something done that may take long, unless it is under way: nothing else may wait for it."""
        if what not in self._under_way:
            task = self._under_way[what] = self._spawn(begin(*arguments))
            task.add_done_callback(lambda done: self._under_way.get(what) is done and self._under_way.pop(what))

    def _spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a supervisor task failed", exc_info=task.exception())


async def _say_alive(service: NodeHandle) -> None:
    """Probe the service of the supervisor's own machine until all are probed: it would take one for hung that must wait
    for others while it starts, and kill it."""
    while True:
        with suppress(Exception):  # it is not there yet, or no more: the start itself fails then
            await service.probe()
        await asyncio.sleep(PROBE_SECONDS)
