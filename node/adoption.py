"""What node services left behind that are gone for good: the tail of their log is measured and exported by another.

It needs no lock. Totals and spans are functions of the events, and what is noted as done only moves forward: two that
do it at once, or one that does it again, do the same. A service that comes back goes on from what is noted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from understudy.errors import UnderstudyError
from understudy.events import Event
from understudy.observability.export import Export
from understudy.observability.metrics import Metrics, runs_of
from understudy.store.db.engine import now
from understudy.store.operations import presence, progress
from understudy.store.operations.presence import Log
from understudy.store.reads import queries
from understudy.waiting import is_set_within

from .basis import NodeBasis

log = logging.getLogger(__name__)

LOOK_SECONDS = 15.0
EVENTS_AT_ONCE = 500
EXPORT_SECONDS = 60.0
"""So long the spans of one log are exported before the next log has its turn; the rest follows later."""


class WriterLog:
    """The log of one writer, as a sink reads it (`understudy.observability.export.EventLog`)."""

    def __init__(self, node: NodeBasis, writer: str) -> None:
        self._node = node
        self.writer = writer

    async def read_events(self, after: int, limit: int) -> list[Event]:
        """Its events after a `writer_seq`, in its order."""
        found: list[Event] = await self._node.reading.query(queries.writer_events, self.writer, after, limit)
        return found

    async def read_cursor(self, name: str) -> int:
        """How far the sink has taken the log."""
        cursor: int = await self._node.reading.query(queries.export_cursor, self.writer, name)
        return cursor

    async def save_cursor(self, name: str, writer_seq: int) -> None:
        """Note that the sink has everything up to here."""
        await self._node.journal.submit(lambda tx: progress.save_cursor(tx, self.writer, name, writer_seq))


Exporters = Callable[[WriterLog, str], dict[str, Export]]
"""Makes what exports a writer's log, by the sink's name."""


class Adoption:
    """Completes the logs of writers that have no node service any more; the first of the services does.

    Attributes:
        carried: runs that such writers have counted as accepted, and as finished; None where another service tells.
    """

    def __init__(self, node: NodeBasis, exporters: Exporters) -> None:
        self._node = node
        self._exporters = exporters
        self._known: dict[str, tuple[int | None, tuple[int, int]]] = {}
        self._exports: dict[str, dict[str, Export]] = {}
        self._changed = asyncio.Event()
        self.carried: tuple[int, int] | None = None

    def nodes_changed(self) -> None:
        """Look now."""
        self._changed.set()

    async def run(self) -> None:
        """Look now and then, for as long as the service lives."""
        while True:
            self._changed.clear()
            try:
                await self.look()
            except UnderstudyError as error:
                log.warning("the logs of services that are gone are looked after later: %s", error)
            except Exception:
                log.exception("the logs of services that are gone are looked after later")
            await is_set_within(self._changed, LOOK_SECONDS)

    async def look(self) -> None:
        """Complete what is not, if this service is the first."""
        node = self._node
        if not node.homes.leads:
            self.carried = None
            self.close()
            return
        nodes = set(node.homes.nodes)
        services = await node.reading.query(presence.services)
        at_work = {service.writer for service in services if service.node_id in nodes} | {node.config.writer}
        left = [found for found in await node.reading.query(presence.logs) if found.writer not in at_work]
        undone = [found for found in left if not found.is_done()]
        self.close(self._exports.keys() - {found.writer for found in undone})
        for found in undone:
            await self._complete(found)
        self.carried = await self._runs(left)
        old = now() - presence.FORGOTTEN_AFTER
        gone = [found.node_id for found in services if found.node_id not in nodes and found.started_at < old]
        if gone:
            await node.journal.submit(lambda tx: presence.forget(tx, gone))

    async def _complete(self, found: Log) -> None:
        log.info("writer %s is gone: its log is completed from %s", found.writer, found.measured or 0)
        writer_log = WriterLog(self._node, found.writer)
        if found.unmeasured:
            await self._measure(writer_log)
        if found.writer not in self._exports:  # they know what was refused, and how often, until all is taken
            known = {progress.SPANS, *found.exported}
            made = self._exporters(writer_log, found.writer)
            self._exports[found.writer] = {sink: export for sink, export in made.items() if sink in known}
        exports = self._exports[found.writer]
        await self._node.journal.submit(lambda tx: progress.keep_sinks(tx, found.writer, exports))
        for export in exports.values():
            if not await export.catch_up(EXPORT_SECONDS):
                self.close([found.writer])  # a thread is still at it; the rest is found again
                break

    def close(self, writers: Iterable[str] | None = None) -> None:
        """Let go of what exports these writers' logs; of all by default."""
        for writer in list(self._exports) if writers is None else list(writers):
            for export in self._exports.pop(writer, {}).values():
                export.release()

    async def _measure(self, writer_log: WriterLog) -> None:
        metrics = Metrics()
        row = await self._node.reading.query(queries.metric_state, writer_log.writer)
        if row is not None:
            metrics.restore(row.state)
        while events := await writer_log.read_events(metrics.writer_seq, EVENTS_AT_ONCE):
            metrics.apply(events)
        seq, state = metrics.writer_seq, metrics.checkpoint()
        await self._node.journal.submit(lambda tx: progress.save_metrics(tx, writer_log.writer, seq, state))

    async def _runs(self, left: list[Log]) -> tuple[int, int]:
        """The runs of these writers; a checkpoint is read again only when it has moved."""
        known: dict[str, tuple[int | None, tuple[int, int]]] = {}
        for found in left:
            known[found.writer] = self._known.get(found.writer, (-1, (0, 0)))
            if known[found.writer][0] != found.measured or found.unmeasured:
                row = await self._node.reading.query(queries.metric_state, found.writer)
                known[found.writer] = (row.writer_seq, runs_of(row.state)) if row is not None else (None, runs_of({}))
        self._known = known
        return sum(runs[0] for _, runs in known.values()), sum(runs[1] for _, runs in known.values())
