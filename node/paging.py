"""Frames are page frames, sessions are pages: which ready session gets which frame. Plain data, no clock, no Ray.

While frames are free, a session keeps its own during a model call. When ready sessions outnumber frames, those leave
theirs that wait.
"""

from __future__ import annotations

from asyncio import Future
from collections import Counter, OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any

from understudy.messages import Message
from understudy.placement import is_isolated
from understudy.records import CACHED_WINDOWS, ActivationId
from understudy.supervisor.pool import Demand

from .turns import Ready as Ready
from .turns import Turns

PARKING_ORDER = {"idle": 0, "model": 1}
"""Who leaves first: those whose wait is likely to be the longest. Who waits for anything else has left already."""

LATEST_FIRST = ("model",)
"""Among those whose wait has a length of its own, the latest to begin leaves first: it has most of it ahead."""

CACHED_IN_A_ROW = 3
"""So often a frame may take a session whose window it has before one whose turn it is."""


@dataclass(eq=False)
class Slot:
    """A frame, as the node service sees it.

    Attributes:
        wait: why its session waits; None while it acts. Meaningless without a session.
        since: order in which the present wait began.
        resting: its `step` call is pending, so it can be given work.
        guarding: beside the model call that its session waits for, hooks are at work in it: it keeps that session.
        root_id: the tree of its session.
        incarnation: of its session; one of the same id that was removed and made again has another.
        known: the sessions whose windows it caches, with the last `seq` it has of each, and their incarnation.
        seen: when its process last called, microseconds since 1970 UTC; 0 before.
        silent_since: when a process that hangs was last known to be well, in the same unit; 0: it is not known to hang.
        called: the number of its latest `step` call.
        answered: the number of the latest that was answered with work.
        reply: the future that its pending call awaits.
        reply_echo: messages of its last batch, with the `seq` they got, that its window does not have yet; None if
            they must be read from the store.
    """

    frame_id: str
    pid: int
    node_id: str
    placement: str
    session_id: str | None = None
    epoch: int = 0
    wait: str | None = None
    since: int = 0
    resting: bool = False
    guarding: bool = False
    incarnation: int = 0
    root_id: str = ""
    seen: int = 0
    silent_since: int = 0
    called: int = 0
    answered: int = 0
    known: OrderedDict[str, tuple[int, int]] = field(default_factory=OrderedDict)
    reply: Future[Any] | None = None
    reply_echo: list[Message] | None = None

    @property
    def pending(self) -> Future[Any] | None:
        """The future that its pending call awaits; None where there is none, or it has been answered."""
        return self.reply if self.reply is not None and not self.reply.done() else None

    @property
    def activation(self) -> ActivationId | None:
        """The one that this frame holds."""
        return ActivationId(self.session_id, self.incarnation, self.epoch) if self.session_id is not None else None

    def known_seq(self, session_id: str, incarnation: int) -> int | None:
        """Up to where the frame has the session's messages; None if it has nothing of it."""
        seq, of = self.known.get(session_id, (None, incarnation))
        return seq if of == incarnation else None

    @property
    def stands_by(self) -> bool:
        """Whether it has nothing to do, and nobody will miss it."""
        return self.resting and (self.session_id is None or self.wait == "idle")

    @property
    def acts(self) -> bool:
        """Whether it is at the work of its session, or at the hooks beside its model call."""
        return not self.resting or self.guarding

    @property
    def can_be_left(self) -> bool:
        """Whether a ready session can be given to it now. A process that is for one activation only ends with it."""
        return self.resting and not self.guarding and (self.session_id is None or not is_isolated(self.placement))

    @property
    def state(self) -> str:
        """`standby`, `waiting` (it can be given a ready session) or `acting`."""
        return "standby" if self.stands_by else "waiting" if self.can_be_left else "acting"

    def remember(self, session_id: str, seq: int, incarnation: int = 0) -> None:
        """Note what the frame has of a session; it forgets the one it used longest ago, as the frame itself does."""
        self.known[session_id] = (max(seq, self.known_seq(session_id, incarnation) or 0), incarnation)
        self.known.move_to_end(session_id)
        while len(self.known) > CACHED_WINDOWS:
            self.known.popitem(last=False)


