"""Tool calls that are executed in processes of their own: begun once, and found again by the next activation."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from functools import partial

from understudy.errors import Fenced, UnderstudyError
from understudy.events import CustomEvent, ToolProgress
from understudy.identifiers import new_identifier
from understudy.ports import TaskRunner
from understudy.records import ActivationId
from understudy.store.db.session_row import SessionRow
from understudy.store.operations.holding import require_held
from understudy.store.transaction import Transaction
from understudy.tool_tasks import ReadBlob, Report, Reporting, TaskNews, TaskResult, ToolTask

from .basis import NodeBasis
from .frames import Frames

log = logging.getLogger(__name__)

OPEN = ("requested", "approved", "started")
"""States of a call that has no result: what executes it is kept for as long."""


class Reported:
    """What a process has reported. Kept are the latest progress and all events of the tool's own that are not known to
    be committed, of which a process has a bounded number (`understudy.actors.reports`).

    Attributes:
        last: number of the last report.
        more: done when there are more reports than now.
    """

    def __init__(self) -> None:
        self.last = 0
        self.more = asyncio.get_running_loop().create_future()
        self._kept: list[tuple[int, Report]] = []
        self._committed = 0

    def add(self, reports: list[Report]) -> None:
        """Keep what was reported, in order."""
        for report in reports:
            self.last += 1
            if isinstance(report, ToolProgress):
                self._drop_progress()
            self._kept.append((self.last, report))
        more, self.more = self.more, asyncio.get_running_loop().create_future()
        more.set_result(None)

    def after(self, number: int) -> list[Report]:
        """What is kept of the reports behind this number."""
        return [report for at, report in self._kept if at > number]

    def forget(self, committed: list[Report]) -> None:
        """Keep no more what is committed of this process's reports: events in order, from the first one on."""
        events = sum(isinstance(report, CustomEvent) for report in committed)
        known, self._committed = self._committed, max(self._committed, events)
        own = [number for number, report in self._kept if isinstance(report, CustomEvent)]
        due = set(own[: self._committed - known])
        self._kept = [(number, report) for number, report in self._kept if number not in due]
        shown = [(report.fraction, report.text) for report in committed if isinstance(report, ToolProgress)]
        latest = next((report for _, report in self._kept if isinstance(report, ToolProgress)), None)
        if shown and latest is not None and shown[-1] == (latest.fraction, latest.text):
            self._drop_progress()

    def _drop_progress(self) -> None:
        self._kept = [(number, report) for number, report in self._kept if not isinstance(report, ToolProgress)]


@dataclass
class _Call:
    """A call, and the last process that was begun for it.

    Attributes:
        attempts: names of all processes that were begun for it.
        begun_at: the session's `seq` before: what this process has reported is committed behind it.
    """

    under_way: asyncio.Task[TaskResult | None]
    reported: Reported
    begun_at: int
    attempts: set[str] = field(default_factory=set)

    @property
    def is_lost(self) -> bool:
        """Whether nobody will ever know how it ended."""
        if not self.under_way.done():
            return False
        return self.under_way.cancelled() or self.under_way.exception() is not None or self.under_way.result() is None

    def may_be_followed_by(self, attempt: str) -> bool:
        """Whether another process may begin in place of this one."""
        return self.is_lost and attempt not in self.attempts


class NobodyRuns:
    """There is nobody to execute such calls (`understudy.ports.TaskRunner`)."""

    async def run(self, task: ToolTask, read_blob: ReadBlob, reported: Reporting) -> TaskResult | None:
        """Refuse it."""
        del read_blob, reported
        return TaskResult("error", f"{task.tool['name']} asks for resources, and nothing here provides them")


