"""The drain of this node: its sessions finish their tools or model call, commit, and go on at other nodes."""

from __future__ import annotations

import asyncio
import logging

from understudy.errors import Fenced, StaleGeneration, UnderstudyError
from understudy.estimates import estimate_tokens
from understudy.messages import Usage
from understudy.protocol import Exit
from understudy.records import ActivationId, Batch
from understudy.store.db.engine import now
from understudy.store.db.session_row import ActiveSession
from understudy.store.operations import activation, batches, draining
from understudy.store.transaction import Transaction
from understudy.waiting import is_set_within

from .basis import NodeBasis
from .calls import Calls
from .claims import Claims
from .departures import Departure, leaving
from .frames import Frames
from .interrupts import Interrupts
from .paging import Slot
from .tool_servers import ToolServers
from .tool_tasks import ToolTasks

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.2
"""How often it is looked who can leave, besides at once when something has happened."""

AT_ONCE = 16
"""Sessions that leave in one transaction: the first ones must not wait for the last."""


class Draining:
    """Moves the sessions of a node that is drained. The store says which nodes are, and until when.

    Guarantees: before the deadline no tool is interrupted, and no model call is made again but one that waits for the
    verdict of a hook whose process has died (docs/guarantees.md, What is not promised); a session that moves was
    fenced here in the same transaction, so it acts at one node at a time; a move is no death.
    """

    def __init__(
        self, node: NodeBasis, frames: Frames, calls: Calls, claims: Claims, interrupts: Interrupts, tasks: ToolTasks,
        tool_servers: ToolServers,
    ) -> None:  # fmt: skip
        self._node = node
        self._homes = node.homes
        self._frames = frames
        self._calls = calls
        self._claims = claims
        self._interrupts = interrupts
        self._tasks = tasks
        self._tool_servers = tool_servers
        self._looks = False
        self._news = asyncio.Event()
        self._finished = asyncio.Event()

    async def until_finished(self) -> None:
        """Wait until this node is drained and has nothing left."""
        await self._finished.wait()

    def learn(self, drains: dict[str, draining.Drain]) -> None:
        """Which nodes are drained, as the store says."""
        self._homes.learn_drains(drains)
        if self._homes.drain is None:
            self._finished.clear()
        elif self._homes.drain.finished_at:
            self._finished.set()
        if self._homes.drain is not None and not self._looks:
            self._looks = True
            self._node.spawn_task(self._looking())
        self.look()

    def look(self) -> None:
        """Something has happened: somebody may be able to leave."""
        self._news.set()

    def leave_frame(self, tx: Transaction, held: ActivationId, *, forced: bool = False, at_work: bool = False) -> bool:
        """As a part of any operation, while this node is drained: take a session from its frame, unless it is in
        another one by now, and give it away; False if it needs no other home.

        Args:
            forced: its process may be at work.
            at_work: other processes may execute calls of it.
        """
        row = tx.find(held.session_id)
        if row is None or row.activation != held:
            return False
        activation.park(tx, held)
        left = self._node.homes.is_drained and draining.leave(
            tx, row, self._homes.here, self._homes.available, forced=forced
        )
        if left and (forced or at_work):  # processes are ended only after this
            activation.outlast(tx, row, at_work=at_work)
        return left

    # Frames that call in.

    async def last_step(self, slot: Slot, batch: Batch) -> Exit:
        """The last step of a frame: its session goes on from this commit elsewhere, and its process ends.

        A model call that the session wants is made there: here it might not be answered in time.
        """

        def operation(tx: Transaction) -> tuple[str | None, ActiveSession]:
            result = batches.commit(tx, batch, slot.frame_id, holder=self._node.holder, asks=False)
            for spawn in batch.spawns:
                child = tx.find(spawn.child_id)
                if child is not None and child.epoch == 0:
                    self.leave_frame(tx, child.activation)
            left = self.leave_frame(tx, batch.activation)
            return "left" if left and self._homes.available else result.wait, tx.session(batch.session_id)

        try:
            with self._claims.committing(batch.session_id) as claim:
                wait, row = await self._node.journal.submit(operation, batch.session_id)
        except Fenced:
            self._node.metrics.count_fenced()
            self._frames.release(slot)
            self._frames.look_at(batch.session_id)
            raise
        wait = None if claim.woken else wait
        self._frames.requeue_unless_waiting(batch.session_id, row.placement, row.root_id, wait)
        return self._go(slot)

    async def dismiss(self, slot: Slot) -> Exit:
        """The frame has activated a session that waits for a call which is lost: that is issued again where it goes."""
        held = slot.activation
        assert held is not None
        await self._node.journal.submit(lambda tx: self.leave_frame(tx, held), held.session_id)
        self._frames.look_at(held.session_id)  # the drain may have been taken back
        return self._go(slot)

    def _go(self, slot: Slot) -> Exit:
        """The frame's answer: it is not needed here any more."""
        self._frames.paging.slots.pop(slot.frame_id, None)
        self._frames.release(slot)
        self._frames.supply.changed.set()
        self.look()
        return Exit()

    # What nobody is at.

    async def _looking(self) -> None:
        """Give away who can leave, until the drain is taken back: somebody may still come by a late commit."""
        while self._homes.drain is not None:
            self._news.clear()
            try:
                if self._node.homes.is_drained and self._frames.known.all_read and await self._look():
                    await self._finish()
            except StaleGeneration as error:
                self._node.stale(error)
            except UnderstudyError as error:
                log.warning("the drain is held up: %s", error)
            await is_set_within(self._news, LOOK_SECONDS)
        self._looks = False

    async def _look(self) -> bool:
        """One pass over the sessions with work here; True if there was nobody left to wait for."""
        await self._frames.supply.dismiss_standbys()
        ready = set(self._frames.paging.ready)
        rows = await self._node.reading.active([self._homes.here])
        if self._homes.drain is None:  # it was taken back
            return False
        for session_id in ready.difference(row.session_id for row in rows):
            self._frames.paging.remove(session_id)  # it has ended; no frame comes here to find that out
        over = now() >= self._homes.drain.deadline
        if not self._homes.available:  # nowhere to go: who is in no frame and waits for no call has done what it can
            rows = [row for row in rows if row.frame_id is not None or self._departure(row).busy]
        known = {row.session_id: row for row in rows}
        order = leaving(map(self._departure, rows), over=over)
        for start in range(0, len(order), AT_ONCE):
            some = [known[one.session_id] for one in order[start : start + AT_ONCE]]
            # Since they were read, somebody may have come to be at work again.
            await self._send_off([row for row in some if leaving([self._departure(row)], over=over)], over)
        return not rows

    def _departure(self, row: ActiveSession) -> Departure:
        """What leaving would mean for a session, as far as is known here."""
        session_id, frames = row.session_id, self._frames
        call = self._calls.of_session(session_id)
        slot = frames.holder(row)
        acting = (slot is not None and slot.acts) or row.frame_id in frames.known.expected
        busy = acting or self._calls.is_under_way(session_id)
        tokens = Usage.from_wire(row.run_usage).total_tokens // max(1, row.round)
        if call is not None and call.request is not None:
            tokens = estimate_tokens(call.request)
        held = session_id in self._claims or session_id in frames.assignments.under_way
        return Departure(session_id, tokens, busy, held)

    async def _send_off(self, rows: list[ActiveSession], over: bool) -> None:
        """Take sessions from their frames and give them away, in one transaction."""
        frames = self._frames
        resting: list[Slot] = []
        for row in rows:
            frames.paging.remove(row.session_id)
            slot = frames.holder(row)
            if slot is not None and slot.resting:
                slot.resting = False
                frames.release(slot)
                resting.append(slot)
        frames_left = {slot.frame_id for slot in resting}

        def operation(tx: Transaction) -> list[tuple[ActiveSession, bool]]:
            tx.load(row.session_id for row in rows)
            left = []
            for row in rows:
                found = tx.session(row.session_id)
                here = found.node_id == self._homes.here
                # One that is at work leaves its frame only for another home: whoever gave it one since, or keeps it
                # because the drain was taken back, notes the death of its frame.
                stays = not here or not (self._node.homes.is_drained or row.frame_id in frames_left)
                if stays:
                    continue
                at_server = self._tool_servers.may_be_at_work(tx, found)
                at_work = at_server or self._tasks.may_be_at_work(found)
                if self.leave_frame(tx, row.activation, forced=over, at_work=at_work):
                    left.append((row, at_server))
            return left

        try:
            # Not before this is committed: who stays keeps process and call.
            for row, at_server in await self._node.journal.submit(operation):
                held = row.activation
                self._calls.drop(row.session_id)
                self._tasks.drop(row.session_id)
                self._tool_servers.drop(row.session_id, at_work=at_server)
                if row.frame_id is not None and row.frame_id not in frames_left:
                    frames.condemn(row.frame_id, held)
                self._interrupts.fence(held, "the session goes on elsewhere")
        finally:
            for slot in resting:
                frames.reply(slot, self._go(slot))
        self.look()

    async def _finish(self) -> None:
        """Nothing is left: say so, once."""
        drain = self._homes.drain
        if drain is not None and not drain.finished_at:
            here = self._homes.here
            await self._node.journal.submit(lambda tx: draining.finish(tx, here, drain.started_at))
            drain.finished_at = now()
            if self._homes.drain is drain:  # else it was reported again, or another one began: that is looked at next
                self._finished.set()
                log.warning("node %s is drained", here[:8])
