"""Tools of simulated agents that are executed in processes of their own: which were begun, and which are at work."""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from understudy.actors.tools import describe, tool
from understudy.events import ToolInDoubt
from understudy.tool_tasks import ReadBlob, Reporting, TaskResult, ToolTask

from .tasks import with_calls

if TYPE_CHECKING:
    from .plan import Work
    from .scheduler import Process
    from .world import World


@tool(num_cpus=1)
async def compute(name: str, seconds: float, dies: int, slow: float) -> str:
    """Compute, once."""
    raise AssertionError("it is executed elsewhere")


@tool(num_cpus=1, on_crash="rerun")
async def compute_again(name: str, seconds: float, dies: int, slow: float) -> str:
    """Compute what may be computed again."""
    raise AssertionError("it is executed elsewhere")


EXECUTED: dict[str, dict[str, Any]] = {
    entry["name"]: entry for function in (compute, compute_again) for entry in describe(function, pickle=None)[0]
}
"""The compiled descriptions of these tools, by name."""


def some_executed(chosen: random.Random, work: tuple[Work, ...]) -> tuple[Work, ...]:
    """The work of a plan; in some plans its root sessions have tools that are executed in processes of their own."""
    if chosen.random() >= 0.2:
        return work
    return tuple(_with_such_calls(chosen, item) for item in work)


def _with_such_calls(chosen: random.Random, work: Work) -> Work:
    """The same work with such calls: some take long, with some of them the process dies, and some take a while to be
    ended."""

    tools = [*work.spec["tools"], *EXECUTED.values()]
    return with_calls(chosen, replace(work, spec={**work.spec, "tools": tools}), "own", partial(_call, chosen))


def _call(chosen: random.Random, name: str) -> list[Any]:
    seconds = round(chosen.choice((0.0, 0.1, 1.0, 6.0, 11.0)) * chosen.random(), 3)
    dies = chosen.choice((1, 1, 4)) if chosen.random() < 0.15 else 0
    slow = round(chosen.choice((0.0, 0.5, 2.0)) * chosen.random(), 3)
    return [chosen.choice(sorted(EXECUTED)), {"name": name, "seconds": seconds, "dies": dies, "slow": slow}]


@dataclass
class Begun:
    """A process that was begun for a call.

    Attributes:
        service: the node service's process, with which it ends.
        lost: nobody knows how it ended.
        ends: when it is gone; None while it is at work.
    """

    service: Process
    lost: bool = False
    ends: float | None = None


class Executed:
    """Which processes were begun: one for each call, and another one only for what may be repeated, when the one before
    is over or on a machine that was given up."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._begun: dict[str, list[Begun]] = defaultdict(list)

    def forget(self, session_ids: set[str]) -> None:
        """Sessions were removed."""
        for key in [key for key in self._begun if key.partition("/")[0] in session_ids]:
            del self._begun[key]

    def begin(self, task: ToolTask) -> Begun:
        """A node service begins a call's process."""
        world, key = self._world, f"{task.session_id}/{task.call_id}"
        before = self._begun[key]
        world.note(f"process of {key} epoch {task.epoch}")
        world.counts["processes of calls"] += 1
        if before and task.tool["on_crash"] != "rerun":
            world.invariants.violated(f"{key} is begun again, which may not be")
        if any(map(self._is_at_work, before)):
            world.invariants.violated(f"{key} is begun again, and its process is at work")
        begun = Begun(world.scheduler.current)
        before.append(begun)
        return begun

    def times(self, task: ToolTask) -> int:
        """How often a call was begun."""
        return len(self._begun[f"{task.session_id}/{task.call_id}"])

    def in_doubt(self, event: ToolInDoubt, moved: bool) -> None:
        """A call is said to be in doubt: the last process that was begun for it is lost, or its session has moved."""
        begun = self._begun.get(f"{event.session_id}/{event.call_id}")
        if begun and not (begun[-1].lost or moved or self._is_away(begun[-1])):
            self._world.invariants.violated(
                f"{event.session_id}/{event.call_id} is said to be in doubt, and its process is known"
            )

    def _is_at_work(self, begun: Begun) -> bool:
        over = begun.ends is not None and begun.ends <= self._world.scheduler.time()
        return not (over or self._is_away(begun))

    def _is_away(self, begun: Begun) -> bool:
        """Whether a process ended with its service, or is on a machine that was given up."""
        return begun.service.dead or self._world.invariants.gave_up(begun.service)


class SimulatedTasks:
    """Executes calls for the node services of a world (`understudy.ports.TaskRunner`)."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def run(self, task: ToolTask, _read_blob: ReadBlob, _reported: Reporting) -> TaskResult | None:
        scheduler, executed = self._world.scheduler, self._world.invariants.executed
        given, begun = json.loads(task.arguments), executed.begin(task)
        try:
            await asyncio.sleep(given["seconds"])
        except asyncio.CancelledError:  # Ray ends the process when it comes to it
            begun.lost, begun.ends = True, scheduler.time() + given["slow"]
            raise
        begun.ends = scheduler.time()
        if executed.times(task) <= given["dies"]:
            begun.lost = True
            return None
        return TaskResult("ok", f"computed {given['name']}")
