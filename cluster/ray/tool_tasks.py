"""Tool calls that ask for resources, as Ray tasks (`understudy.ports.TaskRunner`)."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError, RuntimeEnvSetupError

from understudy import logs
from understudy.actors.code import search_also
from understudy.config import Settings
from understudy.environment import keep_for_tools
from understudy.errors import UnderstudyError
from understudy.protocol import packed, unpacked
from understudy.telemetry import FOR_FRAMES, telemetry_of
from understudy.tool_tasks import ReadBlob, Reporting, TaskNews, TaskResult, ToolTask

from . import package_store
from .placing import actor_options, obstacle, variables

log = logging.getLogger(__name__)

OF_A_TASK = {"num_cpus": 1.0}
"""What Ray takes for granted that a task needs."""

END_SECONDS = 5.0
"""So long the process of a task has to end when its result is known; code of the tool's may go on in it."""


def _execute(
    task: Any, blob: bytes | None, code_path: list[str], code_path_after: list[str], named: list[str],
    logging_as: dict[str, str],
) -> Iterator[Any]:  # fmt: skip
    """Execute one tool call in a worker of Ray's, which ends with it: what goes on in its threads must not outlast it,
    and nothing is carried over. What it yields reaches the caller at once."""
    from ray import cloudpickle

    from understudy.actors.task_worker import news_of_task

    logs.set_up("task", {**telemetry_of(os.environ), **logging_as})
    keep_for_tools(named)
    search_also(code_path, code_path_after)
    for news in news_of_task(unpacked(task, ToolTask, "the task"), blob, cloudpickle.loads):
        yield packed(news)


execute_tool: Any = ray.remote(max_calls=1, max_retries=0, num_returns="streaming")(_execute)
"""The same as a task, which Ray never begins a second time."""


class RayTasks:
    """Executes calls as tasks of Ray's. They belong to this process: if it dies, Ray ends them."""

    def __init__(self, settings: Settings) -> None:
        telemetry = settings.telemetry
        self._logging_as = {name: telemetry[name] for name in FOR_FRAMES if name in telemetry}

    async def run(self, task: ToolTask, read_blob: ReadBlob, reported: Reporting) -> TaskResult | None:
        """See `TaskRunner.run`."""
        name, resources = task.tool["name"], {**OF_A_TASK, **task.tool["task"]}
        definition = json.loads(await read_blob(task.placement)) if task.placement else {}
        await package_store.provide(definition.get("runtime_env") or {}, read_blob)
        reason = obstacle({"resources": resources}, await asyncio.to_thread(ray.nodes))
        if reason:
            return TaskResult("error", f"{name} can't be executed anywhere: {reason}")
        digest = task.tool["source"].get("blob")
        options = actor_options({"resources": resources, "runtime_env": definition.get("runtime_env")})
        submit = partial(
            execute_tool.options(name=f"{name} {task.session_id}/{task.call_id}", **options).remote,
            packed(task), await read_blob(digest) if digest else None, definition.get("code_path") or [],
            definition.get("code_path_after") or [], variables(definition), self._logging_as,
        )  # fmt: skip
        try:
            return await _result(submit, reported)
        except RuntimeEnvSetupError as error:
            return TaskResult("error", f"{name} was not executed: {str(error)[:1_000]}")
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, UnderstudyError):  # raised before the function began
                return TaskResult("error", f"{name} was not executed: {cause.message}")
            log.warning("the process of %s failed: %s", name, cause)
        except RayError as error:
            log.warning("the process of %s is gone: %s", name, str(error).splitlines()[0][:300])
        return None


async def _result(submit: Callable[[], Any], reported: Reporting) -> TaskResult | None:
    """Submit a task and wait for its result. One that nobody waits for any more is ended with its process, and so is
    one that goes on after its result."""
    loop = asyncio.get_running_loop()
    submitted, result = loop.run_in_executor(None, submit), None
    try:
        async with asyncio.timeout(None) as limit:
            async for reference in await asyncio.shield(submitted):
                news: TaskNews = unpacked(await reference, TaskNews, "what a task says")
                reported(news.reports)
                if news.result is not None:
                    result = news.result
                    limit.reschedule(loop.time() + END_SECONDS)
    except asyncio.CancelledError:
        submitted.add_done_callback(_end)
        raise
    except RayError:
        if result is None:
            raise
    except TimeoutError:
        submitted.add_done_callback(_end)
    return result


def _end(submitted: asyncio.Future[Any]) -> None:
    if not submitted.cancelled() and submitted.exception() is None:
        asyncio.get_running_loop().run_in_executor(None, partial(ray.cancel, submitted.result(), force=True))
