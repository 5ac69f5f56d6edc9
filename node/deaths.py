"""What becomes of sessions whose frames died."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from understudy.errors import StaleGeneration, UnderstudyError
from understudy.manifest import is_guarded
from understudy.ports import Verdict
from understudy.protocol import Work
from understudy.records import ActivationId
from understudy.store.db.engine import now
from understudy.store.db.session_row import ActiveSession
from understudy.store.operations import activation
from understudy.store.transaction import Transaction
from understudy.supervisor.restarts import decide

from .basis import NodeBasis
from .calls import Calls
from .claims import Claims
from .frames import Frames
from .interrupts import Interrupts
from .paging import Ready, Slot
from .specifications import Specifications

log = logging.getLogger(__name__)

Decided = tuple[Verdict | None, Work | None]
"""About a death: the verdict, and the work of the frame that has the session now."""


class Deaths:
    """Notes deaths of frames, and lets their sessions go on as the verdict says."""

    def __init__(
        self, node: NodeBasis, frames: Frames, calls: Calls, claims: Claims, interrupts: Interrupts,
        specifications: Specifications,
    ) -> None:  # fmt: skip
        self._node = node
        self._frames = frames
        self._paging = frames.paging
        self._calls = calls
        self._claims = claims
        self._interrupts = interrupts
        self._specifications = specifications
        self._under_way: dict[str, asyncio.Future[bool]] = {}

    def frame_hangs(self, frame_id: str, silence: float) -> None:
        """A frame is about to be killed that has been silent for so many seconds."""
        slot = self._paging.slots.get(frame_id)
        if slot is not None:
            slot.silent_since = now() - int(silence * 1e6)

    async def frame_died(
        self, frame_id: str, cause: str, silence: float = 0.0, *, may_live: bool = False
    ) -> None:  # fmt: skip
        """A frame is given up: resume what it held. Harmless when repeated, and must be if it fails.

        Args:
            may_live: whether its process may live, on a machine that is not reached; else it is known to be gone.
            silence: seconds since it was last known to be well, as far as the supervisor knows; 0: it does not.

        Raises:
            StaleGeneration: this service acts for nobody yet.
            StoreUnreachable: what the frame held is not known here.
        """
        while (under_way := self._under_way.get(frame_id)) is not None:
            if await asyncio.shield(under_way):
                return  # two hear of it: the node's own socket and the supervisor
        under_way = self._under_way[frame_id] = asyncio.get_running_loop().create_future()
        dealt_with = False
        try:
            await self._frame_died(frame_id, cause, silence, may_live=may_live)
            dealt_with = True
        finally:
            del self._under_way[frame_id]
            under_way.set_result(dealt_with)

    async def _frame_died(self, frame_id: str, cause: str, silence: float, *, may_live: bool) -> None:
        if not self._node.generation:
            raise StaleGeneration("no supervisor has adopted this service yet")
        since, cause = now(), self._frames.supply.cause(cause)
        self._frames.known.bury(frame_id)
        self._frames.verdicts.drop(frame_id)
        slot = self._paging.slots.pop(frame_id, None)
        self._frames.known.condemned.discard(frame_id)
        self._frames.supply.changed.set()
        held = [slot.activation] if slot is not None and slot.activation is not None else []
        signs = [since - int(silence * 1e6)] if silence else []
        signs += [slot.seen] if slot is not None and slot.seen else []
        if slot is not None and slot.silent_since:  # its open connection was no sign of life
            signs = [slot.silent_since, slot.seen]
        unseen = max(1, since - max(signs)) if signs else 0
        if slot is not None:
            if slot.pending is not None:  # with the process whoever awaits it is gone
                slot.pending.cancel()
        else:  # it never called in here: the store knows what it holds
            rows = await self._node.reading.active(None, frame_id=frame_id)
            held = [row.activation for row in rows]
            slot = Slot(frame_id, 0, self._node.config.node_id, "")
            for row in rows:
                slot.pid, slot.placement, slot.root_id = row.actor_pid or 0, row.placement, row.root_id
            self._frames.known.expected.pop(frame_id, None)
        for lost in held:
            await self.crashed(slot, lost, cause, since, unseen, may_live=may_live)

    async def crashed_unseen(self, row: ActiveSession) -> None:
        """A session is in a frame that nobody here knows, nor whether its process is gone."""
        assert row.frame_id is not None
        slot = Slot(row.frame_id, row.actor_pid or 0, row.node_id, row.placement, root_id=row.root_id)
        await self.crashed(slot, row.activation, "process_died", now(), may_live=True)

    async def crashed(
        self, slot: Slot, lost: ActivationId, cause: str, since: int, unseen: int = 0, *, may_live: bool = False
    ) -> None:  # fmt: skip
        """Decide about a death and, in the same transaction, give the session to a free frame if there is one."""
        session_id = lost.session_id
        self._interrupts.fence(lost, "the activation is over")
        spare = self._paging.frame_for(session_id, slot.placement) if self._node.activates else None
        waited = slot.resting and slot.wait is not None
        guarded = slot.acts and slot.called > 0  # if its session waits for a model, then hooks were at work beside that
        if waited and spare is not None and spare.session_id is not None and spare.wait != "idle":
            spare = None  # it would only wait there: no reason to take the frame of another that waits
        parked = spare.activation if spare is not None else None
        if spare is not None:
            self._paging.reserve(spare)
            self._frames.release(spare)
        ready = Ready(session_id, slot.placement, slot.root_id, "resume", since)

        def operation(tx: Transaction) -> Decided:
            if self._node.homes.elsewhere(tx.session(session_id).node_id):
                return None, None  # its new home has dealt with this death
            spec = self._specifications.within(tx, session_id)
            verdict = activation.crash(
                tx, lost, decide, cause=cause, pid=slot.pid, policy=spec["restart"], unseen=unseen, may_live=may_live,
                guarding=guarded and is_guarded(spec),
            )  # fmt: skip
            if verdict is None or verdict.action == "quarantine" or spare is None:
                return verdict, None
            if tx.session(session_id).wait not in (None, "model"):
                return verdict, None
            return verdict, self._frames.activation(spare, ready)(tx)

        with self._frames.offered(session_id, spare) as offer, self._claims.committing(session_id) as claim:
            verdict, offer.work = await self._commit_death(parked, operation, session_id)
        woken = claim.woken
        resumes = verdict is not None and verdict.action != "quarantine" and offer.work is None
        paused = verdict is not None and verdict.delay and not woken
        if resumes and not paused:  # a timer ends the pause
            await self._pick_up(session_id, ready)
        elif not resumes and woken is not None:  # by somebody else, meanwhile
            self._frames.wake(woken)
        self._frames.dispatch()

    async def _commit_death(
        self, parked: ActivationId | None, operation: Callable[[Transaction], Decided], session_id: str
    ) -> Decided:
        """The verdict, and the work of the frame that has the session now; neither if this service acts for nobody."""
        try:
            decided: Decided = await self._frames.vacated(parked, operation, session_id)
        except StaleGeneration as error:
            self._node.stale(error)
            return None, None
        return decided

    async def look(self, session_id: str) -> None:
        """A frame that was thought to have the session was refused: it may be ready, in no frame, and nobody knows."""
        try:
            await self._pick_up(session_id)
        except UnderstudyError as error:
            log.info("the sweep will look at session %s: %s", session_id, error)
        self._frames.dispatch()

    async def _pick_up(self, session_id: str, ready: Ready | None = None) -> None:
        """Queue a session of this node if it is ready and in no frame: while it was read it may have got one.

        Also while commits of our own for it are under way: one that is refused, as a dead frame's late one is, wakes
        nobody, and after one that counts no activation finds the epoch that was read here.
        """
        rows = await self._node.reading.active([self._node.config.node_id], session_ids=[session_id])
        held = session_id in self._frames.assignments.chosen or self._paging.holder(session_id) is not None
        for row in rows:
            if row.frame_id is None and not held and self._calls.is_ready(row):
                found = ready or Ready.of(row, "takeover")
                self._frames.assignments.queue(replace(found, epoch=row.epoch, placement=row.placement))
