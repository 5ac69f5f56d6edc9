"""The journal: merges the operations of many sessions into one transaction after another.

A caller submits an operation (a function of a `Transaction`) and awaits its result, which arrives after the commit.
What has arrived meanwhile makes up the next group, so the cost of a durable commit is shared, and nobody polls.

PostgreSQL is waited for in a thread. SQLite works on the event loop itself: it computes rather than waits, and a thread
would have to win the interpreter's lock back after every single row, from a loop that is busy; measured, that made a
commit five times as long. For this the loop stands still during a commit (a few milliseconds).
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from understudy.errors import StoreBusy, StoreError, StoreUnreachable, UnderstudyError
from understudy.events import Event
from understudy.ports import DecideEnd
from understudy.records import ActivationId, Cancelled, Interrupted, Unwanted

from .db.engine import Database, now
from .db.failures import StoreRace
from .db.session_row import SessionRow
from .db.statements import SELECT_END_OF_LOG
from .operations.groups import deliver_each
from .operations.queues import give_slots
from .outage import Outage
from .transaction import Transaction

log = logging.getLogger(__name__)

GROUP_LIMIT = 128
RACE_TRIES = 3

CLOSING_SECONDS = 5.0
"""So long an operation whose turn comes while the journal is closed waits for others."""

CLOCK_CORRECTION = 1_000_000
"""A clock that goes back by less (microseconds) is waited for; by more, it is followed."""

LONGEST_PAUSE = 0.01
"""On the event loop, commits take turns with everything else: after one that several operations shared, the next begins
as long after it as it took, so that under load more share it; but no later than this (seconds)."""

Result = TypeVar("Result")
Operation = Callable[[Transaction], Any]


@dataclass
class Committed:
    """What one group commit changed, reported on the event loop before its callers continue.

    Attributes:
        written: every session that was changed, as it is now, and its `seq` before.
        timers: when each timer that was set is due, by session and name; schedules too (`OF_SCHEDULES`).
        cancelled: which run of each session was asked to end.
        interrupted: which run of each session was interrupted by a steer.
        commands: nodes with commands in the background of which something was written.
        killed: frames that must end, with the activation whose run was ended by force.
        unwanted: by session, the response that an endpoint makes in background mode for a run that ended.
        repeated: an earlier try may have been committed unnoticed; what it changed is not reported again.
    """

    events: list[Event]
    woken: dict[str, SessionRow]
    cancelled: dict[str, Cancelled]
    interrupted: dict[str, Interrupted]
    written: dict[str, tuple[int, SessionRow]]
    timers: dict[tuple[str, str], int]
    killed: dict[str, ActivationId]
    commands: dict[str, None]
    unwanted: dict[str, Unwanted]
    operations: int
    seconds: float
    repeated: bool = False


@dataclass
class _Submitted:
    operations: list[Operation]
    touches: tuple[str, ...]
    future: asyncio.Future[list[Any]]
    alone: bool = False
    results: list[Any] = field(default_factory=list)
    tried: bool = False  # it may have been committed unnoticed


class Journal:
    """The only writer of a store on its node.

    Guarantees: an operation's result is given only after its transaction is durable; operations submitted together
    are in one transaction; one that raises changes nothing and does not disturb the others of its group; while the
    store is unreachable operations wait and are retried (they are idempotent by their keys), none is acknowledged.

    Attributes:
        outage: what keeps it from committing.
        writer_seq: where this journal's log ends, as far as is known here.

    Args:
        decide_end: what becomes of a group of sub-agents when one of them ends.
        patience: seconds until operations fail while the store is away, for a command that somebody waits for; None for
            no end.
    """

    def __init__(
        self,
        database: Database,
        namespace: str,
        writer: str,
        on_commit: Callable[[Committed], None],
        *,
        decide_end: DecideEnd = deliver_each,
        patience: float | None = None,
    ) -> None:
        self.database = database
        self.namespace = namespace
        self.writer = writer
        self.generation = 0
        self.writer_seq = 0
        self.outage = Outage()
        self._on_commit = on_commit
        self._decide_end = decide_end
        self._patience = patience
        self._submitted: queue.SimpleQueue[_Submitted | None] = queue.SimpleQueue()
        self._groups: deque[list[_Submitted]] = deque()
        self._end_known = False  # else a commit of this log may have happened, or may yet, that was not reported here
        self._doubted = False
        self._races = 0
        self._met: set[str] = set()  # the sessions that the first group's last try came to: the next locks them first
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn: asyncio.TimerHandle | None = None
        self._next_turn = 0.0
        self._closing = threading.Event()
        self._abandoned = False
        self._last_beat = time.monotonic()
        self._last_now = 0

    def start(self) -> None:
        """Begin to commit, on a database that is prepared. Must be called on the event loop that awaits results."""
        if self._loop is not None:
            return
        with self.database.read() as connection:
            here = {"ns": self.namespace, "writer": self.writer}
            self.writer_seq = connection.execute(SELECT_END_OF_LOG, here).scalar() or 0
        self._loop = asyncio.get_running_loop()
        if not self.database.is_sqlite:
            self._thread = threading.Thread(target=self._run, name="understudy-journal", daemon=True)
            self._thread.start()

    async def submit(self, operation: Callable[[Transaction], Result], *touches: str, alone: bool = False) -> Result:
        """Apply one operation and return its result once it is durable.

        Args:
            touches: ids of the sessions it is known to need: one SELECT reads those of a whole group.
            alone: in a transaction without others. For operations that lock the owner's row: with a session's, in
                another order than another journal, two could wait for each other.
        """
        [result] = await self.submit_all([operation], *touches, alone=alone)
        if isinstance(result, BaseException):
            raise result
        return result  # type: ignore[no-any-return]

    async def submit_all(self, operations: list[Operation], *touches: str, alone: bool = False) -> list[Any]:
        """Apply operations in one transaction, in order; an operation that was refused has its error as its result."""
        assert self._loop is not None
        if self._abandoned:
            raise asyncio.CancelledError("the journal was abandoned")
        submitted = _Submitted(operations, touches, self._loop.create_future(), alone)
        self._submitted.put(submitted)
        if self._thread is None and self._turn is None:
            self._turn = self._loop.call_at(self._next_turn, self._take_turn)
        return await submitted.future

    def abandon(self) -> None:
        """Begin no transaction any more, as if this process had been killed. What is being committed may take effect,
        and nobody hears of it: whoever waits for a result is cancelled, and so is whoever submits from now on. `close`
        lets go of the store.
        """
        self._abandoned = True

    async def close(self) -> None:
        """Commit what was submitted, unless this was abandoned, and stop."""
        self._closing.set()
        if self._thread is not None:
            self._submitted.put(None)
            await asyncio.to_thread(self._thread.join, 10)
        else:
            if self._turn is not None:
                self._turn.cancel()
            while self._groups or not self._submitted.empty():
                self._gather()
                self._work_off()
        self.database.close()

    def silence(self) -> float:
        """Seconds since the journal's thread was last seen at work; 0 on the event loop, whose own silence tells."""
        return time.monotonic() - self._last_beat if self._thread is not None else 0.0

    def _take_turn(self) -> None:
        """Commit what there is, on the event loop."""
        assert self._loop is not None
        if not self._groups:
            self._gather()
        began, shared = self._loop.time(), bool(self._groups) and len(self._groups[0]) > 1
        pause = self._work_off(at_most=1)  # the loop stands still for one transaction at a time
        ended = self._loop.time()
        self._next_turn = ended + (pause or (min(ended - began, LONGEST_PAUSE) if shared else 0.0))
        pending = self._groups or not self._submitted.empty()
        self._turn = self._loop.call_at(self._next_turn, self._take_turn) if pending else None

    def _run(self) -> None:
        """Commit what there is, in a thread."""
        while not self._closing.is_set() or self._groups or not self._submitted.empty():
            self._last_beat = time.monotonic()
            try:
                first = self._submitted.get(timeout=1.0)
            except queue.Empty:
                continue
            self._gather(first)
            while pause := self._work_off():
                self._last_beat = time.monotonic()
                self._closing.wait(pause)

    def _gather(self, first: _Submitted | None = None) -> None:
        """Make groups of what was submitted."""
        found = [first] if first is not None else []
        while len(found) < GROUP_LIMIT and not self._submitted.empty():
            more = self._submitted.get_nowait()
            if more is not None:
                found.append(more)
        for number, submitted in enumerate(found):
            if number == 0 or submitted.alone or self._groups[-1][0].alone:
                self._groups.append([])
            self._groups[-1].append(submitted)

    def _work_off(self, at_most: int | None = None) -> float:
        """Commit the groups; returns the seconds until another try if the store can't be written now, else 0."""
        tried = 0
        while self._groups and (at_most is None or tried < at_most):
            tried += 1
            group = self._groups[0]
            if self._abandoned:
                self._tell(self._groups.popleft(), None, None)
                continue
            started = self._last_beat = time.monotonic()
            try:
                committed = self._transaction(group)
            except StoreBusy as error:
                if not self._closing.is_set() or not self.outage.busy_for(CLOSING_SECONDS):
                    return self.outage.busy(error)
                self._answer(None, error)
            except StoreUnreachable as error:
                # Whether the transaction was committed is unknown: every operation's key makes a repetition harmless.
                self._doubt(group)
                impatient = self._patience is not None and self.outage.unreachable_for(self._patience)
                if not self._closing.is_set() and not impatient:
                    return self.outage.unreachable(error)
                self._answer(None, error)
            except StoreRace as error:
                self._doubt(group)
                self._races += 1
                if self._races > RACE_TRIES:
                    self._refuse(group, error)
            except Exception as error:
                self._refuse(group, error)
            else:
                committed.seconds = time.monotonic() - started
                self._answer(committed, None)
        return 0.0

    def _doubt(self, group: list[_Submitted]) -> None:
        """Something may have been committed, or may yet be, that is not known here."""
        self._end_known, self._doubted = False, True
        for submitted in group:
            submitted.tried = True

    def _refuse(self, group: list[_Submitted], error: Exception) -> None:
        """A group can't be committed: one operation of it is at fault, so each is tried on its own."""
        if len(group) == 1:
            ours = isinstance(error, UnderstudyError)
            level = logging.WARNING if isinstance(error, StoreError) else logging.INFO if ours else logging.ERROR
            log.log(level, "an operation failed", exc_info=error)
            self._answer(None, error)
            return
        log.warning("a group of %d failed (%s): committing one by one", len(group), error)
        self._races = 0
        self._groups.popleft()
        self._groups.extendleft([submitted] for submitted in reversed(group))

    def _answer(self, committed: Committed | None, error: Exception | None) -> None:
        """The first group is done with."""
        self.outage.answered(error)
        self._races = 0
        self._met = set()
        self._tell(self._groups.popleft(), committed, error)

    def _transaction(self, group: list[_Submitted]) -> Committed:
        with self.database.write() as connection:
            tx = Transaction(
                connection,
                self.database.statements,
                self.namespace,
                now=self._next_time(),
                writer=self.writer,
                writer_seq=self.writer_seq if self._end_known else None,
                generation=self.generation,
                decide_end=self._decide_end,
            )
            touched = {session_id for submitted in group for session_id in submitted.touches}
            tx.load(touched.union(self._met))
            self._met = tx.loads
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
            give_slots(tx)
            tx.flush()
        # A predecessor's commit took effect after this journal's start; late ones of its own were `tried` before.
        unnoticed = tx.end_found is not None and not self._doubted and tx.end_found != self.writer_seq
        if tx.writer_seq is not None:
            self.writer_seq, self._end_known, self._doubted = tx.writer_seq, True, False
        return Committed(
            tx.committed_events, tx.woken, tx.cancelled, tx.interrupted, tx.written, tx.timers, tx.killed, tx.commands,
            tx.unwanted, count, 0.0,
            repeated=unnoticed or any(submitted.tried for submitted in group),
        )  # fmt: skip

    def _next_time(self) -> int:
        """A commit's time: the clock's, also when that was set back. Order is by `seq`, never by time.

        No two commits in a row share one, though the clock may be coarse or be corrected a little: an incarnation is
        a time, and whether a session was written since its process died is decided by times (`ready_of`).
        """
        clock = now()
        ahead = self._last_now - clock
        self._last_now = self._last_now + 1 if 0 <= ahead < CLOCK_CORRECTION else clock
        return self._last_now

    def _tell(self, group: list[_Submitted], committed: Committed | None, error: Exception | None) -> None:
        assert self._loop is not None

        def deliver() -> None:
            if committed is not None and not self._abandoned:
                try:
                    self._on_commit(committed)
                except Exception:  # what is committed must be acknowledged, whatever the projection makes of it
                    log.exception("a commit could not be reported")
            for submitted in group:
                if submitted.future.done():  # its caller gave up; the commit stands
                    continue
                if self._abandoned:
                    submitted.future.cancel()
                elif error is not None:
                    submitted.future.set_exception(error)
                else:
                    submitted.future.set_result(submitted.results)

        if self._thread is None:
            deliver()
            return
        try:
            self._loop.call_soon_threadsafe(deliver)
        except RuntimeError:
            log.warning("the event loop closed before a commit could be reported")
