"""The second half of a round: a model's answer is committed where it arrives, and given to whoever waits for it."""

from __future__ import annotations

import contextlib

from understudy.errors import UnderstudyError
from understudy.placement import is_isolated
from understudy.protocol import CallOrigin, Work
from understudy.records import ActivationId, KeptResponse, ModelAnswer
from understudy.store.db.session_row import ActiveSession
from understudy.store.operations import activation, model_calls
from understudy.store.transaction import Transaction

from .basis import NodeBasis
from .calls import Call, Calls
from .claims import FENCED, Claims
from .draining import Draining
from .frames import Frames
from .paging import Ready, Slot


class Answers:
    """Has sessions go on with their models' answers."""

    def __init__(
        self, node: NodeBasis, frames: Frames, calls: Calls, claims: Claims, draining: Draining
    ) -> None:  # fmt: skip
        self._node = node
        self._frames = frames
        self._calls = calls
        self._claims = claims
        self._draining = draining

    async def answered(self, call: Call, answer: ModelAnswer) -> None:
        """Commit an answer where it arrives, and give it to the frame that waits for it, or to a free one."""
        of = call.origin
        slot = self._frames.paging.holder(of.session_id)
        resident = slot if slot is not None and slot.resting else None
        held, since = (resident.activation, resident.since) if resident is not None else (None, 0)
        ends_run = of.ends_run and answer.is_final
        spare = None if slot is not None or ends_run else self._frames.take_spare(of.session_id, of.placement)
        ready, at = Ready(of.session_id, of.placement, of.root_id), FENCED
        ended = leaves = parked = False

        def operation(tx: Transaction) -> tuple[model_calls.AnswerResult, Work | None, Work | None]:
            nonlocal at, ended, leaves, parked
            result = model_calls.answer(
                tx, of.session_id, of.run_id, of.round, of.attempt, of.model, answer, incarnation=of.incarnation,
                ends_run=ends_run, purpose=of.purpose, fetched=of.is_fetched(answer),
            )  # fmt: skip
            row = tx.session(of.session_id)
            at, ended = row.activation, row.wait == "idle" or (result.ended and not result.repeated)
            if ended and (is_isolated(of.placement) or row.wait == "queue"):
                activation.park(tx, at)  # the process was for this activation, or what comes next may have to wait long
                parked = True
            # A late answer moves nobody who waits for a later call here: that would be paid again elsewhere.
            leaves = slot is resident and self._node.homes.is_drained and row.wait != "model"
            if leaves:
                if held is not None or row.frame_id is None:  # else it is in another node's frame by now
                    self._draining.leave_frame(tx, held or at)
                return result, None, None
            if not result.won:
                return result, None, None
            if resident is not None and (resident.activation, resident.frame_id) == (at, row.frame_id):
                return result, activation.work_with(tx, row, 0, (), result.calls), None
            if spare is not None and not result.ended and row.frame_id is None:  # else a crash just before placed it
                try:
                    return result, None, self._frames.activation(spare, ready)(tx)
                except UnderstudyError:
                    tx.woken[of.session_id] = row
            return result, None, None

        with self._frames.offered(of.session_id, spare) as offer:
            with self._claims.committing(of.session_id) as claim:
                result, current, offer.work = await self._node.journal.submit(operation, of.session_id)
            self._calls.forget(call)
        woken = claim.woken
        self._draining.look()
        if leaves:
            if resident is not None and resident.resting and resident.session_id == of.session_id:
                self._frames.release(resident)
            if not self._node.homes.is_drained:  # it was taken back
                self._frames.look_at(of.session_id)
            return
        self._end_rest(of.session_id, at, since, ended=ended, parked=parked, goes_on=woken is not None)
        # By others too, perhaps under another specification; perhaps right behind the frame's activation.
        if woken is not None and (result.ended or not result.won or offer.work is not None):
            self._frames.wake(woken)
            self._frames.dispatch()
        elif result.won and offer.work is None and not ended:
            self._go_on(of, result, resident, current, woken)

    async def identified(self, of: CallOrigin, response: KeptResponse) -> None:
        """Commit which endpoint has the response to a call, under which id."""
        await self._node.journal.submit(
            lambda tx: model_calls.identify(
                tx, of.session_id, of.incarnation, of.run_id, of.round, of.attempt, response
            ),
            of.session_id,
        )

    async def lost(self, call: Call) -> None:
        """A call is lost with its gateway: whoever waits for its answer makes it again, as the next attempt. Or it
        lacks messages: whoever waits brings all of them."""
        session_id, frames = call.origin.session_id, self._frames
        slot = frames.paging.holder(session_id)
        if slot is None:
            # Its frame may have been given away in a commit that is on its way: before it is done, the session has one.
            with contextlib.suppress(UnderstudyError):  # the sweep will look
                await self._node.journal.submit(lambda _tx: None)
            frames.look_at(session_id)
        elif slot.resting and slot.wait == "model" and not self._calls.is_under_way(session_id):
            frames.resume(slot)

    async def unattended(self, call: Call) -> bool:
        """No frame is at the hooks beside a call that has its answer: its session goes on with them in one. False if it
        does not wait for the call any more."""
        of = call.origin

        def waits(tx: Transaction) -> bool:
            row = tx.find(of.session_id)
            wanted = (of.incarnation, of.run_id, of.round)
            return row is not None and row.wait == "model" and (row.incarnation, row.run_id, row.round) == wanted

        with contextlib.suppress(UnderstudyError):  # the sweep will look
            if not await self._node.journal.submit(waits, of.session_id):
                return False
        if self._frames.paging.holder(of.session_id) is None:
            self._frames.look_at(of.session_id)
        return True

    def _end_rest(
        self, session_id: str, at: ActivationId, since: int, *, ended: bool, parked: bool, goes_on: bool
    ) -> None:  # fmt: skip
        """A run ended while its frame waited for a model, or came to do so: the session rests there, unless the process
        was for this run only.

        Args:
            at: the activation when the answer was committed.
            since: when the frame's wait for it had begun, if one waited: one that was fenced waits for nothing else.
            ended: the run ended without a fence.
            parked: the session has left its frame with that.
            goes_on: the session has another run to begin: its frame does not stand by.
        """
        slot = self._frames.paging.holder(session_id)
        if slot is None or slot.activation is None or not slot.resting:
            return
        if (ended and slot.activation == at) or (slot.activation < at and slot.since == since):
            if is_isolated(slot.placement):
                self._frames.release(slot)
            elif slot.guarding:  # hooks are at work beside the call: they end when their frame is answered
                self._frames.resume(slot)
            elif parked:
                self._frames.release(slot)
            elif not goes_on:
                slot.wait = "idle"
                self._frames.supply.changed.set()

    def _go_on(
        self, of: CallOrigin, result: model_calls.AnswerResult, resident: Slot | None, current: Work | None,
        woken: ActiveSession | None,
    ) -> None:  # fmt: skip
        """A run goes on with its answer: in the frame that waited for it, or in another one."""
        still = resident is not None and resident.resting and resident.session_id == of.session_id
        fresh = resident is not None and resident.reply_echo is not None and not result.repeated
        if resident is not None and still and current is not None and fresh:
            resident.resting = False
            self._frames.reply(resident, self._frames.answer_work(resident, result.message, current))
        else:
            self._wake_parked(of, woken)
        self._frames.dispatch()

    def _wake_parked(self, of: CallOrigin, woken: ActiveSession | None) -> None:
        """The session lost its frame between the answer's arrival and its commit, or had none; or that frame has not
        called in since this service began, and will.

        Args:
            woken: its row, if this commit woke it. Else an earlier try did, or the service before this one, whose
                answers the gateway may have still: only the store knows what the session has done since.
        """
        slot = self._frames.paging.holder(of.session_id)
        if slot is not None and slot.resting:
            self._frames.resume(slot)
        elif slot is None and woken is not None:
            self._frames.wake(woken)
        elif slot is None:
            self._frames.look_at(of.session_id)
