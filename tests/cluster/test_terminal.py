"""Ray, as Understudy starts it, and the terminal that it is started from."""

from __future__ import annotations

import shutil

import pytest

from understudy.cluster.ray import own_ray


@pytest.mark.ray
@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("script") is None, reason="needs `script` (Debian: bsdutils)")
def test_ray_outlives_its_terminal(ray_cluster: str) -> None:
    """Given a terminal that ended with the command, as that of `ssh -t HOST understudy up`, then Ray goes on."""
    assert own_ray.own_address() == ray_cluster
