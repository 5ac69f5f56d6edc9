"""Machines, actors and the network between them, as Ray gives them to the product."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from understudy.errors import ServiceGone

from .scheduler import Process, Scheduler

DEATH_SECONDS = 0.014
"""So long after a process's death the callers whose calls it had are notified (measured on Ray)."""

REPLACED = ("step", "commit")
CALLS_AT_ONCE = 4
"""So many calls of one method, of one frame, are never worked at at once: a repetition replaces what it repeats."""

RESTART_SECONDS = (0.4, 1.6)
NODE_LOSS_SECONDS = (1.0, 40.0)
"""So long it takes Ray to notice that a machine is gone."""


class Line:
    """A connection: nothing gets lost on it, and what is sent arrives in order.

    Attributes:
        at: when what was sent last arrives.
    """

    def __init__(self) -> None:
        self.at = 0.0


@dataclass(eq=False)
class Machine:
    """A node of the cluster.

    Attributes:
        alive: False once it was lost, with all its processes.
        frozen: none of its processes runs, and none starts.
        cut_off: nothing that is sent to it or by it arrives.
        store_cut_off: then neither the store.
        noticed: whether Ray knows of its loss.
        clock_offset: nanoseconds by which its wall clock differs.
        disturbed_until: until when something was wrong with it, its node service, or what it needs.
        actors: all that there ever were on it, also those whose names others have by now.
    """

    node_id: str
    disturbed_until: float = 0.0
    alive: bool = True
    frozen: bool = False
    cut_off: bool = False
    store_cut_off: bool = False
    noticed: bool = False
    clock_offset: int = 0
    held: list[Callable[[], None]] = field(default_factory=list)
    actors: list[Actor] = field(default_factory=list)


class Actor:
    """A process that answers calls; it is started again when it dies, if it shall be.

    Args:
        make: the object whose methods are called, made in the new process.

    Attributes:
        forked: another process keeps its connections open when it has died: nobody hears of its end, and nothing that
            it is asked has an answer.
    """

    def __init__(
        self, cluster: Cluster, name: str, machine: Machine, make: Callable[[Actor], Any], *, restarts: bool
    ) -> None:
        self.cluster = cluster
        self.name = name
        self.machine = machine
        self.restarts = restarts
        self.removed = False
        self.forked = False
        self._make = make
        self.process: Process | None = None
        self.target: Any = None
        self.pid = 0
        self.lives = 0
        self.pending: dict[int, Callable[[Exception], None]] = {}
        self.running: Counter[str] = Counter()
        self.ended: list[Callable[[], None]] = []
        machine.actors.append(self)

    @property
    def alive(self) -> bool:
        """Whether it has a process."""
        return self.process is not None and not self.process.dead

    def start(self) -> None:
        """Begin a life."""
        if self.removed or not self.machine.alive or self.alive:
            return
        if self.machine.frozen:
            self.cluster.after(1.0, self.start)
            return
        self.lives += 1
        self.pid = next(self.cluster.pids)
        process = self.process = self.cluster.scheduler.process(f"{self.name}.{self.lives}")
        process.clock_offset = self.machine.clock_offset
        process.on_death.append(self._died)
        self.cluster.note(f"{process.name} starts as pid {self.pid}")
        process.soon(self._begin, process)

    def _begin(self, process: Process) -> None:
        if self.process is process:
            self.target = self._make(self)

    def _died(self) -> None:
        process, self.target = self.process, None
        self.running = Counter()
        assert process is not None
        self.cluster.note(f"{process.name} dies")
        pending, self.pending = self.pending, {}
        if self.forked and self.machine.alive:
            return
        for fail in pending.values():
            self.cluster.after(DEATH_SECONDS, fail, ServiceGone(f"{self.name} died"))
        for callback in self.ended:
            callback()
        if self.restarts and not self.removed:
            self.cluster.after(self.cluster.network.uniform(*RESTART_SECONDS), self.start)

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self.process.kill()


