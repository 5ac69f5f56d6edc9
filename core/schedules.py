"""Schedules: what may be asked of one. When it is due says `due_times.py`."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from .identifiers import identifier_problem
from .protocol import COMPILED, content_problem
from .queues import QueuePlace
from .workflows import WORKFLOW

SKIP, QUEUE, CANCEL, ALL = "skip", "queue", "cancel", "all"
OVERLAPS = (SKIP, QUEUE, CANCEL, ALL)
"""What becomes of a due time while the run of the last firing has not ended (`NewSchedule.overlap`)."""

LATEST = "latest"
CATCH_UPS = (LATEST, ALL)
"""Which of the due times that were missed are made up for (`NewSchedule.catch_up`)."""

MOST_SCHEDULES = 1_000
"""That a namespace may have."""

SHORTEST_PERIOD_SECONDS = 1.0
LONGEST_SECONDS = 366 * 86_400
"""Of a period, a window and a jitter."""

LATEST_TIME = 4_102_444_800_000_000
"""The year 2100, in microseconds: no time that is asked for is later."""

SOURCE = "schedule"
"""Of the runs that schedules begin."""

FIRING = "schedule."
"""How the ids of those begin."""

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Timing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When a schedule is due: by exactly one of `cron`, `every` and `at`. Times are microseconds since 1970 UTC.

    Attributes:
        cron: minute, hour, day of the month, month and day of the week, or `@hourly` and the like.
        zone: the time zone that `cron` is read in, by its IANA name.
        every: seconds.
        at: one time.
        start: nothing is due before it; a period is counted from it, else from when the schedule is set. 0 for none.
        until: nothing is due after it; 0 for no end.
        jitter: seconds; each firing is late by a part of it, always the same one for the same due time.
    """

    cron: str = ""
    zone: str = "UTC"
    every: float = 0.0
    at: int = 0
    start: int = 0
    until: int = 0
    jitter: float = 0.0


class NewSchedule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A schedule that a client wants.

    Attributes:
        content: the input of each firing: a text, or content parts as the model's protocol has them.
        session_id: of the session that gets it; empty: each firing creates a session of its own.
        spec, placement, metadata: of those sessions; see `NewSession`.
        overlap: one of `OVERLAPS`: while the last firing's run has not ended, a due time is skipped, or waits for that
            end, or that run is cancelled, or nothing is looked at.
        catch_up: one of `CATCH_UPS`: of the due times that have passed, the latest one fires, or all do.
        window: seconds that a firing may be late; what is later has been missed. 0 for any number.
        max_firings: then the schedule ends; 0 for no end.
        memory: it is a loop: each firing learns what became of those before it (`understudy.loops`).
        place: the queue in which the run of each firing waits.
    """

    name: str
    content: Any
    timing: Timing
    session_id: str = ""
    spec: dict[str, Any] | None = None
    placement: str = ""
    metadata: dict[str, str] = {}
    overlap: str = SKIP
    catch_up: str = LATEST
    window: float = 0.0
    max_firings: int = 0
    memory: bool = False
    place: QueuePlace | None = None

    def __post_init__(self) -> None:
        problem = name_problem(self.name) or content_problem(self.content)
        problem = problem or self._target_problem() or self._rules_problem()
        if problem is not None:
            raise ValueError(problem)

    def _target_problem(self) -> str | None:
        if (self.session_id == "") == (self.spec is None):
            return "a schedule names a session, or has a specification for sessions of its own: one of the two."
        if self.spec is None:
            return identifier_problem(self.session_id, "session_id")
        missing = [name for name in COMPILED if name not in self.spec]
        return f"spec is not compiled: it has no {', '.join(missing)}." if missing else None

    def _rules_problem(self) -> str | None:
        if self.overlap not in OVERLAPS:
            return f"overlap is {self.overlap!r}, and must be one of {', '.join(OVERLAPS)}."
        if self.catch_up not in CATCH_UPS:
            return f"catch_up is {self.catch_up!r}, and must be one of {', '.join(CATCH_UPS)}."
        if self.memory and (self.spec is None or self.spec.get("kind") == WORKFLOW or self.overlap == ALL):
            return (
                "memory goes with an agent's session for each firing, and not with overlap all: a run learns what "
                "became of the others."
            )
        if not 0 <= self.window <= LONGEST_SECONDS:  # so written, it also refuses a NaN
            return f"window is {self.window}, and must be 0 to {LONGEST_SECONDS} seconds."
        return f"max_firings is {self.max_firings}, and must be at least 1, or 0." if self.max_firings < 0 else None


class ScheduleSet(msgspec.Struct, frozen=True):
    """What became of a request to set a schedule.

    Attributes:
        outcome: `created`, `unchanged` (there is one of the same definition), or `replaced`: another definition had the
            name; its counts start from zero.
    """

    outcome: str


class Fired(msgspec.Struct, frozen=True):
    """What became of a due time.

    Attributes:
        outcome: `fired`, `skipped`, `failed`, or `queued`: it waits for the last firing's run.
        session_id, run_id: what it has begun; empty if nothing.
        problem: why it failed, or was skipped.
        code: of the error why it failed.
    """

    outcome: str
    session_id: str = ""
    run_id: str = ""
    problem: str = ""
    code: str = ""


def name_problem(name: Any) -> str | None:
    """What is wrong with a schedule's name; None if nothing is."""
    if isinstance(name, str) and NAME.fullmatch(name):
        return None
    return f"name is {name!r}, and must be 1 to 64 characters of A-Z a-z 0-9 . _ -"


def firing_identifier(name: str, due_time: int | str) -> str:
    """The run that a firing begins, and the session that it creates: the same one made twice makes no second.

    Args:
        due_time: or `t` and a time, of a firing beside the due times.
    """
    return f"{FIRING}{name}.{due_time}"


def schedule_of(run_id: str) -> str | None:
    """The schedule whose firing has begun a run; None if its id says that none has."""
    return run_id.removeprefix(FIRING).rpartition(".")[0] if run_id.startswith(FIRING) else None
