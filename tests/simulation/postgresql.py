"""The simulated PostgreSQL in a world: its latencies, and what goes wrong between it and its clients."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .postgres.database import SimulatedDatabase
from .postgres.server import Server
from .scheduler import Process, Signal

if TYPE_CHECKING:
    from .plan import Fault
    from .world import World

EXECUTE_SHARE = 0.5
"""Share of the statements at which others get a turn; at the beginning and the end of a transaction they always do."""

FAULT_SHARE = {"lost_before": 0.05, "lost_after": 0.3, "hang": 0.25}
"""How likely a message goes wrong, while its kind of fault lasts."""


class PostgresqlStore:
    """One server for the whole cluster.

    It is the `Host` of the server: see `postgres.host`.
    """

    dsn = "postgresql://simulated/understudy"

    def __init__(self, world: World) -> None:
        self._world = world
        self._scheduler = world.scheduler
        self._random = random.Random(f"{world.plan.seed}/store")
        self._trouble: dict[str, float] = {}
        self._until: dict[str, float] = {}
        self._slow_until = 0.0
        self._known: dict[str, Process] = {}
        self.server = Server(self)
        self.committed = self.server.committed

    def open(self, _name: str) -> SimulatedDatabase:
        """What a process opens."""
        process = self._scheduler.current
        if process.name not in self._known:
            self._known[process.name] = process
            process.on_death.append(lambda: self._died(process))
        return SimulatedDatabase(self.server, process.name)

    def _died(self, process: Process) -> None:
        self._known.pop(process.name)
        machine = self._world.machine_of(process)
        self.server.client_died(process.name, silently=machine is not None and not machine.alive)

    def rows(self, sql: str) -> list[Any]:
        """Rows of what is committed now; SQLite's SQL, without parameters."""
        found: Any = self.server.backend.storage.read(None, sql, {})
        return list(found.fetchall())

    @property
    def deadlocks(self) -> list[str]:
        """Clients whose transaction was ended for a deadlock."""
        return self.server.backend.deadlocks

    def close(self) -> None:
        """Nothing is left of it."""

    # What goes wrong.

    def trouble(self, kind: str, fault: Fault) -> None:
        """For a while messages go wrong in this way."""
        self._until[kind] = max(self._until.get(kind, 0.0), self._scheduler.time() + fault.seconds)
        self._trouble[kind] = fault.seconds

    def slow(self, fault: Fault) -> None:
        """For a while everything takes long."""
        self._slow_until = self._scheduler.time() + fault.seconds

    def crash(self, seconds: float) -> None:
        """The server dies and is started again."""
        self.server.crash(seconds)

    def heal(self) -> None:
        """Nothing goes wrong any more."""
        self._until.clear()
        self._slow_until = 0.0
        self.server.accept()

    # The host of the server.

    def now(self) -> int:
        return round(self._scheduler.time() * 1e6)

    def signal(self) -> Signal:
        return Signal()

    def wait(self, signal: Signal, seconds: float | None) -> bool:
        return self._scheduler.wait(signal, seconds)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        self._world.cluster.after(seconds, callback)

    def round_trip(self, client: str, what: str) -> str:
        if self._scheduler.thread is None:
            return ""  # on an event loop, which waits for the store without letting anybody else run
        chosen = self._random
        slow = self._scheduler.time() < self._slow_until
        if what != "execute" or slow or chosen.random() < EXECUTE_SHARE:
            seconds = 0.0002 + 0.001 * chosen.random()
            if slow or chosen.random() < 0.002:
                seconds += chosen.choice((0.01, 0.1, 0.5, 2.0))
            self._scheduler.wait(Signal(), seconds)
        machine = self._world.machine_of(self._known.get(client))
        if machine is not None and machine.cut_off and machine.store_cut_off:
            return "hang"
        for kind, until in self._until.items():
            due = self._scheduler.time() < until and chosen.random() < FAULT_SHARE[kind]
            if due and (kind == "lost_before" or what == "commit"):
                self._world.note(f"store: {kind} at {what} of {client}")
                return kind
        return ""

    def hanging(self, _client: str) -> tuple[float, bool]:
        seconds = self._random.choice((0.5, 3.0, 8.0, 20.0, 36.0, 50.0)) * (0.5 + self._random.random())
        effect = self._random.random() < 0.7
        self._world.note(f"store: a commit hangs for {seconds:.1f} s, then " + ("counts" if effect else "is undone"))
        return seconds, effect
