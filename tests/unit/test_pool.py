"""How many frames a node should have, as a function of demand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from understudy.supervisor.pool import Demand, Plan, default_cap, plan

PLACEMENTS = ("", "gpu", "big")
counts = st.integers(0, 6)
rows = st.builds(Demand, counts, counts, counts, counts)
demands = st.dictionaries(st.sampled_from(PLACEMENTS), rows)
numbers = st.dictionaries(st.sampled_from(PLACEMENTS), counts)


@given(demands, numbers, numbers, st.integers(1, 24), st.sets(st.sampled_from(PLACEMENTS)))
def test_never_above_the_cap(
    demand: dict[str, Demand], starting: dict[str, int], wanted: dict[str, int], cap: int, unused: set[str]
) -> None:
    """Frames, those being started and those to create never exceed the cap, and nobody leaves who is not there."""
    total = sum(r.alive for r in demand.values()) + sum(starting.values())
    decided = plan(demand, starting, wanted, cap, unused=unused)
    created, retired = sum(decided.create.values()), sum(decided.retire.values())
    assert total + created <= max(cap, total) + retired
    assert all(count <= demand[name].alive for name, count in decided.retire.items())


@given(demands, numbers, numbers)
def test_below_the_cap_demand_and_standbys_are_met(
    demand: dict[str, Demand], starting: dict[str, int], wanted: dict[str, int]
) -> None:
    """Without a cap every ready session gets a frame and every placement its standbys, and nobody retires."""
    decided = plan(demand, starting, wanted, 10_000)
    assert not decided.retire
    for name in demand.keys() | wanted.keys():
        got = demand.get(name, Demand())
        idle = got.standby + starting.get(name, 0) + decided.create.get(name, 0)
        assert idle >= wanted.get(name, 0)
        assert idle + got.waiting >= got.ready


def test_a_used_standby_is_refilled() -> None:
    """When the one standby is acting, another one is created."""
    assert plan({"": Demand(acting=1)}, {}, {"": 1}, 4).create == {"": 1}
    assert plan({"": Demand(acting=1)}, {"": 1}, {"": 1}, 4).create == {}


def test_no_frame_is_created_while_one_waits() -> None:
    """A ready session takes the frame of a waiting one before a new frame is paid for."""
    assert plan({"": Demand(ready=2, acting=1, waiting=2)}, {}, {}, 8).create == {}
    assert plan({"": Demand(ready=2, acting=1, waiting=1)}, {}, {}, 8).create == {"": 1}


def test_another_placements_standby_makes_room() -> None:
    """At the cap, a placement with ready sessions and no frame takes the place of another one's standby."""
    decided = plan({"": Demand(acting=2, standby=2), "gpu": Demand(ready=1)}, {}, {"": 2, "gpu": 1}, 4)
    assert (decided.create, decided.retire) == ({"gpu": 1}, {"": 1})


def test_an_idle_standby_makes_room_for_sessions_that_are_ready_elsewhere() -> None:
    """Ready sessions must not take turns on one frame while another placement's frame does nothing."""
    decided = plan({"": Demand(acting=2, standby=1), "gpu": Demand(ready=3, acting=1)}, {}, {"": 1, "gpu": 1}, 4)
    assert (decided.create, decided.retire) == ({"gpu": 1}, {"": 1})


def test_standbys_that_nobody_uses_make_room_for_others() -> None:
    """Given a full node, when a placement that is used lacks standbys, then those of an unused one make room for them;
    an unused one takes nobody's place, and no session's frame is taken for a standby."""
    demand = {"old": Demand(standby=3), "new": Demand(acting=1)}
    wanted = {"old": 1, "new": 2}
    assert plan(demand, {}, wanted, 4) == Plan({}, {})
    assert plan(demand, {}, wanted, 4, unused=["old"]) == Plan({"new": 2}, {"old": 2})
    assert plan(demand, {}, wanted, 4, unused=["old", "new"]) == Plan({}, {})
    assert plan({"old": Demand(waiting=3), "new": Demand(acting=1)}, {}, wanted, 4, unused=["old"]) == Plan({}, {})


def test_too_many_frames_become_fewer() -> None:
    """Above the cap those leave that stand by, then those whose sessions wait; who acts may finish."""
    demand = {"": Demand(acting=2, waiting=2, standby=1), "gpu": Demand(waiting=1, standby=1)}
    assert plan(demand, {}, {"": 1, "gpu": 1}, 4) == Plan({}, {"": 2, "gpu": 1})
    assert plan(demand, {}, {}, 1).retire == {"": 3, "gpu": 2}


def test_what_nobody_uses_leaves() -> None:
    """Standbys beyond those wanted and those used lately leave, one at a time."""
    demand = {"": Demand(acting=1, standby=4), "gpu": Demand(standby=2)}
    assert plan(demand, {}, {"": 1}, 8, keep={"": 3, "gpu": 2}) == Plan({}, {"": 1})
    assert plan(demand, {}, {"": 4}, 8, keep={"": 0, "gpu": 1}) == Plan({}, {"gpu": 1})
    assert plan(demand, {}, {}, 8) == Plan({}, {})


def test_a_placement_without_a_frame_gets_one() -> None:
    """Sessions must not wait for ever for frames that others hold, who perhaps wait for them: a frame whose session
    waits leaves at once, one that acts when it rests, and only then another one is created."""
    assert plan({"": Demand(waiting=4), "gpu": Demand(ready=3)}, {}, {}, 4) == Plan({"gpu": 1}, {"": 1})
    assert plan({"": Demand(ready=9, acting=4), "gpu": Demand(ready=3)}, {}, {}, 4) == Plan({}, {"": 1})
    assert plan({"": Demand(ready=9, acting=3), "gpu": Demand(ready=3)}, {}, {}, 4) == Plan({"gpu": 1}, {})


@given(st.integers(1, 4), st.lists(st.integers(1, 9), min_size=2, max_size=5))
def test_every_placement_has_its_turn(cap: int, ready: list[int]) -> None:
    """However many placements have sessions ready all the time, and however few frames fit: each gets a frame."""
    names = [f"p{number}" for number in range(len(ready))]
    acting = dict.fromkeys(names, 0)
    seen: dict[str, int] = {}
    for moment in range(4 * len(names)):
        demand = {name: Demand(ready=count, acting=acting[name]) for name, count in zip(names, ready, strict=True)}
        decided = plan(demand, {}, {}, cap, turns=seen)
        for name, count in decided.retire.items():
            acting[name] -= count
        for name, count in decided.create.items():
            acting[name] += count
            seen[name] = moment
        assert sum(acting.values()) <= cap
    assert len(seen) == len(names)


def test_the_default_cap() -> None:
    """Twice the CPUs, at least four."""
    assert [default_cap(cpus) for cpus in (0.5, 2, 4, 16)] == [4, 4, 8, 32]
