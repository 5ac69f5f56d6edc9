"""What pods call: `understudy up`, `understudy drain --here`, and who is taken for dead."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from understudy.cluster.cli.main import app
from understudy.cluster.ray import leaving, machinery, ray_edge
from understudy.config import Settings
from understudy.transport.ends import process_identity


@pytest.mark.parametrize("others", [["abc"], ["--undo"], ["--stop"]])
def test_here_names_the_node(others: list[str]) -> None:
    """Given `drain --here` with another node, or with what is no drain of it, then it is refused at once."""
    result = CliRunner().invoke(app, ["drain", "--here", *others])
    assert result.exit_code == 2


def test_a_node_without_ray_has_nothing_to_drain() -> None:
    """Given no Ray at the address, when a pod says goodbye, then the hook fails at once and starts nothing."""
    command = [sys.executable, "-P", "-m", "understudy.cluster", "drain", "--here", "--json"]
    environment = {**os.environ, "RAY_ADDRESS": "127.0.0.1:9"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "cluster_unreachable"
    assert error["hint"]  # the next step is for scripts as well


@pytest.mark.parametrize("drained", [True, False])
async def test_a_pod_learns_whether_all_have_left(monkeypatch: pytest.MonkeyPatch, drained: bool) -> None:
    """Given services of two stores on a node, when it is drained from there, then both are asked, those of other nodes
    are not, and it is waited until each is done, or the time and a little more is over."""
    asked: list[str] = []
    row = {"node_id": "n1", "reason": "", "left": 0, "started_at": 1, "deadline": 2}

    def actor(name: str) -> Any:
        async def drain(*arguments: Any) -> None:
            asked.append(f"{name} {arguments[:-1]}")  # without the request's id

        async def request(*_arguments: Any) -> list[dict[str, Any]]:
            return [{**row, "finished_at": 3 if drained else 0}, {**row, "node_id": "n2", "finished_at": 3}]

        return SimpleNamespace(drain=SimpleNamespace(remote=drain), request=SimpleNamespace(remote=request))

    names = ["supervisor/a", "supervisor/b", "node/a/n1", "node/b/n1", "node/b/n2", "node/c/n2", "frame/a/f/n1/-"]
    monkeypatch.setattr(leaving, "actor_names", lambda: names)
    monkeypatch.setattr(leaving, "find_actor", actor)
    monkeypatch.setattr(leaving, "submitted", lambda call: call())
    monkeypatch.setattr(leaving, "DRAIN_SPARE_SECONDS", 0.1)
    found = await leaving.drain_node("n1", 0.1, wait=True)
    assert [bool(drain.finished_at) for drain in found] == [drained, drained]
    assert sorted(asked) == [f"supervisor/{store} (['n1'], 0.1, 'asked for there', False)" for store in "ab"]


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> machinery.RayMachinery:
    """Those of a supervisor in the cluster `ours`, whose head has a private address."""
    monkeypatch.setattr(ray_edge.ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="172.17.0.2:6379"))
    cluster = SimpleNamespace(hex=lambda: "ours")
    monkeypatch.setattr(ray_edge.ray._private.worker.Worker, "current_cluster_and_job", (cluster, None))
    return machinery.RayMachinery(Settings(store="postgresql://host/db", model="m"), "", None, None)


def holder(hands: machinery.RayMachinery, process: str, cluster: str = "theirs") -> str:
    """A supervisor of the same store and address as its node service writes it."""
    return f"172.17.0.2:6379/{cluster}/{hands._settings.instance}/{process}"


def test_a_process_of_another_container_is_not_taken_for_dead(hands: machinery.RayMachinery) -> None:
    """Given a supervisor that died here, then it is known to be dead; given one in another container of the same
    machine, whose pid means nobody here, then it is not."""
    where, pid, start = process_identity(os.getpid()).split(":")
    boot, namespace = where.rsplit("-", 1)
    nobody = 2**22 + 1
    assert hands.holder_is_dead(holder(hands, f"{where}:{nobody}:1"))
    assert hands.holder_is_dead(holder(hands, f"{where}:{pid}:1"))
    assert not hands.holder_is_dead(holder(hands, f"{where}:{pid}:{start}"))
    assert not hands.holder_is_dead(holder(hands, f"{boot}-{int(namespace) + 1}:{nobody}:1"))


def test_a_cluster_whose_head_has_the_same_address_is_another_one(hands: machinery.RayMachinery) -> None:
    """Given two hosts whose containers have the same private address, when the supervisor of one finds the other as the
    owner of the store, then it does not take it for its own predecessor; a predecessor is known at any address."""
    elsewhere = "another-boot-1:17:1"
    assert not hands.holder_is_dead(holder(hands, elsewhere))
    ours = ray_edge.cluster_identity().replace("172.17.0.2", "172.17.0.9")
    assert hands.holder_is_dead(f"{ours}/{hands._settings.instance}/{elsewhere}")


def test_a_clock_that_is_set_kills_nobody(hands: machinery.RayMachinery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given an owner that lives, when the machine's clock is set, which moves the times of day at which all processes
    began, then it is still known to live."""
    mine = process_identity(os.getpid())
    began = psutil.Process().create_time()
    monkeypatch.setattr(psutil.Process, "create_time", lambda _: began + 2)
    assert not hands.holder_is_dead(holder(hands, mine))


def test_a_process_is_identified_whatever_its_name(tmp_path: Path) -> None:
    """Given a program whose name has spaces and parentheses, then it is known by the ticks at which it began."""
    program = tmp_path / ") S 1 (2 3"
    program.symlink_to(shutil.which("sleep") or "")
    with subprocess.Popen([program, "60"]) as process:
        began = psutil.Process(process.pid).create_time() - psutil.boot_time()
        found = process_identity(process.pid)
        process.kill()
    assert int(found.split(":")[2]) == round(began * os.sysconf("SC_CLK_TCK"))
    assert process_identity(process.pid).endswith(":gone")
