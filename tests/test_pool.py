"""How many frames a node should have, as a function of demand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from understudy.supervisor.pool import default_cap, plan

PLACEMENTS = ("", "gpu", "big")
counts = st.integers(0, 6)
rows = st.fixed_dictionaries({"ready": counts, "acting": counts, "waiting": counts, "standby": counts})
demands = st.dictionaries(st.sampled_from(PLACEMENTS), rows)
numbers = st.dictionaries(st.sampled_from(PLACEMENTS), counts)
KINDS = ("acting", "waiting", "standby")


def row(ready: int = 0, acting: int = 0, waiting: int = 0, standby: int = 0) -> dict[str, int]:
    return {"ready": ready, "acting": acting, "waiting": waiting, "standby": standby}


@given(demands, numbers, numbers, st.integers(1, 24))
def test_never_above_the_cap(
    demand: dict[str, dict[str, int]], starting: dict[str, int], wanted: dict[str, int], cap: int
) -> None:
    """Frames, those being started and those to create never exceed the cap, nor are more retired than stand by."""
    total = sum(r[kind] for r in demand.values() for kind in KINDS) + sum(starting.values())
    decided = plan(demand, starting, wanted, cap)
    created, retired = sum(decided.create.values()), sum(decided.retire.values())
    assert total + created - retired <= max(cap, total)
    assert all(count <= demand[name]["standby"] for name, count in decided.retire.items())


@given(demands, numbers, numbers)
def test_below_the_cap_demand_and_standbys_are_met(
    demand: dict[str, dict[str, int]], starting: dict[str, int], wanted: dict[str, int]
) -> None:
    """Without a cap every ready session gets a frame and every placement its standbys, and nobody retires."""
    decided = plan(demand, starting, wanted, 10_000)
    assert not decided.retire
    for name in demand.keys() | wanted.keys():
        got = demand.get(name, row())
        idle = got["standby"] + starting.get(name, 0) + decided.create.get(name, 0)
        assert idle >= wanted.get(name, 0)
        assert idle + got["waiting"] >= got["ready"]


def test_a_used_standby_is_refilled() -> None:
    """When the one standby is acting, another one is created."""
    assert plan({"": row(acting=1)}, {}, {"": 1}, 4).create == {"": 1}
    assert plan({"": row(acting=1)}, {"": 1}, {"": 1}, 4).create == {}


def test_no_frame_is_created_while_one_waits() -> None:
    """A ready session takes the frame of a waiting one before a new frame is paid for."""
    assert plan({"": row(ready=2, acting=1, waiting=2)}, {}, {}, 8).create == {}
    assert plan({"": row(ready=2, acting=1, waiting=1)}, {}, {}, 8).create == {"": 1}


def test_another_placements_standby_makes_room() -> None:
    """At the cap, a placement with ready sessions and no frame takes the place of another one's standby."""
    decided = plan({"": row(acting=2, standby=2), "gpu": row(ready=1)}, {}, {"": 2, "gpu": 1}, 4)
    assert (decided.create, decided.retire) == ({"gpu": 1}, {"": 1})


def test_an_idle_standby_makes_room_for_sessions_that_are_ready_elsewhere() -> None:
    """Ready sessions must not take turns on one frame while another placement's frame does nothing."""
    decided = plan({"": row(acting=2, standby=1), "gpu": row(ready=3, acting=1)}, {}, {"": 1, "gpu": 1}, 4)
    assert (decided.create, decided.retire) == ({"gpu": 1}, {"": 1})


def test_the_default_cap() -> None:
    """Twice the CPUs, at least four."""
    assert [default_cap(cpus) for cpus in (0.5, 2, 4, 16)] == [4, 4, 8, 32]
