"""What a node service's process does on SIGTERM: its node is drained first, if somebody else can go on."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any

from understudy.errors import ServiceGone, UnderstudyError
from understudy.identifiers import new_identifier
from understudy.node.hosting import NodeHost

from .ray_edge import on_sigterm, result_of, submitted

log = logging.getLogger(__name__)

GRACE_SECONDS = 20.0
"""How long sessions are waited for after SIGTERM: whoever sends one kills after 30 s as a rule."""

ASK_SECONDS = 5.0


class Farewell:
    """Turns SIGTERM into a drain of the node, and then into the end of the process."""

    def __init__(self, node_id: str, host: NodeHost, supervisor: Callable[[], Any]) -> None:
        self._node_id = node_id
        self._host = host
        self._supervisor = supervisor
        self._loop: asyncio.AbstractEventLoop | None = None
        self._leaving = False
        self._task: asyncio.Task[None] | None = None
        on_sigterm(self._terminated)

    def attend(self) -> None:
        """From now on there is a service to drain; called on its event loop."""
        self._loop = asyncio.get_running_loop()

    def _terminated(self) -> None:
        if self._loop is None or self._leaving:  # nothing to drain, or a second signal
            os._exit(1)
        self._leaving = True
        self._loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._leave())

    async def _leave(self) -> None:
        try:
            handle = await asyncio.to_thread(self._supervisor)
            if handle is None:
                raise ServiceGone("there is no supervisor")
            wanted = ([self._node_id], GRACE_SECONDS, "SIGTERM", False, new_identifier())
            asked = submitted(lambda: handle.drain.remote(*wanted))
            await asyncio.wait_for(result_of(asked), ASK_SECONDS)
            draining = (await self._host.node()).draining
            async with asyncio.timeout(GRACE_SECONDS + ASK_SECONDS):
                await draining.until_finished()
        except (TimeoutError, UnderstudyError) as error:
            log.warning("this node service ends without a drain: %s", error)
        finally:
            os._exit(1)
