"""Paging: many sessions on few frames. The matching alone, and with a node service, frames and deaths."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from understudy.node import paging as rules
from understudy.node.paging import CACHED_IN_A_ROW, Paging, Slot
from understudy.node.turns import Ready
from understudy.records import CACHED_WINDOWS
from understudy.supervisor.pool import Demand

from ..kernel import kernel as k

SESSIONS = [f"s{tree}.{number}" for tree in range(2) for number in range(3)]


def ready(session_id: str, root_id: str = "", *, placement: str = "", cause: str = "ready") -> Ready:
    return Ready(session_id, placement, root_id or session_id, cause)


def paging(*slots: Slot) -> Paging:
    made = Paging()
    made.slots = {slot.frame_id: slot for slot in slots}
    return made


def frame(name: str, session_id: str | None = None, wait: str | None = None, **more: object) -> Slot:
    return Slot(
        name, 1, "n", "", session_id=session_id, wait=wait, resting=wait is not None or session_id is None, **more
    )  # type: ignore[arg-type]


def matches(made: Paging) -> dict[str, str]:
    return {found.session_id: slot.frame_id for slot, found in made.pairs()}


def test_a_free_frame_comes_before_one_whose_session_waits() -> None:
    """Nobody is parked while a frame is free."""
    made = paging(frame("a", "x", "model"), frame("b"))
    made.add(ready("s"))
    assert matches(made) == {"s": "b"}


def test_who_leaves_first() -> None:
    """An idle session, then one that waits for a model; an acting one never."""
    waits = ["model", "idle", None]
    made = paging(*(Slot(f"{wait}", 1, "n", "", f"x{wait}", 1, wait, resting=wait is not None) for wait in waits))
    for number in range(3):
        made.add(ready(f"s{number}"))
    assert matches(made) == {"s0": "idle", "s1": "model"}
    assert list(made.ready) == ["s2"]


def test_a_session_returns_to_the_frame_that_caches_it() -> None:
    """Among free frames the one with its window is taken, and a frame that asks prefers a session it has."""
    made = paging(frame("a"), frame("b"), frame("c"))
    made.slots["b"].remember("s", 7)
    made.add(ready("s"))
    assert matches(made) == {"s": "b"}
    made.add(ready("first"))
    made.add(ready("s"))
    found = made.next_for(made.slots["b"])
    assert found is not None
    assert found.session_id == "s"


def test_the_latest_wait_for_a_model_leaves_first() -> None:
    """Of sessions that wait for the same the one leaves that will wait longest: for models the one that began last, of
    idle ones the one that began first."""
    for wait, leaves in (("idle", "a"), ("model", "b")):
        slots = [Slot(name, 1, "n", "", f"x{name}", 1) for name in "ab"]
        made = paging(*slots)
        for slot in slots:
            made.rest(slot, wait)
        made.add(ready("s"))
        assert matches(made) == {"s": leaves}


def test_a_cached_session_does_not_hold_up_the_others() -> None:
    """A frame prefers the sessions whose windows it has, but not for ever."""
    slot = frame("a")
    made = paging(slot)
    slot.remember("mine", 7)
    made.add(ready("other"))
    taken = []
    for _ in range(CACHED_IN_A_ROW + 1):
        made.add(ready("mine"))
        found = made.next_for(slot)
        assert found is not None
        taken.append(found.session_id)
    assert taken == ["mine"] * CACHED_IN_A_ROW + ["other"]


def test_returns_are_counted() -> None:
    """A session that comes back to its window is a hit, to another frame a miss; a new one of the same id knows
    nothing."""
    slot = frame("a")
    made = paging(slot)
    made.count_return(slot, "s", 1)
    slot.remember("s", 7, 1)
    made.count_return(slot, "s", 1)
    made.count_return(slot, "s", 2)
    assert (made.hits, made.misses) == (1, 2)


def test_nothing_walks_the_ready_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 10,000 ready sessions, matching, asking and counting touch as many of them as there are frames."""
    made = paging(*(frame(f"f{number}") for number in range(8)))
    for number in range(10_000):
        made.add(ready(f"s{number}", f"t{number % 3}"))
    for number in range(10_000):
        made.add(ready(f"g{number}", placement="gpu"))
    touched = 0

    class Counted(dict[str, Ready]):
        def __iter__(self) -> Any:
            nonlocal touched
            for key in super().__iter__():
                touched += 1
                yield key

        def values(self) -> Any:
            return [self[key] for key in self]

        items = values

    made.ready = Counted(made.ready)
    monkeypatch.setattr(rules, "Ready", None)  # nothing new is made of them either
    assert len(made.pairs()) == 8
    assert made.pairs() == []
    assert made.next_for(made.slots["f0"]) is not None
    assert made.demand() == {"": Demand(9_991, acting=8), "gpu": Demand(10_000)}
    assert made.queued("gpu") == 10_000
    assert made.remove("s5000") is not None
    assert touched == 0


