"""Queues: which runs begin, in which order, and that a slot is given on whatever ends a run or dies."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from understudy.errors import Conflict, UnknownQueue
from understudy.store.operations.activation import quarantine
from understudy.testing.offline import OfflineServer

from ..store.test_archive import export, load
from . import kernel as k
from .deaths import Deaths
from .test_notices import nodes

PATIENCE = 30.0


@pytest.fixture
async def kernel(store: str, tmp_path: Path) -> AsyncIterator[k.Kernel]:
    async with k.running(store, tmp_path, frames=2) as made:
        yield made


async def put(kernel: k.Kernel, name: str = "q", **limits: Any) -> str:
    """Set a queue; the outcome."""
    done = await kernel.ask("set_queue", {"name": name, **limits})
    return str(done["outcome"])


async def send(kernel: k.Kernel, session_id: str, *, run_id: str = "r", queue: str = "q", content: str = "go",
               **place: Any) -> None:  # fmt: skip
    """Send an input that waits in a queue; the session is made, if there is none."""
    await kernel.spawn(session_id, k.spec())
    wanted = {"run_id": run_id, "content": content, "place": {"queue": queue, **place}}
    await kernel.ask("send", session_id, wanted)


async def read(kernel: k.Kernel, name: str = "q") -> tuple[int, int, int]:
    """How many of its runs are at work, wait, and are behind others in their sessions."""
    found = await kernel.ask("read", "queue", [name], {})
    return found["at_work"], found["waiting"], found["behind"]


async def statuses(kernel: k.Kernel, *session_ids: str) -> list[str]:
    """Which of the sessions wait in a queue, and which are at work."""
    return ["waits" if (await kernel.info(one))["status"] == "waiting_for_queue" else "at work" for one in session_ids]


async def admitted(kernel: k.Kernel, *session_ids: str) -> list[str]:
    """The runs that have got a slot, as `SESSION/RUN`, in the order in which they did."""
    events = [event for one in session_ids for event in await kernel.events(one) if event["type"] == "run_admitted"]
    return [f"{event['session_id']}/{event['run_id']}" for event in sorted(events, key=lambda event: event["at"])]


async def test_only_so_many_are_at_work(kernel: k.Kernel) -> None:
    """Given a queue of two at once, when four runs are sent, then two are at work and two wait, in no process; when the
    first ones end, the others begin, in the order in which they came."""
    assert await put(kernel, concurrency=2) == "created"
    kernel.server.hold()
    names = ["s0", "s1", "s2", "s3"]
    for name in names:
        await send(kernel, name)
    assert await read(kernel) == (2, 2, 0)
    assert await statuses(kernel, *names) == ["at work", "at work", "waits", "waits"]
    waiting = await kernel.info("s3")
    assert (waiting["frame_id"], waiting["actor_pid"], waiting["run_id"]) == (None, None, None)
    assert (await kernel.ask("read", "run", ["s3", "r"], {}))["status"] == "queued"
    kernel.server.release()
    for name in names:
        assert (await kernel.end(name))["status"] == "completed"
    assert await read(kernel) == (0, 0, 0)
    assert await admitted(kernel, *names) == [f"{name}/r" for name in names]


async def test_the_highest_priority_first(kernel: k.Kernel) -> None:
    """Given runs that wait, when a slot is free, then that of the highest priority begins, and of equal ones the one
    that came first."""
    await put(kernel, concurrency=1)
    kernel.server.hold()
    for name, priority in [("first", 0), ("low", -1), ("old", 5), ("new", 5), ("plain", 0)]:
        await send(kernel, name, priority=priority)
    kernel.server.release()
    names = ["first", "old", "new", "plain", "low"]
    for name in names:
        await kernel.end(name)
    assert await admitted(kernel, *names) == [f"{name}/r" for name in names]


async def test_a_key_has_its_own_limit(kernel: k.Kernel) -> None:
    """Given a limit of one for each key, when many of one key wait, then others begin past them, those without a key
    without that limit, and those of the key one after the other."""
    await put(kernel, concurrency=4, per_key=1)
    kernel.server.hold()
    for name, key in [("a0", "a"), ("a1", "a"), ("a2", "a"), ("b0", "b"), ("b1", "b"), ("x0", ""), ("x1", "")]:
        await send(kernel, name, key=key)
    assert await admitted(kernel, "a0", "a1", "a2", "b0", "b1", "x0", "x1") == ["a0/r", "b0/r", "x0/r", "x1/r"]
    kernel.server.release()
    for name in ("a0", "a1", "a2", "b0", "b1", "x0", "x1"):
        await kernel.end(name)
    order = await admitted(kernel, "a0", "a1", "a2")
    assert order == ["a0/r", "a1/r", "a2/r"]


async def test_a_full_key_does_not_hide_others(kernel: k.Kernel) -> None:
    """Given more waiting runs of a key that is full than there is room, when another key's run waits behind them, then
    that begins."""
    await put(kernel, concurrency=3, per_key=1)
    kernel.server.hold()
    for number in range(6):
        await send(kernel, f"a{number}", key="a")
    await send(kernel, "b", key="b")
    assert await statuses(kernel, "a0", "a1", "b") == ["at work", "waits", "at work"]
    kernel.server.release()
    await kernel.end("a5")


async def test_a_session_has_one_slot(kernel: k.Kernel) -> None:
    """Given a session with several inputs of a queue, then only one of them takes a slot, the others are behind it, and
    another session's run begins; an input without a queue keeps its turn between them."""
    await put(kernel, concurrency=2)
    kernel.server.hold()
    await send(kernel, "s", run_id="r0", content="0")
    await send(kernel, "s", run_id="r1", content="1")
    await kernel.send("s", "2", "r2")
    await send(kernel, "s", run_id="r3", content="3")
    await send(kernel, "t")
    assert await read(kernel) == (2, 0, 2)
    kernel.server.release()
    for run_id in ("r0", "r1", "r2", "r3"):
        await kernel.end("s", run_id)
    said = [message["content"] for message in await kernel.messages("s") if message["role"] == "user"]
    assert said == ["0", "1", "2", "3"]
    assert await admitted(kernel, "s") == ["s/r0", "s/r1", "s/r3"]


