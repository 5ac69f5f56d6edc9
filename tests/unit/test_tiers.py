"""Which tests run where."""

from __future__ import annotations

import pytest


def test_those_who_share_something_are_in_one_process(request: pytest.FixtureRequest) -> None:
    """Given several processes that groups of tests are sent to, then whoever sends them sees the groups: otherwise two
    processes have a Ray cluster at the same time, and module fixtures are made twice."""
    if request.config.getoption("loadgroup", default=False):
        assert request.node.nodeid.endswith("@test_tiers.py")
