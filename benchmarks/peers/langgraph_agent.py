"""LangGraph's ready-made agent with its SQLite checkpointer. Arguments: the endpoint's URL, and a directory."""

from __future__ import annotations

import asyncio
import sys
import uuid
import warnings
from pathlib import Path
from typing import Any

from langchain_openai import ChatOpenAI
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from measured import KEY, MODEL, note, serve

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from langgraph.prebuilt import create_react_agent


async def main(url: str, directory: Path) -> None:
    """Serve until stdin ends."""
    model = ChatOpenAI(model=MODEL, base_url=url, api_key=KEY, streaming=True)  # type: ignore[arg-type]
    agents: dict[str, Any] = {}
    async with AsyncSqliteSaver.from_conn_string(str(directory / "graph.db")) as saver:

        async def session(instructions: str, task: str) -> str:
            if instructions not in agents:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    agents[instructions] = create_react_agent(model, [note], prompt=instructions, checkpointer=saver)
            options = {"configurable": {"thread_id": uuid.uuid4().hex}}
            # As with the others, what was done is on the disk before the next step begins.
            state = await agents[instructions].ainvoke({"messages": [("user", task)]}, options, durability="sync")
            return str(state["messages"][-1].content)

        await serve(session)


asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
