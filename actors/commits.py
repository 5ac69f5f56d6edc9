"""An activation's commits: what gathers in its draft, in batches that arrive once and in order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

from understudy.ports import Node
from understudy.records import Ack, Batch

from .draft import Draft
from .window import Window


class Patience:
    """How long this process may be at work without a sign of progress, before it is taken for hung.

    Attributes:
        deadline: the monotonic time until which code of the user's may run; None if there was none.
    """

    def __init__(self) -> None:
        self.deadline: float | None = None
        self._waiting = 0

    def expect(self, deadline: float) -> None:
        """Code of the user's may run until this monotonic time; a process that goes on for longer hangs."""
        self.deadline = max(self.deadline or 0.0, deadline)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Within this context something here waits for the node service: the store may be away, however long."""
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    def overdue(self, now: float) -> float:
        """Seconds by which code of the user's is past its deadline; 0 while something here waits for the store."""
        return max(0.0, now - self.deadline) if self.deadline and not self._waiting else 0.0


class Commits:
    """The batches of an activation.

    Attributes:
        draft: what the next one holds.
    """

    def __init__(self, window: Window, node: Node, frame_id: str, patience: Patience) -> None:
        self.draft = Draft()
        self._window = window
        self._node = node
        self._frame_id = frame_id
        self._patience = patience
        self._sent: Batch | None = None  # and not acknowledged yet
        self._lock = asyncio.Lock()

    async def last(self, **what: Any) -> Batch:
        """The batch that a step takes along; all before it are acknowledged.

        Args:
            what: see `Draft.batch`.
        """
        async with self._lock:
            await self._deliver()
            return self._batch(**what)

    def _batch(self, **what: Any) -> Batch:
        draft, self.draft = self.draft, Draft()
        return draft.batch(self._window, **what)

    async def flush(self, *, even_if_empty: bool = False) -> None:
        """Commit the draft and keep the frame; it holds no messages then. Callers that wait for the lock share one.

        Args:
            even_if_empty: also with nothing to commit, since the Ack brings what the store has for the session by now.
        """
        async with self._lock:
            await self._deliver()
            if self.draft or even_if_empty:
                self._sent = self._batch()
                await self._deliver()

    async def _deliver(self) -> None:
        """Have the batch that was sent acknowledged. One whose sender was cancelled may have arrived or not: it is sent
        again as it was, before any other."""
        if self._sent is not None:
            ack = await self._commit(self._sent)
            self._sent = None
            self._window.acknowledge(ack)

    async def _commit(self, batch: Batch) -> Ack:
        with self._patience.waiting():
            return await self._node.commit(self._frame_id, batch)
