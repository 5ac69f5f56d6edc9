"""MCP servers of an agent: their tools are committed before a model is sent them, and their calls are made once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from understudy.cluster.client.compiling import compile_spec
from understudy.mcp_servers import McpServer
from understudy.spec import AgentSpec

from . import kernel as k

SCRIPT = Path(__file__).parents[1] / "mcp_server.py"


def server(directory: Path, name: str = "test", **more: Any) -> McpServer:
    """The test server, which notes its calls in a directory."""
    return McpServer(name, command=[sys.executable, str(SCRIPT), str(directory)], **more)


def agent(*replies: Any, servers: list[McpServer], **more: Any) -> dict[str, Any]:
    """The compiled specification of an agent that gives these replies."""
    spec = AgentSpec(name="agent", instructions=k.script(*replies), mcp_servers=servers, **more)
    return compile_spec(spec, model="offline", profile="offline", pickle=None).spec


def calls(directory: Path) -> list[str]:
    """The calls that the server has noted, without its pid."""
    path = directory / "calls"
    return [line.rpartition(" ")[0] for line in path.read_text().splitlines()] if path.exists() else []


def pids(directory: Path, call: str) -> list[int]:
    """The processes that have noted a call."""
    lines = (directory / "calls").read_text().splitlines()
    return [int(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == call]


async def until_called(directory: Path, call: str, count: int = 1) -> int:
    """The pid of the server's process, once it has noted a call so often."""
    async with asyncio.timeout(30.0):
        while calls(directory).count(call) < count:
            await asyncio.sleep(0.005)
    return pids(directory, call)[-1]


@pytest.fixture
def dsn(tmp_path: Path) -> str:
    """A store of its own: what differs between the backends is not the subject here."""
    return f"sqlite:///{tmp_path}/store.db"


def holder(kernel: k.Kernel) -> k.Worker:
    """The frame's process that has the session."""
    found = kernel.holder("s")
    assert found is not None
    return found


async def until_answered(kernel: k.Kernel) -> None:
    """Wait until the host is at no call any more."""
    async with asyncio.timeout(30.0):
        while any(one.in_flight for one in kernel.tool_host.servers.servers):
            await asyncio.sleep(0.005)


async def outcomes(kernel: k.Kernel, session_id: str = "s") -> list[str]:
    """How the session's tool calls ended."""
    return [event["data"]["outcome"] for event in await kernel.events(session_id) if event["type"] == "tool_finished"]


async def test_a_model_is_offered_a_servers_tools_and_calls_them(store: str, tmp_path: Path) -> None:
    """The tools of a server are offered under its name and called there; its answers are the calls' results, errors
    included; nothing of the server is in the driver or the frame."""
    spec = agent(
        [("test_add", {"a": 2, "b": 3}), ("test_fail", {})], [("test_add", {"a": "x"})], "done",
        servers=[server(tmp_path)],
    )  # fmt: skip
    async with k.running(store, tmp_path) as kernel:
        ended = await kernel.run("s", spec)
        results = await kernel.results()
        listed = [event["data"] for event in await kernel.events("s") if event["type"] == "mcp_server_listed"]
        offered = [tool["function"]["name"] for tool in kernel.server.requests[0].body["tools"]]
        kernel.check()
    assert ended["status"] == "completed"
    assert results[0] == "5"
    assert results[1] == "it does not work"
    assert results[2].startswith("The arguments don't fit the parameters of test_add")
    assert calls(tmp_path) == ["start", "add 2 3"]
    assert [one["server"] for one in listed] == ["test"]
    assert offered == list(listed[0]["tools"])
    assert {"test_add", "test_read_resource", "test_get_prompt"} <= set(offered)


# What is in flight when somebody dies.


@pytest.mark.parametrize("tool", ["hold", "look"])
async def test_a_frame_that_dies_during_a_call_costs_nothing(tool: str, dsn: str, tmp_path: Path) -> None:
    """Given a call under way, when its session's process dies, then the next process gets that call's result, and the
    server has seen it once; whatever the tool's `on_crash` is."""
    spec = agent([(f"test_{tool}", {"word": "x"})], "done", servers=[server(tmp_path)])
    async with k.running(dsn, tmp_path) as kernel:
        await kernel.spawn("s", spec)
        await kernel.send("s")
        await until_called(tmp_path, f"{tool} x")
        kernel.kill(holder(kernel))
        await kernel.until("s", "session_activated", 2)
        (tmp_path / "go").touch()
        ended = await kernel.end("s")
        results, types = await kernel.results(), await kernel.types("s")
    assert ended["status"] == "completed"
    assert results == [f"{'held' if tool == 'hold' else 'seen'} x"]
    assert calls(tmp_path) == ["start", f"{tool} x"]
    assert "tool_in_doubt" not in types


