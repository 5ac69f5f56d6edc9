"""What all scenarios share: a Ray head of their own, the endpoint, fresh services per scenario, rows of the report."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import ray
from endpoint import Endpoint

from understudy import Cluster
from understudy.cluster.client import background
from understudy.cluster.ray import own_ray
from understudy.config import ModelProfile

WAIT_SECONDS = 180.0


@dataclass(frozen=True)
class Limit:
    """A budget of the design: of the measured value, or of its ratio to the baseline.

    Attributes:
        counted: of something that is counted, not timed: what else the machine does changes nothing.
    """

    bound: float
    of_ratio: bool = False
    at_least: bool = False
    counted: bool = False

    def used(self, measured: float | None) -> float:
        """The share of the budget that was used: more than 1 is more than there was."""
        of, used = (measured, self.bound) if self.at_least else (self.bound, measured)
        if used is None or not of:
            return math.inf if used is None or used > 0 else 0.0
        return used / of


@dataclass(frozen=True)
class Row:
    """One line of the report.

    Attributes:
        baseline: measured in the same run, in the same unit; None where nothing compares.
        against: what the baseline is.
        turns: the ratio in each turn, where value and baseline are medians of turns taken one after the other.
    """

    scenario: str
    measure: str
    value: float
    unit: str
    baseline: float | None = None
    against: str = ""
    limit: Limit | None = None
    note: str = ""
    turns: tuple[float, ...] = ()

    @property
    def ratio(self) -> float | None:
        """Value to baseline."""
        return self.value / self.baseline if self.baseline else None

    @property
    def verdict(self) -> str:
        """`ok` or `short`; empty without a budget."""
        if self.limit is None:
            return ""
        return "ok" if self.used <= 1.0 else "short"

    @property
    def used(self) -> float:
        """The share of the budget that was used: more than 1 is more than there was; 0 without a budget."""
        if self.limit is None:
            return 0.0
        return self.limit.used(self.ratio if self.limit.of_ratio else self.value)

    @property
    def used_at_best(self) -> float:
        """The same in the turn that used least."""
        limit = self.limit
        return self.used if limit is None or not self.turns else min(map(limit.used, self.turns))

    @property
    def budget(self) -> str:
        """The budget as text."""
        if self.limit is None:
            return ""
        sign = "≥" if self.limit.at_least else "≤"
        return f"{sign} {self.limit.bound:g} {'×' if self.limit.of_ratio else self.unit}".rstrip()

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        names = ("scenario", "measure", "value", "unit", "baseline", "against", "ratio", "budget", "verdict", "note")
        return {name: getattr(self, name) for name in names}


def median(values: Sequence[float]) -> float:
    """The middle one."""
    return statistics.median(values)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` per cent of all don't exceed: of few values, the largest."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * int(share) // 100) - 1)]


class Bench:
    """One run of the benchmarks. As a context manager it starts all that is needed and stops it again.

    Attributes:
        quick: few repetitions, to see that everything works; numbers of such a run mean little.
        full: the long scenarios too.
        directory: of this run; removed at its end.
        store, namespace: of the cluster that was started last.
    """

    def __init__(self, *, quick: bool = False, full: bool = False) -> None:
        self.quick = quick
        self.full = full
        self.directory = Path()
        self.store = self.namespace = ""
        self._stack = ExitStack()
        self._numbers = itertools.count(1)
        self._endpoint: Endpoint | None = None
        self._ray = False

    def __enter__(self) -> Bench:
        self.directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="understudy-benchmarks-")))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def endpoint(self) -> Endpoint:
        """The model endpoint, started when first asked for."""
        if self._endpoint is None:
            self._endpoint = Endpoint()
            self._stack.callback(self._endpoint.stop)
        return self._endpoint

    def some(self, usual: int, quick: int) -> int:
        """How many repetitions."""
        return quick if self.quick else usual

    def say(self, text: str) -> None:
        """Progress, on stderr."""
        print(f"  {text}", file=sys.stderr, flush=True)

    def start_ray(self) -> None:
        """Start a Ray head for this run only, and connect to it. Nothing if that has happened."""
        if self._ray:
            return
        os.environ.update(XDG_STATE_HOME=str(self.state), RAY_ENABLE_UV_RUN_RUNTIME_ENV="0")
        for name in ("RAY_ADDRESS", "UNDERSTUDY_STANDBY", "UNDERSTUDY_MAX_ACTORS", "UNDERSTUDY_NAMESPACE"):
            os.environ.pop(name, None)
        self._stack.callback(self._stop_ray)
        self._stack.callback(ray.shutdown)
        self._stack.callback(lambda: background.wait(_end_calls()))
        os.environ["RAY_ADDRESS"] = own_ray.start_ray()
        own_ray.connect_ray(os.environ["RAY_ADDRESS"])
        self._ray = True

    @contextmanager
    def cluster(self, *, standby: int = 1, max_actors: int | None = None) -> Iterator[Cluster]:
        """Services of their own with an empty SQLite store; the defaults are those of `Cluster.connect`."""
        self.start_ray()
        number = next(self._numbers)
        self.store, self.namespace = f"sqlite:///{self.directory}/store-{number}.db", f"bench-{number}"
        cluster = Cluster.connect(
            self.store,
            namespace=self.namespace,
            model="offline-over-http",
            standby=standby,
            max_actors=max_actors,
            profiles=[ModelProfile("benchmark", "no-secret", self.endpoint.url)],
        )
        try:
            yield cluster
        finally:
            cluster.shutdown()

    def _stop_ray(self) -> None:
        known = self.processes()
        own_ray.stop_ray()
        # Ray's agents rename themselves, so `stop_ray` can't tell whose they are; and what an interrupt during
        # `ray start` leaves behind has not been noted anywhere.
        while found := [process for process in {**known, **self.processes()}.values() if own_ray.lives(process)]:
            for process in found:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            own_ray.wait_for(found, 5.0)

    def processes(self) -> dict[int, psutil.Process]:
        """Every process that this run's Ray head started, by pid; not this one, and not the endpoint."""
        mark = f"XDG_STATE_HOME={self.state}".encode()
        found: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                # Not psutil's `environ`: it stops at the gap that Ray's process titles tear into the block.
                if mark in Path(f"/proc/{process.pid}/environ").read_bytes():
                    found.update({child.pid: child for child in [process, *process.children(recursive=True)]})
        for pid in (os.getpid(), self._endpoint.pid if self._endpoint else 0):
            found.pop(pid, None)
        return found

    @property
    def state(self) -> Path:
        """What marks our processes: they all have this directory in their environment."""
        return self.directory / "state"


async def _end_calls() -> None:
    """A call repeated after `ray.shutdown` makes Ray end this process on the spot, with its head still running."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def received(messages: Sequence[Any]) -> int:
    """When the endpoint received a session's first request: nanoseconds since 1970 UTC."""
    return int(next(message.text for message in messages if message.role == "assistant"))


def frames(cluster: Cluster, role: str | None = None) -> list[int]:
    """Pids of session actors; `role` is `frame` (holds a session at work) or `standby`, None for both."""
    roles = ("frame", "standby") if role is None else (role,)
    return [service.pid for service in cluster.services() if service.role in roles]


def until(condition: Callable[[], bool], what: str, pause: float = 0.05) -> None:
    """Look until it holds. Raises `TimeoutError` naming `what` after three minutes."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {WAIT_SECONDS:.0f} s")
        time.sleep(pause)
