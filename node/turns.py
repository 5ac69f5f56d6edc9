"""In what order ready sessions get frames: fair between trees, and interrupted ones first within bounds.

Every operation takes the same time, however many sessions are ready. Plain data, no Ray.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass

from understudy.store.db.session_row import ActiveSession

INTERRUPTED_IN_A_ROW = 3
"""So many interrupted sessions go first; then it is the turn of one that never was, if one is ready."""


@dataclass(frozen=True)
class Ready:
    """A session that needs a frame.

    Attributes:
        root_id: its tree.
        cause, down_since: go into its activation.
        epoch: of the session when it was found ready; 0 where nobody looked.
    """

    session_id: str
    placement: str
    root_id: str
    cause: str = "ready"
    down_since: int = 0
    epoch: int = 0

    @classmethod
    def of(cls, row: ActiveSession, cause: str) -> Ready:
        """A session that is ready, as its row is: one that did nothing since its process died is to be resumed."""
        died_at = (row.deaths or (0,))[-1]
        if died_at and died_at in (row.updated_at, row.wait_since):  # since then it has waited for a pause at most
            return cls(row.session_id, row.placement, row.root_id, "resume", died_at, row.epoch)
        return cls(row.session_id, row.placement, row.root_id, cause, epoch=row.epoch)

    @property
    def interrupted(self) -> bool:
        """Whether its process died, and it has not gone on since."""
        return self.cause == "resume"


class Trees:
    """Sessions of many trees: the trees take turns, and within a tree the session that waits longest comes first."""

    def __init__(self) -> None:
        self._trees: OrderedDict[str, OrderedDict[str, Ready]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._trees)

    def add(self, ready: Ready) -> None:
        """A tree that had no session here takes its turn after all others."""
        self._trees.setdefault(ready.root_id, OrderedDict())[ready.session_id] = ready

    def discard(self, ready: Ready) -> None:
        """Somebody else took it; its tree keeps its turn."""
        tree = self._trees.get(ready.root_id)
        if tree is not None and tree.pop(ready.session_id, None) is not None and not tree:
            del self._trees[ready.root_id]

    def take(self) -> Ready:
        """The next one, whose tree goes to the end."""
        root_id, tree = next(iter(self._trees.items()))
        _, ready = tree.popitem(last=False)
        if tree:
            self._trees.move_to_end(root_id)
        else:
            del self._trees[root_id]
        return ready


class Turns:
    """The ready sessions of one placement.

    Guarantees: of `INTERRUPTED_IN_A_ROW` + 1 that are taken at least one is the next of those that were not
    interrupted. So the k-th session of one of `n` trees is taken within `k * n * (INTERRUPTED_IN_A_ROW + 1)`.
    """

    def __init__(self) -> None:
        self._interrupted = Trees()
        self._others = Trees()
        self._in_a_row = 0
        self._since: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._since)

    @property
    def since(self) -> float:
        """When the session that has waited longest was queued (monotonic seconds). Of some that are here."""
        return next(iter(self._since.values()))

    def add(self, ready: Ready) -> None:
        """Queue a session that is not in here."""
        self._of(ready).add(ready)
        self._since[ready.session_id] = time.monotonic()

    def discard(self, ready: Ready) -> None:
        """Take a session that is in here out of turn."""
        self._of(ready).discard(ready)
        self._since.pop(ready.session_id, None)

    @property
    def must_resume(self) -> bool:
        """Whether the next one was interrupted."""
        return bool(self._interrupted) and (not self._others or self._in_a_row < INTERRUPTED_IN_A_ROW)

    def take(self) -> Ready:
        """The session whose turn it is."""
        first = self.must_resume
        self._in_a_row = self._in_a_row + 1 if first and self._others else 0
        ready = (self._interrupted if first else self._others).take()
        self._since.pop(ready.session_id, None)
        return ready

    def _of(self, ready: Ready) -> Trees:
        return self._interrupted if ready.interrupted else self._others
