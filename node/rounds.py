"""The first half of a round: a frame's batch is committed and its model called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from msgspec import structs

from understudy.errors import Fenced, InvalidInput, StaleGeneration, UnderstudyError, UnknownSession
from understudy.messages import Message
from understudy.placement import is_isolated
from understudy.protocol import CallOrigin, Exit, StepCall, Work
from understudy.records import Ack, ActivationId, Batch, ModelRequest
from understudy.store.db.session_row import ActiveSession
from understudy.store.operations import activation, batches, holding, model_calls
from understudy.store.transaction import Transaction

from .basis import NodeBasis
from .calls import Call, Calls
from .claims import FENCED, Claims
from .draining import Draining
from .frames import Frames
from .paging import Ready, Slot

PASSIVE_WAITS = ("input", "child", "queue")
"""Waits that may be long: a session leaves its frame with the commit that begins one, whether others want it or not."""

OVER = (Fenced, UnknownSession)
"""With these a frame leaves its session and calls in again; anything else ends its process."""


class Rounds:
    """What a frame's call leads to."""

    def __init__(
        self, node: NodeBasis, frames: Frames, calls: Calls, claims: Claims, draining: Draining
    ) -> None:  # fmt: skip
        self._node = node
        self._frames = frames
        self._calls = calls
        self._claims = claims
        self._draining = draining

    async def step(self, call: StepCall) -> Work | Exit:
        """See `understudy.ports.Node.step`."""
        frame_id, number = call.frame.frame_id, call.number
        slots = self._frames.paging.slots
        if frame_id in self._frames.known.buried:  # its call was still on the way
            return Exit()
        if call.activation is not None and call.batch is None and (call.request is None or call.request.left_out):
            raise InvalidInput("a step without a batch has a whole request", session_id=call.activation.session_id)
        slot = slots.get(frame_id)
        if slot is not None and number == slot.answered and slot.session_id is not None:
            # The answer was lost, or an attempt was on the way for long and the frame has begun with the work.
            return await self._frames.work(slot)
        answer = await self._step(call)
        slot = slots.get(frame_id)
        if slot is not None and slot.called == number and isinstance(answer, Work):
            slot.answered = number
        return answer

    async def _step(self, call: StepCall) -> Work | Exit:
        frames = self._frames
        slot, batch, request = frames.calling(call), call.batch, call.request
        if call.activation is None:
            return await frames.rest(slot, None)
        slot.remember(call.activation.session_id, call.known_seq, slot.incarnation)
        if batch is None:
            assert request is not None  # see `step`
            return await (self._leave(slot) if call.leave else self._attach(slot, request))
        if self._node.homes.is_drained:
            return await self._draining.last_step(slot, batch)
        guarded = request is not None and request.guarded  # the frame has something to do beside the call
        leave = call.leave or (not guarded and self._must_leave(slot, batch.wait))
        turns = batch.wait and self._node.generation and not (leave or guarded)
        following = frames.paging.next_for(slot) if turns else None
        root_id = slot.root_id  # of this batch's session: with the commit the slot may hold another one
        with self._claims.committing(batch.session_id) as claim:
            result, work = await self._commit_step(slot, batch, request, following, leave=leave)
            if result is not None and request is not None:
                self._start_call(batch, request, result, slot.placement, root_id)
            claim.activation = batch.activation if result is not None else FENCED
        woken = claim.woken
        if result is None:  # fenced, but the frame has other work
            assert work is not None
            return work
        if result.over:  # it goes on under another specification, or another agent, in another activation
            return await self._over(slot, work, woken, leave=leave or is_isolated(slot.placement))
        if result.wait in PASSIVE_WAITS and work is None and not leave:
            return await self._passive(slot, woken)
        answer: Work | Exit | None = work
        if leave or _outlasted(slot, result.wait):
            frames.paging.slots.pop(slot.frame_id, None)
            frames.supply.changed.set()
            answer = Exit()
        hooks_elsewhere = leave and guarded and result.wait == "model"
        if woken or hooks_elsewhere:  # it goes on: what it waits for was committed right behind the batch, perhaps
            result = replace(result, wait=None)
        if answer is not None:
            frames.requeue_unless_waiting(batch.session_id, slot.placement, root_id, result.wait)
            return answer
        return await self._stay(slot, batch, result)

    async def _passive(self, slot: Slot, woken: ActiveSession | None) -> Work | Exit:
        """The session left the frame with its commit."""
        self._frames.release(slot)
        if woken is not None:
            self._frames.wake(woken)
        return await self._frames.rest(slot, None)

    async def _stay(self, slot: Slot, batch: Batch, result: batches.CommitResult) -> Work | Exit:
        """The session keeps its frame: it goes on at once, or waits in it."""
        if result.wait is None:
            slot.wait = None
            return await self._frames.work(slot)
        # Where a replayed batch's messages went, only the store knows: they are read from there when the wait ends.
        slot.reply_echo = None if result.ack.replayed else echo(batch, result.ack)
        guarding = result.wait == "model" and self._calls.needs_verdict(batch.session_id)
        return await self._frames.rest(slot, result.wait, guarding=guarding)

    def _must_leave(self, slot: Slot, wait: str | None) -> bool:
        """Whether this frame ends with its batch: it is one too many, or serves one activation only, which ends here.

        Such an activation outlasts a model call, unless others wait for frames of this placement.
        """
        if wait is None:
            return False
        if is_isolated(slot.placement) and (wait != "model" or self._frames.paging.queued(slot.placement)):
            return True
        return self._frames.supply.must_leave(slot)

    async def _over(self, slot: Slot, work: Work | None, woken: ActiveSession | None, *, leave: bool) -> Work | Exit:
        """The frame's activation ended with its commit: its session, if there is more to do, needs a frame again."""
        if work is None:
            self._frames.release(slot)
        if leave:
            self._frames.paging.slots.pop(slot.frame_id, None)
            self._frames.supply.changed.set()
        if woken is not None:
            self._frames.wake(woken)
            self._frames.dispatch()
        return Exit() if leave else work or await self._frames.rest(slot, None)

    def _commit(
        self, slot: Slot, batch: Batch, request: ModelRequest | None, *, leave: bool
    ) -> Callable[[Transaction], batches.CommitResult]:
        """The operation that commits a batch; with it the session leaves its frame, if it has to."""
        price = self._node.profiles.price(batch.request_profile, batch.request_model)

        def commit(tx: Transaction) -> batches.CommitResult:
            result = batches.commit(tx, batch, slot.frame_id, holder=self._node.holder, price=price)
            if request is not None and result.ack.replayed and result.wait == "model":
                _require_waited_for(request, tx.session(batch.session_id))
            if request is not None and self._is_lost(batch, request, result):  # before the session leaves its frame
                issued = model_calls.reissue(tx, batch.activation, slot.frame_id, self._node.holder, request.model)
                if issued is None:  # the run has ended, and with it a process that was for it only
                    result = replace(result, wait=None, over=is_isolated(slot.placement))
                else:
                    result = replace(result, issued=issued, holder=self._node.holder)
            if leave or result.over or result.wait in PASSIVE_WAITS or _outlasted(slot, result.wait):
                activation.park(tx, batch.activation)
            return result

        return commit

    async def _commit_step(
        self, slot: Slot, batch: Batch, request: ModelRequest | None, following: Ready | None, *, leave: bool
    ) -> tuple[batches.CommitResult | None, Work | None]:
        """Commit the batch and, in the same transaction, activate the session that the frame turns to.

        With the commit the frame holds that session: before anything else is awaited, or others would find it ready.
        Not if the batch is refused in a way that ends the frame's process (`OVER`).
        """
        commit, refused = self._commit(slot, batch, request, leave=leave), False

        def first(tx: Transaction) -> batches.CommitResult | UnderstudyError:
            nonlocal refused
            refused = True
            try:
                result: batches.CommitResult | UnderstudyError = commit(tx)
            except OVER as error:
                row = tx.find(batch.session_id)
                if row is not None and row.batch_no < batch.batch_no:  # else it was overtaken by the frame's own
                    activation.park(tx, batch.activation)  # the frame leaves the session
                result = error
            refused = False
            return result

        frames = self._frames
        if following is None:
            (result,), work = await self._node.journal.submit_all([first], batch.session_id), None
        else:
            activate = frames.activation(slot, following, batch.activation)

            def turn(tx: Transaction) -> Work:
                if refused:
                    raise Fenced("the frame ends", session_id=following.session_id)
                return activate(tx)

            todo: list[Any] = [first, turn]
            with frames.assignments.being_placed(following.session_id, slot):
                try:
                    result, work = await self._node.journal.submit_all(todo, batch.session_id, following.session_id)
                except BaseException:
                    frames.paging.add(following)
                    raise
                if isinstance(work, StaleGeneration):
                    self._node.stale(work)
                    frames.paging.add(following)
                elif isinstance(work, Fenced):
                    self._frames.look_at(following.session_id)
                work = None if isinstance(work, BaseException) else frames.given(slot, work)
        if isinstance(result, BaseException):
            if work is None:
                if isinstance(result, OVER):  # else its process ends: its death is that of this session's frame
                    self._frames.release(slot)
                if isinstance(result, Fenced):
                    self._frames.look_at(batch.session_id)
                raise result
            self._node.metrics.count_fenced()
            self._frames.look_at(batch.session_id)
            return None, work
        return result, work

    async def _attach(self, slot: Slot, request: ModelRequest) -> Work | Exit:
        """The activation found its session waiting for a model: follow that call, or issue it again if it is lost."""
        held = slot.activation
        assert held is not None
        call = self._calls.find(held.incarnation, request.wait_key)
        if call is not None and call.lacks:
            await self._bring(slot, held, call, request)
            call = self._calls.find(held.incarnation, request.wait_key)  # aborted meanwhile, perhaps
        if call is None:
            if self._node.homes.is_drained:
                return await self._draining.dismiss(slot)
            try:
                with self._claims.committing(held.session_id) as claim:
                    claim.activation = held
                    issued, over = await self._node.journal.submit(
                        lambda tx: self._reissue(tx, slot, held, request), held.session_id
                    )
                    if issued is not None:
                        self._call(request, issued, held, slot.placement, slot.root_id)
            except Fenced:
                self._frames.release(slot)
                self._frames.look_at(held.session_id)
                raise
            woken = claim.woken
            if over:
                return await self._over(slot, None, woken, leave=True)
            if issued is None or woken is not None:  # it was answered, or its run ended
                return await self._frames.work(slot)
        slot.reply_echo = None
        return await self._frames.rest(slot, "model", guarding=self._calls.needs_verdict(held.session_id))

    async def _leave(self, slot: Slot) -> Exit:
        """The process ends, and found its session waiting for a model: another one calls the hooks beside it."""
        held = slot.activation
        assert held is not None
        await self._frames.let_go(slot)
        self._frames.supply.changed.set()
        self._frames.look_at(held.session_id)
        return Exit()

    async def _bring(self, slot: Slot, held: ActivationId, call: Call, request: ModelRequest) -> None:
        """Give a call its messages, if they are from the frame that has the session: no other may say what its model is
        asked."""
        try:
            await self._node.journal.submit(
                lambda tx: holding.require_held(tx.session(held.session_id), held, slot.frame_id), held.session_id
            )
        except Fenced:
            self._frames.release(slot)
            self._frames.look_at(held.session_id)
            raise
        call.bring(request)

    def _reissue(
        self, tx: Transaction, slot: Slot, held: ActivationId, request: ModelRequest
    ) -> tuple[model_calls.Issued | None, bool]:
        """Make a lost call again, if it is still waited for; and whether the frame ends, since its run has."""
        issued = model_calls.reissue(tx, held, slot.frame_id, self._node.holder, request.model)
        ended = issued is None and tx.session(held.session_id).run_id != split_wait_key(request.wait_key)[1]
        if ended and is_isolated(slot.placement):
            activation.park(tx, held)
            return None, True
        return issued, False

    def _is_lost(self, batch: Batch, request: ModelRequest, result: batches.CommitResult) -> bool:
        """Whether the batch was committed by a service that died with the call: that goes out as the next attempt."""
        if result.wait != "model" or result.holder == self._node.holder:
            return False
        return self._calls.find(batch.incarnation, request.wait_key) is None

    def _start_call(
        self, batch: Batch, request: ModelRequest, result: batches.CommitResult, placement: str, root_id: str
    ) -> None:
        """Send the call out that the commit waits for, if it waits for one."""
        if result.wait != "model":
            return
        self._call(request, result.issued, batch.activation, placement, root_id)

    def _call(
        self, request: ModelRequest, issued: model_calls.Issued, of: ActivationId, placement: str, root_id: str
    ) -> None:
        """Send a call out, of a session that is claimed; a run that was asked to end, or interrupted, meanwhile aborts
        it."""
        _, run_id, round_number = split_wait_key(request.wait_key)
        request = request.limited_to(issued.longest_reply)
        if issued.response is not None:
            request = structs.replace(request, response=issued.response)
        origin = CallOrigin(
            of.session_id, of.incarnation, run_id, round_number, issued.attempt, placement, root_id, request.profile,
            request.model, request.ends_run, request.purpose, request.guarded, issued.response,
        )  # fmt: skip
        self._calls.start(Call(origin, request))
        if run_id in self._claims.cancelled.get(of.session_id, ()):
            self._calls.abort(of.session_id, of.incarnation, run_id)
        if (run_id, round_number) in self._claims.interrupted.get(of.session_id, ()):
            self._calls.abort(of.session_id, of.incarnation, run_id, round_number)


def split_wait_key(key: str) -> tuple[str, str, int]:
    """Session, run and round of a wait key."""
    session_id, run_id, round_number = key.split("/")
    return session_id, run_id, int(round_number)


def echo(batch: Batch, ack: Ack) -> list[Message]:
    """The batch's own messages with the `seq` they got, for the frame to add to its window."""
    entries = enumerate(batch.entries, ack.first_seq)
    return [structs.replace(entry, seq=seq) for seq, entry in entries if isinstance(entry, Message)]


def _require_waited_for(request: ModelRequest, row: ActiveSession) -> None:
    """Refuse a request that its session does not wait for: its batch did not say so. Raises `Fenced`."""
    if split_wait_key(request.wait_key) != (row.session_id, row.run_id, row.round):
        raise Fenced("the session does not wait for this request", session_id=row.session_id)


def _outlasted(slot: Slot, wait: str | None) -> bool:
    """Whether a session in a frame of its own, which outlasts a model call only, was to go on and has to wait."""
    return is_isolated(slot.placement) and wait not in (None, "model")
