"""What fits on a node and how many frames stand by, as functions of what was measured and what happened."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from understudy.supervisor.capacity import (
    BURST_SECONDS,
    FRAME_BYTES,
    HALF_LIFE_SECONDS,
    RESERVE,
    RISE_SECONDS,
    Bound,
    Memory,
    Standbys,
    cap,
    fitting,
)

GIB = 1 << 30
pauses = st.lists(st.floats(0.0, 500.0), max_size=30)


@given(st.integers(0, 64), st.integers(1, 64 * GIB), st.floats(0.0, 1.0), st.integers(0, 2 * GIB))
def test_what_is_added_fits(frames: int, total: int, free: float, size: int) -> None:
    """Frames are added only as far as memory beyond the reserve has room for them, and one is always allowed."""
    memory = Memory(total, int(total * free), size)
    more = fitting(frames, memory) - frames
    assert fitting(frames, memory) >= 1
    if more > 0 and frames > 0:
        assert more * max(FRAME_BYTES, size) <= memory.free - int(RESERVE * total)


def test_a_full_node_has_too_many_frames() -> None:
    """When the reserve is used up, fewer frames than there are fit: as many less as bring it back."""
    memory = Memory(10 * GIB, int(10 * GIB * RESERVE) - 3 * FRAME_BYTES, FRAME_BYTES)
    assert fitting(8, memory) == 5


@given(st.integers(1, 64), st.integers(0, 64), st.integers(0, 64), st.floats(0.0, 10_000.0))
def test_the_cap_is_within_what_was_asked_for(wanted: int, frames: int, limit: int, now: float) -> None:
    """Neither memory nor what was learnt raises it, and it never falls below one frame."""
    for memory in (None, Memory(GIB, 0), Memory(64 * GIB, 64 * GIB)):
        assert 1 <= cap(wanted, frames, memory, Bound(limit or None, 0.0), now) <= wanted
    assert cap(wanted, frames, None, Bound(), now) == wanted


@given(st.integers(1, 64), pauses)
def test_kills_lower_the_bound_and_time_raises_it(frames: int, times: list[float]) -> None:
    """Each kill halves the bound, but those of one moment only once; between kills it rises by one every so often."""
    bound, now = Bound(), 1_000.0
    assert bound.at(now) is None
    for pause in [0.0, *times]:
        now += pause
        before, had = bound, bound.at(now)
        bound = bound.after_kill(frames, now)
        found = bound.at(now)
        assert found is not None
        assert found >= 1
        if had is not None and now - before.since < BURST_SECONDS:
            assert bound == before
        else:
            assert found == max(1, min(frames, frames if had is None else had) // 2)
        later = bound.at(bound.since + 3.5 * RISE_SECONDS)
        assert bound.limit is not None
        assert later == bound.limit + 3


def test_a_killed_process_does_not_come_back_to_be_killed() -> None:
    """16 frames that don't fit become 8 at once, 4 if those don't either; after a while more are tried again."""
    bound = Bound().after_kill(16, 100.0).after_kill(15, 101.0)
    assert bound.at(101.0) == 8
    bound = bound.after_kill(8, 120.0)
    assert [bound.at(120.0 + RISE_SECONDS * steps) for steps in range(4)] == [4, 5, 6, 7]


@given(st.integers(0, 8), st.lists(st.tuples(st.floats(0.0, 5_000.0), st.integers(0, 5)), max_size=20))
def test_standbys_stay_within_what_was_asked_for(most: int, history: list[tuple[float, int]]) -> None:
    """Whatever happened: 0 to `most`, more after more was taken, never more by time alone, and none in the end."""
    standbys, now = Standbys(most, float(most), 0.0), 0.0
    assert standbys.wanted(now) == most
    for pause, taken in history:
        now += pause
        before = standbys.wanted(now)
        standbys = standbys.after(taken, now)
        assert before <= standbys.wanted(now) <= most
        assert standbys.wanted(now) >= min(most, taken)
        assert standbys.keep(now) >= standbys.wanted(now)
        assert standbys.wanted(now + pause) <= standbys.wanted(now)
    assert standbys.keep(now + 12 * HALF_LIFE_SECONDS) == 0


def test_one_that_is_used_now_and_then_is_kept() -> None:
    """A frame taken every half hour keeps one standby, not all that were asked for."""
    standbys = Standbys(4, 4.0, 0.0)
    for number in range(1, 6):
        standbys = standbys.after(1, number * 1_800.0)
    assert standbys.wanted(5 * 1_800.0 + 1_700.0) == 1


def test_a_burst_keeps_its_frames_for_a_while() -> None:
    """Sixteen frames that were needed at once are not given back at once: half of them after ten minutes."""
    standbys = Standbys(2, 2.0, 0.0).after(14, 0.0)
    assert [standbys.keep(now * HALF_LIFE_SECONDS) for now in (0, 1, 2, 3)] == [16, 8, 4, 2]
    assert standbys.wanted(0.0) == 2
