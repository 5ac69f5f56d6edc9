"""Frames are page frames, sessions are pages: which ready session gets which frame. Plain data, no clock, no Ray.

While frames are free, a waiting session keeps its own. When ready sessions outnumber frames, waiting ones leave theirs.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from understudy.records import CACHED_WINDOWS

PARKING_ORDER = {"idle": 0, "timer": 1, "child": 2, "model": 3}
"""Who leaves first: those whose wait is likely to be the longest."""


@dataclass(eq=False)
class Slot:
    """A frame, as the node service sees it.

    Attributes:
        wait: why its session waits; None while it acts. Meaningless without a session.
        since: order in which the present wait began.
        resting: its `step` call is pending, so it can be given work.
        incarnation: of its session; one of the same id that was removed and made again has another.
        known: the sessions whose windows it caches, with the last `seq` it has of each, and their incarnation.
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
    incarnation: int = 0
    known: OrderedDict[str, tuple[int, int]] = field(default_factory=OrderedDict)
    reply: Any = None
    reply_echo: list[dict[str, Any]] | None = None

    def known_seq(self, session_id: str, incarnation: int) -> int | None:
        """Up to where the frame has the session's messages; None if it has nothing of it."""
        seq, of = self.known.get(session_id, (None, incarnation))
        return seq if of == incarnation else None

    def remember(self, session_id: str, seq: int, incarnation: int = 0) -> None:
        """Note what the frame has of a session; it forgets the one it used longest ago, as the frame itself does."""
        self.known[session_id] = (max(seq, self.known_seq(session_id, incarnation) or 0), incarnation)
        self.known.move_to_end(session_id)
        while len(self.known) > CACHED_WINDOWS:
            self.known.popitem(last=False)


@dataclass(frozen=True)
class Ready:
    """A session that needs a frame. `cause` and `down_since` go into its activation."""

    session_id: str
    placement: str
    cause: str = "ready"
    down_since: int = 0


class Paging:
    """The node's frames and its queue of ready sessions."""

    def __init__(self) -> None:
        self.slots: dict[str, Slot] = {}
        self.ready: OrderedDict[str, Ready] = OrderedDict()
        self._clock = 0

    def add(self, ready: Ready) -> None:
        """Queue a session; one that resumes goes before those that were never interrupted."""
        if ready.session_id in self.ready:
            return
        self.ready[ready.session_id] = ready
        if ready.cause == "resume":
            self.ready.move_to_end(ready.session_id, last=False)

    def holder(self, session_id: str) -> Slot | None:
        """The frame that holds the session."""
        return next((slot for slot in self.slots.values() if slot.session_id == session_id), None)

    def rest(self, slot: Slot, wait: str | None) -> None:
        """The frame asks for work; its session, if it still has one, waits."""
        self._clock += 1
        slot.resting, slot.wait, slot.since = True, wait, self._clock

    def next_for(self, slot: Slot) -> Ready | None:
        """Take the ready session that this frame should have: one it caches, else the one that waits longest."""
        first: Ready | None = None
        for ready in self.ready.values():
            if ready.placement != slot.placement:
                continue
            if ready.session_id in slot.known:
                first = ready
                break
            first = first or ready
        if first is not None:
            del self.ready[first.session_id]
        return first

    def frame_for(self, session_id: str, placement: str) -> Slot | None:
        """The resting frame that a ready session should have; None when all are acting.

        In order: one that caches it, one without a session, one whose session waits and can leave.
        """
        resting = [slot for slot in self.slots.values() if slot.resting and slot.placement == placement]
        if not resting:
            return None

        def cost(slot: Slot) -> tuple[int, int, int]:
            if slot.session_id is None:
                return (0, 0 if session_id in slot.known else 1, slot.since)
            # The latest wait for a model is the one that will last longest; of idle ones, the oldest.
            latest_first = slot.wait in ("model", "child")
            order = PARKING_ORDER.get(slot.wait or "", 9)
            return (1 + order, 0 if session_id in slot.known else 1, -slot.since if latest_first else slot.since)

        return min(resting, key=cost)

    def pairs(self) -> list[tuple[Slot, Ready]]:
        """Match ready sessions with resting frames; both are taken."""
        found: list[tuple[Slot, Ready]] = []
        resting = sum(slot.resting for slot in self.slots.values())
        if not resting:
            return found
        for ready in list(self.ready.values()):
            slot = self.frame_for(ready.session_id, ready.placement)
            if slot is not None:
                slot.resting = False
                del self.ready[ready.session_id]
                found.append((slot, ready))
                if len(found) == resting:
                    break
        return found

    def demand(self) -> dict[str, dict[str, int]]:
        """Per placement: ready sessions without a frame, and frames acting, waiting and standing by."""
        found: dict[str, dict[str, int]] = {}

        def count(placement: str, what: str) -> None:
            row = found.setdefault(placement, {"ready": 0, "acting": 0, "waiting": 0, "standby": 0})
            row[what] += 1

        for ready in self.ready.values():
            count(ready.placement, "ready")
        for slot in self.slots.values():
            if not slot.resting:
                count(slot.placement, "acting")
            else:
                count(slot.placement, "standby" if slot.session_id is None or slot.wait == "idle" else "waiting")
        return found
