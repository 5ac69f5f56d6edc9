"""Many more sessions than actors, on a slow model; undisturbed and with actors killed all the time."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from contextlib import suppress

from harness import Bench, Limit, Row, frames
from workload import MODEL_CALLS, typical

from understudy import Cluster
from understudy.cluster.client import Run
from understudy.cluster.results import RunResult
from understudy.events import RunFinished


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
        events = [event for session in sessions for event in session.events() if isinstance(event, RunFinished)]
        wall = (max(event.at for event in events) * 1_000 - began) / 1e9
    unfinished = sum(not result.ok for result in results)
    made = after["requests"] - before["requests"]
    return [
        Row("density", text, wall, "s", ideal, "the model's time alone", Limit(1.5, True),
            f"on at most {watch.most} actors; {watch.killed} were killed"),
        Row("density", "model calls repeated", made - MODEL_CALLS * count, "", limit=Limit(0), note=f"{made} in all"),
        Row("density", "runs that did not complete", unfinished, "", limit=Limit(0)),
    ]  # fmt: skip


async def _results(runs: list[Run]) -> list[RunResult]:
    async def one(run: Run) -> RunResult:
        return await run

    return await asyncio.wait_for(asyncio.gather(*(one(run) for run in runs)), 900)


class _Watch(threading.Thread):
    """Counts the actors, and kills one of them now and then."""

    def __init__(self, cluster: Cluster, kills: int, pause: float) -> None:
        super().__init__(daemon=True)
        self.most = 0
        self.killed = 0
        self._cluster = cluster
        self._kills = kills
        self._pause = min(1.0, pause)
        self._stopped = threading.Event()
        self._random = random.Random(7)

    def run(self) -> None:
        while not self._stopped.wait(self._pause):
            pids = sorted(frames(self._cluster))
            self.most = max(self.most, len(pids))
            if pids and self.killed < self._kills:
                with suppress(ProcessLookupError):
                    os.kill(self._random.choice(pids), signal.SIGKILL)
                    self.killed += 1

    def stop(self) -> None:
        """Kill and count no more."""
        self._stopped.set()
        self.join()
