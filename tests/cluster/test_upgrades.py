"""Another version of Understudy on what an older one has left: its services in memory, or Ray's state of them in Redis.

The versions are this one's code under other numbers, in an environment of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import understudy

from ..faults import Head, gone, wait_until
from ..postgres import PostgresServer
from ..redis import redis_server

pytestmark = [pytest.mark.ray, pytest.mark.thorough, pytest.mark.timeout(420)]

ROOT = Path(__file__).parents[2]
PASSWORD = "correct-horse-4711"

BEGIN = '''
import os, sys, time
from understudy import AgentSpec, Cluster, tool
store, folder, session_id = sys.argv[1:]

@tool(on_crash="rerun")
def look() -> str:
    """Look."""
    with open(os.path.join(folder, "begun"), "a") as file:
        file.write("x")
    while not os.path.exists(os.path.join(folder, "go")):
        time.sleep(0.02)
    return "seen"

with Cluster.connect(store, standby=1, max_actors=3) as cluster:
    session = cluster.spawn(AgentSpec(name="a", model="offline", tools=[look]), session_id=session_id)
    session.send("call look {}", run_id="r-" + session_id)
    while not os.path.exists(os.path.join(folder, "begun")):
        time.sleep(0.02)
    print("1")
'''

RESULT = """
import json, sys
from understudy import Cluster
store, session_id = sys.argv[1:]
with Cluster.connect(store) as cluster:
    print(json.dumps(cluster.session(session_id).run("r-" + session_id).result(90).text))
