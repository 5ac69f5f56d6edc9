"""How many frames a node should have: a pure function of demand, and of what fits (`supervisor/capacity.py`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace


class Demand(msgspec.Struct):
    """What a placement has on a node.

    Attributes:
        ready: sessions without a frame.
        acting, waiting, standby: frames (`Slot.state`).
        frames: the ids of those that have called in.
        taken: standbys that were given work since this was last asked for.
        oldest: seconds that one of the ready sessions has waited, the longest of all.
    """

    ready: int = 0
    acting: int = 0
    waiting: int = 0
    standby: int = 0
    frames: list[str] = []
    taken: int = 0
    oldest: float = 0.0

    @property
    def alive(self) -> int:
        """Frames in all."""
        return self.acting + self.waiting + self.standby


NO_DEMAND = Demand()


@dataclass(frozen=True)
class Plan:
    """Frames to create per placement, and how many are to leave: at once if they rest, else when they next do."""

    create: dict[str, int]
    retire: dict[str, int]


def default_cap(cpus: float) -> int:
    """Frames per node unless `UNDERSTUDY_MAX_ACTORS` says otherwise, or memory is short."""
    return max(4, int(2 * cpus))


def plan(
    demand: Mapping[str, Demand],
    starting: dict[str, int],
    wanted: dict[str, int],
    cap: int,
    *,
    keep: Mapping[str, int] | None = None,
    turns: Mapping[str, int] = {},
    unused: Collection[str] = (),
) -> Plan:
    """What to create and to retire on one node.

    Frames are created for ready sessions only while all frames of their placement act: where one waits, its session
    can leave it. Beside those, `wanted` standbys per placement are kept, as far as `cap` frames in all allow; where
    that is not enough, those of placements that are not used make room for those of placements that are. A placement
    that has ready sessions takes the place of another's standby; one that has no frame at all, of another's frame, even
    if that has to be waited for: so every placement gets a frame in the end. Where there are more frames than `cap`,
    those leave first that stand by.

    Args:
        demand: per placement.
        starting: frames being created, per placement.
        wanted: standbys to keep, per placement.
        cap: the most frames on the node.
        keep: standbys of a placement beyond so many leave, one at a time; None keeps all.
        turns: rises with the time when a placement was last given a frame.
        unused: placements that no session has used for long: were it not for long, two that are used in turn would take
            each other's standbys all the time, and each costs the start of a process.
    """
    pool = _Pool(demand, starting)
    while pool.total > cap and pool.retire_any("standby", "waiting"):
        pass
    for placement in demand if keep is not None else ():
        kept = max(wanted.get(placement, 0), keep.get(placement, 0)) if keep is not None else 0
        if pool.count(placement, "standby") > kept and not pool.count(placement, "ready"):
            pool.leave(placement)
    urgent: dict[str, int] = {}
    needs: dict[str, int] = {}
    for placement in demand.keys() | wanted.keys():
        idle = pool.count(placement, "standby") + starting.get(placement, 0)
        urgent[placement] = max(0, pool.count(placement, "ready") - pool.count(placement, "waiting") - idle)
        needs[placement] = urgent[placement] + max(0, wanted.get(placement, 0) - idle)

    def turn(name: str) -> tuple[bool, int]:
        # Without any frame: no other session of its placement will ever make room. They take turns.
        return (True, -pool.count(name, "ready")) if pool.has_frames(name) else (False, turns.get(name, 0))

    for placement in sorted(sorted(needs), key=turn):
        for number in range(needs[placement]):
            if pool.total >= cap:
                is_urgent = number < urgent[placement]
                if not (pool.make_room(placement) if is_urgent else pool.take_unused(placement, unused)):
                    break
            pool.create[placement] += 1
    return Plan(dict(pool.create), dict(pool.retire))


class _Pool:
    """The frames as they are going to be."""

    def __init__(self, demand: Mapping[str, Demand], starting: dict[str, int]) -> None:
        self.create: Counter[str] = Counter()
        self.retire: Counter[str] = Counter()
        self._rows = {name: replace(row) for name, row in demand.items()}
        self._starting = starting
        self._promised: Counter[str] = Counter()

    def count(self, placement: str, what: str) -> int:
        count: int = getattr(self._rows.get(placement, NO_DEMAND), what)
        return count

    def frames(self, placement: str) -> int:
        return self._rows.get(placement, NO_DEMAND).alive

    def has_frames(self, placement: str) -> bool:
        return self.frames(placement) + self._starting.get(placement, 0) + self.create[placement] > 0

    @property
    def total(self) -> int:
        return sum(map(self.frames, self._rows)) + sum(self._starting.values()) + self.create.total()

    def leave(self, placement: str) -> None:
        """A standby leaves; where there is none, a frame whose session waits."""
        state = "standby" if self.count(placement, "standby") else "waiting"
        setattr(self._rows[placement], state, self.count(placement, state) - 1)
        self.retire[placement] += 1

    def retire_any(self, *states: str) -> bool:
        """The placement with most frames in the first of these states gives one up; False if none has any."""
        for state in states:
            most = max(self._rows, key=lambda name: self.count(name, state), default="")
            if self.count(most, state):
                self.leave(most)
                return True
        return False

    def take_unused(self, placement: str, unused: Collection[str]) -> bool:
        """Let a standby leave that is of no use, for one of a placement that is used; False if there is none."""
        spare = [name for name in unused if name != placement and self.count(name, "standby")]
        if placement in unused or not spare:
            return False
        self.leave(max(sorted(spare), key=lambda name: self.count(name, "standby")))
        return True

    def make_room(self, placement: str) -> bool:
        """Let a frame of another placement leave; False if it does so later, or not at all."""
        others = [name for name in self._rows if name != placement]
        spare = [name for name in others if self.count(name, "standby") and not self.count(name, "ready")]
        if not spare and not self.has_frames(placement):
            spare = [name for name in others if self.count(name, "standby") or self.count(name, "waiting")]
            if not spare:
                acting = [name for name in others if self.count(name, "acting") > self._promised[name]]
                if acting:
                    most = max(acting, key=lambda name: self.count(name, "acting") - self._promised[name])
                    self._promised[most] += 1
                    self.retire[most] += 1
                return False
        if spare:
            self.leave(max(spare, key=lambda name: (self.count(name, "standby"), self.count(name, "waiting"))))
        return bool(spare)
