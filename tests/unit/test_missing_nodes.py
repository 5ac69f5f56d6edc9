"""Which nodes are missed: those that left without a drain, until others come in their place."""

from __future__ import annotations

import time

import pytest

from understudy.node import homes
from understudy.node.homes import Homes
from understudy.store.operations.draining import Drain


def known(*nodes: str) -> Homes:
    """A service on node `a` that knows these nodes."""
    found = Homes("a", lambda: True)
    found.learn_nodes(list(nodes))
    return found


def drain(node_id: str) -> dict[str, Drain]:
    """What the store says of a node that is drained."""
    return {node_id: Drain(node_id, "asked for", 0, 1, 2, 3)}


def test_a_node_that_is_lost_is_missed_until_another_one_comes() -> None:
    """Given three nodes, when two are lost and one other joins, then one is missed; with the next one, none."""
    found = known("a", "b", "c")
    assert found.missing == 0
    found.learn_nodes(["a"])
    assert found.missing == 2
    found.learn_nodes(["a", "d"])
    assert found.missing == 1
    found.learn_nodes(["a", "d", "e"])
    assert found.missing == 0
    found.learn_nodes(["a", "d", "e", "f"])  # more than there were
    found.learn_nodes(["a", "d", "e"])
    assert found.missing == 1


def test_a_node_that_comes_back_is_not_missed() -> None:
    """Given two lost nodes, when the second one comes back, then the first one is still missed, also when the second
    one is drained and goes; and no longer when it comes back as well."""
    found = known("a", "b", "c")
    found.learn_nodes(["a"])
    found.learn_nodes(["a", "c"])
    assert found.missing == 1
    found.learn_drains(drain("c"))
    found.learn_nodes(["a"])
    assert found.missing == 1
    found.learn_drains({})
    found.learn_nodes(["a", "b"])
    assert found.missing == 0


def test_one_that_is_exchanged_at_once_is_not_missed() -> None:
    """Given a list in which one node stands for another, then none is missed."""
    found = known("a", "b")
    found.learn_nodes(["a", "c"])
    assert found.missing == 0


def test_a_drained_node_is_not_missed() -> None:
    """Given a drain that is known before its node goes, or is read of the store right after, then that node is not
    missed, also when the drain is forgotten later."""
    for before in (True, False):
        found = known("a", "b")
        if before:
            found.learn_drains(drain("b"))
        found.learn_nodes(["a"])
        assert found.missing == (not before)
        found.learn_drains(drain("b"))
        assert found.missing == 0
        found.learn_drains({})
        found.learn_nodes(["a"])
        assert found.missing == 0


def test_who_has_just_begun_misses_nobody() -> None:
    """Given the first list that a service receives, then nodes in it have not come in anybody's place."""
    assert known("a").missing == 0


def test_nobody_is_missed_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a node that was taken away without a drain, on purpose, then it is missed for six hours."""
    found = known("a", "b")
    found.learn_nodes(["a"])
    later = time.monotonic() + homes.MISSED_SECONDS - 60
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert found.missing == 1
    later += 120
    assert found.missing == 0
