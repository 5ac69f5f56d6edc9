"""How a model call goes: what is measured of it, whatever becomes of it."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from understudy.records import ModelAnswer, RetryReason
from understudy.streams import CHUNK_BOUNDS


class Course:
    """Of one call, all endpoints that it asked and all their tries together.

    Attributes:
        provider: of the endpoint that is asked first; empty before any is.
        started_at: when the first request went out, microseconds since 1970 UTC; 0 before.
    """

    def __init__(self) -> None:
        self.provider = ""
        self.started_at = 0
        self._waited: Counter[str] = Counter()
        self._retried: Counter[str] = Counter()
        self._chunks = [0] * (len(CHUNK_BOUNDS) + 1)
        self._chunk_time = self._last_chunk = 0

    def asks(self, provider: str) -> None:
        """An endpoint is about to be asked."""
        self.provider = self.provider or provider

    def begins(self, at: int) -> None:
        """A request goes out."""
        self.started_at = self.started_at or at

    @contextmanager
    def waiting(self, profile: str) -> Iterator[None]:
        """The call waits for its turn while the block runs."""
        since = time.monotonic_ns()
        try:
            yield
        finally:
            self._waited[profile] += (time.monotonic_ns() - since) // 1_000

    def retries(self, reason: RetryReason) -> None:
        """A try has failed, and is followed by another one."""
        self._retried[reason] += 1

    def begin_stream(self) -> None:
        """What comes next is another stream: its first chunk follows none."""
        self._last_chunk = 0

    def chunk(self, *, has_output: bool) -> None:
        """A chunk has come. The conventions count those with output, after the first one of any kind."""
        now = time.monotonic_ns()
        if self._last_chunk and has_output:
            microseconds = (now - self._last_chunk) // 1_000
            self._chunks[bisect_left(CHUNK_BOUNDS, microseconds)] += 1
            self._chunk_time += microseconds
        if has_output or not self._last_chunk:
            self._last_chunk = now

    def measured(self, answer: ModelAnswer) -> ModelAnswer:
        """The answer with what was measured until now."""
        counts = self._chunks
        while counts and not counts[-1]:
            counts = counts[:-1]
        return replace(
            answer,
            provider=answer.provider or self.provider,
            waited=dict(self._waited),
            retried=dict(self._retried),
            chunk_times=(self._chunk_time, *counts) if counts else (),
        )
