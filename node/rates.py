"""Rate limits between the gateway and the supervisor: how this node uses them, and what it may use."""

from __future__ import annotations

import asyncio
import logging

from understudy.errors import ServiceGone
from understudy.rates import RateReport, RateShares

from .gateway_link import GatewayLink

log = logging.getLogger(__name__)

PAUSE_SECONDS = 0.05
"""Changes within so many seconds are reported together."""

FAILED_SECONDS = 1.0


class NodeRates:
    """Follows what the gateway reports, and gives it the node's shares.

    Args:
        changed: set when the supervisor should hear of a report at once (`Supply.changed`).

    Attributes:
        report: the latest one; None before the gateway has made any.
    """

    def __init__(self, link: GatewayLink, changed: asyncio.Event) -> None:
        self.report: RateReport | None = None
        self._link = link
        self._changed = changed
        self._shares: RateShares | None = None

    async def share(self, shares: RateShares) -> RateReport | None:
        """Have the gateway use no more than this; how it uses its limits then. None if there is none now: the next one
        is given its shares when it is there."""
        if self._shares is None or (shares.generation, shares.number) > (
            self._shares.generation,
            self._shares.number,
        ):
            self._shares = shares
        attached = self._link.current
        if attached is None:
            return None
        try:
            self.report = await self._link.gateway.share(attached.number, self._shares)
        except ServiceGone:
            self._link.lost(attached)
            return None
        return self.report

    async def following(self) -> None:
        """Follow the gateway's reports, for as long as the service lives."""
        gateway, seen = "", -1
        while True:
            attached = await self._link.attached()
            try:
                if attached.gateway != gateway:
                    if self._shares is not None:
                        await self._link.gateway.share(attached.number, self._shares)
                    gateway, seen = attached.gateway, -1
                report = await self._link.gateway.rates(attached.number, seen)
            except ServiceGone:
                self._link.lost(attached)
                continue
            except Exception:  # without reports the shares end, and the gateway falls back to an equal part
                log.exception("the gateway's rate limits are not known")
                await asyncio.sleep(FAILED_SECONDS)
                continue
            is_urgent, seen = report.version != seen, report.version
            self.report = report
            if is_urgent and report.uses:
                self._changed.set()
            await asyncio.sleep(PAUSE_SECONDS)
