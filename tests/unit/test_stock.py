"""Which frames a node starts and lets go, as time passes: memory, kills, deaths, and placements that can't be had."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from understudy.placement import SCARCE
from understudy.supervisor.capacity import BURST_SECONDS, FRAME_BYTES, HALF_LIFE_SECONDS, RISE_SECONDS, Memory
from understudy.supervisor.pool import Demand, Plan
from understudy.supervisor.stock import LONGEST_PAUSE, UNUSED_SECONDS, Stock

GIB = 1 << 30
NONE: Counter[str] = Counter()
GPU = f"gpu{SCARCE}"


def test_a_busy_node_grows_as_far_as_memory_allows() -> None:
    """Without a limit of its own memory, up to what was asked for; with little left, as many as fit."""
    stock = Stock(8, None, 2)
    demand = {"": Demand(ready=50, acting=4)}
    assert stock.decide(demand, NONE, {"": 2}, 0.0).create == {"": 14}
    stock.measured(Memory(10 * GIB, int(0.8 * GIB) + 3 * FRAME_BYTES, FRAME_BYTES), 1.0)
    assert stock.decide(demand, NONE, {"": 2}, 1.0).create == {"": 3}
    stock.measured(Memory(10 * GIB, 0, FRAME_BYTES), 2.0)
    assert stock.decide({"": Demand(acting=2, standby=3)}, NONE, {"": 2}, 2.0) == Plan({}, {"": 3})


def test_a_kill_for_want_of_memory_lowers_the_cap_for_a_while() -> None:
    """Ray kills some of eight frames: four are enough for now, and later more are tried, one by one."""
    stock = Stock(4, 8, 0)
    demand = {"": Demand(ready=20, acting=8)}
    stock.decide(demand, NONE, {}, 0.0)
    for moment in range(3):
        stock.died("", "out_of_memory", float(moment))
    short = {"": Demand(ready=20, acting=5)}
    assert stock.decide(short, NONE, {}, 3.0).create == {}
    fewer = {"": Demand(ready=20, acting=3)}
    created = [stock.decide(fewer, NONE, {}, RISE_SECONDS * steps + 5).create.get("", 0) for steps in range(4)]
    assert created == [1, 2, 3, 4]


def test_the_kernels_kills_count_too() -> None:
    """Ray does not tell them from other deaths, so the node service's measurements do."""
    stock = Stock(4, 8, 0)
    stock.measured(Memory(GIB << 4, GIB << 4, 0, killed=3), 0.0)  # before our time
    assert stock.decide({"": Demand(ready=20, acting=4)}, NONE, {}, 0.0).create == {"": 4}
    stock.measured(Memory(GIB << 4, GIB << 4, 0, killed=4), BURST_SECONDS)
    assert stock.decide({"": Demand(ready=20, acting=4)}, NONE, {}, BURST_SECONDS).create == {}


def test_standbys_fade_and_come_back() -> None:
    """Nobody came for an hour: nothing stands by. A session comes, or a frame dies: one does again."""
    stock = Stock(4, 8, 2)
    assert stock.decide({}, NONE, {"": 2}, 0.0).create == {"": 2}
    late = 6 * HALF_LIFE_SECONDS
    assert stock.decide({"": Demand(standby=2)}, NONE, {"": 2}, late) == Plan({}, {"": 1})
    assert stock.decide({"": Demand(standby=1)}, NONE, {"": 2}, late + 5) == Plan({}, {"": 1})
    assert stock.decide({}, NONE, {"": 2}, late + 10) == Plan({}, {})
    assert stock.decide({"": Demand(ready=1)}, NONE, {"": 2}, late + 15).create == {"": 1}
    stock.died("", "process_died", late + 20)
    assert stock.decide({"": Demand(acting=1)}, NONE, {"": 2}, late + 20).create == {"": 1}


def test_standbys_go_to_the_placement_that_is_used() -> None:
    """Given a full node with the standbys of sessions that came earlier, when others come, then theirs take the place
    once nobody has used the earlier ones for a while; two that are used in turn leave each other's alone."""
    wanted = {"old": 2, "new": 2}
    stock = Stock(2, 4, 0)
    stock.decide({"old": Demand(acting=3)}, NONE, wanted, 0.0)
    demand = {"old": Demand(standby=3), "new": Demand(acting=1)}
    assert stock.decide(demand, NONE, wanted, 5.0) == Plan({}, {})
    assert stock.decide(demand, NONE, wanted, UNUSED_SECONDS + 5.0) == Plan({"new": 2}, {"old": 2})
    stock = Stock(2, 4, 0)
    for turn in range(20):
        old, new = Demand(standby=2, taken=turn % 2), Demand(standby=2, taken=1 - turn % 2)
        assert stock.decide({"old": old, "new": new}, NONE, wanted, turn * UNUSED_SECONDS / 3) == Plan({}, {})


