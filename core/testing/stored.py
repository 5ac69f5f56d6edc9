"""Responses that the offline model makes in the background, and keeps: they grow with time, whoever listens."""

from __future__ import annotations

from typing import Protocol

from .responses import FIRST, Rendered, cancelled


class Follower(Protocol):
    """Who is sent what there is of a response."""

    def follow(self) -> None:
        """There is more of it."""


class StoredResponse:
    """A response in background mode.

    Args:
        delay: seconds until the model says something.
        pause: seconds between its events.
        lost: it can't be fetched.

    Attributes:
        followers: who waits for it while the model is held back.
    """

    def __init__(self, rendered: Rendered, *, delay: float, pause: float, lost: bool) -> None:
        self.rendered = rendered
        self.events = rendered.events()
        self.lost = lost
        self.followers: set[Follower] = set()
        self._delay = delay
        self._pause = pause
        self._begun: float | None = None
        self._ended: int | None = None

    @property
    def is_cancelled(self) -> bool:
        """Whether it ended before its end."""
        return self._ended is not None

    def begin(self, now: float) -> None:
        """The model begins with it; at most once."""
        if self._begun is None:
            self._begun = now
            for follower in list(self.followers):
                follower.follow()
            self.followers.clear()

    def cancel(self, now: float) -> None:
        """Nothing more comes, if it was not over."""
        if self._ended is None and self.available(now) < len(self.events):
            self._ended = self.available(now)
            for follower in list(self.followers):
                follower.follow()
            self.followers.clear()

    def available(self, now: float) -> int:
        """So many of its events there are."""
        if self._ended is not None:
            return self._ended
        if self._begun is None or now < self._begun + self._delay:
            return FIRST
        if not self._pause:
            return len(self.events)
        return min(len(self.events), FIRST + 1 + int((now - self._begun - self._delay) / self._pause + 1e-6))

    def due(self, number: int) -> float | None:
        """When there is an event of this number; None while the model is held back."""
        if self._begun is None:
            return None
        return self._begun + self._delay + max(0, number - FIRST) * self._pause

    def is_over(self, now: float) -> bool:
        """Whether no more events come."""
        return self.available(now) == (len(self.events) if self._ended is None else self._ended)

    def whole(self, now: float) -> bytes:
        """What there is of it, as one object."""
        if self._ended is not None:
            return cancelled(self.rendered.whole("in_progress"))
        return self.rendered.whole("" if self.available(now) == len(self.events) else "in_progress")
