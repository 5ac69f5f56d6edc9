"""A driver's own modules: what it can import on this machine, its sessions can, however it was started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from understudy import Cluster
from understudy.actors.code import search_also
from understudy.cluster.client import compiling

TOOLS = """
import os
from understudy import tool

@tool(on_crash="rerun")
def weigh(name: str) -> str:
    '''Weigh something.'''
    return f"{name} weighs {len(name)}, niceness {os.nice(0)}"
"""
DRIVER = """
from scales.tools import weigh
from understudy import AgentSpec, Cluster

def main():
    with Cluster.connect({store!r}, max_actors=2) as cluster:
        session = cluster.spawn(AgentSpec(name="clerk", model="offline", tools=[weigh]))
        print(session.send('call weigh {{"name": "gold"}}').result(60, check=True).text)

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    """A directory with a package `scales` that has a tool and a driver."""
    package = tmp_path / "modules" / "scales"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "tools.py").write_text(TOOLS)
    (package / "__main__.py").write_text(DRIVER.format(store=f"sqlite:///{tmp_path}/store.db"))
    return package.parent


def _ways(modules: Path, elsewhere: Path) -> dict[str, tuple[list[str], Path, dict[str, str], str]]:
    """How a driver is started: arguments, current directory, environment, standard input."""
    driver = (modules / "scales" / "__main__.py").read_text()
    (elsewhere / "driver.py").write_text(driver)
    return {
        "PYTHONPATH": (["driver.py"], elsewhere, {"PYTHONPATH": str(modules)}, ""),
        "python -m": (["-m", "scales"], modules, {}, ""),
        "standard input": (["-"], modules, {}, driver),
    }


@pytest.mark.ray
@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_what_a_driver_imports_its_sessions_can(ray_cluster: str, tmp_path: Path, modules: Path) -> None:
    """Given a tool in a module that a driver finds by PYTHONPATH, in the current directory with `-m`, or there with its
    program from standard input, then its session runs it, in a process that has the driver's niceness."""
    wanted = f"gold weighs 4, niceness {os.nice(0)}"
    for way, (arguments, directory, environment, program) in _ways(modules, tmp_path).items():
        done = subprocess.run(
            [sys.executable, *arguments], cwd=directory, env={**os.environ, **environment}, input=program,
            capture_output=True, text=True, timeout=90, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{way}: {done.stderr}"
        assert wanted in done.stdout, f"{way}: {done.stdout}"
    with Cluster.connect(f"sqlite:///{tmp_path}/store.db", start=False) as cluster:
        cluster.shutdown()


def test_own_paths_are_those_that_a_plain_process_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given `sys.path`, then a driver's own paths are its directories and archives that exist, absolute and in order,
    apart from the libraries that each process of its interpreter has, from Ray's, and from a job's `py_modules`; a
    relative one is nothing where the directory was removed."""
    archive, last = tmp_path / "code.zip", tmp_path / "last"
    archive.touch()
    job = tmp_path / "session" / "runtime_resources" / "py_modules_files" / "_ray_pkg_1"
    for directory in (job, last):
        directory.mkdir(parents=True)
    libraries = [entry for entry in sys.path if "site-packages" in entry or "lib/python" in entry]
    entries = ["", str(archive), str(tmp_path / "missing"), str(job), *libraries, str(last), str(archive), b"bytes"]
    monkeypatch.setattr(sys, "path", entries)
    monkeypatch.setattr(compiling, "_STARTED_IN", str(tmp_path))
    assert libraries
    assert compiling.own_paths() == ([str(tmp_path), str(archive)], [str(last)])
    monkeypatch.setattr(compiling, "_STARTED_IN", "")
    assert compiling.own_paths() == ([str(archive)], [str(last)])


def test_a_session_searches_in_its_drivers_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a driver's directories before and after the libraries, then a process searches them there, also those that
    it knows already."""
    monkeypatch.setattr(sys, "path", ["/library", "/known", "/other"])
    search_also(["/b", "/known"], ["/last", "/other"])
    assert sys.path == ["/b", "/known", "/library", "/other", "/last"]
