"""What the service remembers of sessions because it seldom changes: specification and placement."""

from __future__ import annotations

from typing import Any

from understudy.handoffs import present
from understudy.store.db.session_row import ActiveSession
from understudy.store.transaction import Transaction

from .reading import Reading

KNOWN_SESSIONS = 10_000


class Specifications:
    """The compiled specifications and placements of the sessions that were asked for last."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._specs: dict[str, tuple[int, dict[str, Any]]] = {}
        self._placements: dict[str, str] = {}

    def within(self, tx: Transaction, session_id: str) -> dict[str, Any]:
        """The compiled specification of a session's present agent, for an operation."""
        row = tx.session(session_id)
        incarnation, spec = self._specs.get(session_id, (0, None))
        if spec is None or incarnation != row.incarnation:
            spec = present(tx.specification(session_id), row.agent)
            self.remember(row, spec)
        return spec

    def remember(self, row: ActiveSession, spec: dict[str, Any]) -> None:
        """A session's specification as the store has it."""
        if len(self._specs) > KNOWN_SESSIONS:
            self._specs.clear()
        self._specs[row.session_id] = row.incarnation, spec

    async def placement(self, session_id: str) -> str:
        """The placement profile of a session. Raises `UnknownSession`."""
        if session_id not in self._placements:
            self.remember_placement(session_id, (await self._reading.session(session_id)).placement)
        return self._placements[session_id]

    def remember_placement(self, session_id: str, placement: str) -> None:
        """A session's placement as the store has it."""
        if len(self._placements) > KNOWN_SESSIONS:
            self._placements.clear()
        self._placements[session_id] = placement
