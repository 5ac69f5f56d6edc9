"""The same agent, on the same endpoint, in a raw loop and in other libraries: in turns with Understudy, in one run."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness import Bench, Limit, Row, median
from rounds import work_off
from workload import noting, rounds_of, scripted

from understudy import Cluster

PROGRAMS = Path(__file__).parent / "peers"
OURS, RAW = "understudy", "a raw asyncio loop"
PEERS = {
    RAW: ("raw_loop.py", ("openai",)),
    "power-loop": ("power_loop_agent.py", ("power_loop",)),
    "LangGraph": ("langgraph_agent.py", ("langgraph", "langgraph.checkpoint.sqlite", "langchain_openai")),
}


@dataclass(frozen=True)
class Order:
    """So many sessions, so many at once, whose model takes `delay` seconds."""

    name: str
    sessions: int
    at_once: int
    delay: float = 0.0


@dataclass
class Measured:
    """Per order: seconds, and CPU milliseconds per session over all processes but the endpoint."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)

    def note(self, order: Order, seconds: float, cpu: float) -> None:
        """One turn's measure."""
        self.seconds.setdefault(order.name, []).append(seconds)
        self.cpu.setdefault(order.name, []).append(cpu / order.sessions * 1e3)


class Peer:
    """A program that works sessions off in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def work_off(self, order: Order) -> tuple[float, float, int]:
        """Seconds, CPU seconds and, if it counts them, calls of functions that an order took."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        wanted = {
            "sessions": order.sessions,
            "at_once": order.at_once,
            "instructions": scripted(rounds_of("note", order.delay)),
        }
        self._process.stdin.write(json.dumps(wanted) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended with {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found["seconds"], found["cpu"], found["calls"]


@contextmanager
def started(program: str, bench: Bench, *arguments: str) -> Iterator[Peer]:
    """The program, for as long as the context lasts."""
    directory = Path(tempfile.mkdtemp(prefix=f"{program}-", dir=bench.directory))
    command = [sys.executable, str(PROGRAMS / program), bench.endpoint.url, str(directory), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Peer(process)
        finally:
            process.kill()


def is_there(modules: tuple[str, ...]) -> bool:
    """Whether what a peer needs is installed."""
    try:
        return all(importlib.util.find_spec(name) is not None for name in modules)
    except ModuleNotFoundError:
        return False


def peers(bench: Bench) -> list[Row]:
    """Four model calls and three tools with effects, beside a raw loop and what else is installed ('.[benchmarks]')."""
    orders = [
        Order("at once", bench.some(128, 32), 64),
        Order("alone", bench.some(20, 4), 1),
        Order("slow model", bench.some(200, 32), 64, 0.2),
    ]
    measured: dict[str, Measured] = {}
    with ExitStack() as stack:
        cluster = stack.enter_context(bench.cluster())
        contenders: dict[str, Cluster | Peer] = {OURS: cluster}
        for name, (program, modules) in PEERS.items():
            if is_there(modules):
                contenders[name] = stack.enter_context(started(program, bench))
            else:
                bench.say(f"{name} is not installed: pip install -e '.[benchmarks]'")
        for contender in contenders.values():
            for delay in sorted({order.delay for order in orders}):  # some make their agent when they first need it
                _turn(bench, contender, Order("warm-up", 64, 64, delay))
        for _ in range(bench.some(5, 1)):
            for order in orders:
                for name, contender in contenders.items():
                    measured.setdefault(name, Measured()).note(order, *_turn(bench, contender, order))
    return list(_rows(measured, orders))


def calls(bench: Bench) -> list[Row]:
    """The same agent, all in one process: calls of functions, Python's and C's. Counted, so it is the same anywhere."""
    orders = [Order("alone", 1, 1), Order("at once", 16, 16)]
    found: dict[str, dict[str, float]] = {}
    for name, program in ((OURS, "one_process.py"), (RAW, PEERS[RAW][0])):
        with started(program, bench, "count") as peer:
            peer.work_off(Order("warm-up", 16, 16))
            found[name] = {
                order.name: median([peer.work_off(order)[2] / order.sessions for _ in range(bench.some(5, 1))])
                for order in orders
            }
    return [
        Row("calls", f"{OURS}: calls per session, {order.at_once} at once", found[OURS][order.name] / 1e3, "thousand",
            found[RAW][order.name] / 1e3, RAW, Limit(0.6, of_ratio=True, counted=True))
        for order in orders
    ]  # fmt: skip


def _turn(bench: Bench, contender: Cluster | Peer, order: Order) -> tuple[float, float]:
    if isinstance(contender, Peer):
        return contender.work_off(order)[:2]
    load = work_off(bench, contender, order.sessions, order.at_once, noting(order.delay))
    return load.seconds, sum(seconds for kind, seconds in load.cpu.items() if kind != "endpoint")


@dataclass(frozen=True)
class Measure:
    """What of a turn is shown.

    Attributes:
        series: of `Measured`.
        shown: makes what is shown of a turn's figure.
    """

    text: str
    order: Order
    series: str
    shown: Callable[[float], float]
    unit: str
    limit: Limit

    def of(self, measured: Measured) -> list[float]:
        """One value a turn."""
        figures: list[float] = getattr(measured, self.series)[self.order.name]
        return [self.shown(figure) for figure in figures]


def _rows(measured: dict[str, Measured], orders: list[Order]) -> Iterator[Row]:
    many, alone, slow = orders
    at_once = f"{many.at_once} at once"
    rate = Measure(
        f"sessions per second, {at_once}", many, "seconds", lambda seconds: many.sessions / seconds, "/s",
        Limit(1.2, of_ratio=True, at_least=True),
    )  # fmt: skip
    measures = (
        Measure(f"CPU per session, {at_once}", many, "cpu", lambda cpu: cpu, "ms", Limit(1.4, of_ratio=True)),
        rate,
        Measure("a session alone", alone, "seconds", lambda seconds: seconds / alone.sessions * 1e3, "ms",
            Limit(1.6, of_ratio=True)),
        Measure(f"{slow.sessions} sessions, {slow.at_once} at once, model of 200 ms", slow, "seconds",
            lambda seconds: seconds, "s", Limit(1.2, of_ratio=True)),
    )  # fmt: skip
    note = "several processes, the others are one each"
    for name in [name for name in measured if name != RAW]:
        for measure in measures:
            row = _row(measure, name, measured[name], RAW, measured[RAW])
            yield replace(row, limit=measure.limit, note=note) if name == OURS else row
    for name in [name for name in measured if name not in (OURS, RAW)]:
        row = _row(rate, OURS, measured[OURS], name, measured[name])
        yield replace(row, limit=Limit(2, of_ratio=True, at_least=True), note=note)


def _row(measure: Measure, name: str, measured: Measured, against: str, baseline: Measured) -> Row:
    values, others = measure.of(measured), measure.of(baseline)
    turns = tuple(value / other for value, other in zip(values, others, strict=True))
    text = f"{name}: {measure.text}"
    return Row("peers", text, median(values), measure.unit, median(others), against, turns=turns)
