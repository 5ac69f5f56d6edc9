"""What open pages follow: each thing is read once for all who look, and nobody who reads slowly holds up the others.

There are no queues. A viewer has a place in a log that is shared and bounded, and gets what comes after it whenever its
browser accepts more. A viewer whose place is no longer in the log has to start over (`reset`). Of states it gets the
latest.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from understudy.errors import UnderstudyError
from understudy.event_wire import EventWire
from understudy.events import ChildRestarted, ChildSpawned
from understudy.identifiers import new_identifier
from understudy.json_text import jsonable
from understudy.protocol import packed
from understudy.reads import AccountRecord, SessionRecord
from understudy.waiting import is_set_within

from ..client.fleet import ANSWER_SECONDS, Fleet, Source, Wire, problem_of

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 10.0
HEARTBEAT = ": still here\n\n"
LINGER_SECONDS = 20.0
"""A log is kept so long without viewers: who reloads, or was cut off, goes on in it."""

FLEET = "the fleet"
"""Beside the ids of sessions, which have no spaces."""

VIEWERS = 64
TREES = 16
"""Logs that are kept, unless more are looked at."""

EVENTS = 20_000
"""Events of a tree that its log keeps; it begins with as many."""

FOLLOWED = 400
"""Sessions of a tree that are followed."""

AT_ONCE = 500
STATE_PAUSE_SECONDS = 0.3
STATE_SECONDS = 5.0
RETRY_SECONDS = 1.0
SHARE = 4.0
KNOWN_READS = 500


class TooManyViewers(UnderstudyError):
    """So many pages are open that one more is refused."""

    code = "too_many_viewers"
    hint = "Close some of them."


def message(event: str, data: Any, identifier: str = "") -> str:
    """A server-sent event. JSON has no line breaks of its own, so that the data is one line."""
    name = f"id: {identifier}\n" if identifier else ""
    return f"{name}event: {event}\ndata: {json.dumps(data, default=jsonable)}\n\n"


@dataclass
class _Read:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    following: asyncio.Task[Any] | None = None
    free_at: float = 0.0


class SharedReads:
    """Reads that many pages ask for at the same moment: one at a time for each key, with pauses.

    Who asks gets the result of a read that began afterwards, and shares it with all who asked before it began.
    """

    def __init__(self) -> None:
        self._reads: dict[Any, _Read] = {}

    async def get(self, key: Any, read: Callable[[], Awaitable[Any]]) -> Any:
        """The result of `read`, or what it raises."""
        if len(self._reads) > KNOWN_READS:
            now = time.monotonic()
            self._reads = {
                key: known for key, known in self._reads.items()
                if known.following is not None or known.lock.locked() or known.free_at > now
            }  # fmt: skip
        known = self._reads.setdefault(key, _Read())
        if known.following is None:
            known.following = asyncio.create_task(self._run(known, read))
            known.following.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(known.following)

    async def _run(self, known: _Read, read: Callable[[], Awaitable[Any]]) -> Any:
        async with known.lock:
            await asyncio.sleep(max(0.0, known.free_at - time.monotonic()))
            known.following = None
            began = time.monotonic()
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    return await read()
            finally:
                ended = time.monotonic()
                known.free_at = ended + SHARE * (ended - began)


class TreeLog:
    """The events of a tree in the order in which they came here, and its state, for all who look at it.

    Attributes:
        life: ids of events begin with it; another one knows nothing of theirs.
        first: place of the first event that is kept.
        truncated: earlier ones exist.
        state_message: the state as it is sent, encoded once for all.
    """

    def __init__(self, source: Source, root_id: str) -> None:
        self._source = source
        self.root_id = root_id
        self.life = new_identifier()[-8:]
        self.events: list[EventWire] = []
        self.first = 0
        self.truncated = False
        self.state: Wire | None = None
        self.state_message = ""
        self.version = 0
        self.viewers = 0
        self.unseen_since = time.monotonic()
        self._places: dict[str, int] = {}
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._dirty = asyncio.Event()
        self._news = asyncio.Condition()

    async def run(self) -> None:
        """Follow until cancelled."""
        try:
            while True:
                self._dirty.clear()
                began = time.monotonic()
                await self._look()
                await asyncio.sleep(max(STATE_PAUSE_SECONDS, SHARE * (time.monotonic() - began)))
                await is_set_within(self._dirty, STATE_SECONDS)
        finally:
            for task in self._followers.values():
                task.cancel()
            await asyncio.gather(*self._followers.values(), return_exceptions=True)

    async def _look(self) -> None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                rows = await self._source.read(list[SessionRecord], "tree", self.root_id)
                budgets = await self._source.read(list[AccountRecord], "budgets", self.root_id)
            state = {"rows": with_totals(rows), "budgets": budgets, "problem": None}
            self._follow(rows)
        except Exception as error:
            known = self.state or {"rows": [], "budgets": []}
            state = {**known, "problem": problem_of(error)}
        self.state = {
            **state,
            "at": time.time_ns() // 1_000,
            "truncated": self.truncated,
            "followed": len(self._places),
        }
        self.state_message = message("state", self.state)
        async with self._news:
            self.version += 1
            self._news.notify_all()

    def _follow(self, rows: list[SessionRecord]) -> None:
        share = max(50, EVENTS // (2 * max(1, len(rows))))
        for row in rows:
            self._begin(row.session_id, max(0, row.seq - share))

    def _begin(self, session_id: str, after: int) -> None:
        """Follow one more session, if there is room."""
        if session_id in self._places or len(self._places) >= FOLLOWED:
            return
        self._places[session_id] = after
        self.truncated = self.truncated or after > 0
        self._followers[session_id] = asyncio.create_task(self._following(session_id))

    async def _following(self, session_id: str) -> None:
        while True:
            try:
                async for event in self._source.follow(session_id, self._places[session_id]):
                    self._places[session_id] = event["seq"]
                    await self._take(event)
            except Exception as error:
                log.info("session %s can't be followed: %s", session_id, problem_of(error)["message"])
            await asyncio.sleep(RETRY_SECONDS)

    async def _take(self, event: EventWire) -> None:
        self.events.append(event)
        if event["type"] in (ChildSpawned.type, ChildRestarted.type):
            self._begin(event["data"]["child_id"], 0)
        if len(self.events) > EVENTS + AT_ONCE:  # many at once: each time the rest of the list is moved
            gone = len(self.events) - EVENTS
            del self.events[:gone]
            self.first += gone
            self.truncated = True
        self._dirty.set()
        async with self._news:
            self._news.notify_all()

    def place(self, identifier: str) -> int | None:
        """Where a viewer goes on who has this event; None if that is not known any more, or never was."""
        life, _, number = identifier.rpartition(".")
        if life != self.life or not number.isdecimal():
            return None
        return int(number) if self.first <= int(number) <= self.end else None

    @property
    def end(self) -> int:
        """The place after the last event."""
        return self.first + len(self.events)

    async def stream(self, identifier: str) -> AsyncIterator[str]:
        """Server-sent events: `reset` for a viewer who has to start over, `log` with ids, `state` without."""
        place, version = self.place(identifier), 0
        while True:
            if place is None or place < self.first:
                place = self.first
                yield message("reset", {"truncated": self.truncated}, f"{self.life}.{place}")
            if version < self.version:
                version = self.version
                yield self.state_message
            some = self.events[place - self.first : place - self.first + AT_ONCE]
            if some:
                place += len(some)
                yield message("log", some, f"{self.life}.{place}")
                continue
            try:
                await asyncio.wait_for(self._newer(place, version), HEARTBEAT_SECONDS)
            except TimeoutError:
                yield HEARTBEAT

    async def _newer(self, place: int, version: int) -> None:
        async with self._news:
            await self._news.wait_for(lambda: self.end > place or self.version > version)


def with_totals(rows: list[SessionRecord]) -> list[Wire]:
    """A tree's rows, each with what it and all below it used: `tokens_below`, `cost_below`, `sessions_below`."""
    found = {
        row.session_id: {
            **packed(row), "tokens_below": row.tokens_used, "cost_below": row.cost_used, "sessions_below": 1
        } for row in rows
    }  # fmt: skip
    for row in reversed(list(found.values())):  # children come after their parents
        parent = found.get(row["parent_id"])
        if parent is not None:
            for name in ("tokens_below", "cost_below", "sessions_below"):
                parent[name] += row[name]
    return list(found.values())


