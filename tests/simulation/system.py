"""The operating system of the simulation: clocks, threads, queues and randomness, as the kernel's modules know them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from understudy import identifiers
from understudy.actors import execution
from understudy.errors import UnderstudyError
from understudy.store import journal

from .scheduler import EPOCH, Scheduler, Signal, Thread

ENDLESS_SECONDS = 10.0


class SimulatedThread:
    """`threading.Thread`."""

    scheduler: Scheduler

    def __init__(
        self, target: Callable[..., Any], name: str = "", args: tuple[Any, ...] = (), daemon: bool = True
    ) -> None:
        self._work = lambda: target(*args)
        self.name = name
        self._thread: Thread | None = None

    def start(self) -> None:
        self._thread = self.scheduler.current.start_thread(self._work, self.name)

    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.alive

    def join(self, timeout: float | None = None) -> None:
        if self._thread is not None and self._thread.alive:
            signal = Signal()
            self._thread.joined.append(signal)
            self.scheduler.wait(signal, timeout)


class SimulatedEvent:
    """`threading.Event`."""

    scheduler: Scheduler

    def __init__(self) -> None:
        self._signal = Signal()

    def set(self) -> None:
        self._signal.set()

    def is_set(self) -> bool:
        return self._signal.is_set

    def wait(self, timeout: float | None = None) -> bool:
        return self.scheduler.wait(self._signal, timeout)


class SimulatedQueue:
    """`queue.SimpleQueue`, for one thread that takes."""

    scheduler: Scheduler

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._news: Signal | None = None

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._news is not None:
            self._news.set()

    def get(self, timeout: float | None = None) -> Any:
        if not self._items:
            self._news = Signal()
            self.scheduler.wait(self._news, timeout)
            self._news = None
        return self.get_nowait()

    def get_nowait(self) -> Any:
        if not self._items:
            raise queue.Empty
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


class Threads:
    """What `threading` and `queue` are to a module of the kernel."""

    def __init__(self, scheduler: Scheduler) -> None:
        def bound(kind: type) -> type:
            return type(kind.__name__, (kind,), {"scheduler": scheduler})

        def enumerate_threads() -> list[Any]:
            return [
                SimpleNamespace(name=thread.lane.name, is_alive=lambda thread=thread: thread.alive)
                for thread in scheduler.current.threads
            ]

        self.threading = SimpleNamespace(
            Thread=bound(SimulatedThread), Event=bound(SimulatedEvent), Lock=threading.Lock, enumerate=enumerate_threads
        )
        self.queue = SimpleNamespace(SimpleQueue=bound(SimulatedQueue), Empty=queue.Empty)


class Log(logging.Handler):
    """Keeps what the kernel logs, with the virtual time and the process.

    Args:
        level: of what is kept.
        failed: called with errors that nobody foresaw; those of the product's own tree are foreseen.
    """

    def __init__(self, note: Callable[[str], None], level: int, failed: Callable[[str], None]) -> None:
        super().__init__(min(level, logging.ERROR))
        self._note = note
        self._level = level
        self._failed = failed

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            text += f" [{type(error).__name__}: {error}]"
        if record.levelno >= logging.ERROR and error is not None and not isinstance(error, UnderstudyError):
            self._failed(f"{record.name.removeprefix('understudy.')}: {text}")
        if record.levelno < self._level:
            return
        self._note(f"{record.levelname.lower()} {record.name.removeprefix('understudy.')}: {text}")


class Endless(KeyboardInterrupt):
    """A process computes without end; a kind of interrupt, since event loops let nothing else through."""


@contextlib.contextmanager
def watched(scheduler: Scheduler) -> Iterator[None]:
    """Within this context raise `Endless` in a step that takes `ENDLESS_SECONDS` of the CPU's time."""
    seen = -1

    def look(_number: int, _frame: Any) -> None:
        nonlocal seen
        if seen == scheduler.steps:
            raise Endless(f"{scheduler.current.name} computes without end")
        seen = scheduler.steps

    before = signal.signal(signal.SIGVTALRM, look)
    signal.setitimer(signal.ITIMER_VIRTUAL, ENDLESS_SECONDS, ENDLESS_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


@contextlib.contextmanager
def installed(
    scheduler: Scheduler, seed: int, note: Callable[[str], None], level: int, failed: Callable[[str], None]
) -> Iterator[None]:  # fmt: skip
    """Run the kernel's modules on the simulated system within this context."""
    system = Threads(scheduler)
    source = random.Random(f"{seed}/entropy")
    from understudy.actors import frame

    def wall() -> int:
        return EPOCH + round(scheduler.time() * 1e9) + scheduler.current.clock_offset

    def monotonic() -> float:
        return scheduler.time() + 1000.0

    changes: list[Any] = [
        patch.object(time, "time_ns", wall),
        patch.object(time, "time", lambda: wall() / 1e9),
        patch.object(time, "monotonic", monotonic),
        patch.object(time, "monotonic_ns", lambda: round(monotonic() * 1e9)),
        # Identifiers alone: libraries ask for entropy when something is made for the first time in a process.
        patch.object(identifiers, "os", SimpleNamespace(urandom=source.randbytes)),
        patch.object(journal, "threading", system.threading),
        patch.object(journal, "queue", system.queue),
        patch.object(execution, "threading", system.threading),
        patch.object(frame, "threading", system.threading),
    ]
    logger = logging.getLogger("understudy")
    handler = Log(note, level, failed)
    state, before = random.getstate(), (logger.level, logger.propagate)
    random.seed(seed)
    with contextlib.ExitStack() as stack:
        for change in changes:
            stack.enter_context(change)
        logger.addHandler(handler)
        logger.setLevel(min(level, logging.ERROR))
        logger.propagate = False
        asyncio.set_event_loop(scheduler)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.level, logger.propagate = before
            asyncio.set_event_loop(None)
            random.setstate(state)
