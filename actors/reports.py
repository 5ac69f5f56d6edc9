"""What tools report while they run: progress and events of their own, on the way into the activation's draft."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import Any

from msgspec.structs import replace

from understudy.errors import ToolError
from understudy.events import CustomEvent, ToolProgress
from understudy.json_text import from_json, to_json, with_texts
from understudy.messages import encodable
from understudy.records import CallState
from understudy.tool_tasks import Report

from .execution import presentable

PROGRESS_SECONDS = 0.5
"""Of what a call says of its progress within so many seconds the latest is committed."""

TEXT_CHARACTERS = 500
"""So much of a progress text is kept."""

NAME_CHARACTERS = 100
MOST_EVENTS, MOST_BYTES = 1_000, 1 << 20
"""So many events of its own one execution of a call may have, and so many bytes of JSON in all of them: each is a row
of the session's log."""


class CallReports:
    """What one call has reported and nobody has taken yet. The tool may be in a thread of its own."""

    def __init__(self, call: CallState, all_of: Reports) -> None:
        self._of: dict[str, Any] = {"call_id": call.call_id, "tool": call.tool}
        self._all = all_of
        self._lock = threading.Lock()
        self._waiting: list[Report] = []
        self._count = self._bytes = 0
        self._progress_at = 0.0
        self._ended = False

    def progress(self, fraction: float | None, text: str) -> None:
        """See `ToolContext.progress`."""
        if fraction is not None:
            if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or fraction != fraction:
                raise ToolError(f"progress: the fraction must be a number from 0 to 1, or None; it is {fraction!r}")
            fraction = min(1.0, max(0.0, float(fraction)))
        self.pass_on(ToolProgress(fraction=fraction, text=str(text), **self._of))

    def emit(self, name: str, data: Any) -> None:
        """See `ToolContext.emit`."""
        if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARACTERS:
            raise ToolError(f"emit: the name must be a text of 1 to {NAME_CHARACTERS} characters; it is {name!r:.200}")
        try:
            text = to_json(data)
            data = _presentable(from_json(text))
        except (TypeError, ValueError, RecursionError) as error:
            raise ToolError(f"emit: the data of {name!r} is not JSON: {error}") from None
        with self._lock:
            if self._ended:
                raise ToolError(f"emit: the call has its result; the event {name!r} comes too late")
            if self._count >= MOST_EVENTS or self._bytes + len(text) > MOST_BYTES:
                raise ToolError(
                    f"emit: one call may have {MOST_EVENTS} events with {MOST_BYTES} bytes of data in all; the event "
                    f"{name!r} is too much. Emit fewer or smaller ones, or write the data to a file."
                )
            self._count += 1
            self._bytes += len(text)
            self._waiting.append(CustomEvent(name=presentable(name), data=data, **self._of))
        self._all.changed()

    def pass_on(self, report: Report) -> None:
        """Take a report as it is. Of progress only the latest waits; once the call has ended nothing is taken."""
        with self._lock:
            if self._ended:
                return
            is_news = True
            if isinstance(report, ToolProgress):
                before = len(self._waiting)
                self._waiting = [other for other in self._waiting if not isinstance(other, ToolProgress)]
                is_news = len(self._waiting) == before
            self._waiting.append(report)
        if is_news:
            self._all.changed()

    def wait(self, now: float) -> float | None:
        """Seconds until there is something to take; None if nothing waits."""
        with self._lock:
            if any(isinstance(event, CustomEvent) for event in self._waiting):
                return 0.0
            return max(0.0, self._progress_at - now) if self._waiting else None

    def take(self, now: float, *, end: bool = False) -> list[Report]:
        """What may be committed now, in order.

        Args:
            end: all of it, and nothing comes after it.
        """
        with self._lock:
            self._ended = self._ended or end
            due = end or now >= self._progress_at
            taken = [event for event in self._waiting if due or isinstance(event, CustomEvent)]
            self._waiting = [] if due else [event for event in self._waiting if isinstance(event, ToolProgress)]
            if any(isinstance(event, ToolProgress) for event in taken):
                self._progress_at = now + PROGRESS_SECONDS
        return [_shown(event) for event in taken]


class Reports:
    """What the calls of an activation report."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: dict[str, CallReports] = {}
        self._due: asyncio.Future[None] | None = None
        self._later: asyncio.TimerHandle | None = None

    def of(self, call: CallState) -> CallReports:
        """The reports of a call that is about to be executed."""
        reports = self._calls[call.call_id] = CallReports(call, self)
        return reports

    def end(self, call_id: str) -> list[Report]:
        """What a call has reported and was not taken; its result comes next, and nothing else of it."""
        reports = self._calls.pop(call_id, None)
        return reports.take(time.monotonic(), end=True) if reports is not None else []

    def due(self) -> asyncio.Future[None]:
        """Done when there is something to take."""
        if self._due is None or self._due.done():
            self._due = self._loop.create_future()
            if self._calls:
                self._look()
        return self._due

    def take(self) -> list[Report]:
        """What may be committed now."""
        now = time.monotonic()
        return [event for reports in self._calls.values() for event in reports.take(now)]

    def changed(self) -> None:
        """A call, perhaps in a thread, has reported something."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None
        if self._due is None or self._due.done():
            return
        now = time.monotonic()
        waits = [wait for reports in self._calls.values() if (wait := reports.wait(now)) is not None]
        if not waits:
            return
        if min(waits) <= 0:
            self._due.set_result(None)
        else:
            self._later = self._loop.call_later(min(waits), self._look)


def _shown(event: Report) -> Report:
    """An event as it may be committed. Most of what a tool says of its progress never is, and needs no look."""
    if isinstance(event, CustomEvent):
        return event
    return replace(event, text=presentable(event.text)[:TEXT_CHARACTERS])


def _presentable(value: Any) -> Any:
    """JSON data without secrets in any text, as every store can keep it."""
    return with_texts(value, presentable, encodable)
