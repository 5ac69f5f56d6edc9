"""How long something takes, as people write it: seconds as a number, or a text as `30s`, `5m`, `1h30m`, `2d`; and
moments."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import datetime

from .wakeups import DAY_SECONDS, LONGEST_WAKEUP_DAYS

LONGEST_SECONDS = LONGEST_WAKEUP_DAYS * DAY_SECONDS

UNITS = {"w": 7 * DAY_SECONDS, "d": DAY_SECONDS, "h": 3600, "m": 60, "s": 1}

DURATION = re.compile(r"(?=\d)" + "".join(rf"(?:(?P<{unit}>\d{{1,9}}){unit})?" for unit in UNITS), re.ASCII)


def read_duration(text: str) -> float:
    """The seconds of a text.

    Raises:
        ValueError: it is no duration.
    """
    found = DURATION.fullmatch(text)
    if found is None:
        raise ValueError(f"{text[:80]!r} is no duration: write seconds as a number, or a text as 30s, 5m, 1h30m or 2d")
    return float(sum(int(number) * UNITS[unit] for unit, number in found.groupdict().items() if number))


def written(seconds: float) -> str:
    """A duration as `read_duration` reads it, where it has whole seconds."""
    rest, parts = round(seconds), []
    if rest != seconds or not rest:
        return f"{seconds:g}s"
    for unit in ("d", "h", "m", "s"):
        number, rest = divmod(rest, UNITS[unit])
        parts += [f"{number}{unit}"] if number else []
    return "".join(parts)


def seconds_of(value: float | str) -> float:
    """The duration in seconds, of a definition.

    Raises:
        ValueError: it is none, or no more than 0, or longer than `LONGEST_SECONDS`.
    """
    seconds = read_duration(value) if isinstance(value, str) else value
    if not 0 < seconds <= LONGEST_SECONDS:
        raise ValueError(
            f"is {value}, and must be more than 0 and at most {LONGEST_SECONDS} seconds ({LONGEST_WAKEUP_DAYS} days)"
        )
    return seconds


def time_of(text: str) -> datetime:
    """A moment, written as in ISO 8601, with its zone.

    Raises:
        ValueError: it is none.
    """
    found = None
    with suppress(ValueError):
        found = datetime.fromisoformat(text)
    if found is None or found.tzinfo is None:
        raise ValueError(f"{text[:80]!r} is no time with a zone: write it as 2026-12-24T18:00:00+01:00")
    return found
