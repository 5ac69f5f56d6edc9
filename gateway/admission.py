"""Whose turn it is to send a request to an endpoint: within its places and its limits, fair between trees."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from understudy.config import ModelProfile
from understudy.messages import Usage
from understudy.rates import UNLIMITED, WEIGHTS, Rates, RateShare, RateUse
from understudy.records import ModelRequest

from .course import Course
from .fair_queue import FairQueue
from .pace import Pace
from .rate_headers import stated_limits

LOOK_SECONDS = 1.0
"""While requests wait, it is looked so often whether a share has ended."""

GROWN = 1.5
"""Waiting requests are reported at once when there are more than this many times as many as last reported."""


class Stopped(Exception):
    """The endpoint takes no requests for longer than this one can wait."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


@dataclass(eq=False)
class _Waiter:
    """A request that waits for its turn."""

    flow: str
    tokens: float
    deadline: float
    granted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass(eq=False)
class _Line:
    """A pace with the requests that wait for it: those that have a place already, and all others."""

    pace: Pace
    queue: FairQueue[_Waiter] = field(default_factory=FairQueue)
    again: deque[_Waiter] = field(default_factory=deque)
    reported: int = 0

    def __len__(self) -> int:
        return len(self.queue) + len(self.again)

    def waiters(self) -> list[_Waiter]:
        """All of them."""
        return [*self.again, *self.queue]

    def use(self, now: float) -> RateUse:
        """What others should know of it."""
        self.reported = len(self)
        waiters = self.waiters()
        return self.pace.use(
            len(waiters), sum(waiter.tokens for waiter in waiters), {waiter.flow for waiter in waiters}, now
        )


class Turn:
    """A place at the endpoint, and leave to send one request, unless what is fetched was asked for before (`asks`)."""

    def __init__(
        self, admission: Admission, line: _Line, flow: str, tokens: float, course: Course, *, asks: bool
    ) -> None:
        self._admission = admission
        self._course = course
        self._line = line
        self._flow = flow
        self._tokens = tokens
        self._sent = time.monotonic()
        self._under_way = asks

    async def again(self, deadline: float) -> None:
        """Wait for leave to send the request, or to send it once more, and keep the place."""
        self._over()
        with self._course.waiting(self._admission.name):
            await self._admission.wait(self._line, self._flow, self._tokens, deadline, has_place=True)
        self._sent, self._under_way = time.monotonic(), True

    def heard(self, headers: Mapping[str, str]) -> None:
        """A response has come, with these headers."""
        if self._line.pace.learn(stated_limits(headers, time.time()), time.monotonic()):
            self._admission.urgent()

    def refused(self, headers: Mapping[str, str], seconds: float | None) -> float | None:
        """The request was refused with status 429. For how long nothing is sent now; None if nothing is known of any
        limit: then nobody can say what would help.

        Args:
            seconds: for how long, as the endpoint says.
        """
        if seconds is None:
            seconds = stated_limits(headers, time.time()).pause
        pace = self._line.pace
        if seconds is None and not pace.limit:
            pace.refused += 1
            return None
        stop = pace.refuse(seconds, self._sent, time.monotonic())
        self._admission.stopped(self._line)
        return stop

    def answered(self, usage: Usage) -> None:
        """The request was answered, and took so much. What was only fetched was counted where it was asked for."""
        if self._under_way:
            self._line.pace.answered(self._tokens, usage, time.monotonic())

    def leave(self) -> None:
        """The place is free."""
        self._over()
        self._admission.left()

    def _over(self) -> None:
        if self._under_way:
            self._under_way = False
            self._line.pace.over()


