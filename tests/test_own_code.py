"""A driver's own modules: what it can import on this machine, its sessions can, however it was started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from understudy.cluster import compiling

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


def test_own_paths_are_those_that_no_other_process_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given `sys.path`, then a driver's own paths are its directories and archives that exist, absolute and in order,
    without the interpreter's libraries, and without a job's `py_modules`."""
    archive, session = tmp_path / "code.zip", tmp_path / "session"
    archive.touch()
    job = session / "runtime_resources" / "py_modules_files" / "_ray_pkg_1"
    job.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    entries = ["", str(archive), *sys.path, str(tmp_path / "missing"), str(job), str(tmp_path)]
    monkeypatch.setattr(sys, "path", entries)
    found = compiling.own_paths()
    assert found[:2] == [str(tmp_path), str(archive)]
    assert found.count(str(tmp_path)) == 1
    assert not [path for path in found if "site-packages" in path or "py_modules" in path or path.endswith("missing")]
    assert not [path for path in found if path.startswith(os.path.join(sys.base_prefix, "lib"))]