def test_standbys_that_nobody_uses_are_left_alone() -> None:
    """Given more placements than there may be frames, when no session has used any for a while, then those that have a
    standby keep it: to take each other's in turn, they would start processes for ever."""
    wanted = {"one": 1, "two": 1, "three": 1}
    stock = Stock(2, 2, 0)
    demand = {"one": Demand(standby=1), "two": Demand(standby=1)}
    for now in (0.0, UNUSED_SECONDS + 5.0):
        assert stock.decide(demand, NONE, wanted, now) == Plan({}, {})


def test_idle_frames_that_are_used_stay() -> None:
    """Although no standby was asked for: what sessions return to now and then is not taken from them."""
    stock, now = Stock(4, 8, 0), 0.0
    for _ in range(50):
        now += 60.0
        assert stock.decide({"": Demand(standby=2, taken=2)}, NONE, {}, now) == Plan({}, {})
    assert stock.decide({"": Demand(standby=2)}, NONE, {}, now + 2 * HALF_LIFE_SECONDS).retire == {}
    assert stock.decide({"": Demand(standby=2)}, NONE, {}, now + 9 * HALF_LIFE_SECONDS).retire == {"": 1}


def test_scarce_frames_are_given_back_soon() -> None:
    """What holds a GPU does not stand by for minutes."""
    stock = Stock(4, 8, 2)
    demand = {"": Demand(standby=2), GPU: Demand(standby=1)}
    assert stock.decide(demand, NONE, {"": 2}, 0.0) == Plan({}, {})
    assert stock.decide(demand, NONE, {"": 2}, 60.0) == Plan({}, {GPU: 1})


def test_a_placement_that_can_not_be_had_holds_up_nobody() -> None:
    """It is tried again now and then with one frame, takes no place of others, and reports why until it works."""
    stock = Stock(4, 8, 2)
    demand = {"": Demand(acting=5, standby=2), GPU: Demand(ready=500)}
    assert stock.decide(demand, NONE, {"": 2}, 0.0).create == {GPU: 1}
    stock.failed(GPU, "no node has GPU 1", 0.0)
    assert stock.failures == {GPU: "no node has GPU 1"}
    tries = 0
    for now in range(1, 301):
        decided = stock.decide(demand, NONE, {"": 2}, float(now))
        assert decided.retire == {}
        if decided.create:
            assert decided.create == {GPU: 1}
            tries += 1
            stock.failed(GPU, "no node has GPU 1", float(now))
    assert 300 / LONGEST_PAUSE <= tries <= 300 / LONGEST_PAUSE + 6
    stock.starting["f"] = GPU
    assert stock.decide(demand, Counter([GPU]), {"": 2}, 1_000.0).create == {}
    del stock.starting["f"]
    assert stock.started(GPU)
    assert stock.failures == {}
    assert not stock.started(GPU)


def test_standbys_that_could_not_be_started_are_tried_again() -> None:
    """Without any session that is ready, one at a time; those that failed together count as one failure."""
    stock = Stock(4, 8, 2)
    assert stock.decide({}, NONE, {"": 2}, 0.0).create == {"": 2}
    for _ in range(2):
        stock.failed("", "Ray is away", 0.5)
    assert stock.decide({}, NONE, {"": 2}, 1.0).create == {}
    assert stock.decide({}, NONE, {"": 2}, 1.6).create == {"": 1}
    assert stock.started("")
    assert stock.decide({"": Demand(standby=1)}, NONE, {"": 2}, 2.0).create == {"": 1}


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4), st.integers(0, 9), st.floats(0, 200)), max_size=30))
def test_never_more_than_fit(history: list[tuple[int, int, int, float]]) -> None:
    """Whatever is ready, dies and is measured: frames that are created fit into the memory that was free."""
    stock, alive, now = Stock(4, 16, 2), 0, 0.0
    for ready, deaths, room, pause in history:
        now += pause
        for _ in range(min(deaths, alive)):
            stock.died("", "out_of_memory" if deaths > 2 else "process_died", now)
            alive -= 1
        stock.measured(Memory(10 * GIB, int(0.8 * GIB) + room * FRAME_BYTES, FRAME_BYTES), now)
        decided = stock.decide({"": Demand(ready=ready, acting=alive)}, NONE, {"": 2}, now)
        created = sum(decided.create.values())
        assert created <= (room if alive else max(1, room))
        alive += created
        assert alive <= 16
