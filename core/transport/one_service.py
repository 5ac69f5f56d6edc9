"""The one node service that a process of its node works for, a gateway or a tool host: the last one that attached."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..errors import ServiceGone
from ..identifiers import new_identifier
from ..waiting import ticks

REPLACED_SECONDS = 10.0
"""A node service is refused whose place another one has taken, unless that one has been silent for so long: several
times as long as services let pass between two signs of life (`understudy.node.service_link.PROBE_SECONDS`)."""


class OneService:
    """Which service that is, and when it was heard of.

    Args:
        what: the process, in messages: `the gateway`.

    Attributes:
        identity: of the process: one that takes its place has another.
        number: names the present attachment; empty before the first.
    """

    def __init__(self, what: str) -> None:
        self.identity = new_identifier()
        self.number = ""
        self._what = what
        self._service = ""
        self._replaced: set[str] = set()
        self._heard = time.monotonic()

    def attach(self, service: str) -> None:
        """Work for a service from now on, and for nobody else: a new `number` names that.

        Raises:
            ServiceGone: another one has taken its place.
        """
        if service in self._replaced and time.monotonic() - self._heard < REPLACED_SECONDS:
            # It was stopped, and goes on: what it does not know is not its to release. Unless it is the other one that
            # should have been refused: what a process said before it died may arrive late, and then no more comes.
            raise ServiceGone("another node service has taken this one's place")
        if service != self._service:
            self._replaced.discard(service)
            self._replaced.add(self._service)
            self._service = service
        self._heard = time.monotonic()
        self.number = new_identifier()

    def require(self, number: str) -> None:
        """Refuse what comes under another attachment than the present one; else the service was heard of. Raises
        `ServiceGone`."""
        if number != self.number:
            raise ServiceGone(f"{self._what} is another one, or has another node service")
        self._heard = time.monotonic()

    async def abandoned(self, seconds: Callable[[], float], look: float) -> None:
        """Return when no service has been heard of for so long.

        Args:
            seconds: how long that is now.
            look: seconds between two looks.
        """
        self._heard = time.monotonic()
        async for stood_still in ticks(look):
            if stood_still:  # what it did not hear tells nothing
                self._heard = time.monotonic()
            if time.monotonic() - self._heard > seconds():
                return
