"""Many more sessions than actors, on a slow model; undisturbed and with actors killed all the time."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from contextlib import suppress
from itertools import pairwise

import psutil
from harness import Bench, Limit, Row, frames, median, percentile
from workload import MODEL_CALLS, typical

from understudy import Cluster
from understudy.cluster.client import Run
from understudy.cluster.results import RunResult
from understudy.events import Event

STEPS = ("model_call_completed", "model_call_started", "tool_started", "run_finished")


def density(bench: Bench) -> list[Row]:
    """200 sessions on a model of one second, at most 8 actors; `--full` adds 1,000 on five seconds and 16 actors."""
    count = bench.some(200, 60)
    rows = _measure(bench, count, delay=1.0, actors=8, kills=0)
    rows += _measure(bench, count, delay=1.0, actors=8, kills=bench.some(20, 5))
    if bench.full:
        rows += _measure(bench, 1_000, delay=5.0, actors=16, kills=0)
    return rows


def _measure(bench: Bench, count: int, *, delay: float, actors: int, kills: int) -> list[Row]:
    ideal = MODEL_CALLS * delay
    text = f"{count} sessions, model {delay:g} s, {kills} kills"
    bench.say(text)
    with bench.cluster(max_actors=actors) as cluster:
        cluster.spawn(typical()).send("warm up").result(60, check=True)
        sessions = [cluster.spawn(typical(delay)) for _ in range(count)]
        before = bench.endpoint.stats()
        watch = _Watch(cluster, kills, pause=ideal / (kills + 1))
        began = time.time_ns()
        runs = [session.send(f"task {number}") for number, session in enumerate(sessions)]
        watch.start()
        results = asyncio.run(_results(runs))
        watch.stop()
        after = bench.endpoint.stats()
        logs = [session.events() for session in sessions]
        wall = (max(log[-1].at for log in logs) * 1_000 - began) / 1e9
        delays = [delay for log in logs for delay in _delays(log)]
        activations = sum(event.type == "session_activated" for log in logs for event in log)
    unfinished = sum(not result.ok for result in results)
    made = after["requests"] - before["requests"]
    return [
        Row("density", text, wall, "s", ideal, "the model's time alone", Limit(1.5, True),
            f"on at most {watch.most} actors; {watch.killed} were killed"),
        Row("density", "activations per round", activations / (MODEL_CALLS * count), ""),
        Row("density", "from a model's answer to the next step, p99", percentile(delays, 99), "ms",
            note=f"p50 {median(delays):.0f} ms"),
        Row("density", "memory of all services and actors, most", watch.memory, "MB", note="USS"),
        Row("density", "model calls repeated", made - MODEL_CALLS * count, "", limit=Limit(0), note=f"{made} in all"),
        Row("density", "runs that did not complete", unfinished, "", limit=Limit(0)),
    ]  # fmt: skip


def _delays(log: list[Event]) -> list[float]:
    """Milliseconds from each answer's commit to the commit of what the session did next."""
    return [
        (after.at - before.at) / 1e3
        for before, after in pairwise(event for event in log if event.type in STEPS)
        if before.type == "model_call_completed"
    ]


async def _results(runs: list[Run]) -> list[RunResult]:
    async def one(run: Run) -> RunResult:
        return await run

    return await asyncio.wait_for(asyncio.gather(*(one(run) for run in runs)), 900)


def _uss(pid: int) -> float:
    try:
        return float(psutil.Process(pid).memory_full_info().uss) / 2**20
    except psutil.NoSuchProcess:
        return 0.0


class _Watch(threading.Thread):
    """Counts the actors, and kills one of them now and then."""

    def __init__(self, cluster: Cluster, kills: int, pause: float) -> None:
        super().__init__(daemon=True)
        self.most = 0
        self.killed = 0
        self.memory = 0.0
        self._cluster = cluster
        self._kills = kills
        self._pause = min(1.0, pause)
        self._stopped = threading.Event()
        self._random = random.Random(7)

    def run(self) -> None:
        looks = 0
        while not self._stopped.wait(self._pause):
            pids = sorted(frames(self._cluster))
            self.most = max(self.most, len(pids))
            if looks % 10 == 5:  # it costs the kernel a look at every page
                self.memory = max(self.memory, sum(map(_uss, {service.pid for service in self._cluster.services()})))
            looks += 1
            if pids and self.killed < self._kills:
                with suppress(ProcessLookupError):
                    os.kill(self._random.choice(pids), signal.SIGKILL)
                    self.killed += 1

    def stop(self) -> None:
        """Kill and count no more."""
        self._stopped.set()
        self.join()
