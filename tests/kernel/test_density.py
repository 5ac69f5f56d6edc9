"""Ten thousand sessions on one node service: nothing holds the event loop up, and processes come and go as ordered."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, patch

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError

from understudy.cluster.ray import machinery as machinery_module
from understudy.cluster.ray.ray_edge import result_of
from understudy.config import Settings
from understudy.errors import ServiceGone
from understudy.node import known_frames
from understudy.node import supply as supply_module
from understudy.node import timers as timers_module
from understudy.node.takeover import CHUNK
from understudy.node.turns import Ready
from understudy.protocol import News
from understudy.store.db.engine import now
from understudy.store.db.session_row import ActiveSession
from understudy.store.operations import beginnings
from understudy.store.reads import queries
from understudy.store.transaction import Transaction
from understudy.supervisor.capacity import Memory

from . import kernel as k

MANY = 10_000
HOUR = 3_600_000_000


def row(number: int) -> ActiveSession:
    """A session that is ready, as the store returns it."""
    return ActiveSession(
        f"s{number}", f"s{number}", incarnation=1, epoch=1, node_id="node1", updated_at=1
    )  # fmt: skip


@pytest.mark.parametrize("what", ["take_over", "sweep"])
async def test_nobody_waits_for_a_look_at_all_sessions(what: str, tmp_path: Path) -> None:
    """Given 10,000 sessions that are ready, when they are taken over or swept, between any two turns of the event loop
    a portion of them is looked at; and each is queued once."""
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, frames=1) as kernel:
        await kernel.stop_frames()
        service = kernel.service
        queued_in_a_turn, added = 0, service.frames.paging.add
        most = 0

        def add(ready: Ready) -> None:
            nonlocal queued_in_a_turn, most
            queued_in_a_turn += 1
            most = max(most, queued_in_a_turn)
            added(ready)

        rows = AsyncMock(return_value=[row(number) for number in range(MANY)])
        with patch.object(service.reading, "active", rows), patch.object(service.frames.paging, "add", add):
            look = kernel.take_over(kernel.generation, ["node1"]) if what == "take_over" else service.sweep.run(0)
            task = asyncio.ensure_future(look)
            while not task.done():
                queued_in_a_turn = 0
                await asyncio.sleep(0)
            await task
        assert most <= CHUNK
        assert len(service.frames.paging.ready) == MANY
        for number in range(MANY):
            service.frames.paging.remove(f"s{number}")


async def test_timers_that_are_due_together_fire_in_portions(tmp_path: Path) -> None:
    """Given 1,000 timers due at the same time, then the event loop turns in between, and all of them fire."""
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, frames=1) as kernel:
        fired: list[int] = []
        turn = 0

        async def fire(_key: Any, _due_at: int) -> None:
            return None

        def spawn(coroutine: Any) -> None:
            coroutine.close()
            fired.append(turn)

        timers = kernel.service.timers
        with patch.object(timers, "_fire", fire), patch.object(timers._node, "spawn_task", spawn):
            timers.note(((f"s{number}", "pause"), 1) for number in range(1_000))
            while len(fired) < 1_000:
                turn += 1
                await asyncio.sleep(0)
        assert max(fired.count(number) for number in set(fired)) <= 2 * timers_module.CHUNK


async def test_a_timer_that_is_set_again_is_not_lost_to_a_late_reading(tmp_path: Path) -> None:
    """Given a timer that was set again for an earlier time, when what was read before is noted after it, then it fires
    at both times: the store knows which one counts."""
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, frames=1) as kernel:
        fired = asyncio.Queue[int]()

        async def fire(_key: Any, due_at: int) -> None:
            fired.put_nowait(due_at)

        timers, later = kernel.service.timers, now() + 20_000_000
        with patch.object(timers, "_fire", fire):
            for due_at in (1, later, 2, later):
                timers.note([(("s", "pause"), due_at)])
            assert sorted([await fired.get(), await fired.get()]) == [1, 2]
        assert [due_at for _, due_at, _ in timers._order] == [later]


async def test_only_those_are_swept_that_may_be_ready(store: str, tmp_path: Path) -> None:
    """Sessions that wait for a timer are not read by the sweep, unless they were asked to end; a takeover reads all."""
    async with k.running(store, tmp_path, frames=1) as kernel:
        await kernel.stop_frames()

        def paused(name: str) -> Any:
            def operation(tx: Transaction) -> None:
                beginnings.pause(tx, tx.session(name), HOUR)
                beginnings.accept(tx, name, "r", "go")

            return operation

        for name in ("ready", "waits", "ends"):
            await kernel.spawn(name, k.spec("hi"))
        await kernel.send("ready")
        for name in ("waits", "ends"):
            await kernel.service.journal.submit(paused(name), name)
        reading = kernel.service.reading

        async def found(**only: Any) -> set[str]:
            return {row.session_id for row in await reading.query(queries.active_sessions, ["node1"], **only)}

        assert await found() == {"ready", "waits", "ends"}
        assert await found(may_be_ready=True) == {"ready"}
        assert await found(session_ids=["waits", "unknown"]) == {"waits"}
        assert await found(frame_id="f0") == set()


async def test_a_notice_reads_the_sessions_it_names(tmp_path: Path) -> None:
    """However many sessions are at work: what another node wrote is looked up by its ids."""
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, frames=1) as kernel:
        rows = AsyncMock(return_value=[])
        with patch.object(kernel.service.reading, "active", rows):
            await kernel.service.notices.notice(News(["a", "b"]))
        rows.assert_awaited_once_with(["node1"], session_ids=["a", "b"])


async def test_a_frame_that_is_one_too_many_leaves_when_it_rests(store: str, tmp_path: Path) -> None:
    """Given two frames at work, when one of their placement is to leave, then it finishes its round, its session goes
    on in the other one, and nothing is done twice."""
    path = tmp_path / "notes"
    script = k.script(*([("note", {"path": str(path), "text": "x"})] for _ in range(3)), "done")
    async with k.running(store, tmp_path, frames=2) as kernel:
        ordered = asyncio.Event()

        def watch(_number: int, label: str, _who: k.Worker | None) -> None:
            if label == "tool begins" and not ordered.is_set():
                ordered.set()
                kernel.service.frames.supply.leaving[""] = 1

        kernel.on_point = watch
        ends = await asyncio.gather(*(kernel.run(name, k.spec(script, [k.note])) for name in ("a", "b")))
        assert {end["status"] for end in ends} == {"completed"}
        assert len(k.notes(path)) == len(set(k.notes(path))) == 6
        assert len(kernel.service.frames.paging.slots) == 1
        [gone] = [worker for worker in kernel.workers.values() if worker.task.done()]
        del kernel.workers[gone.frame_id]
        await kernel.service.frames.supply.retire({"": 1})  # idle now: at once
        assert kernel.service.frames.paging.slots == {}


async def test_a_death_for_want_of_memory_is_reported(tmp_path: Path) -> None:
    """Given the kernel has just killed a process of this node for want of memory, when a frame died, that was why."""
    script = k.script([("note", {"path": str(tmp_path / "notes"), "text": "x"})], "done")
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, frames=1) as kernel:
        killed = 0
        kernel.service.frames._memory = None
        with patch.object(supply_module, "measure", lambda _pids: Memory(1, 1, 0, killed)):
            kernel.service.frames.supply.memory()

            def watch(_number: int, label: str, who: k.Worker | None) -> None:
                nonlocal killed
                if label == "tool begins" and who is not None and not killed:
                    killed = 1
                    kernel.kill(who)

            kernel.on_point = watch
            assert (await kernel.run("s", k.spec(script, [k.note])))["status"] == "completed"
        [crash] = [event for event in await kernel.events("s") if event["type"] == "session_crashed"]
        assert crash["data"]["cause"] == "out_of_memory"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OutOfMemoryError("2 worker(s) were killed due to the node running low on memory."), "out_of_memory"),
        (ActorDiedError(), None),
    ],
)
async def test_what_ray_says_of_a_death(error: Exception, cause: str | None) -> None:
    """Ray's own kills for want of memory are distinguished from other deaths."""

    async def call() -> None:
        raise error

    with pytest.raises(ServiceGone) as found:
        await result_of(call())
    assert found.value.details.get("cause") == cause


