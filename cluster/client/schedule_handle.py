"""`Schedule`: what begins runs at times, as its clients see it."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from understudy.attachments import Given, as_content
from understudy.due_times import EPOCH, timing_problem, zone_of
from understudy.errors import InvalidInput
from understudy.protocol import content_problem
from understudy.reads import LoopMemory, ScheduleInfo
from understudy.schedules import Fired, NewSchedule, Timing, name_problem
from understudy.spec import AgentSpec

from .client_connection import ClientConnection
from .method import client_method


class Schedule:
    """A schedule by its name; whether it exists shows when it is used."""

    def __init__(self, connection: ClientConnection, name: str) -> None:
        problem = name_problem(name)
        if problem is not None:
            raise InvalidInput(problem)
        self._connection = connection
        self.name = name

    @client_method
    async def info(self) -> ScheduleInfo:
        """How it stands. Raises `UnknownSchedule`."""
        return await self._connection.read(ScheduleInfo, "schedule", self.name)

    @client_method
    async def pause(self) -> bool:
        """Let its due times pass without a firing: each counts as skipped. True if it was not paused. Raises
        `UnknownSchedule`."""
        return await self._connection.ask_once(bool, "pause_schedule", self.name, True)

    @client_method
    async def resume(self) -> bool:
        """Let it fire again, from its next due time on; True if it was paused. Raises `UnknownSchedule`."""
        return await self._connection.ask_once(bool, "pause_schedule", self.name, False)

    @client_method
    async def trigger(self) -> Fired:
        """Fire it now, beside its due times, also if it is paused or has ended. It is `skipped` while the last firing's
        run has not ended, if `overlap` is `skip` or `queue`. Raises `UnknownSchedule`."""
        return await self._connection.ask_once(Fired, "trigger_schedule", self.name)

    @client_method
    async def delete(self) -> bool:
        """Remove it; what it has begun goes on. True if there was one."""
        return await self._connection.ask_once(bool, "delete_schedule", self.name)

    @client_method
    async def memory(self) -> LoopMemory:
        """How a loop's runs ended since its memory was last reset. Its next firing's input has this, and what is
        open in triage. It stays when the loop is deleted."""
        return await self._connection.read(LoopMemory, "loop_memory", self.name)

    @client_method
    async def reset(self) -> bool:
        """Clear the loop's memory, also of runs that have not ended; triage stays as it is. True if it had any."""
        return await self._connection.ask_once(bool, "reset_loop", self.name)

    def __repr__(self) -> str:
        return f"Schedule({self.name!r})"


def require_one_target(
    content: Any, agent: Any, session: Any, workflow: Any, input: Any, agents: Any, tools: Any
) -> None:  # fmt: skip
    """Refuse what says not, or twice, what is done at each firing; nothing at all names a schedule that there is."""
    if workflow is None and (input is not None or agents or tools):
        raise InvalidInput("input, agents and tools are a workflow's: give workflow=…, too")
    if workflow is not None and content is not None:
        raise InvalidInput("a workflow's input is given as input=…, by the names of its parameters, not as a text")
    if content is None and workflow is None:
        if agent is not None or session is not None:
            raise InvalidInput("give the input of each firing, too")
        return
    if sum(target is not None for target in (agent, session, workflow)) != 1:
        raise InvalidInput(
            "a schedule takes one of agent=… and workflow=…, for a session for each firing, and session=…"
        )
    if agent is not None and not isinstance(agent, AgentSpec):
        raise InvalidInput(f"agent must be an AgentSpec, not {type(agent).__name__}")


def timing(
    cron: str | None, zone: str, every: float | timedelta | None, at: datetime | None, start: datetime | None,
    until: datetime | None, jitter: float,
) -> Timing:  # fmt: skip
    """A timing of what a client gives. Raises `InvalidInput`."""
    seconds = every.total_seconds() if isinstance(every, timedelta) else every
    if seconds is not None and not seconds:
        raise InvalidInput("every is 0, and must be at least 1 second.")
    found = Timing(
        cron=cron or "", zone=zone, every=seconds or 0.0, jitter=jitter,
        at=_instant("at", at, zone), start=_instant("start", start, zone), until=_instant("until", until, zone),
    )  # fmt: skip
    problem = timing_problem(found)
    if problem is not None:
        raise InvalidInput(problem)
    return found


def _instant(what: str, moment: datetime | None, zone: str) -> int:
    """Microseconds since 1970 UTC; a time that names no zone is one of the schedule's."""
    if moment is None:
        return 0
    if not isinstance(moment, datetime):
        raise InvalidInput(f"{what} must be a datetime.")
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=zone_of(zone))
    return (moment - EPOCH) // timedelta(microseconds=1)


def wanted(name: str, content: Given | None, times: Timing, **fields: Any) -> NewSchedule:
    """The schedule that a client wants. Raises `InvalidInput`."""
    given = as_content(content)
    problem = content_problem(given)
    if problem is not None:
        raise InvalidInput(problem)
    try:
        return NewSchedule(name=name, content=given, timing=times, **fields)
    except ValueError as error:
        raise InvalidInput(str(error)) from None
