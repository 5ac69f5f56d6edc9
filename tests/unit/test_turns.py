"""Whose turn it is: trees take turns, interrupted sessions go first within bounds, and nobody starves."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.node.paging import CACHED_IN_A_ROW, Paging, Slot
from understudy.node.turns import INTERRUPTED_IN_A_ROW, Ready, Turns

from ..kernel import kernel as k

CAUSES = st.sampled_from(["ready", "ready", "takeover", "resume"])


@k.tool
async def stay() -> None:
    """Act until the process dies."""
    worker = k.WORKER.get()
    assert worker is not None
    await worker.kernel.point("tool begins", worker)
    await asyncio.Event().wait()


def turns(*waiting: Ready) -> Turns:
    made = Turns()
    for ready in waiting:
        made.add(ready)
    return made


def ready(name: str, cause: str = "ready") -> Ready:
    """`a1` is a session of the tree `a`."""
    return Ready(name, "", name[0], cause)


def taken(made: Turns) -> list[str]:
    return [made.take().session_id for _ in range(len(made))]


def test_trees_take_turns() -> None:
    """A tree of one session does not wait for all of a larger one."""
    assert taken(turns(*map(ready, ("a1", "a2", "a3", "b1", "c1", "c2")))) == ["a1", "b1", "c1", "a2", "c2", "a3"]


def test_interrupted_sessions_go_first_within_bounds() -> None:
    """They come before those that wait longer, in the order of their deaths, but not before all of them."""
    back = [ready(f"x{number}", "resume") for number in range(INTERRUPTED_IN_A_ROW + 2)]
    found = taken(turns(ready("a1"), ready("b1"), *back))
    assert found == ["x0", "x1", "x2", "a1", "x3", "x4", "b1"]


def test_a_tree_keeps_its_turn_when_a_session_is_taken_from_it() -> None:
    """What somebody else took leaves the others of its tree where they were."""
    made = turns(*map(ready, ("a1", "a2", "b1")))
    made.discard(ready("a1"))
    assert taken(made) == ["a2", "b1"]


@given(st.lists(st.tuples(st.sampled_from("abcd"), CAUSES), max_size=40))
def test_nobody_is_lost_or_taken_twice(sessions: list[tuple[str, str]]) -> None:
    """Whatever is queued comes out once; within a tree, and of one kind, in the order in which it came."""
    waiting = [ready(f"{tree}{number}", cause) for number, (tree, cause) in enumerate(sessions)]
    made = turns(*waiting)
    out = [made.take() for _ in range(len(made))]
    assert Counter(out) == Counter(waiting)
    for tree in "abcd":
        for interrupted in (False, True):
            mine = [r for r in waiting if r.root_id == tree and r.interrupted is interrupted]
            assert [r for r in out if r.root_id == tree and r.interrupted is interrupted] == mine


@pytest.mark.thorough
@settings(max_examples=50)
@given(st.lists(st.lists(st.tuples(st.sampled_from("abc"), CAUSES), max_size=4), min_size=200, max_size=200))
def test_nobody_starves(arrivals: list[list[tuple[str, str]]]) -> None:
    """However many sessions of three trees keep coming, interrupted or not, and although the frame has some of their
    windows: the next session of a fourth tree is taken within a bound that does not depend on how many there are."""
    made, slot = Paging(), Slot("f", 1, "n", "")
    for number in range(30):
        made.add(ready(f"a-{number}"))
    made.add(ready("z1"))
    made.add(ready("z2"))
    bound = 4 * (INTERRUPTED_IN_A_ROW + 1) * (CACHED_IN_A_ROW + 1)
    since = 0
    for step, new in enumerate(arrivals):
        for number, (tree, cause) in enumerate(new):
            made.add(ready(f"{tree}{step}.{number}", cause))
        found = made.next_for(slot)
        assert found is not None
        slot.remember(f"{'abc'[step % 3]}{step + 1}.0", 1)  # the frame has what comes next
        since += 1
        if found.root_id == "z":
            made.add(ready(f"z{step + 3}"))
            since = 0
        assert since <= bound


@given(
    st.integers(1, 5), st.lists(st.tuples(st.sampled_from("abc"), CAUSES, st.sampled_from(["", "gpu"])), max_size=20)
)
def test_no_frame_rests_while_somebody_could_use_it(frames: int, sessions: list[tuple[str, str, str]]) -> None:
    """Matching is work-conserving in each placement, whatever is queued for others."""
    made = Paging()
    for number in range(2 * frames):
        slot = made.slots[f"f{number}"] = Slot(f"f{number}", 1, "n", "gpu" if number % 2 else "")
        made.rest(slot, None)
    for number, (tree, cause, placement) in enumerate(sessions):
        made.add(Ready(f"{tree}{number}", placement, tree, cause))
    pairs = made.pairs()
    assert all(slot.placement == ready.placement for slot, ready in pairs)
    for placement in ("", "gpu"):
        wanted = sum(item[2] == placement for item in sessions)
        assert sum(ready.placement == placement for _, ready in pairs) == min(frames, wanted)
        assert made.queued(placement) == max(0, wanted - frames)


@given(st.permutations(list(range(6))))
def test_a_session_gets_the_free_frame_that_has_its_window(order: list[int]) -> None:
    """Sticky when free: where each session's own frame is free, all return to theirs."""
    made = Paging()
    for number in range(6):
        slot = made.slots[f"f{number}"] = Slot(f"f{number}", 1, "n", "")
        slot.remember(f"s{number}", 1)
        made.rest(slot, None)
    for number in order:
        made.add(Ready(f"s{number}", "", f"s{number}"))
    assert {ready.session_id: slot.frame_id for slot, ready in made.pairs()} == {f"s{n}": f"f{n}" for n in range(6)}


async def test_an_interrupted_session_stays_first_when_the_node_service_dies(tmp_path: Path) -> None:
    """Given sessions that wait for a frame and one that crashed after them, when the node service dies too, the next
    one knows that it was interrupted, and since when."""
    working = asyncio.Event()
    compiled = k.spec(k.script([("stay", {})], "done"), [stay])
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, frames=1) as kernel:
        [worker] = kernel.workers.values()

        def watch(_number: int, label: str, _who: k.Worker | None) -> None:
            if label == "tool begins":
                working.set()

        kernel.on_point = watch
        await kernel.spawn("lost", compiled)
        await kernel.send("lost")
        await working.wait()  # during the model call before it the frame might have been given to another session
        for name in ("a", "b", "c"):
            await kernel.spawn(name, compiled)
            await kernel.send(name)
        kernel.kill(worker, replace=False)
        await kernel.quiet()
        kernel.kill_node()
        await kernel.quiet()
        found = kernel.service.frames.paging.ready
        causes = {name: ready.cause for name, ready in found.items()}
        assert causes == {"a": "takeover", "b": "takeover", "c": "takeover", "lost": "resume"}
        assert found["lost"].down_since > 0
        assert worker.dead
        kernel.add_frame()
        assert (await kernel.end("lost"))["status"] == "completed"
        [back] = [event for event in await kernel.events("lost") if event["data"].get("cause") == "resume"]
        assert back["data"]["down"] > 0
