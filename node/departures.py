"""The decisions of a drain: who leaves a node now, and in which order. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Departure:
    """A session with work on a node that is drained.

    Attributes:
        tokens: what doing its round again would cost: its window.
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