"""

RUNNING = """
import asyncio, json, os, sys
from understudy.config import Settings
from understudy.cluster.ray.names import of_instance
from understudy.cluster.ray.own_ray import connect_ray
from understudy.cluster.ray.ray_edge import actor_names, find_actor, pid_of
from understudy.cluster.ray.versions import other_versions
connect_ray(os.environ["RAY_ADDRESS"])
names = of_instance(actor_names(), Settings.from_environment(store=sys.argv[1]).instance)
pids = {name: pid_of(find_actor(name)) for name in names}
print(json.dumps({"others": asyncio.run(other_versions(names)), "pids": pids}))
"""


class Installation:
    """A Python environment with one version of Understudy, and with the packages of this one."""

    def __init__(self, directory: Path, wheel: Path) -> None:
        venv.create(directory, with_pip=False)
        [self._site] = directory.glob("lib/python*/site-packages")
        (self._site / "others.pth").write_text(sysconfig.get_path("purelib"))
        self._wheel = wheel
        self.python = str(directory / "bin" / "python")

    def install(self, version: str) -> None:
        """Put this version in the place of the one before."""
        for old in self._site.glob("understudy*"):
            shutil.rmtree(old)
        zipfile.ZipFile(self._wheel).extractall(self._site)
        [file] = self._site.glob("understudy-*.dist-info/METADATA")
        file.write_text(file.read_text().replace(f"\nVersion: {understudy.__version__}\n", f"\nVersion: {version}\n"))


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    place = tmp_path_factory.mktemp("wheel")
    hidden = shutil.ignore_patterns(".*", "*.egg-info", "build", "dist", "__pycache__", "tests")
    shutil.copytree(ROOT, place / "checkout", ignore=hidden)
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(place), str(place / "checkout")]
    built = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    [wheel] = place.glob("*.whl")
    return Installation(place / "environment", wheel)


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer(password=PASSWORD) as server:
        yield server


@pytest.fixture
def head(installation: Installation, tmp_path: Path) -> Iterator[Head]:
    """A Ray head that keeps its state in Redis, with version 0.0.1."""
    installation.install("0.0.1")
    with redis_server() as redis:
        found = Head(tmp_path, redis.environment, installation.python)
        try:
            found.start()
            yield found
        finally:
            found.close()


@pytest.fixture
def stores(postgres: PostgresServer, tmp_path: Path) -> dict[str, str]:
    """Two stores: the password is in the DSN of one, which Ray does not keep, and in a file for the other."""
    passfile = tmp_path / "pass"
    passfile.write_text(f"*:*:*:*:{PASSWORD}")
    passfile.chmod(0o600)
    without = postgres.database().replace(f":{PASSWORD}", "")
    return {"file": f"{without}?passfile={passfile}", "dsn": postgres.database()}


def started(head: Head, python: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, **head.environment, **variables}
    return subprocess.Popen(
        [python, *arguments], env=environment, cwd=head.environment["XDG_STATE_HOME"], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def said(process: subprocess.Popen[str], code: int = 0) -> Any:
    """The JSON that it prints."""
    stdout, stderr = process.communicate(timeout=200)
    assert process.returncode == code, stdout + stderr
    return json.loads(stdout)


def understudy_command(head: Head, python: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    return started(head, python, "-P", "-m", "understudy.cluster", *arguments, **variables)


def begin(head: Head, python: str, store: str, folder: Path, session_id: str) -> None:
    """Begin a run whose tool waits until `go` is in the folder."""
    folder.mkdir()
    script = folder / "begin.py"
    script.write_text(BEGIN)
    said(started(head, python, str(script), store, str(folder), session_id))


def running(head: Head, python: str, store: str) -> dict[str, int]:
    """The services that run, all of the version of this Python, by name; there is one supervisor."""
    found = said(started(head, python, "-c", RUNNING, store))
    assert found["others"] == []
    assert len([name for name in found["pids"] if name.startswith("supervisor/")]) == 1
    return {name: pid for name, pid in found["pids"].items() if pid}


def lasting(head: Head, python: str, store: str) -> dict[str, int]:
    """The same without session actors, which come and go."""
    return {name: pid for name, pid in running(head, python, store).items() if not name.startswith("frame/")}


def test_services_of_another_version_are_replaced_in_good_order(
    head: Head, installation: Installation, stores: dict[str, str], postgres: PostgresServer, tmp_path: Path
) -> None:
    """Given services in memory, when another version is installed over theirs, then `connect` refuses to talk to them,
    and `up` has them finish what they are at, and starts its own, which go on. While Ray's nodes have the other version
    still, `up` ends nothing."""
    store, folder = stores["dsn"], tmp_path / "work"
    begin(head, installation.python, store, folder, "s")
    before = running(head, installation.python, store)
    refused = said(understudy_command(head, sys.executable, "up", "--json", "--store", store), 1)
    assert refused["error"]["code"] == "version_mismatch"
    assert "Ray's nodes have version 0.0.1" in refused["error"]["message"]
    assert running(head, installation.python, store) == before

    installation.install("0.0.2")
    refused = said(understudy_command(head, installation.python, "ps", "--json", "--store", store), 1)
    assert refused["error"]["code"] == "version_mismatch"
    assert "0.0.1, and this is 0.0.2" in refused["error"]["message"]
    assert "`understudy up`" in refused["error"]["hint"]
    up = understudy_command(head, installation.python, "up", "--json", "--store", store)
    wait_until(lambda: "drain" in postgres_rows(postgres, store), "the drain begins")
    assert up.poll() is None
    (folder / "go").touch()
    assert said(up)["replaced"] == ["version 0.0.1 (this is 0.0.2)"]
    after = running(head, installation.python, store)
    assert not set(after.values()) & set(before.values())
    assert all(gone(pid) for pid in before.values())
    assert "seen" in said(started(head, installation.python, "-c", RESULT, store, "s"))
    assert (folder / "begun").read_text() == "x"


def printed_by(up: subprocess.Popen[str]) -> dict[str, Any]:
    """What `up --keep --json` prints before it stays, or as it fails."""
    assert up.stdout is not None
    found: dict[str, Any] = json.loads("".join(iter(up.stdout.readline, "}\n")) + "}")
    return found


def kept(head: Head, installation: Installation, store: str, actors: int) -> subprocess.Popen[str]:
    """`up --keep` with a setting that other ones may have otherwise."""
    arguments = ("up", "--keep", "--json", "--timeout", "20", "--store", store)
    return understudy_command(head, installation.python, *arguments, UNDERSTUDY_MAX_ACTORS=str(actors))


def test_ups_that_say_different_things_end_no_services_of_each_other(
    head: Head, installation: Installation, stores: dict[str, str]
) -> None:
    """Given services that `up --keep` keeps, then another one with other settings fails and ends nothing. When the
    first one is over, two at once replace them: one keeps its own, the other one says what it finds. An `up` to whose
    version the store is too new ends nothing."""
    store = stores["dsn"]
    ups = [kept(head, installation, store, 2)]
    try:
        assert printed_by(ups[0])["different_settings"] == []
        before = lasting(head, installation.python, store)
        refused = said(kept(head, installation, store, 3), 1)["error"]
        assert (refused["code"], "UNDERSTUDY_MAX_ACTORS=2" in refused["message"]) == ("conflict", True)
        assert "kept by another `understudy up --keep`" in refused["message"]
        assert lasting(head, installation.python, store) == before

        postgres_change(store, "INSERT INTO schema_migration VALUES (9999, 1)")
        refused = said(kept(head, installation, store, 3), 1)["error"]
        assert refused["code"] == "store_version"
        assert lasting(head, installation.python, store) == before
        postgres_change(store, "DELETE FROM schema_migration WHERE version = 9999")

        assert ups[0].poll() is None
        ups[0].send_signal(signal.SIGINT)
        ups[0].communicate(timeout=60)
        ups += [kept(head, installation, store, actors) for actors in (3, 4)]
        first, second = sorted(map(printed_by, ups[1:]), key=lambda document: "error" in document)
        assert (first["different_settings"], second["error"]["code"]) == ([], "conflict")
        ends, finds_ended = "UNDERSTUDY_MAX_ACTORS=2", "another command was ending them"  # each of the two may do both
        assert all(ends in text or text == finds_ended for text in first["replaced"])
        after = lasting(head, installation.python, store)
        assert not set(after.values()) & set(before.values())
        assert {name.split("/")[0] for name in after} >= {"supervisor", "node", "gateway"}
    finally:
        for up in ups:
            up.kill()
            up.communicate()


def postgres_change(store: str, statement: str) -> None:
    import psycopg

    with psycopg.connect(store, autocommit=True) as connection:
        connection.execute(statement)


def postgres_rows(postgres: PostgresServer, store: str) -> str:
    import psycopg

    with psycopg.connect(store, autocommit=True) as connection:
        rows = connection.execute("SELECT count(*) FROM drain").fetchall()
    return "drain" if rows[0][0] else ""


def test_a_new_head_on_the_old_state_runs_the_new_version_with_its_settings(
    head: Head, installation: Installation, stores: dict[str, str], tmp_path: Path
) -> None:
    """Given runs under version 0.0.1, when all of Ray is killed and a head of version 0.0.2 is started on the same
    Redis, then `up --keep` leads to one supervisor, of this version with these settings, and the runs go on."""
    for kind, store in stores.items():
        begin(head, installation.python, store, tmp_path / kind, kind)
    head.kill()
    installation.install("0.0.2")
    head.start()
    for kind, store in stores.items():
        up = kept(head, installation, store, 2)
        try:
            assert printed_by(up)["different_settings"] == []
            services = running(head, installation.python, store)
            assert {name.split("/")[0] for name in services} >= {"supervisor", "node", "gateway"}
            (tmp_path / kind / "go").touch()
            assert "seen" in said(started(head, installation.python, "-c", RESULT, store, kind))
            shown = said(understudy_command(head, installation.python, "up", "--json", "--store", store))
            assert [text for text in shown["different_settings"] if "MAX_ACTORS=2" in text]
        finally:
            up.kill()
            up.communicate()
    supervisors = [line for line in head.command_lines().values() if line[0].startswith("ray::SupervisorActor")]
    assert len(supervisors) == len(stores)
