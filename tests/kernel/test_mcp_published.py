"""Published MCP servers, from PyPI and npm, used by one agent."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from understudy.cluster.client.compiling import compile_spec
from understudy.mcp_servers import McpServer
from understudy.spec import AgentSpec
from understudy.tool_host.server import Server

from ..mcp_calls import until
from . import kernel as k

NPM = Path(os.environ.get("UNDERSTUDY_TEST_NPM") or Path(__file__).parents[2] / ".cache" / "npm")
"""Where `npm install --prefix` has put servers."""

pytestmark = [pytest.mark.thorough, pytest.mark.uvloop]


def of_npm(name: str) -> str:
    """The program of a server that comes from npm."""
    program = NPM / "node_modules" / ".bin" / name
    if shutil.which("node") is None or not program.exists():
        pytest.skip(f"there is no {program}: npm install --prefix {NPM} @modelcontextprotocol/server-filesystem")
    return str(program)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three real servers start in seconds, on a machine that has something else to do in more."""
    monkeypatch.setattr(k, "STUCK_SECONDS", 60.0)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A workspace with a Git repository that has a change."""
    directory = tmp_path / "work"
    directory.mkdir()
    (directory / "notes.txt").write_text("one\n")
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=directory, check=True)
    return directory


def agent(work: Path, *replies: Any) -> dict[str, Any]:
    """An agent with three servers that gives these replies."""
    beside = str(Path(sys.executable).parent)
    servers = [
        McpServer("time", command=[f"{beside}/mcp-server-time", "--local-timezone", "UTC"]),
        McpServer("git", command=[f"{beside}/mcp-server-git", "--repository", str(work)]),
        McpServer("files", command=[of_npm("mcp-server-filesystem"), str(work)]),
    ]
    spec = AgentSpec(name="agent", instructions=k.script(*replies), mcp_servers=servers, workspace=str(work))
    return compile_spec(spec, model="offline", profile="offline", pickle=None).spec


async def test_three_published_servers_are_used_by_one_agent(tmp_path: Path, work: Path) -> None:
    """Tools of servers for time, Git and files, of three makers' programs in two languages, are called in one run."""
    spec = agent(
        work,
        [("time_convert_time", {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"})],
        [("git_git_status", {"repo_path": str(work)}), ("files_write_file", {"path": f"{work}/x", "content": "made"})],
        [("files_read_text_file", {"path": "/etc/passwd"})],
        "done",
    )
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path) as kernel:
        ended = await kernel.run("s", spec)
        converted, status, written, refused = await kernel.results()
    assert ended["status"] == "completed"
    assert "21:00" in converted
    assert "notes.txt" in status
    assert "x" in written
    assert (work / "x").read_text() == "made"
    assert "denied" in refused


async def test_published_servers_that_are_killed_during_calls_are_started_again(tmp_path: Path, work: Path) -> None:
    """Given a call of each of three servers, when each is killed during its call, then calls of tools that say of
    themselves that they only read or may be repeated are made again by the next process, and of a commit the model
    reads that nobody knows; a second round finds all three at work."""
    spec = agent(
        work,
        [
            ("time_get_current_time", {"timezone": "UTC"}),
            ("git_git_commit", {"repo_path": str(work), "message": "kept"}),
            ("files_write_file", {"path": f"{work}/x", "content": "made"}),
        ],
        [("git_git_status", {"repo_path": str(work)})],
        "done",
    )
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, latency=0.5) as kernel:
        await kernel.spawn("s", spec)
        await kernel.send("s")
        await until(lambda: bool(kernel.server.requests))  # they have listed their tools; no answer has come yet
        servers = [one for one in kernel.tool_host.servers.servers if isinstance(one, Server)]
        for server in servers:
            os.kill(server.pid, signal.SIGSTOP)
        await until(lambda: all(server.in_flight for server in servers))
        killed = [server.pid for server in servers]
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        ended = await kernel.end("s")
        now, commit, written, status = await kernel.results()
        in_doubt = [event["data"] for event in await kernel.events("s") if event["type"] == "tool_in_doubt"]
    assert len(killed) == 3
    assert ended["status"] == "completed"
    assert "timezone" in now
    assert commit.startswith("interrupted: ")
    assert "x" in written
    assert (work / "x").read_text() == "made"
    assert "notes.txt" in status
    assert {(one["tool"], one["policy"]) for one in in_doubt} == {
        ("time_get_current_time", "rerun"), ("git_git_commit", "report"), ("files_write_file", "rerun"),
    }  # fmt: skip
