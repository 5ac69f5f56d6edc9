"""A node service's way to a service of its own that outlives it, and may die, hang, and be another one afterwards."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from understudy.errors import UnderstudyError
from understudy.tasks import Tasks
from understudy.waiting import answered_within, ticks

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 0.5
"""Seconds between two tries to attach."""

PROBE_SECONDS = 2.0
SILENCE = 10.0
"""A service that is silent for so many seconds is killed: Ray does not see a stopped process for over a minute."""

SILENT_TRIES = 2
"""So is one that did not answer so many tries to attach: the first may have been made while all of this machine stood
still."""

Kill = Callable[[int], Awaitable[None]]
"""Kills a service's process, by its pid; 0 for the one that there is now."""


async def never_killed(_pid: int) -> None:
    """The `Kill` of a node service whose other services are parts of its own process."""


class NoHead:
    """The `ClusterHead` of a node service that is in no cluster."""

    def silence(self) -> float:
        """See `ClusterHead.silence`."""
        return 0.0


class Attachment(Protocol):
    """What a service answers to who attaches to it."""

    @property
    def number(self) -> str: ...
    @property
    def pid(self) -> int: ...


Attached = TypeVar("Attached", bound=Attachment)


class ServiceLink(ABC, Generic[Attached]):
    """Attaches to a service, and to its successor when it is gone.

    Args:
        what: names the service in logs.
        always: attaches to the successor at once; otherwise once somebody needs it.

    Attributes:
        current: the service, unless it was found to be gone.
    """

    def __init__(self, what: str, kill: Kill, *, always: bool) -> None:
        self._what = what
        self._kill = kill
        self._always = always
        self.current: Attached | None = None
        self._is_attached = asyncio.Event()
        self._attaching = False
        self._closed = False
        self._tasks = Tasks(log)

    @abstractmethod
    async def _attached_to(self) -> Attached:
        """Attach once. Raises `TimeoutError` if the service gives no answer."""

    @abstractmethod
    async def _hear(self, attached: Attached) -> None:
        """Have the service answer."""

    def close(self) -> None:
        """Be attached no more: whoever asks for the service is cancelled. It goes on with what it has."""
        self._closed, self.current = True, None
        self._tasks.cancel()
        self._is_attached.set()  # whoever waits for it asks again

    async def attached(self) -> Attached:
        """The service that there is now; waits until there is one."""
        while self.current is None:
            self._begin()
            await self._is_attached.wait()
        return self.current

    def lost(self, attached: Attached) -> None:
        """A call under this attachment failed: whoever goes on attaches first."""
        if self.current is attached:
            self.current = None
            self._is_attached.clear()

    def _begin(self) -> None:
        if self._closed:
            raise asyncio.CancelledError("the service has ended")
        self._tasks.alone("watch", self._watch)
        if not self._attaching:
            self._attaching = True
            self._tasks.spawn(self._attach())

    async def _attach(self) -> None:
        pause, silent = FIRST_PAUSE, 0
        while self.current is None:
            try:
                attached = await self._attached_to()
            except TimeoutError:
                silent += 1
                if silent >= SILENT_TRIES:
                    silent = 0
                    log.warning("%s lets nobody attach: killed, unless it is starting", self._what)
                    await self._try_to_kill(0)
            except UnderstudyError as error:
                silent = 0
                log.info("%s is not there yet: %s", self._what, error)
            except Exception:  # whoever waits for it would wait for ever
                log.exception("%s can't be attached to", self._what)
            else:
                self.current = attached
                self._is_attached.set()
                break
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)
        self._attaching = False

    async def _watch(self) -> None:
        async for _ in ticks(PROBE_SECONDS):
            attached = await self.attached() if self._always else self.current
            if attached is None:
                continue
            try:
                await answered_within(self._hear(attached), SILENCE)
            except TimeoutError:
                log.warning("%s (pid %d) is silent for %.0f s: killed", self._what, attached.pid, SILENCE)
                await self._try_to_kill(attached.pid)
            except UnderstudyError as error:
                log.info("%s is gone: %s", self._what, error)
            except Exception:
                log.exception("%s can't be asked", self._what)
            else:
                continue
            self.lost(attached)

    async def _try_to_kill(self, pid: int) -> None:
        try:
            await self._kill(pid)
        except Exception:
            log.exception("%s can't be killed", self._what)
