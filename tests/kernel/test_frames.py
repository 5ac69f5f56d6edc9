"""What a node service knows of its frames: which of them holds a session, also where a call to one was cut off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from understudy.errors import Fenced, ServiceGone
from understudy.node.turns import Ready
from understudy.placement import DEFAULT
from understudy.protocol import FrameIdentity, News, StepCall, Work
from understudy.records import ActivationId
from understudy.store.db.session_row import ActiveSession

from . import kernel as k

pytestmark = pytest.mark.conformance


def _call(kernel: k.Kernel, frame_id: str, number: int = 1) -> StepCall:
    return StepCall(FrameIdentity(frame_id, 1, kernel.service.config.node_id, DEFAULT), number)


async def _ready_but_not_queued(kernel: k.Kernel) -> None:
    """Session `s` has an input, and is not queued for a frame."""
    await kernel.spawn("s", k.spec(k.script("done")))
    await kernel.send("s")
    kernel.service.frames.paging.remove("s")


async def _until(condition: Callable[[], bool]) -> None:
    """Let tasks run until this is so."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_a_frame_that_never_heard_of_its_session_is_given_it_again(store: str, tmp_path: Path) -> None:
    """Given a frame whose call was answered with a session and cut off, when it calls again and knows of none, then the
    session goes on under the next epoch at once, without a sweep."""
    async with k.running(store, tmp_path, frames=0) as kernel:
        await kernel.spawn("s", k.spec(k.script("done")))
        await kernel.send("s")
        first = await kernel.service.step(_call(kernel, "f"))
        again = await kernel.service.step(_call(kernel, "f", 2))
        assert isinstance(first, Work)
        assert isinstance(again, Work)
        assert (first.session_id, first.epoch, again.session_id, again.epoch) == ("s", 1, "s", 2)
        assert kernel.service.sweep.swept == 0


async def test_a_wake_before_the_frame_calls_in_places_the_session_nowhere_else(store: str, tmp_path: Path) -> None:
    """Given a session in a frame that has not called in at a new service yet, when a notice says that the session is
    ready, then it is not queued for another frame: its own is on its way."""
    async with k.running(store, tmp_path, frames=0) as kernel:
        await kernel.spawn("s", k.spec(k.script("done")))
        await kernel.send("s")
        await kernel.service.step(_call(kernel, "f"))
        [row] = await kernel.service.reading.active(None)
        frames = kernel.service.frames
        del frames.paging.slots["f"]  # as after a restart: the store names the frame, which is expected
        frames.known.expect(row)
        frames.wake(row)
        assert "s" not in frames.paging.ready


async def test_a_session_that_is_given_to_another_frame_is_held_by_that_one_only(store: str, tmp_path: Path) -> None:
    """Given a session that is queued and in a frame, as after a change of the node service, when a frame that leaves
    another session is given it, then the model's answer goes to that frame, and the session ends there."""
    async with k.running(store, tmp_path, frames=0) as kernel:
        await kernel.spawn("s", k.spec(k.script("done")))
        await kernel.send("s")
        await kernel.service.step(_call(kernel, "old"))
        paging = kernel.service.frames.paging

        def found(_number: int, label: str, _worker: k.Worker | None) -> None:
            if label == "reply to step" and kernel.service.frames.paging.holder("t") is not None:
                kernel.on_point = None
                paging.add(Ready("s", DEFAULT, "s", "takeover", epoch=1))

        kernel.on_point = found
        kernel.add_frame()
        assert (await kernel.run("t", k.spec(k.script("done"))))["status"] == "completed"
        assert (await kernel.end("s"))["status"] == "completed"
        assert paging.slots["old"].session_id is None
        assert kernel.service.sweep.swept == 0


async def test_a_frame_that_shall_be_killed_is_named_until_it_is_gone(store: str, tmp_path: Path) -> None:
    """Given a frame of before the node service's restart whose run is ended by force, then the supervisor learns of it
    as one to be looked for, until it says that the frame is dead: nothing is kept of it then."""
    async with k.running(store, tmp_path, frames=0) as kernel:
        await kernel.spawn("s", k.spec(k.script("done")))
        frames, activation = kernel.service.frames, ActivationId("s", 1, 1)
        frames.known.expect(
            ActiveSession("s", "s", DEFAULT, incarnation=1, epoch=1, frame_id="old", actor_pid=1)
        )  # fmt: skip
        frames.condemn("old", activation)
        assert (frames.named(), frames.known.condemned) == ({"old": 0}, {"old"})
        await kernel.service.deaths.frame_died("old", "process_died")
        assert (frames.named(), frames.known.condemned) == ({}, set())


