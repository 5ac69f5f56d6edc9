"""The feed: what clients follow. One pending `watch` per client, however many runs it follows.

Stateless towards the client: each call says what the client has, so a client that lost its node service asks the next
one the same question and misses nothing, and sees nothing twice.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from understudy.errors import UnknownRun, UnknownSession
from understudy.events import ChildAsked, Event, InputRequested, RunFinished
from understudy.protocol import Following, Watched
from understudy.reads import RunRecord
from understudy.records import PAGE
from understudy.streams import Parts
from understudy.waiting import is_set_within

ENDS = (RunFinished.type, InputRequested.type, ChildAsked.type)
"""Sent to whoever waits for the end of a run, or for its pause: it, or a sub-agent that it waits for, asks."""

RING = 256
SESSIONS = 4_096
COALESCE_SECONDS = 0.03
GATHER_SHARE = 0.0001
"""Seconds, per session that a client follows, for which ends of runs gather: one answer then reports them all."""

ReadEvents = Callable[[str, int], Awaitable[list[Event]]]
"""Reads a session's events after a `seq`, `PAGE` of them at most."""

ReadRun = Callable[[str, str], Awaitable[RunRecord]]
ReadStream = Callable[[str], tuple[str, Parts] | None]
"""Reads the key of the try at which a session's answer is, and what has come of it."""


@dataclass
class _Recent:
    """The latest events of a session: all those after `complete_from`, up to `complete_to` in the session's log."""

    complete_from: int
    complete_to: int = -1
    events: deque[Event] = field(default_factory=deque)


@dataclass(eq=False)
class _Watcher:
    """A pending call: what it follows, and where there may be news since it last looked."""

    follow: dict[str, Following]
    news: set[str] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    superseded: bool = False

    def streams(self, session_id: str) -> bool:
        """Whether it follows a session's answers as they grow."""
        wanted = self.follow.get(session_id)
        return wanted is not None and wanted.stream is not None

    def tell(self, session_id: str) -> None:
        self.news.add(session_id)
        self.changed.set()


