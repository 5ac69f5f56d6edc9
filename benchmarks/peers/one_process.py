"""Understudy in one process (`LocalCluster`), whose calls can be counted. Arguments as those of the raw loop."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from measured import DESCRIPTION, KEY, MODEL, Calls, serve

from understudy import AgentSpec, tool
from understudy.config import ModelProfile
from understudy.testing import LocalCluster


@tool(description=DESCRIPTION)
async def note(city: str) -> str:
    """Not `rerun`, so its start is an event."""
    return f"{city}: noted"


async def main(url: str, directory: Path, *, counted: bool) -> None:
    """Serve until stdin ends."""
    calls = Calls() if counted else None  # before there are threads
    store, profile = f"sqlite:///{directory}/store.db", ModelProfile("benchmark", KEY, url)
    with LocalCluster(store, model=MODEL, profiles=[profile], max_actors=8) as cluster:

        async def session(instructions: str, task: str) -> str:
            made = await cluster.spawn.aio(AgentSpec(name="noting", instructions=instructions, tools=[note]))
            run = await made.send.aio(task)
            return (await run.result.aio(300, check=True)).text

        await serve(session, calls)


asyncio.run(main(sys.argv[1], Path(sys.argv[2]), counted=sys.argv[3:] == ["count"]))
