"""Sessions that wait for a frame here go to a node that has one."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any

from understudy.errors import UnderstudyError
from understudy.placement import is_scarce
from understudy.store.operations import draining
from understudy.store.transaction import Transaction

from .basis import NodeBasis
from .draining import AT_ONCE
from .frames import Frames
from .paging import Ready
from .specifications import Specifications
from .tool_servers import ToolServers
from .tool_tasks import ToolTasks

log = logging.getLogger(__name__)

REMEMBERED = 100
"""So many requests are known when they come again, which they do within seconds."""

MOST_BOUND = 10_000
"""So many sessions are remembered that stay because of their files: they need not be read again each time."""


class Sharing:
    """Gives ready sessions away. Those that stay keep their turn.

    Guarantees: a session that goes is in no frame, and no tool and no model call of it is under way, so nothing is
    interrupted or done again. One that may have something here that it comes back to stays, unless nothing of its tree
    has begun: a workspace is a directory of its node, and an MCP server a process.
    """

    def __init__(
        self, node: NodeBasis, frames: Frames, specifications: Specifications, tasks: ToolTasks,
        tool_servers: ToolServers,
    ) -> None:  # fmt: skip
        self._node = node
        self._frames = frames
        self._specifications = specifications
        self._tasks = tasks
        self._tool_servers = tool_servers
        self._bound: set[str] = set()
        self._given: OrderedDict[str, int] = OrderedDict()

    async def give(self, count: int, node_id: str, request_id: str) -> int:
        """Have up to `count` sessions go to a node, those that have waited longest; returns how many did.

        Args:
            request_id: the same when it is asked again: then no others go.
        """
        if request_id in self._given:
            return self._given[request_id]
        self._given[request_id] = 0
        while len(self._given) > REMEMBERED:
            self._given.popitem(last=False)
        homes = self._node.homes
        if not self._node.activates or homes.is_drained or node_id == homes.here or node_id not in homes.available:
            return 0
        chosen = [ready for ready in self._frames.paging.ready.values() if self._may_go(ready)]
        moved = 0
        for start in range(0, len(chosen), AT_ONCE):
            moved += await self._send(chosen[start : start + AT_ONCE], node_id, count - moved)
            self._given[request_id] = moved
            if moved >= count:
                break
        return moved

    def _may_go(self, ready: Ready) -> bool:
        """One whose process died has its turn before others anyway; frames that ask for resources are anywhere."""
        return not (ready.interrupted or ready.session_id in self._bound or is_scarce(ready.placement))

    async def _send(self, chosen: list[Ready], node_id: str, count: int) -> int:
        # They stay queued until this is committed: who is given a frame meanwhile does not go, and whose activation
        # comes after the move is refused.
        def operation(tx: Transaction) -> list[str]:
            tx.load(ready.session_id for ready in chosen)
            left: list[str] = []
            for ready in chosen:
                if len(left) < count and self._leave(tx, ready, node_id):
                    left.append(ready.session_id)
            return left

        try:
            left = await self._node.journal.submit(operation)
        except UnderstudyError as error:
            log.info("nothing goes to node %s: %s", node_id[:8], error)
            return 0
        for session_id in left:
            self._frames.paging.remove(session_id)
        return len(left)

    def _leave(self, tx: Transaction, ready: Ready, node_id: str) -> bool:
        row = tx.find(ready.session_id)
        if row is None or row.frame_id is not None or row.wait is not None or ready.epoch not in (0, row.epoch):
            return False
        if self._tasks.may_be_at_work(row) or self._tool_servers.may_be_at_work(tx, row):
            return False
        begun = row.epoch > 0 or row.parent_id is not None or row.pruned_seq > 0  # a fork's files are its original's
        if begun and _is_bound(self._specifications.within(tx, row.session_id)):
            if len(self._bound) >= MOST_BOUND:
                self._bound.clear()
            self._bound.add(ready.session_id)
            return False
        return draining.leave(tx, row, self._node.homes.here, [node_id])


def _is_bound(spec: dict[str, Any]) -> bool:
    """Whether an agent may leave something on its node that it comes back to: files, its sub-agents' or those of the
    agents that it may hand off to, or what an MCP server remembers for its session or tree."""
    servers = spec.get("mcp_servers") or ()
    if (
        spec.get("workspace") is not None
        or "worktree" in spec
        or any(one["command"] and one["share"] != "node" for one in servers)
    ):
        return True
    others = (*(spec.get("agents") or {}).values(), *(spec.get("handoffs") or {}).values())
    return any(map(_is_bound, others))
