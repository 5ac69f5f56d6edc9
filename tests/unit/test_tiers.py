"""Which tests run where."""

from __future__ import annotations

import os

import pytest


def test_those_who_share_something_are_in_one_process(request: pytest.FixtureRequest) -> None:
    """Given several processes that groups of tests are sent to, then whoever sends them sees the groups: otherwise two
    processes have a Ray cluster at the same time, and module fixtures are made twice."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("the tests are not distributed to several processes: pytest -n 2")
    if request.config.getoption("loadgroup"):  # an error, if xdist calls it otherwise one day
        assert request.node.nodeid.endswith("@test_tiers.py")
