"""Agents served to another process: over its standard streams, and over HTTP."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from typer.testing import CliRunner

from understudy.cluster.cli.main import app

from ..kernel import kernel as k

SERVER = """
import asyncio, os, sys
from contextlib import nullcontext
from pathlib import Path
from understudy.cluster.client.agent_file import read_agent
from understudy.cluster.client.mcp_server import AgentServer
from understudy.cluster.client.mcp_transports import protocol_streams, serve_http, serve_streams
from understudy.testing import LocalCluster

store, file, *http = sys.argv[1:]
with nullcontext() if http else protocol_streams() as streams:
    with LocalCluster(store) as cluster:
        server = AgentServer(cluster, [read_agent(Path(file)).spec])
        if http:
            asyncio.run(serve_http(server, "127.0.0.1", 0, lambda address: print(address, flush=True)))
        else:
            asyncio.run(serve_streams(server, streams))
"""

TOOLS = """
import os, sys
from pathlib import Path
from understudy import tool

print("printed by a module")
os.system("echo printed by a process")

@tool
def note(text: str) -> str:
    print("printed by a tool")
    os.system("echo printed by its process; cat")
    with open(Path(__file__).parent / "effects.txt", "a") as stream:
        stream.write(text)
    return "noted"
"""

SCRIPT = k.script([("note", {"text": "x"})], [("wait", {"seconds": 2})], "done")
AGENT = f"""---
name: clerk
description: Takes notes.
tools: ["clerk_tools:note", wait]
---
{SCRIPT}
"""


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """What starts a server: its program, a store of its own, and an agent that prints wherever it can."""
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "clerk_tools.py").write_text(TOOLS)
    (tmp_path / "clerk.md").write_text(AGENT)
    return [str(tmp_path / "server.py"), f"sqlite:///{tmp_path}/store.db", str(tmp_path / "clerk.md")]


def over_streams(arguments: list[str], mode: str, log: Any) -> Client:
    parameters = StdioServerParameters(command=sys.executable, args=arguments, env=dict(os.environ))
    return Client(stdio_client(parameters, errlog=log), mode=mode)


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_run_outlives_client_and_server(arguments: list[str], tmp_path: Path, mode: str) -> None:
    """A client hears of a run that has begun, and leaves, which ends the server as well; with the next server the same
    call has the run's answer, and the tool had its effect once. A call that it cancels ends its run. What is printed
    meanwhile is not in the protocol's way."""
    call = {"prompt": "go", "run_id": "r"}
    heard, noted = list[str](), asyncio.Event()

    async def hear(_progress: float, _total: float | None, message: str | None) -> None:
        heard.append(message or "")
        if message == "note: ok":
            noted.set()

    with (tmp_path / "stderr").open("w") as log:
        async with over_streams(arguments, mode, log) as client:
            [offered] = (await client.list_tools()).tools
            assert (offered.name, offered.description) == ("clerk", "Takes notes.")
            task = asyncio.ensure_future(client.call_tool("clerk", call, progress_callback=hear))
            async with asyncio.timeout(30):
                await noted.wait()
        await asyncio.wait({task})
        assert task.cancelled() or task.exception() is not None
        async with over_streams(arguments, mode, log) as client:
            result = await client.call_tool("clerk", call)
            noted.clear()
            other = {"prompt": "go", "run_id": "other"}
            task = asyncio.ensure_future(client.call_tool("clerk", other, progress_callback=hear))
            async with asyncio.timeout(30):
                await noted.wait()
            task.cancel()
            await asyncio.wait({task})
            cancelled = await client.call_tool("clerk", other)
    assert result.structured_content == {"text": "done", "status": "completed", "session": "r", "run_id": "r"}
    assert cancelled.structured_content["status"] == "cancelled"
    assert heard[0] == "the run has begun"
    assert (tmp_path / "effects.txt").read_text() == "xx"
    printed = (tmp_path / "stderr").read_text()
    assert all(f"printed by {who}" in printed for who in ("a module", "a process", "a tool", "its process")), printed


@pytest.fixture
def address(arguments: list[str]) -> Iterator[str]:
    """Of a server over HTTP."""
    with subprocess.Popen([sys.executable, *arguments, "http"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield next(line.strip() for line in server.stdout if line.startswith("http"))
        server.terminate()
        server.stdout.read()


@pytest.mark.thorough
async def test_over_http(address: str, tmp_path: Path) -> None:
    """Several clients at once, of either version of the protocol, have the same run; a page of another site that has
    a browser send a request here has nothing."""
    call = {"prompt": "go", "run_id": "r"}
    async with Client(address) as first, Client(address, mode="legacy") as second:
        results = await asyncio.gather(first.call_tool("clerk", call), second.call_tool("clerk", call))
    assert [result.structured_content["text"] for result in results] == ["done", "done"]
    headers = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
    for name, value in (("host", "other.example"), ("origin", "http://other.example")):
        request = urllib.request.Request(address, b"{}", {**headers, name: value})
        with pytest.raises(urllib.error.HTTPError) as refused:
            await asyncio.to_thread(urllib.request.urlopen, request)
        assert refused.value.code in (403, 421)
        refused.value.close()
    assert (tmp_path / "effects.txt").read_text() == "x"


@pytest.mark.parametrize(
    ("given", "expected"),
    [("0.0.0.0:80", "there is no authentication"), ("localhost", "HOST:PORT"), ("127.0.0.1:99999", "HOST:PORT")],
)
def test_where_it_does_not_listen(arguments: list[str], given: str, expected: str) -> None:
    """An address that others reach, or that is none, is refused before anything starts."""
    done = CliRunner().invoke(app, ["mcp", arguments[2], "--http", given])
    assert (done.exit_code, expected in " ".join(done.output.split())) == (2, True)


def test_without_the_extra(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the protocol's SDK the command says how it is installed."""
    for name in [name for name in sys.modules if name.startswith("understudy.cluster.client.mcp_")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mcp_types", None)
    done = CliRunner().invoke(app, ["mcp", arguments[2]])
    assert (done.exit_code, "pip install 'understudy[mcp]'" in done.output) == (2, True), done.output
