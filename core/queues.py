"""Queues: what may be asked of one, and which of the runs that wait in it begin now. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from .wakeups import microseconds

MOST_QUEUES = 100
"""That a namespace may have: their names are labels of metrics."""

MOST_AT_WORK = 10_000
"""The highest number of runs, of all keys or of one, that may be asked for."""

MOST_BEGINS = 1_000
"""The highest number of a rate: the queue's row has the time of each of them."""

LONGEST_PERIOD_SECONDS = 86_400
HIGHEST_PRIORITY = 1_000

AT_ONCE = 100
"""So many runs of a queue begin in one transaction; the others in those that follow."""

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
KEY_CHARACTERS = 256

FREE, BEHIND, WAITS, BEGUN = range(4)
"""How a run stands with its queue (`tables.Run.slot`): it has none or has ended, is behind another input of its
session, waits for a slot, has one."""


class Rate(msgspec.Struct, frozen=True):
    """So many runs begin at most within any `seconds`, wherever these start."""

    limit: int
    seconds: float = 1.0


class NewQueue(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A queue that a client wants.

    Attributes:
        concurrency: so many of its runs are at work at once; 0 for any number.
        per_key: so many of those that have the same key; 0 for any number.
        rate: how many begin within a time; None for any number.
    """

    name: str
    concurrency: int = 0
    per_key: int = 0
    rate: Rate | None = None

    def __post_init__(self) -> None:
        problem = name_problem(self.name) or self._limits_problem()
        if problem is not None:
            raise ValueError(problem)

    def _limits_problem(self) -> str | None:
        for name in ("concurrency", "per_key"):
            if not 0 <= getattr(self, name) <= MOST_AT_WORK:
                return f"{name} is {getattr(self, name)}, and must be 1 to {MOST_AT_WORK}, or 0 for any number."
        rate = self.rate
        if rate is None:
            return None
        if not 1 <= rate.limit <= MOST_BEGINS:
            return f"the limit of the rate is {rate.limit}, and must be 1 to {MOST_BEGINS}."
        if not 0.001 <= rate.seconds <= LONGEST_PERIOD_SECONDS:  # so written, it also refuses a NaN
            return f"the rate is per {rate.seconds} seconds, and must be per 0.001 to {LONGEST_PERIOD_SECONDS}."
        return None


class QueuePlace(msgspec.Struct, frozen=True, omit_defaults=True):
    """In which queue a run waits.

    Attributes:
        key: whose run it is, for `NewQueue.per_key`; empty: it counts for no key.
        priority: those with a higher one begin first.
    """

    queue: str
    key: str = ""
    priority: int = 0

    def __post_init__(self) -> None:
        problem = name_problem(self.queue)
        if problem is None and not (len(self.key) <= KEY_CHARACTERS and self.key.isprintable()):
            problem = f"key must be at most {KEY_CHARACTERS} characters that can be printed."
        if problem is None and not -HIGHEST_PRIORITY <= self.priority <= HIGHEST_PRIORITY:
            problem = f"priority is {self.priority}, and must be {-HIGHEST_PRIORITY} to {HIGHEST_PRIORITY}."
        if problem is not None:
            raise ValueError(problem)


class QueueSet(msgspec.Struct, frozen=True):
    """What became of a request to set a queue.

    Attributes:
        outcome: `created`, `unchanged` (it has these limits), or `changed`.
    """

    outcome: str


class Waiting(NamedTuple):
    """A run that waits for a slot."""

    session_id: str
    run_id: str
    key: str


class Limits(NamedTuple):
    """What a queue allows, and what of its rate is used up.

    Attributes:
        period: of the rate, in microseconds.
        begins: when its last runs began, the first one first; all of those of the last period are there.
    """

    concurrency: int
    per_key: int
    rate: int
    period: int
    paused: bool
    begins: list[int]


def name_problem(name: Any) -> str | None:
    """What is wrong with a queue's name; None if nothing is."""
    if isinstance(name, str) and NAME.fullmatch(name):
        return None
    return f"a queue's name is 1 to 64 characters of A-Z a-z 0-9 . _ -, and not {name!r}."


def period_of(rate: Rate | None) -> tuple[int, int]:
    """Its number, and its time in microseconds; twice 0 without one."""
    return (rate.limit, microseconds(rate.seconds)) if rate is not None else (0, 0)


def recent(limits: Limits, now: int) -> list[int]:
    """The begins that the rate still counts, in order. Some may be later than `now`, by another node's clock; where
    that is more than a period, the clock was set back, and they count as if they were now."""
    last = now + limits.period
    return sorted(at if at <= last else now for at in limits.begins if at > now - limits.period) if limits.rate else []


def room(limits: Limits, at_work: int, now: int) -> int:
    """How many runs may begin now, whatever their keys are."""
    if limits.paused:
        return 0
    found = AT_ONCE
    if limits.concurrency:
        found = min(found, limits.concurrency - at_work)
    if limits.rate:
        found = min(found, limits.rate - len(recent(limits, now)))
    return max(0, found)


def full_keys(limits: Limits, at_work: Mapping[str, int]) -> list[str]:
    """The keys of which no run may begin now, by how many are at work of each."""
    if not limits.per_key:
        return []
    return sorted(key for key, number in at_work.items() if key and number >= limits.per_key)


def choose(limits: Limits, at_work: dict[str, int], waiting: Iterable[Waiting], most: int) -> list[Waiting]:
    """Which of those that wait begin now, in the order in which they are given; `at_work` then counts them as well.

    Args:
        most: so many at most.
    """
    chosen: list[Waiting] = []
    for run in waiting:
        if len(chosen) == most:
            break
        number = at_work.get(run.key, 0)
        if not (limits.per_key and run.key and number >= limits.per_key):
            at_work[run.key] = number + 1
            chosen.append(run)
    return chosen


def looks_again(limits: Limits, at_work: int, now: int) -> int:
    """When something may begin that must wait now, though no run ends and nobody changes the queue: as soon as the rate
    lets it, or at once, where `AT_ONCE` was what there was no more room for. 0 for never."""
    if limits.paused or (limits.concurrency and at_work >= limits.concurrency):
        return 0
    counted = recent(limits, now)
    if limits.rate and len(counted) >= limits.rate:
        return counted[len(counted) - limits.rate] + limits.period
    return now