def changes(before: Wire, after: Wire) -> Wire:
    """What of a snapshot of the cluster differs from the one before.

    Instead of `sessions` it has the `rows` that differ, and their `order`, all ids, if that does.
    """
    changed = {name: value for name, value in after.items() if name != "sessions" and value != before[name]}
    known = {row["session_id"]: row for row in before["sessions"]}
    changed["rows"] = [row for row in after["sessions"] if row != known.get(row["session_id"])]
    order = [row["session_id"] for row in after["sessions"]]
    return changed if order == list(known) else {**changed, "order": order}


class FleetSent:
    """Snapshots as they are sent, encoded once for all who look: who has the one before gets what has changed."""

    def __init__(self) -> None:
        self._version = 0
        self._snapshot: Wire | None = None
        self._changes = ""
        self._whole = ""

    def take(self, version: int, snapshot: Wire) -> None:
        """The latest snapshot; each is taken once."""
        if version <= self._version:
            return
        follows = self._snapshot is not None and version == self._version + 1
        self._changes = message("change", changes(self._snapshot or {}, snapshot)) if follows else ""
        self._version, self._snapshot, self._whole = version, snapshot, ""

    def since(self, version: int) -> str:
        """What somebody is sent who has this version."""
        if version == self._version - 1 and self._changes:
            return self._changes
        self._whole = self._whole or message("fleet", self._snapshot)
        return self._whole


