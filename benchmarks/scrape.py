"""What Prometheus sees of a node service: series and the time of a scrape, with few sessions and with many. No Ray."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from commits import Worker
from harness import Bench, Limit, Row, median

from understudy.gateway.gateway import Gateway
from understudy.gateway.gateway_calls import GatewayCalls
from understudy.node.basis import NodeConfig
from understudy.node.node_service import NodeService
from understudy.store.operations import activation, beginnings
from understudy.store.operations.activation import FrameRef

FEW = 10
AGENTS = 8
AT_ONCE = 100
LEASE = 3_600_000_000
OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


def scrape(bench: Bench) -> list[Row]:
    """With 10 and with 10,000 sessions in the store of one service, each with a run of two rounds under way."""
    return asyncio.run(_measure(bench))


@asynccontextmanager
async def one_service(bench: Bench, name: str) -> AsyncIterator[NodeService]:
    """A node service that owns a new store of this name."""
    config = NodeConfig(
        f"sqlite:///{bench.directory}/{name}.db", "bench", "node", "node", span_directory=str(bench.directory)
    )
    service = NodeService(config, GatewayCalls(Gateway()))
    await service.start()
    try:
        service.journal.generation = await service.journal.submit(
            lambda tx: activation.acquire(tx, "bench", LEASE, may_take=lambda _: True)
        )
        service.homes.nodes = ["node"]
        yield service
    finally:
        await service.close()


async def _measure(bench: Bench) -> list[Row]:
    many, number = bench.some(10_000, 500), bench.some(50, 10)
    async with one_service(bench, "scrape") as service:
        await service.projection.adoption.look()  # what it shows is there from the start
        await add_sessions(service, 0, FEW)
        few_series, few_times, few_count = await _scraped(service, number)
        await add_sessions(service, FEW, many)
        bench.say(f"{many} sessions are there")
        series, times, count = await _scraped(service, number)
    what, beside = f"{many:,} sessions", f"{FEW} sessions"
    return [
        Row("scrape", f"series, {what}", series, "", few_series, beside, Limit(1.0, of_ratio=True)),
        Row("scrape", f"one scrape, {what}, p50", median(times), "ms", median(few_times), beside, Limit(50)),
        Row("scrape", f"one scrape, {what}, max", max(times), "ms", max(few_times), beside),
        Row("scrape", f"counting in the store, {what}", count, "ms", few_count, beside, note="in the background"),
    ]


async def add_sessions(service: NodeService, first: int, until: int) -> None:
    """Sessions with these numbers, each with a run of two rounds under way."""
    for start in range(first, until, AT_ONCE):
        await asyncio.gather(*(_session(service, number) for number in range(start, min(until, start + AT_ONCE))))


async def _session(service: NodeService, number: int) -> None:
    session_id, journal = f"session-{number}", service.journal
    spec: dict[str, Any] = {"name": f"agent-{number % AGENTS}", "hash": "hash", "restart": {}}

    def create(tx: Any) -> Any:
        beginnings.create_session(
            tx, session_id, spec, spec_hash="hash", placement="", node_id="node", metadata={}
        )  # fmt: skip
        beginnings.accept(tx, session_id, "run", "go")
        return activation.activate(tx, session_id, FrameRef("frame", 1, "node"))

    work = await journal.submit(create, session_id)
    await Worker(journal, work.activation).rounds(2)


async def _scraped(service: NodeService, number: int) -> tuple[int, list[float], float]:
    """Series, milliseconds of each scrape over HTTP, and the median of what it takes to count in the store."""
    counting, took = service.projection.counting, list[float]()
    for _ in range(5):
        began = time.perf_counter()
        await counting.count()
        took.append((time.perf_counter() - began) * 1000)
    found = [await asyncio.to_thread(_get, service.projection.address) for _ in range(number + 1)]
    return found[0][0], [milliseconds for _, milliseconds in found[1:]], median(took)


def _get(address: str) -> tuple[int, float]:
    request = urllib.request.Request(f"http://{address}/metrics", headers={"Accept": OPEN_METRICS})
    began = time.perf_counter()
    with urllib.request.urlopen(request) as response:
        lines = response.read().splitlines()
    return sum(not line.startswith(b"#") for line in lines), (time.perf_counter() - began) * 1000
