"""The scheduler: an asyncio event loop on a virtual clock that runs many simulated processes in one thread.

Callbacks of one process run in the order in which asyncio would run them; between processes, and between the threads of
a process, the seed decides who is next. Time moves only when nothing can run.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import heapq
import itertools
import random
import warnings
import zlib
from asyncio import base_events, events
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

LANE: contextvars.ContextVar[Lane | None] = contextvars.ContextVar("lane", default=None)

EPOCH = 1_700_000_000_000_000_000
"""Nanoseconds since 1970 UTC at which every simulation begins."""

COLLECT_STEPS = 1_000
"""Garbage is collected now and then, between two steps: what is collected may have something to do still (generators
that were left), and Python by itself would begin with it at any time, in whichever process runs."""

SLOW_SHARE = 0.004
"""Share of the callbacks before which their process loses the CPU for a moment."""


class Exhausted(AssertionError):
    """The simulation did more than it may, or has nothing left to do."""


class Lane:
    """What runs one thing after the other: the event loop of a process, or one of its threads.

    Attributes:
        blocked: what it runs now takes long, and nothing else gets its turn.
    """

    def __init__(self, process: Process, name: str) -> None:
        self.process = process
        self.name = name
        self.blocked = False
        self.ready: deque[events.Handle] = deque()

    def add(self, handle: events.Handle) -> None:
        """One more thing to run."""
        process = self.process
        if not process.dead:
            self.ready.append(handle)
            if not process.paused and not self.blocked:
                process.scheduler.runnable[self] = None


class Process:
    """A simulated process: its event loop, its threads, and whether they may run.

    Attributes:
        clock_offset: nanoseconds by which its wall clock differs.
        paused: stopped, as by SIGSTOP: nothing of it runs until it is continued.
        dead: killed; nothing of it will ever run again.
    """

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self.scheduler = scheduler
        self.name = name
        self.clock_offset = 0
        self.paused = 0
        self.dead = False
        self.tasks: dict[Task, None] = {}
        self.threads: list[Thread] = []
        self.on_death: list[Callable[[], None]] = []
        self.main = Lane(self, "main")
        self._lanes = [self.main]
        self.context = contextvars.Context()
        self.context.run(LANE.set, self.main)

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str = "") -> asyncio.Task[Any]:
        """Run a coroutine in this process."""
        context = self.context.copy()
        return context.run(self.scheduler.create_task, coroutine, name=name or None, context=context)

    def soon(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Run a function in this process; nothing if it is dead."""
        self.scheduler.call_soon(function, *arguments, context=self.context.copy())

    def start_thread(self, function: Callable[[], Any], name: str) -> Thread:
        """A thread of this process."""
        lane = Lane(self, name)
        self._lanes.append(lane)
        thread = Thread(self.scheduler, lane, function)
        self.threads.append(thread)
        thread.wake()
        return thread

    def spawn_beside(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run a coroutine on an event loop of its own, as Ray runs a concurrency group's calls."""
        lane, context = Lane(self, name), self.context.copy()
        self._lanes.append(lane)
        context.run(LANE.set, lane)
        task = context.run(self.scheduler.create_task, coroutine, name=name, context=context)
        task.add_done_callback(lambda _task: self.retire(lane), context=self.scheduler.world.context)
        return task

    def block(self, seconds: float) -> None:
        """What the event loop runs now takes so long: whatever it awaits next comes only after that."""
        self.main.blocked = True
        self.scheduler.runnable.pop(self.main, None)
        self.scheduler.call_later(seconds, self._unblock, context=self.scheduler.world.context)

    def _unblock(self) -> None:
        self.main.blocked = False
        if self.main.ready and not self.paused and not self.dead:
            self.scheduler.runnable[self.main] = None

    def retire(self, lane: Lane) -> None:
        """A thread has ended."""
        self._lanes.remove(lane)
        self.scheduler.runnable.pop(lane, None)
        self.threads = [thread for thread in self.threads if thread.lane is not lane]

    def pause(self) -> None:
        """As SIGSTOP."""
        self.paused += 1
        for lane in self._lanes:
            self.scheduler.runnable.pop(lane, None)

    def resume(self) -> None:
        """As SIGCONT; pauses are counted."""
        self.paused = max(0, self.paused - 1)
        if not self.paused and not self.dead:
            self.scheduler.runnable.update((lane, None) for lane in self._lanes if lane.ready and not lane.blocked)

    def kill(self) -> None:
        """As SIGKILL: not another line of it runs."""
        if self.dead:
            return
        self.dead = True
        for lane in self._lanes:
            lane.ready.clear()
            self.scheduler.runnable.pop(lane, None)
        self.scheduler.forget(self)
        for callback in self.on_death:
            callback()


class Task(asyncio.Task):  # type: ignore[type-arg]
    """A task with a hash that does not depend on its address: sets of tasks have the same order in every run."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class Future(asyncio.Future):  # type: ignore[type-arg]
    """The same for futures."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class Thread:
    """A simulated thread: a greenlet that runs until it waits for something, and goes on when that is there."""

    def __init__(self, scheduler: Scheduler, lane: Lane, function: Callable[[], Any]) -> None:
        self._scheduler = scheduler
        self.lane = lane
        self._function = function
        self._greenlet: greenlet | None = greenlet(self._run)
        self._context = lane.process.context.copy()
        self._context.run(LANE.set, lane)
        self._waits = 0
        self.alive = True
        self.joined: list[Signal] = []

    def _run(self) -> None:
        try:
            self._function()
        finally:
            self.alive = False
            if not self._scheduler.over:
                self.lane.process.retire(self.lane)
                for signal in self.joined:
                    signal.set()

    def wake(self) -> None:
        """Let it go on when its turn comes."""
        self._waits += 1
        turn = self._waits
        self._scheduler.call_soon(self._switch, turn, context=self._context)

    def _switch(self, turn: int) -> None:
        if self.alive and turn == self._waits and self._greenlet is not None:
            self._greenlet.gr_context = self._context if self._greenlet.gr_frame is None else self._greenlet.gr_context
            self._scheduler.enter(self)
            try:
                self._greenlet.switch()
            finally:
                self._scheduler.leave()

    def suspend(self) -> None:
        """Give the CPU back until `wake`; called by the thread itself."""
        assert getcurrent() is self._greenlet
        self._scheduler.hub.switch()

    def end(self) -> None:
        """The simulation is over."""
        if self.alive and self._greenlet is not None:
            self.alive = False
            try:
                self._greenlet.throw(GreenletExit)
            except BaseException:
                pass
        self._greenlet = None


class Signal:
    """What a thread waits for; set once."""

    def __init__(self) -> None:
        self.is_set = False
        self.waiting: list[Thread] = []

    def set(self) -> None:
        """Let those go on that wait."""
        self.is_set = True
        waiting, self.waiting = self.waiting, []
        for thread in waiting:
            thread.wake()


class Scheduler(base_events.BaseEventLoop):
    """Runs the callbacks of all processes.

    Args:
        order: decides who is next.

    Attributes:
        runnable: the lanes that have something to do, of processes that may run.
        steps: how many callbacks ran.
        trace: a digest of what ran; two runs of one seed have the same.
        over: the simulation has ended: whatever is cleaned up has no effect any more.
        lateness: draws how many seconds late the event loop hears what a thread has done.
    """

    def __init__(self, order: random.Random, *, calm: bool = False) -> None:
        super().__init__()
        self._order = order
        self._calm = calm
        self._time = 0.0
        self._timers: list[tuple[float, int, events.TimerHandle, Process]] = []
        self._numbers = itertools.count(1)
        self.processes: list[Process] = []
        self.runnable: dict[Lane, None] = {}
        self.steps = 0
        self.step_limit = 0
        self.over = False
        self.hub = getcurrent()
        self.thread: Thread | None = None
        self.graveyard: list[Process] = []
        self.trace = 0
        self.hear_in_time()
        self.wedged: list[str] = []
        self.errors: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _loop, context: self.errors.append(context))
        self.set_task_factory(self._make_task)
        self.world = self.process("world")

    def process(self, name: str) -> Process:
        """A new process."""
        process = Process(self, name)
        self.processes.append(process)
        return process

    def forget(self, process: Process) -> None:
        """A process is dead; what is left of it is kept until the end, so that nothing of it is cleaned up before."""
        self.processes.remove(process)
        self.graveyard.append(process)

    @property
    def current(self) -> Process:
        """The process whose code runs."""
        lane = LANE.get()
        return lane.process if lane is not None else self.world

    # What asyncio asks of an event loop.

    def time(self) -> float:
        return self._time

    def create_future(self) -> asyncio.Future[Any]:
        future = Future(loop=self)
        future.number = next(self._numbers)
        return future

    def _make_task(self, _loop: Any, coroutine: Any, context: contextvars.Context | None = None) -> Task:
        context = context if context is not None else contextvars.copy_context()
        lane = context.get(LANE)
        task = Task(coroutine, loop=self, context=context)
        task.number = next(self._numbers)
        process = lane.process if lane is not None else self.world
        process.tasks[task] = None
        task.add_done_callback(process.tasks.pop, context=self.world.context)
        return task

    def call_soon(self, callback: Any, *args: Any, context: contextvars.Context | None = None) -> events.Handle:
        context = context if context is not None else contextvars.copy_context()
        handle = events.Handle(callback, args, self, context)
        (context.get(LANE) or self.world.main).add(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> events.Handle:
        process = self.current
        own = (context if context is not None else contextvars.copy_context()).copy()
        own.run(LANE.set, process.main)
        return self.call_soon(callback, *args, context=own)

    def call_at(
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> events.TimerHandle:
        context = context if context is not None else contextvars.copy_context()
        timer = events.TimerHandle(when, callback, args, self, context)
        lane = context.get(LANE) or self.world.main
        if not lane.process.dead:
            heapq.heappush(self._timers, (when, next(self._numbers), timer, lane.process))
        return timer

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> events.TimerHandle:
        return self.call_at(self._time + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: events.TimerHandle) -> None:
        pass  # it is skipped when its time comes

    def hear_in_time(self) -> None:
        """Threads are heard at once."""
        self.lateness: Callable[[], float] = float

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:
        """A thread for each call; the result comes back to the event loop of its process."""
        future = self.create_future()

        def deliver(result: Any, error: BaseException | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        def work() -> None:
            try:
                result, error = func(*args), None
            except GreenletExit:
                raise
            except BaseException as raised:
                result, error = None, raised
            late = self.lateness()
            if late:
                self.call_soon_threadsafe(self.call_later, late, deliver, result, error)
            else:
                self.call_soon_threadsafe(deliver, result, error)

        self.current.start_thread(work, "executor")
        return future

    def _write_to_self(self) -> None:
        pass

    def _process_events(self, event_list: Any) -> None:
        pass

    def get_debug(self) -> bool:
        return False

    # Threads.

    def enter(self, thread: Thread) -> None:
        """A thread begins to run."""
        self.thread = thread

    def leave(self) -> None:
        """It waits, or has ended."""
        self.thread = None

    def wait(self, signal: Signal, seconds: float | None = None) -> bool:
        """Suspend the thread that calls until the signal is set; False if that takes longer than `seconds`."""
        thread = self.thread
        if thread is None:
            raise RuntimeError("only a thread can wait: the event loop of a process must not")
        if not signal.is_set:
            signal.waiting.append(thread)
            timer = None
            if seconds is not None:
                timer = self.call_later(seconds, thread.wake, context=thread._context)
            thread.suspend()
            if timer is not None:
                timer.cancel()
            if thread in signal.waiting:
                signal.waiting.remove(thread)
        return signal.is_set

    # Running.

    def _run_once(self) -> None:
        runnable = self.runnable
        if not runnable:
            self._let_time_pass()
            return
        self.steps += 1
        if self.steps % COLLECT_STEPS == 0:
            gc.collect()
        if self.step_limit and self.steps > self.step_limit:
            self.step_limit = 0
            raise Exhausted(f"more than {self.steps - 1} steps by {self._time:.3f} s")
        order = self._order
        number = int(order.random() * len(runnable)) if len(runnable) > 1 else 0
        lane = next(itertools.islice(runnable, number, None))
        process = lane.process
        if not self._calm and process is not self.world and order.random() < SLOW_SHARE:
            # It does not get the CPU for a moment; now and then for a long one.
            process.pause()
            self.call_later(order.choice((0.0005, 0.003, 0.02, 0.2)), process.resume, context=self.world.context)
            return
        handle = lane.ready.popleft()
        if not lane.ready:
            del runnable[lane]
        if not handle._cancelled:
            self.trace = zlib.crc32(f"{process.name}|{lane.name}|{self._time}".encode(), self.trace)
            handle._run()

    def _let_time_pass(self) -> None:
        """Nothing can run: the next timers are due."""
        timers = self._timers
        while timers and (timers[0][2]._cancelled or timers[0][3].dead):
            heapq.heappop(timers)
        if not timers:
            raise Exhausted(f"nothing is left to do at {self._time:.3f} s")
        self._time = max(self._time, timers[0][0])
        while timers and timers[0][0] <= self._time:
            _, _, timer, process = heapq.heappop(timers)
            if not timer._cancelled and not process.dead:
                (timer._context.get(LANE) or self.world.main).add(timer)

    def end(self) -> None:
        """Take everything apart without any effect."""
        self.over = True
        everybody = [*self.graveyard, *self.processes]
        for process in everybody:
            process.dead = True
            for lane in process._lanes:
                lane.ready.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of coroutines that nobody runs any more
            for _ in range(10):  # what is taken apart may begin something else, which is taken apart in its turn
                for process in everybody:
                    self._take_apart(process)
        self._timers.clear()
        self._ready.clear()
        self.close()

    def _take_apart(self, process: Process) -> None:
        for thread in process.threads:
            thread.end()
        tasks, process.tasks = process.tasks, {}
        for task in tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            coroutine: Any = task.get_coro()
            try:
                coroutine.close()
            except BaseException:
                pass

    def close(self) -> None:
        self._closed = True