class Hub:
    """All that is followed, for as long as somebody looks at it."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.reads = SharedReads()
        self._fleet: Fleet | None = None
        self._fleet_viewers = 0
        self._fleet_unseen_since = 0.0
        self._fleet_sent = FleetSent()
        self._trees: dict[str, TreeLog] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._viewers = 0

    async def fleet(self) -> AsyncGenerator[str, None]:
        """Snapshots of the cluster, the latest whenever the viewer takes one."""
        async with self._viewer():
            self._fleet_viewers += 1
            try:
                if self._fleet is None:
                    self._fleet, self._fleet_sent = Fleet(self.source), FleetSent()
                    self._tasks[FLEET] = asyncio.create_task(self._fleet.run())
                fleet, version = self._fleet, 0
                while True:
                    try:
                        known = version
                        version, snapshot = await asyncio.wait_for(fleet.newer(known), HEARTBEAT_SECONDS)
                        self._fleet_sent.take(version, snapshot)
                        yield self._fleet_sent.since(known)
                    except TimeoutError:
                        yield HEARTBEAT
            finally:
                self._fleet_viewers -= 1
                self._fleet_unseen_since = time.monotonic()

    async def tree(self, session_id: str, identifier: str) -> AsyncGenerator[str, None]:
        """The events and states of the tree that a session is in, after the event with this id."""
        async with self._viewer():
            tree = await self._tree_of(session_id)
            tree.viewers += 1
            try:
                async for part in tree.stream(identifier):
                    yield part
            finally:
                tree.viewers -= 1
                tree.unseen_since = time.monotonic()

    async def check(self, session_id: str) -> None:
        """Raises before a stream begins: `UnknownSession`, `TooManyViewers`."""
        if self._viewers >= VIEWERS:
            raise TooManyViewers(f"{VIEWERS} pages are open")
        if session_id:
            await self._tree_of(session_id)

    async def _tree_of(self, session_id: str) -> TreeLog:
        for known in self._trees.values():
            if any(row["session_id"] == session_id for row in (known.state or {"rows": ()})["rows"]):
                return known
        row = await self.reads.get(("info", session_id), lambda: self.source.read(SessionRecord, "info", session_id))
        root_id = row.root_id or session_id
        if root_id not in self._trees:
            await self._let_go(room=1)
        if root_id not in self._trees:  # somebody else may have begun it meanwhile
            self._trees[root_id] = tree = TreeLog(self.source, root_id)
            self._tasks[root_id] = asyncio.create_task(tree.run())
        return self._trees[root_id]

    async def _let_go(self, room: int = 0) -> None:
        """End what nobody has looked at for a while; sooner where `TREES` leaves no room for others."""
        now = time.monotonic()
        unseen = sorted((tree.unseen_since, root_id) for root_id, tree in self._trees.items() if not tree.viewers)
        many = len(self._trees) + room - TREES
        gone = [root_id for at, (since, root_id) in enumerate(unseen) if at < many or now - since > LINGER_SECONDS]
        for root_id in gone:
            del self._trees[root_id]
        if self._fleet is not None and not self._fleet_viewers and now - self._fleet_unseen_since > LINGER_SECONDS:
            self._fleet = None
            gone.append(FLEET)
        # Forgotten before the first pause: whoever comes meanwhile begins new ones.
        await asyncio.gather(*map(_cancelled, [self._tasks.pop(name) for name in gone]))

    @asynccontextmanager
    async def _viewer(self) -> AsyncIterator[None]:
        self._viewers += 1
        try:
            yield
        finally:
            self._viewers -= 1

    async def tidy(self) -> None:
        """Let go of what nobody looks at, now and then; until cancelled."""
        while True:
            await asyncio.sleep(LINGER_SECONDS / 2)
            await self._let_go()

    async def close(self) -> None:
        """End everything."""
        for task in self._tasks.values():
            await _cancelled(task)


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