async def test_the_dead_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given frames that died long ago, then they are forgotten, but not while a takeover is under way, which may have
    read that they have a session."""
    monkeypatch.setattr(known_frames, "BURIED_SECONDS", 0.0, raising=False)
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, frames=0) as kernel:
        found, takeover = kernel.service.deaths, kernel.service.takeover
        buried = kernel.service.frames.known.buried
        await found.frame_died("f-old", "process_died")
        await found.frame_died("f-other", "process_died")
        assert len(buried) <= 1
        going, adopted, adopt = asyncio.Event(), asyncio.Event(), takeover.adopt

        async def held(home: str, nodes: list[str]) -> list[str]:
            going.set()
            await adopted.wait()
            return await adopt(home, nodes)

        monkeypatch.setattr(takeover, "adopt", held)
        task = asyncio.create_task(kernel.take_over(kernel.generation, kernel.nodes))
        await going.wait()
        await found.frame_died("f-new", "process_died")
        await found.frame_died("f-newest", "process_died")
        assert {"f-new", "f-newest"} <= set(buried)
        adopted.set()
        await task


async def test_definitions_of_placements_are_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given many placements, then the definitions of those that were used last are kept."""
    monkeypatch.setattr(machinery_module, "KNOWN_DEFINITIONS", 3, raising=False)
    machinery = machinery_module.RayMachinery(Settings(store="sqlite:///unused", model="offline"), "", None, None)
    node = AsyncMock()
    node.call.return_value = b"{}"
    for name in ("a", "b", "a", "c", "d", "a"):
        assert await machinery._definition(node, name) == {}
    assert await machinery._definition(node, "") == {}
    assert [call.args[1] for call in node.call.await_args_list] == ["a", "b", "c", "d"]
    assert list(machinery._definitions) == ["c", "d", "a"]