class Paging:
    """The node's frames and its ready sessions.

    No operation walks the ready sessions; some walk the frames, of which there are few.

    Attributes:
        ready: sessions without a frame, by id; change it by `add` and `remove` only.
        hits: sessions that came back to a frame which had their window.
        misses: sessions that came back to another one, which had to be given all of it.
        taken: how many standbys were given work, per placement, since that was last asked for.
        standbys_taken: how many were in all.
    """

    def __init__(self) -> None:
        self.slots: dict[str, Slot] = {}
        self.ready: dict[str, Ready] = {}
        self.hits = 0
        self.misses = 0
        self._turns: dict[str, Turns] = {}
        self._cached_in_a_row: dict[str, int] = {}
        self.taken: Counter[str] = Counter()
        self.standbys_taken = 0
        self._clock = 0

    def add(self, ready: Ready) -> None:
        """Queue a session. One that is queued keeps its turn, unless it was upgraded to another placement since; of its
        epochs the latest is known."""
        queued = self.ready.get(ready.session_id)
        if queued is not None and queued.placement != ready.placement and queued.epoch <= ready.epoch:
            self.remove(ready.session_id)
        queued = self.ready.setdefault(ready.session_id, ready)
        if queued is ready:
            self._turns.setdefault(ready.placement, Turns()).add(ready)
        elif queued.epoch < ready.epoch:
            self.ready[ready.session_id] = replace(queued, epoch=ready.epoch)

    def remove(self, session_id: str) -> Ready | None:
        """Take a session out of the queue, if it is there: somebody found it ready."""
        ready = self.ready.pop(session_id, None)
        if ready is not None:
            self._turns[ready.placement].discard(ready)
            self._forget_empty(ready.placement)
        return ready

    def _take(self, placement: str) -> Ready:
        """The session whose turn it is."""
        ready = self._turns[placement].take()
        del self.ready[ready.session_id]
        self._cached_in_a_row.pop(placement, None)
        self._forget_empty(placement)
        return ready

    def _forget_empty(self, placement: str) -> None:
        if not self._turns[placement]:
            del self._turns[placement]
            self._cached_in_a_row.pop(placement, None)

    def queued(self, placement: str) -> int:
        """How many sessions wait for a frame of a placement."""
        return len(self._turns.get(placement, ()))

    def ready_since(self, placement: str) -> float | None:
        """When the session that has waited longest for a frame of a placement was queued (monotonic seconds)."""
        turns = self._turns.get(placement)
        return turns.since if turns is not None else None

    def holder(self, session_id: str) -> Slot | None:
        """The frame that holds the session."""
        return next((slot for slot in self.slots.values() if slot.session_id == session_id), None)

    def rest(self, slot: Slot, wait: str | None, *, guarding: bool = False) -> None:
        """The frame asks for work; its session, if it still has one, waits."""
        self._clock += 1
        slot.resting, slot.guarding, slot.wait, slot.since = True, guarding, wait, self._clock

    def reserve(self, slot: Slot) -> None:
        """A resting frame is given work."""
        if slot.stands_by:
            self.taken[slot.placement] += 1
            self.standbys_taken += 1
        slot.resting = False

    def next_for(self, slot: Slot) -> Ready | None:
        """Take the ready session that this frame should have: one it caches, else (or too often) whose turn it is."""
        placement = slot.placement
        turns = self._turns.get(placement)
        if turns is None or is_isolated(placement):
            return None
        often = self._cached_in_a_row.get(placement, 0)
        if often < CACHED_IN_A_ROW and not turns.must_resume:
            for session_id in slot.known:
                ready = self.ready.get(session_id)
                if ready is not None and ready.placement == placement:
                    self._cached_in_a_row[placement] = often + 1
                    return self.remove(session_id)
        return self._take(placement)

    def frame_for(self, session_id: str, placement: str) -> Slot | None:
        """The resting frame that a ready session should have; None when all are acting.

        In order: one that caches it, one without a session, one whose session waits and can leave.
        """
        mine = [slot for slot in self.slots.values() if slot.placement == placement and slot.can_be_left]
        return self._best(mine, session_id)

    @staticmethod
    def _best(resting: list[Slot], session_id: str) -> Slot | None:
        def cost(slot: Slot) -> tuple[int, int, int]:
            cached = 0 if session_id in slot.known else 1
            if slot.session_id is None:
                return (0, cached, slot.since)
            order = PARKING_ORDER.get(slot.wait or "", len(PARKING_ORDER))
            return (1 + order, cached, -slot.since if slot.wait in LATEST_FIRST else slot.since)

        return min(resting, key=cost, default=None)

    def pairs(self) -> list[tuple[Slot, Ready]]:
        """Match ready sessions with resting frames until one of both is used up; both are taken."""
        found: list[tuple[Slot, Ready]] = []
        resting: dict[str, list[Slot]] = {}
        for slot in self.slots.values():
            if slot.placement in self._turns and slot.can_be_left:
                resting.setdefault(slot.placement, []).append(slot)
        for placement, slots in resting.items():
            while slots and placement in self._turns:
                ready = self._take(placement)
                best = self._best(slots, ready.session_id)
                assert best is not None
                slots.remove(best)
                self.reserve(best)
                found.append((best, ready))
        return found

    def states(self) -> Counter[str]:
        """How many frames are in each state. May be called in any thread."""
        return Counter(slot.state for slot in list(self.slots.values()))

    def demand(self) -> dict[str, Demand]:
        """Per placement: ready sessions without a frame, and frames acting, waiting and standing by."""
        found = {name: Demand(len(turns)) for name, turns in self._turns.items()}
        for slot in self.slots.values():
            demand = found.setdefault(slot.placement, Demand())
            setattr(demand, slot.state, getattr(demand, slot.state) + 1)
        return found

    def count_return(self, slot: Slot, session_id: str, incarnation: int) -> None:
        """A session that was in a frame before comes to this one."""
        if slot.known_seq(session_id, incarnation) is None:
            self.misses += 1
        else:
            self.hits += 1
