"""Ray, as Understudy starts it, and the terminal that it is started from."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from understudy.cluster.ray import own_ray

START = "from understudy.cluster.ray.own_ray import start_ray; print('at', start_ray())"


@pytest.mark.ray
@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("script") is None, reason="needs `script` (Debian: bsdutils)")
def test_ray_outlives_its_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a terminal that ends with the command, as that of `ssh -t HOST understudy up`, then Ray goes on."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    try:
        done = subprocess.run(
            ["script", "-qec", shlex.join([sys.executable, "-c", START]), os.devnull],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=150, check=True,
        )  # fmt: skip
        assert own_ray.own_address() == done.stdout.rpartition("at ")[2].strip()
    finally:
        own_ray.stop_ray()
