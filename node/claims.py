"""Commits of the service's own: while one is under way, whoever makes it learns what wakes its session."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from understudy.records import ActivationId
from understudy.store.db.session_row import ActiveSession

FENCED = ActivationId("", 0, 0)
"""Stands for an activation that is over: no session has it."""


class Claim:
    """One commit of our own, of a session.

    Attributes:
        activation: which commits, for it to say; None for any. What is woken under another one is none of its business,
            and is passed on as if nobody had committed.
        woken: once it has ended, the session's row if it was woken within it.
    """

    def __init__(self) -> None:
        self.activation: ActivationId | None = None
        self.woken: ActiveSession | None = None


class Claims:
    """Sessions for which commits of our own are under way, and how many.

    Args:
        wake: lets a session go on that was woken while somebody committed for it, whose business that was not.

    Attributes:
        cancelled: by session, runs that were asked to end while commits of our own are under way for it.
        interrupted: the same for runs that were interrupted, each with the round whose model call is not wanted. A late
            notice may be of an earlier one, and takes the place of none.
    """

    def __init__(self, wake: Callable[[ActiveSession], None]) -> None:
        self._wake = wake
        self._own = Counter[str]()
        self._missed: dict[str, ActiveSession] = {}
        self.cancelled = defaultdict[str, set[str]](set)
        self.interrupted = defaultdict[str, set[tuple[str, int]]](set)

    def __contains__(self, session_id: object) -> bool:
        return session_id in self._own

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)

    def miss(self, row: ActiveSession) -> None:
        """A claimed session was woken: whoever commits for it looks at this before it lets the session wait."""
        self._missed[row.session_id] = row

    @contextmanager
    def committing(self, session_id: str) -> Iterator[Claim]:
        """While a commit for a session is under way, and what follows from it at once. What is woken within one that
        fails is passed on as if nobody had committed.

        Where several are under way each learns of it: none may let the session wait.
        """
        claim = Claim()
        self._own[session_id] += 1
        try:
            yield claim
        except BaseException:
            self._end(session_id, FENCED)
            raise
        claim.woken = self._end(session_id, claim.activation)

    def _end(self, session_id: str, activation: ActivationId | None) -> ActiveSession | None:
        self._own[session_id] -= 1
        if self._own[session_id] > 0:
            row = self._missed.get(session_id)
        else:
            del self._own[session_id]
            self.cancelled.pop(session_id, None)
            self.interrupted.pop(session_id, None)
            row = self._missed.pop(session_id, None)
        if row is None or activation is None or row.activation == activation:
            return row
        self._wake(row)
        return None
