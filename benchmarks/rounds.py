"""What rounds and sessions cost: latency alone, CPU and throughput together, and a burst of sub-agents."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import baseline
import psutil
from harness import Bench, Limit, Row, frames, median, percentile, received, until
from workload import agent, call, typical

from understudy import AgentSpec, Cluster
from understudy.cluster.client.session_handle import Session
from understudy.events import Event, ModelCallCompleted, ModelCallStarted, ToolFinished

ROUNDS = 50


def round_cost(bench: Bench) -> list[Row]:
    """What a round takes beyond its model call and its tool, for one session alone."""
    script = [*([call("lookup", city="Oslo")] * ROUNDS), {"text": "done"}]
    spec = agent("rounds", script, max_rounds=ROUNDS + 2, repeat_limit=0)
    costs, walls, calls = [], [], []
    with bench.cluster() as cluster:
        actor, _, _ = baseline.create()
        for repetition in range(bench.some(6, 2)):
            session = cluster.spawn(spec)
            session.send("go").result(120, check=True)
            calls += [baseline.call_seconds(actor) for _ in range(2 * ROUNDS)]
            if repetition:  # the first one starts the actors
                found = rounds_taken(session.events())
                walls += [wall for wall, _ in found]
                costs += [wall - outside for wall, outside in found]
        baseline.end([actor])
    one = median(calls) * 1e3
    text = "one call of a bare actor"
    return [
        Row("round", "beyond model and tool time, p50", median(costs), "ms", one, text, Limit(6)),
        Row("round", "the same, p99", percentile(costs, 99), "ms", percentile(calls, 99) * 1e3, "the same, p99"),
        Row("round", "a whole round with a model of no latency, p50", median(walls), "ms", one, text),
    ]


def rounds_taken(events: list[Event]) -> list[tuple[float, float]]:
    """Per round: from one model call's commit to the next one's, and what of it the model and the tool took (ms)."""
    found = []
    started, outside = 0, 0
    for event in events:
        if isinstance(event, ModelCallStarted):
            if started:
                found.append(((event.at - started) / 1e3, outside / 1e3))
            started, outside = event.at, 0
        elif isinstance(event, (ModelCallCompleted, ToolFinished)):
            outside += event.duration
    return found


@dataclass
class Load:
    """Sessions worked off so many at once: seconds in all, and CPU seconds by kind of process."""

    sessions: int
    seconds: float
    cpu: dict[str, float]
    new_frames: int

    def each(self, kind: str) -> float:
        """CPU milliseconds per session."""
        return self.cpu[kind] / self.sessions * 1e3


def work_off(
    bench: Bench, cluster: Cluster, sessions: int, at_once: int, spec: AgentSpec | None = None
) -> Load:  # fmt: skip
    """Have so many sessions of an agent run, the typical one unless another is given."""
    spec = spec or typical()

    def one(number: int) -> None:
        cluster.spawn(spec).send(f"task {number}").result(300, check=True)

    before, frames_before = _cpu(bench, cluster), set(frames(cluster))
    began = time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(one, range(sessions)))
    seconds = time.perf_counter() - began
    after = _cpu(bench, cluster)
    used: dict[str, float] = {}
    for key, value in after.items():
        used[key[0]] = used.get(key[0], 0.0) + value - before.get(key, 0.0)
    return Load(sessions, seconds, used, len(set(frames(cluster)) - frames_before))


def _cpu(bench: Bench, cluster: Cluster) -> dict[tuple[str, int], float]:
    """CPU seconds used so far by each process: `(kind, pid)`."""
    kinds = {service.pid: service.role.replace("standby", "frame") for service in cluster.services()}
    kinds.update({bench.endpoint.pid: "endpoint", os.getpid(): "client"})
    found = {}
    for pid in {*bench.processes(), *kinds}:
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.NoSuchProcess:
            continue
        found[(kinds.get(pid, "ray"), pid)] = times.user + times.system
    return found


def cpu(bench: Bench) -> list[Row]:
    """CPU of a session of four model calls and three tools, sixteen at once."""
    with bench.cluster() as cluster:
        work_off(bench, cluster, 32, 16)
        loads = [work_off(bench, cluster, bench.some(160, 48), 16) for _ in range(bench.some(3, 1))]
        actor, pid, _ = baseline.create()
        calls = bench.some(4_000, 1_000)
        process = psutil.Process(pid)
        before = sum(process.cpu_times()[:2])
        for _ in range(calls):
            baseline.call_seconds(actor)
        one = (sum(process.cpu_times()[:2]) - before) / calls * 1e3
        baseline.end([actor])
    product = [sum(load.each(kind) for kind in ("supervisor", "node", "gateway", "frame")) for load in loads]
    new = sum(load.new_frames for load in loads)
    note = f"{new} actors were started meanwhile" if new else ""
    rows = [
        Row("cpu", "per session, all services and session actors", median(product), "ms", one,
            "CPU of one call in a bare actor", Limit(25), note)
    ]  # fmt: skip
    parts = {
        "node": "of which the node service",
        "frame": "of which session actors",
        "supervisor": "of which the supervisor",
        "ray": "besides: Ray's daemons and idle workers",
        "client": "besides: the client",
        "endpoint": "besides: the endpoint",
    }
    rows += [Row("cpu", text, median([load.each(kind) for load in loads]), "ms") for kind, text in parts.items()]
    return rows


def throughput(bench: Bench) -> list[Row]:
    """Such sessions per second, 64 at once; beside a new actor for each session."""
    rates, bare = [], []
    with bench.cluster() as cluster:
        work_off(bench, cluster, 64, 64)
        for _ in range(bench.some(3, 1)):
            load = work_off(bench, cluster, bench.some(384, 96), 64)
            rates.append(load.sessions / load.seconds)
            actors, seconds = baseline.create_many(8)
            bare.append(8 / seconds)
            baseline.end(actors)
    return [
        Row("throughput", "sessions per second, 64 at once", median(rates), "/s", median(bare),
            "bare actors created, one per session", Limit(60, at_least=True))
    ]  # fmt: skip


def burst(bench: Bench) -> list[Row]:
    """One answer asks for 64 sub-agents: until the endpoint has the last one's first request."""
    count = 64
    child = agent("child", [{"text": "done", "delay": 2.0}], tools=[])
    spawns = [["spawn_agent", {"task": f"part {number}"}] for number in range(count)]
    parent = agent("parent", [{"tool_calls": spawns}, {"text": "done"}], tools=["spawn_agent"], agents=[child])
    ours, bare, middle = [], [], []
    with bench.cluster() as cluster:
        until(lambda: bool(frames(cluster, "standby")), "a standby")
        for _ in range(bench.some(5, 1)):
            lead = cluster.spawn(parent)
            lead.send("go").result(180, check=True)
            began = received(lead.messages())
            first = [(received(session.messages()) - began) / 1e9 for session in _children(cluster, lead.id)]
            assert len(first) == count, f"{len(first)} sub-agents"
            ours.append(max(first))
            middle.append(median(first))
            actors, seconds = baseline.create_many(20)
            bare.append(seconds)
            baseline.end(actors)
    text = "20 cold bare actors"
    return [
        Row("burst", f"{count} sub-agents, last one's first model request", median(ours), "s", median(bare), text,
            Limit(1.0), "from the endpoint's receipt of the parent's request"),
        Row("burst", "the same, half of them", median(middle), "s", median(bare), text),
    ]  # fmt: skip


def _children(cluster: Cluster, parent_id: str) -> list[Session]:
    return [cluster.session(info.id) for info in cluster.session(parent_id).children()]
