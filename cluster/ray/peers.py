"""How a node service reaches those of other nodes."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from understudy.config import Settings
from understudy.errors import ServiceGone, UnderstudyError
from understudy.protocol import News, packed

from .names import node_name
from .ray_edge import find_actor, result_of, submitted

log = logging.getLogger(__name__)

TELL_SECONDS = 10.0


class Peers:
    """The other node services of the cluster."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._handles: dict[str, Any] = {}

    async def tell(self, node_id: str, news: News) -> None:
        """Tell a node's service that sessions at home there were written here. A notice that fails is not repeated."""
        try:
            if node_id not in self._handles:
                self._handles[node_id] = await asyncio.to_thread(
                    find_actor, node_name(self._settings.instance, node_id)
                )
            handle = self._handles[node_id]
            if handle is None:
                raise ServiceGone("it has no service")
            sent = packed(news)
            call = result_of(submitted(lambda: handle.repeated.remote("", "notice", sent)))
            await asyncio.wait_for(call, TELL_SECONDS)
        except (TimeoutError, UnderstudyError) as error:
            self._handles.pop(node_id, None)
            log.info("node %s was not notified of %d sessions: %s", node_id[:8], len(news.sessions), error)
