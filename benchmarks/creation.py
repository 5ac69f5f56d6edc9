"""What a session actor costs to have, to create, and to take from the standbys."""

from __future__ import annotations

import time

import baseline
import psutil
import ray
from harness import Bench, Limit, Row, frames, median, percentile, received, until
from workload import answering

from understudy.cluster.ray.ray_edge import RAY_NAMESPACE, find_actor
from understudy.cluster.ray.services import FrameActor
from understudy.identifiers import new_identifier

MB = 1e6


def memory(bench: Bench) -> list[Row]:
    """USS of an actor whose session waits for a model, and of a bare actor."""
    ours, bare, actors = [], [], []
    count = bench.some(5, 2)
    with bench.cluster(standby=1, max_actors=count + 2) as cluster:
        for _ in range(count):
            until(lambda: bool(frames(cluster, "standby")), "a standby")
            session = cluster.spawn(answering(delay=600.0))
            session.send("wait")
            until(lambda s=session: s.info().status == "waiting_for_model", "a wait for the model")  # type: ignore[misc]
            pid = session.info().actor_pid
            assert pid is not None
            actor, bare_pid, _ = baseline.create()
            actors.append(actor)
            ours.append(psutil.Process(pid).memory_full_info().uss / MB)
            bare.append(psutil.Process(bare_pid).memory_full_info().uss / MB)
        baseline.end(actors)
    return [
        Row("memory", "USS of a live session actor", median(ours), "MB", median(bare), "bare actor", Limit(1.15, True))
    ]


def cold(bench: Bench) -> list[Row]:
    """From the creation of an actor to its first reply, when nothing is warm."""
    ours, bare = [], []
    with bench.cluster() as cluster:
        service = next(service for service in cluster.services() if service.role == "node")
        until(lambda: len(frames(cluster)) >= 1, "a standby")  # its creation is over: it disturbs no more
        number = bench.some(15, 4)
        for _ in range(number + 1):
            actor, _, seconds = baseline.create()
            bare.append(seconds)
            baseline.end([actor])
            ours.append(_frame_seconds(service.node_id))
    return [
        Row("cold", "create a session actor, to its first reply", median(ours[1:]) * 1e3, "ms",
            median(bare[1:]) * 1e3, "bare actor", Limit(1.3, True)),
        Row("cold", "the same, p99", percentile(ours[1:], 99) * 1e3, "ms", percentile(bare[1:], 99) * 1e3,
            "bare actor, p99"),
    ]  # fmt: skip


def _frame_seconds(node_id: str) -> float:
    """As the supervisor creates one, but it is not started: it must take no work."""
    named = ray.util.list_named_actors(all_namespaces=True)
    node = find_actor(next(actor["name"] for actor in named if actor["name"].startswith("node/")))
    frame_id = new_identifier()[-12:]
    began = time.perf_counter()
    actor = FrameActor.options(  # type: ignore[attr-defined]
        name=f"benchmark/{frame_id}", namespace=RAY_NAMESPACE, lifetime="detached"
    ).remote(node, frame_id, node_id, "", [])
    try:
        ray.get(actor.probe.remote())
        return time.perf_counter() - began
    finally:
        ray.kill(actor)


def standby(bench: Bench) -> list[Row]:
    """From `spawn()` to the endpoint's receipt of the session's first model request, with a standby at hand."""
    whole, sending, calls = [], [], []
    with bench.cluster() as cluster:
        actor, _, _ = baseline.create()
        until(lambda: bool(frames(cluster, "standby")), "a standby")
        for _ in range(bench.some(200, 15) + 3):
            began, start = time.time_ns(), time.perf_counter()
            session = cluster.spawn(answering())
            spawned = time.perf_counter()
            run = session.send("hello")
            sent = time.perf_counter()
            calls.append(baseline.call_seconds(actor))
            run.result(60, check=True)
            whole.append((received(session.messages()) - began) / 1e6)
            sending.append((spawned - start, sent - spawned))
        baseline.end([actor])
    whole, sending, calls = whole[3:], sending[3:], calls[3:]
    call = median(calls) * 1e3
    return [
        Row("standby", "spawn() + send() to the first model request, p50", median(whole), "ms", call,
            "one call of a bare actor", Limit(10)),
        Row("standby", "the same, p99", percentile(whole, 99), "ms", percentile(calls, 99) * 1e3, "the same, p99"),
        Row("standby", "spawn() alone, p50", median([s for s, _ in sending]) * 1e3, "ms", call, "the same"),
        Row("standby", "send() alone, p50", median([s for _, s in sending]) * 1e3, "ms", call, "the same"),
    ]  # fmt: skip
