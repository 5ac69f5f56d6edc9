"""What the headers of a response say of the endpoint's rate limits. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from understudy.rates import MINUTE, Rates

SLACK = 1.0
"""Seconds by which a window of a minute may seem longer."""

_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?(?:(\d+(?:\.\d+)?)ms)?")
_UNITS = (86_400.0, 3_600.0, 60.0, 1.0, 0.001)


@dataclass(frozen=True, slots=True)
class Window:
    """One limit as the endpoint states it; None for what it does not say.

    Attributes:
        reset: seconds until all of it is available again.
    """

    limit: float | None = None
    remaining: float | None = None
    reset: float | None = None

    @property
    def per_minute(self) -> float | None:
        """The limit, if it is one of a minute: one that takes longer to be whole again is of an hour or a day."""
        if self.limit is None or (self.reset is not None and self.reset > MINUTE + SLACK):
            return None
        return self.limit

    @property
    def is_used_up(self) -> bool:
        """Whether nothing remains."""
        return self.limit is not None and self.remaining == 0


@dataclass(frozen=True, slots=True)
class Stated:
    """The limits that a response states."""

    requests: Window
    tokens: Window

    @property
    def rates(self) -> Rates:
        """Those that are of a minute."""
        return Rates(self.requests.per_minute, self.tokens.per_minute)

    @property
    def pause(self) -> float | None:
        """Seconds until what is used up is available again; None if nothing is, or nobody says."""
        used_up = (window.reset for window in (self.requests, self.tokens) if window.is_used_up)
        return max((reset for reset in used_up if reset is not None), default=None)


def stated_limits(headers: Mapping[str, str], now: float) -> Stated:
    """The limits in a response's headers, in the form of OpenAI (`x-ratelimit-…`) or Anthropic
    (`anthropic-ratelimit-…`); what is missing or can't be read is None.

    Args:
        headers: with lower-case names.
        now: seconds since 1970, for dates.
    """
    return Stated(_window(headers, "requests", now), _window(headers, "tokens", now))


def _window(headers: Mapping[str, str], what: str, now: float) -> Window:
    for name in (f"x-ratelimit-{{}}-{what}", f"anthropic-ratelimit-{what}-{{}}"):
        limit = _number(headers.get(name.format("limit")))
        if limit:  # 0 and -1 mean that there is none
            remaining = _number(headers.get(name.format("remaining")))
            return Window(limit, remaining, seconds_until(headers.get(name.format("reset")), now))
    return Window()


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if 0 <= number < float("inf") else None


def seconds_until(text: str | None, now: float) -> float | None:
    """Seconds from `12ms`, `1m30s`, a bare number of seconds or a date as in RFC 3339; None for anything else."""
    if not text:
        return None
    number = _number(text)
    if number is not None:
        return number
    parts = _DURATION.fullmatch(text.strip())
    if parts is not None and any(parts.groups()):
        return sum(float(part) * unit for part, unit in zip(parts.groups(), _UNITS, strict=True) if part)
    try:
        date = datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    return max(0.0, date.timestamp() - now) if date.tzinfo is not None else None