async def test_a_frame_that_dies_before_it_rests_does_not_rest(store: str, tmp_path: Path) -> None:
    """Given a frame that is said to be dead while its call is worked at, when it comes to rest, then it hears that it
    must call again, instead of waiting where nobody counts it."""
    async with k.running(store, tmp_path, frames=0) as kernel:
        frames = kernel.service.frames
        slot = frames.calling(_call(kernel, "f"))
        await kernel.service.deaths.frame_died("f", "process_died")
        with pytest.raises(ServiceGone):
            async with asyncio.timeout(20):
                await frames.rest(slot, None)


async def test_a_reserved_frame_that_is_not_needed_takes_the_next_session(store: str, tmp_path: Path) -> None:
    """Given a frame that rests and was reserved for an answer which needed none, when a session is ready, then that
    frame gets it."""
    async with k.running(store, tmp_path, frames=0) as kernel, asyncio.timeout(20):
        frames = kernel.service.frames
        calling = asyncio.create_task(kernel.service.step(_call(kernel, "f")))
        await _until(lambda: "f" in frames.paging.slots and frames.paging.slots["f"].resting)
        with frames.offered("t", frames.take_spare("t", DEFAULT)):
            assert not frames.paging.slots["f"].resting
        await kernel.spawn("s", k.spec(k.script("done")))
        await kernel.send("s")
        answer = await calling
        assert isinstance(answer, Work)
        assert answer.session_id == "s"


async def test_a_frame_that_called_in_is_named(store: str, tmp_path: Path) -> None:
    """Given a frame that called in, then the supervisor hears of it, with its pid, whether or not it saw it start."""
    async with k.running(store, tmp_path, frames=0) as kernel:
        kernel.service.frames.calling(_call(kernel, "f"))
        assert kernel.service.frames.named() == {"f": 1}


async def test_a_session_that_was_activated_since_it_was_found_ready_stays_where_it_is(
    store: str, tmp_path: Path
) -> None:
    """Given a session that was found ready under epoch 1, and is at work under epoch 2, when a frame is to have it for
    what was found, then that is refused."""
    async with k.running(store, tmp_path, frames=0) as kernel:
        await kernel.spawn("s", k.spec(k.script("done")))
        await kernel.send("s")
        for number in (1, 2):
            await kernel.service.step(_call(kernel, "f", number))
        frames = kernel.service.frames
        other = frames.calling(_call(kernel, "other"))
        stale = Ready("s", DEFAULT, "s", "takeover", epoch=1)
        with pytest.raises(Fenced, match="activated since"):
            await kernel.service.journal.submit(frames.activation(other, stale), "s")
        assert (await kernel.info("s"))["epoch"] == 2


async def test_a_session_that_is_being_placed_is_placed_nowhere_else(store: str, tmp_path: Path) -> None:
    """Given a session whose activation in one frame is being committed, when it is found ready again while another
    frame rests, then that one does not get it before the first commit has failed."""
    async with k.running(store, tmp_path, frames=0) as kernel, asyncio.timeout(20):
        frames = kernel.service.frames
        await _ready_but_not_queued(kernel)
        first = frames.calling(_call(kernel, "first"))
        calling = asyncio.create_task(kernel.service.step(_call(kernel, "second")))
        await _until(lambda: "second" in frames.paging.slots and frames.paging.slots["second"].resting)
        with frames.assignments.being_placed("s", first):
            frames.paging.add(Ready("s", DEFAULT, "s", "ready"))
            frames.dispatch()
            await _until(lambda: not frames.assignments.chosen["s"])
            await kernel.service.journal.submit(lambda tx: None)  # behind whatever was to be committed for it
            assert (await kernel.info("s"))["epoch"] == 0
        answer = await calling
        assert isinstance(answer, Work)
        assert answer.session_id == "s"


async def test_a_session_that_was_fenced_behind_its_activation_goes_on(store: str, tmp_path: Path) -> None:
    """Given a session whose activation is committed, when it is fenced and found ready under the next epoch before its
    frame is given the work, then the frame does not keep it, and it queues."""
    async with k.running(store, tmp_path, frames=0) as kernel:
        frames = kernel.service.frames
        await _ready_but_not_queued(kernel)
        slot = frames.calling(_call(kernel, "f"))
        with frames.assignments.being_placed("s", slot):
            work = await kernel.service.journal.submit(frames.activation(slot, Ready("s", DEFAULT, "s", "ready")), "s")
            frames.assignments.queue(Ready("s", DEFAULT, "s", "ready", epoch=work.epoch + 1))
            frames.given(slot, work)
        assert (slot.session_id, list(frames.paging.ready)) == (None, ["s"])


