"""Workflows on Ray: real processes die while one works over many items."""

from __future__ import annotations

from pathlib import Path

import pytest

from understudy import Cluster

from ..faults import staged
from ..workflow_work import work

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def test_a_workflow_over_many_items_survives_kills(ray_cluster: str, tmp_path: Path) -> None:
    """Given a workflow with an agent and an effect for each of 40 items, eight at a time: session actors, node service,
    gateway and supervisor are killed; every item is done once, and the result is right."""
    dsn = f"sqlite:///{tmp_path}/store.db"
    with Cluster.connect(dsn, max_actors=4, standby=1) as cluster:
        with staged(dsn, tmp_path / "stage") as stage:
            facts = work(stage, items=40, kills=8, limit=8, patience=240.0)
        cluster.shutdown()
    assert sum(facts["killed"].values()) >= 4
