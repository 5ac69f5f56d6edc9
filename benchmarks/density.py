"""Many more sessions than actors, on a slow model; undisturbed and with actors killed all the time."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

from disturber import Disturber
from harness import Bench, Limit, Row, median, percentile
from workload import MODEL_CALLS, typical

from understudy.cluster.client.results import RunResult
from understudy.cluster.client.run_handle import Run
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
        every = ideal / (kills + 1)
        disturber = Disturber(cluster, kills, every, look=min(1.0, every), weigh=10.0)
        began = time.time_ns()
        runs = [session.send(f"task {number}") for number, session in enumerate(sessions)]
        disturber.start()
        results = asyncio.run(_results(runs))
        disturber.stop()
        after = bench.endpoint.stats()
        logs = [session.events() for session in sessions]
        wall = (max(log[-1].at for log in logs) * 1_000 - began) / 1e9
        delays = [delay for log in logs for delay in _delays(log)]
        activations = sum(event.type == "session_activated" for log in logs for event in log)
    unfinished = sum(not result.ok for result in results)
    made = after["requests"] - before["requests"]
    return [
        Row("density", text, wall, "s", ideal, "the model's time alone", Limit(1.5, True),
            f"on at most {max(one.actors for one in disturber.samples)} actors; {disturber.killed} were killed"),
        Row("density", "activations per round", activations / (MODEL_CALLS * count), ""),
        Row("density", "from a model's answer to the next step, p99", percentile(delays, 99), "ms",
            note=f"p50 {median(delays):.0f} ms"),
        Row("density", "memory of all services and actors, most", disturber.memory, "MB", note="USS"),
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
