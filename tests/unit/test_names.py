"""What actors are called in Ray, and their logs in the store, and what their names say."""

from __future__ import annotations

from understudy.cluster.ray.names import FrameName, frames_among, node_name, of_instance, served_on, supervised
from understudy.cluster.ray.names import supervisor_name as named
from understudy.node.hosting import writer_of

NAMES = [
    named("a-1"), named("a-12"), node_name("a-1", "n1"), node_name("a-12", "n1"), node_name("a-1", "n2"),
    FrameName("f", "n1", "").of("a-1"), FrameName("g", "n2", "key-process").of("a-1"), "console/a-1", "other",
]  # fmt: skip


def test_a_frames_name_says_where_it_is() -> None:
    """Given the frames of a store, whichever the placement, then their names are read back as they were made."""
    assert frames_among(NAMES, "a-1") == [FrameName("f", "n1", ""), FrameName("g", "n2", "key-process")]
    assert frames_among(NAMES, "a-12") == []


def test_stores_are_distinguished() -> None:
    """Given an instance whose name begins like another's, then nothing of the one is taken for the other's."""
    assert supervised(NAMES) == {"a-1", "a-12"}
    assert served_on(NAMES, "n1") == ["a-1", "a-12"]
    assert of_instance(NAMES, "a-12") == ["supervisor/a-12", "node/a-12/n1"]
    assert len(of_instance(NAMES, "a-1")) == 6


def test_nodes_whose_ids_begin_alike_have_logs_of_their_own() -> None:
    """Given two nodes whose ids differ in the last character only, as Ray's fake nodes have them, then their services
    write two logs on PostgreSQL. On SQLite there is one service, whose log is the same wherever it runs."""
    ids = ["f" * 51 + "00000", "f" * 51 + "00001"]
    assert len({writer_of("postgresql://h/d", node_id) for node_id in ids}) == 2
    assert len({writer_of("sqlite:////tmp/s.db", node_id) for node_id in ids}) == 1
