"""When a failed request is sent again: backoff, or what the endpoint asks for."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime


@dataclass(frozen=True, slots=True)
class Backoff:
    """How often and when to try again; see `Gateway`."""

    retries: int
    first: float
    longest: float

    def delay(self, retries: int, retry_after: float | None) -> float:
        """Seconds to wait after so many failed retries."""
        if retry_after is not None:
            return retry_after * (1 + 0.1 * random.random())  # never earlier than asked for, and not all at once
        return min(self.first * 2.0**retries, self.longest) * (1 - 0.25 * random.random())


def retry_after_seconds(headers: Mapping[str, str], now: float) -> float | None:
    """What `Retry-After-Ms` or `Retry-After` (seconds or an HTTP date) ask for; None without a readable one.

    Args:
        headers: a mapping with lower-case names.
        now: seconds since 1970, for dates.
    """
    for name, unit in (("retry-after-ms", 1_000), ("retry-after", 1)):
        text = headers.get(name)
        if text is None:
            continue
        try:
            seconds = float(text) / unit
        except ValueError:
            try:
                seconds = parsedate_to_datetime(text).timestamp() - now
            except (ValueError, OverflowError):
                continue
        if 0 <= seconds < float("inf"):
            return seconds
    return None
