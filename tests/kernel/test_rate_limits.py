"""A limited endpoint and two nodes with many sessions: no storm, fair, nothing lost. Without Ray: real node services,
gateways and HTTP, and the supervisor's part that shares the limit.

`UNDERSTUDY_TEST_PER_MINUTE=60` has the endpoint count whole minutes, for 64 sessions; otherwise its minute is short,
and there are fewer sessions.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from understudy.config import ModelProfile
from understudy.protocol import packed
from understudy.supervisor.known import Known, Node
from understudy.supervisor.ports import NodeReport
from understudy.supervisor.rate_sharing import RateSharing
from understudy.supervisor.stock import Stock
from understudy.tasks import Tasks
from understudy.testing.offline import Faults, OfflineServer, RateLimit
from understudy.transport.signatures import signature_of

from . import kernel as k
from .test_notices import nodes

GIVEN = int(os.environ.get("UNDERSTUDY_TEST_PER_MINUTE", "0"))
SESSIONS = 64 if GIVEN else 24
PER_MINUTE = GIVEN or 900
WINDOW = 60.0 if GIVEN else 2.0
STOP = 5.0 if GIVEN else 3.0
"""Seconds of the first refusal: meanwhile all sessions come to wait."""
PATIENCE = 600.0 if GIVEN else 60.0


class Handle:
    """A node service as its supervisor reaches it."""

    def __init__(self, node: k.Kernel) -> None:
        self.node_id = node.node_id
        self._node = node

    async def call(self, method: str, *arguments: Any) -> Any:
        result = await self._node.call(method, *packed(arguments))
        return signature_of(getattr(type(self._node.node), method)).result(result)


class Sharing:
    """The supervisor's part that shares limits; it can be replaced."""

    def __init__(self, *nodes: k.Kernel) -> None:
        self._nodes = nodes
        self._tasks = Tasks(logging.getLogger(__name__))
        self.generation = 10
        self.begin()

    def begin(self) -> None:
        """The next supervisor, which knows nothing."""
        self._tasks.cancel()
        self.generation += 1
        known = Known()
        known.begin()
        known.nodes = {node.node_id: Node(Handle(node), 2.0, Stock(2.0, None, 0)) for node in self._nodes}  # type: ignore[arg-type]
        known.announced = self.generation, list(known.nodes)
        self._tasks = Tasks(logging.getLogger(__name__))
        rates = RateSharing(known, self._tasks)
        for node in known.nodes.values():
            self._tasks.spawn(self._serve(rates, node))

    async def _serve(self, rates: RateSharing, node: Node) -> None:
        await node.handle.call("share_rates", rates.greeting())
        patience = 0.0
        while True:
            report: NodeReport = await node.handle.call("demand", patience)
            patience = 5.0
            rates.heed(node, report.rates)

    def end(self) -> None:
        """Nobody shares any more."""
        self._tasks.cancel()


@asynccontextmanager
async def limited_nodes(
    dsn: str, server: OfflineServer, directory: Path
) -> AsyncIterator[tuple[k.Kernel, k.Kernel, Sharing]]:
    async with nodes(dsn, server, directory) as (a, b):
        profile = ModelProfile("offline", "key", server.url, requests_per_minute=PER_MINUTE)
        for node in (a, b):
            await node.service.register(profile)
        sharing = Sharing(a, b)
        try:
            yield a, b, sharing
        finally:
            sharing.end()


def two_calls() -> dict[str, Any]:
    return k.spec(k.script([("no_such_tool", {})], "done"), deadline=10.0)


def one_call() -> dict[str, Any]:
    return k.spec(k.script("done"), deadline=10.0)


def asked_by(server: OfflineServer) -> list[str]:
    """Which session made each request."""
    return [
        next(message["content"] for message in recorded.body["messages"] if message["role"] == "user")
        for recorded in server.requests
    ]


async def test_many_sessions_on_two_nodes(postgres: str, tmp_path: Path) -> None:
    """Given many sessions on two nodes and an endpoint that takes fewer requests in its minute, when supervisors are
    replaced meanwhile, then hardly any request is refused, all runs complete, each call is answered once, and all
    trees have had a turn before a quarter of the others have had another one."""
    limit = RateLimit(int(PER_MINUTE * WINDOW / 60), WINDOW)
    refused_once = Faults(fail_first=1, fail_status=429, retry_after=STOP)
    with OfflineServer(rate_limit=limit, faults=refused_once) as server:
        async with limited_nodes(postgres, server, tmp_path) as (a, b, sharing):
            for number in range(SESSIONS):
                await (a, b)[number % 2].spawn(f"s{number}", one_call() if GIVEN else two_calls())
            started = asyncio.get_running_loop().time()
            for number in range(SESSIONS):
                await (a, b)[number % 2].send(f"s{number}", f"s{number}")
            sharing.begin()
            ends = [(a, b)[number % 2].end(f"s{number}") for number in range(SESSIONS)]
            rows = await asyncio.wait_for(asyncio.gather(*ends), PATIENCE)
            seconds = asyncio.get_running_loop().time() - started
        stats, order = server.stats, asked_by(server)
    print(json.dumps({"seconds": round(seconds, 1), "requests": stats.requests, "refused": stats.refused}))
    assert [row["status"] for row in rows] == ["completed"] * SESSIONS
    assert stats.completed == SESSIONS * (1 if GIVEN else 2)
    assert stats.repeats == 0
    assert stats.refused <= SESSIONS // 8
    assert len(set(order[: SESSIONS + SESSIONS // 4])) == SESSIONS


async def test_a_refusal_on_one_node_stops_the_other(postgres: str, tmp_path: Path) -> None:
    """Given an endpoint that refuses a request on one node for some time, then the other node sends nothing either
    until then, and both runs complete."""
    with OfflineServer(faults=Faults(fail_first=1, fail_status=429, retry_after=1.5)) as server:
        async with limited_nodes(postgres, server, tmp_path) as (a, b, _sharing):
            await a.spawn("s", one_call())
            await a.send("s", "s")
            async with asyncio.timeout(PATIENCE):
                while not stop_of(b):  # noqa: ASYNC110 - another process's message brings it, without an event
                    await asyncio.sleep(0.01)
            assert server.stats.completed == 0
            assert stop_of(b) <= 2.0
            await b.spawn("t", one_call())
            await b.send("t", "t")
            rows = await asyncio.gather(a.end("s"), b.end("t"))
        assert [row["status"] for row in rows] == ["completed"] * 2
        assert (server.stats.failed, server.stats.completed) == (1, 2)


def stop_of(node: k.Kernel) -> float:
    """Seconds for which a node sends nothing."""
    line = node.gateway.calls.gateway.limits.of("offline")._lines.get("")
    return line.pace.stopped(asyncio.get_running_loop().time()) if line is not None else 0.0
