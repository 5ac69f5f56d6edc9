"""A limit of requests in a sliding window, as the offline model keeps it."""

from __future__ import annotations

import math
import time
from collections import deque
from datetime import UTC, datetime, timedelta

MINUTE = 60.0


class RateLimit:
    """Accepts so many requests within any minute, and refuses the others.

    Args:
        per_minute: requests.
        window: seconds that a minute has here: tests are in a hurry.
    """

    def __init__(self, per_minute: int, window: float = MINUTE) -> None:
        self.per_minute = per_minute
        self.window = window
        self._accepted: deque[float] = deque()

    def accept(self, *, anthropic: bool = False) -> tuple[bool, str]:
        """Whether one more request is accepted now, and the headers that say what is left, as OpenAI's or Anthropic's
        do."""
        now = time.monotonic()
        while self._accepted and now - self._accepted[0] >= self.window:
            self._accepted.popleft()
        accepted = len(self._accepted) < self.per_minute
        if accepted:
            self._accepted.append(now)
        reset = self.window - (now - self._accepted[0])
        name, until = "x-ratelimit-{}-requests", f"{math.ceil(reset * 1000)}ms"
        if anthropic:
            name, until = "anthropic-ratelimit-requests-{}", f"{datetime.now(UTC) + timedelta(seconds=reset):%FT%TZ}"
        headers = (
            f"{name.format('limit')}: {self.per_minute}\r\n"
            f"{name.format('remaining')}: {self.per_minute - len(self._accepted)}\r\n"
            f"{name.format('reset')}: {until}\r\n"
        )
        if not accepted:
            headers += f"retry-after: {math.ceil(reset)}\r\nretry-after-ms: {math.ceil(reset * 1000)}\r\n"
        return accepted, headers
