"""The clients' directory of node services: which one is asked, and which one next when it gives no answer. No Ray."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from understudy.cluster.ray.directory import NodeDirectory
from understudy.config import Settings
from understudy.errors import ServiceGone, StoreUnreachable
from understudy.protocol import COMPILED, NewSession, ServiceDirectory, ServiceProcess


class Nodes(NodeDirectory):
    """A directory of services that only note who was asked for what."""

    def __init__(self, names: str, store: str = "postgresql://host/database") -> None:
        super().__init__(Settings(store=store, model="offline"), self.directory)
        self._handles = dict.fromkeys(names)
        self.dead: set[str] = set()
        self.silent: set[str] = set()
        self.away = False
        self.homes_in_store: dict[str, str] = {}
        self.asked: list[tuple[str, str]] = []

    async def directory(self) -> ServiceDirectory:
        there = [ServiceProcess(name, 1) for name in self._handles if name not in self.dead]
        return ServiceDirectory(1, "supervising", there, [])

    async def update(self, directory: ServiceDirectory) -> None:
        self._handles = {node.node_id: None for node in directory.nodes}

    async def call(
        self, node_id: str, method: str, *arguments: Any, call_id: str = "", timeout: float | None = 0.0
    ) -> Any:  # fmt: skip
        request = str(arguments[0])
        self.asked.append((node_id, request))
        if node_id in self.dead:
            raise ServiceGone("killed")
        if node_id in self.silent:
            raise TimeoutError
        if request == "spawn":
            self.homes_in_store[arguments[1]["session_id"]] = node_id
            return {"created": True, "node_id": node_id}
        if request == "read" and self.away:
            raise StoreUnreachable("away")
        if request == "read":
            return {name: (home, 1) for name, home in self.homes_in_store.items() if name in arguments[2][0]}
        return node_id


async def spawn(nodes: Nodes, session_id: str) -> str:
    found = await nodes.spawn(NewSession(session_id, dict.fromkeys(COMPILED, "x")), {})
    return found.node_id


async def test_new_sessions_go_to_the_nodes_in_turn() -> None:
    """Given three nodes, when six sessions are spawned, then each gets two and is asked for them from then on."""
    nodes = Nodes("abc")
    homes = {f"s{number}": await spawn(nodes, f"s{number}") for number in range(6)}
    assert sorted(Counter(homes.values()).values()) == [2, 2, 2]
    for session_id, home in homes.items():
        assert await nodes.request(session_id, "send", session_id) == home


async def test_a_dead_node_is_passed_over() -> None:
    """Given a node that dies, when sessions are spawned, then the others get them and no spawn fails."""
    nodes = Nodes("abc")
    nodes.dead.add("b")
    assert {await spawn(nodes, f"s{number}") for number in range(6)} == {"a", "c"}


async def test_a_home_that_is_cut_off_is_not_the_only_one_asked() -> None:
    """Given two nodes, when a session's home gives no answer and is not given up yet, then the other one is asked."""
    for home, other in ("ab", "ba"):
        nodes = Nodes("ab")
        nodes.homes_in_store["s"] = home
        nodes.silent.add(home)
        assert await nodes.request("s", "send", "s") == other


async def test_a_session_that_moved_is_found_at_its_new_home() -> None:
    """Given a session whose home died, when the store has another home for it, then that one is asked."""
    nodes = Nodes("abc")
    home = await spawn(nodes, "s")
    nodes.dead.add(home)
    nodes.homes_in_store["s"] = next(name for name in "abc" if name != home)
    await nodes.request("s", "send", "s")
    assert await nodes.request("s", "send", "s") == nodes.homes_in_store["s"]


@pytest.mark.parametrize("store", ["sqlite:////somewhere/store.db", "postgresql://host/database"])
async def test_the_only_node_is_never_asked_for_homes(store: str) -> None:
    """Given one node, when a session of unknown home is asked about, then no call is spent on finding its home."""
    nodes = Nodes("a", store)
    assert await nodes.request("s", "send", "s") == "a"
    assert nodes.asked == [("a", "send")]


async def test_a_home_is_not_needed_while_the_store_is_away() -> None:
    """Given a session of unknown home, when the store is away, then any node is asked and followed, and home is learned
    afterwards."""
    nodes = Nodes("ab")
    nodes.homes_in_store["s"] = "b"
    nodes.away = True
    assert await nodes.home("s") == "a"
    assert await nodes.request("s", "send", "s") == "a"
    nodes.away = False
    assert await nodes.home("s") == "b"


async def test_a_node_that_goes_while_it_is_asked_is_gone() -> None:
    """Given a node that is forgotten while a connection to it is made, then the call fails as one of a service that is
    gone: another node is asked then."""
    nodes = Nodes("a")
    nodes._here = "a"
    nodes._handles = {}
    for way in (nodes._admit(), nodes._otherwise("", "request")):
        with pytest.raises(ServiceGone):
            await way
