"""The node's frames: which session each of them holds, and which one a ready session gets."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from understudy.errors import Fenced, ServiceGone, StaleGeneration, UnderstudyError
from understudy.messages import Message
from understudy.placement import is_isolated
from understudy.protocol import Exit, Judged, StepCall, Work
from understudy.records import ActivationId
from understudy.store.db.engine import now
from understudy.store.db.session_row import ActiveSession
from understudy.store.operations import activation, holding
from understudy.store.operations.activation import FrameRef
from understudy.store.transaction import Transaction

from .assignments import Assignments
from .basis import NodeBasis
from .claims import Claims
from .interrupts import Interrupts
from .known_frames import KnownFrames
from .paging import Paging, Ready, Slot
from .specifications import Specifications
from .supply import Supply
from .verdicts import Verdicts

log = logging.getLogger(__name__)


@dataclass
class Offer:
    """A frame that is reserved for a session.

    Attributes:
        work: what it has to do; None as long as it is not given the session.
    """

    work: Work | None = None


class Frames:
    """Feeds the frames that call in. Each call is held until there is work for its frame.

    Args:
        verdicts: what frames have said of model calls beside which hooks run.
        look: finds out whether a session is ready, in no frame, and queues it then.
        died: deals with the death of a frame while it was given this activation.
    """

    def __init__(
        self,
        node: NodeBasis,
        specifications: Specifications,
        claims: Claims,
        interrupts: Interrupts,
        verdicts: Verdicts,
        *,
        look: Callable[[str], Coroutine[Any, Any, None]],
        died: Callable[[Slot, ActivationId], Coroutine[Any, Any, None]],
    ) -> None:
        self._node = node
        self._specifications = specifications
        self._interrupts = interrupts
        self.verdicts = verdicts
        self._look = look
        self._died = died
        self.paging = Paging()
        self.known = KnownFrames()
        self.assignments = Assignments(self.paging, claims, self.dispatch)
        self.supply = Supply(self.paging, self.let_go)

    def calling(self, call: StepCall) -> Slot:
        """The slot of the calling frame, and what its call tells about sessions it was thought to hold.

        Raises:
            Fenced: the frame has called since: an attempt that was on the way for so long tells nothing of it any more.
                Or it is another frame's activation that is named.
        """
        frame, number = call.frame, call.number
        slot = self.paging.slots.get(frame.frame_id)
        if slot is not None and number < slot.called:
            raise Fenced(f"frame {slot.frame_id} has called since")
        if call.activation is not None:
            self.require_own(frame.frame_id, call.activation)
            self._interrupts.drop(call.activation)  # what it ran has ended
        self.verdicts.drop(frame.frame_id, before=number)
        if slot is None:
            slot = Slot(frame.frame_id, frame.pid, frame.node_id, frame.placement)
            self.paging.slots[slot.frame_id] = slot
        if slot.pending is not None:
            slot.pending.cancel()
        session_id, incarnation, epoch = call.activation or (None, 0, 0)
        held, tree, slot.session_id = slot.activation, slot.root_id, None
        unheard = held is not None and held != call.activation
        if held is not None and unheard and self.paging.holder(held.session_id) is None:
            # It was given a session and never heard of it: its last call was cut off.
            self.assignments.queue(Ready(held.session_id, slot.placement, tree, "takeover", epoch=held.epoch))
        for other, root_id in self.known.called_in(slot.frame_id).items():
            if other.session_id != session_id:
                self.assignments.queue(Ready(other.session_id, slot.placement, root_id, "takeover", epoch=other.epoch))
        slot.session_id, slot.epoch, slot.resting, slot.guarding, slot.wait = session_id, epoch, False, False, None
        slot.seen, slot.called = now(), number
        slot.incarnation, slot.root_id = incarnation, call.root_id or session_id or ""
        return slot

    def require_own(self, frame_id: str, activation: ActivationId) -> None:
        """Refuse what a frame says of an activation that another one is known to have, or that was ended by force:
        before anything follows from it here, since the store refuses it only later. Raises `Fenced`."""
        if frame_id in self.known.condemned:
            raise Fenced("the activation was ended by force", session_id=activation.session_id)
        holder = self.paging.holder(activation.session_id)
        others = self.known.holders(activation)
        if holder is not None and holder.activation == activation:
            others.append(holder.frame_id)
        if any(other != frame_id for other in others):
            raise Fenced(f"the session is not in frame {frame_id}", session_id=activation.session_id)

    def condemn(self, frame_id: str, activation: ActivationId) -> None:
        """The frame's activation was ended by force: its process must go, if it is still at it."""
        slot = self.paging.slots.get(frame_id)
        if slot is not None and slot.activation == activation and not slot.resting:
            self.release(slot)  # the session may be given to another frame at once
        elif not self.known.end_expected(frame_id, activation):  # since before this service was restarted
            return
        self.known.condemned.add(frame_id)
        self._interrupts.drop(activation)
        self.supply.changed.set()

    def named(self) -> dict[str, int]:
        """See `KnownFrames.named`."""
        return self.known.named(self.paging.slots.values())

    def release(self, slot: Slot) -> None:
        """The frame holds no session any more. If it was for that activation only and rests, it ends."""
        held, slot.session_id, slot.epoch, slot.guarding, slot.wait = slot.session_id, None, 0, False, None
        if held is not None and slot.resting and is_isolated(slot.placement):
            slot.resting = False
            self.paging.slots.pop(slot.frame_id, None)
            self.reply(slot, Exit())
            self.supply.changed.set()

    async def rest(self, slot: Slot, wait: str | None, *, guarding: bool = False) -> Work | Exit:
        """Hold the frame's call until there is work for it.

        Args:
            guarding: hooks run beside what its session waits for: until their verdict it is given no other one.

        Raises:
            ServiceGone: the frame was reported dead while its call was worked at; it calls again.
        """
        if self.paging.slots.get(slot.frame_id) is not slot:
            raise ServiceGone(f"frame {slot.frame_id} was reported dead")
        slot.reply = asyncio.get_running_loop().create_future()
        if wait != "model":  # a call that its service before this one had the answer to
            self.verdicts.drop(slot.frame_id)
        self.paging.rest(slot, wait, guarding=guarding)
        self.dispatch()
        self.supply.changed.set()
        return await slot.reply  # type: ignore[no-any-return]

    def attends(self, session_id: str) -> bool:
        """Whether a frame is at a session: at its work, or at the hooks beside its model call."""
        slot = self.paging.holder(session_id)
        return slot is not None and slot.acts

    def may_judge(self, frame_id: str, verdict: Judged) -> bool:
        """Whether a frame's verdict is of a call that it waits for, as far as is known here: one that has called in
        since, or ended, has no use for it. Raises `Fenced` if another one has its session."""
        self.require_own(frame_id, verdict.activation)
        slot = self.paging.slots.get(frame_id)
        if slot is None:  # it may not have called in since this service began
            return frame_id in self.known.expected or not self.known.all_read
        waits = not slot.resting or slot.wait == "model"
        return slot.activation == verdict.activation and verdict.number >= slot.called and waits

    def judged(self, frame_id: str, verdict: Judged) -> None:
        """The hooks in a frame have ended: others may have it while its session waits."""
        slot = self.paging.slots.get(frame_id)
        if slot is not None and slot.activation == verdict.activation and slot.guarding:
            slot.guarding = False
            self.dispatch()
            self.supply.changed.set()

    def dispatch(self) -> None:
        """Give ready sessions to resting frames."""
        if not self.paging.ready:
            return
        if self._node.activates:
            for slot, ready in self.paging.pairs():
                parked = slot.activation
                self.release(slot)
                self.assignments.chosen[ready.session_id] += 1
                self._node.spawn_task(self._activate(slot, ready, parked))
        if self.paging.ready:
            self.supply.changed.set()

    def activation(self, slot: Slot, ready: Ready, parked: ActivationId | None = None) -> Callable[[Transaction], Work]:
        """The operation that gives a session to a frame; its result is the frame's work. With it `parked` leaves.

        It raises `Fenced` if the session was activated since it was found ready, so that somebody is, or was, at work
        at it; and if it waits, so that it was at work when its row was read.
        """
        frame = FrameRef(slot.frame_id, slot.pid, slot.node_id)

        def operation(tx: Transaction) -> Work:
            row = tx.session(ready.session_id)
            known = slot.known_seq(ready.session_id, row.incarnation)
            if self._node.homes.elsewhere(row.node_id) or self._node.homes.is_drained:
                raise Fenced("another node looks after the session, or will", session_id=ready.session_id)
            if ready.epoch not in (0, row.epoch):
                raise Fenced("the session was activated since", session_id=ready.session_id)
            if row.active and row.wait not in (None, "model"):
                raise Fenced(f"the session waits ({row.wait})", session_id=ready.session_id)
            if row.placement != slot.placement:
                raise Fenced("the session was upgraded to another placement", session_id=ready.session_id)
            tx.woken.pop(ready.session_id, None)
            work = activation.activate(
                tx, ready.session_id, frame, after_seq=known or 0, cause=ready.cause, down_since=ready.down_since,
                parked=parked,
            )  # fmt: skip
            if known is None:  # the frame would ask for it
                work = replace(work, spec=self._specifications.within(tx, ready.session_id))
            return work

        return operation

    async def vacated(self, parked: ActivationId | None, operation: Callable[[Transaction], Any], *touches: str) -> Any:
        """Commit who shall have a frame, with who was in it before: that one has left, also if this is refused."""
        operations = [operation]
        if parked is not None:
            operations, touches = [lambda tx: activation.park(tx, parked), operation], (*touches, parked.session_id)
        *_, result = await self._node.journal.submit_all(operations, *touches)
        if isinstance(result, BaseException):
            raise result
        return result

    async def _activate(self, slot: Slot, ready: Ready, parked: ActivationId | None) -> None:
        session_id = ready.session_id
        self.assignments.chosen -= Counter([session_id])
        holder = self.paging.holder(session_id)
        if holder is not None or session_id in self.assignments.under_way:  # it was placed meanwhile, or is about to be
            if holder is None:
                self.assignments.queue(ready)
            elif holder.resting:
                self.resume(holder)
            if parked is not None:
                self._node.spawn_task(self.park(parked))
            self.paging.rest(slot, None)
            self.dispatch()
            return
        with self.assignments.being_placed(session_id, slot):
            try:
                work = await self.vacated(parked, self.activation(slot, ready), session_id)
            except StaleGeneration as error:
                self._node.stale(error)
                self.paging.add(ready)
                self.paging.rest(slot, None)
            except UnderstudyError as error:
                log.info("session %s needs no frame: %s", session_id, error)
                self.paging.rest(slot, None)
                self.dispatch()
                if isinstance(error, Fenced):  # what else keeps it from a frame may do so for long: the sweep looks
                    self.look_at(session_id)
            else:
                self.reply(slot, self.given(slot, work))

    def look_at(self, session_id: str) -> None:
        """It is not known here what becomes of a session: find out from the store."""
        self._node.spawn_task(self._look(session_id))

    @contextmanager
    def offered(self, session_id: str, slot: Slot | None) -> Iterator[Offer]:
        """While a commit may give the session to a frame that is reserved for it: at the end that has its work, or is
        free again. Without a frame this changes nothing."""
        offer = Offer()
        with self.assignments.being_placed(session_id, slot):
            try:
                yield offer
            finally:
                if slot is not None and offer.work is not None:
                    self.reply(slot, self.given(slot, offer.work))
                elif slot is not None:
                    self.paging.rest(slot, None)
                    self.dispatch()

    def reply(self, slot: Slot, answer: Work | Exit) -> None:
        """Answer the frame's pending call."""
        if slot.pending is not None:
            slot.pending.set_result(answer)

    async def work(self, slot: Slot) -> Work:
        """What a frame must know to go on with the session it holds."""
        held = slot.activation
        if held is None:  # ended, or taken to another frame, while its batch was being committed
            raise Fenced("the activation is over")
        session_id, known = held.session_id, slot.known_seq(held.session_id, held.incarnation) or 0
        try:
            work = await self._node.journal.submit(lambda tx: current_work(tx, held, slot.frame_id, known), session_id)
        except Fenced:
            self.release(slot)
            self.look_at(session_id)
            raise
        slot.remember(session_id, work.seq, work.incarnation)
        return work

    async def _continue(self, slot: Slot) -> None:
        """The wait of the session in this frame is over."""
        try:
            self.reply(slot, await self.work(slot))
        except UnderstudyError as error:
            if slot.pending is not None:
                slot.pending.set_exception(error)

    def resume(self, slot: Slot) -> None:
        """Let a resting frame go on with the session it holds."""
        self.paging.reserve(slot)
        self._node.spawn_task(self._continue(slot))

    def given(self, slot: Slot, work: Work) -> Work:
        """Note that the frame holds the session of `work` from now on."""
        for other in list(self.paging.slots.values()):
            if other is not slot and other.session_id == work.session_id:
                self.release(other)  # fenced by this activation; its next call will tell it
        found = self.assignments.found_ready(work.session_id)
        self.known.condemned.discard(slot.frame_id)  # for what it was at before; it has called in since
        slot.session_id, slot.epoch, slot.wait, slot.resting = work.session_id, work.epoch, None, False
        slot.incarnation, slot.root_id = work.incarnation, work.root_id
        if work.epoch > 1:
            self.paging.count_return(slot, work.session_id, slot.incarnation)
        slot.remember(work.session_id, work.seq, slot.incarnation)
        if found is not None and found.epoch > work.epoch:  # it was fenced right behind the commit that gave it
            self.release(slot)
            self.paging.add(found)
        elif slot.frame_id not in self.paging.slots:  # it died while its work was being committed
            self._node.spawn_task(self._died(slot, work.activation))
        return work

    def requeue_unless_waiting(self, session_id: str, placement: str, root_id: str, wait: str | None) -> None:
        """A session left its frame: it queues for another one if it can go on."""
        if wait is None:
            self.assignments.queue(Ready(session_id, placement, root_id))
            self.dispatch()

    def wake(self, row: ActiveSession) -> None:
        """A session is ready: its own frame goes on, or it queues for one.

        Neither, if its frame has not called in yet, or ends: the session goes on with what comes of it. Of one that is
        not expected, or known to be dead, nothing comes: the session only rested there.
        """
        slot, frame_id = self.holder(row), row.frame_id
        if slot is not None and slot.resting and slot.activation == row.activation:
            self.resume(slot)
        elif slot is None and (frame_id is None or frame_id in self.paging.slots or self.known.is_gone(row)):
            self.assignments.queue(Ready.of(row, "ready"))

    def holder(self, row: ActiveSession) -> Slot | None:
        """The frame that holds the session, as the row says or since it was read; one whose activation is over, or was
        a removed session's of this id, holds nothing."""
        slot = self.paging.holder(row.session_id)
        held = slot.activation if slot is not None else None
        if slot is not None and held is not None and held < row.activation:
            self.release(slot)
            return None
        return slot

    def take_spare(self, session_id: str, placement: str) -> Slot | None:
        """Reserve a frame without a session for this one; None while others queue for such frames."""
        if self.paging.queued(placement) or not self._node.activates:
            return None
        slot = self.paging.frame_for(session_id, placement)
        if slot is None or slot.session_id is not None:
            return None
        self.paging.reserve(slot)
        return slot

    def answer_work(self, slot: Slot, message: Message | None, work: Work) -> Work:
        """The work of a frame that waited for this answer, with the messages that it does not have."""
        after = slot.known_seq(work.session_id, slot.incarnation) or 0
        slot.remember(work.session_id, work.seq, slot.incarnation)
        answer = (message,) if message is not None else ()
        return replace(work, after_seq=after, messages=(*(slot.reply_echo or ()), *answer))

    async def let_go(self, slot: Slot) -> None:
        """End the process of a frame that rests, or calls in; its session, if it has one, leaves it."""
        slot.resting = False
        held = slot.activation
        self.release(slot)
        if held is not None:  # it may become ready before this is committed: its frame is known until then
            await self.park(held)
        self.paging.slots.pop(slot.frame_id, None)
        self.reply(slot, Exit())

    async def park(self, held: ActivationId) -> None:
        """Note that a session has left its frame."""
        await self._node.journal.submit(lambda tx: activation.park(tx, held), held.session_id)


def current_work(tx: Transaction, held: ActivationId, frame_id: str, after_seq: int) -> Work:
    """The work of a live activation, for the frame that has it. Raises `Fenced` when it is over, or not its own."""
    row = tx.session(held.session_id)
    holding.require_held(row, held, frame_id)
    return activation.work(tx, row, after_seq)
