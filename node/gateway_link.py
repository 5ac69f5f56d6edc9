"""A node service's way to its gateway, which may die, hang, and be another one afterwards."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from understudy.config import ModelProfile
from understudy.errors import ServiceGone, UnderstudyError
from understudy.ports import ModelGateway
from understudy.profiles import Profiles
from understudy.protocol import Attached
from understudy.redaction import know
from understudy.tasks import Tasks
from understudy.waiting import answered_within, is_set_within, ticks

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 0.5
"""Seconds between two tries to attach."""

START_SECONDS = 30.0
"""A service that starts waits so long for its gateway: calls that it does not hear of by then are made again."""

PROBE_SECONDS = 2.0
SILENCE = 10.0
"""A gateway that is silent for so many seconds is killed: Ray does not see a stopped process for over a minute."""

SILENT_TRIES = 2
"""So is one that did not answer so many tries to attach: the first may have been made while all of this machine stood
still."""

Kill = Callable[[int], Awaitable[None]]
"""Kills a gateway's process, by its pid; 0 for the one that there is now."""


async def never_killed(_pid: int) -> None:
    """The `Kill` of a service whose gateway is a part of its own process."""


class GatewayLink:
    """Attaches to the gateway, and does so anew when it is gone.

    Args:
        service: what this node service is called, and no other.
        profiles: what the gateway is told, each time.
        found: told, each time, of the calls that the gateway has.

    Attributes:
        current: the gateway, unless it was found to be gone.
    """

    def __init__(
        self,
        gateway: ModelGateway,
        service: str,
        profiles: Profiles,
        found: Callable[[Attached], None],
        kill: Kill = never_killed,
    ) -> None:
        self.gateway = gateway
        self._service = service
        self._profiles = profiles
        self._found = found
        self._kill = kill
        self.current: Attached | None = None
        self._is_attached = asyncio.Event()
        self._attaching = False
        self._closed = False
        self._tasks = Tasks(log)

    async def start(self) -> None:
        """Attach, if the gateway answers in time, and watch it from then on."""
        self._tasks.alone("watch", self._watch)
        self._begin()
        if not await is_set_within(self._is_attached, START_SECONDS):
            log.warning("the gateway gives no answer: what it holds is taken for lost")

    def close(self) -> None:
        """Be attached no more: whoever asks for the gateway is cancelled. It goes on with what it has."""
        self._closed, self.current = True, None
        self._tasks.cancel()
        self._is_attached.set()  # whoever waits for it asks again

    async def attached(self) -> Attached:
        """The gateway that there is now; waits until there is one."""
        while self.current is None:
            self._begin()
            await self._is_attached.wait()
        return self.current

    def lost(self, attached: Attached) -> None:
        """A call under this attachment failed: whoever goes on attaches first."""
        if self.current is attached:
            self.current = None
            self._is_attached.clear()

    async def register(self, profile: ModelProfile) -> None:
        """Tell the gateway of a profile that `profiles` has learned; one that is attached later is told then."""
        while (attached := self.current) is not None:
            try:
                return await self.gateway.register(attached.number, profile)
            except ServiceGone:
                self.lost(attached)

    def _begin(self) -> None:
        if self._closed:
            raise asyncio.CancelledError("the service has ended")
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
                    log.warning("the gateway lets nobody attach: killed, unless it is starting")
                    await self._try_to_kill(0)
            except UnderstudyError as error:
                silent = 0
                log.info("there is no gateway yet: %s", error)
            except Exception:  # whoever waits for it would wait for ever
                log.exception("the gateway can't be attached to")
            else:
                self.current = attached
                self._is_attached.set()
                break
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)
        self._attaching = False

    async def _attached_to(self) -> Attached:
        """Attach once. In the end each side has the credentials of the other; of two of one name, this one's."""
        told = self._profiles.all()
        attached = await answered_within(self.gateway.attach(self._service, told), SILENCE)
        for profile in attached.profiles:
            if not self._profiles.knows(profile.name):
                know(profile.api_key)
                told.append(self._profiles.learn(profile))
        while newer := [profile for profile in self._profiles.all() if profile not in told]:
            for profile in newer:  # learned meanwhile
                await answered_within(self.gateway.register(attached.number, profile), SILENCE)
            told += newer
        self._found(attached)
        return attached

    async def _watch(self) -> None:
        async for _ in ticks(PROBE_SECONDS):
            attached = await self.attached()
            try:
                await answered_within(self.gateway.heard(attached.number), SILENCE)
            except TimeoutError:
                log.warning("the gateway (pid %d) is silent for %.0f s: killed", attached.pid, SILENCE)
                await self._try_to_kill(attached.pid)
            except UnderstudyError as error:
                log.info("the gateway is gone: %s", error)
            except Exception:
                log.exception("the gateway can't be asked")
            else:
                continue
            self.lost(attached)

    async def _try_to_kill(self, pid: int) -> None:
        try:
            await self._kill(pid)
        except Exception:
            log.exception("the gateway can't be killed")
