"""The supervisor: owns the store's generation, places sessions, watches every process, replaces what dies or hangs.

It is never on a round's path. What it needs from the cluster it gets through the `Machinery` port, so this class knows
nothing of Ray. It keeps nothing that a successor could not find out: frames and node services go on without it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from understudy.errors import StaleGeneration, StoreOwned, UnderstudyError

from .pool import default_cap, plan

log = logging.getLogger(__name__)

LEASE_SECONDS = 10.0
RENEW_SECONDS = 3.0
PROBE_SECONDS = 2.0
PROBE_DEADLINE = 4.0
SILENCE_LIMIT = 10.0
"""A frame whose event loop stood still for so long is hung, unless one of its tools is within its deadline."""

OVERDUE_LIMIT = 5.0
"""A tool that is past its deadline by so much hangs its frame."""

DEMAND_SECONDS = 5.0


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

    async def watch(self) -> None:
        """Raise when its process is gone."""

    async def probe(self) -> dict[str, float]:
        """Seconds since its event loop and its journal turned: `{"silent", "journal"}`."""


class Machinery(Protocol):
    """What a cluster must be able to do for its supervisor."""

    async def node_services(self) -> Sequence[NodeHandle]:
        """The node services that there should be, started where they don't run yet."""

    async def frames(self) -> Sequence[FrameHandle]:
        """The frames that are alive, whoever created them."""

    async def create_frame(self, node: NodeHandle, placement: str) -> FrameHandle:
        """Start a frame; returns when it is ready."""

    async def kill(self, node_id: str, pid: int, handle: Any) -> None:
        """Make sure that a process is gone."""

    def cpus(self, node_id: str) -> float:
        """CPUs of a node."""

    def holder_is_dead(self, holder: str) -> bool:
        """Whether the owner that wrote `holder` is certainly gone."""


@dataclass
class _Node:
    handle: NodeHandle
    starting: dict[str, int] = field(default_factory=dict)
    failures: int = 0


