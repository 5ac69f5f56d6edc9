"""The rate limits of all profiles of a gateway: what it reports of them, and the shares that it is given."""

from __future__ import annotations

import asyncio
import time

from understudy.config import ModelProfile
from understudy.rates import LEASE_SECONDS, RateReport, RateShares
from understudy.waiting import is_set_within

from .admission import Admission

REPORT_SECONDS = 2.0
"""A report that nothing has changed in is made so often: shares are valid for a time from the report that they
answer."""


class Limits:
    """Admissions by profile. They outlast a profile that is replaced: its endpoint counts on."""

    def __init__(self) -> None:
        self._admissions: dict[str, Admission] = {}
        self._version = 0
        self._changed = asyncio.Event()
        self._shares: tuple[int, int] = (0, 0)
        self._nodes = 1

    def update(self, profile: ModelProfile) -> None:
        """Learn a profile."""
        self.of(profile.name).update(profile)

    def of(self, name: str) -> Admission:
        """The turns of a profile."""
        admission = self._admissions.get(name)
        if admission is None:
            admission = self._admissions[name] = Admission(name, self._urgent)
            admission.shared_by(self._nodes)
        return admission

    def share(self, shares: RateShares) -> None:
        """Use these shares from now on, unless they are older than those in use."""
        if (shares.generation, shares.number) <= self._shares:
            return
        self._shares, self._nodes = (shares.generation, shares.number), max(1, shares.nodes)
        for admission in self._admissions.values():
            admission.shared_by(self._nodes)
        for share in shares.shares:
            self.of(share.profile).set_share(share, shares.at + LEASE_SECONDS)
        for admission in self._admissions.values():
            admission.dispatch()

    def report(self) -> RateReport:
        """How the limits are used now."""
        uses = [use for admission in self._admissions.values() for use in admission.uses()]
        waiting = {name: admission.waiting for name, admission in self._admissions.items()}
        return RateReport(self._version, time.monotonic(), self._shares, uses, waiting)

    async def reported(self, seen: int) -> RateReport:
        """The same, once there is something that others should know at once, or now and then.

        Args:
            seen: the version of the report before.
        """
        if self._version == seen:
            self._changed.clear()
            await is_set_within(self._changed, REPORT_SECONDS)
        return self.report()

    def _urgent(self) -> None:
        self._version += 1
        self._changed.set()
