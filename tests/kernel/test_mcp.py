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
        offered = [tool["function"]["name"] for tool in kernel.server.requests[0]["tools"]]
        kernel.check()
    assert ended["status"] == "completed"
    assert results[0] == "5"
    assert results[1] == "Error executing tool fail"
    assert results[2].startswith("The arguments don't fit the parameters of test_add")
    assert calls(tmp_path) == ["start", "add 2 3"]
    assert [one["server"] for one in listed] == ["test"]
    assert offered == list(listed[0]["tools"])
    assert {"test_add", "test_read_resource", "test_get_prompt"} <= set(offered)
