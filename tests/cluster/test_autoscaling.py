"""Ray's own autoscaler, with nodes that it starts and ends on this machine: they follow the load, up and down."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.util import get_node_ip_address

from understudy.cluster.ray import own_ray
from understudy.environment import for_services
from understudy.store.check.check import check
from understudy.store.db.engine import Database
from understudy.testing.offline import OfflineServer

from ..faults import driver, end, output, wait_until
from ..postgres import free_port

pytestmark = [pytest.mark.ray, pytest.mark.thorough, pytest.mark.timeout(400)]

HEAD = "f" * 51 + "00000"
"""What Ray's provider of fake nodes calls the head."""

PROVIDER = {
    "type": "external",  # the wheel lacks a file that the provider's own name asks for
    "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
    "head_node_id": HEAD,
    "launch_multiple": True,
    "disable_node_updaters": True,
    "disable_launch_config_check": True,
}

LISTS = (
    "initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands",
    "head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files", "rsync_exclude", "rsync_filter",
)  # fmt: skip
"""What a configuration must have."""

DRIVER = '''
"""Give one node more to do than it can, then a little, watch nodes come and go, and kill services meanwhile."""

import json
import os
import signal
import sys
import threading
import time

from understudy import AgentSpec, Cluster, tool
from understudy.cluster.client import background
from understudy.config import ModelProfile

dsn, url, folder = sys.argv[1:]
SESSIONS, PATIENCE = 14, 150.0
GO = os.path.join(folder, "go")
most = 0


@tool
def act(name: str) -> str:
    """Act on the world, once."""
    with open(os.path.join(folder, "effects"), "a") as file:
        file.write(name + "\\n")
    while not os.path.exists(GO):
        time.sleep(0.05)
    time.sleep(0.5)
    return "did " + name


def until(what, condition):
    began = time.monotonic()
    while not (found := condition()):
        if time.monotonic() - began > PATIENCE:
            raise SystemExit(f"not within {PATIENCE:g} s: {what}")
        time.sleep(0.2)
    return found


def services(role):
    global most
    found = [service for service in cluster.services() if service.role == role]
    if role == "node":
        most = max(most, len(found))
    return found


def task(name):
    return f'task\\ncall act {json.dumps({"name": name})}'


def little():
    """One run at a time, of sessions on all nodes in turn."""
    while not over.is_set():
        name = f"little{len(light)}"
        light.append(some[len(light) % len(some)].send(task(name), run_id=name).result(PATIENCE))


def places_of_one_more():
    some.append(cluster.spawn(spec, session_id=f"few{len(some)}"))
    return {session.info().node_id for session in some}


def kill(role, number=0):
    found = until(role, lambda: services(role))
    os.kill(found[min(number, len(found) - 1)].pid, signal.SIGKILL)


def begun():
    with open(os.path.join(folder, "effects")) as file:
        return len(file.readlines())


with Cluster.connect(dsn, profiles=[ModelProfile("test", "sk-of-the-tests", url)]) as cluster:
    import ray

    alive = lambda: [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    assert len(alive()) == 1
    spec = AgentSpec(name="actor", model="m", profile="test", tools=[act], tool_timeout=PATIENCE)
    sessions = [cluster.spawn(spec, session_id=f"s{number}") for number in range(SESSIONS)]
    runs = [session.send(task(session.id), run_id="r") for session in sessions]
    until("a second node", lambda: len(services("node")) > 1)
    kill("supervisor")
    until("a third node", lambda: len(services("node")) > 2)
    kill("node", 2)
    until("two at work on each node", lambda: begun() == 6)
    open(GO, "w").close()
    results = [run.result(PATIENCE) for run in runs]
    background.wait(cluster._connection.find_again())  # by itself it looks for new nodes twice a minute
    some, light, over = [], [], threading.Event()
    until("sessions on two nodes", lambda: len(places_of_one_more()) > 1)
    thread = threading.Thread(target=little)
    thread.start()
    kill("supervisor")
    until("two nodes", lambda: len(alive()) <= 2)
    kill("supervisor")
    until("one node", lambda: len(alive()) == 1 and len(services("node")) == 1)
    over.set()
    thread.join()
    after = cluster.spawn(spec, session_id="after").send("hello", run_id="r").result(PATIENCE)
    events = [event for session in sessions for event in session.events()]
    events_of_some = [event for session in some for event in session.events()]
    places = {event.node_id for event in events if hasattr(event, "frame_id")}
    found = {
        "light": len(light),
        "most": most,
        "statuses": sorted({result.status for result in [*results, *light, after]}),
        "redone": sum(session.info().tokens_redone for session in [*sessions, *some]),
        "crashes": [repr(event) for event in events + events_of_some if event.type == "session_crashed"],
        "places": len(places),
        "moves": sum(event.type == "session_moved" for event in events),
    }
    cluster.shutdown()
print(json.dumps(found))
'''


