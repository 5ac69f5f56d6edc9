"""The kills of the soak: whom, when, and what is known of the victim's return."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil

from understudy.cluster.client import background
from understudy.cluster.ray import ray_edge
from understudy.cluster.ray.names import gateway_name, node_name
from understudy.cluster.ray.services import supervisor_handle
from understudy.errors import UnderstudyError
from understudy.protocol import ServiceDirectory, unpacked

from .faults import PATIENCE, Stage, gone, kill, wait_until
from .postgres import PostgresServer

FRAME, NODE, GATEWAY, SUPERVISOR, SERVER, BACKEND = (
    "session actor",
    "node service",
    "gateway",
    "supervisor",
    "PostgreSQL",
    "PostgreSQL backend",
)
WEIGHTS = {FRAME: 12, NODE: 3, GATEWAY: 1, SUPERVISOR: 2, SERVER: 1, BACKEND: 1}
TITLES = {
    FRAME: "ray::FrameActor", NODE: "ray::NodeActor", GATEWAY: "ray::GatewayActor", SUPERVISOR: "ray::SupervisorActor",
}  # fmt: skip

OUTAGE_SECONDS = (0.0, 2.5)
"""How long PostgreSQL stays away after it was killed."""

REINITIALIZED = "all server processes terminated; reinitializing"
LOOK_SECONDS = 0.03
STILL_SECONDS = 90.0
"""When for so long nothing was in a state to be killed, something does not come back."""


def microseconds() -> int:
    """Since 1970 UTC, as the store's events have it: the services run on this machine."""
    return time.time_ns() // 1000


@dataclass
class Kill:
    """One kill. Times are microseconds since 1970 UTC.

    Attributes:
        at: just before the signal.
        gone: when the process was seen to have ended; of PostgreSQL: when it took connections again.
        back: when the victim's work went on; 0 while that is not known.
        note: what the victim was doing.
    """

    kind: str
    pid: int
    at: int
    gone: int = 0
    back: int = 0
    note: str = ""


