"""Following runs: one pending watch per client and node service, however many runs are followed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from understudy.errors import ClusterUnreachable
from understudy.events import Event
from understudy.identifiers import new_identifier

WATCH_SECONDS = 20.0
GATHER_SECONDS = 0.004

Request = Callable[..., Awaitable[Any]]


@dataclass(eq=False)
class Subscription:
    """One follower of one session.

    Attributes:
        after: `seq` of the last event it has.
        stream: `(key, offset)` of the streamed text it has; None to get none.
    """

    session_id: str
    after: int
    ends: bool
    stream: tuple[str, int] | None
    queue: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)


class Follower:
    """Multiplexes subscriptions onto one `watch` call. Lives on the client's loop."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._client_id = new_identifier()
        self._subscriptions: set[Subscription] = set()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def follow(
        self, session_id: str, *, after: int = 0, ends: bool = False, stream: bool = False
    ) -> AsyncIterator[Subscription]:
        """Subscribe to a session's events (or only to the ends of its runs), and to its streamed text."""
        subscription = Subscription(session_id, after, ends, ("", 0) if stream else None)
        self._subscriptions.add(subscription)
        self._changed.set()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._watching())
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)

    def _fail(self, error: Exception) -> None:
        for subscription in self._subscriptions:
            subscription.queue.put_nowait(("error", error))

    async def close(self) -> None:
        """Stop following; whoever still waits gets `ClusterUnreachable`."""
        self._fail(ClusterUnreachable("the connection was closed"))
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _watching(self) -> None:
        while self._subscriptions:
            await asyncio.sleep(GATHER_SECONDS)
            self._changed.clear()
            watch = asyncio.ensure_future(self._request("watch", self._client_id, self._wanted(), WATCH_SECONDS))
            changed = asyncio.ensure_future(self._changed.wait())
            try:
                done, _ = await asyncio.wait({watch, changed}, return_when=asyncio.FIRST_COMPLETED)
                if watch in done:
                    self._deliver(watch.result())
            except asyncio.CancelledError:
                raise
            except Exception as error:  # the request was repeated for long enough before it failed
                self._fail(error)
                return
            finally:
                changed.cancel()
                watch.cancel()  # the node service ends a watch that a newer one replaces

    def _wanted(self) -> dict[str, dict[str, Any]]:
        wanted: dict[str, dict[str, Any]] = {}
        for subscription in self._subscriptions:
            row = wanted.setdefault(
                subscription.session_id, {"after": subscription.after, "ends": subscription.ends, "stream": None}
            )
            row["after"] = min(row["after"], subscription.after)
            row["ends"] = row["ends"] and subscription.ends
            if subscription.stream is not None:
                other = row["stream"] or subscription.stream
                same = other[0] == subscription.stream[0]
                # Followers that are not at the same place get the text from where the slowest is.
                row["stream"] = (other[0], min(other[1], subscription.stream[1])) if same else ("", 0)
        return wanted

    def _deliver(self, found: dict[str, Any]) -> None:
        streams = found["streams"]
        events = [Event.from_wire(wire) for wire in found["events"]]
        for subscription in self._subscriptions:
            news = streams.get(subscription.session_id)
            if news is not None and subscription.stream is not None:
                key, offset, text = news
                have = subscription.stream[1] if subscription.stream[0] == key else 0
                if offset <= have:
                    previous, text = subscription.stream, text[have - offset :]
                    subscription.stream = (key, have + len(text))
                    subscription.queue.put_nowait(("text", previous, key, have, text))
            for event in events:
                if event.session_id == subscription.session_id and event.seq > subscription.after:
                    subscription.after = event.seq
                    subscription.queue.put_nowait(("event", event))
