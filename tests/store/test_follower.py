"""The client's follower: what it does when a node service dies under its watch. No Ray."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from understudy.cluster.client import follower as following
from understudy.cluster.client import session_handle
from understudy.cluster.client.follower import Follower
from understudy.errors import ServiceGone, StoreUnreachable
from understudy.events import CancelRequested, RunFinished
from understudy.node.feed import Feed
from understudy.node.reading import Reading
from understudy.protocol import Following, packed, unpacked
from understudy.records import PAGE
from understudy.store.reads import queries

from ..records import run_record
from .test_store import Store, opened

PATIENCE = 20.0


class Nodes:
    """One node whose service dies once; what it is asked about homes gets no answer from then on."""

    def __init__(self) -> None:
        self.died = False

    async def home(self, _session_id: str) -> str:
        return "a"

    async def homes(self, _session_ids: list[str]) -> dict[str, tuple[str, int]]:
        await asyncio.Event().wait()
        raise AssertionError

    async def learn(self) -> None:
        return None

    async def call(self, _node_id: str, *_request: Any, timeout: float) -> dict[str, Any]:
        if not self.died:
            self.died = True
            raise ServiceGone("killed")
        event = RunFinished(session_id="s", seq=1, run_id="r", status="completed")
        return {"events": [event.to_wire()], "streams": {}, "runs": {"s/r": packed(run_record())}}


async def test_a_death_after_many_new_followers_is_no_long_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given followers that come more often than a watch is answered, when the service dies after a while, then those
    who wait do so until the next one answers."""
    monkeypatch.setattr(following, "RETRY_SECONDS", 0.2)
    monkeypatch.setattr(following, "WATCH_SECONDS", 0.1)
    monkeypatch.setattr(following, "PAUSE_SECONDS", 0.01)
    nodes = Nodes()
    quiet, call, watches = asyncio.Event(), nodes.call, [0]

    async def pending(*arguments: Any, timeout: float) -> dict[str, Any]:
        watches[0] += 1
        if not quiet.is_set():
            await asyncio.Event().wait()
        return await call(*arguments, timeout=timeout)

    async def homes(session_ids: list[str]) -> dict[str, tuple[str, int]]:
        return {session_id: ("a", 1) for session_id in session_ids}

    monkeypatch.setattr(nodes, "call", pending)
    monkeypatch.setattr(nodes, "homes", homes)
    follower = Follower(nodes)  # type: ignore[arg-type]
    async with follower.follow("s", ends=True) as subscription, asyncio.timeout(PATIENCE):
        began = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() - began < 0.5:
            before = watches[0]
            async with follower.follow("other", ends=True):
                while watches[0] == before:  # noqa: ASYNC110 - nothing reports that a watch was replaced
                    await asyncio.sleep(0.005)
        quiet.set()
        async with follower.follow("other", ends=True):
            kind, *_ = await subscription.queue.get()
    await follower.close()
    assert (kind, nodes.died) == ("event", True)


async def test_a_watch_that_fails_as_it_is_replaced_is_no_error_that_nobody_saw() -> None:
    """Given a watch that a new follower replaces, when its service dies at that moment, then asyncio has no error to
    report, which would be in the logs of whoever follows."""
    nodes, reported = Nodes(), list[dict[str, Any]]()
    watched = asyncio.Event()

    async def pending(*_arguments: Any, timeout: float) -> dict[str, Any]:
        watched.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise ServiceGone("killed")

    nodes.call = pending  # type: ignore[method-assign]
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reported.append(context))
    follower = Follower(nodes)  # type: ignore[arg-type]
    async with follower.follow("s", ends=True), asyncio.timeout(PATIENCE):
        await watched.wait()
        watched.clear()
        async with follower.follow("other", ends=True):
            await watched.wait()
    await follower.close()
    gc.collect()
    assert reported == []


async def test_where_the_store_is_not_reached_others_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a node whose service does not reach the store, when the session is at home on another one, then it is
    followed there."""
    monkeypatch.setattr(following, "PAUSE_SECONDS", 0.01)
    nodes = Nodes()
    nodes.died = True

    async def call(node_id: str, *request: Any, timeout: float) -> dict[str, Any]:
        if node_id == "a":
            raise StoreUnreachable("away")
        return await Nodes.call(nodes, node_id, *request, timeout=timeout)

    async def homes(session_ids: list[str]) -> dict[str, tuple[str, int]]:
        return dict.fromkeys(session_ids, ("b", 1))

    monkeypatch.setattr(nodes, "call", call)
    monkeypatch.setattr(nodes, "homes", homes)
    follower = Follower(nodes)  # type: ignore[arg-type]
    async with follower.follow("s", ends=True) as subscription, asyncio.timeout(PATIENCE):
        kind, *_ = await subscription.queue.get()
    await follower.close()
    assert kind == "event"


async def test_an_end_is_reported_while_homes_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a watch that was lost with its service, when nobody can say whether the session moved, then the next watch
    reports the run's end all the same."""
    monkeypatch.setattr(following, "COMPARE_SECONDS", 0.05)
    follower = Follower(Nodes())  # type: ignore[arg-type]
    async with follower.follow("s", ends=True) as subscription, asyncio.timeout(PATIENCE):
        kind, event, row = await subscription.queue.get()
    await follower.close()
    assert (kind, event.run_id, row) == ("event", "r", run_record())


