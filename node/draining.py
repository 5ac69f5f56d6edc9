"""The drain of this node: its sessions finish what they are at, commit, and go on at other nodes."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from msgspec.structs import replace

from understudy.errors import Fenced, StaleGeneration, UnderstudyError
from understudy.estimates import estimate_tokens
from understudy.identifiers import home_of
from understudy.messages import Usage
from understudy.protocol import Exit
from understudy.records import ActivationId, Batch
from understudy.store import activation, draining, operations
from understudy.store.engine import now
from understudy.store.transaction import Row, Transaction
from understudy.waiting import is_set_within

from .departures import Departure, leaving
from .paging import Slot

if TYPE_CHECKING:
    from .node_service import NodeService

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.2
"""How often it is looked who can leave, besides at once when something has happened."""

AT_ONCE = 16
"""Sessions that leave in one transaction: the first ones must not wait for the last."""


class Draining:
    """Moves the sessions of a node that is drained. The store says which nodes are, and until when.

    Guarantees: no model call is paid twice and no tool is interrupted before the deadline; a session that moves was
    fenced here in the same transaction, so it acts at one node at a time; a move is no death.

    Attributes:
        homes: the nodes that sessions can be at home on.
    """

    def __init__(self, node: NodeService) -> None:
        self._node = node
        self._drain: Row | None = None
        self._told: dict[str, Row] = {}
        self._looks = False
        self._news = asyncio.Event()
        self._finished = asyncio.Event()

    @property
    def on(self) -> bool:
        """Whether this node is drained."""
        return self._drain is not None and bool(self._node.generation)

    async def until_finished(self) -> None:
        """Wait until this node is drained and has nothing left."""
        await self._finished.wait()

    @property
    def homes(self) -> list[str]:
        return [node_id for node_id in self._node.nodes if node_id not in self._told]

    def home_for(self, root_id: str) -> str:
        """Where a session without a home goes: it stays here, unless this node is drained and another one is not."""
        here = self._node.config.node_id
        return home_of(root_id, self.homes) if self.on and self.homes else here

    def told(self, drains: dict[str, Row]) -> None:
        """Which nodes are drained, as the store says."""
        self._told = drains
        self._drain = drains.get(self._node.config.node_id)
        if self._drain is None:
            self._finished.clear()
        elif self._drain["finished_at"]:
            self._finished.set()
        if self._drain is not None and not self._looks:
            self._looks = True
            self._node.spawn_task(self._looking())
        self.look()

    def look(self) -> None:
        """Something has happened: somebody may be able to leave."""
        self._news.set()

    def leave_frame(self, tx: Transaction, held: ActivationId, *, forced: bool = False) -> bool:
        """As a part of any operation, while this node is drained: take a session from its frame, unless it is in
        another one by now, and give it away; False if it needs no other home."""
        row = tx.find(held.session_id)
        if row is None or ActivationId.of(row) != held:
            return False
        activation.park(tx, held)
        left = self.on and draining.leave(tx, row, self._node.config.node_id, self.homes, forced=forced)
        if left and forced:  # its process is killed only after this
            activation.outlast(tx, row)
        return left

    # Frames that call in.

    async def last_step(self, slot: Slot, batch: Batch) -> Exit:
        """The last step of a frame: its session goes on from this commit elsewhere, and its process ends.

        A model call that the session wants is made there: here it might not be answered in time.
        """
        batch = replace(batch, wait=None) if batch.wait == "model" else batch

        def operation(tx: Transaction) -> tuple[str | None, Row]:
            result = operations.commit(tx, batch, slot.frame_id, holder=self._node.holder)
            for spawn in batch.spawns:
                child = tx.find(spawn.child_id)
                if child is not None and child["epoch"] == 0:
                    self.leave_frame(tx, ActivationId.of(child))
            left = self.leave_frame(tx, batch.activation)
            return "left" if left and self.homes else result.wait, tx.session(batch.session_id)

        self._node.claim(batch.session_id)
        try:
            wait, row = await self._node.journal.submit(operation, batch.session_id)
        except Fenced:
            self._node.projection.metrics.count_fenced()
            self._node.frames.release(slot)
            self._node.spawn_task(self._node.recovery.look(batch.session_id))
            raise
        finally:
            woken = self._node.disown(batch.session_id)
        wait = None if woken else wait
        self._node.frames.requeue_unless_waiting(batch.session_id, row["placement"], row["root_id"], wait)
        return self._go(slot)

    async def dismiss(self, slot: Slot) -> Exit:
        """The frame took up a session that waits for a call which is lost: that is issued again where it goes."""
        held = slot.activation
        assert held is not None
        await self._node.journal.submit(lambda tx: self.leave_frame(tx, held), held.session_id)
        self._node.spawn_task(self._node.recovery.look(held.session_id))  # the drain may have been taken back
        return self._go(slot)

    def _go(self, slot: Slot) -> Exit:
        """The frame's answer: it is not needed here any more."""
        self._node.frames.paging.slots.pop(slot.frame_id, None)
        self._node.frames.release(slot)
        self._node.frames.supply.changed.set()
        self.look()
        return Exit()

    # What nobody is at.

    async def _looking(self) -> None:
        """Give away who can leave, until the drain is taken back: somebody may still come by a late commit."""
        while self._drain is not None:
            self._news.clear()
            try:
                if self.on and self._node.recovery.knows_frames and await self._look():
                    await self._finish()
            except StaleGeneration as error:
                self._node.stale(error)
            except UnderstudyError as error:
                log.warning("the drain is held up: %s", error)
            await is_set_within(self._news, LOOK_SECONDS)
        self._looks = False

    async def _look(self) -> bool:
        """One pass over the sessions with work here; True if there was nobody left to wait for."""
        await self._node.frames.supply.dismiss_standbys()
        ready = set(self._node.frames.paging.ready)
        rows = await self._node.reading.active([self._node.config.node_id])
        if self._drain is None:  # it was taken back
            return False
        for session_id in ready.difference(row["session_id"] for row in rows):
            self._node.frames.paging.remove(session_id)  # it has ended; no frame comes here to find that out
        over = now() >= self._drain["deadline"]
        if not self.homes:  # nowhere to go: who is in no frame and waits for no call has done what it can
            rows = [row for row in rows if row["frame_id"] is not None or self._departure(row).busy]
        known = {row["session_id"]: row for row in rows}
        order = leaving(map(self._departure, rows), over=over)
        for start in range(0, len(order), AT_ONCE):
            some = [known[one.session_id] for one in order[start : start + AT_ONCE]]
            # Since they were read, somebody may have come to be at work again.
            await self._send_off([row for row in some if leaving([self._departure(row)], over=over)], over)
        return not rows

    def _departure(self, row: Row) -> Departure:
        """What leaving would mean for a session, as far as is known here."""
        session_id, frames = row["session_id"], self._node.frames
        call = self._node.calls.of_session(session_id)
        slot = frames.holder(row)
        busy = call is not None or (slot is not None and not slot.resting) or row["frame_id"] in frames.expected
        tokens = Usage.from_wire(row["run_usage"]).total_tokens // max(1, row["round"])
        if call is not None and call.request is not None:
            tokens = estimate_tokens(call.request.messages)
        held = session_id in self._node.own or session_id in frames.placing
        return Departure(session_id, tokens, busy, held)

    async def _send_off(self, rows: list[Row], over: bool) -> None:
        """Take sessions from their frames and give them away, in one transaction."""
        frames = self._node.frames
        resting: list[Slot] = []
        for row in rows:
            frames.paging.remove(row["session_id"])
            slot = frames.holder(row)
            if slot is not None and slot.resting:
                slot.resting = False
                frames.release(slot)
                resting.append(slot)
        frames_left = {slot.frame_id for slot in resting}

        def operation(tx: Transaction) -> list[Row]:
            tx.load(row["session_id"] for row in rows)
            left = []
            for row in rows:
                here = tx.session(row["session_id"])["node_id"] == self._node.config.node_id
                # One that is at work leaves its frame only for another home: whoever gave it one since, or keeps it
                # because the drain was taken back, notes the death of its frame.
                stays = not here or not (self.on or row["frame_id"] in frames_left)
                if not stays and self.leave_frame(tx, ActivationId.of(row), forced=over):
                    left.append(row)
            return left

        try:
            for row in await self._node.journal.submit(operation):  # not before: who stays keeps process and call
                held = ActivationId.of(row)
                self._node.calls.drop(row["session_id"])
                if row["frame_id"] is not None and row["frame_id"] not in frames_left:
                    frames.condemn(row["frame_id"], held)
                self._node.end_activation(held, "the session goes on elsewhere")
        finally:
            for slot in resting:
                frames.reply(slot, self._go(slot))
        self.look()

    async def _finish(self) -> None:
        """Nothing is left: say so, once."""
        drain = self._drain
        if drain is not None and not drain["finished_at"]:
            here = self._node.config.node_id
            await self._node.journal.submit(lambda tx: draining.finish(tx, here, drain["started_at"]))
            drain["finished_at"] = now()
            if self._drain is drain:  # else it was told anew, or another one began meanwhile: that is looked at next
                self._finished.set()
                log.warning("node %s is drained", here[:8])
