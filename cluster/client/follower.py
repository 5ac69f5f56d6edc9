"""Following runs: one pending watch per client and node service, however many runs are followed.

Each session is followed at its home. When that changes it is followed at the next one: every call says what the client
has, so nothing is missing and nothing comes twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from understudy.errors import ClusterUnreachable, ServiceGone, StoreUnreachable, UnderstudyError, UnknownSession
from understudy.event_wire import EventWire
from understudy.events import Event
from understudy.identifiers import new_identifier
from understudy.node.feed import ENDS
from understudy.protocol import Following, Watched, packed, unpacked
from understudy.streams import Part
from understudy.transport.repeating import REPEAT_SECONDS, RETRY_SECONDS
from understudy.waiting import retrieve_error

log = logging.getLogger(__name__)

WATCH_SECONDS = 20.0
GATHER_SECONDS = 0.004
"""How long a new follower's wishes are gathered with others', as a call tells all that is followed at its node."""

GATHER_SHARE = 0.0001
"""The same for each session that is followed: the more there are, the more a call costs."""

PAUSE_SECONDS = 0.2
COMPARE_SECONDS = 10.0


@dataclass(eq=False)
class Subscription:
    """One follower of one session.

    Attributes:
        after: `seq` of the last event it has.
        stream: `(key, lengths)` of the streamed answer it has, by parts; None to get none.
        node_id: where it is followed.
        seen: the session's `seq` when the store had nothing more to tell, and `after` at the last comparison with it.
    """

    session_id: str
    node_id: str
    after: int
    ends: bool
    stream: tuple[str, list[int]] | None
    seen: tuple[int, int]
    queue: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)


Result = TypeVar("Result")


class Homes(Protocol):
    """The node services, and where sessions are at home (`NodeDirectory`)."""

    async def home(self, session_id: str) -> str:
        """The node that looks after the session, as far as is known."""

    async def homes(self, session_ids: list[str]) -> dict[str, tuple[str, int]]:
        """For each session the node to follow it at, as the store has it now, and the session's `seq`."""

    async def request(self, session_id: str | None, method: str, *arguments: Any, turn: int = 0) -> Any:
        """A request (`Requests`), repeated until it is answered."""

    async def call(
        self, node_id: str, method: str, *arguments: Any, call_id: str = "", timeout: float | None = REPEAT_SECONDS
    ) -> Any:  # fmt: skip
        """Call a method of a node's service, once."""

    async def learn(self) -> None:
        """Look again which services there are."""


async def asked(
    nodes: Homes, kind: type[Result], session_id: str | None, method: str, *arguments: Any, turn: int = 0
) -> Result:
    """What a request has done, or read.

    Args:
        kind: of the result.
        session_id: whose node service is asked; None for any.
        arguments: data, or messages of `understudy.protocol`.
        turn: see `Homes.request`.

    Raises:
        InvalidInput: the answer is of another kind; the text says where.
        UnderstudyError: what the request raised.
    """
    done = await nodes.request(session_id, method, *map(packed, arguments), turn=turn)
    what = f"read {arguments[0]}" if method == "read" else method
    found: Result = unpacked(done, kind, f"the result of {what}")
    return found


