"""The node service: journal, gateway and ready queue of a node, joined by `step`. A plain class.

Frames call in (`step`, `commit`), clients call in (`spawn`, `send`), the supervisor calls in (`take_up`).
The service itself calls nobody but the model endpoints and, through a port, the services of other nodes, so it needs no
Ray and its tests need none either.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from understudy.actors.gateway import Gateway
from understudy.config import ModelProfile
from understudy.errors import Fenced, StaleGeneration, UnderstudyError
from understudy.records import Ack, Batch, ModelAnswer, ModelRequest
from understudy.store import activation, operations
from understudy.store.activation import FrameRef
from understudy.store.engine import Database, now
from understudy.store.journal import Committed, Journal
from understudy.store.transaction import Row, Transaction
from understudy.supervisor.paging import Paging, Ready, Slot
from understudy.supervisor.restarts import decide

from .calls import Call, Calls
from .feed import Feed
from .projection import Projection
from .reading import Reading

log = logging.getLogger(__name__)

EXIT = {"kind": "exit"}

DEMAND_PAUSE = 0.05
BUSY_DEMAND_PAUSE = 0.5
"""Seconds until a change of demand is told: the first one at once or nearly so, under constant change now and then."""

KNOWN_SPECIFICATIONS = 10_000
SWEEP_SECONDS = 5.0
SWEEP_AGE = 3_000_000
"""A session that has been ready for so long (microseconds) without anybody knowing is picked up by the sweep."""


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


class NodeService:
    """One per node (SQLite: one per cluster).

    Guarantees: what it acknowledges is committed; a call may be repeated after its death without a second effect; a
    session is given to one frame at a time, under a new epoch each time.
    """

    def __init__(
        self, config: NodeConfig, gateway: Gateway, prepare_profile: Callable[[str], Any], tell: Tell = alone
    ) -> None:
        self.config = config
        self._tell = tell
        self.database = Database(config.store)
        self.journal = Journal(self.database, config.namespace, config.writer, self._committed)
        self.gateway = gateway
        self.calls = Calls(gateway, self._answered, self._delta, prepare_profile)
        self.paging = Paging()
        self.reading = Reading(self.database, config.namespace)
        self.feed = Feed(self.reading.events, self.calls.stream, self.reading.run)
        self.projection = Projection(self)
        self.demand_changed = asyncio.Event()
        self._demand_told = 0.0
        self.holder = f"{config.writer}#{now()}"
        self._own: set[str] = set()
        self._missed: set[str] = set()
        self._placing: set[str] = set()
        self._cancelled: set[str] = set()
        self._expected: dict[str, set[str]] = {}
        self._interrupts: dict[tuple[str, int], asyncio.Future[str]] = {}
        self._specs: dict[str, dict[str, Any]] = {}
        self.placements: dict[str, str] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._nodes: list[str] = []
        self.swept = 0

    async def start(self) -> None:
        """Open the store, catch up the projection, start committing.

        Raises:
            StoreUnreachable, StoreVersion: see `Database.prepare`.
        """
        await asyncio.to_thread(self.database.prepare)
        self.journal.start()
        await self.projection.start()
        self._spawn_task(self._sweeping())

    async def close(self) -> None:
        """Stop cleanly: what is unanswered stays a wait in the store."""
        await self.calls.close()
        for task in self._tasks:
            task.cancel()
        await self.projection.close()
        await self.journal.close()
        await self.gateway.close()

    @property
    def generation(self) -> int:
        """The supervisor's generation that this service acts for; 0: it activates nothing."""
        return self.journal.generation

    # What frames call.

    async def step(self, call: dict[str, Any]) -> dict[str, Any]:
        """See `understudy.ports.Node.step`."""
        slot = self._slot(call)
        if call.get("session_id") is None:
            return await self._rest(slot, None)
        slot.remember(call["session_id"], call["known_seq"])
        request = ModelRequest.from_wire(call["request"]) if call["request"] else None
        if call["batch"] is None:
            assert request is not None
            return await self._attach(slot, request)
        batch = Batch.from_wire(call["batch"])
        following = self.paging.next_for(slot) if batch.wait and self.generation else None
        self._own.add(batch.session_id)
        try:
            result, work = await self._commit_step(slot, batch, following)
        finally:
            woken = self._disown(batch.session_id)
        if result is None:  # fenced, but the frame has other work
            return self.given(slot, work)
        if woken and result.wait != "model":  # an input or a child's result was committed right behind the batch
            result = replace(result, wait=None)
        if result.wait == "model" and request is not None:
            started = await self._start_call(batch, request, result, slot.placement)
            if not started:
                result = replace(result, wait=None)
            elif batch.session_id in self._cancelled:
                self.calls.abort(batch.session_id)
        self._cancelled.discard(batch.session_id)
        if call.get("leave"):
            self.paging.slots.pop(slot.frame_id, None)
            await self.journal.submit(lambda tx: activation.park(tx, batch.session_id, batch.epoch))
            self._requeue_unless_waiting(batch.session_id, slot.placement, result.wait)
            self.demand_changed.set()
            return EXIT
        if work is not None:
            self._requeue_unless_waiting(batch.session_id, slot.placement, result.wait)
            return self.given(slot, work)
        if result.wait is None:
            slot.wait = None
            return {"kind": "work", **await self._work(slot)}
        # Where a replayed batch's messages went, only the store knows: they are read from there when the wait ends.
        slot.reply_echo = None if result.ack.replayed else echo(batch, result.ack)
        return await self._rest(slot, result.wait)

    async def _commit_step(
        self, slot: Slot, batch: Batch, following: Ready | None
    ) -> tuple[operations.CommitResult | None, dict[str, Any] | None]:
        """Commit the batch and, in the same transaction, activate the session that the frame turns to."""
        todo: list[Any] = [lambda tx: operations.commit(tx, batch, holder=self.holder)]
        if following is not None:
            self._placing.add(following.session_id)
            todo.append(self.activation(slot, following, (batch.session_id, batch.epoch)))
        try:
            touches = (batch.session_id,) if following is None else (batch.session_id, following.session_id)
            result, *rest = await self.journal.submit_all(todo, *touches)
        except BaseException:
            if following is not None:
                self.paging.add(following)
            raise
        finally:
            if following is not None:
                self._placing.discard(following.session_id)
        work = rest[0] if rest else None
        if isinstance(work, StaleGeneration):
            self._stale()
            if following is not None:
                self.paging.add(following)
        if isinstance(work, BaseException):
            work = None
        if isinstance(result, BaseException):
            self._release(slot)
            if work is None:
                raise result
            self.projection.metrics.count_fenced()
            return None, work
        return result, work

    def given(self, slot: Slot, work: dict[str, Any] | None) -> dict[str, Any]:
        """Note that the frame holds the session of `work` from now on."""
        assert work is not None
        for other in self.paging.slots.values():
            if other is not slot and other.session_id == work["session_id"]:
                self._release(other)  # fenced by this activation; its next call will tell it
        slot.session_id, slot.epoch, slot.wait, slot.resting = work["session_id"], work["epoch"], None, False
        slot.remember(work["session_id"], work["seq"])
        if slot.frame_id not in self.paging.slots:  # it died while its work was being committed
            self._spawn_task(self._crashed(slot, work["session_id"], work["epoch"], "process_died", now()))
        return {"kind": "work", **work}

    def _requeue_unless_waiting(self, session_id: str, placement: str, wait: str | None) -> None:
        if wait is None:
            self.paging.add(Ready(session_id, placement))
            self._dispatch()

    async def _attach(self, slot: Slot, request: ModelRequest) -> dict[str, Any]:
        """The activation found its session waiting for a model: follow that call, or issue it again if it is lost."""
        session_id, epoch = slot.session_id, slot.epoch
        assert session_id is not None
        if self.calls.find(request.wait_key) is None:
            try:
                attempt = await self.journal.submit(
                    lambda tx: activation.reissue(tx, session_id, epoch, self.holder, request.model)
                )
            except Fenced:
                self._release(slot)
                raise
            if attempt is None:
                return {"kind": "work", **await self._work(slot)}
            self._call(request, attempt, slot.placement)
        slot.reply_echo = None
        return await self._rest(slot, "model")

    async def _start_call(
        self, batch: Batch, request: ModelRequest, result: operations.CommitResult, placement: str
    ) -> bool:
        """Send the call out; False if the session does not wait for it any more."""
        attempt: int | None = result.attempt
        if result.holder != self.holder and self.calls.find(request.wait_key) is None:
            # The batch was committed by a service that died with the call: it goes out again, as the next attempt.
            attempt = await self.journal.submit(
                lambda tx: activation.reissue(tx, batch.session_id, batch.epoch, self.holder, request.model)
            )
        if attempt is not None:
            self._call(request, attempt, placement)
        return attempt is not None

    def _call(self, request: ModelRequest, attempt: int, placement: str) -> None:
        session_id, run_id, round_number = split_wait_key(request.wait_key)
        self.calls.start(Call(session_id, run_id, round_number, attempt, placement, request))

    async def commit(self, call: dict[str, Any]) -> dict[str, Any]:
        """See `understudy.ports.Node.commit`."""
        batch = Batch.from_wire(call["batch"])
        self._own.add(batch.session_id)
        try:
            result = await self.journal.submit(
                lambda tx: operations.commit(tx, batch, holder=self.holder), batch.session_id
            )
        except Fenced:
            self.projection.metrics.count_fenced()
            raise
        finally:
            self._disown(batch.session_id)
        ack: Ack = result.ack
        return ack.to_wire()

    async def reload(self, session_id: str, epoch: int) -> dict[str, Any]:
        """See `understudy.ports.Node.reload`."""
        return await self.journal.submit(lambda tx: current_work(tx, session_id, epoch, 0))

    async def interrupted(self, session_id: str, epoch: int) -> str:
        """See `understudy.ports.Node.interrupted`."""
        future = self._interrupts.get((session_id, epoch))
        if future is None or future.done():
            future = self._interrupts[session_id, epoch] = asyncio.get_running_loop().create_future()
        work = await self.journal.submit(lambda tx: current_work(tx, session_id, epoch, 1 << 62))
        if work["cancel"] is not None:
            return str(work["cancel"])
        return await asyncio.shield(future)

    async def specification(self, session_id: str) -> dict[str, Any]:
        """See `understudy.ports.Node.specification`."""
        if session_id in self._specs:
            return self._specs[session_id]
        return await self.journal.submit(lambda tx: self._specification(tx, session_id))

    def _specification(self, tx: Transaction, session_id: str) -> dict[str, Any]:
        if session_id not in self._specs:
            self.remember_specification(session_id, activation.specification(tx, session_id))
        return self._specs[session_id]

    def remember_specification(self, session_id: str, spec: dict[str, Any]) -> None:
        """A session's specification as the store has it: it never changes."""
        if len(self._specs) > KNOWN_SPECIFICATIONS:
            self._specs.clear()
        self._specs[session_id] = spec

    async def placement(self, session_id: str) -> str:
        """The placement profile of a session. Raises `UnknownSession`."""
        if session_id not in self.placements:
            if len(self.placements) > 10_000:
                self.placements.clear()
            self.placements[session_id] = (await self.reading.session(session_id))["placement"]
        return self.placements[session_id]

    async def blob(self, digest: str) -> bytes:
        """See `understudy.ports.Node.blob`."""
        return await self.reading.blob(digest)

    # Frames and their sessions.

    def _slot(self, call: dict[str, Any]) -> Slot:
        """The slot of the calling frame, and what its call tells about sessions it was thought to hold."""
        frame = call["frame"]
        slot = self.paging.slots.get(frame["frame_id"])
        if slot is None:
            slot = Slot(**frame)
            self.paging.slots[slot.frame_id] = slot
        if slot.reply is not None and not slot.reply.done():
            slot.reply.cancel()
        session_id, epoch = call.get("session_id"), call.get("epoch", 0)
        held, slot.session_id = slot.session_id, None
        if held is not None and (held, slot.epoch) != (session_id, epoch) and self.paging.holder(held) is None:
            # It was given a session and never heard of it: its last call was cut off.
            self.paging.add(Ready(held, slot.placement, "takeover"))
        for other in self._expected.pop(slot.frame_id, set()) - {session_id}:
            self.paging.add(Ready(other, slot.placement, "takeover"))
        slot.session_id, slot.epoch, slot.resting, slot.wait = session_id, epoch, False, None
        return slot

    def _disown(self, session_id: str) -> bool:
        """End a commit of our own for a session; True if the session was woken within it."""
        self._own.discard(session_id)
        woken = session_id in self._missed
        self._missed.discard(session_id)
        return woken

    def _release(self, slot: Slot) -> None:
        slot.session_id, slot.epoch, slot.wait = None, 0, None

    async def _rest(self, slot: Slot, wait: str | None) -> dict[str, Any]:
        """Hold the frame's call until there is work for it."""
        slot.reply = asyncio.get_running_loop().create_future()
        self.paging.rest(slot, wait)
        self._dispatch()
        self.demand_changed.set()
        return await slot.reply  # type: ignore[no-any-return]

    def _dispatch(self) -> None:
        """Give ready sessions to resting frames."""
        if not self.paging.ready:
            return
        if self.generation:
            for slot, ready in self.paging.pairs():
                parked = (slot.session_id, slot.epoch) if slot.session_id is not None else None
                self._release(slot)
                self._spawn_task(self._activate(slot, ready, parked))
        if self.paging.ready:
            self.demand_changed.set()

    def activation(
        self, slot: Slot, ready: Ready, parked: tuple[str, int] | None
    ) -> Callable[[Transaction], dict[str, Any]]:
        frame = FrameRef(slot.frame_id, slot.pid, slot.node_id)
        known = slot.known.get(ready.session_id)

        def operation(tx: Transaction) -> dict[str, Any]:
            if self.elsewhere(tx.session(ready.session_id)):
                raise Fenced("another node looks after the session", session_id=ready.session_id)
            tx.woken.pop(ready.session_id, None)
            work = activation.activate(
                tx, ready.session_id, frame, after_seq=known or 0, cause=ready.cause, down_since=ready.down_since,
                parked=parked,
            )  # fmt: skip
            if known is None:  # the frame would ask for it
                work["spec"] = self._specification(tx, ready.session_id)
            return work

        return operation

    async def _activate(self, slot: Slot, ready: Ready, parked: tuple[str, int] | None) -> None:
        holder = self.paging.holder(ready.session_id)
        if holder is not None:  # it was placed in the meantime
            self.paging.rest(slot, None)
            if holder.resting:
                self._resume(holder)
            return
        self._placing.add(ready.session_id)
        try:
            work = await self.journal.submit(self.activation(slot, ready, parked), ready.session_id)
        except StaleGeneration:
            self._stale()
            self.paging.add(ready)
            self.paging.rest(slot, None)
        except UnderstudyError as error:
            log.info("session %s needs no frame: %s", ready.session_id, error)
            self.paging.rest(slot, None)
            self._dispatch()
        else:
            self.reply(slot, self.given(slot, work))
        finally:
            self._placing.discard(ready.session_id)

    def reply(self, slot: Slot, work: dict[str, Any]) -> None:
        if slot.reply is not None and not slot.reply.done():
            slot.reply.set_result(work)

    async def _work(self, slot: Slot) -> dict[str, Any]:
        """What a frame must know to go on with the session it holds."""
        session_id, epoch = slot.session_id, slot.epoch
        assert session_id is not None
        known = slot.known.get(session_id, 0)
        try:
            work = await self.journal.submit(lambda tx: current_work(tx, session_id, epoch, known), session_id)
        except Fenced:
            self._release(slot)
            raise
        slot.remember(session_id, work["seq"])
        return work

    async def _continue(self, slot: Slot) -> None:
        """The wait of the session in this frame is over."""
        try:
            self.reply(slot, {"kind": "work", **await self._work(slot)})
        except UnderstudyError as error:
            if slot.reply is not None and not slot.reply.done():
                slot.reply.set_exception(error)

    def _resume(self, slot: Slot) -> None:
        """Let a resting frame go on with the session it holds."""
        slot.resting = False
        self._spawn_task(self._continue(slot))

    def _is_ready(self, row: Row) -> bool:
        """Whether an active session has something to do: it waits for nothing, or for a call that is lost."""
        return row["wait"] is None or (row["wait"] == "model" and self.calls.of_session(row["session_id"]) is None)

    def _wake(self, row: Row, cause: str = "ready", down_since: int = 0) -> None:
        """A session is ready: its own frame goes on, or it queues for one."""
        slot = self.paging.holder(row["session_id"])
        if slot is not None and slot.resting and slot.epoch == row["epoch"]:
            self._resume(slot)
        elif slot is None or slot.epoch < row["epoch"]:
            self.paging.add(Ready(row["session_id"], row["placement"], cause, down_since))

    # Commits and answers.

    def _committed(self, committed: Committed) -> None:
        self.projection.apply(committed)
        written = {session_id: (before, row["seq"]) for session_id, (before, row) in committed.written.items()}
        self.feed.publish(committed.events, written)
        for node_id, session_ids in self._by_home(committed).items():
            self._spawn_task(self._tell(node_id, session_ids))
        self._act(committed.cancelled, committed.woken)
        if committed.repeated:
            self._spawn_task(self._sweep_all(0))
        self._dispatch()

    def elsewhere(self, row: Row) -> bool:
        """Whether the session is at home on another node that has a service."""
        return row["node_id"] != self.config.node_id and row["node_id"] in self._nodes

    def take_in(self, row: Row) -> None:
        """Make this node the home of a session that is being written, if its home is gone."""
        if self._nodes and row["node_id"] not in self._nodes:
            row["node_id"] = self.config.node_id

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
        told = set(session_ids)
        rows = [row for row in await self.reading.active([self.config.node_id]) if row["session_id"] in told]
        # One that is being placed is left alone: its frame learns the rest with the answer to its first commit.
        ready = [row for row in rows if self._is_ready(row) and row["session_id"] not in self._placing]
        self._act(_cancelled(rows), {row["session_id"]: row for row in ready})
        self._dispatch()

    def _act(self, cancelled: dict[str, Row], woken: dict[str, Row]) -> None:
        """Interrupt what was cancelled, and let what was woken go on."""
        for session_id, row in cancelled.items():
            future = self._interrupts.pop((session_id, row["epoch"]), None)
            if future is not None and not future.done():
                future.set_result(row["cancel_reason"] or "cancelled")
            if row["wait"] == "model":
                self.calls.abort(session_id)
                if session_id in self._own:  # its call goes out only after this commit is told
                    self._cancelled.add(session_id)
        for session_id, row in woken.items():
            if session_id in self._own:  # whoever commits for it looks at this before it lets the session wait
                self._missed.add(session_id)
            elif not self.elsewhere(row):
                self._wake(row)

    async def _answered(self, call: Call, answer: ModelAnswer) -> None:
        """Commit an answer where it arrives, and give it to the frame that waits for it, or to a free one."""
        slot = self.paging.holder(call.session_id)
        resident = slot if slot is not None and slot.resting else None
        spare = self.take_spare(call.session_id, call.placement) if slot is None else None
        ready = Ready(call.session_id, call.placement)

        def operation(tx: Transaction) -> tuple[operations.AnswerResult, dict[str, Any] | None, dict[str, Any] | None]:
            model = call.request.model
            result = operations.answer(tx, call.session_id, call.run_id, call.round, call.attempt, model, answer)
            row = tx.session(call.session_id)
            if not result.won:
                return result, None, None
            if resident is not None and resident.epoch == row["epoch"]:
                return result, {**activation.current(tx, row), "seq": row["seq"], "batch_no": row["batch_no"]}, None
            if spare is not None and row["frame_id"] is None:  # else its crash, committed just before, placed it
                try:
                    return result, None, self.activation(spare, ready, None)(tx)
                except UnderstudyError:
                    tx.woken[call.session_id] = row
            return result, None, None

        self._own.add(call.session_id)
        try:
            result, current, work = await self.journal.submit(operation, call.session_id)
        finally:
            self._disown(call.session_id)
        self.calls.forget(call)
        self.hand_over(spare, work)
        if not result.won or work is not None:
            return
        still = resident is not None and resident.resting and resident.session_id == call.session_id
        fresh = resident is not None and resident.reply_echo is not None and not result.repeated
        if resident is not None and still and current is not None and fresh:
            resident.resting = False
            self.reply(resident, self._answer_work(resident, result, current))
        else:
            self._wake_parked(call)
        self._dispatch()

    def _wake_parked(self, call: Call) -> None:
        """The session lost its frame between the answer's arrival and its commit, or had none."""
        slot = self.paging.holder(call.session_id)
        if slot is None:
            self.paging.add(Ready(call.session_id, call.placement))
        elif slot.resting:
            self._resume(slot)

    def take_spare(self, session_id: str, placement: str) -> Slot | None:
        """Reserve a frame without a session for this one; None while others queue for frames."""
        if self.paging.ready or not self.generation:
            return None
        slot = self.paging.frame_for(session_id, placement)
        if slot is None or slot.session_id is not None:
            return None
        slot.resting = False
        return slot

    def hand_over(self, slot: Slot | None, work: dict[str, Any] | None) -> None:
        """Give a reserved frame its work; without any it was not needed and is free again."""
        if slot is not None and work is not None:
            self.reply(slot, self.given(slot, work))
        elif slot is not None:
            self.paging.rest(slot, None)
            self._dispatch()

    def _answer_work(self, slot: Slot, result: operations.AnswerResult, current: dict[str, Any]) -> dict[str, Any]:
        """The work of a frame that waited for this answer, without reading the store again."""
        assert slot.session_id is not None
        messages = list(slot.reply_echo or ())
        if result.message is not None:
            messages.append(result.message.to_wire())
        after = slot.known.get(slot.session_id, 0)
        slot.remember(slot.session_id, current["seq"])
        calls = [call.to_wire() for call in result.calls]
        work = {"session_id": slot.session_id, "epoch": slot.epoch, "after_seq": after, "messages": messages}
        return {"kind": "work", "v": 1, **work, "calls": calls, **current}

    def _delta(self, session_id: str) -> None:
        self.feed.delta(session_id)

    # What the supervisor calls.

    async def take_up(self, generation: int, live_frames: list[str], nodes: list[str]) -> dict[str, Any]:
        """Act for this generation: resume what is at home here and no live frame holds. Harmless when repeated.

        Args:
            live_frames: frames known to be alive; sessions of others are treated as crashed.
            nodes: those that have a node service, this one included; sessions of others get a new home (`adopt`).

        Raises:
            StaleGeneration: another supervisor owns the store, or this node is not one of `nodes` any more.
        """
        home = self.config.node_id
        if home not in nodes:
            raise StaleGeneration(f"node {home[:8]} was given up")
        self.journal.generation = generation
        self._nodes = nodes
        adopted = await self.journal.submit(lambda tx: activation.adopt(tx, home, nodes))
        rows = await self.reading.active([home])
        live = set(live_frames)
        for frame_id in [frame_id for frame_id in self.paging.slots if frame_id not in live]:
            slot = self.paging.slots.pop(frame_id)
            self._fail_reply(slot)
        resumed = 0
        for row in rows:
            resumed += await self._take_up_session(row, live)
        waiting = {row["session_id"] for row in rows if row["wait"] == "timer"}
        for timer in await self.reading.timers():
            if timer["session_id"] in waiting:
                self._schedule(timer["session_id"], timer["name"], timer["due_at"])
        self._dispatch()
        self.demand_changed.set()
        return {"active": len(rows), "resumed": resumed, "adopted": adopted}

    async def _take_up_session(self, row: Row, live: set[str]) -> int:
        session_id, frame_id = row["session_id"], row["frame_id"]
        held = self.paging.holder(session_id)
        if held is not None or session_id in self.paging.ready or session_id in self._own:
            return 0
        if frame_id is not None and frame_id in live:
            if frame_id not in self.paging.slots:  # it will call in, with this session or with another
                self._expected.setdefault(frame_id, set()).add(session_id)
            else:
                self.paging.add(Ready(session_id, row["placement"], "takeover"))
            return 0
        if frame_id is not None:
            slot = Slot(frame_id, row["actor_pid"] or 0, row["node_id"], row["placement"])
            await self._crashed(slot, session_id, row["epoch"], "process_died", now())
            return 1
        if self._is_ready(row):
            self.paging.add(Ready(session_id, row["placement"], "takeover"))
        return 0

    async def _sweeping(self) -> None:
        """Compare what is in memory with the store, now and then: a wake-up that was lost must not last."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            if not self.generation:
                continue
            await self._sweep_all(SWEEP_AGE)

    async def _sweep_all(self, age: int) -> None:
        try:
            rows = await self.reading.active([self.config.node_id])
            self._act(_cancelled(rows), {})
            for row in rows:
                self._sweep(row, age)
        except UnderstudyError as error:
            log.warning("the sweep is put off: %s", error)
        self._dispatch()

    def _sweep(self, row: Row, age: int) -> None:
        session_id = row["session_id"]
        placed = session_id in self.paging.ready or session_id in self._own | self._placing
        if not self._is_ready(row) or placed or row["updated_at"] > now() - age:
            return
        holder = self.paging.holder(session_id)
        if holder is not None and holder.epoch < row["epoch"]:
            self._release(holder)
            holder = None
        if holder is None and row["frame_id"] not in self._expected:
            self.paging.add(Ready(session_id, row["placement"], "takeover"))
        elif holder is not None and holder.resting and holder.epoch == row["epoch"]:
            self._resume(holder)
        else:
            return
        self.swept += 1
        log.warning("session %s was ready and nobody knew: picked up", session_id)

    async def frame_died(self, frame_id: str, cause: str) -> None:
        """A frame's process is known to be gone: resume what it held."""
        since = now()
        slot = self.paging.slots.pop(frame_id, None)
        self.demand_changed.set()
        held = {slot.session_id: slot.epoch} if slot is not None and slot.session_id is not None else {}
        if slot is not None:
            self._fail_reply(slot)
        else:  # it never called in here: the store knows what it holds
            rows = await self.reading.active(None)
            held = {row["session_id"]: row["epoch"] for row in rows if row["frame_id"] == frame_id}
            placements = {row["placement"] for row in rows if row["frame_id"] == frame_id}
            slot = Slot(frame_id, 0, self.config.node_id, next(iter(placements), ""))
            self._expected.pop(frame_id, None)
        for session_id, epoch in held.items():
            await self._crashed(slot, session_id, epoch, cause, since)

    async def _crashed(self, slot: Slot, session_id: str, epoch: int, cause: str, since: int) -> None:
        """Decide about a death and, in the same transaction, give the session to a free frame if there is one."""
        spec = await self.specification(session_id)
        future = self._interrupts.pop((session_id, epoch), None)
        if future is not None and not future.done():
            future.set_exception(Fenced("the activation is over", session_id=session_id))
            future.exception()
        spare = self.paging.frame_for(session_id, slot.placement) if self.generation else None
        waited = slot.resting and slot.wait is not None
        if waited and spare is not None and spare.session_id is not None and spare.wait != "idle":
            spare = None  # it would only wait there: no reason to take the frame of another that waits
        parked = (spare.session_id, spare.epoch) if spare is not None and spare.session_id is not None else None
        if spare is not None:
            spare.resting = False
            self._release(spare)
        ready = Ready(session_id, slot.placement, "resume", since)

        def operation(tx: Transaction) -> tuple[Any, dict[str, Any] | None]:
            if self.elsewhere(tx.session(session_id)):
                return None, None  # its new home has dealt with this death
            verdict = activation.crash(tx, session_id, epoch, decide, cause=cause, pid=slot.pid, policy=spec["restart"])
            if verdict is None or verdict.action != "resume" or spare is None:
                return verdict, None
            if verdict.delay and tx.session(session_id)["wait"] == "timer":
                return verdict, None
            return verdict, self.activation(spare, ready, parked)(tx)

        self._own.add(session_id)
        try:
            verdict, work = await self.journal.submit(operation, session_id)
        except StaleGeneration:
            self._stale()
            verdict, work = None, None
        finally:
            woken = self._disown(session_id)
        self.hand_over(spare, work)
        if verdict is not None and verdict.action == "resume" and work is None:
            if verdict.delay and not woken:
                self._schedule(session_id, activation.RESUME_TIMER, now() + verdict.delay)
            else:
                await self._requeue(session_id, slot.placement, since)
        self._dispatch()

    async def _requeue(self, session_id: str, placement: str, since: int) -> None:
        row = await self.reading.session(session_id)
        if row["active"] and self._is_ready(row):
            self.paging.add(Ready(session_id, placement, "resume", since))

    def _fail_reply(self, slot: Slot) -> None:
        if slot.reply is not None and not slot.reply.done():
            slot.reply.cancel()

    def _schedule(self, session_id: str, name: str, due_at: int) -> None:
        async def fire() -> None:
            await asyncio.sleep(max(0.0, (due_at - now()) / 1e6))
            await self.journal.submit(lambda tx: activation.fire(tx, session_id, name))

        self._spawn_task(fire())

    def _stale(self) -> None:
        """Another supervisor owns the store: activate nothing more."""
        if self.journal.generation:
            log.warning("generation %d lost the store", self.journal.generation)
        self.journal.generation = 0

    def _spawn_task(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a background task failed", exc_info=task.exception())

    async def demand(self, timeout: float) -> dict[str, dict[str, Any]]:
        """`Paging.demand` with the ids of the frames that called in, as soon as it changes or after `timeout`."""
        if timeout > 0:
            busy = time.monotonic() - self._demand_told < 1.0
            try:
                await asyncio.wait_for(self.demand_changed.wait(), timeout)
                await asyncio.sleep(BUSY_DEMAND_PAUSE if busy else DEMAND_PAUSE)
            except TimeoutError:
                pass
            self._demand_told = time.monotonic()
        self.demand_changed.clear()
        found: dict[str, dict[str, Any]] = {name: dict(row) for name, row in self.paging.demand().items()}
        for name, row in found.items():
            row["frames"] = [slot.frame_id for slot in self.paging.slots.values() if slot.placement == name]
        return found

    async def retire(self, placement: str, count: int) -> None:
        """Let idle frames of a placement go."""
        for slot in list(self.paging.slots.values()):
            idle = slot.resting and (slot.session_id is None or slot.wait == "idle")
            if count > 0 and idle and slot.placement == placement:
                count -= 1
                slot.resting = False
                self.paging.slots.pop(slot.frame_id, None)
                session_id, epoch = slot.session_id, slot.epoch
                self._release(slot)
                if session_id is not None:
                    await self.journal.submit(lambda tx, s=session_id, e=epoch: activation.park(tx, s, e))  # type: ignore[misc]
                self.reply(slot, EXIT)

    def register(self, profile: ModelProfile) -> None:
        """Learn credentials. They stay in memory."""
        self.gateway.register(profile)


def _cancelled(rows: list[Row]) -> dict[str, Row]:
    return {row["session_id"]: row for row in rows if row["cancel_reason"] is not None}


def split_wait_key(key: str) -> tuple[str, str, int]:
    """Session, run and round of a wait key."""
    session_id, run_id, round_number = key.split("/")
    return session_id, run_id, int(round_number)


def current_work(tx: Transaction, session_id: str, epoch: int, after_seq: int) -> dict[str, Any]:
    """The work of a live activation. Raises `Fenced` when it is over."""
    row = tx.session(session_id)
    if row["epoch"] != epoch:
        raise Fenced(f"epoch {epoch} is fenced: the store has epoch {row['epoch']}", session_id=session_id)
    return activation.work(tx, row, after_seq)


def echo(batch: Batch, ack: Ack) -> list[dict[str, Any]]:
    """The batch's own messages with the `seq` they got, for the frame to add to its window."""
    entries = enumerate(batch.entries)
    return [{**entry.to_wire(), "seq": ack.first_seq + offset} for offset, entry in entries if hasattr(entry, "role")]