class ToolTasks:
    """The calls that this service has begun, by session and call. What another service has begun died with it.

    Attributes:
        service: the name of this service: another one, or this node's next one, has another name.
    """

    def __init__(self, node: NodeBasis, frames: Frames, runner: TaskRunner) -> None:
        self.service = new_identifier()
        self._node = node
        self._frames = frames
        self._runner = runner
        self._calls: dict[tuple[str, int, str], _Call] = {}

    async def run(
        self, frame_id: str, activation: ActivationId, task: ToolTask, service: str, after: int | None
    ) -> TaskNews | None:
        """See `understudy.ports.Node.task`."""
        self._frames.require_own(frame_id, activation)
        seq = await self._require_open(frame_id, activation, task.call_id)
        key = (activation.session_id, activation.incarnation, task.call_id)
        known = self._calls.get(key)
        if task.attempt and service == self.service and (known is None or known.may_be_followed_by(task.attempt)):
            known = self._calls[key] = self._begin(task, seq, known)
        if known is None:
            return None
        if after is None:
            await self._forget_committed(known, activation.session_id, task.call_id)
        reported = known.reported
        while not known.under_way.done() and not reported.after(after or 0):
            await asyncio.wait({known.under_way, reported.more}, return_when=asyncio.FIRST_COMPLETED)
            await self._require_open(frame_id, activation, task.call_id)  # another activation may have begun meanwhile
        result = None if known.is_lost or not known.under_way.done() else known.under_way.result()
        reports = reported.after(after or 0)
        return TaskNews(reports, result, reported.last) if reports or result is not None else None

    def _begin(self, task: ToolTask, seq: int, known: _Call | None) -> _Call:
        reported = Reported()
        work = self._runner.run(task, self._node.reading.blob, reported.add)
        under_way = asyncio.get_running_loop().create_task(work)
        return _Call(under_way, reported, seq, {*(known.attempts if known is not None else ()), task.attempt})

    async def _forget_committed(self, known: _Call, session_id: str, call_id: str) -> None:
        """Keep no more of a call's reports what earlier activations have committed. They are over: nothing comes
        between this and what the caller commits."""
        seq, committed = known.begun_at, list[Report]()
        while known.reported.last and (events := await self._node.reading.events(session_id, seq)):
            committed += [
                event for event in events
                if isinstance(event, (ToolProgress, CustomEvent)) and event.call_id == call_id
            ]  # fmt: skip
            seq = events[-1].seq
        known.reported.forget(committed)

    async def _require_open(self, frame_id: str, activation: ActivationId, call_id: str) -> int:
        """Refuse a call of another activation's, or one that has its result; the session's last `seq`. Raises
        `Fenced`."""

        def operation(tx: Transaction) -> int:
            row = tx.session(activation.session_id)
            require_held(row, activation, frame_id)
            if (activation.incarnation, call_id) not in self._open_calls(tx, activation.session_id):
                raise Fenced(f"the call {call_id} is over", session_id=activation.session_id)
            return row.seq

        found: int = await self._node.journal.submit(operation, activation.session_id)
        return found

    async def end(self, frame_id: str, activation: ActivationId, call_id: str) -> None:
        """See `understudy.ports.Node.end_task`."""
        self._frames.require_own(frame_id, activation)
        await self._node.journal.submit(
            lambda tx: require_held(tx.session(activation.session_id), activation, frame_id), activation.session_id
        )
        known = self._calls.get((activation.session_id, activation.incarnation, call_id))
        if known is not None:  # it stays known: a call that began it may arrive late
            known.under_way.cancel()

    def may_be_at_work(self, row: SessionRow) -> bool:
        """Whether something may be executed for a session besides its frame, as the store and this service know it:
        what a service before this one has begun may be about to end only now."""
        own = (call for key, call in list(self._calls.items()) if key[0] == row.session_id)
        return bool(row.calls_open and row.redone) or any(not call.under_way.done() for call in own)

    def drop(self, session_id: str) -> None:
        """End and forget what is executed for a session that is at home elsewhere now: nobody can ask for it here."""
        for key in [key for key in self._calls if key[0] == session_id]:
            self._calls.pop(key).under_way.cancel()

    async def look(self) -> None:
        """End and forget what is for calls that have a result, or whose round or session is over; and what is for
        sessions that are at home elsewhere, which begin it again there, if they may."""
        for session_id in {key[0] for key in self._calls}:
            try:
                wanted = await self._node.journal.submit(partial(self._open_calls, session_id=session_id), session_id)
            except UnderstudyError as error:
                log.info("what is executed for session %s is looked at later: %s", session_id, error)
                continue
            for key in [key for key in self._calls if key[0] == session_id and key[1:] not in wanted]:
                self._calls.pop(key).under_way.cancel()

    def _open_calls(self, tx: Transaction, session_id: str) -> set[tuple[int, str]]:
        """The calls that have no result, with its incarnation, of a session that is not at home elsewhere."""
        row = tx.find(session_id)
        if row is None or self._node.homes.elsewhere(row.node_id):
            return set()
        return {(row.incarnation, call["call_id"]) for call in tx.current_calls(row) if call["state"] in OPEN}

    def close(self) -> None:
        """End all of them."""
        for call in self._calls.values():
            call.under_way.cancel()