async def test_an_input_waits_behind_one_that_waits(kernel: k.Kernel) -> None:
    """Given a session whose next run waits for a slot, when it gets an input without a queue, then that waits as well;
    when the first one is cancelled, it begins."""
    await put(kernel, concurrency=1)
    kernel.server.hold()
    await send(kernel, "other")
    await send(kernel, "s", run_id="r0")
    await kernel.send("s", "after", "r1")
    await send(kernel, "s", run_id="r2")
    assert await statuses(kernel, "s") == ["waits"]
    await kernel.ask("cancel", "s", "r0", "not needed")
    await kernel.until("s", "run_started")
    assert await read(kernel) == (1, 0, 1)
    kernel.server.release()
    assert [(await kernel.end("s", run_id))["status"] for run_id in ("r0", "r1", "r2")] == [
        "cancelled", "completed", "completed"
    ]  # fmt: skip


@pytest.mark.parametrize("how", ["cancel", "close", "quarantine"])
async def test_a_slot_is_given_on_however_a_run_ends(kernel: k.Kernel, how: str) -> None:
    """Given a run at work and one that waits, when the first one ends in any way, then the other one begins."""
    await put(kernel, concurrency=1)
    kernel.server.hold()
    await send(kernel, "s")
    await send(kernel, "t")
    await kernel.until("s", "model_call_started")
    if how == "cancel":
        await kernel.ask("cancel", "s", "r", "no")
    elif how == "close":
        await kernel.ask("close", "s", "no")
    else:
        await kernel.service.journal.submit(lambda tx: quarantine(tx, tx.session("s"), "stuck", "dead"))
    kernel.server.release()
    assert (await kernel.end("t"))["status"] == "completed"


