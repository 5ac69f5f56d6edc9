"""What all peers share: the agent that they run, and a process that works sessions off when it is told to.

The agent is `workload.noting`: four model calls, and three calls of a tool that must not be repeated blindly. These
programs import nothing of Understudy.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable

MODEL = "offline-over-http"
KEY = "no-secret"
DESCRIPTION = "Note a city."
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}

Session = Callable[[str, str], Awaitable[str]]
"""Works one session off: its system message and its input; returns the last answer."""


def note(city: str) -> str:
    """Note a city."""
    return f"{city}: noted"


async def serve(session: Session) -> None:
    """Work off what each line of stdin asks for, and answer with a line: seconds, and CPU seconds of this process."""
    number = 0
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        turns = asyncio.Semaphore(order["at_once"])

        async def one(task: int, instructions: str = order["instructions"], turns: asyncio.Semaphore = turns) -> None:
            async with turns:
                answer = await session(instructions, f"task {task}")
                assert answer.isdigit(), answer  # the endpoint's stamp

        began, cpu = time.perf_counter(), time.process_time()
        async with asyncio.TaskGroup() as group:
            for _ in range(order["sessions"]):
                number += 1
                group.create_task(one(number))
        print(json.dumps({"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}), flush=True)