class Follower:
    """Multiplexes subscriptions onto one `watch` call per node. Lives on the client's loop."""

    def __init__(self, nodes: Homes) -> None:
        self._nodes = nodes
        self._client_id = new_identifier()
        self._subscriptions: dict[Subscription, None] = {}  # in the order in which they came
        self._changed: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @contextlib.asynccontextmanager
    async def follow(
        self, session_id: str, *, after: int = 0, ends: bool = False, stream: bool = False
    ) -> AsyncIterator[Subscription]:
        """Subscribe to a session's events (or only to the ends and pauses of its runs), and to its streamed answers."""
        node_id = await self._nodes.home(session_id)
        subscription = Subscription(session_id, node_id, after, ends, ("", []) if stream else None, (-1, after))
        self._subscriptions[subscription] = None
        self._attend(node_id)
        try:
            yield subscription
        finally:
            self._subscriptions.pop(subscription, None)

    def _attend(self, node_id: str) -> None:
        """See to it that a watch at this node asks for all that is followed there now."""
        self._changed.setdefault(node_id, asyncio.Event()).set()
        task = self._tasks.get(node_id)
        if task is None or task.done():
            self._tasks[node_id] = asyncio.get_running_loop().create_task(self._watching(node_id))

    def _at(self, node_id: str) -> list[Subscription]:
        return [subscription for subscription in self._subscriptions if subscription.node_id == node_id]

    async def close(self) -> None:
        """Stop following; whoever still waits gets `ClusterUnreachable`."""
        for subscription in self._subscriptions:
            subscription.queue.put_nowait(("error", ClusterUnreachable("the connection was closed")))
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _watching(self, node_id: str) -> None:
        compared, failing, failed = time.monotonic(), 0.0, -math.inf
        while self._at(node_id):
            try:
                if await self._watch(node_id):
                    failed = -math.inf
                if time.monotonic() - compared >= WATCH_SECONDS:
                    await self._compare(node_id)
                    compared = time.monotonic()
            except (TimeoutError, ServiceGone, StoreUnreachable) as error:
                # From the first failure of a row on: the last answer may be old, since a watch is replaced with each
                # new follower. Without the store a service answers, and whoever follows waits for the store as it does.
                now = time.monotonic()
                if isinstance(error, StoreUnreachable) or now - failed > RETRY_SECONDS:
                    failing = now
                failed = now
                if now - failing > RETRY_SECONDS:
                    self._fail(node_id, ClusterUnreachable(f"the services don't answer: {error}"))
                    return
                await asyncio.sleep(PAUSE_SECONDS)
                await self._nodes.learn()
                await self._compare(node_id)
            except Exception as error:
                self._fail(node_id, error)
                return

    def _fail(self, node_id: str, error: Exception) -> None:
        for subscription in self._at(node_id):
            subscription.queue.put_nowait(("error", error))

    async def _watch(self, node_id: str) -> bool:
        """One call, until there is news or somebody wants to follow something else; True if it was answered."""
        await asyncio.sleep(GATHER_SECONDS + GATHER_SHARE * len(self._subscriptions))
        self._changed[node_id].clear()
        request = ("watch", self._client_id, packed(self._wanted(node_id)), WATCH_SECONDS)
        call = self._nodes.call(node_id, "request", *request, timeout=WATCH_SECONDS + REPEAT_SECONDS)
        watch = asyncio.ensure_future(call)
        watch.add_done_callback(retrieve_error)  # it may fail at the moment in which it is replaced
        changed = asyncio.ensure_future(self._changed[node_id].wait())
        try:
            done, _ = await asyncio.wait({watch, changed}, return_when=asyncio.FIRST_COMPLETED)
            if watch not in done:
                return False
            found = unpacked(watch.result(), Watched, "the result of watch")
            self._deliver(found)
            if found.gone:
                await asyncio.sleep(PAUSE_SECONDS)  # if the store knows better, this comes again at once
                await self._compare(node_id)
            return True
        finally:
            changed.cancel()
            watch.cancel()  # the node service ends a watch that a newer one replaces

    async def _compare(self, node_id: str) -> None:
        """Compare what is followed at a node with the store: follow elsewhere what has moved, fetch what was not sent.

        When a notice between node services is lost, some events are never sent, and a cluster that took the store over
        notifies nobody here. Whoever only waits for ends looks for himself (`Run`).
        """
        here = self._at(node_id)
        try:
            # Bounded: a request is repeated with more and more patience, and no follower receives anything meanwhile.
            async with asyncio.timeout(COMPARE_SECONDS):
                homes = await self._nodes.homes(sorted({subscription.session_id for subscription in here}))
            for subscription in here:
                home, seq = homes[subscription.session_id]
                if home != node_id:
                    subscription.node_id = home
                    self._attend(home)
                elif not subscription.ends:
                    await self._catch_up(subscription, seq)
        except (TimeoutError, UnderstudyError) as error:
            log.info("what is followed at node %s can't be compared: %s", node_id[:8], error)

    async def _catch_up(self, subscription: Subscription, seq: int) -> None:
        """Fetch what a session has committed, if its follower received nothing since the last comparison."""
        session_id, after, (known, before) = subscription.session_id, subscription.after, subscription.seen
        if before == after and seq not in (known, after):
            try:
                async with asyncio.timeout(COMPARE_SECONDS):
                    events = await asked(self._nodes, list[EventWire], session_id, "events", session_id, after)
            except UnknownSession as error:  # it was removed
                subscription.queue.put_nowait(("error", error))
                return
            self._deliver(Watched(events))
            known = known if events else seq  # there may be another page
        subscription.seen = (known, after)

    def _wanted(self, node_id: str) -> dict[str, Following]:
        wanted: dict[str, Following] = {}
        for subscription in self._at(node_id):
            all_of = wanted.setdefault(subscription.session_id, Following(subscription.after, subscription.ends))
            all_of.after = min(all_of.after, subscription.after)
            all_of.ends = all_of.ends and subscription.ends
            if subscription.stream is not None:
                other = all_of.stream or subscription.stream
                same = other[0] == subscription.stream[0]
                # Followers that are not at the same place get the answer from where the slowest is.
                least = [min(pair) for pair in zip(other[1], subscription.stream[1], strict=False)]
                all_of.stream = (other[0], least) if same else ("", [])
        return wanted

    def _deliver(self, found: Watched) -> None:
        """Give every subscription what is new for it."""
        events = [Event.from_wire(wire) for wire in found.events]
        for subscription in self._subscriptions:
            news = found.streams.get(subscription.session_id)
            if news is not None and subscription.stream is not None:
                key, parts = news
                lengths = list(subscription.stream[1]) if subscription.stream[0] == key else []
                new = list(_new(parts, lengths))
                if new or subscription.stream[0] != key:
                    subscription.queue.put_nowait(("stream", key, new))
                subscription.stream = (key, lengths)
            for event in events:
                if event.session_id == subscription.session_id and event.seq > subscription.after:
                    subscription.after = event.seq
                    if not subscription.ends or event.type in ENDS:
                        row = found.runs.get(f"{event.session_id}/{event.run_id}")
                        subscription.queue.put_nowait(("event", event, row))


def _new(parts: list[Part], lengths: list[int]) -> Iterator[Part]:
    """What of these parts is new for one who has so many characters of each, which are counted on."""
    for part in parts:
        known = lengths[part.place] if part.place < len(lengths) else -1
        if part.place > len(lengths) or part.offset > max(0, known):  # what is before it has not come
            continue
        rest = part.after(known)
        if known < 0:
            lengths.append(0)
        elif not rest.text:
            continue
        lengths[part.place] = rest.offset + len(rest.text)
        yield rest
