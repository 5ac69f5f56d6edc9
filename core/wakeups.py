"""Waits and wakeups: what may be asked of a session's timers, and when a recurring one is due next. Pure."""

from __future__ import annotations

import re
from typing import Any

WAIT = "wait"
SCHEDULE_WAKEUP = "schedule_wakeup"
"""The tools that the store answers, and the kinds of what they ask of it."""

DAY_SECONDS = 86_400
LONGEST_WAIT_DAYS = 30
LONGEST_WAKEUP_DAYS = 366
SHORTEST_PERIOD_SECONDS = 1
MOST_WAKEUPS = 32
"""That a session may have at the same time."""

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def wait_problem(seconds: Any) -> str | None:
    """What is wrong with the time of a wait; None if nothing is."""
    return _out_of_range("seconds", seconds, LONGEST_WAIT_DAYS)


def wakeup_problem(prompt: Any, seconds: Any, every: Any, name: Any) -> str | None:
    """What is wrong with a wakeup that somebody wants; None if nothing is.

    Args:
        every: None for one that does not recur.
    """
    if not isinstance(prompt, str) or not prompt.strip():
        return "prompt must be a text: the input that the session gets."
    problem = _out_of_range("seconds", seconds, LONGEST_WAKEUP_DAYS)
    if problem is None and every is not None:
        problem = _out_of_range("every", every, LONGEST_WAKEUP_DAYS)
        if problem is None and every < SHORTEST_PERIOD_SECONDS:
            problem = f"every is {every}, and must be at least {SHORTEST_PERIOD_SECONDS} second."
    return problem or name_problem(name)


def name_problem(name: Any) -> str | None:
    """What is wrong with a wakeup's name; None if nothing is."""
    if isinstance(name, str) and NAME.fullmatch(name):
        return None
    return f"name is {name!r}, and must be 1 to 64 characters of A-Z a-z 0-9 . _ -"


def _out_of_range(what: str, seconds: Any, days: int) -> str | None:
    limit = days * DAY_SECONDS
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        return f"{what} must be a number of seconds."
    if not 0 < seconds <= limit:  # so written, it is also true of a NaN
        return f"{what} is {seconds}, and must be more than 0 and at most {limit} ({days} days)."
    return None


def microseconds(seconds: float) -> int:
    """A time that was asked for, as clocks here count it: at least 1."""
    return max(1, round(seconds * 1e6))


def next_due(due_at: int, every: int, now: int) -> int:
    """When a recurring wakeup is due again that is fired now, in microseconds.

    The delay is fixed, and counted from now: however many times were missed, one input makes up for all of them.
    """
    return max(due_at, now) + every


def run_identifier(name: str, due_at: int) -> str:
    """The run that a wakeup begins: the same one fired twice begins no second run."""
    return f"{run_prefix(name)}{due_at}"


def run_prefix(name: str) -> str:
    """How the ids of all runs begin that wakeups of this name have begun; those of other names may begin so, too."""
    return f"wakeup.{name}."


def spoken(duration: int) -> str:
    """A time in microseconds as a model reads it: from a minute on in whole seconds."""
    seconds = duration / 1e6
    number = str(int(seconds)) if seconds >= 60 else f"{seconds:.3f}".rstrip("0").rstrip(".")
    return f"{number} second{'' if number == '1' else 's'}"
