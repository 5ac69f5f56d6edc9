"""A supervisor takes over the service, which acts for it from then on, with what is at home here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from understudy.errors import StaleGeneration
from understudy.store.db.session_row import ActiveSession
from understudy.store.operations import activation, draining
from understudy.store.transaction import Transaction
from understudy.supervisor.ports import TakenOver

from .basis import NodeBasis
from .calls import Calls
from .commands import Commands
from .deaths import Deaths
from .draining import Draining
from .frames import Frames
from .notices import Notices
from .paging import Ready
from .projection import Projection
from .timers import Timers

CHUNK = 200
"""So many sessions are looked at before whoever else waits for the event loop gets it."""


class Takeover:
    """Takes over the sessions of this node, and those of lost nodes that fall to it."""

    def __init__(
        self, node: NodeBasis, frames: Frames, calls: Calls, deaths: Deaths, draining: Draining, notices: Notices,
        timers: Timers, projection: Projection, commands: Commands,
    ) -> None:  # fmt: skip
        self._node = node
        self._frames = frames
        self._paging = frames.paging
        self._calls = calls
        self._deaths = deaths
        self._draining = draining
        self._notices = notices
        self._timers = timers
        self._projection = projection
        self._commands = commands
        self._begun = self._done = (0, 0)

    async def run(self, generation: int, number: int, nodes: list[str]) -> TakenOver:
        """Act for this generation: resume what is at home here and in no frame. Harmless when repeated.

        Which frames live is not said: it would be old when it arrives. The supervisor hears of all that are named here
        (`demand`), and tells of those that are dead.

        Args:
            number: rises with each that a supervisor sends. What was overtaken, or comes again when it is done, is
                dropped.
            nodes: those that have a node service, this one included; sessions of others get a new home (`adopt`). They
                do not change within a generation.

        Raises:
            StaleGeneration: another supervisor owns the store, or this node is not one of `nodes` any more.
        """
        home = self._node.config.node_id
        if (generation, number) < self._begun or (generation, number) <= self._done:
            return TakenOver()
        if home not in nodes:
            raise StaleGeneration(f"node {home[:8]} was given up")
        self._begun = generation, number
        self._node.journal.generation = generation
        self._node.supervisor_heard = time.monotonic()
        if self._node.homes.nodes != nodes:
            self._node.homes.learn_nodes(nodes)
            self._projection.nodes_changed()
        try:
            with self._frames.known.reading():
                found = await self._take_over(home, nodes)
        except BaseException:
            if self._begun == (generation, number):
                self._node.journal.generation = 0  # so that the supervisor sees that it must say it again
                self._frames.supply.changed.set()
            raise
        self._done = max(self._done, (generation, number))
        self._frames.dispatch()
        self._frames.supply.changed.set()
        return found

    async def _take_over(self, home: str, nodes: list[str]) -> TakenOver:
        adopted = await self.adopt(home, nodes)
        await self._notices.tell_homes()
        rows, resumed = await self._node.reading.active([home]), 0
        async for row in in_chunks(rows):
            resumed += await self._take_over_session(row)
        await self._timers.look()
        await self._timers.look_at_schedules()
        self._commands.nodes_learned()
        return TakenOver(len(rows), resumed, len(adopted))

    async def adopt(self, home: str, nodes: list[str]) -> list[str]:
        """Take this node's share of what has no home, and learn which nodes are drained."""
        generation = self._node.generation

        def operation(tx: Transaction) -> tuple[list[str], dict[str, draining.Drain]]:
            # While it waited the next generation may have begun: then `nodes` lacks those that have joined since.
            if tx.generation != generation:
                raise StaleGeneration(f"generation {generation} is over")
            return activation.adopt(tx, home, nodes), draining.drains(tx)

        adopted, drains = await self._node.journal.submit(operation)
        self._draining.learn(drains)
        return adopted

    async def _take_over_session(self, row: ActiveSession) -> int:
        session_id, frame_id, assignments = row.session_id, row.frame_id, self._frames.assignments
        if self._frames.holder(row) is not None:
            return 0
        # What was adopted from a node that is no more, or from another cluster, has no pid any more.
        if frame_id is not None and (row.actor_pid is None or frame_id in self._frames.known.buried):
            await self._deaths.crashed_unseen(row)
            return 1
        # Also if somebody is about to deal with the session: a request that is repeated does nothing with it.
        if frame_id is not None and frame_id not in self._paging.slots:
            self._frames.known.expect(row)
        elif session_id in assignments.under_way and frame_id is None and self._calls.is_ready(row):
            assignments.queue(Ready.of(row, "takeover"))
        elif not assignments.is_placed(session_id) and (frame_id is not None or self._calls.is_ready(row)):
            self._paging.add(Ready.of(row, "takeover"))
        return 0


async def in_chunks(rows: list[ActiveSession]) -> AsyncIterator[ActiveSession]:
    """The rows; now and then everybody else has a turn in between."""
    for number, row in enumerate(rows, 1):
        yield row
        if number % CHUNK == 0:
            await asyncio.sleep(0)
