"""Reads of the store from the event loop: each in a thread, on a reader connection, never behind the writer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from understudy.errors import UnderstudyError
from understudy.events import Event
from understudy.reads import RunRecord, SessionRecord
from understudy.store.db.engine import Database
from understudy.store.db.session_row import ActiveSession
from understudy.store.reads import queries

CLOSE_SECONDS = 10.0

LARGEST_KEPT = 1 << 20
"""Bytes of a piece of code that stays in memory; a job's package is larger, and rarely read."""


class Reading:
    """The queries of `understudy.store.reads.queries` for one namespace, as coroutines."""

    def __init__(self, database: Database, namespace: str) -> None:
        self._database = database
        self._namespace = namespace
        self._blobs: dict[str, bytes] = {}
        self._running: set[asyncio.Future[Any]] = set()

    async def close(self) -> None:
        """Wait until no thread reads any more: a reader that nobody awaits goes on."""
        if self._running:
            await asyncio.wait(self._running, timeout=CLOSE_SECONDS)

    async def query(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Run `function(connection, namespace, ...)` on a reader connection."""

        def run() -> Any:
            with self._database.read() as connection:
                return function(connection, self._namespace, *arguments, **options)

        reader = asyncio.get_running_loop().run_in_executor(None, run)
        self._running.add(reader)
        reader.add_done_callback(self._ended)
        return await asyncio.shield(reader)

    def _ended(self, reader: asyncio.Future[Any]) -> None:
        self._running.discard(reader)
        if not reader.cancelled():
            reader.exception()  # perhaps nobody awaits it any more

    async def events(self, session_id: str, after: int) -> list[Event]:
        """Events of a session after a `seq`."""
        found: list[Event] = await self.query(queries.session_events, session_id, after)
        return found

    async def run(self, session_id: str, run_id: str) -> RunRecord:
        """One run. Raises `UnknownRun`."""
        row: RunRecord = await self.query(queries.run_info, session_id, run_id)
        return row

    async def session(self, session_id: str) -> SessionRecord:
        """One session. Raises `UnknownSession`."""
        row: SessionRecord = await self.query(queries.session_info, session_id)
        return row

    async def active(self, nodes: list[str] | None, **only: Any) -> list[ActiveSession]:
        """Sessions with work to do (`queries.active_sessions`)."""
        rows: list[ActiveSession] = await self.query(queries.active_sessions, nodes, **only)
        return rows

    async def timers(self, node_id: str, until: int) -> list[queries.DueTimer]:
        """Timers of sessions at home on a node that are due by a time (microseconds)."""
        rows: list[queries.DueTimer] = await self.query(queries.timers, node_id, until)
        return rows

    async def blob(self, digest: str) -> bytes:
        """Code by its hash; the latest few stay in memory."""
        if digest not in self._blobs:
            data = await self.query(queries.blob, digest)
            if data is None:
                raise UnderstudyError(f"the store has no code {digest[:12]}…: it was created by another store")
            if len(data) > LARGEST_KEPT:
                return data  # type: ignore[no-any-return]
            if len(self._blobs) > 64:
                self._blobs.clear()
            self._blobs[digest] = data
        return self._blobs[digest]
