"""`understudy mcp` as an editor starts it: over standard streams, on a Ray cluster."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from understudy import Cluster

from ..kernel import kernel as k

GREET = "$UNDERSTUDY_SKILLS/greet/hello.sh >> greetings.txt"
SCRIPT = k.script([("bash", {"command": GREET})], [("wait", {"seconds": 3})], "done")
AGENT = f"""---
name: clerk
skills: [greet]
tools: [bash, wait]
workspace: .
model: offline
---
{SCRIPT}
"""


@pytest.mark.ray
@pytest.mark.thorough
@pytest.mark.timeout(240)
async def test_a_run_goes_on_when_the_command_is_killed(ray_cluster: str, tmp_path: Path) -> None:
    """The command is killed while its run is at work: the cluster goes on with it, another command has its answer, and
    the skill's script ran once, in a process that never saw the driver's folder."""
    (tmp_path / "clerk.md").write_text(AGENT)
    skill = tmp_path / "greet"
    skill.mkdir()
    (skill / "SKILL.md").write_text("---\nname: greet\ndescription: Greets.\n---\nRun hello.sh.")
    (skill / "hello.sh").write_text("#!/bin/sh\necho hello\n")
    (skill / "hello.sh").chmod(0o755)
    store = f"sqlite:///{tmp_path}/store.db"
    # The shell says its process id before it becomes the command, to whom the test can send a signal then.
    command = 'echo $$ > pid; exec "$@"'
    words = [sys.executable, "-P", "-m", "understudy.cluster", "mcp", "clerk.md", "--store", store]
    parameters = StdioServerParameters(
        command="/bin/sh", args=["-c", command, "sh", *words], cwd=str(tmp_path), env=dict(os.environ)
    )
    call, ran = {"prompt": "go", "run_id": "r"}, asyncio.Event()

    async def hear(_progress: float, _total: float | None, message: str | None) -> None:
        if message == "bash: ok":
            ran.set()

    with Cluster.connect(store, max_actors=2) as cluster, (tmp_path / "stderr").open("w") as log:
        async with Client(stdio_client(parameters, errlog=log)) as client:
            task = asyncio.ensure_future(client.call_tool("clerk", call, progress_callback=hear))
            async with asyncio.timeout(120):
                await ran.wait()
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
            await asyncio.wait({task})
            assert task.exception() is not None
        async with Client(stdio_client(parameters, errlog=log)) as client:
            result = await client.call_tool("clerk", call)
        assert result.structured_content == {"text": "done", "status": "completed", "session": "r", "run_id": "r"}
        assert (tmp_path / "greetings.txt").read_text() == "hello\n"
        assert len(cluster.session("mcp.clerk.r").runs()) == 1
        cluster.shutdown()
