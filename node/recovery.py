"""What becomes of sessions whose frame or node service died, and of wake-ups that got lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from understudy.errors import StaleGeneration, UnderstudyError
from understudy.protocol import Work
from understudy.records import ActivationId, Cancelled
from understudy.store import activation, draining, queries
from understudy.store.engine import now
from understudy.store.transaction import Row, Transaction
from understudy.supervisor.ports import TakenUp
from understudy.supervisor.restarts import decide

from .frames import ready_of
from .paging import Ready, Slot

if TYPE_CHECKING:
    from .node_service import NodeService

log = logging.getLogger(__name__)

SWEEP_SECONDS = 5.0
CHUNK = 200
"""So many sessions are looked at before whoever else waits for the event loop gets it."""

BURIED_SECONDS = 600.0
"""So long a call that was made before a frame's death may still be on the way: supervisors give theirs up after two
minutes."""

SWEEP_AGE = 3_000_000
"""A session that has been ready for so long (microseconds) without anybody knowing is picked up by the sweep."""


class Recovery:
    """Takes up what nobody holds any more.

    Attributes:
        swept: how many sessions the sweep had to pick up; each is a wake-up that got lost.
        knows_frames: a `take_up` has read which frames the store names. Until then a session at work in a frame that
            has not called in here looks as if nobody held it.
        buried: frames that died, and when; their ids are not used again. A `take_up` under way may have read that one
            has a session, and a call of its own may arrive after its death. Once neither can be, it is forgotten.
    """

    def __init__(self, node: NodeService) -> None:
        self._node = node
        self._frames = node.frames
        self._paging = node.frames.paging
        self.swept = 0
        self.knows_frames = False
        self.buried: dict[str, float] = {}
        self._deaths: dict[str, asyncio.Future[bool]] = {}
        self._taking_up = 0
        self._begun = self._done = (0, 0)

    async def take_up(self, generation: int, number: int, nodes: list[str]) -> TakenUp:
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
            return TakenUp()
        if home not in nodes:
            raise StaleGeneration(f"node {home[:8]} was given up")
        self._begun = generation, number
        self._node.journal.generation = generation
        self._node.supervisor_heard = time.monotonic()
        if self._node.nodes != nodes:
            self._node.nodes = list(nodes)
            self._node.projection.nodes_changed()
        self._taking_up += 1
        try:
            found = await self._take_up(home, nodes)
        except BaseException:
            if self._begun == (generation, number):
                self._node.journal.generation = 0  # so that the supervisor sees that it must say it again
                self._frames.supply.changed.set()
            raise
        finally:
            self._taking_up -= 1
        self._done = max(self._done, (generation, number))
        self.knows_frames = True
        self._frames.dispatch()
        self._frames.supply.changed.set()
        return found

    async def _take_up(self, home: str, nodes: list[str]) -> TakenUp:
        adopted = await self._adopt(home, nodes)
        await self._node.tell_homes()
        rows, resumed = await self._node.reading.active([home]), 0
        async for row in in_chunks(rows):
            resumed += await self._take_up_session(row)
        await self._node.timers.look()
        return TakenUp(len(rows), resumed, len(adopted))

    async def _adopt(self, home: str, nodes: list[str]) -> list[str]:
        """Take this node's share of what has no home, and learn which nodes are drained."""
        generation = self._node.generation

        def operation(tx: Transaction) -> tuple[list[str], dict[str, Row]]:
            # While it waited the next generation may have begun: then `nodes` lacks those that have joined since.
            if tx.generation != generation:
                raise StaleGeneration(f"generation {generation} is over")
            return activation.adopt(tx, home, nodes), draining.drains(tx)

        adopted, drains = await self._node.journal.submit(operation)
        self._node.draining.told(drains)
        return adopted

    async def _take_up_session(self, row: Row) -> int:
        session_id, frame_id = row["session_id"], row["frame_id"]
        if self._frames.holder(row) is not None:
            return 0
        # What was adopted from a node that is no more, or from another cluster, has no pid any more.
        if frame_id is not None and (row["actor_pid"] is None or frame_id in self.buried):
            await self._crashed_unseen(row)
            return 1
        # Also if somebody is about to deal with the session: a request that is repeated does nothing with it.
        if frame_id is not None and frame_id not in self._paging.slots:
            self._frames.expect(row)
        elif session_id in self._frames.placing and frame_id is None and self._node.is_ready(row):
            self._frames.queue(ready_of(row, "takeover"))
        elif not self._is_placed(session_id) and (frame_id is not None or self._node.is_ready(row)):
            self._paging.add(ready_of(row, "takeover"))
        return 0

    async def _crashed_unseen(self, row: Row) -> None:
        """A session is in a frame that nobody here knows, nor whether its process is gone."""
        slot = Slot(
            row["frame_id"], row["actor_pid"] or 0, row["node_id"], row["placement"], root_id=row["root_id"]
        )  # fmt: skip
        await self.crashed(slot, ActivationId.of(row), "process_died", now(), may_live=True)

    def _is_placed(self, session_id: str) -> bool:
        """Whether somebody is about to deal with the session."""
        return any(session_id in place for place in self._places)

    @property
    def _places(self) -> tuple[Mapping[str, object], ...]:
        """Where sessions are that somebody is about to deal with."""
        return self._paging.ready, self._node.own, self._frames.chosen, self._frames.placing

    async def sweeping(self) -> None:
        """Compare what is in memory with the store, now and then: a wake-up that was lost must not last."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            if not self._node.generation:
                continue
            await self.sweep_all(SWEEP_AGE)

    async def sweep_all(self, age: int) -> None:
        """Pick up every session of this node that has been ready for `age` microseconds without being placed."""
        if not self.knows_frames:
            return
        try:
            home, nodes = self._node.config.node_id, self._node.nodes
            # A node that was given up may have accepted something since; an import has no home yet.
            await self._adopt(home, nodes)
            held = {slot.session_id for slot in self._paging.slots.values() if slot.session_id is not None}
            cared_for = held.union(*self._places, self._node.calls.sessions())
            resting = {slot.frame_id: slot.since for slot in self._paging.slots.values() if slot.resting}
            gone = self._node.feed.gone
            rows = await self._node.reading.active([home], may_be_ready=True)
            self._node.feed.at_home((row["session_id"] for row in rows), gone)
            self._node.act(cancelled(rows), {})
            await self._end_what_is_over(age)
            async for row in in_chunks(rows):
                await self._swept(row, age, cared_for, resting)
            await self._node.timers.look()
        except StaleGeneration as error:
            self._node.stale(error)
        except UnderstudyError as error:
            log.warning("the sweep is put off: %s", error)
        self._frames.dispatch()

    async def _end_what_is_over(self, age: int) -> None:
        """End tools and model calls of activations and runs that another node ended by force, and was not heard; or
        that this one ended in a commit whose outcome it did not know, or that are of sessions that were removed.

        Also the calls that wait for a run to be ended which is over: such a call may arrive after all others.
        """
        acting = [slot for slot in self._paging.slots.values() if slot.session_id is not None and not slot.resting]
        held = [(slot, slot.activation) for slot in acting if slot.activation is not None]
        calls = self._node.calls.in_flight()
        acting_now = {known for _, known in held}  # these are condemned below
        watches = self._node.interrupts.items()
        watched = {known: run_id for known, (run_id, _) in watches if known not in acting_now}
        wanted = {
            *(known.session_id for _, known in held), *(call.origin.session_id for call in calls),
            *(known.session_id for known in watched),
        }  # fmt: skip
        if not wanted:
            return
        rows = await self._node.reading.query(queries.activations, wanted)
        for known, run_id in watched.items():
            row = rows.get(known.session_id)
            if row is None or (ActivationId.of(row), row["run_id"]) != (known, run_id):
                self._node.end_activation(known, "the run is over")
        unsure = {name for name, row in rows.items() if _is_fresh(row, age) or self._is_placed(name)}
        told = {name: row for name, row in rows.items() if name not in unsure}
        for slot, known in held:
            row = told.get(known.session_id)
            if row is not None and ActivationId.of(row) > known == slot.activation:
                log.warning("frame %s is at an activation of session %s that is over", slot.frame_id, known.session_id)
                self._frames.condemn(slot.frame_id, known)
        for call in calls:
            session_id, of = call.origin.session_id, (call.origin.incarnation, call.origin.run_id)
            row = rows.get(session_id)
            if session_id not in unsure and (row is None or (row["incarnation"], row["run_id"]) != of):
                self._node.calls.abort(session_id, *of)

    async def _swept(self, row: Row, age: int, cared_for: set[str], resting: dict[str, int]) -> None:
        """One session that nobody can deal with must not keep the others waiting."""
        try:
            await self._sweep(row, age, cared_for, resting)
        except UnderstudyError:  # the store's, or the supervisor's: so it is with all of them
            raise
        except Exception:
            log.exception("session %s can't be swept", row["session_id"])

    async def _sweep(self, row: Row, age: int, cared_for: set[str], resting: dict[str, int]) -> None:
        session_id = row["session_id"]
        if not self._node.is_ready(row) or self._is_placed(session_id) or _is_fresh(row, age):
            return
        holder, frame_id = self._frames.holder(row), row["frame_id"]
        if holder is None and session_id in cared_for:
            return  # its row was asked for before it left its frame or had its answer: that commit says what follows
        if frame_id is not None and frame_id not in self._paging.slots and frame_id not in self._frames.expected:
            if not self._taking_up:  # which would deal with it
                self.swept += row["actor_pid"] is not None  # else it was a lost node's, and nobody could know
                await self._crashed_unseen(row)  # nothing, if it has left that frame since it was read
            return
        if holder is None and frame_id not in self._frames.expected:
            self._paging.add(ready_of(row, "takeover"))
        elif holder is not None and self._rests(holder, row, resting):
            self._frames.resume(holder)
        else:
            return
        self.swept += 1
        log.warning("session %s was ready and nobody knew: picked up", session_id)

    def _rests(self, holder: Slot, row: Row, resting: dict[str, int]) -> bool:
        """Whether the frame rests with the session as its row is; one that did not when the row was asked for, or has
        called in since, may have committed more."""
        same = holder.resting and resting.get(holder.frame_id) == holder.since
        return same and holder.activation == ActivationId.of(row)

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
        while (under_way := self._deaths.get(frame_id)) is not None:
            if await asyncio.shield(under_way):
                return  # two hear of it: the node's own socket and the supervisor
        under_way = self._deaths[frame_id] = asyncio.get_running_loop().create_future()
        dealt_with = False
        try:
            await self._frame_died(frame_id, cause, silence, may_live=may_live)
            dealt_with = True
        finally:
            del self._deaths[frame_id]
            under_way.set_result(dealt_with)

    async def _frame_died(self, frame_id: str, cause: str, silence: float, *, may_live: bool) -> None:
        if not self._node.generation:
            raise StaleGeneration("the service has not been taken up")
        since, cause = now(), self._frames.supply.cause(cause)
        self._bury(frame_id)
        slot = self._paging.slots.pop(frame_id, None)
        self._frames.condemned.discard(frame_id)
        self._frames.supply.changed.set()
        held = [slot.activation] if slot is not None and slot.activation is not None else []
        signs = [since - int(silence * 1e6)] if silence else []
        signs += [slot.seen] if slot is not None and slot.seen else []
        if slot is not None and slot.silent_since:  # its open connection was no sign of life
            signs = [slot.silent_since, slot.seen]
        unseen = max(1, since - max(signs)) if signs else 0
        if slot is not None:
            self._frames.fail_reply(slot)
        else:  # it never called in here: the store knows what it holds
            rows = await self._node.reading.active(None, frame_id=frame_id)
            held = [ActivationId.of(row) for row in rows]
            slot = Slot(frame_id, 0, self._node.config.node_id, "")
            for row in rows:
                slot.pid, slot.placement, slot.root_id = row["actor_pid"] or 0, row["placement"], row["root_id"]
            self._frames.expected.pop(frame_id, None)
        for lost in held:
            await self.crashed(slot, lost, cause, since, unseen, may_live=may_live)

    def _bury(self, frame_id: str) -> None:
        """Note a death, and forget those of long ago."""
        long_ago = time.monotonic() - BURIED_SECONDS
        while self.buried and not self._taking_up and next(iter(self.buried.values())) <= long_ago:
            del self.buried[next(iter(self.buried))]
        self.buried.setdefault(frame_id, time.monotonic())

    async def crashed(
        self, slot: Slot, lost: ActivationId, cause: str, since: int, unseen: int = 0, *, may_live: bool = False
    ) -> None:  # fmt: skip
        """Decide about a death and, in the same transaction, give the session to a free frame if there is one."""
        session_id = lost.session_id
        self._node.end_activation(lost, "the activation is over")
        spare = self._paging.frame_for(session_id, slot.placement) if self._node.activates else None
        waited = slot.resting and slot.wait is not None
        if waited and spare is not None and spare.session_id is not None and spare.wait != "idle":
            spare = None  # it would only wait there: no reason to take the frame of another that waits
        parked = spare.activation if spare is not None else None
        if spare is not None:
            self._paging.reserve(spare)
            self._frames.release(spare)
        ready = Ready(session_id, slot.placement, slot.root_id, "resume", since)

        def operation(tx: Transaction) -> tuple[Any, Work | None]:
            if self._node.elsewhere(tx.session(session_id)):
                return None, None  # its new home has dealt with this death
            policy = self._node.specification_in(tx, session_id)["restart"]
            verdict = activation.crash(
                tx, lost, decide, cause=cause, pid=slot.pid, policy=policy, unseen=unseen, may_live=may_live
            )
            if verdict is None or verdict.action == "quarantine" or spare is None:
                return verdict, None
            if tx.session(session_id)["wait"] not in (None, "model"):
                return verdict, None
            return verdict, self._frames.activation(spare, ready)(tx)

        self._node.claim(session_id)
        with self._frames.being_placed(session_id, spare):
            try:
                verdict, work = await self._frames.vacated(parked, operation, session_id)
            except StaleGeneration as error:
                self._node.stale(error)
                verdict, work = None, None
            except BaseException:
                self._frames.hand_over(spare, None)
                raise
            finally:
                woken = self._node.disown(session_id)
            self._frames.hand_over(spare, work)
        resumes = verdict is not None and verdict.action != "quarantine" and work is None
        paused = verdict is not None and verdict.delay and not woken
        if resumes and not paused:  # a timer ends the pause
            await self._pick_up(session_id, ready)
        elif not resumes and woken is not None:  # by somebody else, meanwhile
            self._frames.wake(woken)
        self._frames.dispatch()

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
        held = session_id in self._frames.chosen or self._paging.holder(session_id) is not None
        for row in rows:
            if row["frame_id"] is None and not held and self._node.is_ready(row):
                found = ready or ready_of(row, "takeover")
                self._frames.queue(replace(found, epoch=row["epoch"], placement=row["placement"]))


def _is_fresh(row: Row, age: int) -> bool:
    """Whether the session was written less than `age` microseconds ago: what follows from that may be under way. A time
    in the future is another clock's, or of before ours was set back."""
    written: int = row["updated_at"]
    return 0 <= now() - written < age


async def in_chunks(rows: list[Row]) -> AsyncIterator[Row]:
    """The rows; now and then everybody else has a turn in between."""
    for number, row in enumerate(rows, 1):
        yield row
        if number % CHUNK == 0:
            await asyncio.sleep(0)


def cancelled(rows: list[Row]) -> dict[str, Cancelled]:
    """The current runs of the sessions that were asked to end."""
    asked = [row for row in rows if row["cancel_reason"] is not None]
    names = ("run_id", "incarnation", "epoch", "cancel_reason")
    return {row["session_id"]: Cancelled(*(row[name] for name in names)) for row in asked}
