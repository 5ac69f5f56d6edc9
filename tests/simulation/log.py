"""What is committed, as whoever watches the simulation learns of it: each event once, as soon as that is possible."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sqlalchemy import select

from understudy.events import Event
from understudy.store.queries import event_from_row
from understudy.store.statements import EVENT

if TYPE_CHECKING:
    from .world import World


class Log:
    """The committed events, in order.

    A journal returns what it has committed. Not if the answer of the store is lost, if its process dies before it, or
    if the commit takes effect later: since the first of these the events are read from the store.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._seen: dict[str, int] = {}
        self._is_in_doubt = False

    def doubt(self) -> None:
        """Nobody knows whether a commit took effect, or will."""
        self._is_in_doubt = True

    def forget(self, session_ids: Iterable[str]) -> None:
        """Sessions were removed: others may have their ids."""
        for session_id in session_ids:
            self._seen.pop(session_id, None)

    def news(self, committed: list[Event]) -> list[Event]:
        """What was not seen before: of these events, and of the store's if a commit is in doubt."""
        found = self._stored() if self._is_in_doubt else committed
        new = [event for event in found if event.seq > self._seen.get(event.session_id, 0)]
        self._seen.update((event.session_id, event.seq) for event in new)
        return new

    def _stored(self) -> list[Event]:
        rows = []
        with self._world.store.committed() as connection:
            for session_id, seq in self._world.committed("SELECT session_id, seq FROM session"):
                seen = self._seen.get(session_id, 0)
                if seq > seen:
                    statement = select(EVENT).where(EVENT.c.session_id == session_id, EVENT.c.seq > seen)
                    rows += connection.execute(statement).mappings().all()
        return sorted(map(event_from_row, rows), key=lambda event: (event.at, event.writer_seq))
