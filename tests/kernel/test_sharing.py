"""Sessions that wait for a frame go to a node that has one: real node services on one PostgreSQL store, no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from understudy.identifiers import new_identifier
from understudy.scaling import SCALED_DOWN
from understudy.store.db.engine import now
from understudy.store.operations import draining
from understudy.testing.offline import OfflineServer

from . import kernel as k
from .test_drain import PATIENCE, Nodes, activations, cluster


@pytest.fixture
def server() -> Iterator[OfflineServer]:
    """The model that all nodes ask."""
    with OfflineServer() as found:
        yield found


@asynccontextmanager
async def occupied(node: k.Kernel, directory: Path) -> AsyncIterator[None]:
    """While this lasts, the one frame of a node is at the tool of a session, `busy`."""
    begun, over = asyncio.Event(), asyncio.Event()
    point = node.point

    async def held(label: str, worker: k.Worker | None) -> None:
        await point(label, worker)
        if label == "tool begins" and not begun.is_set():
            begun.set()
            await over.wait()

    node.point = held  # type: ignore[method-assign]
    rounds = [("note", {"path": str(directory / "notes"), "text": "x"})], "done"
    await node.spawn("busy", k.spec(k.script(*rounds), [k.note]))
    await node.send("busy")
    await asyncio.wait_for(begun.wait(), PATIENCE)
    try:
        yield
    finally:
        over.set()


async def give(nodes: Nodes, count: int = 10, giver: int = 1, taker: str = "a") -> int:
    """Have a node give sessions away, as its supervisor does."""
    return await nodes.kernels[giver].call("give", count, taker, new_identifier())  # type: ignore[no-any-return]


@pytest.mark.thorough
async def test_sessions_that_wait_go_where_a_frame_is_free(
    postgres: str, server: OfflineServer, tmp_path: Path
) -> None:
    """Given a node whose frame is at a tool, when sessions that wait there are given to another node, then they are
    worked on there at once, nothing is repeated, and what was at work stays where it is."""
    async with cluster(postgres, server, tmp_path, "a", "b") as nodes:
        a, b = nodes.kernels
        async with occupied(b, tmp_path):
            for name in ("one", "two", "three"):
                await b.spawn(name, k.spec())
                await b.send(name)
            assert await give(nodes, 2) == 2
            for name in ("one", "two"):
                assert (await nodes.end(name))["status"] == "completed"
                assert activations(await a.events(name)) == [("a", "moved")]
            assert (await a.info("three"))["node_id"] == "b"
            assert (await a.info("busy"))["node_id"] == "b"
        for name in ("three", "busy"):
            assert (await nodes.end(name))["status"] == "completed"
            assert activations(await a.events(name))[0] == ("b", "ready")
        assert server.stats.requests == 5
        for name in ("one", "two", "three", "busy"):
            events = await a.events(name)
            assert not {"session_crashed", "model_call_reissued", "tool_in_doubt"} & {event["type"] for event in events}
            moves = [event["data"] for event in events if event["type"] == "session_moved"]
            assert [move["forced"] for move in moves] == [False] * (name in ("one", "two"))


@pytest.mark.thorough
async def test_a_session_stays_with_its_workspace(postgres: str, server: OfflineServer, tmp_path: Path) -> None:
    """Given a session that has had a run at a node, and one that has not begun, both with a workspace, when both wait
    there for a frame, then only the second one goes to another node."""
    async with cluster(postgres, server, tmp_path, "a", "b") as nodes:
        a, b = nodes.kernels
        own = k.spec(workspace=str(tmp_path))
        await b.run("old", own)
        async with occupied(b, tmp_path):
            await b.send("old", run_id="second")
            await b.spawn("new", own)
            await b.send("new")
            assert await give(nodes) == 1
            assert (await nodes.end("new"))["status"] == "completed"
            assert (await a.info("old"))["node_id"] == "b"
        assert (await nodes.end("old", "second"))["status"] == "completed"
        assert {node_id for node_id, _ in activations(await a.events("old"))} == {"b"}


@pytest.mark.thorough
async def test_nothing_goes_where_nobody_takes_it(postgres: str, server: OfflineServer, tmp_path: Path) -> None:
    """Given sessions that wait, when they should go to an unknown node, to their own, or to one that is drained, then
    they stay and are worked on."""
    async with cluster(postgres, server, tmp_path, "a", "b") as nodes:
        a, b = nodes.kernels
        async with occupied(b, tmp_path):
            await b.spawn("s", k.spec())
            await b.send("s")
            assert await give(nodes, taker="elsewhere") == 0
            assert await give(nodes, taker="b") == 0
            await nodes.drain(a)
            assert await give(nodes) == 0
        assert (await nodes.end("s"))["status"] == "completed"
        assert activations(await b.events("s")) == [("b", "ready")]


@pytest.mark.thorough
async def test_who_is_given_away_twice_goes_once(postgres: str, server: OfflineServer, tmp_path: Path) -> None:
    """Given a session that waits, when it is given away by two calls at once, then it moves once, and runs once."""
    async with cluster(postgres, server, tmp_path, "a", "b") as nodes:
        a, b = nodes.kernels
        async with occupied(b, tmp_path):
            await b.spawn("s", k.spec())
            await b.send("s")
            assert sorted(await asyncio.gather(give(nodes), give(nodes))) == [0, 1]
            assert (await nodes.end("s"))["status"] == "completed"
        await nodes.end("busy")
        assert activations(await a.events("s")) == [("a", "moved")]
        assert server.stats.requests == 3


@pytest.mark.thorough
async def test_who_stays_keeps_the_turn(postgres: str, server: OfflineServer, tmp_path: Path) -> None:
    """Given two sessions that wait and can't go, and one behind them that can, when one shall be given away, then it is
    that one, and the others wait in the same order, and for as long as before."""
    async with cluster(postgres, server, tmp_path, "a", "b") as nodes:
        _, b = nodes.kernels
        own = k.spec(workspace=str(tmp_path))
        for name in ("first", "second"):
            await b.run(name, own)
        paging = b.service.frames.paging
        async with occupied(b, tmp_path):
            for name in ("first", "second"):
                await b.send(name, run_id="again")
            since = paging.ready_since("")
            await b.spawn("new", k.spec())
            await b.send("new")
            assert await give(nodes, 1) == 1
            assert (await nodes.end("new"))["status"] == "completed"
            assert (list(paging.ready), paging.ready_since("")) == (["first", "second"], since)
            assert await give(nodes, 1) == 0
        for name in ("first", "second"):
            assert (await nodes.end(name, "again"))["status"] == "completed"


@pytest.mark.thorough
async def test_who_drains_a_node_that_is_given_back_is_remembered(
    postgres: str, server: OfflineServer, tmp_path: Path
) -> None:
    """Given a node that is drained because the load is low, when somebody drains it, too, then their reason is the
    drain's: it is not taken back when the load rises."""
    async with cluster(postgres, server, tmp_path, "a", "b") as nodes:
        a, b = nodes.kernels
        for reason in (SCALED_DOWN, "its machine goes", SCALED_DOWN):
            await a.service.journal.submit(partial(draining.begin, node_id="b", deadline=now() + 1, reason=reason))
        await nodes.tell()
        assert b.service.homes.drain is not None
        assert b.service.homes.drain.reason == "its machine goes"


@pytest.mark.thorough
async def test_a_request_to_give_that_is_repeated_is_one(postgres: str, server: OfflineServer, tmp_path: Path) -> None:
    """Given three sessions that wait, when one shall be given away and that request comes three times, then one goes,
    and each answer says so."""
    async with cluster(postgres, server, tmp_path, "a", "b") as nodes:
        _, b = nodes.kernels
        async with occupied(b, tmp_path):
            for name in ("one", "two", "three"):
                await b.spawn(name, k.spec())
                await b.send(name)
            assert [await b.call("give", 1, "a", "request") for _ in range(3)] == [1, 1, 1]
            assert list(b.service.frames.paging.ready) == ["two", "three"]
        for name in ("one", "two", "three", "busy"):
            assert (await nodes.end(name))["status"] == "completed"