class Admission:
    """The turns of one profile's requests.

    Guarantees: no more requests are under way than the profile has places, and no more go out than its limits allow
    this node; trees that wait get turns in proportion to the weight of their priority (`FairQueue`); who is cancelled
    while waiting leaves nothing behind.

    Args:
        name: of the profile.
        urgent: something has changed that other nodes should know at once.
    """

    def __init__(self, name: str, urgent: Callable[[], None]) -> None:
        self.urgent = urgent
        self.name = name
        self._given = UNLIMITED
        self._places = 1
        self._taken = 0
        self._nodes = 1
        self._lines: dict[str, _Line] = {}
        self._fetches = _Line(Pace(name, "", UNLIMITED, 1, time.monotonic()))
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """How many calls wait for their turn."""
        return sum(map(len, (self._fetches, *self._lines.values())))

    def update(self, profile: ModelProfile) -> None:
        """The profile has become another one, or is known at last."""
        self._places = profile.max_concurrency
        self._given = Rates(profile.requests_per_minute, profile.tokens_per_minute)
        if self._given:
            self._line("").pace.given = self._given
            self.urgent()
        elif "" in self._lines:
            self._lines[""].pace.given = UNLIMITED

    def set_share(self, share: RateShare, ends: float) -> None:
        """The supervisor says what this node may use of one of the limits."""
        self._line(share.model).pace.set_share(share, ends, time.monotonic())
        if share.stopped > 0:
            self._fail_hopeless(self._line(share.model))

    def shared_by(self, nodes: int) -> None:
        """So many nodes share the limits."""
        self._nodes = nodes
        for line in self._lines.values():
            line.pace.shared_by(nodes, time.monotonic())

    def uses(self) -> list[RateUse]:
        """How its limits are used."""
        now = time.monotonic()
        uses = [(line.use(now), line.pace.is_known) for line in self._lines.values()]  # forgets trees that are gone
        return [use for use, is_known in uses if is_known]

    @asynccontextmanager
    async def turn(
        self, request: ModelRequest, tree: str, course: Course, *, again: bool = False, fetches: bool = False
    ) -> AsyncIterator[Turn]:
        """A turn, once it has come; its place is free when the block ends.

        Args:
            course: records how long the call waited.
            again: the request was refused in an earlier turn: it comes before all others of its tree.
            fetches: it begins with what the endpoint keeps, which needs a place, but counts for no limit.

        Raises:
            Stopped: it will not come before the request's deadline.
        """
        line = self._line("" if self._given else request.model)
        flow = f"{tree}/{request.priority}"
        weight = WEIGHTS[request.priority]
        tokens = line.pace.expected(request)
        with course.waiting(self.name):
            if fetches:
                await self.wait(self._fetches, flow, 0.0, request.deadline, weight=weight)
            else:
                line.pace.asked(flow, weight, time.monotonic())
                await self.wait(line, flow, tokens, request.deadline, first=again, weight=weight)
        turn = Turn(self, line, flow, tokens, course, asks=not fetches)
        try:
            yield turn
        finally:
            turn.leave()

    async def wait(
        self, line: _Line, flow: str, tokens: float, deadline: float, *, first: bool = False, has_place: bool = False,
        weight: float = 1.0,
    ) -> None:  # fmt: skip
        """Wait until a request may go out. Raises `Stopped`."""
        now = time.monotonic()
        if line.pace.stopped(now) >= deadline:
            raise Stopped(line.pace.stopped(now))
        free = has_place or self._taken < self._places
        if not len(line) and free and line.pace.wait(tokens, now) <= 0:
            self._grant(line, tokens, has_place=has_place)
            return
        waiter = _Waiter(flow, tokens, deadline)
        if has_place:
            line.again.append(waiter)
        elif first:
            line.queue.add_first(flow, waiter)
        else:
            line.queue.add(flow, waiter, line.pace.cost(tokens) / weight)
        if line.pace.is_known and len(line) > GROWN * line.reported:
            self.urgent()
        self.dispatch()
        try:
            await waiter.granted
        except BaseException:
            self._withdraw(line, waiter, has_place=has_place)
            raise

    def stopped(self, line: _Line) -> None:
        """The endpoint has asked this node to send nothing for a time."""
        self.urgent()
        self._fail_hopeless(line)

    def left(self) -> None:
        """A place has become free."""
        self._taken -= 1
        self.dispatch()

    def dispatch(self) -> None:
        """Let go out what may; look again when more may."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        pause = LOOK_SECONDS
        lines = [self._fetches, *self._lines.values()]
        waiting = [line for line in lines if len(line)]
        while waiting:  # the lines take turns at the places
            for line in list(waiting):
                seconds = self._next_of(line)
                if seconds is not None:
                    waiting.remove(line)
                    pause = min(pause, seconds)
        if any(len(line) for line in lines):
            self._timer = asyncio.get_running_loop().call_later(max(pause, 0.001), self.dispatch)

    def _next_of(self, line: _Line) -> float | None:
        """Let the next one of a line go; None if it went, else the seconds until it can."""
        if not len(line):
            return LOOK_SECONDS
        has_place = bool(line.again)
        if not has_place and self._taken >= self._places:
            return LOOK_SECONDS
        waiter = line.again[0] if has_place else line.queue.peek()
        if waiter.granted.done():  # it was cancelled, or failed, and has not left yet
            self._drop(line, waiter)
            return None
        seconds = line.pace.wait(waiter.tokens, time.monotonic())
        if seconds > 0:
            return seconds
        if has_place:
            line.again.popleft()
        else:
            line.queue.pop()
        self._grant(line, waiter.tokens, has_place=has_place)
        waiter.granted.set_result(None)
        return None

    def _grant(self, line: _Line, tokens: float, *, has_place: bool) -> None:
        self._taken += not has_place
        line.pace.take(tokens, time.monotonic())

    def _withdraw(self, line: _Line, waiter: _Waiter, *, has_place: bool) -> None:
        """Nobody waits any more: it leaves the queue, or what it has been given in the same moment is given back."""
        if waiter.granted.done() and not waiter.granted.cancelled() and waiter.granted.exception() is None:
            line.pace.unused(waiter.tokens)
            self._taken -= not has_place
        else:
            self._drop(line, waiter)
        self.dispatch()

    def _drop(self, line: _Line, waiter: _Waiter) -> None:
        if waiter in line.again:
            line.again.remove(waiter)
        else:
            line.queue.discard(waiter.flow, waiter)

    def _fail_hopeless(self, line: _Line) -> None:
        """Those that a stop outlasts fail now: each would be refused, or wait until its session is given up."""
        stop = line.pace.stopped(time.monotonic())
        for waiter in line.waiters():
            if stop >= waiter.deadline and not waiter.granted.done():
                waiter.granted.set_exception(Stopped(stop))
                self._drop(line, waiter)

    def _line(self, model: str) -> _Line:
        line = self._lines.get(model)
        if line is None:
            given = self._given if not model else UNLIMITED
            pace = Pace(self.name, model, given, self._nodes, time.monotonic())
            line = self._lines[model] = _Line(pace)
        return line
