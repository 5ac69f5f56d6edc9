"""Export of committed events: a durable cursor over the journal's log for each sink.

At least once: the cursor moves only after the sink took the events, so a crash in between sends some of them again.
What they become is identical then, and whoever reads it drops repeats.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from understudy.events import Event
from understudy.waiting import is_set_within

log = logging.getLogger(__name__)

BATCH = 512
"""Events read and exported at once."""


class EventLog(Protocol):
    """What the exporter needs of the journal: its own log, in the order of `writer_seq`, and a place for cursors."""

    async def read_events(self, after: int, limit: int) -> list[Event]:
        """Up to `limit` events with a `writer_seq` greater than `after`, ascending."""

    async def read_cursor(self, name: str) -> int:
        """The `writer_seq` saved under `name`; 0 when there is none."""

    async def save_cursor(self, name: str, writer_seq: int) -> None:
        """Durably remember `writer_seq` under `name`."""


class Sink(Protocol):
    """Where events go to. Called in a worker thread, one call at a time."""

    async def prepare(self, events: list[Event]) -> None:
        """Look up what `take` needs beyond the events themselves; on the event loop."""

    def take(self, events: list[Event]) -> int:
        """Take events over, durably as far as the sink can say; returns how many spans, lines, … they were.

        Raises:
            SinkRefused: it did not; they come again, with others behind them perhaps.
        """

    def close(self) -> None:
        """End a `take` that is under way, from another thread; nothing more comes."""


class SinkRefused(Exception):
    """A sink did not take the events; the text says why, without content or secrets."""


class Export:
    """Sends one journal's events to one sink, in order, from a durable cursor.

    A sink or store that fails is logged and tried again, after 0.5 s doubling to 30 s; it never raises here, and holds
    up no other sink.

    Attributes:
        exported, failures: what the sink took and how often it did not, in this process.
        cursor: `writer_seq` up to which it has the log; -1 before that is known.
        pending_since: commit time of the first event of the batch that it is at, or could not hand over; 0 without.

    Args:
        name: of the cursor.
        pause: seconds to gather events after the first notice, so that busy journals export in large batches.
    """

    def __init__(
        self,
        log: EventLog,
        sink: Sink,
        name: str,
        *,
        pause: float = 1.0,
        retry: tuple[float, float] = (0.5, 30.0),
    ) -> None:
        self._log = log
        self._sink = sink
        self.name = name
        self._pause = pause
        self._retry = retry
        self.cursor = self._saved = -1
        self.pending_since = 0
        self._news = asyncio.Event()
        self._news.set()  # what an earlier process left
        self._closing = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._aborted = False
        self.exported = 0
        self.failures = 0

    def notify(self) -> None:
        """There are new events. Cheap; call it after each commit, from the event loop of `run`."""
        self._news.set()

    async def run(self) -> None:
        """Export until `close`."""
        self._idle.clear()
        delay = self._retry[0]
        try:
            while not self._closing.is_set():
                await self._news.wait()
                self._news.clear()
                await is_set_within(self._closing, self._pause)
                if await self._drain():
                    delay = self._retry[0]
                    continue
                self._news.set()
                log.warning("%s are not exported (%d failures); next try in %g s", self.name, self.failures, delay)
                await is_set_within(self._closing, delay)
                delay = min(delay * 2, self._retry[1])
        finally:
            self._idle.set()

    async def catch_up(self, timeout: float) -> bool:
        """Try once to export what there is, without `run`; False if the sink was still at it after `timeout` seconds.
        Then it must be closed, since a sink is called once at a time."""
        try:
            async with asyncio.timeout(timeout):
                await self._drain()
        except TimeoutError:
            return False
        return True

    def release(self) -> None:
        """Let go of the sink, without `run` and without another try; ends a try that is under way."""
        self._aborted = True
        self._sink.close()

    async def close(self, timeout: float = 5.0) -> None:
        """End `run` after one more try to export what is left; the rest keeps for the next start.

        Returns after `timeout` seconds at the latest.
        """
        self._closing.set()
        self._news.set()
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
                await self._drain()
        except TimeoutError:
            self._aborted = True
            log.warning("%s were still being exported after %g s; the next start continues there", self.name, timeout)
        # Also ends the retries of an exporter that is still at it in its thread.
        self._sink.close()

    async def _drain(self) -> bool:
        """Export until the log's end; False when something failed on the way."""
        try:
            if self.cursor < 0:
                self.cursor = self._saved = await self._log.read_cursor(self.name)
            await self._save()  # what the sink has taken is not sent again only because the store failed
            while not self._aborted and (events := await self._log.read_events(self.cursor, BATCH)):
                self.pending_since = events[0].at
                await self._sink.prepare(events)
                self.exported += await asyncio.to_thread(self._sink.take, events)
                self.cursor = events[-1].writer_seq
                self.pending_since = 0
                await self._save()
        except SinkRefused as error:
            self.failures += 1
            log.warning("%s: %s", self.name, error)
            return False
        except Exception:
            self.failures += 1
            log.exception("%s can't be exported", self.name)
            return False
        return True

    async def _save(self) -> None:
        if self._saved != self.cursor:
            await self._log.save_cursor(self.name, self.cursor)
            self._saved = self.cursor
