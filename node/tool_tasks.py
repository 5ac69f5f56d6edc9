"""Tool calls that are executed in processes of their own: begun once, and found again by the next activation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from understudy.errors import Fenced, UnderstudyError
from understudy.identifiers import new_identifier
from understudy.ports import TaskRunner
from understudy.records import ActivationId
from understudy.store.operations.holding import require_held
from understudy.store.transaction import Transaction
from understudy.tool_tasks import TaskResult, ToolTask

from .basis import NodeBasis
from .frames import Frames

log = logging.getLogger(__name__)

OPEN = ("requested", "approved", "started")
"""States of a call that has no result: what executes it is kept for as long."""


@dataclass
class _Call:
    """A call, and the last process that was begun for it."""

    under_way: asyncio.Task[TaskResult | None]
    attempts: set[str] = field(default_factory=set)

    @property
    def is_lost(self) -> bool:
        """Whether nobody will ever know how it ended."""
        if not self.under_way.done():
            return False
        return self.under_way.cancelled() or self.under_way.exception() is not None or self.under_way.result() is None


class NobodyRuns:
    """There is nobody to execute such calls (`understudy.ports.TaskRunner`)."""

    async def run(self, task: ToolTask, read_blob: Callable[[str], Awaitable[bytes]]) -> TaskResult | None:
        """Refuse it."""
        del read_blob
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
        self, frame_id: str, activation: ActivationId, task: ToolTask, service: str
    ) -> TaskResult | None:  # fmt: skip
        """See `understudy.ports.Node.task`."""
        self._frames.require_own(frame_id, activation)
        await self._node.journal.submit(
            lambda tx: _require_open(tx, frame_id, activation, task.call_id), activation.session_id
        )
        key = (activation.session_id, activation.incarnation, task.call_id)
        known = self._calls.get(key)
        if known is None or known.is_lost:
            if not task.attempt or service != self.service or (known is not None and task.attempt in known.attempts):
                return None
            under_way = asyncio.get_running_loop().create_task(self._runner.run(task, self._node.reading.blob))
            known = self._calls[key] = _Call(under_way, {*(known.attempts if known is not None else ()), task.attempt})
        await asyncio.wait({known.under_way})
        return None if known.is_lost else known.under_way.result()

    async def end(self, frame_id: str, activation: ActivationId, call_id: str) -> None:
        """See `understudy.ports.Node.end_task`."""
        self._frames.require_own(frame_id, activation)
        await self._node.journal.submit(
            lambda tx: require_held(tx.session(activation.session_id), activation, frame_id), activation.session_id
        )
        known = self._calls.get((activation.session_id, activation.incarnation, call_id))
        if known is not None:  # it stays known: a call that began it may arrive late
            known.under_way.cancel()

    async def look(self) -> None:
        """End and forget what is for calls that have a result, or whose round or session is over."""
        for session_id in {key[0] for key in self._calls}:
            try:
                wanted = await self._node.journal.submit(partial(_open_calls, session_id=session_id), session_id)
            except UnderstudyError as error:
                log.info("what is executed for session %s is looked at later: %s", session_id, error)
                continue
            for key in [key for key in self._calls if key[0] == session_id and key[1:] not in wanted]:
                self._calls.pop(key).under_way.cancel()

    def close(self) -> None:
        """End all of them."""
        for call in self._calls.values():
            call.under_way.cancel()


def _require_open(tx: Transaction, frame_id: str, activation: ActivationId, call_id: str) -> None:
    """Refuse a call of another activation's, or one that has its result. Raises `Fenced`."""
    require_held(tx.session(activation.session_id), activation, frame_id)
    if (activation.incarnation, call_id) not in _open_calls(tx, activation.session_id):
        raise Fenced(f"the call {call_id} is over", session_id=activation.session_id)


def _open_calls(tx: Transaction, session_id: str) -> set[tuple[int, str]]:
    """The calls of a session that have no result, with its incarnation."""
    row = tx.find(session_id)
    if row is None:
        return set()
    return {(row.incarnation, call["call_id"]) for call in tx.current_calls(row) if call["state"] in OPEN}
