"""Sessions that are about to be given to frames: whoever finds one of them ready meanwhile places it nowhere else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from .claims import Claims
from .paging import Paging, Ready, Slot


class Assignments:
    """Which these are.

    Args:
        dispatch: gives ready sessions to resting frames.

    Attributes:
        chosen: sessions that were taken from the queue, each for a frame, and whose activation has not begun yet.
        under_way: sessions whose activation is being committed, by how many at once.
    """

    def __init__(self, paging: Paging, claims: Claims, dispatch: Callable[[], None]) -> None:
        self._paging = paging
        self._claims = claims
        self._dispatch = dispatch
        self.chosen = Counter[str]()
        self.under_way = Counter[str]()
        self._found: dict[str, Ready] = {}

    @property
    def places(self) -> tuple[Collection[str], ...]:
        """Where sessions are that somebody is about to deal with."""
        return self._paging.ready, self._claims, self.chosen, self.under_way

    def is_placed(self, session_id: str) -> bool:
        """Whether somebody is about to deal with the session."""
        return any(session_id in place for place in self.places)

    def queue(self, ready: Ready) -> None:
        """A session was found ready, in no frame. One that is being placed queues only if no frame gets it; of its
        epochs the latest is known."""
        if ready.session_id in self.under_way:
            found = self._found.get(ready.session_id, ready)
            self._found[ready.session_id] = ready if ready.epoch >= found.epoch else found
        else:
            self._paging.add(ready)

    def found_ready(self, session_id: str) -> Ready | None:
        """What is known of a session that somebody found ready meanwhile; from here on nobody has."""
        found = self._found.pop(session_id, None)
        if found is not None:
            self._paging.add(found)
        return self._paging.remove(session_id)

    @contextmanager
    def being_placed(self, session_id: str, slot: Slot | None) -> Iterator[None]:
        """While an activation is being committed: who finds the session ready says so (`queue`), and it queues if no
        frame gets it. Without a frame for it this changes nothing."""
        if slot is None:
            yield
            return
        self.under_way[session_id] += 1
        try:
            yield
        finally:
            self.under_way[session_id] -= 1
            if not self.under_way[session_id]:
                del self.under_way[session_id]
                found = self._found.pop(session_id, None)
                if found is not None:
                    self._paging.add(found)
                    self._dispatch()