@pytest.mark.parametrize("how", ["cancel", "close", "quarantine"])
async def test_who_waits_can_be_ended(kernel: k.Kernel, how: str) -> None:
    """Given a run that waits for a slot, when it is cancelled, its session closed or given up, then it ends, and has no
    place in the queue."""
    await put(kernel, concurrency=1)
    kernel.server.hold()
    await send(kernel, "s")
    await send(kernel, "t", run_id="r0")
    await send(kernel, "t", run_id="r1")
    if how == "cancel":
        assert await kernel.ask("cancel", "t", "r1", "no")
        assert await kernel.ask("cancel", "t", "r0", "no")
    elif how == "close":
        await kernel.ask("close", "t", "no")
    else:
        await kernel.service.journal.submit(lambda tx: quarantine(tx, tx.session("t"), "stuck", "dead"))
    assert await read(kernel) == (1, 0, 0)
    status = "quarantined" if how == "quarantine" else "cancelled"
    assert [(await kernel.end("t", run_id))["status"] for run_id in ("r0", "r1")] == [status] * 2
    kernel.server.release()
    await kernel.end("s")


async def test_an_unknown_queue_changes_nothing(kernel: k.Kernel) -> None:
    """Given no queue of that name, when a run is sent to it, then that is refused, and the session has no run."""
    await kernel.spawn("s", k.spec())
    with pytest.raises(UnknownQueue, match="there is no queue 'q'"):
        await send(kernel, "s")
    assert await kernel.ask("read", "runs", ["s"], {}) == []
    assert (await kernel.info("s"))["status"] == "idle"


async def test_the_same_input_again_is_one_run(kernel: k.Kernel) -> None:
    """Given a run that waits, when it is sent again, perhaps to a queue that is not there, then nothing changes."""
    await put(kernel, concurrency=1)
    kernel.server.hold()
    await send(kernel, "s")
    await send(kernel, "t")
    await send(kernel, "t", queue="gone")
    assert await read(kernel) == (1, 1, 0)
    kernel.server.release()
    await kernel.end("t")


async def test_limits_are_changed_while_runs_wait(kernel: k.Kernel) -> None:
    """Given runs that wait, when the limit is raised, then more begin at once; when it is lowered, those at work go on,
    and none begins before there is room under the new one. The same limits again change nothing."""
    await put(kernel, concurrency=1)
    kernel.server.hold()
    for number in range(4):
        await send(kernel, f"s{number}")
    assert await put(kernel, concurrency=1) == "unchanged"
    assert await put(kernel, concurrency=3) == "changed"
    assert await read(kernel) == (3, 1, 0)
    await put(kernel, concurrency=1)
    await kernel.ask("cancel", "s0", "r", "no")
    await kernel.end("s0")
    assert await read(kernel) == (2, 1, 0)
    kernel.server.release()
    await kernel.end("s3")


async def test_a_paused_queue_begins_nothing(kernel: k.Kernel) -> None:
    """Given a paused queue, then what is sent waits, also if there is room; resumed it begins."""
    await put(kernel, concurrency=1)
    assert await kernel.ask("pause_queue", "q", True)
    assert not await kernel.ask("pause_queue", "q", True)
    await send(kernel, "s")
    assert await read(kernel) == (0, 1, 0)
    assert await kernel.ask("pause_queue", "q", False)
    assert (await kernel.end("s"))["status"] == "completed"


async def test_a_queue_with_runs_is_not_removed(kernel: k.Kernel) -> None:
    """Given runs that wait or are at work, when the queue is removed, then that is refused; without any it is gone, and
    removed again there was none."""
    await put(kernel, concurrency=1)
    kernel.server.hold()
    await send(kernel, "s")
    await send(kernel, "t")
    with pytest.raises(Conflict, match="1 runs wait in queue 'q', and 1 of it are at work"):
        await kernel.ask("remove_queue", "q")
    kernel.server.release()
    await kernel.end("s")
    await kernel.end("t")
    assert await kernel.ask("remove_queue", "q")
    assert not await kernel.ask("remove_queue", "q")
    with pytest.raises(UnknownQueue):
        await read(kernel)