async def test_a_result_waits_for_the_frame_that_takes_it(dsn: str, tmp_path: Path) -> None:
    """Given a call that ends while its session has no process, then the next process finds the result at the host."""
    spec = agent([("test_hold", {"word": "x"})], "done", servers=[server(tmp_path)])
    async with k.running(dsn, tmp_path, frames=1) as kernel:
        await kernel.spawn("s", spec)
        await kernel.send("s")
        await until_called(tmp_path, "hold x")
        kernel.kill(holder(kernel), replace=False)
        (tmp_path / "go").touch()
        await until_answered(kernel)
        kernel.add_frame()
        await kernel.end("s")
        assert await kernel.results() == ["held x"]
    assert calls(tmp_path) == ["start", "hold x"]


async def test_a_node_service_that_dies_during_a_call_costs_nothing(dsn: str, tmp_path: Path) -> None:
    """Given a call under way, when the node service dies, then the next one attaches to the host, and to the call."""
    spec = agent([("test_hold", {"word": "x"})], "done", servers=[server(tmp_path)])
    async with k.running(dsn, tmp_path) as kernel:
        await kernel.spawn("s", spec)
        await kernel.send("s")
        await until_called(tmp_path, "hold x")
        kernel.kill_node()
        await kernel.quiet()
        (tmp_path / "go").touch()
        await kernel.end("s")
        assert await kernel.results() == ["held x"]
    assert calls(tmp_path) == ["start", "hold x"]


@pytest.mark.parametrize("victim", ["server", "host", "host and node", "host and frame"])
@pytest.mark.parametrize("tool", ["hold", "look"])
async def test_a_call_that_its_server_dies_with_is_in_doubt(victim: str, tool: str, dsn: str, tmp_path: Path) -> None:
    """Given a call under way, when its server dies, alone or with others, then the tool's `on_crash` decides: one that
    only reads is called again on the next server, of the other the model is told that nobody knows."""
    spec = agent([(f"test_{tool}", {"word": "x"})], "done", servers=[server(tmp_path)])
    async with k.running(dsn, tmp_path) as kernel:
        await kernel.spawn("s", spec)
        await kernel.send("s")
        pid = await until_called(tmp_path, f"{tool} x")
        if victim == "server":
            os.kill(pid, signal.SIGKILL)
        else:
            kernel.tool_host.kill()
        if victim == "host and node":
            kernel.kill_node()
        if victim == "host and frame":
            kernel.kill(holder(kernel))
        if tool == "look":
            await until_called(tmp_path, "look x", 2)
        (tmp_path / "go").touch()
        ended = await kernel.end("s")
        results, types = await kernel.results(), await kernel.types("s")
    assert ended["status"] == "completed"
    if tool == "look":
        assert results == ["seen x"]
        assert calls(tmp_path).count("look x") == 2
    else:
        assert results[0].startswith("interrupted: ")
        assert calls(tmp_path).count("hold x") == 1
        assert types.count("tool_in_doubt") == 1


@pytest.mark.parametrize("decision", ["ok", "rerun"])
async def test_a_person_decides_about_a_call_in_doubt(decision: str, dsn: str, tmp_path: Path) -> None:
    """Given a tool with `on_crash="ask"`, when its server dies during a call, then a person is asked: the answer is the
    result, or the call is made again."""
    spec = agent([("test_hold", {"word": "x"})], "done", servers=[server(tmp_path, on_crash={"ho*": "ask"})])
    async with k.running(dsn, tmp_path) as kernel:
        await kernel.spawn("s", spec)
        await kernel.send("s")
        os.kill(await until_called(tmp_path, "hold x"), signal.SIGKILL)
        (asked,) = await kernel.paused("s")
        (tmp_path / "go").touch()
        answer = {"call_id": asked["call_id"], "asked": asked["asked"], "decision": decision, "text": "it did"}
        await kernel.ask("decide", "s", [answer])
        await kernel.end("s")
        results = await kernel.results()
    assert results == ["it did" if decision == "ok" else "held x"]
    assert calls(tmp_path).count("hold x") == (1 if decision == "ok" else 2)


async def test_a_server_that_dies_each_time_is_given_up(dsn: str, tmp_path: Path) -> None:
    """A tool that may be run again is called a few times while its server dies of it, and no more."""
    servers = [server(tmp_path, on_crash={"die": "rerun"})]
    async with k.running(dsn, tmp_path) as kernel:
        ended = await kernel.run("s", agent([("test_die", {}), ("test_die_once", {})], "done", servers=servers))
        results = await kernel.results()
    assert ended["status"] == "completed"
    assert results[0] == "interrupted: the MCP server died while this tool ran; its outcome is unknown"
    assert calls(tmp_path).count("die") == 3


async def test_a_cancelled_call_is_given_up_at_the_host(dsn: str, tmp_path: Path) -> None:
    """Given a call under way, when its run is cancelled, then the run ends at once and the host gives the call up."""
    spec = agent([("test_hold", {"word": "x"})], "done", servers=[server(tmp_path)])
    async with k.running(dsn, tmp_path) as kernel:
        await kernel.spawn("s", spec)
        await kernel.send("s")
        await until_called(tmp_path, "hold x")
        await kernel.until("s", "tool_started")
        await kernel.ask("cancel", "s", "r", "enough")
        ended = await kernel.end("s")
        await until_answered(kernel)
    assert ended["status"] == "cancelled"