class Feed:
    """Recent events by session, and the clients that wait for more."""

    def __init__(self, read_events: ReadEvents, read_stream: ReadStream, read_run: ReadRun) -> None:
        self._read_events = read_events
        self._read_stream = read_stream
        self._read_run = read_run
        self._recent: OrderedDict[str, _Recent] = OrderedDict()
        self._watchers: dict[_Watcher, None] = {}  # in the order in which they came
        self._clients: dict[str, _Watcher] = {}
        self._reading: dict[str, object] = {}
        self._gone: OrderedDict[str, int] = OrderedDict()
        self._times_gone = 0

    def publish(self, events: list[Event], written: dict[str, tuple[int, int]]) -> None:
        """Take in what one transaction committed.

        Args:
            events: in order.
            written: the `seq` of every session that it changed, before and after.
        """
        for session_id, (before, after) in written.items():
            self._gone.pop(session_id, None)  # unless it is at home elsewhere, which is reported next (`leave`)
            recent = self._recent.get(session_id)
            if recent is None or recent.complete_to != before:  # new here, or somebody else wrote in between
                recent = self._recent[session_id] = _Recent(before)
            recent.complete_to = after
            self._recent.move_to_end(session_id)
        while len(self._recent) > max(SESSIONS, len(written)):
            self._recent.popitem(last=False)
        for event in events:
            recent = self._recent[event.session_id]
            recent.events.append(event)
            if len(recent.events) > RING:
                recent.complete_from = recent.events.popleft().seq
        for watcher in self._watchers:
            for event in events:
                wanted = watcher.follow.get(event.session_id)
                if wanted is not None and (not wanted.ends or event.type in ENDS):
                    watcher.tell(event.session_id)

    def forget(self, session_ids: Iterable[str]) -> None:
        """Somebody else wrote to these sessions: the store knows what is new."""
        for session_id in session_ids:
            self._gone.pop(session_id, None)
            self._recent.pop(session_id, None)
            self._reading.pop(session_id, None)
            for watcher in self._watchers:
                if session_id in watcher.follow:
                    watcher.tell(session_id)

    def leave(self, session_ids: Iterable[str]) -> None:
        """These sessions are at home on another node: whoever follows them here is sent there."""
        for session_id in session_ids:
            self._times_gone += 1
            self._gone[session_id] = self._times_gone
            self._gone.move_to_end(session_id)
            for watcher in self._watchers:
                if session_id in watcher.follow:
                    watcher.tell(session_id)
        while len(self._gone) > SESSIONS:
            self._gone.popitem(last=False)

    @property
    def gone(self) -> dict[str, int]:
        """The sessions that are at home elsewhere, as far as was heard; each time with another number."""
        return dict(self._gone)

    def at_home(self, session_ids: Iterable[str], gone: dict[str, int]) -> None:
        """These sessions are at home here, whether their return was heard of or not: so it was read after `gone` was
        asked for, and of those that went since that says nothing."""
        self.forget([name for name in session_ids if name in gone and self._gone.get(name) == gone[name]])

    def forget_all(self) -> None:
        """Anything may have been written that was not reported here."""
        followed = {session_id for watcher in self._watchers for session_id in watcher.follow}
        self.forget([*self._recent, *self._reading, *followed])

    def is_streamed(self, session_id: str) -> bool:
        """Whether somebody follows the answers of a session as they grow."""
        return any(watcher.streams(session_id) for watcher in self._watchers)

    def delta(self, session_id: str) -> None:
        """A streamed answer has grown."""
        for watcher in self._watchers:
            if watcher.streams(session_id):
                watcher.tell(session_id)

    async def watch(self, client_id: str, follow: dict[str, Following], timeout: float) -> Watched:
        """What is new for a client, at once if there is any, else when it comes or after `timeout` seconds.

        A newer call of the same client ends this one with nothing.

        Args:
            follow: by session.
        """
        watcher = _Watcher(follow)
        earlier = self._clients.get(client_id)
        if earlier is not None:
            earlier.superseded = True
            earlier.changed.set()
        self._clients[client_id] = watcher
        self._watchers[watcher] = None
        try:
            deadline = asyncio.get_running_loop().time() + timeout
            wanted = follow
            while True:
                if watcher.superseded:
                    return Watched()
                found = await self._collect(wanted)
                left = deadline - asyncio.get_running_loop().time()
                if found.events or found.streams or found.gone or left <= 0:
                    return found
                if not await is_set_within(watcher.changed, left):
                    wanted = follow
                    continue
                # What comes within the next moments goes along: a client of a fast stream gets few, larger pieces.
                streams = any(follow[session_id].stream is not None for session_id in watcher.news)
                await asyncio.sleep(COALESCE_SECONDS if streams else GATHER_SHARE * len(follow))
                wanted = {session_id: follow[session_id] for session_id in watcher.news}
                watcher.news.clear()
                watcher.changed.clear()
        finally:
            self._watchers.pop(watcher, None)
            if self._clients.get(client_id) is watcher:
                del self._clients[client_id]

    async def _collect(self, follow: dict[str, Following]) -> Watched:
        found = Watched()
        for session_id, wanted in follow.items():
            following = await self._after(session_id, wanted.after)
            for event in following:
                if not wanted.ends:
                    found.events.append(event.to_wire())
                elif event.type in ENDS:
                    found.events.append(event.to_wire())
                    assert event.run_id is not None
                    # One that was removed has no row: who waits for it looks himself, others are not concerned.
                    with contextlib.suppress(UnknownSession, UnknownRun):
                        found.runs[f"{session_id}/{event.run_id}"] = await self._read_run(session_id, event.run_id)
                elif event is following[-1] and len(following) == PAGE:
                    found.events.append(event.to_wire())  # how far this went: the client goes on from there
            if wanted.stream is not None:
                key, lengths = wanted.stream
                current = self._read_stream(session_id)
                if current is not None:
                    news = current[1].after(lengths if current[0] == key else [])
                    if news or current[0] != key:
                        found.streams[session_id] = (current[0], news)
        found.gone = [session_id for session_id in follow if session_id in self._gone]
        return found

    async def _after(self, session_id: str, after: int) -> list[Event]:
        recent = self._recent.get(session_id)
        if recent is not None and recent.complete_from <= after:
            self._recent.move_to_end(session_id)
            return [event for event in recent.events if event.seq > after]
        self._reading[session_id] = reading = object()
        found = await self._read_events(session_id, after)
        # What was forgotten meanwhile may be news that this read has not seen: the next one will.
        if self._reading.get(session_id) is reading:
            del self._reading[session_id]
            if len(found) < PAGE:  # else the log goes on
                self._recent.setdefault(session_id, _Recent(found[-1].seq if found else after))
        return found
