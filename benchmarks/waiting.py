"""Thousands of sessions that wait, in no process: processes, memory, and the time to wake one."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psutil
from harness import Bench, Limit, Row, frames, median, percentile, until
from workload import agent, answering, call

from understudy import Cluster
from understudy.cluster.client.session_handle import Session


def waiting(bench: Bench) -> list[Row]:
    """10,000 sessions, half idle, half in a tool call that waits for a time; then some of each wake up at random."""
    count, wakes = bench.some(10_000, 200), bench.some(200, 20)
    chosen = random.Random(7)
    with bench.cluster(standby=1, max_actors=4) as cluster, ThreadPoolExecutor(32) as pool:
        until(lambda: bool(frames(cluster, "standby")), "a standby")
        empty = _uses(cluster)
        idle = list(pool.map(lambda _: cluster.spawn(answering()), range(count // 2)))
        bench.say(f"{len(idle)} idle sessions")
        soon = set(chosen.sample(range(count // 2), wakes))
        target = time.time() + bench.some(420, 20)
        order = iter(range(wakes))
        dues = {number: target + 0.25 * next(order) for number in sorted(soon)}
        resting = list(pool.map(lambda number: _rest(cluster, dues.get(number)), range(count // 2)))
        left = target - time.time()
        bench.say(f"{len(resting)} sessions wait for a time; the first one wakes up in {left:.0f} s")
        if left < 0:
            raise TimeoutError("the first sessions woke up before the last one had gone to sleep")
        until(lambda: all(info.actor_pid is None for info in cluster.sessions(live_only=True, limit=count)), "rest")
        full = _uses(cluster)
        woken = [_wake(session) for session in chosen.sample(idle, wakes)]
        bench.say(f"woke {wakes} idle ones")
        if time.time() > target:
            bench.say(f"the timers began while idle ones were woken, for {time.time() - target:.0f} s")
        until(lambda: all(_woke(resting[number]) for number in soon), "the timers")
        timed = [_woke(resting[number]) or 0.0 for number in soon]
    processes = sum(kind != "ray" for kind, _ in full.values())
    rows = [
        Row("waiting", f"processes for {count} sessions that wait", processes, "", len(empty), "before there were any",
            note=", ".join(sorted(kind for kind, _ in full.values()))),
        Row("waiting", "memory for each of them", 1_024 * (_total(full) - _total(empty)) / count, "KB",
            note=f"USS of all these processes: {_total(empty):.0f} MB before, {_total(full):.0f} MB then"),
    ]  # fmt: skip
    for text, taken in (("idle: input to activation", woken), ("a time: due to activation", timed)):
        note = f"p99 {percentile(taken, 99):.1f} ms, {len(taken)} times"
        rows.append(Row("waiting", f"waking one that waits, {text}", median(taken), "ms", limit=Limit(15), note=note))
    return rows


def _rest(cluster: Cluster, until_: float | None) -> Session:
    """A session whose model asks to wait, for a day or until a time; returns when it waits."""
    seconds = 86_400.0 if until_ is None else max(1.0, until_ - time.time())
    session = cluster.spawn(agent("resting", [call("wait", seconds=seconds), {"text": "done"}], tools=["wait"]))
    for event in session.send("go"):
        if event.type == "timer_set":
            break
    return session


def _wake(session: Session) -> float:
    """Milliseconds from the commit of an input to that of the activation."""
    session.send("go").result(60, check=True)
    at = {event.type: event.at for event in session.events() if event.type in ("run_accepted", "session_activated")}
    return (at["session_activated"] - at["run_accepted"]) / 1e3


def _woke(session: Session) -> float | None:
    """Milliseconds from the time that was waited for to the activation that followed; None before that."""
    due = None
    for event in session.events():
        if event.type == "timer_set":
            due = event.due_at
        elif event.type == "session_activated" and due is not None:
            return (event.at - due) / 1e3
    return None


def _uses(cluster: Cluster) -> dict[int, tuple[str, float]]:
    """What each of the cluster's processes is, and its USS in MB."""
    found = {}
    for service in cluster.services():
        with suppress(psutil.NoSuchProcess):
            found[service.pid] = service.role, psutil.Process(service.pid).memory_full_info().uss / 2**20
    return found


def _total(uses: dict[int, tuple[str, float]]) -> float:
    return sum(memory for _, memory in uses.values())
