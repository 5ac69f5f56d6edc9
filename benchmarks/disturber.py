"""Looks at a cluster's session actors while a scenario runs, and kills some of them."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

import psutil
from harness import frames

from understudy import Cluster

WORKING = ("running", "waiting_for_model")


@dataclass(frozen=True)
class Sample:
    """The cluster at one moment: session actors, sessions at work, and actors whose session is not at work."""

    actors: int
    working: int
    beyond: int


@dataclass
class Disturber(threading.Thread):
    """Looks at the actors all the time, and kills one of them now and then.

    Attributes:
        kills: how many at most.
        every: seconds from one to the next.
        look: seconds from one look to the next.
        weigh: seconds from one measurement of memory to the next, which costs the kernel a look at every page; 0: none.
        memory: the most that all services and actors had, in MB (USS).
    """

    cluster: Cluster
    kills: int
    every: float = 0.4
    seed: int = 7
    look: float = 0.05
    weigh: float = 0.0
    killed: int = 0
    memory: float = 0.0
    samples: list[Sample] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(daemon=True)
        self._stopped = threading.Event()
        self._random = random.Random(self.seed)

    def __hash__(self) -> int:
        return id(self)

    def run(self) -> None:
        began = time.monotonic()
        following, weighing = began + self.every, began + self.weigh / 2
        while not self._stopped.wait(self.look):
            alive = frames(self.cluster)
            found = self.cluster.sessions(live_only=True)  # one look: who is at work may change before the next
            busy = [info.actor_pid for info in found if info.actor_pid is not None]
            beyond = sum(info.status not in WORKING for info in found if info.actor_pid is not None)
            self.samples.append(Sample(len(alive), sum(info.status in WORKING for info in found), beyond))
            if self.weigh and time.monotonic() >= weighing:
                weighing = time.monotonic() + self.weigh
                self.memory = max(self.memory, sum(map(_uss, {service.pid for service in self.cluster.services()})))
            if busy and self.killed < self.kills and time.monotonic() >= following:
                following = time.monotonic() + self.every
                with suppress(ProcessLookupError):
                    os.kill(self._random.choice(busy), signal.SIGKILL)
                    self.killed += 1

    def stop(self) -> None:
        """Kill and look no more."""
        self._stopped.set()
        self.join()


def _uss(pid: int) -> float:
    try:
        return float(psutil.Process(pid).memory_full_info().uss) / 2**20
    except psutil.NoSuchProcess:
        return 0.0
