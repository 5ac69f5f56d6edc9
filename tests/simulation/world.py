"""A simulated cluster with its store, its endpoint, its clients and what goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import Mock, patch

from understudy.actors.hooks import HookContext
from understudy.actors.tools import ToolContext
from understudy.config import ModelProfile
from understudy.errors import StoreUnreachable, UnderstudyError
from understudy.node.calls import Call, Calls
from understudy.node.draining import Draining
from understudy.node.homes import Homes
from understudy.records import KeptResponse, ModelRequest
from understudy.store.journal import Committed, Journal
from understudy.store.operations import requests
from understudy.supervisor.capacity import Memory

from . import model, stores, system, tools
from .autoscaling import Autoscaler
from .client import Client
from .cluster import Actor, Cluster, Machine
from .commands import Commands
from .ending import Ending
from .endpoint import Endpoint, client_of
from .faults import Faults
from .invariants import Invariants
from .log import Log
from .plan import Plan
from .processes import SupervisorProcess
from .requested import Requested
from .responses import PROFILE, SPARE, Responses
from .scheduler import Exhausted, Process, Scheduler, Signal
from .spans import Collector

assert model

SUPERVISOR = "supervisor"
FINISH_SECONDS = 900.0
"""After the last fault all work must end within this time."""

QUIET_SECONDS = 120.0
"""Then nothing may be left in the services; a commit that hangs may last for most of it."""

STEP_LIMIT = 1_500_000


@dataclass(frozen=True)
class Effect:
    """A tool acted on the world."""

    at: float
    call_key: str
    name: str
    epoch: int
    process: str


@dataclass
class Result:
    """What a simulation found."""

    plan: Plan
    violations: list[str]
    lines: list[str]
    seconds: float
    steps: int
    trace: int
    counts: Counter[str] = field(default_factory=Counter)


class World:
    """Everything that is simulated.

    Attributes:
        effects: of all tools, in order.
        lines: the record of the run.
    """

    namespace = "simulation"

    def __init__(self, plan: Plan, *, log_level: int = logging.WARNING) -> None:
        self.plan = plan
        self._log_level = log_level
        self.scheduler = Scheduler(random.Random(f"{plan.seed}/order"), calm=plan.calm)
        self.scheduler.step_limit = STEP_LIMIT
        self.cluster = Cluster(self.scheduler, random.Random(f"{plan.seed}/network"), self.note)
        self.endpoint = Endpoint(
            random.Random(f"{plan.seed}/endpoint"), random.Random(f"{plan.seed}/odd"),
            random.Random(f"{plan.seed}/lengths"), self.note, plan.endpoint_trouble, plan.stuck,
            random.Random(f"{plan.seed}/forms"), plan.limit,
        )  # fmt: skip
        if plan.responses:
            self.endpoint.kept = Responses(self, random.Random(f"{plan.seed}/kept responses"), plan.seed)
        self.forks = random.Random(f"{plan.seed}/forks")
        self.lines: list[str] = []
        self.effects: list[Effect] = []
        self.counts: Counter[str] = Counter()
        self.standby = plan.standby
        self.max_actors = plan.max_actors
        self.prices = None
        self.span_directory = ""
        self.notices: dict[str, float | None] = {}
        self.outside = Machine("clients")
        self.slow_kills: dict[int, float] = {}
        self.killed: set[int] = set()
        self.clients: list[Client] = []
        self.spans = Collector()
        self.commands = Commands(self)
        self.store: Any = None
        self.log = Log(self)
        self.invariants = Invariants(self)
        self.ending = Ending(self, self.invariants)
        self.requested = Requested(self)
        self.faults = Faults(self)
        self.autoscaler = Autoscaler(self, random.Random(f"{plan.seed}/autoscaler"))

    def note(self, text: str) -> None:
        """Write a line into the record."""
        self.lines.append(f"{self.scheduler.time():10.4f} {self.scheduler.current.name:>14}  {text}")

    # What processes ask of the world.

    def call(self, actor: Actor, method: str, *arguments: Any, here: Machine | None) -> Awaitable[Any]:
        """Call an actor."""
        return self.cluster.call(actor, method, *arguments, here=here)

    def effect(self, name: str, context: ToolContext) -> None:
        """A tool acts."""
        process = self.scheduler.current
        effect = Effect(self.scheduler.time(), context.call_key, name, context.epoch, process.name)
        self.effects.append(effect)
        self.note(f"effect {context.call_key} epoch {context.epoch}")
        self.invariants.check_effect(effect)

    def model_call(self, request: ModelRequest, incarnation: int) -> None:
        """A node service asks a model, which costs, unless a response is fetched. What is done for a session that was
        removed since is counted for no other one that has its id."""
        if incarnation != self.incarnation(request.wait_key.partition("/")[0]):
            self.note(f"model call {request.wait_key} of a session that was removed")
            return
        if request.response is None:
            self.endpoint.count(request.wait_key)
        self.invariants.check_model_call(request)

    @property
    def profile(self) -> ModelProfile:
        """The model profile of all agents. It says the endpoint's limit if that is even; gateways learn an odd one."""
        profile = PROFILE if self.plan.responses else ModelProfile("offline", "key", "http://endpoint/v1")
        given = float(self.plan.limit) if self.plan.limit and self.plan.limit % 2 == 0 else None
        return replace(profile, requests_per_minute=given)

    @property
    def profiles(self) -> list[ModelProfile]:
        """That one, and its fallback where it has one."""
        return [self.profile, *([SPARE] if self.plan.responses else [])]

    def cancelled(self, response: KeptResponse) -> None:
        """A gateway gives a response up that an endpoint makes in the background."""
        if self.endpoint.kept is not None:
            self.endpoint.kept.unwanted.add(response.id)

    def incarnation(self, session_id: str) -> int:
        """A session's incarnation as it is committed now; 0 if there is none."""
        rows = self.committed(f"SELECT incarnation FROM session WHERE session_id = '{session_id}'")
        return rows[0][0] if rows else 0

    def hooked(self, context: HookContext) -> None:
        """A hook is called."""
        self.note(f"hook {context.point} {context.call_key}{' again' if context.redone else ''}")
        self.invariants.check_hook(context)

    def committed(self, sql: str) -> list[Any]:
        """Rows of what is committed now."""
        found: list[Any] = self.store.rows(sql)
        return found

    def report(self, context: ToolContext, fraction: float) -> None:
        """A tool says how far it has come, if tools do."""
        if self.plan.reports:
            self.invariants.reported.report(context, fraction)
            self.counts["reports"] += 1

    def goes_on(self, context: ToolContext) -> None:
        """A tool does more, after its effect."""
        self.invariants.check_process(context.call_key, context.session_id, context.epoch, self.scheduler.current)

    def block(self, seconds: float) -> None:
        """A tool computes for so long on the event loop of its process."""
        self.scheduler.current.block(seconds)

    async def die(self) -> None:
        """A tool brings its process down."""
        self.scheduler.world.soon(self.scheduler.current.kill)
        await asyncio.Event().wait()

    def die_in_thread(self) -> None:
        """The same in a thread."""
        self.scheduler.world.soon(self.scheduler.current.kill)
        self.scheduler.wait(Signal())

    def effects_of(self, call_key: str) -> int:
        """How often a call acted."""
        return sum(effect.call_key == call_key for effect in self.effects)

    def forget(self, session_ids: list[str]) -> None:
        """Sessions were removed: others may have their ids."""
        self.log.forget(session_ids)
        self.invariants.forget(session_ids)
        self.spans.forget(session_ids)
        gone = {f"{session_id}/" for session_id in session_ids}
        self.effects = [one for one in self.effects if one.call_key[: one.call_key.index("/") + 1] not in gone]
        for key in [key for key in self.endpoint.calls if key[: key.index("/") + 1] in gone]:
            del self.endpoint.calls[key]

    def sleep_in_thread(self, seconds: float) -> None:
        """`time.sleep`."""
        self.scheduler.wait(Signal(), seconds)

    def machine_of(self, process: Process | None) -> Machine | None:
        """The machine that a process of the services is on; None for others."""
        for machine in self.cluster.machines.values():
            if process is not None and any(actor.process is process for actor in machine.actors):
                return machine
        return None

    def process_of(self, pid: int) -> Process | None:
        """The process that has a pid."""
        for machine in self.cluster.machines.values():
            for actor in machine.actors:
                if actor.pid == pid and actor.alive:
                    return actor.process
        return None

    def kill_pid(self, pid: int, why: str) -> float:
        """SIGKILL; returns the seconds until the process is gone: some take long to die."""
        process = self.process_of(pid)
        if process is None:
            return 0.0
        self.killed.add(pid)
        slow = self.slow_kills.pop(pid, 0.0)
        self.note(f"SIGKILL to {process.name}: {why}" + (f"; it takes {slow:.1f} s" if slow else ""))
        if not slow:
            process.kill()
        else:
            process.pause()  # it runs nothing of its own any more, but its pid is there
            self.cluster.after(slow, process.kill)
        return slow

    async def kill_and_wait(self, pid: int) -> bool:
        """Make sure that a process is gone, as `kill_process` does: with a bound for one attempt."""
        self.kill_pid(pid, "kill_process")
        for _ in range(600):
            if self.process_of(pid) is None:
                return True
            await asyncio.sleep(0.05)
        return False

    def ray_kill(self, actor: Actor, *, restart: bool) -> None:
        """`ray.kill`: takes effect if and when the machine is reached."""

        def arrive() -> None:
            if not restart:
                actor.removed = True
                self.cluster.forget(actor)
            if actor.alive and actor.process is not None and actor.process.paused:
                self.cluster.after(1.0, arrive)  # it is asked to end, and does not hear it
            elif actor.alive:
                self.kill_pid(actor.pid, "ray.kill")

        self.cluster._send(None, actor.machine, arrive)

    # Running.

    def start_supervisor(self) -> Actor:
        """The supervisor, on the first machine."""
        head = next(iter(self.cluster.machines.values()))
        return self.cluster.start_actor(SUPERVISOR, head, lambda actor: SupervisorProcess(self, actor), restarts=True)

    def run(self) -> Result:
        """Simulate, from the start of the cluster to the end of all work."""
        with self._installed(), _garbage_kept():
            try:
                with system.watched(self.scheduler):
                    self.scheduler.run_until_complete(self._run())
            except (Exhausted, system.Endless) as error:
                self.invariants.violated(f"liveness: {error}\n{self.ending.situation()}")
            except Exception as error:
                self.invariants.violated(f"the simulation failed: {type(error).__name__}: {error}")
                logging.getLogger("simulation").debug("", exc_info=True)
            finally:
                seconds = self.scheduler.time()
                self.scheduler.end()
                self.store.close()
        return Result(
            self.plan, self.invariants.violations, self.lines, seconds, self.scheduler.steps, self.scheduler.trace,
            self.counts,
        )  # fmt: skip

    @contextlib.contextmanager
    def _installed(self) -> Iterator[None]:
        with (
            system.installed(self.scheduler, self.plan.seed, self.note, self._log_level, self.invariants.violated),
            patch("understudy.node.basis.Database", lambda _dsn: self.store.open(self.scheduler.current.name)),
            patch("understudy.node.projection.MetricsServer", return_value=Mock(port=0)),
            patch("understudy.node.supply.measure", lambda _pids: Memory(1 << 40, 1 << 39)),
            patch.object(Journal, "_transaction", self._transaction(Journal._transaction)),
            patch.object(Draining, "_send_off", self._sending_off(Draining._send_off)),
            patch.object(Homes, "learn_drains", self._learning_drains(Homes.learn_drains)),
            patch.object(Calls, "start", self._starting(Calls.start)),
            patch.object(requests, "once", self.requested.watched(requests.once)),
            # Histories are short here: all are worth keeping, and some clusters' gateways forget most of them.
            patch("understudy.actors.conversation.WORTH_KEEPING", 0),
            patch("understudy.actors.workflow_record.SNAPSHOT_STEPS", (2, 4, 500)[self.plan.seed % 3]),
            patch("understudy.gateway.histories.KEPT_BYTES", (1_000, 4_000, 1 << 20)[self.plan.seed % 3]),
            patch("openai.DefaultAioHttpClient", client_of(self.endpoint)),
            patch("understudy.actors.frame._unpickle", tools.unpickle),
            patch("understudy.actors.frame._written", lambda _module: 0),  # by a clock that is not simulated
            patch("understudy.node.projection.span_exporter", lambda *_args: self.spans),
        ):
            tools.WORLD.append(self)
            self.store = stores.store_of(self, self.plan.backend)
            try:
                yield
            finally:
                tools.WORLD.pop()

    def _starting(self, original: Any) -> Any:
        """The start of a model call at its node service, reported to the invariants."""

        def start(calls: Calls, call: Call) -> None:
            if call.request is not None and calls.find(*call.key) is None:
                self.invariants.sent.called(call.request.wait_key)
            original(calls, call)

        return start

    def _sending_off(self, original: Any) -> Any:
        """What a drain takes from its frames, reported to the invariants where the deadline is over."""

        async def send_off(draining: Draining, rows: list[Any], over: bool) -> None:
            for row in rows if over else ():
                self.invariants.sent_off(row.session_id, row.run_id)
            await original(draining, rows, over)

        return send_off

    def _learning_drains(self, original: Any) -> Any:
        """What a node service learns of drains; those that it has known until then are reported to the invariants."""

        def learn(homes: Homes, drains: Any) -> None:
            for node_id in set(homes.nodes).difference(homes.available):
                self.invariants.files.given_up(node_id)
            original(homes, drains)

        return learn

    def _transaction(self, original: Any) -> Any:
        """A journal's transaction, which the invariants watch."""

        def transaction(journal: Journal, group: Any) -> Committed:
            generation, began = journal.generation, self.scheduler.time()
            self.requested.begin()
            try:
                committed: Committed = original(journal, group)
            except UnderstudyError as error:
                if isinstance(error, StoreUnreachable):
                    self.log.doubt()
                raise
            except BaseException:  # its process is killed
                self.log.doubt()
                raise
            self.requested.committed()
            events = self.log.news(journal.writer, committed.events)
            self.invariants.committed(self.scheduler.current.name, generation, began, committed, events)
            for event in events:
                self.faults.committed(event)
                self.commands.committed(event)
                for client in self.clients:
                    client.committed(event)
            return committed

        return transaction

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that is seen from outside only: nothing of the simulated tells of it."""
        looking = asyncio.get_running_loop().create_future()

        def look() -> None:
            if looking.done():
                return
            if condition():
                looking.set_result(None)
            else:
                self.cluster.after(1.0, look)

        look()
        await looking

    async def _run(self) -> None:
        for number in range(self.plan.machines):
            self.cluster.add_machine(f"n{number}")
        self.start_supervisor()
        if self.plan.scales:
            self.autoscaler.start()
        self.clients = [Client(self, work) for work in self.plan.work]
        begun = [client.start() for client in self.clients]
        self.faults.start()
        await asyncio.sleep(self.plan.seconds)
        self.faults.heal()
        try:
            # What was set by a clock that was ahead, and is on another machine now, waits for so much longer.
            async with asyncio.timeout(FINISH_SECONDS + self.faults.furthest):
                await asyncio.gather(*begun)
                await self._until(lambda: not self.ending.unfinished())
        except TimeoutError:
            self.invariants.violated(f"liveness: work does not end\n{self.ending.situation()}")
        await asyncio.sleep(8.0)
        try:
            async with asyncio.timeout(QUIET_SECONDS):
                await self._until(lambda: not self.ending.leftovers())
        except TimeoutError:
            pass  # it is reported below
        self.ending.check()


@contextlib.contextmanager
def _garbage_kept() -> Iterator[None]:
    """Within this context only the scheduler collects garbage (`COLLECT_STEPS`), and not what was there before."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
