"""What all peers share: the agent that they run, and a process that runs sessions on command.

The agent is `workload.noting`: four model calls, and three calls of a tool that must not be repeated blindly.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

MODEL = "offline-over-http"
KEY = "no-secret"
DESCRIPTION = "Note a city."
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}

Session = Callable[[str, str], Awaitable[str]]
"""Works one session off: its system message and its input; returns the last answer."""


def note(city: str) -> str:
    """Note a city."""
    return f"{city}: noted"


class Calls:
    """Calls of functions, Python's and C's, in all threads that start from now on.

    Attributes:
        made: how many there were. Threads that count at the same moment may lose one.
    """

    def __init__(self) -> None:
        self.made = 0
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, _frame: Any, event: str, _argument: Any) -> None:
        if event in ("call", "c_call"):
            self.made += 1


async def serve(session: Session, calls: Calls | None = None) -> None:
    """Work off what each line of stdin asks for, and answer with a line: seconds, CPU seconds of this process, and the
    calls that were made meanwhile if somebody counts them."""
    number = 0
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        turns = asyncio.Semaphore(order["at_once"])

        async def one(task: int, instructions: str = order["instructions"], turns: asyncio.Semaphore = turns) -> None:
            async with turns:
                answer = await session(instructions, f"task {task}")
                assert answer.isdigit(), answer  # the endpoint's stamp

        made = calls.made if calls is not None else 0
        began, cpu = time.perf_counter(), time.process_time()
        async with asyncio.TaskGroup() as group:
            for _ in range(order["sessions"]):
                number += 1
                group.create_task(one(number))
        found = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}
        found["calls"] = calls.made - made if calls is not None else 0
        print(json.dumps(found), flush=True)
