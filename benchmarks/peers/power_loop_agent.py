"""power-loop (PyPI), with its SQLite store. Arguments: the endpoint's URL, and a directory."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from measured import DESCRIPTION, KEY, MODEL, PARAMETERS, note, serve
from power_loop import AgentLoopConfig, StatefulAgentLoop, ToolDefinition, ToolRegistry
from power_loop.runtime.provider import LLMProviderConfig, create_llm_service_from_config


async def main(url: str, directory: Path) -> None:
    """Serve until stdin ends."""
    service = create_llm_service_from_config(LLMProviderConfig(base_url=url, api_key=KEY, model=MODEL))
    tools = ToolRegistry()
    tools.register(ToolDefinition("note", DESCRIPTION, PARAMETERS, ("city",)), note)
    loops: dict[str, StatefulAgentLoop] = {}

    async def session(instructions: str, task: str) -> str:
        if instructions not in loops:
            config = AgentLoopConfig(system_prompt=instructions)
            loops[instructions] = StatefulAgentLoop(
                llm=service, dsn=str(directory / "power.db"), config=config, tool_registry=tools
            )
        loop = loops[instructions]
        return str((await loop.send(task, session_id=await loop.new_session())).final_text)

    await serve(session)


asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
