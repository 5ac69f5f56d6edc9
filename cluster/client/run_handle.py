"""`Run`: one input and what becomes of it, as its client follows it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator, Iterator
from typing import Any

from understudy.errors import DeadlineExceeded, RunFailed, StoreUnreachable, UnderstudyError
from understudy.events import Event, ModelCallCompleted, RunFinished
from understudy.messages import Message
from understudy.reads import RunRecord, SessionRecord
from understudy.records import RUN_STATUSES

from . import background
from .client_connection import ClientConnection
from .method import client_method
from .results import RunResult
from .streaming import Streaming

STORE_PAUSE_SECONDS = 0.5
OBSTACLE_SECONDS = 2.0
"""Whoever has waited in vain waits so long at most to hear why."""

LOOK_SECONDS, LONGEST_LOOK_SECONDS = 20.0, 120.0
"""Whoever waits for a run's end looks in the store after so long, later less often: other clusters tell nobody here."""


class Run:
    """One input and what becomes of it: awaitable, iterable, asynchronously iterable."""

    def __init__(
        self, connection: ClientConnection, session_id: str, run_id: str, after: int | None = None,
        output_type: Any = None,
    ) -> None:  # fmt: skip
        self._connection = connection
        self.session_id = session_id
        self.run_id = run_id
        # The session's `seq` before this run was accepted; None where only the store knows whether there is such a run.
        self._after = after
        self._output_type = output_type

    @client_method
    async def result(self, timeout: float | None = None, *, check: bool = False) -> RunResult:
        """Wait for the end, or for a pause: then `status` is `waiting_for_input`, and `pending` must be answered.

        Asked again after the answer, it waits on.

        Args:
            timeout: seconds; None waits as long as it takes.
            check: raise `RunFailed` unless the run completed.

        Raises:
            DeadlineExceeded: the run goes on.
            OutputInvalid: the answer fits the schema of the session's `output_type`, but the type itself refuses it.
            UnknownSession, UnknownRun: there is no such run.
        """
        return await self._result(timeout, check)

    @client_method
    async def cancel(self, reason: str = "cancelled by the client") -> bool:
        """Ask it to end; True if it had not ended."""
        return await self._connection.change(bool, "cancel", self.session_id, self.run_id, reason)

    def __await__(self) -> Generator[Any, None, RunResult]:
        return asyncio.wrap_future(background.submit(self._result(None, False))).__await__()

    def __iter__(self) -> Iterator[Event]:
        """Its events as they are committed, and its answers as they stream (`TextDelta`, `ReasoningDelta`,
        `ToolCallDelta`), until it ends.

        Crashes in between show as events; nothing is missing and nothing comes twice. All deltas of a model call,
        since the last `StreamRestarted`, make up its text, its reasoning, and its tool calls.
        """
        events = self._events()
        try:
            while True:
                try:
                    yield background.wait(_next(events))
                except StopAsyncIteration:
                    return
        finally:
            background.wait(events.aclose())  # type: ignore[attr-defined]

    async def __aiter__(self) -> AsyncIterator[Event]:
        events = self._events()
        try:
            while True:
                try:
                    yield await asyncio.wrap_future(background.submit(_next(events)))
                except StopAsyncIteration:
                    return
        finally:
            await asyncio.wrap_future(background.submit(events.aclose()))  # type: ignore[attr-defined]

    async def _row(self) -> RunRecord:
        return await self._connection.read(RunRecord, "run", self.session_id, self.run_id)

    async def _patient_row(self) -> RunRecord:
        """The same; while the store is away the run waits, and so does who waits for it."""
        while True:
            try:
                return await self._row()
            except StoreUnreachable:
                await asyncio.sleep(STORE_PAUSE_SECONDS)

    async def _obstacle(self) -> str:
        """Why the session does not run, if that is known; empty otherwise."""
        try:
            async with asyncio.timeout(OBSTACLE_SECONDS):
                session = await self._connection.read(SessionRecord, "info", self.session_id)
        except (TimeoutError, UnderstudyError):
            return ""
        return f": {session.error['message']}" if session.error is not None else ""

    async def _result(self, timeout: float | None, check: bool) -> RunResult:
        try:
            async with asyncio.timeout(timeout):
                row = await self._ended()
        except TimeoutError:
            obstacle = await self._obstacle()
            raise DeadlineExceeded(
                f"run {self.run_id} has not ended after {timeout:g} s{obstacle}", session_id=self.session_id
            ) from None
        result = RunResult.of(row, self._output_type)
        if check and not result.ok:
            prompts = "; ".join(item.prompt for item in result.pending)
            message = (result.error or {}).get("message") or prompts or "no reason given"
            raise RunFailed(
                f"run {self.run_id} {'is' if result.pending else 'ended as'} {result.status}: {message}",
                session_id=self.session_id,
                details={"status": result.status, "error": result.error},
            )  # fmt: skip
        return result

    async def _ended(self) -> RunRecord:
        """The run's row, once it has ended or is paused."""
        if self._after is None:
            row = await self._patient_row()
            if row.status in RUN_STATUSES:
                return row
        follow = self._connection.follower.follow(self.session_id, after=self._after or 0, ends=True)
        patience = LOOK_SECONDS
        async with follow as subscription:
            while True:
                try:
                    async with asyncio.timeout(patience):
                        kind, *news = await subscription.queue.get()
                except TimeoutError:
                    row = await self._patient_row()
                    if row.status in RUN_STATUSES:  # another cluster took the store over and ended it there
                        return row
                    patience = min(2 * patience, LONGEST_LOOK_SECONDS)
                    continue
                if kind == "error":
                    raise news[0]
                event, row = news
                mine = event.run_id == self.run_id
                if mine or not isinstance(event, RunFinished):  # its input may be a part of the run that is paused
                    row = row if mine and row is not None else await self._patient_row()
                    if row.status in RUN_STATUSES:  # a question may have been answered meanwhile
                        return row

    async def _events(self) -> AsyncIterator[Event]:
        if self._after is None:
            await self._row()
        streaming = Streaming(self.session_id, self.run_id)
        follow = self._connection.follower.follow(self.session_id, after=self._after or 0, stream=True)
        async with follow as subscription:
            while True:
                kind, *news = await subscription.queue.get()
                if kind == "error":
                    raise news[0]
                if kind == "stream":
                    for delta in streaming.pieces(*news):
                        yield delta
                    continue
                event = news[0]
                if event.run_id != self.run_id:
                    continue
                if isinstance(event, ModelCallCompleted) and (answer := await self._answer(event)) is not None:
                    for delta in streaming.rest(event, answer):
                        yield delta
                yield event
                if isinstance(event, RunFinished):
                    return

    async def _answer(self, event: ModelCallCompleted) -> Message | None:
        """The message right before this event; None where another attempt's answer came first."""
        found = await self._connection.read(list[Message], "messages", self.session_id, event.seq - 2, 1)
        message = found[0] if found else None
        if message is None or (message.seq, message.role, message.run_id) != (event.seq - 1, "assistant", self.run_id):
            return None
        return message

    def __repr__(self) -> str:
        return f"Run({self.session_id!r}, {self.run_id!r})"


async def _next(events: AsyncIterator[Event]) -> Event:
    return await events.__anext__()
