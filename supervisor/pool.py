"""How many frames a node should have: a pure function of demand."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """Frames to create per placement, and how many idle ones to retire."""

    create: dict[str, int]
    retire: dict[str, int]


def default_cap(cpus: float) -> int:
    """Frames per node unless `UNDERSTUDY_MAX_ACTORS` says otherwise."""
    return max(4, int(2 * cpus))


def plan(demand: dict[str, dict[str, int]], starting: dict[str, int], wanted: dict[str, int], cap: int) -> Plan:
    """What to create and to retire on one node.

    Frames are created for ready sessions only while all frames of their placement act: where one waits, its session
    can leave it. Beside those, `wanted` standbys per placement are kept, as far as `cap` frames in all allow. A
    placement that has ready sessions and no frame for them takes the place of another's standby.

    Args:
        demand: as told by `Paging.demand`.
        starting: frames being created, per placement.
        wanted: standbys to keep, per placement.
        cap: the most frames on the node.
    """
    total = sum(row["acting"] + row["waiting"] + row["standby"] for row in demand.values()) + sum(starting.values())
    create: dict[str, int] = {}
    retire: dict[str, int] = {}
    urgent: dict[str, int] = {}
    needs: dict[str, int] = {}
    for placement in demand.keys() | wanted.keys():
        row = demand.get(placement, {"ready": 0, "acting": 0, "waiting": 0, "standby": 0})
        idle = row["standby"] + starting.get(placement, 0)
        urgent[placement] = max(0, row["ready"] - row["waiting"] - idle)
        needs[placement] = urgent[placement] + max(0, wanted.get(placement, 0) - idle)
    for placement in sorted(needs, key=lambda name: -demand.get(name, {}).get("ready", 0)):
        while needs[placement] > 0:
            if total >= cap:
                # Another's standby makes room for sessions that are ready, never for a mere standby.
                victim = _spare(demand, retire, placement)
                if create.get(placement, 0) >= urgent[placement] or victim is None:
                    break
                retire[victim] = retire.get(victim, 0) + 1
                total -= 1
            create[placement] = create.get(placement, 0) + 1
            needs[placement] -= 1
            total += 1
            if total >= cap and demand.get(placement, {}).get("ready", 0) == 0:
                break
    return Plan(create, retire)


def _spare(demand: dict[str, dict[str, int]], retire: dict[str, int], placement: str) -> str | None:
    spare = {
        name: row["standby"] - retire.get(name, 0)
        for name, row in demand.items()
        if name != placement and row["standby"] > retire.get(name, 0) and not row["ready"]
    }
    return max(spare, key=lambda name: spare[name]) if spare else None