class Supervisor:
    """One per cluster.

    Guarantees: it acts only while it owns the store (generation and lease); a frame or node service that dies is
    replaced, one that hangs is killed first; sessions are resumed only after their process is known to be gone.
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
        self._nodes: dict[str, _Node] = {}
        self._frames: dict[str, FrameHandle] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ready = asyncio.Event()
        self._stopped = False

    async def run(self) -> None:
        """Supervise until `stop`. Waits while another cluster owns the store."""
        self._spawn(self._beat())
        while not self._stopped:
            try:
                await self._start()
                await self._renewing()
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
                self.problem = UnderstudyError(f"{type(error).__name__}: {error}")
            self.state = "waiting"
            self._ready.clear()
            await asyncio.sleep(1.0)

    async def ready(self, timeout: float) -> dict[str, Any]:
        """Wait until it supervises; returns the directory of services.

        Raises:
            StoreOwned: another cluster owns the store.
            UnderstudyError: what kept it from starting.
        """
        deadline = time.monotonic() + timeout
        while not self._ready.is_set():
            left = deadline - time.monotonic()
            if left <= 0:
                raise self.problem or UnderstudyError(f"the supervisor is still starting after {timeout:.0f} s")
            try:
                await asyncio.wait_for(self._ready.wait(), min(0.25, left))
            except TimeoutError:
                continue
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
        }

    async def spawn(self, session: dict[str, Any], blobs: dict[str, bytes]) -> dict[str, Any]:
        """Place a new session, or find it: `{"created", "node_id"}`. Raises `SessionConflict`."""
        await self.ready(30.0)
        node = self._place()
        created = await node.handle.call("request", "spawn", session, blobs)
        self.want(session["placement"])  # after the store has what its frames need
        return {"created": created, "node_id": node.handle.node_id}

    def want(self, placement: str) -> None:
        """Keep standbys for this placement from now on."""
        if placement not in self._wanted:
            self._wanted[placement] = self.standby
            for node in self._nodes.values():
                self._spawn(self._balance_now(node))

    async def register(self, profile: Any) -> None:
        """Learn a model profile and tell the node services. Its credentials stay in their memory."""
        self.profiles[profile.name] = profile
        for node in list(self._nodes.values()):
            await node.handle.call("register", profile)

    async def stop(self) -> None:
        """Give the store up, as far as it can be reached within 5 s; nothing is killed."""
        self._stopped, self.state = True, "stopped"
        self._ready.clear()
        for task in self._tasks:
            task.cancel()
        for node in list(self._nodes.values())[:1]:
            try:
                given_up = node.handle.call("request", "renew", self.generation, self.holder, 0)
                await asyncio.wait_for(given_up, 5.0)
            except Exception as error:
                log.warning("the store could not be given up: %s", error)

    def _place(self) -> _Node:
        """The node for a new session: the one with the fewest frames."""

        def frames(node: _Node) -> int:
            return sum(1 for frame in self._frames.values() if frame.node_id == node.handle.node_id)

        return min(self._nodes.values(), key=frames)

    async def _start(self) -> None:
        """Take the next generation, adopt what lives, resume what does not."""
        handles = await self.machinery.node_services()
        first = handles[0]
        owner = await first.call("request", "read", "owner", [], {})
        may_take = owner is None or self.machinery.holder_is_dead(owner["holder"])
        lease = int(LEASE_SECONDS * 1e6)
        dead = owner["holder"] if owner is not None and may_take else ""
        self.generation = await first.call("acquire", self.holder, lease, dead)
        log.info("generation %d", self.generation)
        frames = await self.machinery.frames()
        self._frames = {frame.frame_id: frame for frame in frames}
        self._nodes = {handle.node_id: _Node(handle) for handle in handles}
        for frame in frames:
            self._spawn(self._watch_frame(frame, self.generation))
        for node in self._nodes.values():
            await self._take_up(node)
            self._spawn(self._watch_node(node, self.generation))
            self._spawn(self._serve_demand(node, self.generation))
        self._spawn(self._probing(self.generation))
        self.state, self.problem = "supervising", None
        self._ready.set()

    async def _take_up(self, node: _Node) -> None:
        """Tell a node service whom it acts for, who is alive, and which credentials there are."""
        for profile in await node.handle.call("profiles"):
            self.profiles.setdefault(profile.name, profile)
        for profile in self.profiles.values():
            await node.handle.call("register", profile)
        only = len(self._nodes) == 1
        nodes = None if only else [node.handle.node_id]
        found = await node.handle.call("take_up", self.generation, list(self._frames), nodes)
        log.info("node %s: %s", node.handle.node_id[:8], found)

    async def _renewing(self) -> None:
        lease = int(LEASE_SECONDS * 1e6)
        while not self._stopped:
            await asyncio.sleep(RENEW_SECONDS)
            if self.state == "stopped":
                return
            node = next(iter(self._nodes.values()))
            try:
                await node.handle.call("request", "renew", self.generation, self.holder, lease)
            except StaleGeneration:
                raise
            except UnderstudyError as error:
                log.warning("the lease could not be renewed: %s", error)

    async def _watch_frame(self, frame: FrameHandle, generation: int) -> None:
        """Await a frame's end, then have its session resumed."""
        try:
            cause = await frame.watch()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.info("frame %s (pid %d) died: %s", frame.frame_id, frame.pid, error)
            cause = "process_died"
        if generation != self.generation or self._frames.pop(frame.frame_id, None) is None:
            return
        node = self._nodes.get(frame.node_id) or next(iter(self._nodes.values()))
        # Also where Ray reported a death: a loop that failed leaves a process, and a session is resumed only after it.
        await self.machinery.kill(frame.node_id, frame.pid, frame)
        await node.handle.call("frame_died", frame.frame_id, cause)

    async def _watch_node(self, node: _Node, generation: int) -> None:
        """Await a node service's death; Ray restarts it, and it must be told what it needs."""
        while generation == self.generation:
            try:
                await node.handle.watch()
            except asyncio.CancelledError:
                raise
            except Exception as error:
                log.warning("node service %s died: %s", node.handle.node_id[:8], error)
            if generation != self.generation or self._stopped:
                return
            try:
                await self._take_up(node)
            except Exception as error:
                log.warning("node service %s is not back yet: %s", node.handle.node_id[:8], error)
                await asyncio.sleep(0.5)

    async def _serve_demand(self, node: _Node, generation: int) -> None:
        """Keep a node's pool in step with its demand."""
        while generation == self.generation:
            try:
                served = await node.handle.call("demand", DEMAND_SECONDS)
                if served["generation"] != generation and generation == self.generation:
                    await self._take_up(node)  # it was restarted, and its watch did not notice
                await self._balance(node, served["demand"])
            except Exception as error:
                log.warning("demand of node %s unknown: %s", node.handle.node_id[:8], error)
                await asyncio.sleep(0.5)

    async def _balance(self, node: _Node, demand: dict[str, Any]) -> None:
        cap = self.max_actors or default_cap(self.machinery.cpus(node.handle.node_id)) + self.standby
        known = {frame_id for row in demand.values() for frame_id in row.pop("frames", ())}
        arriving: dict[str, int] = dict(node.starting)
        for frame in self._frames.values():  # alive, but has not called in yet
            if frame.node_id == node.handle.node_id and frame.frame_id not in known:
                arriving[frame.placement] = arriving.get(frame.placement, 0) + 1
        decided = plan(demand, arriving, self._wanted, cap)
        for placement, count in decided.create.items():
            for _ in range(count):
                node.starting[placement] = node.starting.get(placement, 0) + 1
                self._spawn(self._create_frame(node, placement))
        for placement, count in decided.retire.items():
            await node.handle.call("retire", placement, count)

    async def _balance_now(self, node: _Node) -> None:
        await self._balance(node, (await node.handle.call("demand", 0.0))["demand"])

    async def _create_frame(self, node: _Node, placement: str) -> None:
        try:
            frame = await self.machinery.create_frame(node.handle, placement)
            self._frames[frame.frame_id] = frame
            node.failures = 0
        except Exception as error:
            node.failures += 1
            log.warning("a frame could not be created: %s", error)
            await asyncio.sleep(min(10.0, 0.5 * 2**node.failures))
            return
        finally:
            node.starting[placement] -= 1
        self._spawn(self._watch_frame(frame, self.generation))

    async def _probing(self, generation: int) -> None:
        """Find what hangs: a process that does not answer, or one that answers but does not progress."""
        while generation == self.generation:
            await asyncio.sleep(PROBE_SECONDS)
            checks = [self._probe_frame(frame) for frame in list(self._frames.values())]
            checks += [self._probe_node(node) for node in list(self._nodes.values())]
            await asyncio.gather(*checks, return_exceptions=True)

    async def _probe_frame(self, frame: FrameHandle) -> None:
        try:
            health = await asyncio.wait_for(frame.probe(), PROBE_DEADLINE)
        except TimeoutError:
            reason = f"no answer within {PROBE_DEADLINE:g} s"
        except Exception:
            return  # its death is reported by the watch
        else:
            overdue = health["overdue"] > OVERDUE_LIMIT
            silent = health["silent"] > SILENCE_LIMIT and not health["busy"]
            if not (overdue or silent):
                return
            reason = (
                f"its tool is {health['overdue']:.0f} s past its deadline" if overdue else "its event loop is blocked"
            )
        if frame.frame_id in self._frames:
            log.warning("frame %s (pid %d) hangs: %s", frame.frame_id, frame.pid, reason)
            await self.machinery.kill(frame.node_id, frame.pid, frame)

    async def _probe_node(self, node: _Node) -> None:
        try:
            health = await asyncio.wait_for(node.handle.probe(), PROBE_DEADLINE)
        except TimeoutError:
            pass
        except Exception:
            return
        else:
            if health["silent"] < SILENCE_LIMIT and health["journal"] < 6 * SILENCE_LIMIT:
                return
        log.warning("node service %s (pid %d) hangs", node.handle.node_id[:8], node.handle.pid)
        await self.machinery.kill(node.handle.node_id, node.handle.pid, node.handle)

    async def _beat(self) -> None:
        while True:
            self.last_beat = time.monotonic()
            await asyncio.sleep(0.5)

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a supervisor task failed", exc_info=task.exception())
