"""What looking at thousands of sessions costs a node service: how long its event loop does nothing else.

One node service and a few frames in this process, without Ray: what a process boundary adds is not in these numbers.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from harness import Bench, Limit, Row, median, percentile
from workload import answering

from understudy.actors.frame import Frame
from understudy.cluster.client.compiling import compile_spec
from understudy.config import ModelProfile
from understudy.gateway.gateway import Gateway
from understudy.gateway.gateway_calls import GatewayCalls
from understudy.node.basis import NodeConfig
from understudy.node.node_service import NodeService
from understudy.node.requests import Requests
from understudy.ports import Node
from understudy.protocol import Exit, Following, Input, NewSession, Work
from understudy.store.operations import beginnings
from understudy.store.operations.activation import acquire
from understudy.transport.remote_node import CalledNode
from understudy.transport.signatures import signature_of

FRAMES = 4
FAR = 3_600_000_000
"""An hour: nobody wakes up by himself."""

TOGETHER = 100
LOOP_LIMIT = 0.05


def stalls(bench: Bench) -> list[Row]:
    """A node service in this process, with 10,000 sessions that wait: what looking at all of them costs it at once."""
    return asyncio.run(_measure(bench, bench.some(10_000, 400), bench.some(200, 20)))


async def _measure(bench: Bench, count: int, wakes: int) -> list[Row]:
    async with _node(bench) as node:
        names = [f"s{number}" for number in range(count)]
        await node.create(names[: count // 2], waits=False)
        bench.say(f"{count // 2} idle sessions")
        await node.create(names[count // 2 :], waits=True)
        bench.say(f"{count // 2} sessions wait for timers")
        found = await _stalls(node)
        chosen = random.Random(7)
        rows = []
        for kind, some in (("idle", names[: count // 2]), ("timer", names[count // 2 :])):
            taken = [await node.wake(name, kind) * 1_000 for name in chosen.sample(some, wakes)]
            bench.say(f"woke {wakes}: {kind}")
            note = f"p99 {percentile(taken, 99):.1f} ms"
            rows.append(Row("stalls", f"waking one, {kind}", median(taken), "ms", limit=Limit(15), note=note))
    limit = Limit(1_000 * LOOP_LIMIT)
    rows += [
        Row("stalls", f"event loop stands still: {what}", 1_000 * s, "ms", limit=limit) for what, s in found.items()
    ]
    return rows


async def _stalls(node: _Node) -> dict[str, float]:
    """The most CPU time between two turns of the event loop, in each of the calls that look at all sessions."""
    service, home = node.service, node.service.config.node_id
    numbers = itertools.count(1_000)
    calls: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
        "take_over": lambda: service.takeover.run(service.generation, next(numbers), [home]),
        "sweep": lambda: service.sweep.run(0),
        "demand": lambda: service.frames.supply.demand(0.0),
        "timers": service.timers.look,
    }
    found = {}
    for what, call in calls.items():
        await asyncio.sleep(0.3)
        longest = 0.0
        task = asyncio.ensure_future(call())
        while not task.done():
            began = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - began)
        await task
        found[what] = longest
    return found


class _Node:
    """A node service with frames in this process."""

    def __init__(self, service: NodeService, profile: str) -> None:
        self.service = service
        self.requests = Requests(service)
        self.frame_ids = [f"frame-{number}" for number in range(FRAMES)]
        self._spec = compile_spec(answering(), model="offline-over-http", profile=profile).spec
        self._arrivals: dict[str, asyncio.Future[float]] = {}

    def frame(self, frame_id: str) -> Frame:
        """A frame whose calls travel as data, as they would between processes."""
        return Frame(_Link(self), frame_id, self.service.config.node_id, "")

    async def create(self, names: list[str], *, waits: bool) -> None:
        """Sessions of that name; those that wait have an input, and go on when their timer is due."""
        for start in range(0, len(names), TOGETHER):
            some = names[start : start + TOGETHER]
            await asyncio.gather(*(self._create(name, waits) for name in some))

    async def _create(self, name: str, waits: bool) -> None:
        await self.requests.spawn(NewSession(name, dict(self._spec)), {})

        def wait(tx: Any) -> None:
            beginnings.pause(tx, tx.session(name), FAR)
            beginnings.accept(tx, name, "r", "go")

        if waits:
            await self.service.journal.submit(wait, name)

    async def wake(self, name: str, kind: str) -> float:
        """Seconds from what wakes a session until a frame has it; returns when its run has ended."""
        began = time.perf_counter()
        arrival = self._arrivals[name] = asyncio.get_running_loop().create_future()
        if kind == "idle":
            await self.requests.send(name, Input("r", "go"), name)
        else:
            await self.service.journal.submit(
                lambda tx: tx.set_timer(tx.session(name), beginnings.PAUSE_TIMER, tx.now), name
            )
        taken = await arrival - began
        while not (await self.requests.watch("wake", {name: Following(0, ends=True)}, 10.0)).runs:
            pass
        return taken

    def arrived(self, work: Work | Exit) -> None:
        """A frame was given work."""
        arrival = self._arrivals.pop(work.session_id, None) if isinstance(work, Work) else None
        if arrival is not None:
            arrival.set_result(time.perf_counter())


class _Link(CalledNode):
    """The node service as a frame reaches it."""

    def __init__(self, node: _Node) -> None:
        self._node = node

    async def _send(self, method: str, arguments: Sequence[Any]) -> Any:
        signature = signature_of(getattr(Node, method))
        found = await getattr(self._node.service, method)(*signature.arguments(arguments))
        if method == "step":
            self._node.arrived(found)
        return signature.sent(found)


@asynccontextmanager
async def _node(bench: Bench) -> AsyncIterator[_Node]:
    config = NodeConfig(
        f"sqlite:///{bench.directory}/waiting.db", "bench", "node", "node", span_directory=str(bench.directory)
    )
    gateway = GatewayCalls(Gateway())
    service = NodeService(config, gateway)
    service.profiles.learn(ModelProfile("benchmark", "no-secret", bench.endpoint.url))
    await service.start()
    node = _Node(service, "benchmark")
    tasks: list[asyncio.Task[None]] = []
    try:
        generation = await service.journal.submit(lambda tx: acquire(tx, "bench", FAR, may_take=lambda _: True))
        await service.takeover.run(generation, 1, ["node"])
        tasks += [asyncio.create_task(node.frame(frame_id).run()) for frame_id in node.frame_ids]
        yield node
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await service.close()
        await gateway.close()