class Cluster:
    """All machines and actors, and how calls travel between them.

    Args:
        network: decides how long messages take, and which of them are lost or come twice.
        note: writes a line into the record of the run.

    Attributes:
        frames: all that there ever were, by id; also those that nobody reaches any more.
        trouble: share of the calls whose answer is lost, of those that are lost, of those that come twice.
        cut: links, from one machine to another, over which nothing arrives; all others work.
        slow: seconds by which calls of a method are late, or, where negative, its answers.
    """

    def __init__(self, scheduler: Scheduler, network: random.Random, note: Callable[[str], None]) -> None:
        self.scheduler = scheduler
        self.network = network
        self.note = note
        self.machines: dict[str, Machine] = {}
        self.actors: dict[str, Actor] = {}
        self.frames: dict[str, Actor] = {}
        self.pids = itertools.count(1001)
        self.trouble = (0.0, 0.0, 0.0)
        self.cut: set[tuple[str, str]] = set()
        self.slow: dict[str, float] = {}
        self.violated: Callable[[str], None] = note
        self._calls = itertools.count(1)

    def add_machine(self, node_id: str) -> Machine:
        """One more node."""
        machine = self.machines[node_id] = Machine(node_id)
        return machine

    def start_actor(
        self, name: str, machine: Machine, make: Callable[[Actor], Any], *, restarts: bool = False
    ) -> Actor:
        """Get or create an actor."""
        actor = self.actors.get(name)
        if actor is None:
            actor = self.actors[name] = Actor(self, name, machine, make, restarts=restarts)
            if name.startswith("frame/"):
                self.frames[name.split("/")[2]] = actor
            actor.start()
        return actor

    def forget(self, actor: Actor) -> None:
        """An actor has its name no longer; another may have it already."""
        if self.actors.get(actor.name) is actor:
            del self.actors[actor.name]

    def after(self, seconds: float, function: Callable[..., None], *arguments: Any) -> None:
        """Something that no process does, and no death prevents."""
        self.scheduler.call_later(seconds, function, *arguments, context=self.scheduler.world.context.copy())

    def latency(self, here: Machine | None, there: Machine | None) -> float:
        """Seconds that a message takes."""
        draw = self.network.random()
        base = 0.0003 if here is there else 0.0012
        if draw > 0.985:
            return base + self.network.choice((0.01, 0.1, 1.0))
        return base * (0.5 + draw)

    def _send(
        self, here: Machine | None, there: Machine | None, function: Callable[[], None], late: float = 0.0
    ) -> None:  # fmt: skip
        """Deliver a message, unless and until a machine is cut off."""
        for machine in (here, there):
            if here is not there and machine is not None and machine.cut_off:
                machine.held.append(lambda: self._send(here, there, function))
                return
        if here is not None and there is not None and (here.node_id, there.node_id) in self.cut:
            there.held.append(lambda: self._send(here, there, function))
            return
        self.after(self.latency(here, there) + late, function)

    def heal(self, machine: Machine) -> None:
        """It is reached again; what was on its way arrives, as TCP would have it."""
        machine.cut_off = False
        self.cut = {link for link in self.cut if machine.node_id not in link}
        held, machine.held = machine.held, []
        for send in held:
            send()

    def lose(self, machine: Machine) -> None:
        """The machine is gone, with everything on it. Ray notices later."""
        self.note(f"machine {machine.node_id} is lost")
        machine.alive = False
        for actor in machine.actors:
            actor.removed = True
            actor.kill()

        def notice() -> None:
            machine.noticed = True
            for actor in machine.actors:
                self.forget(actor)

        self.after(self.network.uniform(*NODE_LOSS_SECONDS), notice)

    def call(  # noqa: C901 - the ways of one message, in order
        self, actor: Actor, method: str, *arguments: Any, here: Machine | None = None, line: Line | None = None
    ) -> Awaitable[Any]:  # fmt: skip
        """Call a method, as an actor's handle does: at most once, its outcome may never be known.

        Args:
            line: of the caller and an actor of the same machine.

        Raises:
            ServiceGone: the actor is dead or died meanwhile.
        """
        scheduler = self.scheduler
        data = pickle.dumps((method, arguments))
        called = _called(method, arguments)
        late = self.slow.get(called, 0.0)
        caller = scheduler.current
        future = scheduler.create_future()
        number = next(self._calls)
        lost_answer, lost_call, twice = self.trouble if here is not None and line is None else (0.0, 0.0, 0.0)

        def resolve(result: bytes | None, error: Exception | None) -> None:
            actor.pending.pop(number, None)
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(pickle.loads(result or b""))

        def fail(error: Exception) -> None:
            self._send(actor.machine, here, lambda: caller.soon(resolve, None, error))

        def arrive() -> None:
            if not actor.alive or actor.target is None:
                if actor.machine.frozen and not actor.removed:
                    self.after(1.0, arrive)
                elif actor.forked and actor.process is not None and actor.process.dead and not actor.removed:
                    return
                elif actor.removed or actor.process is None or actor.process.dead:
                    fail(ServiceGone(f"{actor.name} is gone" if actor.removed else f"{actor.name} is restarting"))
                else:
                    self.after(0.001, arrive)
                return
            process = actor.process
            assert process is not None
            # A probe has a thread of its own; that matters, and is simulated, where the event loop is blocked.
            beside = method == "probe" and process.main.blocked
            spawn = process.spawn_beside if beside else process.spawn
            spawn(work(actor.target), f"{actor.name}.{method}")

        def look(key: str, running: Counter[str]) -> None:
            if running[key] >= CALLS_AT_ONCE and actor.running is running:
                self.violated(f"{actor.name} works at {running[key]} calls of {key}: repetitions pile up")

        async def work(target: Any) -> None:
            name, values = pickle.loads(data)
            running = actor.running
            key = f"{called} for {caller.name}"
            running[key] += 1
            if running[key] == CALLS_AT_ONCE and called in REPLACED:
                self.after(1.0, look, key, running)  # after a pause several come at once, and replace each other
            try:
                result, error = pickle.dumps(await getattr(target, name)(*values)), None
            except asyncio.CancelledError:
                result, error = None, ServiceGone("the call was cut off")
            except Exception as raised:
                result, error = None, pickle.loads(pickle.dumps(raised))
            finally:
                running[key] -= 1
            if lost_answer and self.network.random() < lost_answer:
                self.note(f"the answer of {actor.name} to {name} is lost")
                actor.pending.pop(number, None)
                return
            scheduler.call_soon(
                lambda: self._send(actor.machine, here, lambda: caller.soon(resolve, result, error), max(0.0, -late)),
                context=scheduler.world.context.copy(),
            )

        actor.pending[number] = fail
        if lost_call and self.network.random() < lost_call:
            self.note(f"a call of {method} at {actor.name} is lost")
            actor.pending.pop(number)
            return future
        if line is not None:
            line.at = max(line.at, scheduler.time() + self.latency(here, actor.machine) + max(0.0, late))
            self.after(line.at - scheduler.time(), arrive)
            return future
        self._send(here, actor.machine, arrive, max(0.0, late))
        if twice and self.network.random() < twice:
            self.note(f"a call of {method} at {actor.name} comes twice")
            self._send(here, actor.machine, arrive)
        return future


def _called(method: str, arguments: tuple[Any, ...]) -> str:
    """What a call is for, below the layers that repeat it."""
    return str(arguments[1]) if method == "repeated" else method
