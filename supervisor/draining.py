"""The decisions of a drain: who leaves a node now, and in which order. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

NOTICE_SECONDS = 600.0
"""For a node that will end at a time which nobody says."""

SPARE_SHARE, LONGEST_SPARE_SECONDS = 0.25, 10.0


@dataclass(frozen=True)
class Departure:
    """A session with work on a node that is drained.

    Attributes:
        tokens: what doing its round again would cost: its window, and what of an answer has come.
        busy: a frame is at it, or a model call is in flight: if it left now, that would be done again.
        held: something of it is being committed: it can't leave before that is done, whatever the time is.
    """

    session_id: str
    tokens: int
    busy: bool = False
    held: bool = False


def leaving(sessions: Iterable[Departure], *, over: bool) -> list[Departure]:
    """Who leaves now, in this order: the most expensive to redo first, since the node may be gone at any moment.

    Args:
        over: the deadline has passed: nobody is waited for.
    """
    now = [session for session in sessions if not session.held and (over or not session.busy)]
    return sorted(now, key=lambda session: (-session.tokens, session.session_id))


def seconds_for(left: float | None) -> float:
    """How long a node that will end in `left` seconds may be waited for: what moves the hard way needs time as well."""
    if left is None:
        return NOTICE_SECONDS
    return max(0.0, left - min(LONGEST_SPARE_SECONDS, SPARE_SHARE * left))
