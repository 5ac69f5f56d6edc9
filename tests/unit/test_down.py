"""Which Ray cluster a command means, and what `understudy down` ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from understudy.cluster.ray import down, own_ray

from ..faults import end, wait_until

OWN, OTHER = "192.0.2.1:1111", "192.0.2.1:2222"


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A machine with our daemon and another Ray, no services; what is ended is noted."""
    found: list[str] = []
    connected = SimpleNamespace(gcs_address="")

    def connect(address: str) -> str:
        connected.gcs_address = address
        return address

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(own_ray, "own_address", lambda: OWN)
    monkeypatch.setattr(down, "own_address", lambda: OWN)
    monkeypatch.setattr(down, "connect_ray", connect)
    monkeypatch.setattr(down, "supervisor_handle", lambda _settings: None)
    monkeypatch.setattr(down, "other_supervisors", lambda _settings: [])
    monkeypatch.setattr(down, "stop_ray", lambda: found.append(OWN) or 7)
    monkeypatch.setattr(down.ray, "get_runtime_context", lambda: connected)
    monkeypatch.setattr(down.ray, "shutdown", lambda: None)
    return found


def test_our_daemon_comes_before_other_rays(ended: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without RAY_ADDRESS our own daemon is meant, whoever started another Ray later; with it, what it names."""
    assert own_ray.running_address() == OWN
    monkeypatch.setenv("RAY_ADDRESS", OTHER)
    assert own_ray.running_address() == OTHER


def test_a_daemon_that_nobody_needs_is_ended(ended: list[str]) -> None:
    """`down` ends our daemon where it serves no other store; not if it shall be kept."""
    assert down.bring_down(None, keep_ray=True)["ray"] == "kept"
    assert ended == []
    assert down.bring_down(None, keep_ray=False)["ray"] == "7 processes ended"
    assert ended == [OWN]


def test_a_daemon_that_others_need_is_kept(ended: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`down` leaves our daemon alone where it serves another store, and where RAY_ADDRESS names another cluster."""
    with monkeypatch.context() as patch:
        patch.setattr(down, "other_supervisors", lambda _settings: ["default-12ab"])
        assert "default-12ab" in down.bring_down(None, keep_ray=False)["ray"]
    monkeypatch.setenv("RAY_ADDRESS", OTHER)
    outcome = down.bring_down(None, keep_ray=False)["ray"]
    assert OWN in outcome
    assert OTHER in outcome
    assert ended == []


def test_what_nobody_reaps_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Given a machine where what has ended stays in the table of processes, as in a container without an init, then
    stopping our daemon takes no longer."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    port = 1  # nobody else's
    own_ray.state_directory().joinpath("ray.json").write_text(json.dumps({"port": port}))
    wait_for = own_ray.wait_for
    monkeypatch.setattr(own_ray, "wait_for", lambda processes, _seconds: wait_for(processes, 600.0))
    program = f'"{sys.executable}" -c "import time; time.sleep(600)" ray.daemon --port={port} & exec sleep 600'
    with subprocess.Popen(["sh", "-c", program]) as careless:
        parent = psutil.Process(careless.pid)
        try:
            wait_until(lambda: "sh" not in {process.name() for process in (parent, *parent.children())}, "both run")
            assert own_ray.stop_ray() == 1
            assert [child.status() for child in parent.children()] == [psutil.STATUS_ZOMBIE]
        finally:
            end([*parent.children(), parent])
