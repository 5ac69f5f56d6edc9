"""A workflow of DBOS (PyPI) over many items, a step for each, with its SQLite store. Arguments: a URL that is not used,
and a directory. A line of stdin says how many items, and how many at once; one of stdout, what they took."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from dbos import DBOS, DBOSConfig


@DBOS.step()
async def lookup(city: str) -> str:
    """As `workload.lookup`: it may be run again, and its result is kept."""
    return f"{city}: 7 degrees"


@DBOS.workflow()
async def over_items(count: int, at_once: int) -> int:
    """A step for each item."""
    turns = asyncio.Semaphore(at_once)

    async def one(number: int) -> str:
        async with turns:
            return await lookup(str(number))

    return len(await asyncio.gather(*(one(number) for number in range(count))))


async def main() -> None:
    """Serve until stdin ends."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        began, cpu = time.perf_counter(), time.process_time()
        handle = await DBOS.start_workflow_async(over_items, order["sessions"], order["at_once"])
        assert await handle.get_result() == order["sessions"]
        found = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu, "calls": 0}
        print(json.dumps(found), flush=True)


config: DBOSConfig = {
    "name": "steps", "system_database_url": f"sqlite:///{Path(sys.argv[2])}/dbos.sqlite", "log_level": "ERROR",
}  # fmt: skip
DBOS(config=config)
DBOS.launch()
try:
    asyncio.run(main())
finally:
    DBOS.destroy()