class AutoscaledRay:
    """A Ray head of its own with Ray's autoscaler, version 2, which starts and ends nodes of one CPU here."""

    def __init__(self, most: int) -> None:
        self.directory = tempfile.mkdtemp(prefix="ray-")  # short: it holds sockets
        port = free_port()
        self.address = f"{get_node_ip_address()}:{port}"
        types = {
            "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
            "worker": {
                "resources": {"CPU": 1, "object_store_memory": 80_000_000}, "node_config": {}, "min_workers": 0,
                "max_workers": most - 1,
            },
        }  # fmt: skip
        config = {
            "cluster_name": "test", "max_workers": most, "idle_timeout_minutes": 0.05,
            "provider": {**PROVIDER, "gcs_address": self.address}, "available_node_types": types,
            "head_node_type": "ray.head.default", "upscaling_speed": 1.0, "auth": {}, "docker": {}, "file_mounts": {},
            **{name: [] for name in LISTS},
        }  # fmt: skip
        path = Path(self.directory, "config.json")
        path.write_text(json.dumps(config))
        command = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--head", "--block"]
        command += [f"--port={port}", "--num-cpus=1", "--include-dashboard=false"]
        command += ["--object-store-memory=100000000", f"--temp-dir={self.directory}", "--log-color=false"]
        command += ["--min-worker-port=0", "--max-worker-port=0", f"--autoscaling-config={path}"]
        self._process = subprocess.Popen(
            command, env={**for_services(), **self._environment}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_until(lambda: own_ray._answers(self.address), "Ray's head")

    @property
    def _environment(self) -> dict[str, str]:
        return {
            "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_enable_autoscaler_v2": "1",
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD, "RAY_CLOUD_INSTANCE_ID": HEAD,
            "RAY_NODE_TYPE_NAME": "ray.head.default", "RAY_TMPDIR": self.directory,
        }  # fmt: skip

    def close(self) -> None:
        """End all that it started."""
        root = psutil.Process(self._process.pid)
        found = [root, *root.children(recursive=True)]
        for process in psutil.process_iter(["cmdline"]):
            if self.directory in " ".join(process.info["cmdline"] or ()):
                found += [process, *process.children(recursive=True)]
        end(set(found))
        self._process.wait(20)
        shutil.rmtree(self.directory, ignore_errors=True)


@pytest.fixture
def autoscaled() -> Iterator[AutoscaledRay]:
    """Three nodes at most."""
    found = AutoscaledRay(3)
    try:
        yield found
    finally:
        found.close()


def test_nodes_follow_the_load(autoscaled: AutoscaledRay, postgres: str, server: OfflineServer, tmp_path: Path) -> None:
    """Given one node with 14 sessions of which two can act at once, then Ray's autoscaler brings nodes, and sessions
    that wait go there; when there is little to do, all nodes but one go, also those where something is at work. The
    supervisor dies on the way up and down, and a node service: each run completes, each tool acts once, and no call is
    made again."""
    settings = {
        "UNDERSTUDY_NODES": "1-3", "UNDERSTUDY_SCALE_UP_AFTER": "1", "UNDERSTUDY_SCALE_DOWN_AFTER": "3",
        "UNDERSTUDY_MAX_ACTORS": "2", "UNDERSTUDY_STANDBY": "0",
    }  # fmt: skip
    environment = {
        **settings, "RAY_ADDRESS": autoscaled.address, "RAY_TMPDIR": autoscaled.directory,
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }  # fmt: skip
    found: dict[str, Any] = output(
        driver(tmp_path, DRIVER, postgres, server.url, str(tmp_path), environment=environment), timeout=360
    )
    assert found.pop("moves") >= 4
    light = found.pop("light")
    assert found == {"places": 3, "most": 3, "statuses": ["completed"], "redone": 0, "crashes": []}
    effects = (tmp_path / "effects").read_text().split()
    wanted = [*(f"s{number}" for number in range(14)), *(f"little{number}" for number in range(light))]
    assert sorted(effects) == sorted(wanted)
    assert server.stats.requests == 2 * len(wanted) + 1
    store = Database(postgres)
    try:
        with store.snapshot() as connection:
            assert not check(connection, "default")
    finally:
        store.close()
