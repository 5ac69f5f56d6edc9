"""The projection of committed events: metrics at once, each sink behind a durable cursor, exact across any death."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from understudy.errors import MetricsPortTaken, UnderstudyError
from understudy.events import Event, ModelCallCompleted, ToolFinished
from understudy.identifiers import digest
from understudy.observability.content import chat_content, tool_content
from understudy.observability.event_files import EventFiles
from understudy.observability.event_lines import log_events
from understudy.observability.export import EventLog, Export, Sink
from understudy.observability.exporters import span_exporter
from understudy.observability.sampling import span_sampler
from understudy.observability.server import MetricsServer, address_of
from understudy.observability.span_building import Attributes
from understudy.observability.span_sink import SpanSink
from understudy.redaction import redacted
from understudy.store.db.engine import now
from understudy.store.journal import Committed
from understudy.store.operations import presence, progress
from understudy.store.reads import content, queries
from understudy.store.transaction import Transaction
from understudy.telemetry import EVENT_LOG, captures_content

from .adoption import Adoption, WriterLog
from .basis import NodeBasis
from .counting import Counting

log = logging.getLogger(__name__)

CHECKPOINT_SECONDS = 5.0
REPEAT_SECONDS = 1.0
REPLAY_LIMIT = 5_000
RECENT_EVENTS = 10_000

TAKEN_SECONDS, TAKEN_PAUSE = 10.0, 0.1
"""So long a port that was asked for may be another's: of the service before this one, perhaps, which is just ending."""


def _content_of(connection: Connection, namespace: str, event: Event) -> Attributes:
    """In the reader's thread: looking for secrets in long texts takes its time."""
    said = content.said(connection, namespace, event)
    return chat_content(said.before, said.answer, redacted) | tool_content(said.arguments, said.result, redacted)