@pytest.mark.parametrize("later", [0, 2])
async def test_a_session_that_is_being_placed_is_queued_by_nobody(store: str, tmp_path: Path, later: int) -> None:
    """Given a session whose activation in one frame is being committed, when the frame that was thought to hold it
    calls in without it, and another part finds it ready as well, then it queues once no frame has got it, under the
    latest of the epochs that were found."""
    async with k.running(store, tmp_path, frames=0) as kernel:
        frames = kernel.service.frames
        await _ready_but_not_queued(kernel)
        first = frames.calling(_call(kernel, "first"))
        second = frames.calling(_call(kernel, "second"))
        with frames.assignments.being_placed("s", first):
            second.session_id, second.epoch = "s", 1
            frames.calling(_call(kernel, "second", 2))
            frames.requeue_unless_waiting("s", DEFAULT, "s", None)
            frames.assignments.queue(Ready("s", DEFAULT, "s", "takeover", epoch=later))
            assert not frames.paging.ready
        assert {name: ready.epoch for name, ready in frames.paging.ready.items()} == {"s": max(1, later)}


def _queued(kernel: k.Kernel) -> None:
    kernel.service.frames.paging.add(Ready("s", DEFAULT, "s", "ready"))


def _chosen(kernel: k.Kernel) -> None:
    kernel.service.frames.assignments.chosen["s"] += 1


@pytest.mark.parametrize("place", [_queued, _chosen])
async def test_the_sweep_leaves_alone_what_left_its_place_since_rows_were_read(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Callable[[k.Kernel], None]
) -> None:
    """Given a session that is queued, or chosen for a frame, while the sweep reads its row, when it has left that place
    before the sweep comes to it, then the sweep does nothing: that commit says what follows."""
    async with k.running(store, tmp_path, frames=0) as kernel:
        service = kernel.service
        await _ready_but_not_queued(kernel)
        active = service.reading.active

        async def slow(*arguments: Any, **options: Any) -> Any:
            rows = await active(*arguments, **options)
            service.frames.paging.remove("s")
            service.frames.assignments.chosen.clear()
            return rows

        place(kernel)
        monkeypatch.setattr(service.reading, "active", slow)
        await service.sweep.run(0)
        assert (service.sweep.swept, service.frames.paging.ready) == (0, {})


async def test_the_sweep_picks_up_what_nobody_knows(store: str, tmp_path: Path) -> None:
    """Given a ready session whose wake-up was lost, when the sweep comes, then a frame gets it."""
    async with k.running(store, tmp_path, frames=0) as kernel, asyncio.timeout(20):
        await kernel.spawn("s", k.spec(k.script("done")))
        await kernel.send("s")
        kernel.service.frames.paging.remove("s")
        await kernel.service.sweep.run(0)
        work = await kernel.service.step(_call(kernel, "f"))
        assert isinstance(work, Work)
        assert (work.session_id, kernel.service.sweep.swept) == ("s", 1)


async def test_the_sweep_counts_a_death_for_a_session_in_a_frame_that_nobody_knows(store: str, tmp_path: Path) -> None:
    """Given a session in a frame that is not known, not even as one that will call in, when the sweep comes, then its
    death is committed before the session goes on."""
    async with k.running(store, tmp_path, frames=0) as kernel:
        await kernel.spawn("s", k.spec(k.script("done")))
        await kernel.send("s")
        await kernel.service.step(_call(kernel, "f"))
        del kernel.service.frames.paging.slots["f"]
        await kernel.service.sweep.run(0)
        assert "session_crashed" in await kernel.types("s")


@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_a_session_that_ends_in_the_queue_leaves_it(store: str, tmp_path: Path, how: str) -> None:
    """Given a session that waits for a frame which never comes, when it has nothing to do any more, then it waits no
    longer, and goes on when it has; so where another node ended it."""
    async with k.running(store, tmp_path, frames=0) as kernel:
        await kernel.spawn("s", k.spec(k.script("done")))
        await kernel.send("s")
        ready = kernel.service.frames.paging.ready
        queued = ready["s"]
        await kernel.ask(how, "s", *((None,) if how == "cancel" else ()), "over")
        assert not ready
        kernel.service.frames.paging.add(queued)
        await kernel.service.notices.notice(News(["s"]))
        assert not ready
        if how == "cancel":
            await kernel.send("s", run_id="r2")
            assert list(ready) == ["s"]
