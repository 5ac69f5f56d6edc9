"""`TriageItem`: a failure of what schedules begin, as its clients see it."""

from __future__ import annotations

from understudy.reads import TriageEntry
from understudy.schedules import Fired

from .client_connection import ClientConnection
from .method import client_method


class TriageItem:
    """An entry of the triage inbox by its id; whether it exists shows when it is used."""

    def __init__(self, connection: ClientConnection, entry_id: str) -> None:
        self._connection = connection
        self.id = entry_id

    @client_method
    async def info(self) -> TriageEntry:
        """How it stands. Raises `UnknownTriageEntry`."""
        return await self._connection.read(TriageEntry, "triage_entry", self.id)

    @client_method
    async def resolve(self) -> bool:
        """Take it out of the inbox; the same failure opens it again. True if it was open. Raises
        `UnknownTriageEntry`."""
        return await self._connection.ask_once(bool, "resolve_triage", self.id)

    @client_method
    async def retry(self) -> Fired:
        """Trigger its schedule; if that run completes, the entry is resolved. See `Schedule.trigger`. Raises
        `UnknownTriageEntry`, `UnknownSchedule`."""
        return await self._connection.ask_once(Fired, "retry_triage", self.id)

    def __repr__(self) -> str:
        return f"TriageItem({self.id!r})"