class Projection:
    """Feeds a node's committed events to its metrics and its sinks, and serves the metrics.

    Args:
        show: has the metrics show what is read when somebody looks.

    Attributes:
        address: `host:port` of the metrics; empty before they are served.
        exports: of the sinks, by name; each has its cursor, its lag and its failures.
    """

    def __init__(self, node: NodeBasis, show: Callable[[Projection], None]) -> None:
        self._node = node
        self._show = show
        self.metrics = node.metrics
        self.address = ""
        self._server: MetricsServer | None = None
        self._log = WriterLog(node, node.config.writer)
        self.exports: dict[str, Export] = {}
        self.counting = Counting(node, self.announce, self.metrics.runs_open)
        self.adoption = Adoption(node, self._exporters)
        self._tasks: list[asyncio.Task[Any]] = []
        self._checkpointed = 0
        self._recent: deque[Event] = deque(maxlen=RECENT_EVENTS)
        self._catching_up = False
        self._abandoned = False

    async def listen(self) -> None:
        """Have a port for the metrics. Nothing is answered there until `start` has restored the totals.

        Raises:
            MetricsPortTaken: another process keeps the port that was asked for.
            InvalidConfiguration: there can be no such address here.
        """
        config = self._node.config
        if not config.serves_metrics or self._server is not None:
            return
        if config.metrics_port:
            # A port that was asked for is meant for a Prometheus elsewhere; a free one stays on this machine.
            self._server = await self._asked_for("::" if ":" in config.host else "0.0.0.0")
        else:
            self._server = self._any(await self._last_port())
        self.address = address_of(config.host if config.metrics_port else "127.0.0.1", self._server.port)

    async def start(self) -> None:
        """Restore the totals: the last checkpoint, then every event after it."""
        config, reading = self._node.config, self._node.reading
        row = await reading.query(queries.metric_state, config.writer)
        if row is not None:
            self.metrics.restore(row.state)
        while found := await self.read_events(self.metrics.writer_seq, REPLAY_LIMIT):
            self.metrics.apply(found)
        self._checkpointed = self.metrics.writer_seq
        self._show(self)
        if self._server is not None:
            self._server.start()
            log.info("metrics at http://%s/metrics", self.address)
        self.exports = self._exporters(self, config.writer)
        await self.announce()
        work = [self._checkpoints(), self.counting.run(), self.adoption.run()]
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(task) for task in (*work, *(export.run() for export in self.exports.values()))]

    async def announce(self) -> None:
        """Note in the store that the service is there, where its metrics are, and which sinks its log has."""
        config, address, sinks = self._node.config, self.address, list(self.exports)

        def operation(tx: Transaction) -> None:
            presence.announce(tx, config.node_id, config.writer, address)
            progress.keep_sinks(tx, config.writer, sinks)

        await self._node.journal.submit(operation)

    async def _last_port(self) -> int:
        """Where no port is asked for: the one this node's service had before, so that Prometheus finds it again."""
        services = await self._node.reading.query(presence.services)
        known = [service.address for service in services if service.node_id == self._node.config.node_id]
        port = known[0].rpartition(":")[2] if known else ""
        return int(port) if port.isdecimal() else 0

    async def _asked_for(self, host: str) -> MetricsServer:
        """On the port that was asked for, and on no other: who scrapes it would find nothing, and not know why."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + TAKEN_SECONDS
        while True:
            try:
                return self._made(self._node.config.metrics_port, host)
            except MetricsPortTaken:
                if loop.time() >= deadline:
                    raise
            await asyncio.sleep(TAKEN_PAUSE)

    def _any(self, last: int) -> MetricsServer:
        """On the port that this node's service had before, or on a free one."""
        try:
            return self._made(last, "127.0.0.1")
        except MetricsPortTaken:
            log.info("port %d, which the metrics had before, is taken: they get another one", last)
            return self._made(0, "127.0.0.1")

    def _made(self, port: int, host: str) -> MetricsServer:
        counting = self.counting
        return MetricsServer(
            self.metrics.registry, port, host,
            ready=counting.obstacle, targets=counting.targets, scraped=counting.note_scrape,
        )  # fmt: skip

    def _exporters(self, events: EventLog, writer: str) -> dict[str, Export]:
        """What exports a writer's events, by the sink's name; each call makes sinks of its own."""
        telemetry = self._node.config.telemetry
        exporter = span_exporter(telemetry, Path(self._node.config.span_directory), writer)
        sinks: dict[str, Sink] = {
            progress.SPANS: SpanSink(
                exporter, self._content if captures_content(telemetry) else None, span_sampler(telemetry)
            )
        }
        if telemetry.get(EVENT_LOG):
            # Writers of several stores and namespaces have the same name: with SQLite it is always the same one.
            own = f"{writer}-{digest(self._node.config.store, self._node.config.namespace, size=4)}"
            sinks[progress.EVENTS] = EventFiles(Path(telemetry[EVENT_LOG]), own)
        return {name: Export(events, sink, name) for name, sink in sinks.items()}

    def nodes_changed(self) -> None:
        """The supervisor has reported which nodes there are."""
        self.counting.nodes_changed()
        self.adoption.nodes_changed()

    def abandon(self) -> None:
        """Export nothing any more, and save nothing: the next service goes on from what is noted."""
        self._abandoned = True
        for task in self._tasks:
            task.cancel()
        for export in self.exports.values():
            export.release()
        self.adoption.close()

    async def close(self) -> None:
        """Save the totals and export what is left, within a bound, unless this was abandoned."""
        if not self._abandoned:
            await asyncio.gather(*(export.close() for export in self.exports.values()))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.adoption.close()
        if not self._abandoned:
            await self._checkpoint()
        if self._server is not None:
            self._server.close()

    def apply(self, committed: Committed) -> None:
        """Take in one group commit."""
        self.metrics.observe_commit(committed.seconds, committed.operations)
        events = committed.events
        if events:
            if self._recent and events[0].writer_seq != self._recent[-1].writer_seq + 1:
                self._recent.clear()
            self._recent.extend(events)
        # Events of a try whose outcome was not known were never reported here: then the store has what is missing.
        if committed.repeated or self._catching_up or (events and events[0].writer_seq != self.metrics.writer_seq + 1):
            self._behind()
        else:
            self.metrics.apply(events)
        log_events(events)
        if events or committed.repeated:
            for export in self.exports.values():
                export.notify()

    def _behind(self) -> None:
        if not self._catching_up:
            self._catching_up = True
            self._node.spawn_task(self._catch_up())

    async def _catch_up(self) -> None:
        """Measure what the store has but nobody reported."""
        self._recent.clear()
        try:
            while True:
                try:
                    found = await self.read_events(self.metrics.writer_seq, REPLAY_LIMIT)
                except UnderstudyError as error:  # nobody else would look before the next commit
                    log.info("what was not reported is measured later: %s", error)
                    await asyncio.sleep(REPEAT_SECONDS)
                    continue
                self.metrics.apply(found)
                if not found and (not self._recent or self._recent[-1].writer_seq <= self.metrics.writer_seq):
                    return
        finally:
            self._catching_up = False

    async def _checkpoints(self) -> None:
        while True:
            await asyncio.sleep(CHECKPOINT_SECONDS)
            try:
                await self._checkpoint()
                await self._look()
            except Exception:  # the totals are in memory, and the events in the store
                log.exception("the totals of the metrics are noted later")

    async def _look(self) -> None:
        """Take in what a predecessor has committed since this service began: it was taken for dead, and only paused."""
        if await self._log.read_events(self.metrics.writer_seq, 1):
            self._behind()
            for export in self.exports.values():
                export.notify()

    async def _checkpoint(self) -> None:
        if self.metrics.writer_seq == self._checkpointed:
            return
        state, seq = self.metrics.checkpoint(), self.metrics.writer_seq
        writer = self._node.config.writer

        await self._node.journal.submit(lambda tx: progress.save_metrics(tx, writer, seq, state))
        self._checkpointed = seq

    # The event log, as the span exporter reads it.

    async def read_events(self, after: int, limit: int) -> list[Event]:
        """Events of this node's journal after `after`, in its order; from memory, unless it is behind."""
        known = after + 1 - self._recent[0].writer_seq if self._recent else -1
        if known >= 0:  # `writer_seq` has no gaps
            return list(islice(self._recent, known, known + limit))
        return await self._log.read_events(after, limit)

    async def _content(self, events: list[Event]) -> dict[int, Attributes]:
        """What was said in the calls that ended with these events, for their spans."""
        calls = [event for event in events if isinstance(event, (ModelCallCompleted, ToolFinished))]
        # One at a time: a batch of long histories would not fit into memory.
        return {event.writer_seq: await self._node.reading.query(_content_of, event) for event in calls}

    async def read_cursor(self, name: str) -> int:
        """How far the sink has taken the log."""
        return await self._log.read_cursor(name)

    async def save_cursor(self, name: str, writer_seq: int) -> None:
        """Note that the sink has everything up to here."""
        await self._log.save_cursor(name, writer_seq)

    # How far sinks are behind; read in the scraping thread.

    def lag_events(self, export: Export) -> int:
        """How many events the sink has not taken yet."""
        return max(0, self._node.journal.writer_seq - max(0, export.cursor))

    def lag_seconds(self, export: Export) -> float:
        """Age of the oldest of them, as far as is known here; 0 without one."""
        if not self.lag_events(export):
            return 0.0
        since = export.pending_since
        try:
            since = since or self._recent[max(0, export.cursor + 1 - self._recent[0].writer_seq)].at
        except IndexError:  # it has just been taken, or nothing was committed here yet
            pass
        return max(0.0, (now() - since) / 1e6) if since else 0.0
