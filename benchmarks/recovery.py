"""How long a session is without an actor when its actor is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from typing import Any

import baseline
from harness import Bench, Limit, Row, frames, median, percentile, until
from workload import agent, answering, call

from understudy import Cluster
from understudy.cluster.client.run_handle import Run
from understudy.cluster.client.session_handle import Session
from understudy.events import SessionActivated


def kill(bench: Bench) -> list[Row]:
    """SIGKILL of a session actor that waits for a model, or is at work on a tool, with a standby at hand."""
    # All in the default placement, so that any standby will do.
    waiting = answering(delay=600.0)
    script = [call("bash", command="sleep 60"), {"text": "done", "delay": 600.0}]
    acting = agent("acting", script, tools=["bash"], sandbox="none", workspace=str(bench.directory))
    found: dict[str, list[float]] = {"waits": [], "acts": []}
    restarts: list[float] = []
    with bench.cluster() as cluster:
        repeats = bench.endpoint.stats()["repeats"]
        kills = bench.some(40, 4)
        for number in range(kills):
            found["waits"].append(_kill(cluster, waiting, "model_call_started"))
            found["acts"].append(_kill(cluster, acting, "tool_started"))
            if number % max(1, kills // 5) == 0:
                restarts.append(baseline.restart_seconds(1) * 1e3)
        repeats = bench.endpoint.stats()["repeats"] - repeats
    rows = []
    for what, values in found.items():
        text = f"SIGKILL while it {what}, to resumed"
        rows += [
            Row("kill", f"{text}, p50", median(values), "ms", median(restarts), "Ray's own restart", Limit(60)),
            Row("kill", f"{text}, p99", percentile(values, 99), "ms", max(restarts), "the same, worst", Limit(250)),
        ]
    rows += _without_standby(bench, acting, restarts)
    rows.append(Row("kill", "model calls repeated", repeats, "", limit=Limit(0), note=f"{2 * kills} kills"))
    return rows


def _without_standby(bench: Bench, spec: Any, restarts: list[float]) -> list[Row]:
    """The same where nothing stands by: a new actor has to be started."""
    with bench.cluster(standby=0, max_actors=1) as cluster:
        taken = [_kill(cluster, spec, "tool_started", standbys=0) for _ in range(bench.some(10, 2))]
    text = "the same while it acts, without a standby"
    return [
        Row("kill", f"{text}, p50", median(taken), "ms", median(restarts), "Ray's own restart"),
        Row("kill", f"{text}, worst", max(taken), "ms", max(restarts), "the same, worst"),
    ]


def _kill(cluster: Cluster, spec: Any, moment: str, *, standbys: int = 1) -> float:
    """Milliseconds from the kill, at the moment of an event, to the commit of the activation that resumes."""
    session = cluster.spawn(spec)
    run = session.send(session.id)  # the endpoint knows a repeated call by its messages, so no two are alike
    _await(run, moment)
    until(lambda: len(frames(cluster, "standby")) >= standbys, "a standby")
    time.sleep(1.0)  # a standby is listed before it has called in at its node service, which nothing reports
    pid = session.info().actor_pid
    assert pid is not None
    killed = time.time_ns()
    os.kill(pid, signal.SIGKILL)
    until(lambda: bool(_resumed([session])), "the session's resumption")
    run.cancel()
    run.result(60)
    return (_resumed([session])[0] * 1_000 - killed) / 1e6


def _await(run: Run, kind: str) -> None:
    for event in run:
        if event.type == kind:
            return
    raise RuntimeError(f"run {run.run_id} ended without {kind}")


def _resumed(sessions: Iterable[Session]) -> list[int]:
    """When each session was resumed, microseconds since 1970 UTC; those that were not (yet) are left out."""
    events = [event for session in sessions for event in session.events()]
    return [event.at for event in events if isinstance(event, SessionActivated) and event.cause == "resume"]


def kill_many(bench: Bench) -> list[Row]:
    """SIGKILL of many session actors at once, all waiting for a model, as many standbys at hand."""
    count = bench.some(16, 4)
    ours, bare = [], []
    with bench.cluster(standby=count, max_actors=2 * count + 2) as cluster:
        repeats = bench.endpoint.stats()["repeats"]
        for _ in range(bench.some(3, 1)):
            until(lambda: len(frames(cluster, "standby")) >= count, f"{count} standbys")
            bench.say(f"{count} standbys are ready")
            sessions = [cluster.spawn(answering(delay=600.0)) for _ in range(count)]
            runs = [session.send(session.id) for session in sessions]
            until(lambda: bench.endpoint.stats()["in_flight"] >= count, "the model calls")
            until(lambda: len(frames(cluster, "standby")) >= count, f"{count} standbys")
            pids = [session.info().actor_pid for session in sessions]
            killed = time.time_ns()
            for pid in pids:
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
            until(lambda s=sessions: len(_resumed(s)) >= count, "all running again", 0.5)  # type: ignore[misc]
            ours.append((max(_resumed(sessions)) * 1_000 - killed) / 1e9)
            for run in runs:
                run.cancel()
            bare.append(baseline.restart_seconds(count))
        repeats = bench.endpoint.stats()["repeats"] - repeats
    text = f"{count} actors killed at once, all running again"
    return [
        Row("kill16", text, median(ours), "s", median(bare), "Ray's own restart", Limit(0.3)),
        Row("kill16", "model calls repeated", repeats, "", limit=Limit(0)),
    ]
