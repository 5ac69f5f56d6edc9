"""The loop that everybody writes first: openai, streaming, and one committed row per message in SQLite. It restores
nothing. Arguments: the endpoint's URL, a directory, and `count` if calls are to be counted."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
import uuid
from pathlib import Path
from typing import Any

from measured import DESCRIPTION, KEY, MODEL, PARAMETERS, Calls, note, serve
from openai import AsyncOpenAI

TOOL = {"type": "function", "function": {"name": "note", "description": DESCRIPTION, "parameters": PARAMETERS}}


async def main(url: str, directory: Path, *, counted: bool) -> None:
    """Serve until stdin ends."""
    calls = Calls() if counted else None
    client = AsyncOpenAI(base_url=url, api_key=KEY)
    database = sqlite3.connect(directory / "raw.db")
    database.execute("PRAGMA journal_mode=WAL")  # and every commit reaches the disk, as with Understudy
    database.execute("PRAGMA synchronous=FULL")
    database.execute("CREATE TABLE message (session TEXT, number INTEGER, body TEXT, PRIMARY KEY (session, number))")

    async def session(instructions: str, task: str) -> str:
        identifier, messages = uuid.uuid4().hex, list[dict[str, Any]]()

        def add(message: dict[str, Any]) -> None:
            messages.append(message)
            row = (identifier, len(messages), json.dumps(message))
            with database:
                database.execute("INSERT INTO message VALUES (?, ?, ?)", row)

        add({"role": "system", "content": instructions})
        add({"role": "user", "content": task})
        while True:
            answer = await ask(client, messages)
            add(answer)
            if not answer.get("tool_calls"):
                return str(answer["content"])
            for call in answer["tool_calls"]:
                text = note(**json.loads(call["function"]["arguments"]))
                add({"role": "tool", "tool_call_id": call["id"], "content": text})

    await serve(session, calls)


async def ask(client: AsyncOpenAI, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """One streamed model call; its answer as a message."""
    text, calls = "", dict[int, dict[str, Any]]()
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    async for chunk in await client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL], **options):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for part in choice.delta.tool_calls or ():
                call = calls.setdefault(
                    part.index, {"id": "", "type": "function", "function": dict.fromkeys(("name", "arguments"), "")}
                )
                call["id"] += part.id or ""
                call["function"]["name"] += (part.function and part.function.name) or ""
                call["function"]["arguments"] += (part.function and part.function.arguments) or ""
    answer: dict[str, Any] = {"role": "assistant", "content": text}
    return {**answer, "tool_calls": list(calls.values())} if calls else answer


asyncio.run(main(sys.argv[1], Path(sys.argv[2]), counted=sys.argv[3:] == ["count"]))