def test_placements_do_not_mix() -> None:
    """A session never gets a frame of another placement."""
    made = paging(frame("a"))
    made.add(ready("s", placement="gpu"))
    assert (matches(made), made.next_for(made.slots["a"])) == ({}, None)


def test_a_slot_forgets_as_the_frame_does() -> None:
    """The windows it counts on are the latest `CACHED_WINDOWS`."""
    slot = frame("a")
    for number in range(CACHED_WINDOWS + 1):
        slot.remember(f"s{number}", 1)
    assert ("s0" in slot.known, len(slot.known)) == (False, CACHED_WINDOWS)


class Matching(RuleBasedStateMachine):
    """Sessions become ready, are given out, wait and end; frames come, rest and die."""

    def __init__(self) -> None:
        super().__init__()
        self.paging = Paging()
        self.ready: set[str] = set()
        self.frames = 0

    def held(self) -> list[str]:
        return [slot.session_id for slot in self.paging.slots.values() if slot.session_id is not None]

    @rule()
    def frame_comes(self) -> None:
        slot = Slot(f"f{self.frames}", 1, "n", "")
        self.frames += 1
        self.paging.slots[slot.frame_id] = slot
        self.paging.rest(slot, None)

    @rule(session_id=st.sampled_from(SESSIONS), cause=st.sampled_from(["ready", "resume"]))
    def session_becomes_ready(self, session_id: str, cause: str) -> None:
        if session_id not in self.held():
            self.paging.add(ready(session_id, session_id[:2], cause=cause))
            self.ready.add(session_id)

    @rule()
    def dispatch(self) -> None:
        for slot, found in self.paging.pairs():
            self.give(slot, found)
        free = any(slot.resting for slot in self.paging.slots.values())
        assert not (self.paging.ready and free), "a ready session and a resting frame were not matched"

    def give(self, slot: Slot, found: Ready) -> None:
        assert not slot.resting
        slot.session_id, slot.wait = found.session_id, None
        slot.remember(found.session_id, 1)
        self.ready.remove(found.session_id)

    @precondition(lambda self: any(not slot.resting for slot in self.paging.slots.values()))
    @rule(data=st.data(), wait=st.sampled_from(["model", "idle", None]))
    def frame_asks(self, data: st.DataObject, wait: str | None) -> None:
        slot = data.draw(st.sampled_from([slot for slot in self.paging.slots.values() if not slot.resting]))
        following = self.paging.next_for(slot)
        if following is not None:
            self.give(slot, following)
            return
        if wait is None:
            slot.session_id = None
        self.paging.rest(slot, wait)

    @precondition(lambda self: self.paging.slots)
    @rule(data=st.data())
    def frame_dies(self, data: st.DataObject) -> None:
        slot = self.paging.slots.pop(data.draw(st.sampled_from(list(self.paging.slots))))
        if slot.session_id is not None:
            self.paging.add(ready(slot.session_id, slot.session_id[:2], cause="resume"))
            self.ready.add(slot.session_id)

    @invariant()
    def no_session_is_lost_or_in_two_places(self) -> None:
        held = self.held()
        assert len(set(held)) == len(held)
        assert set(self.paging.ready) == self.ready
        assert not self.ready & set(held)

    @invariant()
    def demand_counts_everything_once(self) -> None:
        rows = self.paging.demand().values()
        assert sum(row.ready for row in rows) == len(self.ready)
        assert sum(row.alive for row in rows) == len(self.paging.slots)


TestMatching = Matching.TestCase
TestMatching.settings = settings(max_examples=50, stateful_step_count=30)


@pytest.mark.thorough
@pytest.mark.parametrize("kills", [0, 40], ids=["calm", "kills"])
async def test_many_sessions_on_few_frames(kills: int, tmp_path: Path) -> None:
    """200 sessions on 8 frames and a slow model: all complete, with the same transcript, no model call is made twice,
    no call is executed twice, whoever is killed meanwhile."""
    path = tmp_path / "notes"
    replies = [[("note", {"path": str(path), "text": f"{number}"})] for number in range(2)]
    compiled = k.spec(k.script(*replies, "done"), [k.note])
    random.seed(7)
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, frames=8, latency=0.05) as kernel:
        left = kills

        def maybe_kill(number: int, _label: str, worker: k.Worker | None) -> None:
            nonlocal left
            if left and number > 50 and random.random() < 0.05:
                left -= 1
                kernel.kill(worker or random.choice(list(kernel.workers.values())))

        kernel.on_point = maybe_kill
        names = [f"s{number}" for number in range(200)]
        ends = await asyncio.gather(*(kernel.run(name, compiled) for name in names))
        assert left == 0
        assert {run["status"] for run in ends} == {"completed"}
        assert kernel.server.count == 600
        executed = k.notes(path)
        assert len(set(executed)) == len(executed)
        interrupted = 0
        for name in names:
            found = await kernel.transcript(name)
            assert [entry[0] for entry in found] == ["user", *["assistant", "tool"] * 2, "assistant"]
            interrupted += sum("interrupted" in entry[1] for entry in found if entry[0] == "tool")
        assert interrupted <= kills
        assert len(executed) >= 400 - interrupted