class Watch(threading.Thread):
    """Asks the supervisor all the time who runs where.

    Attributes:
        pids: by kind, as last reported.
        generation: the last one that supervises.
        began: when each generation was first seen to supervise.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__(name="soak-watch", daemon=True)
        self.pids: dict[str, list[int]] = {}
        self.generation = 0
        self.began: dict[int, int] = {}
        self.heard = 0.0
        self._stage = stage
        self._settings = stage.cluster._connection.settings
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(LOOK_SECONDS):
            with contextlib.suppress(UnderstudyError, TimeoutError):
                self._look(unpacked(background.wait(self._ask("ready", 5.0)), ServiceDirectory, "the directory"))

    def stop(self) -> None:
        """Ask no more."""
        self._stopped.set()
        self.join(PATIENCE)

    def _look(self, found: ServiceDirectory) -> None:
        generation = found.generation
        self.began.setdefault(generation, microseconds())
        self.pids = {
            FRAME: [frame.pid for frame in found.frames if frame.pid],
            NODE: [node.pid for node in found.nodes if node.pid],
            SUPERVISOR: [found.pid],
        }
        self.node_id = found.node_id
        gateway = ray_edge.find_actor(gateway_name(self._settings.instance, self.node_id))
        self.pids[GATEWAY] = [ray_edge.pid_of(gateway)] if gateway is not None else []
        self.generation, self.heard = generation, time.monotonic()

    async def _ask(self, method: str, *arguments: Any) -> Any:
        handle = supervisor_handle(self._settings)
        call = ray_edge.result_of(ray_edge.submitted(lambda: getattr(handle, method).remote(*arguments)))
        return await asyncio.wait_for(call, 5.0)

    def both_know_the_key(self) -> bool:
        """Whether supervisor and node service are up and have the credentials.

        If both died before one could tell the other, these would be lost until a client brings them, as documented:
        not what is tested here.
        """
        if time.monotonic() - self.heard > 0.5 or gone(self.pids[SUPERVISOR][0]) or gone(self.pids[NODE][0]):
            return False

        async def ask() -> Any:
            node = ray_edge.find_actor(node_name(self._settings.instance, self.node_id))
            if node is None:
                return []
            return await asyncio.wait_for(ray_edge.result_of(ray_edge.submitted(node.profiles.remote)), 2.0)

        try:
            return self._stage.profile in [profile.name for profile in background.wait(ask())]
        except (UnderstudyError, TimeoutError):
            return False


class Killer:
    """Kills at random until all kills are used up.

    Args:
        least_frames: where fewer live, none is killed: a busy machine may need longer to start one than it takes to the
            next kill, and without any nothing would be at work that a kill could disturb.

    Attributes:
        kills: those that happened.
    """

    def __init__(
        self,
        stage: Stage,
        watch: Watch,
        postgres: PostgresServer | None,
        weights: dict[str, int],
        seed: int,
        least_frames: int,
    ) -> None:
        self.kills: list[Kill] = []
        self._stage = stage
        self._watch = watch
        self._postgres = postgres
        self._least = {FRAME: least_frames}
        self._weights = {kind: weight for kind, weight in weights.items() if postgres or kind not in (SERVER, BACKEND)}
        self._random = random.Random(seed)
        self._deck: list[str] = []
        self._outage: threading.Thread | None = None
        self._failures: list[BaseException] = []

    def run(self, count: int, pause: float, deadline: float, tell: Callable[[], bool]) -> None:
        """Kill `count` times, every `pause` seconds on average, until `deadline` or until `tell` says no."""
        killed = time.monotonic()
        while len(self.kills) < count and time.monotonic() < deadline and tell():
            time.sleep(self._random.uniform(0.2 * pause, 1.8 * pause))
            kind = self._deck.pop() if self._deck else self._shuffled()
            done = self._end_postgres(kind) if kind in (SERVER, BACKEND) else self._end_process(kind)
            if done:
                killed = time.monotonic()
            else:
                self._deck.insert(0, kind)
            assert time.monotonic() - killed < STILL_SECONDS, (
                f"nothing could be killed: {self._watch.pids}, {self._deck}"
            )
            if self._failures:
                raise self._failures[0]

    def _shuffled(self) -> str:
        """Each kind as often as it weighs, in an order of chance; returns the first."""
        self._deck = [kind for kind, weight in self._weights.items() for _ in range(weight)]
        self._random.shuffle(self._deck)
        return self._deck.pop()

    def finish(self) -> None:
        """Wait until PostgreSQL is up again."""
        if self._outage is not None:
            self._outage.join(PATIENCE)
        if self._failures:
            raise self._failures[0]

    def _end_process(self, kind: str) -> bool:
        """False if it must be put off."""
        if kind != FRAME and not self._watch.both_know_the_key():
            return False
        alive = [pid for pid in self._watch.pids.get(kind, []) if is_a(kind, pid)]
        if len(alive) < self._least.get(kind, 1):
            return False
        pid = self._random.choice(alive)
        found = Kill(kind, pid, microseconds(), note=str(self._watch.generation))
        kill(pid)
        wait_until(lambda: gone(pid), f"the end of process {pid}")
        found.gone = microseconds()
        self.kills.append(found)
        return True

    def _end_postgres(self, kind: str) -> bool:
        """False if it must be put off."""
        if self._outage is not None and self._outage.is_alive():
            return False
        self._outage = threading.Thread(target=self._outage_of, args=(kind, self._random.uniform(*OUTAGE_SECONDS)))
        self._outage.start()
        return True

    def _outage_of(self, kind: str, seconds: float) -> None:
        """In a thread of its own, so that others die meanwhile."""
        assert self._postgres is not None
        try:
            found = Kill(kind, 0, microseconds())
            if kind == SERVER:
                self._postgres.kill()
                time.sleep(seconds)
                self._postgres.start()
            else:
                wait_until(self._clients, "a connection of the node service")  # it may have been killed just before
                before = self._times_recovered()
                found.at = microseconds()
                self._postgres.kill_backend()
                wait_until(lambda: self._times_recovered() > before, "PostgreSQL notices")
                self._postgres.wait_until_ready()
            found.gone = microseconds()
            self.kills.append(found)
        except BaseException as error:
            self._failures.append(error)

    def _clients(self) -> bool:
        assert self._postgres is not None
        statement = (
            "SELECT 1 FROM pg_stat_activity WHERE application_name = 'understudy' AND backend_type = 'client backend'"
        )
        return bool(self._postgres.query(statement))

    def _times_recovered(self) -> int:
        assert self._postgres is not None
        return self._postgres.log().count(REINITIALIZED)


def is_a(kind: str, pid: int) -> bool:
    """Whether this is a live actor of that kind: a pid can have been given to another process meanwhile."""
    try:
        return psutil.Process(pid).cmdline()[0].startswith(TITLES[kind])
    except (psutil.NoSuchProcess, IndexError):
        return False
