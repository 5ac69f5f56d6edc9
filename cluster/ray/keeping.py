"""The secrets of the services' settings go from process to process: each has them in memory, and asks others for them.

Whoever connects gives them to the supervisor. From there on each service asks those that may have them when it begins:
a node service that Ray has restarted its gateway, the supervisor, and services of other nodes. Only when all of these
have died at once there is nobody to ask, until somebody connects again.

Whoever can call actors of this Ray cluster can ask as well: Ray's token, or its network, is the boundary.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from contextlib import suppress
from typing import Any

from understudy.config import Settings
from understudy.errors import StorePasswordMissing
from understudy.redaction import know, passwords
from understudy.secrets import STORE, Secrets, complete
from understudy.telemetry import header_values
from understudy.waiting import answered_within

from .names import keepers_among
from .ray_edge import actor_names, find_actor, result_of, submitted

log = logging.getLogger(__name__)

SEEK_SECONDS = 3.0
"""So long a service that begins asks the others before it says that it waits."""

ANSWER_SECONDS = 1.0
PAUSES = 0.1, 1.0
"""Seconds between two rounds of questions, at first and at most."""

ASKED_AT_ONCE = 8
WARN_SECONDS = 60.0


class SecretKeeper:
    """What one process of the services knows.

    Args:
        settings: of the services, without secrets.
        name: of its actor.
        node_id: of its node; empty for the supervisor, which may be anywhere.
    """

    def __init__(self, settings: Settings, name: str, node_id: str = "") -> None:
        self._settings = settings
        self._name = name
        self._node_id = node_id
        self._refused: list[Secrets] = []
        self.known: Secrets | None = None

    def learn(self, secrets: Secrets) -> None:
        """From now on these are the secrets."""
        know(*passwords(secrets.store), *header_values(secrets.telemetry))
        self.known = secrets

    async def settings(self) -> Settings:
        """The settings, with the secrets unless nobody has them."""
        if self.known is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(SEEK_SECONDS):
                    await self.seek()
        return complete(self._settings, self.known) if self.known is not None else self._settings

    async def whole(self, refused: bool) -> Settings:
        """The settings with their secrets.

        Args:
            refused: the store did not accept those that were known: others are looked for, which somebody may have
                given since.

        Raises:
            StorePasswordMissing: nobody has the store's password. Without other secrets a service does begin.
        """
        if refused and self.known is not None:
            self._refused.append(self.known)
            other = await self._asked()
            if other is not None:
                self.learn(other)
            else:  # perhaps the server was wrong
                self._refused.clear()
        settings = await self.settings()
        if STORE in settings.withheld:
            raise StorePasswordMissing(
                f"no service has the password of {settings.store} any more: it is kept in memory only, and all of them "
                "have died at once"
            )
        if settings.withheld and self.known is None:
            log.warning("nobody has the secrets in %s: going on without", ", ".join(settings.withheld))
        return settings

    async def seek(self) -> None:
        """Ask the other services, until one of them has the secrets."""
        pause, longest = PAUSES
        began, warned = time.monotonic(), -WARN_SECONDS
        while self._settings.withheld and self.known is None:
            found = await self._asked()
            if found is not None:
                log.info("the secrets of other services came within %.0f ms", 1000 * (time.monotonic() - began))
                self.learn(found)
                return
            now = time.monotonic()
            if now - began > SEEK_SECONDS and now - warned > WARN_SECONDS:
                warned = now
                log.warning("waiting for somebody who has the secrets in %s", ", ".join(self._settings.withheld))
            await asyncio.sleep(pause)
            pause = min(longest, 2 * pause)

    async def _asked(self) -> Secrets | None:
        """Ask some of those who may know; of many, others each time."""
        try:
            names = keepers_among(await asyncio.to_thread(actor_names), self._settings.instance)
        except Exception as error:  # Ray's head is away
            log.info("nobody can be asked for secrets: %s", error)
            return None
        names.discard(self._name)
        near = {name for name in names if name.count("/") == 1 or name.endswith(f"/{self._node_id}")}
        others = random.sample(sorted(names - near), min(ASKED_AT_ONCE, len(names - near)))
        for some in (sorted(near), others):
            asked = [asyncio.ensure_future(self._ask(name)) for name in some]
            try:
                for answer in asyncio.as_completed(asked):
                    found = await answer
                    if found is not None and found not in self._refused:
                        return found
            finally:
                for question in asked:
                    question.cancel()
        return None

    async def _ask(self, name: str) -> Secrets | None:
        try:
            handle = await asyncio.to_thread(find_actor, name)
            if handle is None:
                return None
            found: Any = await answered_within(result_of(submitted(handle.secrets.remote)), ANSWER_SECONDS)
        except Exception as error:  # it has just died as well, or Ray's head is away
            log.info("%s does not tell the secrets: %s", name.partition("/")[0], error or "no answer")
            return None
        return found if isinstance(found, Secrets) else None
