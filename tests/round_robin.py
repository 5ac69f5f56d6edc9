"""A minimal simulation for tests of its parts: greenlets that take turns, and a clock that jumps to what is next."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

from .simulation.postgres.host import Signal


class Flag:
    """A signal that knows who waits for it."""

    def __init__(self, hub: RoundRobin) -> None:
        self._hub = hub
        self._waiters: list[Task] = []
        self.is_set = False

    def set(self) -> None:
        if not self.is_set:
            self.is_set = True
            for task in self._waiters:
                self._hub.wake(task, True)


class Task:
    """Something that runs until it waits."""

    def __init__(self, client: str, function: Callable[[], Any]) -> None:
        self.client = client
        self.greenlet = greenlet(self._run)
        self.turn = 0
        self.is_waiting = False
        self.done = False
        self.killed = False
        self.result: Any = None
        self.error: BaseException | None = None
        self._function = function

    def _run(self, _: Any = None) -> None:
        try:
            self.result = self._function()
        except BaseException as error:
            self.error = error
        self.done = True


class RoundRobin:
    """A host in which nothing goes wrong unless it is told to.

    Attributes:
        faults: what happens to the messages of a client, by its name and the kind of message, in order.
        hangs: for how long commits hang, and whether they take effect then.
        made: the choices between several that could go on: which of how many did.

    Args:
        choices: which of several that could go on does, in order; afterwards the first.
    """

    def __init__(self, choices: Sequence[int] = ()) -> None:
        self.made: list[tuple[int, int]] = []
        self._choices = choices
        self.faults: dict[tuple[str, str], list[str]] = {}
        self.hangs: tuple[float, bool] = (60.0, True)
        self.messages: list[tuple[str, str]] = []
        self._now = 0
        self._ready: list[tuple[Task, bool]] = []
        self._timers: list[tuple[int, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._current: Task | None = None

    # What the server asks for.

    def now(self) -> int:
        return self._now

    def signal(self) -> Flag:
        return Flag(self)

    def wait(self, signal: Signal, seconds: float | None) -> bool:
        task = self._current
        assert task is not None, "only tasks may wait"
        assert isinstance(signal, Flag)
        self._require_alive()
        if signal.is_set:
            return True
        signal._waiters.append(task)
        if seconds is not None:
            turn = task.turn
            self.call_later(seconds, lambda: self._over(task, turn))
        return self._suspend(task)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self._now + max(0, int(seconds * 1e6)), next(self._count), callback))

    def round_trip(self, client: str, what: str) -> str:
        self._require_alive()
        self.messages.append((client, what))
        faults = self.faults.get((client, what))
        return faults.pop(0) if faults else ""

    def hanging(self, client: str) -> tuple[float, bool]:
        return self.hangs

    def _require_alive(self) -> None:
        if self._current is not None and self._current.killed:
            raise GreenletExit

    # What tests ask for.

    def start(self, client: str, function: Callable[[], Any]) -> Task:
        """Have a function run when it is its turn."""
        task = Task(client, function)
        self._ready.append((task, True))
        return task

    def run(self, seconds: float = 1e9) -> None:
        """Go on until nothing is left to be done, or so much time is over."""
        end = self._now + int(seconds * 1e6)
        self.run_until_idle()
        while self._timers and self._timers[0][0] <= end:
            self._now = self._timers[0][0]
            due = []
            while self._timers and self._timers[0][0] == self._now:
                due.append(heapq.heappop(self._timers)[2])
            while due:
                due.pop(self._choose(len(due)))()
                self.run_until_idle()
        if seconds < 1e9:
            self._now = end

    def run_until_idle(self) -> None:
        """Go on until everybody waits."""
        while self._ready:
            task, value = self._ready.pop(self._choose(len(self._ready)))
            if not task.done and not task.killed:
                self._current = task
                task.greenlet.switch(value)
                self._current = None

    def sleep(self, seconds: float) -> None:
        """Have the calling task wait."""
        self.wait(self.signal(), seconds)

    def kill(self, task: Task) -> None:
        """End a task where it waits: it unwinds, and may not wait any more."""
        task.killed = True
        self._current = task
        task.greenlet.throw()
        self._current = None

    def wake(self, task: Task, value: bool) -> None:
        if task.is_waiting:
            task.is_waiting = False
            task.turn += 1
            self._ready.append((task, value))

    def _choose(self, count: int) -> int:
        if count == 1:
            return 0
        number = len(self.made)
        pick = self._choices[number] if number < len(self._choices) else 0
        self.made.append((pick, count))
        return pick

    def _over(self, task: Task, turn: int) -> None:
        if task.turn == turn:
            self.wake(task, False)

    def _suspend(self, task: Task) -> bool:
        task.is_waiting = True
        assert getcurrent() is task.greenlet
        result: bool = task.greenlet.parent.switch()
        return result