async def test_a_repeated_request_does_nothing_more(kernel: k.Kernel) -> None:
    """Given a request to set, pause or remove a queue that arrives again after others, then it does nothing more."""
    await kernel.ask("set_queue", {"name": "q", "concurrency": 1}, "first", "")
    await put(kernel, concurrency=2)
    assert (await kernel.ask("set_queue", {"name": "q", "concurrency": 1}, "first", ""))["outcome"] == "created"
    assert (await kernel.ask("read", "queue", ["q"], {}))["concurrency"] == 2
    assert await kernel.ask("pause_queue", "q", True, "second", "")
    assert await kernel.ask("pause_queue", "q", False)
    assert await kernel.ask("pause_queue", "q", True, "second", "")
    assert not (await kernel.ask("read", "queue", ["q"], {}))["paused"]
    assert await kernel.ask("remove_queue", "q", "third", "")
    await put(kernel)
    assert await kernel.ask("remove_queue", "q", "third", "")
    assert await read(kernel) == (0, 0, 0)


async def test_a_rate_holds(kernel: k.Kernel) -> None:
    """Given a rate of two in a third of a second, when five runs wait, then within no such time more than two begin;
    nothing has to happen for the next ones to begin."""
    await put(kernel, rate={"limit": 2, "seconds": 0.3})
    names = [f"s{number}" for number in range(5)]
    for name in names:
        await send(kernel, name)
    for name in names:
        await kernel.end(name)
    events = [event for name in names for event in await kernel.events(name) if event["type"] == "run_admitted"]
    times = sorted(event["at"] for event in events)
    assert len(times) == 5
    assert all(later - earlier >= 300_000 for earlier, later in zip(times, times[2:], strict=False))


async def test_two_node_services_share_a_queue(postgres: str, server: OfflineServer, tmp_path: Path) -> None:
    """Given sessions at home on two nodes and a queue of one at once, when each node accepts runs, then they are at
    work one at a time, and a slot that one node's run gives back is taken by the other's."""
    async with nodes(postgres, server, tmp_path) as (a, b):
        await put(a, concurrency=1)
        server.hold()
        for number in range(3):
            await send(a, f"a{number}")
            await send(b, f"b{number}")
        assert await read(b) == (1, 5, 0)
        server.release()
        names = [f"{node}{number}" for number in range(3) for node in "ab"]
        for name in names:
            async with asyncio.timeout(PATIENCE):
                await (a if name.startswith("a") else b).end(name)
        assert await admitted(a, *names) == [f"{name}/r" for name in names]


async def test_an_archive_brings_runs_that_wait(store: str, server: OfflineServer, tmp_path: Path) -> None:
    """Given the archive of a session whose run waits for a slot, when a store takes it in that has a queue of the name
    with room in it, then the run begins, though nothing else happens in the queue."""
    async with k.running(store, tmp_path, frames=1, server=server) as kernel:
        await put(kernel, concurrency=1)
        server.hold()
        await send(kernel, "s")
        await send(kernel, "t")
        archived = export(store, "t")
        server.release()
    other = f"sqlite:///{tmp_path}/other.db"
    async with k.running(other, tmp_path, frames=1, server=server) as kernel:
        await put(kernel, concurrency=1)
        assert await load(other, archived, resume=True)
        await kernel.service.sweep.run(0)
        assert (await kernel.end("t"))["status"] == "completed"


@pytest.mark.parametrize("victim", ["frame", "node"])
async def test_deaths_at_every_point(server: OfflineServer, tmp_path: Path, victim: str) -> None:
    """Given three runs of a queue of one at once, when a frame or the node service dies at any point, then each ends,
    never two are at work at once, and each gets one slot."""
    names = ["s0", "s1", "s2"]
    for at in itertools.count():
        path = tmp_path / str(at)
        path.mkdir()
        async with k.running(f"sqlite:///{path}/store.db", path, frames=2, server=server) as kernel:
            await put(kernel, concurrency=1)
            deaths = Deaths(kernel, "s0", at, victim)
            for name in names:
                await send(kernel, name)
            for name in names:
                assert (await kernel.end(name))["status"] == "completed", deaths.where
            kernel.on_point = None
            await kernel.quiet()
            events = [event for name in names for event in await kernel.events(name)]
            begun, ended = (
                sorted(event["at"] for event in events if event["type"] == kind)
                for kind in ("run_admitted", "run_finished")
            )
            assert len(begun) == len(ended) == 3, deaths.where
            assert all(end <= begin for end, begin in zip(ended, begun[1:], strict=False)), deaths.where
        if not deaths.label:
            break
