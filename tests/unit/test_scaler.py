"""The supervisor follows the load, without Ray: sessions that wait move, nodes are asked for and given back."""

from __future__ import annotations

import asyncio

import pytest

from understudy.scaling import SCALED_DOWN, Scaling
from understudy.supervisor.pool import Demand
from understudy.supervisor.ports import DrainReport

from .test_membership import PATIENCE, Machinery, Node, supervised

QUICK = Scaling(1, 4, up_after=0.05, down_after=0.2)
BUSY = {"": Demand(acting=1, ready=3, oldest=60.0)}
RESTING = {"": Demand(standby=1)}


async def until_asked(machinery: Machinery, nodes: int) -> None:
    """Wait until so many nodes were asked for."""
    async with asyncio.timeout(PATIENCE):
        while machinery.nodes_asked_for[-1:] != [nodes]:
            machinery.asked.clear()
            await machinery.asked.wait()


async def until_drained(machinery: Machinery) -> str:
    """Wait until a node is drained; returns which."""
    async with asyncio.timeout(PATIENCE):
        while not machinery.drains:
            machinery.asked.clear()
            await machinery.asked.wait()
    return next(iter(machinery.drains))


async def test_sessions_that_wait_are_given_to_a_node_with_a_free_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a node whose sessions wait and one with a frame to spare, then the first gives as many to the second as
    that can take, also where the number of nodes does not follow the load."""
    found = Machinery("a", "b")
    found.nodes["a"].demand, found.nodes["b"].demand = BUSY, RESTING
    async with supervised(found, monkeypatch):
        await found.nodes["a"].until(lambda: bool(found.nodes["a"].given))
        assert found.nodes["a"].given[0][:2] == (1, "b")
        assert found.nodes["b"].given == found.nodes_asked_for == []


async def test_nodes_are_asked_for_until_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given one node with four sessions for one frame, then four nodes are asked for, and one less is more than there
    are, so it stays; when nobody waits any more, then none is asked for."""
    found = Machinery("a")
    found.nodes["a"].demand = BUSY
    async with supervised(found, monkeypatch, QUICK):
        await until_asked(found, 4)
        found.nodes["b"] = Node("b")
        await found.nodes["b"].until_announced(["a", "b"])
        found.nodes["a"].demand = {"": Demand(acting=1)}
        await until_asked(found, 0)


async def test_a_node_without_work_is_drained_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given two nodes that rest, then the one that is not the supervisor's is drained; when nothing is left there, its
    service is ended, the others are notified under the next generation, and it gets no other service while it is
    there."""
    found = Machinery("a", "b")
    for node in found.nodes.values():
        node.demand = RESTING
    async with supervised(found, monkeypatch, QUICK):
        generation = found.generation
        assert await until_drained(found) == "b"
        assert found.drains["b"]["reason"] == SCALED_DOWN
        assert found.abandoned == []
        found.nodes["b"].drain = DrainReport(SCALED_DOWN, True)
        assert await found.nodes["a"].until_announced(["a"]) == generation + 1
        assert found.abandoned == ["b"]
        asked = found.nodes["b"].asked
        await asyncio.sleep(0.3)  # that nothing happens can't be awaited
        assert found.nodes["b"].asked <= asked + 1
        assert sorted(found.nodes["a"].takeovers[-1][2]) == ["a"]


async def test_a_node_that_was_left_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a node that was left and that the cluster still has, when sessions wait, then its drain ends and it has a
    service again, and no more nodes are asked for than there are."""
    found = Machinery("a", "b")
    for node in found.nodes.values():
        node.demand = RESTING
    async with supervised(found, monkeypatch, QUICK):
        await until_drained(found)
        found.nodes["b"].drain = DrainReport(SCALED_DOWN, True)
        await found.nodes["a"].until_announced(["a"])
        found.nodes["b"].drain = None
        found.nodes["a"].demand = {"": Demand(acting=1, ready=1, oldest=60.0)}
        await found.nodes["a"].until_announced(["a", "b"])
        assert found.drains == {}
        assert max(found.nodes_asked_for) <= 2


async def test_what_a_person_drains_is_not_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a node that somebody has drained, when nothing is left there, then it keeps its service."""
    found = Machinery("a", "b", "c")
    found.nodes["b"].drain = DrainReport("a person says so", True)
    found.nodes["a"].demand = found.nodes["c"].demand = {"": Demand(acting=1)}
    async with supervised(found, monkeypatch, QUICK):
        asked = found.nodes["b"].asked
        await found.nodes["b"].until(lambda: found.nodes["b"].asked > asked + 5)
        assert found.abandoned == []


async def test_a_node_that_a_person_drains_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given two nodes at least and a person who drains one of them, then a third one is asked for."""
    found = Machinery("a", "b")
    found.nodes["a"].demand = BUSY
    found.nodes["b"].drain = DrainReport("a person says so", False)
    async with supervised(found, monkeypatch, Scaling(2, 2, up_after=0.05, down_after=60.0)):
        await until_asked(found, 3)


async def test_services_that_stop_keep_their_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a node that is being given back, when all services are about to stop, then no drain is taken back and
    nothing is asked for; and what was asked for before is not any more once they have stopped."""
    found = Machinery("a", "b")
    for node in found.nodes.values():
        node.demand = RESTING
    async with supervised(found, monkeypatch, QUICK):
        assert await until_drained(found) == "b"
        for node in found.nodes.values():
            node.drain = DrainReport("a person says so", False, stop=True)
        asked = found.nodes["b"].asked
        await found.nodes["b"].until(lambda: found.nodes["b"].asked > asked + 20)
        assert list(found.drains) == ["b"]


async def test_a_stop_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given nodes that were asked for and have not come, when the supervisor stops, then none is asked for."""
    found = Machinery("a")
    found.nodes["a"].demand = BUSY
    async with supervised(found, monkeypatch, QUICK):
        await until_asked(found, 4)
    assert found.nodes_asked_for[-1] == 0


async def test_without_limits_what_was_given_up_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a node that a supervisor before this one drained to give it back, when the number of nodes does not follow
    the load any more, then that drain is taken back."""
    found = Machinery("a", "b")
    found.drains["b"] = {"node_id": "b", "deadline": 0, "reason": SCALED_DOWN}
    found.nodes["b"].drain = DrainReport(SCALED_DOWN, True)
    async with supervised(found, monkeypatch):
        await found.nodes["b"].until(lambda: not found.drains)
