"""Tasks in the background of whoever owns them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any


class Tasks:
    """Runs coroutines in the background. One that fails is logged; nobody awaits it.

    Args:
        log: of the owner.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._all: set[asyncio.Task[Any]] = set()
        self._alone: dict[Any, asyncio.Task[Any]] = {}

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter(list(self._all))

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something until it ends, or all are cancelled."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._all.add(task)
        task.add_done_callback(self._done)
        return task

    def alone(self, what: Any, begin: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        """Have something done that may take long, unless it is under way: nothing else may wait for it."""
        if what not in self._alone:
            task = self._alone[what] = self.spawn(begin(*arguments))
            task.add_done_callback(lambda done: self._alone.get(what) is done and self._alone.pop(what))

    def under_way(self, what: Any) -> bool:
        """Whether `what` is being done (`alone`)."""
        return what in self._alone

    def over(self, what: Any) -> asyncio.Task[Any]:
        """From now on `what` is not under way any more, and may begin again; the task goes on."""
        return self._alone.pop(what)

    def drop_alone(self) -> None:
        """Cancel whatever is being done alone."""
        found, self._alone = list(self._alone.values()), {}
        for task in found:
            task.cancel()

    def cancel(self) -> None:
        """Cancel all of them."""
        for task in self._all:
            task.cancel()

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._all.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._log.error("a background task failed", exc_info=task.exception())
