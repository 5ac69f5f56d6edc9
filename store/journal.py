"""The journal: one thread that merges the operations of many sessions into one transaction after another.

A caller submits an operation (a function of a `Transaction`) and awaits its result, which arrives after the commit.
What has arrived meanwhile makes up the next group, so the cost of a durable commit is shared, and nobody polls.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sqlalchemy import func, select

from understudy.errors import StoreUnreachable, UnderstudyError
from understudy.events import Event

from .engine import Database, StoreRace, now
from .transaction import EVENT, Row, Transaction

log = logging.getLogger(__name__)

GROUP_LIMIT = 128
RACE_TRIES = 3
RETRY_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)

Result = TypeVar("Result")
Operation = Callable[[Transaction], Any]


@dataclass
class Committed:
    """What one group commit changed, told on the event loop before its callers continue.

    Attributes:
        written: every session that was changed, as it is now, and its `seq` before.
        repeated: an earlier try may have been committed unnoticed; what it changed is not told again.
    """

    events: list[Event]
    woken: dict[str, Row]
    cancelled: dict[str, Row]
    written: dict[str, tuple[int, Row]]
    operations: int
    seconds: float
    repeated: bool = False


@dataclass
class _Submitted:
    operations: list[Operation]
    touches: tuple[str, ...]
    future: asyncio.Future[list[Any]]
    results: list[Any] = field(default_factory=list)


class Journal:
    """The only writer of a store on its node.

    Guarantees: an operation's result is given only after its transaction is durable; operations submitted together
    are in one transaction; one that raises changes nothing and does not disturb the others of its group; while the
    store is unreachable operations wait and are retried (they are idempotent by their keys), none is acknowledged.
    """

    def __init__(self, database: Database, namespace: str, writer: str, on_commit: Callable[[Committed], None]) -> None:
        self.database = database
        self.namespace = namespace
        self.writer = writer
        self.generation = 0
        self.writer_seq = 0
        self.last_beat = time.monotonic()
        self.unreachable_since: float | None = None
        self._on_commit = on_commit
        self._queue: queue.SimpleQueue[_Submitted | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = threading.Event()
        self._last_now = 0

    def start(self) -> None:
        """Prepare the schema and start the thread. Must be called on the event loop that will await results."""
        if self._thread is not None:
            return
        self.database.prepare()
        self._reload_writer_seq()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="understudy-journal", daemon=True)
        self._thread.start()

    async def submit(self, operation: Callable[[Transaction], Result], *touches: str) -> Result:
        """Apply one operation and return its result once it is durable.

        Args:
            touches: ids of the sessions it is known to need: one SELECT reads those of a whole group.
        """
        [result] = await self.submit_all([operation], *touches)
        if isinstance(result, BaseException):
            raise result
        return result  # type: ignore[no-any-return]

    async def submit_all(self, operations: list[Operation], *touches: str) -> list[Any]:
        """Apply operations in one transaction, in order; an operation that was refused has its error as its result."""
        assert self._loop is not None
        submitted = _Submitted(operations, touches, self._loop.create_future())
        self._queue.put(submitted)
        return await submitted.future

    def close(self) -> None:
        """Commit what was submitted and stop."""
        self._closing.set()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(10)
        self.database.close()

    def _run(self) -> None:
        while not self._closing.is_set() or not self._queue.empty():
            self.last_beat = time.monotonic()
            try:
                first = self._queue.get(timeout=1.0)
            except queue.Empty:
                continue
            group = [] if first is None else [first]
            while len(group) < GROUP_LIMIT:
                try:
                    more = self._queue.get_nowait()
                except queue.Empty:
                    break
                if more is not None:
                    group.append(more)
            if group:
                self._commit(group)

    def _commit(self, group: list[_Submitted]) -> None:
        started = time.perf_counter()
        try:
            committed = self._attempt(group)
        except Exception as error:
            if len(group) > 1:  # one of them is at fault: each on its own
                log.warning("a group of %d failed (%s): committing one by one", len(group), error)
                for submitted in group:
                    self._commit([submitted])
                return
            log.exception("an operation failed")
            self._tell(group, None, error)
            return
        if committed is not None:
            committed.seconds = time.perf_counter() - started
            self._tell(group, committed, None)

    def _attempt(self, group: list[_Submitted]) -> Committed | None:
        attempt = 0
        while True:
            try:
                with self.database.errors():
                    committed = self._transaction(group)
                self.unreachable_since = None
                committed.repeated = attempt > 0
                return committed
            except StoreRace:
                attempt += 1
                self._reload_writer_seq()
                if len(group) > 1 or attempt > RACE_TRIES:
                    raise
            except StoreUnreachable as error:
                # Whether the transaction was committed is unknown: every operation's key makes a repetition harmless.
                if self.unreachable_since is None:
                    self.unreachable_since = time.monotonic()
                    log.warning("store unreachable, retrying: %s", error)
                if self._closing.wait(RETRY_SECONDS[min(attempt, len(RETRY_SECONDS) - 1)]):
                    raise
                attempt += 1
                self.last_beat = time.monotonic()
                try:
                    self._reload_writer_seq()
                except UnderstudyError:
                    continue

    def _transaction(self, group: list[_Submitted]) -> Committed:
        # Strictly rising: two commits never share a time, whatever the clock does.
        self._last_now = max(now(), self._last_now + 1)
        with self.database.writer.begin() as connection:
            tx = Transaction(
                connection,
                self.namespace,
                now=self._last_now,
                writer=self.writer,
                writer_seq=self.writer_seq,
                generation=self.generation,
            )
            tx.load(session_id for submitted in group for session_id in submitted.touches)
            count = 0
            for submitted in group:
                submitted.results = []
                for operation in submitted.operations:
                    count += 1
                    before = tx.writes
                    try:
                        submitted.results.append(operation(tx))
                    except UnderstudyError as error:
                        if tx.writes != before:  # it changed something before it failed: none of this may be kept
                            raise
                        submitted.results.append(error)
            tx.flush()
        self.writer_seq = tx.writer_seq
        return Committed(tx.committed_events, tx.woken, tx.cancelled, tx.written, count, 0.0)

    def _reload_writer_seq(self) -> None:
        statement = select(func.max(EVENT.c.writer_seq)).where(
            EVENT.c.namespace == self.namespace, EVENT.c.writer == self.writer
        )
        with self.database.read() as connection:
            self.writer_seq = connection.execute(statement).scalar() or 0

    def _tell(self, group: list[_Submitted], committed: Committed | None, error: Exception | None) -> None:
        assert self._loop is not None

        def deliver() -> None:
            if committed is not None:
                try:
                    self._on_commit(committed)
                except Exception:  # what is committed must be acknowledged, whatever the projection makes of it
                    log.exception("a commit could not be told")
            for submitted in group:
                if submitted.future.done():  # its caller gave up; the commit stands
                    continue
                if error is not None:
                    submitted.future.set_exception(error)
                else:
                    submitted.future.set_result(submitted.results)

        try:
            self._loop.call_soon_threadsafe(deliver)
        except RuntimeError:
            log.warning("the event loop closed before a commit could be told")
