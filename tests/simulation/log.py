"""What is committed, as whoever watches the simulation learns of it: each event once, as soon as that is possible."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sqlalchemy import select

from understudy.events import Event
from understudy.store.db.statements import EVENT
from understudy.store.entries import event_from_row

if TYPE_CHECKING:
    from .world import World


class Log:
    """The committed events, in order.

    A journal returns what it has committed. Not if the answer of the store is lost, if its process dies before it, or
    if the commit takes effect later: since the first of these the events are read from the store.

    Attributes:
        of_writers: what each journal has committed, by its place in the journal's log; also what was removed since.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._seen: dict[str, int] = {}
        self.of_writers: dict[str, dict[int, Event]] = {}
        self._is_in_doubt = False

    def doubt(self) -> None:
        """Nobody knows whether a commit took effect, or will."""
        self._is_in_doubt = True

    def forget(self, session_ids: Iterable[str]) -> None:
        """Sessions were removed: others may have their ids."""
        for session_id in session_ids:
            self._seen.pop(session_id, None)

    def news(self, writer: str, committed: list[Event]) -> list[Event]:
        """What was not seen before: of these events, and of the store's if a commit is in doubt."""
        found = self._stored() if self._is_in_doubt else [(writer, event) for event in committed]
        found = [(writer, event) for writer, event in found if event.seq > self._seen.get(event.session_id, 0)]
        for writer, event in found:
            self._seen[event.session_id] = event.seq
            self.of_writers.setdefault(writer, {})[event.writer_seq] = event
        return [event for _, event in found]

    def _stored(self) -> list[tuple[str, Event]]:
        rows = []
        with self._world.store.committed() as connection:
            for session_id, seq in self._world.committed("SELECT session_id, seq FROM session"):
                seen = self._seen.get(session_id, 0)
                if seq > seen:
                    statement = select(EVENT).where(EVENT.c.session_id == session_id, EVENT.c.seq > seen)
                    rows += connection.execute(statement).mappings().all()
        found = [(row["writer"], event_from_row(row)) for row in rows]
        return sorted(found, key=lambda item: (item[1].at, item[1].writer_seq))
