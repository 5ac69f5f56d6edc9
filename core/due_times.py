"""When a schedule is due, and what becomes of due times that have passed. Pure.

The rules for changes of the clock are those of Debian's cron: of an expression with fixed times, one that does not
exist fires right after the change, and one that exists twice fires the first time. Where the minute or the hour begins
with `*`, real time counts: such an expression goes on through the change at its real intervals.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from .errors import InvalidConfiguration
from .identifiers import digest
from .schedules import LATEST, LATEST_TIME, LONGEST_SECONDS, SHORTEST_PERIOD_SECONDS, NewSchedule, Timing
from .wakeups import microseconds

AT_ONCE = 200
"""So many due times that have passed are looked at in one step."""

NICKNAMES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Step:
    """What becomes of due times.

    Attributes:
        missed: so many have passed, and nothing makes up for them.
        at: the one that is to fire now; None if none is.
        following: the one after that; None if the schedule ends. It may have passed as well.
    """

    missed: int
    at: int | None
    following: int | None


def timing_problem(timing: Timing) -> str | None:
    """What is wrong with a timing; None if nothing is."""
    given = [name for name in ("cron", "every", "at") if getattr(timing, name)]
    if len(given) != 1:
        said = " and ".join(given) or "none of them"
        return f"give one of cron, every and at, and not {said}."
    for name in ("at", "start", "until"):
        if not 0 <= getattr(timing, name) <= LATEST_TIME:
            return f"{name} must be a time between 1970 and 2100."
    if timing.every and not SHORTEST_PERIOD_SECONDS <= timing.every <= LONGEST_SECONDS:
        return f"every is {timing.every}, and must be {SHORTEST_PERIOD_SECONDS:g} to {LONGEST_SECONDS} seconds."
    if not 0 <= timing.jitter <= LONGEST_SECONDS:
        return f"jitter is {timing.jitter}, and must be 0 to {LONGEST_SECONDS} seconds."
    return _cron_problem(timing) if timing.cron else None


def _cron_problem(timing: Timing) -> str | None:
    try:
        zone = zone_of(timing.zone)
    except InvalidConfiguration as error:
        return error.message
    expression = _expression(timing.cron)
    if len(expression.split()) != 5:
        return (
            f"cron is {timing.cron!r}, and must have five fields (minute, hour, day of the month, month, day of the "
            f"week) or be one of {', '.join(NICKNAMES)}."
        )
    try:
        next(CronSim(expression, datetime(2026, 1, 1, tzinfo=zone)))
    except CronSimError as error:
        return f"cron is {timing.cron!r}: {str(error)[:1].lower()}{str(error)[1:]}."
    except StopIteration:
        return f"cron is {timing.cron!r}, which is never due."
    return None


def zone_of(name: str) -> Any:
    """The time zone of a name. Raises `InvalidConfiguration`: this machine does not know it."""
    try:
        return UTC if name == "UTC" else ZoneInfo(name)
    except (ValueError, OSError, LookupError):  # no such name, or one that leads somewhere else
        raise InvalidConfiguration(
            f"zone is {name!r}, and must be the IANA name of a time zone: Europe/Berlin"
        ) from None


def _expression(cron: str) -> str:
    return NICKNAMES.get(cron.strip().lower(), cron)


def due_times(timing: Timing, anchor: int, after: int) -> Iterator[int]:
    """Every due time after a moment, each once and in order, in microseconds.

    Args:
        anchor: what a period is counted from.

    Raises:
        InvalidConfiguration: this machine does not know the time zone.
    """
    after = max(after, timing.start - 1)
    for found in _candidates(timing, anchor, after):
        if found > (timing.until or LATEST_TIME):
            return
        if found > after:
            after = found
            yield found


def _candidates(timing: Timing, anchor: int, after: int) -> Iterator[int]:
    if timing.at:
        return iter([timing.at])
    if timing.every:
        period = microseconds(timing.every)
        return itertools.count(anchor + max(0, (after - anchor) // period + 1) * period, period)
    moment = (EPOCH + timedelta(microseconds=after)).astimezone(zone_of(timing.zone))
    return map(_instant, CronSim(_expression(timing.cron), moment))


def _instant(moment: datetime) -> int:
    return (moment.astimezone(UTC) - EPOCH) // timedelta(microseconds=1)


def first_after(timing: Timing, anchor: int, after: int) -> int | None:
    """The next due time; None if there is none any more. See `due_times`."""
    return next(due_times(timing, anchor, after), None)


def fires_at(name: str, timing: Timing, due_time: int) -> int:
    """When a due time fires: later by its jitter, which is a function of the schedule's name and the due time."""
    if not timing.jitter:
        return due_time
    share = int(digest("jitter", name, str(due_time), size=6), 16) / (1 << 48)
    return due_time + int(share * timing.jitter * 1e6)


def step(wanted: NewSchedule, anchor: int, due_time: int, now: int) -> Step:
    """What becomes now of a due time, and of those behind it that have passed as well.

    One that is late by more than the window has been missed. By `LATEST` so has each that another one follows which is
    due as well. At most `AT_ONCE` are looked at (of a period, all): what is left is `following`, and due.
    """
    timing, name = wanted.timing, wanted.name
    window = microseconds(wanted.window) if wanted.window else None
    missed = _leap(wanted, window, due_time, now)
    current: int | None = due_time + missed * (microseconds(timing.every) if timing.every else 0)
    if timing.until and current is not None and current > timing.until:
        return Step(missed, None, None)
    later = due_times(timing, anchor, current or 0)
    for _ in range(AT_ONCE):
        if current is None or (current != due_time and fires_at(name, timing, current) > now):
            break
        following = next(later, None)
        too_late = window is not None and now - fires_at(name, timing, current) > window
        followed = following is not None and fires_at(name, timing, following) <= now
        if not too_late and not (followed and wanted.catch_up == LATEST):
            return Step(missed, current, following)
        missed, current = missed + 1, following
    return Step(missed, None, current)


def _leap(wanted: NewSchedule, window: int | None, due_time: int, now: int) -> int:
    """How many due times of a period have been missed for certain, whatever their jitter is."""
    timing = wanted.timing
    if not timing.every:
        return 0
    period, certain = microseconds(timing.every), now - int(timing.jitter * 1e6)
    left = (timing.until - due_time) // period + 1 if timing.until else 1 << 62
    found = min((certain - due_time) // period, left - 1) if wanted.catch_up == LATEST else 0
    if window is not None:
        found = max(found, min((certain - window - 1 - due_time) // period + 1, left))
    return max(0, found)
