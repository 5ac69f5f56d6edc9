"""The sweep: finds wake-ups that got lost, and ends what is over and was not heard to be."""

from __future__ import annotations

import asyncio
import logging

from understudy.errors import StaleGeneration, UnderstudyError
from understudy.store.db.engine import now
from understudy.store.db.session_row import ActiveSession
from understudy.store.reads import queries

from .basis import NodeBasis
from .calls import Calls
from .commands import Commands
from .deaths import Deaths
from .feed import Feed
from .frames import Frames
from .interrupts import Interrupts
from .notices import Notices, cancelled
from .paging import Ready, Slot
from .takeover import Takeover, in_chunks
from .timers import Timers
from .tool_tasks import ToolTasks

log = logging.getLogger(__name__)

SWEEP_SECONDS = 5.0

SWEEP_AGE = 3_000_000
"""A session that has been ready for so long (microseconds) without anybody knowing is picked up by the sweep."""


class Sweep:
    """Compares what is in memory with the store, now and then: a wake-up that was lost must not last.

    Attributes:
        swept: how many sessions had to be picked up; each is a wake-up that got lost.
    """

    def __init__(
        self, node: NodeBasis, frames: Frames, calls: Calls, interrupts: Interrupts, deaths: Deaths, notices: Notices,
        takeover: Takeover, timers: Timers, feed: Feed, tasks: ToolTasks, commands: Commands,
    ) -> None:  # fmt: skip
        self._node = node
        self._frames = frames
        self._paging = frames.paging
        self._calls = calls
        self._interrupts = interrupts
        self._deaths = deaths
        self._notices = notices
        self._takeover = takeover
        self._timers = timers
        self._feed = feed
        self._tasks = tasks
        self._commands = commands
        self.swept = 0

    async def sweeping(self) -> None:
        """Sweep every `SWEEP_SECONDS`, for as long as the service lives."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            if not self._node.generation:
                continue
            await self.run(SWEEP_AGE)

    async def run(self, age: int) -> None:
        """Pick up every session of this node that has been ready for `age` microseconds without being placed."""
        if not self._frames.known.all_read:
            return
        try:
            home, nodes = self._node.config.node_id, self._node.homes.nodes
            # A node that was given up may have accepted something since; an import has no home yet.
            await self._takeover.adopt(home, nodes)
            held = {slot.session_id for slot in self._paging.slots.values() if slot.session_id is not None}
            cared_for = held.union(*self._frames.assignments.places, self._calls.sessions())
            resting = {slot.frame_id: slot.since for slot in self._paging.slots.values() if slot.resting}
            gone = self._feed.gone
            rows = await self._node.reading.active([home], may_be_ready=True)
            self._feed.at_home((row.session_id for row in rows), gone)
            self._notices.act(cancelled(rows), {})
            await self._end_what_is_over(age)
            await self._tasks.look()
            async for row in in_chunks(rows):
                await self._swept(row, age, cared_for, resting)
            await self._timers.look()
            await self._timers.look_at_schedules()
            self._commands.look_if_needed()
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
        calls = self._calls.in_flight()
        acting_now = {known for _, known in held}  # these are condemned below
        watches = self._interrupts.watched().items()
        watched = {known: run_id for known, run_id in watches if known not in acting_now}
        wanted = {
            *(known.session_id for _, known in held), *(call.origin.session_id for call in calls),
            *(known.session_id for known in watched),
        }  # fmt: skip
        if not wanted:
            return
        rows = await self._node.reading.query(queries.activations, wanted)
        for known, run_id in watched.items():
            row = rows.get(known.session_id)
            if row is None or (row.activation, row.run_id) != (known, run_id):
                self._interrupts.fence(known, "the run is over")
        unsure = {name for name, row in rows.items() if _is_fresh(row, age) or self._frames.assignments.is_placed(name)}
        sure = {name: row for name, row in rows.items() if name not in unsure}
        for slot, known in held:
            row = sure.get(known.session_id)
            if row is not None and row.activation > known == slot.activation:
                log.warning("frame %s is at an activation of session %s that is over", slot.frame_id, known.session_id)
                self._frames.condemn(slot.frame_id, known)
        for call in calls:
            session_id, of = call.origin.session_id, (call.origin.incarnation, call.origin.run_id)
            row = rows.get(session_id)
            if session_id not in unsure and (row is None or (row.incarnation, row.run_id) != of):
                self._calls.abort(session_id, *of)

    async def _swept(self, row: ActiveSession, age: int, cared_for: set[str], resting: dict[str, int]) -> None:
        """One session that nobody can deal with must not keep the others waiting."""
        try:
            await self._sweep(row, age, cared_for, resting)
        except UnderstudyError:  # the store's, or the supervisor's: so it is with all of them
            raise
        except Exception:
            log.exception("session %s can't be swept", row.session_id)

    async def _sweep(self, row: ActiveSession, age: int, cared_for: set[str], resting: dict[str, int]) -> None:
        session_id = row.session_id
        if not self._calls.is_ready(row) or self._frames.assignments.is_placed(session_id) or _is_fresh(row, age):
            return
        holder, frame_id = self._frames.holder(row), row.frame_id
        if holder is None and session_id in cared_for:
            return  # its row was asked for before it left its frame or had its answer: that commit says what follows
        if frame_id is not None and frame_id not in self._paging.slots and frame_id not in self._frames.known.expected:
            if not self._frames.known.is_being_read:  # which would deal with it
                self.swept += row.actor_pid is not None  # else it was a lost node's, and nobody could know
                await self._deaths.crashed_unseen(row)  # nothing, if it has left that frame since it was read
            return
        if holder is None and frame_id not in self._frames.known.expected:
            self._paging.add(Ready.of(row, "takeover"))
        elif holder is not None and self._rests(holder, row, resting):
            self._frames.resume(holder)
        else:
            return
        self.swept += 1
        log.warning("session %s was ready and nobody knew: picked up", session_id)

    def _rests(self, holder: Slot, row: ActiveSession, resting: dict[str, int]) -> bool:
        """Whether the frame rests with the session as its row is; one that did not when the row was asked for, or has
        called in since, may have committed more."""
        same = holder.resting and resting.get(holder.frame_id) == holder.since
        ended = row.wait == "model" and holder.wait != "model"  # the run, with the answer, since the row was asked for
        return same and not ended and holder.activation == row.activation


def _is_fresh(row: ActiveSession, age: int) -> bool:
    """Whether the session was written less than `age` microseconds ago: what follows from that may be under way. A time
    in the future is another clock's, or of before ours was set back."""
    written: int = row.updated_at
    return 0 <= now() - written < age