class Service:
    """One node whose service has a real feed and a real store, and whose clients hear of homes what the store says."""

    def __init__(self, db: Store) -> None:
        self.reading = Reading(db.database, db.namespace)
        self.feed = Feed(self.reading.events, lambda _: None, self.reading.run)

    async def home(self, _session_id: str) -> str:
        return "node-1"

    async def homes(self, session_ids: list[str]) -> dict[str, tuple[str, int]]:
        found: dict[str, tuple[str, int]] = await self.reading.query(queries.homes, session_ids)
        return {session_id: found.get(session_id, ("node-1", 0)) for session_id in session_ids}

    async def request(
        self, session_id: str, _method: str, _session_id: str, after: int, turn: int = 0
    ) -> list[dict[str, Any]]:
        await self.reading.session(session_id)
        return [event.to_wire() for event in await self.reading.events(session_id, after)]

    async def call(self, _node_id: str, _request: str, _watch: str, *arguments: Any, timeout: float) -> dict[str, Any]:
        client_id, follow, seconds = arguments
        return packed(await self.feed.watch(client_id, unpacked(follow, dict[str, Following], "watch"), seconds))


@asynccontextmanager
async def followed(db: Store) -> AsyncIterator[tuple[Service, Follower]]:
    service = Service(db)
    follower = Follower(service)  # type: ignore[arg-type]
    try:
        async with asyncio.timeout(PATIENCE):
            yield service, follower
    finally:
        await follower.close()
        await service.reading.close()


@pytest.mark.thorough
@pytest.mark.parametrize("ends", [False, True])
async def test_a_log_of_more_than_a_page_is_followed_to_its_end(tmp_path: Path, ends: bool) -> None:
    """Given a session with more events than the services send at a time, which has ended, when a client follows it from
    its beginning, then it receives all of them, or if it asks for ends, the end."""

    def work(tx: Any) -> None:
        row = tx.session("s")
        for number in range(PAGE):
            tx.append(row, CancelRequested(run_id="r", reason=str(number)))
        tx.append(row, RunFinished(run_id="r", status="completed"))

    async with opened(f"sqlite:///{tmp_path}/rows.db") as db:
        await db.own()
        await db.create("s")
        await db.accept("s")
        await db.do(work)
        async with followed(db) as (_, follower), follower.follow("s", ends=ends) as subscription:
            received: list[int] = []
            while not received or received[-1] < PAGE + 3:
                _, event, _ = await subscription.queue.get()
                received.append(event.seq)
    assert received == ([PAGE + 3] if ends else [*range(1, PAGE + 4)])


async def test_what_was_not_received_is_fetched_although_nothing_follows(tmp_path: Path) -> None:
    """Given a follower that received something since it was last compared with the store, when a notice is lost and
    nothing else happens, then a later comparison fetches what is missing."""
    async with opened(f"sqlite:///{tmp_path}/rows.db") as db:
        await db.own()
        await db.create("s")
        async with followed(db) as (_, follower), follower.follow("s") as subscription:
            await subscription.queue.get()
            await db.accept("s")  # the feed is not notified
            for _ in range(2):
                await follower._compare("node-1")
            _, event, _ = subscription.queue.get_nowait()
            assert event.type == "run_accepted"


async def test_a_removed_session_is_reported_to_its_own_follower(tmp_path: Path) -> None:
    """Given one of two sessions that are followed was removed, when they are compared with the store, then its follower
    gets `UnknownSession`, and the other's gets what it has missed."""
    async with opened(f"sqlite:///{tmp_path}/rows.db") as db:
        await db.own()
        for session_id in ("gone", "here"):
            await db.create(session_id)
        async with (
            followed(db) as (_, follower),
            follower.follow("gone") as gone,
            follower.follow("here") as here,
        ):
            for subscription in (gone, here):
                await subscription.queue.get()
            await db.do(lambda tx: tx.drop(["gone"]))
            await db.accept("here")  # the feed is not notified
            for _ in range(2):
                await follower._compare("node-1")
            assert here.queue.get_nowait()[1].type == "run_accepted"
            kind, error = gone.queue.get_nowait()
            assert (kind, error.code) == ("error", "unknown_session")


async def test_all_pages_of_a_long_log_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given more than the services tell at a time, then nothing is missing, and nothing comes twice."""
    log = [{"seq": number} for number in range(3, 24)]
    asked: list[int] = []

    async def read(after: int) -> list[dict[str, Any]]:
        asked.append(after)
        return [row for row in log if row["seq"] > after][:10]

    monkeypatch.setattr(session_handle, "PAGE", 10)
    assert [row async for row in session_handle._pages(read, 0, itemgetter("seq"))] == log
    assert asked == [0, 12, 22]
