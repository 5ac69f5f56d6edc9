"""Tool calls that ask for resources, in a thread each of this process (`understudy.ports.TaskRunner`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from understudy.actors.task_worker import run_task
from understudy.tool_tasks import ReadBlob, Report, Reporting, TaskResult, ToolTask

from ..client.background import LoopThread

END_SECONDS = 1.0


class LocalTasks:
    """Executes calls here, whatever they should have for their own. One that is given up is cancelled, if it is async;
    what is in a thread goes on, and nobody hears of it.

    Args:
        unpickle: restores code that came by value.
    """

    def __init__(self, unpickle: Callable[[bytes], Any] | None) -> None:
        self._unpickle = unpickle

    async def run(self, task: ToolTask, read_blob: ReadBlob, reported: Reporting) -> TaskResult | None:
        """See `TaskRunner.run`."""
        digest = task.tool["source"].get("blob")
        blob = await read_blob(digest) if digest else None
        loop, thread = asyncio.get_running_loop(), LoopThread("understudy-task")

        def pass_on(reports: list[Report]) -> None:
            loop.call_soon_threadsafe(reported, reports)

        try:
            return await asyncio.wrap_future(thread.submit(run_task(task, blob, self._unpickle, pass_on)))
        finally:
            await asyncio.to_thread(thread.stop, END_SECONDS)
