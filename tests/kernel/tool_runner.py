"""Executes tools that ask for resources in the process of a test, as a cluster would elsewhere."""

from __future__ import annotations

import asyncio
import time

from understudy.actors.task_worker import run_task
from understudy.tool_tasks import ReadBlob, Reporting, TaskResult, ToolTask

from . import kernel as k


class Runner:
    """Executes calls in this process, with a point before each and one behind.

    Attributes:
        begun, ended: calls, in order.
        began_at: when the last one was begun, microseconds since 1970 UTC.
        dies: so many of the next processes die, and nobody has their results.
        gate: what they wait for in between.
    """

    def __init__(self) -> None:
        self.kernel: k.Kernel | None = None
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.began_at = 0
        self.dies = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.cancelled = asyncio.Event()
        self.at_work = asyncio.Event()

    async def run(self, task: ToolTask, read_blob: ReadBlob, reported: Reporting) -> TaskResult | None:
        assert self.kernel is not None
        self.begun.append(task.call_id)
        self.began_at = time.time_ns() // 1000
        self.at_work.set()
        await self.kernel.point("task begins", None)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        found = await run_task(task, None, None, reported)
        if self.dies:
            self.dies -= 1
            return None
        self.ended.append(task.call_id)
        await self.kernel.point("task ended", None)
        return found
