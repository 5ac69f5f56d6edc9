"""A node service's way to its gateway."""

from __future__ import annotations

import logging
from collections.abc import Callable

from understudy.config import ModelProfile
from understudy.errors import ServiceGone
from understudy.ports import ModelGateway
from understudy.profiles import Profiles
from understudy.protocol import Attached
from understudy.redaction import know
from understudy.waiting import answered_within, is_set_within

from . import service_link
from .service_link import Kill, ServiceLink, never_killed

log = logging.getLogger(__name__)

START_SECONDS = 30.0
"""A service that starts waits so long for its gateway: calls that it does not hear of by then are made again."""


class GatewayLink(ServiceLink[Attached]):
    """Attaches to the gateway, and to its successor when it is gone.

    Args:
        service: what this node service is called, and no other.
        profiles: sent to the gateway, each time.
        found: called, each time, with what the gateway has answered, which names the calls that it has.
    """

    def __init__(
        self,
        gateway: ModelGateway,
        service: str,
        profiles: Profiles,
        found: Callable[[Attached], None],
        kill: Kill = never_killed,
    ) -> None:
        super().__init__("the gateway", kill, always=True)
        self.gateway = gateway
        self._service = service
        self._profiles = profiles
        self._found = found

    async def start(self) -> None:
        """Attach, if the gateway answers in time, and watch it from then on."""
        self._begin()
        if not await is_set_within(self._is_attached, START_SECONDS):
            log.warning("the gateway gives no answer: what it holds is taken for lost")

    async def register(self, profile: ModelProfile) -> None:
        """Tell the gateway of a profile that `profiles` has learned; one that is attached later gets it then."""
        while (attached := self.current) is not None:
            try:
                return await self.gateway.register(attached.number, profile)
            except ServiceGone:
                self.lost(attached)

    async def _attached_to(self) -> Attached:
        """Attach once. In the end each side has the credentials of the other; of two of one name, this one's."""
        sent = self._profiles.all()
        attached = await answered_within(self.gateway.attach(self._service, sent), service_link.SILENCE)
        for profile in attached.profiles:
            if not self._profiles.knows(profile.name):
                know(profile.api_key)
                sent.append(self._profiles.learn(profile))
        while newer := [profile for profile in self._profiles.all() if profile not in sent]:
            for profile in newer:  # learned meanwhile
                await answered_within(self.gateway.register(attached.number, profile), service_link.SILENCE)
            sent += newer
        self._found(attached)
        return attached

    async def _hear(self, attached: Attached) -> None:
        await self.gateway.heard(attached.number)
