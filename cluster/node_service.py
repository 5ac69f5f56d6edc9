"""The node service: journal, gateway and ready queue of a node, joined by `step`. A plain class.

Frames call in (`step`, `commit`), clients call in (`spawn`, `send`), the supervisor calls in (`take_up`).
The service itself calls nobody but the model endpoints and, through a port, the services of other nodes, so it needs no
Ray and its tests need none either.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from understudy.actors.gateway import Gateway
from understudy.actors.window import with_longest_reply
from understudy.config import ModelProfile
from understudy.errors import Fenced, StaleGeneration, UnderstudyError
from understudy.placement import is_isolated
from understudy.records import Ack, Batch, ModelAnswer, ModelRequest
from understudy.store import activation, operations
from understudy.store.engine import Database, now
from understudy.store.journal import Committed, Journal
from understudy.store.transaction import Row, Transaction
from understudy.supervisor.groups import decide_end
from understudy.supervisor.paging import Ready, Slot

from .calls import Call, Calls
from .draining import Draining
from .feed import Feed
from .frames import EXIT, Frames, current_work
from .projection import Projection
from .reading import Reading
from .recovery import Recovery, cancelled
from .timers import Timers

log = logging.getLogger(__name__)

KNOWN_SESSIONS = 10_000

PASSIVE_WAITS = ("input", "child")
"""Waits that may be long: a session leaves its frame with the commit that begins one, whether others want it or not."""

FENCED = -1
"""The epoch of an activation that is over: no session has it."""

Tell = Callable[[str, list[str]], Awaitable[None]]
"""Tells the service of a node which of its sessions were written by another (`NodeService.notice`). May get lost."""


async def alone(_node_id: str, _session_ids: list[str]) -> None:
    """The `Tell` of a service that is the only one."""


@dataclass(frozen=True)
class NodeConfig:
    """What a node service is started with."""

    store: str
    namespace: str
    node_id: str
    writer: str
    metrics_port: int = 0
    span_directory: str = ""
    schema_policy: str = "auto"


class NodeService:
    """One per node (SQLite: one per cluster).

    Guarantees: what it acknowledges is committed; a call may be repeated after its death without a second effect; a
    session is given to one frame at a time, under a new epoch each time.

    Attributes:
        own: sessions for which a commit of this service's own is under way; whoever commits learns of their wake-ups.
        interrupts: what tells activations that their run shall end, by session and epoch.
        nodes: those that have a node service, as the supervisor said last.
    """

    def __init__(
        self, config: NodeConfig, gateway: Gateway, prepare_profile: Callable[[str], Any], tell: Tell = alone
    ) -> None:
        self.config = config
        self._tell = tell
        self.database = Database(config.store)
        self.journal = Journal(
            self.database, config.namespace, config.writer, self._committed, decide_end=decide_end
        )  # fmt: skip
        self.gateway = gateway
        self.calls = Calls(gateway, self._answered, self._delta, prepare_profile)
        self.frames = Frames(self)
        self.recovery = Recovery(self)
        self.timers = Timers(self)
        self.draining = Draining(self)
        self.reading = Reading(self.database, config.namespace)
        self.feed = Feed(self.reading.events, self.calls.stream, self.reading.run)
        self.projection = Projection(self)
        self.holder = f"{config.writer}#{now()}"
        self.own: set[str] = set()
        self._missed: dict[str, Row] = {}
        self._cancelled: set[str] = set()
        self.interrupts: dict[tuple[str, int], asyncio.Future[str]] = {}
        self._specs: dict[str, tuple[int, dict[str, Any]]] = {}
        self._placements: dict[str, str] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self.nodes: list[str] = []

    async def start(self) -> None:
        """Open the store, catch up the projection, start committing.

        Raises:
            StoreUnreachable, StoreVersion, StoreSchema, StoreOwned: see `Database.prepare`.
        """
        await asyncio.to_thread(self.database.prepare, self.config.schema_policy)
        self.journal.start()
        await self.projection.start()
        self.spawn_task(self.recovery.sweeping())
        self.spawn_task(self.timers.firing())

    async def close(self) -> None:
        """Stop cleanly: what is unanswered stays a wait in the store."""
        await self.calls.close()
        for task in self._tasks:
            task.cancel()
        await self.projection.close()
        await self.reading.close()
        await self.journal.close()
        await self.gateway.close()

    @property
    def generation(self) -> int:
        """The supervisor's generation that this service acts for; 0: it activates nothing."""
        return self.journal.generation

    @property
    def activates(self) -> bool:
        """Whether sessions are given to frames here: not without a generation, and not while the node is drained."""
        return bool(self.generation) and not self.draining.on

    # What frames call.

    async def step(self, call: dict[str, Any]) -> dict[str, Any]:
        """See `understudy.ports.Node.step`."""
        if call["frame"]["frame_id"] in self.recovery.buried:  # its call was still on the way
            return EXIT
        slot = self.frames.calling(call)
        root_id = slot.root_id
        if call.get("session_id") is None:
            return await self.frames.rest(slot, None)
        self._end_watch(call["session_id"], call["epoch"])  # what it ran has ended
        slot.remember(call["session_id"], call["known_seq"], slot.incarnation)
        request = ModelRequest.from_wire(call["request"]) if call["request"] else None
        if call["batch"] is None:
            assert request is not None
            return await self._attach(slot, request)
        batch = Batch.from_wire(call["batch"])
        if self.draining.on:
            return await self.draining.last_step(slot, batch)
        call["leave"] = call.get("leave") or self._must_leave(slot, batch.wait)
        turns = batch.wait and self.generation and not call["leave"]
        following = self.frames.paging.next_for(slot) if turns else None
        self.own.add(batch.session_id)
        try:
            result, work = await self._commit_step(slot, batch, following)
            if result is not None and result.wait == "model" and request is not None:
                if not await self._start_call(batch, request, result, slot.placement, root_id):
                    result = replace(result, wait=None)
                elif batch.session_id in self._cancelled:
                    self.calls.abort(batch.session_id)
        except BaseException:
            self.disown(batch.session_id, FENCED)
            raise
        woken = self.disown(batch.session_id, batch.epoch if result is not None else FENCED)
        if result is None:  # fenced, but the frame has other work
            assert work is not None
            return work
        if result.over:  # it goes on under another specification, in another activation
            return await self._over(slot, work, woken, leave=bool(call["leave"]) or is_isolated(slot.placement))
        left = result.wait in PASSIVE_WAITS
        if woken and result.wait != "model":  # an input or a child's result was committed right behind the batch
            result = replace(result, wait=None)
        over = is_isolated(slot.placement) and result.wait not in (None, "model")  # it was to wait for something else
        if call["leave"] or over:
            self.frames.paging.slots.pop(slot.frame_id, None)
            await self.journal.submit(lambda tx: activation.park(tx, batch.session_id, batch.epoch))
            self.frames.requeue_unless_waiting(batch.session_id, slot.placement, root_id, result.wait)
            self.frames.demand_changed.set()
            return EXIT
        if work is not None:
            self.frames.requeue_unless_waiting(batch.session_id, slot.placement, root_id, result.wait)
            return work
        if left:
            self.frames.release(slot)
            if woken is not None:
                self.frames.wake(woken)
            return await self.frames.rest(slot, None)
        if result.wait is None:
            slot.wait = None
            return {"kind": "work", **await self.frames.work(slot)}
        # Where a replayed batch's messages went, only the store knows: they are read from there when the wait ends.
        slot.reply_echo = None if result.ack.replayed else echo(batch, result.ack)
        return await self.frames.rest(slot, result.wait)

    def _must_leave(self, slot: Slot, wait: str | None) -> bool:
        """Whether this frame ends with its batch: it is one too many, or serves one activation only, which ends here.

        Such an activation outlasts a model call, unless others wait for frames of this placement.
        """
        if wait is None:
            return False
        if is_isolated(slot.placement) and (wait != "model" or self.frames.paging.queued(slot.placement)):
            return True
        return self.frames.leaves(slot)

    async def _over(self, slot: Slot, work: dict[str, Any] | None, woken: Row | None, *, leave: bool) -> dict[str, Any]:
        """The frame's activation ended with its commit: its session, if there is more to do, needs a frame anew."""
        if work is None:
            self.frames.release(slot)
        if leave:
            self.frames.paging.slots.pop(slot.frame_id, None)
            self.frames.demand_changed.set()
        if woken is not None:
            self.frames.wake(woken)
            self.frames.dispatch()
        return EXIT if leave else work or await self.frames.rest(slot, None)

    async def _commit_step(
        self, slot: Slot, batch: Batch, following: Ready | None
    ) -> tuple[operations.CommitResult | None, dict[str, Any] | None]:
        """Commit the batch and, in the same transaction, activate the session that the frame turns to.

        With the commit the frame holds that session: before anything else is awaited, or others would find it ready.
        """
        price = self.gateway.price(batch.request_profile, batch.request_model)

        def commit(tx: Transaction) -> operations.CommitResult:
            result = operations.commit(tx, batch, holder=self.holder, price=price)
            if result.wait in PASSIVE_WAITS:
                activation.park(tx, batch.session_id, batch.epoch)
            return result

        todo: list[Any] = [commit]
        if following is not None:
            self.frames.placing.add(following.session_id)
            todo.append(self.frames.activation(slot, following, (batch.session_id, batch.epoch)))
        try:
            touches = (batch.session_id,) if following is None else (batch.session_id, following.session_id)
            result, *rest = await self.journal.submit_all(todo, *touches)
        except BaseException:
            if following is not None:
                self.frames.paging.add(following)
            raise
        finally:
            if following is not None:
                self.frames.placing.discard(following.session_id)
        work = rest[0] if rest else None
        if isinstance(work, StaleGeneration):
            self.stale(work)
            if following is not None:
                self.frames.paging.add(following)
        work = None if work is None or isinstance(work, BaseException) else self.frames.given(slot, work)
        if isinstance(result, BaseException):
            if work is None:
                self.frames.release(slot)
                raise result
            self.projection.metrics.count_fenced()
            return None, work
        return result, work

    async def _attach(self, slot: Slot, request: ModelRequest) -> dict[str, Any]:
        """The activation found its session waiting for a model: follow that call, or issue it again if it is lost."""
        session_id, epoch = slot.session_id, slot.epoch
        assert session_id is not None
        if self.calls.find(request.wait_key) is None:
            if self.draining.on:
                return await self.draining.dismiss(slot)
            try:
                issued = await self.journal.submit(
                    lambda tx: activation.reissue(tx, session_id, epoch, self.holder, request.model)
                )
            except Fenced:
                self.frames.release(slot)
                raise
            if issued is None:
                return {"kind": "work", **await self.frames.work(slot)}
            self._call(request, issued, slot.placement, slot.root_id)
        slot.reply_echo = None
        return await self.frames.rest(slot, "model")

    async def _start_call(
        self, batch: Batch, request: ModelRequest, result: operations.CommitResult, placement: str, root_id: str
    ) -> bool:
        """Send the call out; False if the session does not wait for it any more."""
        issued: activation.Issued | None = activation.Issued(result.attempt, result.longest_reply)
        if result.holder != self.holder and self.calls.find(request.wait_key) is None:
            # The batch was committed by a service that died with the call: it goes out again, as the next attempt.
            issued = await self.journal.submit(
                lambda tx: activation.reissue(tx, batch.session_id, batch.epoch, self.holder, request.model)
            )
        if issued is not None:
            self._call(request, issued, placement, root_id)
        return issued is not None

    def _call(self, request: ModelRequest, issued: activation.Issued, placement: str, root_id: str) -> None:
        session_id, run_id, round_number = split_wait_key(request.wait_key)
        request = with_longest_reply(request, issued.longest_reply)
        self.calls.start(Call(session_id, run_id, round_number, issued.attempt, placement, root_id, request))

    async def commit(self, call: dict[str, Any]) -> dict[str, Any]:
        """See `understudy.ports.Node.commit`."""
        batch = Batch.from_wire(call["batch"])
        self.own.add(batch.session_id)
        try:
            result = await self.journal.submit(
                lambda tx: operations.commit(tx, batch, holder=self.holder), batch.session_id
            )
        except BaseException as error:
            self.disown(batch.session_id, FENCED)
            if isinstance(error, Fenced):
                self.projection.metrics.count_fenced()
            raise
        self.disown(batch.session_id, batch.epoch)
        ack: Ack = result.ack
        return ack.to_wire()

    async def reload(self, session_id: str, epoch: int) -> dict[str, Any]:
        """See `understudy.ports.Node.reload`."""
        return await self.journal.submit(lambda tx: current_work(tx, session_id, epoch, 0))

    async def interrupted(self, session_id: str, epoch: int) -> str:
        """See `understudy.ports.Node.interrupted`."""
        self._end_watch(session_id, epoch)
        future = self.interrupts[session_id, epoch] = asyncio.get_running_loop().create_future()
        try:
            work = await self.journal.submit(lambda tx: current_work(tx, session_id, epoch, 1 << 62))
            return str(work["cancel"]) if work["cancel"] is not None else await future
        finally:
            if self.interrupts.get((session_id, epoch)) is future:
                del self.interrupts[session_id, epoch]

    def _end_watch(self, session_id: str, epoch: int) -> None:
        """End the call that is pending for an activation: nobody waits for it any more, or asks anew. It would last as
        long as the service, which can have only so many."""
        future = self.interrupts.pop((session_id, epoch), None)
        if future is not None:
            future.cancel()

    async def specification(self, session_id: str) -> dict[str, Any]:
        """See `understudy.ports.Node.specification`."""
        return await self.journal.submit(lambda tx: self.specification_in(tx, session_id), session_id)

    def specification_in(self, tx: Transaction, session_id: str) -> dict[str, Any]:
        """The same, for an operation."""
        row = tx.session(session_id)
        incarnation, spec = self._specs.get(session_id, (0, None))
        if spec is None or incarnation != row["incarnation"]:
            spec = tx.specification(session_id)
            self.remember_specification(row, spec)
        return spec

    def remember_specification(self, row: Row, spec: dict[str, Any]) -> None:
        """A session's specification as the store has it: it never changes."""
        if len(self._specs) > KNOWN_SESSIONS:
            self._specs.clear()
        self._specs[row["session_id"]] = row["incarnation"], spec

    async def placement(self, session_id: str) -> str:
        """The placement profile of a session. Raises `UnknownSession`."""
        if session_id not in self._placements:
            self.remember_placement(session_id, (await self.reading.session(session_id))["placement"])
        return self._placements[session_id]

    def remember_placement(self, session_id: str, placement: str) -> None:
        """A session's placement as the store has it: it never changes."""
        if len(self._placements) > KNOWN_SESSIONS:
            self._placements.clear()
        self._placements[session_id] = placement

    async def blob(self, digest: str) -> bytes:
        """See `understudy.ports.Node.blob`."""
        return await self.reading.blob(digest)

    def disown(self, session_id: str, epoch: int | None = None) -> Row | None:
        """End a commit of our own for a session; its row if it was woken within it.

        Args:
            epoch: of the activation that committed. What was woken under another one is none of its business, and is
                told as if nobody had committed.
        """
        self.own.discard(session_id)
        self._cancelled.discard(session_id)
        row = self._missed.pop(session_id, None)
        if row is None or epoch is None or row["epoch"] == epoch:
            return row
        if not self.elsewhere(row):
            self.frames.wake(row)
            self.frames.dispatch()
        return None

    def is_ready(self, row: Row) -> bool:
        """Whether an active session has something to do: it waits for nothing, or for a call that is lost."""
        return row["wait"] is None or (row["wait"] == "model" and self.calls.of_session(row["session_id"]) is None)

    # Commits and answers.

    def _committed(self, committed: Committed) -> None:
        self.projection.apply(committed)
        written = {session_id: (before, row["seq"]) for session_id, (before, row) in committed.written.items()}
        self.feed.publish(committed.events, written)
        for node_id, session_ids in self._by_home(committed).items():
            self.feed.leave(session_ids)
            self.spawn_task(self._tell(node_id, session_ids))
        for frame_id, session_id in committed.killed.items():
            self.frames.condemn(frame_id, session_id)
        self.act(committed.cancelled, committed.woken)
        self.timers.note(committed.timers.items())
        if committed.repeated:  # what the try before this one changed was not told: look everywhere
            self.feed.forget_all()
            self.spawn_task(self.recovery.sweep_all(0))
        self.frames.dispatch()

    def elsewhere(self, row: Row) -> bool:
        """Whether the session is at home on another node that has a service."""
        return row["node_id"] != self.config.node_id and row["node_id"] in self.nodes

    def take_in(self, row: Row) -> None:
        """Give a session that is being written a home, if its own is gone or drained: this node, unless it is too."""
        if self.nodes and row["node_id"] not in self.draining.homes:
            row["node_id"] = self.draining.home_for(row["root_id"])

    def _by_home(self, committed: Committed) -> dict[str, list[str]]:
        """What was written of sessions at home elsewhere: their own services must hear of it."""
        found: dict[str, list[str]] = {}
        for session_id, (_, row) in committed.written.items():
            if self.elsewhere(row):
                found.setdefault(row["node_id"], []).append(session_id)
        return found

    async def notice(self, session_ids: list[str]) -> None:
        """Another node service wrote to sessions at home here: act as if it had been this one.

        A notice that gets lost costs time only: the sweep finds what it would have told.
        """
        self.feed.forget(session_ids)
        self.spawn_task(self.timers.look())
        rows = await self.reading.active([self.config.node_id], session_ids=session_ids)
        # One that is being placed is left alone: its frame learns the rest with the answer to its first commit.
        ready = [row for row in rows if self.is_ready(row) and row["session_id"] not in self.frames.placing]
        self.act(cancelled(rows), {row["session_id"]: row for row in ready})
        self.frames.dispatch()

    def act(self, to_cancel: dict[str, Row], woken: dict[str, Row]) -> None:
        """Interrupt what was cancelled, and let what was woken go on."""
        for session_id, row in to_cancel.items():
            future = self.interrupts.pop((session_id, row["epoch"]), None)
            if future is not None and not future.done():
                future.set_result(row["cancel_reason"] or "cancelled")
            self.calls.abort(session_id)  # also of a run that was ended by force, and waits for nothing any more
            if session_id in self.own:  # its call goes out only after this commit is told
                self._cancelled.add(session_id)
        for session_id, row in woken.items():
            if session_id in self.own:  # whoever commits for it looks at this before it lets the session wait
                self._missed[session_id] = row
            elif not self.elsewhere(row):
                self.frames.wake(row)

    async def _answered(self, call: Call, answer: ModelAnswer) -> None:
        """Commit an answer where it arrives, and give it to the frame that waits for it, or to a free one."""
        slot = self.frames.paging.holder(call.session_id)
        resident = slot if slot is not None and slot.resting else None
        spare = self.frames.take_spare(call.session_id, call.placement) if slot is None else None
        ready = Ready(call.session_id, call.placement, call.root_id)

        def operation(tx: Transaction) -> tuple[operations.AnswerResult, dict[str, Any] | None, dict[str, Any] | None]:
            model = call.request.model
            result = operations.answer(tx, call.session_id, call.run_id, call.round, call.attempt, model, answer)
            row = tx.session(call.session_id)
            if slot is resident and self.draining.on:
                self.draining.leave_frame(tx, call.session_id, row["epoch"])
                return result, None, None
            if not result.won:
                return result, None, None
            if resident is not None and resident.epoch == row["epoch"]:
                return result, {**activation.current(tx, row), "seq": row["seq"], "batch_no": row["batch_no"]}, None
            if spare is not None and row["frame_id"] is None:  # else its crash, committed just before, placed it
                try:
                    return result, None, self.frames.activation(spare, ready, None)(tx)
                except UnderstudyError:
                    tx.woken[call.session_id] = row
            return result, None, None

        self.own.add(call.session_id)
        try:
            result, current, work = await self.journal.submit(operation, call.session_id)
        except BaseException:
            self.frames.hand_over(spare, None)
            raise
        finally:
            woken = self.disown(call.session_id)
        self.calls.forget(call)
        self.frames.hand_over(spare, work)
        if self.draining.on:
            if resident is not None and resident.resting and resident.session_id == call.session_id:
                self.frames.release(resident)
            self.draining.look()
            return
        if result.ended and woken is not None:  # perhaps under another specification
            self.frames.wake(woken)
            self.frames.dispatch()
            return
        if not result.won or work is not None or result.ended:
            return
        still = resident is not None and resident.resting and resident.session_id == call.session_id
        fresh = resident is not None and resident.reply_echo is not None and not result.repeated
        if resident is not None and still and current is not None and fresh:
            resident.resting = False
            self.frames.reply(resident, self.frames.answer_work(resident, result, current))
        else:
            self._wake_parked(call)
        self.frames.dispatch()

    def _wake_parked(self, call: Call) -> None:
        """The session lost its frame between the answer's arrival and its commit, or had none."""
        slot = self.frames.paging.holder(call.session_id)
        if slot is None:
            self.frames.paging.add(Ready(call.session_id, call.placement, call.root_id))
        elif slot.resting:
            self.frames.resume(slot)

    def _delta(self, session_id: str) -> None:
        self.feed.delta(session_id)

    def stale(self, error: StaleGeneration) -> None:
        """Another supervisor owns the store: activate nothing more, unless it has called here already."""
        if self.generation and error.details.get("generation") == self.generation:
            log.warning("generation %d lost the store", self.generation)
            self.journal.generation = 0

    def spawn_task(self, coroutine: Any) -> None:
        """Run something in the background until the service is closed."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a background task failed", exc_info=task.exception())

    def register(self, profile: ModelProfile) -> None:
        """Learn credentials. They stay in memory."""
        self.gateway.register(profile)


def split_wait_key(key: str) -> tuple[str, str, int]:
    """Session, run and round of a wait key."""
    session_id, run_id, round_number = key.split("/")
    return session_id, run_id, int(round_number)


def echo(batch: Batch, ack: Ack) -> list[dict[str, Any]]:
    """The batch's own messages with the `seq` they got, for the frame to add to its window."""
    entries = enumerate(batch.entries)
    return [{**entry.to_wire(), "seq": ack.first_seq + offset} for offset, entry in entries if hasattr(entry, "role")]
