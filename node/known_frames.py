"""Which frames the service knows of besides those that call in: expected, condemned and dead ones."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from understudy.placement import is_scarce
from understudy.records import ActivationId
from understudy.store.db.session_row import ActiveSession

from .paging import Slot

BURIED_SECONDS = 600.0
"""So long a call that was made before a frame's death may still be on the way: supervisors give theirs up after two
minutes."""


@dataclass
class Expected:
    """A frame that has not called in here yet, and the activations, with their roots, that it is known to hold."""

    pid: int
    placement: str
    held: dict[ActivationId, str] = field(default_factory=dict)


class KnownFrames:
    """What is known of frames that have no slot.

    Attributes:
        expected: frames that hold something and have not called in here yet.
        condemned: frames whose process the supervisor shall kill; one that calls in has come to its end by itself.
        buried: frames that died, and when; their ids are not used again. A `take_over` under way may have read that one
            has a session, and a call of its own may arrive after its death. Once neither can be, it is forgotten.
        all_read: a `take_over` has read which frames the store names. Until then a session at work in a frame that has
            not called in here looks as if nobody held it.
    """

    def __init__(self) -> None:
        self.expected: dict[str, Expected] = {}
        self.condemned: set[str] = set()
        self.buried: dict[str, float] = {}
        self.all_read = False
        self._readers = 0

    @property
    def is_being_read(self) -> bool:
        """Whether a `take_over` is under way: what it has read may be old by now."""
        return bool(self._readers)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While a `take_over` reads which frames the store names; if it does not fail, all are known then."""
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1
        self.all_read = True

    def expect(self, row: ActiveSession) -> None:
        """The session's frame, which has not called in here yet, will do so, with this session or with another; unless
        it is dead, which the supervisor tells then."""
        assert row.frame_id is not None
        frame = self.expected.setdefault(row.frame_id, Expected(row.actor_pid or 0, row.placement))
        frame.held[row.activation] = row.root_id

    def called_in(self, frame_id: str) -> dict[ActivationId, str]:
        """A frame has called in: what it was expected to hold."""
        self.condemned.discard(frame_id)
        expected = self.expected.pop(frame_id, None)
        return expected.held if expected is not None else {}

    def holders(self, activation: ActivationId) -> list[str]:
        """The frames that are expected with this activation."""
        return [frame_id for frame_id, expected in self.expected.items() if activation in expected.held]

    def end_expected(self, frame_id: str, activation: ActivationId) -> bool:
        """An activation of an expected frame was ended by force; False if it is not expected to have it."""
        expected = self.expected.get(frame_id)
        if expected is None or activation not in expected.held:
            return False
        del expected.held[activation]
        if not expected.held:
            del self.expected[frame_id]
        return True

    def named(self, slots: Iterable[Slot]) -> dict[str, int]:
        """All frames that are known here: their pids, or 0 where one is not known or may be another machine's."""
        known: dict[str, Expected | Slot] = {**self.expected, **{slot.frame_id: slot for slot in slots}}
        pids = {frame_id: 0 if is_scarce(frame.placement) else frame.pid for frame_id, frame in known.items()}
        return {**dict.fromkeys(self.condemned, 0), **pids}

    def bury(self, frame_id: str) -> None:
        """Note a death, and forget those of long ago."""
        long_ago = time.monotonic() - BURIED_SECONDS
        while self.buried and not self._readers and next(iter(self.buried.values())) <= long_ago:
            del self.buried[next(iter(self.buried))]
        self.buried.setdefault(frame_id, time.monotonic())

    def is_gone(self, row: ActiveSession) -> bool:
        """Whether a session's frame, which has no slot, is dead or had nothing to do when it was last seen: once it is
        known which frames the store names, those that hold a session with work are expected."""
        if row.frame_id in self.buried:
            return True
        here = row.actor_pid is not None  # it was not a lost node's
        return here and self.all_read and row.frame_id not in self.expected
