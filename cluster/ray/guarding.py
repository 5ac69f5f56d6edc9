"""Replacing a supervisor that hangs: the node service on its machine sees to it."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from understudy.errors import UnderstudyError
from understudy.tasks import Tasks
from understudy.waiting import answered_within, ticks

log = logging.getLogger(__name__)

SUPERVISOR_NUDGE = 3.0
SUPERVISOR_SILENCE = 12.0


class SupervisorGuard:
    """Nudges a supervisor that is not heard of for `SUPERVISOR_NUDGE` seconds, and kills one of this Ray node that is
    silent for `SUPERVISOR_SILENCE`: Ray does not see a stopped process for over a minute.

    Args:
        owner: who supervises, as the store says; None if that is not known.
        pid_here: the pid of that process, if it is on this Ray node and lives; else 0.
        kill: kills a supervisor, by its pid, that has been silent for so many seconds.
        nudge: makes a supervisor work that was restarted.
    """

    def __init__(
        self,
        owner: Callable[[], Awaitable[str | None]],
        pid_here: Callable[[str], int],
        kill: Callable[[int, float], Awaitable[None]],
        nudge: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self._ask_owner = owner
        self._pid_here = pid_here
        self._kill = kill
        self._nudge = nudge
        self._owner, self._owner_since = "", 0.0
        self._heard = time.monotonic()
        self._tasks = Tasks(log)

    def heard(self) -> None:
        """The supervisor has called."""
        self._heard = time.monotonic()

    async def run(self) -> None:
        """Watch for good. While this process stands still it hears nothing, and that tells nothing."""
        async for stood_still in ticks(1.0):
            if stood_still:
                self.heard()
            silent = time.monotonic() - self._heard
            if silent > SUPERVISOR_NUDGE:
                self._tasks.alone("nudge", self._nudge)  # while Ray's head is away it takes a minute
                await self._learn_owner()
            known = time.monotonic() - self._owner_since  # one that has just begun has not called here yet
            if silent > SUPERVISOR_SILENCE and known > SUPERVISOR_SILENCE - SUPERVISOR_NUDGE:
                pid = self._pid_here(self._owner)
                if pid:
                    await self._kill(pid, silent)

    async def _learn_owner(self) -> None:
        """Who supervises says the store: no memory of this process is needed for it, which may be younger."""
        try:
            owner = await answered_within(self._ask_owner(), SUPERVISOR_NUDGE)
        except (TimeoutError, UnderstudyError) as error:
            log.info("who supervises is not known: %s", error or type(error).__name__)
            return
        if owner is not None and owner != self._owner:
            self._owner, self._owner_since = owner, time.monotonic()
