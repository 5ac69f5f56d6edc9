"""`understudy doctor`, and connecting, where something that others take for granted is missing."""

from __future__ import annotations

import http.server
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from understudy.cluster.cli import doctor
from understudy.cluster.cli.main import app
from understudy.cluster.ray import own_ray
from understudy.config import Settings
from understudy.errors import ClusterUnreachable, InvalidConfiguration


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a home directory, as in a container with any user id."""

    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("HOME", "XDG_STATE_HOME", "UNDERSTUDY_STORE", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    monkeypatch.setattr(Path, "expanduser", lambda path: unknown() if str(path).startswith("~") else path)


@pytest.mark.usefixtures("homeless")
def test_without_a_home_directory_doctor_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a home, the store's default has no place, nor has what the start of Ray leaves; each is reported. With
    XDG_STATE_HOME instead all is well."""
    checks = doctor.examine(None)
    assert (checks[-1].name, checks[-1].ok) == ("settings", False)
    assert "set HOME or XDG_STATE_HOME" in checks[-1].found
    checks = doctor.examine(f"sqlite:///{tmp_path}/store.db")
    assert {check.name for check in checks if not check.ok} == {"disk", "ray"}
    assert any(check.name == "sandbox" and "bubblewrap" in check.found for check in checks)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "not" / "yet"))
    monkeypatch.setattr(doctor, "running_address", lambda: None)
    assert all(check.ok for check in doctor.examine(None))
    with pytest.raises(InvalidConfiguration, match="home directory"):
        Settings.from_environment({}, store="sqlite:///~/store.db")


@pytest.mark.thorough
def test_a_home_directory_that_can_not_be_written_is_reported(tmp_path: Path) -> None:
    """Given a HOME that is no directory, then the command says so and what to set, and ends without a trace back."""
    left = {name: value for name, value in os.environ.items() if name not in ("XDG_STATE_HOME", "RAY_ADDRESS")}
    command = [sys.executable, "-P", "-m", "understudy.cluster", "doctor"]
    done = subprocess.run(
        command, env={**left, "HOME": "/dev/null"}, cwd=tmp_path, capture_output=True, text=True,
        timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert "/dev/null/.local/state/understudy can't be made" in done.stdout


@pytest.fixture(params=["silent", "http", "grpc"])
def listener(request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    """Somebody who listens, but is no Ray: its kind and port."""
    if request.param == "silent":
        with socket.create_server(("127.0.0.1", 0)) as silent:
            yield request.param, silent.getsockname()[1]
    elif request.param == "http":
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as web:
            thread = threading.Thread(target=web.serve_forever)
            thread.start()
            yield request.param, web.server_port
            web.shutdown()
            thread.join()
    else:
        server = grpc.server(ThreadPoolExecutor(1))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield request.param, port
        server.stop(None).wait()


@pytest.mark.thorough
def test_a_listener_that_is_no_ray_is_reported_at_once(
    listener: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Given a port where something else listens, then that is reported within the time given, not after Ray's own
    tries; a server of gRPC passes, and so does anybody where Ray uses TLS."""
    kind, port = listener
    monkeypatch.setattr(own_ray.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(own_ray, "GRPC_SECONDS", 1.0 if kind == "silent" else 20.0)
    assert own_ray._speaks_grpc(f"127.0.0.1:{port}") == (kind == "grpc")
    if kind != "grpc":
        began = time.monotonic()
        with pytest.raises(ClusterUnreachable, match="is no Ray"):
            own_ray.connect_ray(f"127.0.0.1:{port}")
        assert time.monotonic() - began < 15
    monkeypatch.setenv("RAY_USE_TLS", "1")
    assert own_ray._speaks_grpc(f"127.0.0.1:{port}")


def test_who_looks_where_nothing_runs_learns_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given no Ray, a command that only looks starts none: it says what starts the services, and what reads without."""
    monkeypatch.setattr(own_ray.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(own_ray, "running_address", lambda: None)
    shown = CliRunner().invoke(app, ["show", "guide-1", "--store", f"sqlite:///{tmp_path}/store.db"])
    assert shown.exit_code == 1
    assert "[cluster_unreachable]" in shown.stderr
    assert "`understudy up` starts the services. `understudy store export SESSION" in shown.stderr


@pytest.mark.parametrize(
    ("version", "ok"),
    [("v1.5.2", False), ("v1.6.0", True), ("v1.7.0", True), ("v2.0.0", True), ("v1.10.1", True), ("nightly", True)],
)
def test_an_operator_that_is_too_old_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, ok: bool
) -> None:
    """Given a pod that KubeRay made, then its version is shown, and what to do where it is too old for our manifests;
    elsewhere nothing is said of it."""
    monkeypatch.setattr(doctor, "running_address", lambda: None)
    store = f"sqlite:///{tmp_path}/store.db"
    monkeypatch.setenv("RAY_USAGE_STATS_EXTRA_TAGS", f"kuberay_version={version};kuberay_crd=RayCluster")
    [result] = [check for check in doctor.examine(store) if check.name == "operator"]
    assert (result.ok, result.found) == (ok, f"KubeRay {version}")
    assert "KubeRay 1.6 or newer" in result.advice
    assert "helm upgrade" in result.advice
    monkeypatch.setenv("RAY_USAGE_STATS_EXTRA_TAGS", "team=agents")
    assert "operator" not in {check.name for check in doctor.examine(store)}
