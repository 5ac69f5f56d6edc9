"""Drains, as the supervisor sees them: begun, taken back, and heeded when the cluster says that a node will go.

What is drained stands in the store, and node services read it there whenever they hear about nodes. So nothing is
kept here that a successor would miss.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from understudy.errors import UnderstudyError
from understudy.identifiers import new_identifier

log = logging.getLogger(__name__)

NOTICE_SECONDS = 600.0
"""For a node that will end at a time which nobody says."""

SPARE_SHARE, LONGEST_SPARE_SECONDS = 0.25, 10.0

Ask = Callable[..., Awaitable[Any]]
Tell = Callable[[], Awaitable[None]]


class Drains:
    """Has nodes drained. The store refuses what would leave nobody to go on.

    Args:
        ask: has a node service answer a client's request.
        tell: has all node services learn what changed.
        nodes: those that have a service.
    """

    def __init__(self, ask: Ask, tell: Tell, nodes: Callable[[], list[str]]) -> None:
        self._ask = ask
        self._tell = tell
        self._nodes = nodes
        self._heeded: set[str] = set()
        self._refused: dict[str, str] = {}

    async def begin(
        self, node_ids: list[str], seconds: float, request_id: str, *, reason: str, stop: bool = False
    ) -> None:  # fmt: skip
        """Drain nodes; they have so many seconds before what is left moves the hard way.

        Args:
            request_id: the same when it is asked again: what was done and taken back is not done a second time.

        Raises:
            CannotDrain: a node has no service, or nobody would be left.
        """
        deadline = time.time_ns() // 1000 + int(seconds * 1e6)
        # Nothing is refused here: where this is a repetition the store knows that it was done.
        await self._ask("request", "begin_drains", node_ids, deadline, reason, stop, self._nodes(), request_id)
        log.warning("drain of %s within %.0f s: %s", ", ".join(node_id[:8] for node_id in node_ids), seconds, reason)
        await self._tell()

    async def undo(self, node_id: str, request_id: str) -> bool:
        """Take a drain back; True if there was one. What moved stays where it is."""
        undone = bool(await self._ask("request", "end_drains", [node_id], request_id))
        await self._tell()
        return undone

    async def heed(self, notices: dict[str, float | None]) -> None:
        """Drain nodes that the cluster will end, once for each.

        Args:
            notices: seconds until then, by node; None where nobody says when.
        """
        for node_id in notices.keys() & set(self._nodes()) - self._heeded:
            self._heeded.add(node_id)
            try:
                seconds, reason = seconds_for(notices[node_id]), "the cluster will end the node"
                await self.begin([node_id], seconds, new_identifier(), reason=reason)
            except (UnderstudyError, TimeoutError) as error:
                self._heeded.discard(node_id)  # the cluster says it again, for as long as it holds
                if self._refused.get(node_id) != str(error):
                    self._refused[node_id] = str(error)
                    log.warning("node %s will end and is not drained yet: %s", node_id[:8], error)


def seconds_for(left: float | None) -> float:
    """How long a node that will end in `left` seconds may be waited for: what moves the hard way needs time as well."""
    if left is None:
        return NOTICE_SECONDS
    return max(0.0, left - min(LONGEST_SPARE_SECONDS, SPARE_SHARE * left))
