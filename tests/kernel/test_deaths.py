"""A node service is replaced while a tool runs: what it learns, and when, must not lose or double anything."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, patch

import pytest

from understudy.errors import StaleGeneration, StoreUnreachable
from understudy.node.node_service import NodeService
from understudy.node.paging import Ready, Slot
from understudy.node.reading import Reading
from understudy.node.requests import Requests
from understudy.node.rounds import Rounds
from understudy.protocol import Exit, FrameIdentity, News, StepCall, Work
from understudy.records import ActivationId
from understudy.store.db.engine import now
from understudy.store.db.session_row import ActiveSession
from understudy.store.journal import Journal
from understudy.store.operations.beginnings import accept
from understudy.store.transaction import Transaction
from understudy.testing.offline import OfflineServer

from . import kernel as k


@dataclass
class Replaced:
    """A session whose tool was at work when the node service died; the next one has not taken over."""

    kernel: k.Kernel
    worker: k.Worker
    run: asyncio.Task[dict[str, object]]
    notes: Path
    tool_may_end: asyncio.Event

    def kill_worker(self) -> str:
        """The frame dies too; nobody has reported it yet."""
        self.worker.dead = True
        self.worker.task.cancel()
        del self.kernel.workers[self.worker.frame_id]
        return self.worker.frame_id


@asynccontextmanager
async def replaced(store: str, directory: Path) -> AsyncIterator[Replaced]:
    notes = directory / "notes"
    script = k.script([("note", {"path": str(notes), "text": "x"})], "done")
    async with k.running(store, directory, frames=1) as kernel:
        [worker] = kernel.workers.values()
        working, tool_may_end = k.held_at_effect(kernel)
        run = asyncio.create_task(kernel.run("s", k.spec(script, [k.note])))
        await working.wait()
        await kernel.replace_service()
        yield Replaced(kernel, worker, run, notes, tool_may_end)
        assert (await run)["status"] == "completed"
        assert len(k.notes(notes)) == 1


async def test_a_death_is_reported_before_the_takeover(store: str, tmp_path: Path) -> None:
    """Given the frame died too, when that is reported before the takeover, then it is refused; reported again after
    it, it resumes the session."""
    async with replaced(store, tmp_path) as found:
        kernel, service = found.kernel, found.kernel.service
        frame_id = found.kill_worker()
        with pytest.raises(StaleGeneration):
            await service.deaths.frame_died(frame_id, "process_died")
        await service.takeover.run(kernel.generation, 10, kernel.nodes)
        assert list(kernel.service.frames.named()) == [frame_id]
        await service.deaths.frame_died(frame_id, "process_died")
        kernel.add_frame()
        await found.run
        assert service.sweep.swept == 0
        crashes = [event["data"]["pid"] for event in await kernel.events("s") if event["type"] == "session_crashed"]
        assert crashes == [found.worker.frame.identity.pid]


async def test_a_call_that_was_lost_with_its_service_is_made_again_at_once(store: str, tmp_path: Path) -> None:
    """Given a service that died with its gateway and a model call, when the frame repeats its step at the next one,
    then the call is made again with that: it need not be swept for."""
    with patch("understudy.node.sweep.SWEEP_SECONDS", 3_600.0):
        async with k.running(store, tmp_path, frames=1) as kernel:
            kernel.server.hold()
            run = asyncio.create_task(kernel.run("s", k.spec()))
            await asyncio.to_thread(kernel.server.wait, lambda stats: stats.in_flight == 1)
            kernel.gateway.kill()
            await kernel.replace_service()
            await kernel.service.takeover.run(kernel.generation, 10, kernel.nodes)
            await asyncio.to_thread(kernel.server.wait, lambda stats: stats.requests == 2, 10.0)
            kernel.server.release()
            assert (await run)["status"] == "completed"
            assert "model_call_reissued" in await kernel.types("s"), "it is paid twice, and says so"


async def test_a_call_outlasts_its_service(store: str, tmp_path: Path) -> None:
    """Given a service that dies with a model call in flight, or while its answer is being committed, then the call goes
    on in the gateway, the next service commits its answer, and nothing is asked for, or paid, again."""
    for label in ("in flight", "before the commit", "after the commit"):
        async with k.running(store, tmp_path, frames=1) as kernel:
            kernel.server.hold()
            name, requests = label.split()[0], kernel.server.count
            await kernel.spawn(name, k.spec(k.script("done")))
            await kernel.send(name)
            await asyncio.to_thread(kernel.server.wait, lambda stats: stats.in_flight == 1)
            if label == "in flight":
                kernel.kill_node()
                await kernel.quiet()
            else:
                kernel.on_point = dying_at(kernel, label)
            kernel.server.release()
            assert (await kernel.end(name))["text"] == "done"
            types = await kernel.types(name)
            assert ("model_call_reissued" in types, types.count("model_call_completed")) == (False, 1)
            assert kernel.server.count == requests + 1
            await kernel.gateway_is_empty()


async def test_a_service_that_is_abandoned_does_nothing_more(tmp_path: Path) -> None:
    """Given an operation that is about to be committed and a model call in flight, when their service is abandoned,
    then nothing is committed, whoever waits or submits is cancelled, and the call is left to the next service."""
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, frames=1) as kernel:
        kernel.server.hold()
        await kernel.spawn("s", k.spec(k.script("done")))
        await kernel.send("s")
        await asyncio.to_thread(kernel.server.wait, lambda stats: stats.in_flight == 1)
        journal, calls = kernel.service.journal, kernel.service.calls
        waiting = asyncio.create_task(Journal.submit_all(journal, [lambda tx: accept(tx, "s", "r2", "again")], "s"))
        await asyncio.sleep(0)  # it is in the queue
        kernel.kill_node()
        assert isinstance((await asyncio.gather(waiting, return_exceptions=True))[0], asyncio.CancelledError)
        for use in (journal.submit(lambda tx: accept(tx, "s", "r3", "again"), "s"), calls.link.attached()):
            with pytest.raises(asyncio.CancelledError):
                await use
        await kernel.quiet()
        kernel.server.release()
        assert (await kernel.end("s"))["text"] == "done"
        assert [run["run_id"] for run in await kernel.ask("read", "runs", ["s"], {})] == ["r"]
        assert (kernel.server.count, len(calls)) == (1, 0)


def dying_at(kernel: k.Kernel, label: str) -> Any:
    """Lets the node service die at the next point of this label."""

    def die(_number: int, found: str, _worker: k.Worker | None) -> None:
        if found == label:
            kernel.on_point = None
            kernel.kill_node()

    return die


async def test_a_call_that_was_lost_with_its_gateway_is_made_again_at_once(store: str, tmp_path: Path) -> None:
    """Given a session that waits for a model in its frame and one that waits in none, when the gateway dies, then both
    calls are made again at the next one, as the next attempts: nobody need sweep for them."""
    with patch("understudy.node.sweep.SWEEP_SECONDS", 3_600.0):
        async with k.running(store, tmp_path, frames=1) as kernel:
            before = kernel.server.count
            kernel.server.hold()
            for name in ("first", "second"):
                await kernel.spawn(name, k.spec(k.script("done")))
                await kernel.send(name)
            await asyncio.to_thread(kernel.server.wait, lambda stats: stats.in_flight == 2)
            kernel.gateway.kill()
            await asyncio.to_thread(kernel.server.wait, lambda stats: stats.requests == before + 4, 10.0)
            kernel.server.release()
            for name in ("first", "second"):
                assert (await kernel.end(name))["text"] == "done"
                assert (await kernel.types(name)).count("model_call_reissued") == 1
            assert kernel.service.sweep.swept == 0


async def test_a_call_in_flight_is_not_made_again(store: str, tmp_path: Path) -> None:
    """Given a model call that was lost with its service and gateway, and is made again for the next activation, when
    that frame repeats its step, then it waits for the call in flight: there is no third attempt."""
    step, first, repeated = NodeService.step, list[asyncio.Task[Any]](), asyncio.Event()

    async def twice(service: NodeService, call: StepCall) -> Work | Exit:
        if call.activation is not None and call.batch is None and not first:
            first.append(asyncio.create_task(step(service, call)))
            await asyncio.to_thread(kernel.server.wait, lambda stats: stats.requests == 2)
            repeated.set()
        return await step(service, call)

    async with k.running(store, tmp_path, frames=1) as kernel:
        kernel.server.hold()
        await kernel.spawn("s", k.spec(k.script("done")))
        await kernel.send("s")
        await asyncio.to_thread(kernel.server.wait, lambda stats: stats.in_flight == 1)
        [worker] = kernel.workers.values()
        with patch.object(NodeService, "step", twice):
            kernel.gateway.kill()
            kernel.kill_node()
            kernel.kill(worker)
            await repeated.wait()
            await asyncio.wait(first)
            kernel.server.release()
            assert (await kernel.end("s"))["text"] == "done"
        assert first[0].cancelled()
        assert (await kernel.types("s")).count("model_call_reissued") == 1


async def test_a_takeover_that_fails_does_not_count(store: str, tmp_path: Path) -> None:
    """Given the store goes away in the middle of a takeover, then the service acts for nobody, so it is asked again."""
    async with replaced(store, tmp_path) as found:
        kernel = found.kernel
        away = patch.object(kernel.service.reading, "active", AsyncMock(side_effect=StoreUnreachable("away")))
        with away, pytest.raises(StoreUnreachable):
            await kernel.take_over(kernel.generation, kernel.nodes)
        assert kernel.service.generation == 0
        await kernel.take_over(kernel.generation, kernel.nodes)
        found.tool_may_end.set()


async def test_a_session_that_can_not_be_swept(
    store: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    """Given a session at which the sweep fails, then that is said, and the sweep goes on with what comes behind it."""
    async with k.running(store, tmp_path, frames=2) as kernel:
        sweep, seen = kernel.service.sweep, []

        async def fails(row: Any, *_arguments: Any) -> None:
            seen.append(row.session_id)
            raise ZeroDivisionError

        rows = [ActiveSession("a"), ActiveSession("b")]
        with (
            patch.object(sweep, "_sweep", fails),
            patch.object(kernel.service.reading, "active", AsyncMock(return_value=rows)),
            patch("understudy.node.sweep.cancelled", lambda _rows: {}),
        ):
            await sweep.run(0)
        assert seen == ["a", "b"]
        assert "session a can't be swept" in caplog.text


async def test_nothing_is_swept_before_it_is_known_which_frames_live(store: str, tmp_path: Path) -> None:
    """Given a takeover under way, when the sweep looks, then it leaves alone what no frame has called in for."""
    async with replaced(store, tmp_path) as found:
        kernel = found.kernel
        kernel.service.journal.generation, kernel.service.homes.nodes = kernel.generation, kernel.nodes
        kernel.add_frame()
        await kernel.service.sweep.run(0)
        assert not kernel.service.frames.paging.ready
        assert kernel.service.sweep.swept == 0
        await kernel.take_over(kernel.generation, kernel.nodes)
        found.tool_may_end.set()
        await found.run
        assert "tool_in_doubt" not in await kernel.types("s")


async def test_what_was_read_before_an_answer_is_no_lost_call(store: str, tmp_path: Path) -> None:
    """Given a session that waits for a model in no frame, when the sweep reads that, and it is answered, ends and
    leaves its frame before the sweep looks at it, then it is not taken for one whose call is lost."""
    with OfflineServer() as server:
        async with k.running(store, tmp_path, frames=1, server=server) as kernel:
            server.hold()
            for name in ("s", "other"):
                await kernel.spawn(name, k.spec(k.script("done")))
                await kernel.send(name)
            await asyncio.to_thread(server.wait, lambda stats: stats.in_flight == 2)
            reading, sweep = kernel.service.reading, kernel.service.sweep
            active = reading.active

            async def slow(*arguments: Any, **more: Any) -> Any:
                rows = await active(*arguments, **more)
                server.release()
                for name in ("s", "other"):
                    assert (await kernel.end(name))["status"] == "completed"
                await kernel.run("third", k.spec(k.script("done")))
                return rows

            with patch.object(reading, "active", slow):
                await sweep.run(0)
            assert sweep.swept == 0


async def test_a_frame_dies_during_the_takeover_that_names_it(store: str, tmp_path: Path) -> None:
    """Given a session that was given to a frame by a node service that died before it could say so, when the frame,
    which called in at the next service as one without a session, dies while that takes over, then the session goes on
    in another frame."""
    async with k.running(store, tmp_path, frames=1) as kernel:
        [worker] = kernel.workers.values()
        await kernel.spawn("s", k.spec(k.script("done")))

        def die(_number: int, label: str, _worker: k.Worker | None) -> None:
            if label == "after the commit":
                kernel.on_point = None
                kernel.kill_node()

        kernel.on_point = die
        active, reported = Reading.active, asyncio.Event()

        async def meanwhile(reading: Reading, nodes: list[str] | None, **wanted: bool) -> list[ActiveSession]:
            rows = await active(reading, nodes, **wanted)
            if nodes is not None and not reported.is_set():  # the takeover's
                assert [(row.session_id, row.frame_id) for row in rows] == [("s", worker.frame_id)]
                assert kernel.service.frames.paging.slots[worker.frame_id].session_id is None
                kernel.kill(worker)
                while worker.frame_id in kernel.service.frames.paging.slots:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                reported.set()
            return rows

        with patch.object(Reading, "active", meanwhile):
            await kernel.send("s")
            assert (await kernel.end("s"))["status"] == "completed"
        assert reported.is_set()
        assert kernel.service.sweep.swept == 0


async def test_an_input_is_repeated_during_a_takeover(store: str, tmp_path: Path) -> None:
    """Given a session that nobody holds any more, when its input is sent once more while a service takes over, then
    the takeover has it go on all the same."""
    async with replaced(store, tmp_path) as found:
        kernel, active = found.kernel, found.kernel.service.reading.active
        found.kill_worker()
        kernel.add_frame()
        taken_over, sent = asyncio.Event(), list[asyncio.Task[object]]()
        point = kernel.point

        async def held(label: str, who: k.Worker | None) -> None:
            if asyncio.current_task() in sent:  # the client's call, before its commit
                await taken_over.wait()
            await point(label, who)

        async def meanwhile(nodes: list[str] | None, **wanted: Any) -> list[ActiveSession]:
            rows = await active(nodes, **wanted)
            while nodes is not None and not kernel.service.frames.paging.slots:  # noqa: ASYNC110
                await asyncio.sleep(0)
            if sent or nodes is None:
                return rows
            requests = Requests(kernel.service)
            await kernel.service.specifications.placement("s")  # so that the next turn of the loop is its commit's
            sent.append(asyncio.create_task(requests.send("s", {"run_id": "r", "content": "go"}, "first")))
            await asyncio.sleep(0)
            return rows

        kernel.point = held  # type: ignore[method-assign]
        with patch.object(kernel.service.reading, "active", meanwhile):
            await kernel.take_over(kernel.generation, kernel.nodes)
        taken_over.set()
        await found.run
        assert kernel.service.sweep.swept == 0


async def test_a_call_that_arrives_after_its_frames_death(store: str, tmp_path: Path) -> None:
    """Given a frame whose death was reported, when a call that it had sent arrives, then it is given no session."""
    async with k.running(store, tmp_path, frames=1) as kernel:
        [worker] = kernel.workers.values()
        kernel.kill(worker, replace=False)
        await kernel.quiet()
        assert await kernel.service.step(StepCall(worker.frame.identity, 1)) == Exit()
        kernel.add_frame()
        assert (await kernel.run("s", k.spec(k.script("done"))))["status"] == "completed"


@pytest.mark.thorough
@pytest.mark.parametrize("commit", range(4))
async def test_a_service_dies_during_a_takeover(store: str, tmp_path: Path, commit: int) -> None:
    """Given a service that dies before or after a commit of its takeover, then the next one takes over the rest."""
    async with replaced(store, tmp_path) as found:
        kernel = found.kernel
        found.kill_worker()
        kernel.add_frame()
        commits = itertools.count()

        def die(_number: int, label: str, _worker: k.Worker | None) -> None:
            if label.endswith("the commit") and next(commits) == commit:
                kernel.kill_node()

        kernel.on_point = die
        await kernel.take_over(kernel.generation, kernel.nodes)
        await kernel.quiet()
        assert next(commits) > commit
        found.tool_may_end.set()


async def test_what_was_read_before_a_session_was_given_away_gives_it_to_nobody(store: str, tmp_path: Path) -> None:
    """Given a frame that died while its session waited for a model, when what was read of that is heard late, after the
    answer has come and another frame is at work, then the session stays there."""
    notes, read, heard = tmp_path / "notes", asyncio.Event(), asyncio.Event()
    async with k.running(store, tmp_path, frames=1) as kernel:
        active = Reading.active
        begun, may_end = k.held_at_effect(kernel)

        async def late(reading: Reading, nodes: list[str] | None, **only: Any) -> list[ActiveSession]:
            rows = await active(reading, nodes, **only)
            if only.get("session_ids") == ["s"] and not read.is_set():
                assert [row.frame_id for row in rows] == [None]
                read.set()
                await heard.wait()
            return rows

        kernel.server.hold()
        await kernel.spawn("s", k.spec(k.script([("note", {"path": str(notes), "text": "x"})], "done"), [k.note]))
        await kernel.send("s")
        await asyncio.to_thread(kernel.server.wait, lambda stats: stats.in_flight == 1)
        [worker] = kernel.workers.values()
        with patch.object(Reading, "active", late):
            kernel.kill(worker, replace=False)
            await asyncio.wait_for(read.wait(), 10.0)
            kernel.server.release()
            kernel.add_frame()
            await asyncio.wait_for(begun.wait(), 10.0)
            heard.set()
            await kernel.quiet()
            assert not kernel.service.frames.paging.ready
            may_end.set()
            assert (await kernel.end("s"))["status"] == "completed"
        assert "tool_in_doubt" not in await kernel.types("s")
        assert len(k.notes(notes)) == 1


async def test_a_session_that_was_activated_since_it_was_found_ready_is_looked_at(store: str, tmp_path: Path) -> None:
    """Given a session that is queued, when its epoch rises before a frame gets it, then no frame gets it for what was
    found then, and it is looked at again at once."""
    async with k.running(store, tmp_path, frames=1) as kernel:
        [worker] = kernel.workers.values()
        kernel.kill(worker, replace=False)
        await kernel.quiet()
        await kernel.spawn("s", k.spec(k.script("done")))
        await kernel.send("s")
        [ready] = kernel.service.frames.paging.ready.values()

        def fence(tx: Transaction) -> None:  # as `activation.crash` does where a process may live
            row = tx.session("s")
            tx.changed(row)
            row.epoch += 1

        await kernel.service.journal.submit(fence, "s")
        kernel.service.frames.paging.remove("s")
        kernel.service.frames.paging.add(replace(ready, epoch=1))
        row = await kernel.info("s")
        assert row["epoch"] != 0
        kernel.add_frame()
        assert (await asyncio.wait_for(kernel.end("s"), 10.0))["status"] == "completed"
        assert kernel.service.sweep.swept == 0


async def test_homes_are_given_under_the_generation_that_knew_the_nodes(store: str, tmp_path: Path) -> None:
    """Given a service that looks for sessions of nodes that are gone, when the next generation begins before that is
    committed, then it adopts none: a node may have joined since."""
    async with k.running(store, tmp_path, frames=0) as kernel:
        journal, submit = kernel.service.journal, kernel.service.journal.submit
        generation = await kernel.ask("acquire", "tests", k.LEASE, "tests")

        async def late(*arguments: Any) -> Any:
            journal.generation = generation
            return await submit(*arguments)

        with patch.object(journal, "submit", late), pytest.raises(StaleGeneration):
            await kernel.service.takeover.adopt("node1", ["node1"])


@pytest.mark.parametrize("long_ago", [False, True])
async def test_an_idle_session_whose_frame_died_with_its_service_is_woken(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long_ago: bool
) -> None:
    """Given an idle session in a frame that died together with its node service, just now or so long ago that this was
    forgotten, when it gets an input, then a frame activates it at once, and no death of it is noted."""
    async with k.running(store, tmp_path, frames=1) as kernel:
        [worker] = kernel.workers.values()
        await kernel.run("s", k.spec(k.script("one", "two")))
        kernel.kill_node()
        kernel.kill(worker)
        await kernel.quiet()
        if long_ago:
            monkeypatch.setattr("understudy.node.known_frames.BURIED_SECONDS", 0.0)
            kernel.kill(kernel.add_frame(), replace=False)
            await kernel.quiet()
            assert worker.frame_id not in kernel.service.frames.known.buried
        await kernel.send("s", "more", "r2")
        assert (await kernel.end("s", "r2"))["status"] == "completed"
        assert kernel.service.sweep.swept == 0
        assert "session_crashed" not in await kernel.types("s")


@pytest.mark.parametrize("refused", [False, True])
async def test_who_makes_room_for_nobody_has_left_its_frame(store: str, tmp_path: Path, refused: bool) -> None:
    """Given an idle session whose frame is reserved for another one that then needs none, be it that a pause comes
    first or that it was cancelled, then the store says that the idle one is in no frame."""
    async with k.running(store, tmp_path, frames=1) as kernel:
        await kernel.run("idle", k.spec(k.script("one", "two")))
        frames, deaths = kernel.service.frames, kernel.service.deaths
        await kernel.spawn("s", k.spec(k.script("done")))
        if refused:
            frames.paging.add(Ready("s", "", "s"))
            frames.dispatch()
        else:
            incarnation = await kernel.service.journal.submit(lambda tx: tx.session("s").incarnation)
            lost = ActivationId("s", incarnation, 7)
            await deaths.crashed(Slot("gone", 1, "node1", ""), lost, "process_died", now())
        async with asyncio.timeout(k.STUCK_SECONDS):
            while (await kernel.info("idle"))["frame_id"] is not None:  # noqa: ASYNC110 - no event says that it left
                await asyncio.sleep(0.01)
        await kernel.send("idle", "more", "r2")
        assert (await kernel.end("idle", "r2"))["status"] == "completed"


async def test_a_session_that_waits_for_a_person_is_given_to_no_frame(store: str, tmp_path: Path) -> None:
    """Given a row that was read while the session was at work, when it waits for a person by the time that is acted
    upon, then no frame gets it."""
    async with k.running(store, tmp_path, frames=2) as kernel:
        ask = [("request_user_input", {"prompt": "Go on?"})]
        await kernel.spawn("s", k.spec(k.script(ask, "done"), ["request_user_input"]))
        await kernel.send("s")
        [question] = await kernel.paused("s")
        epoch = (await kernel.info("s"))["epoch"]
        frames = kernel.service.frames
        frames.assignments.queue(Ready("s", "", "s", epoch=epoch))
        frames.dispatch()
        async with asyncio.timeout(k.STUCK_SECONDS):
            slots = frames.paging.slots.values()
            while frames.assignments.chosen or frames.assignments.under_way or not all(slot.resting for slot in slots):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (await kernel.info("s"))["epoch"] == epoch
        await kernel.ask("answer", "s", question["call_id"], "ok", "yes", question["asked"])
        assert (await kernel.end("s"))["status"] == "completed"


async def test_a_cancel_beside_a_call_that_is_made_again_aborts_it(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a session whose model call was lost with its service, when it is cancelled in the moment in which the call
    is made again, then that call is aborted at once."""
    attach = Rounds._attach
    async with k.running(store, tmp_path, frames=1) as kernel:
        kernel.server.hold()
        await kernel.spawn("s", k.spec(k.script("never"), shutdown=None))
        await kernel.send("s")
        await asyncio.to_thread(kernel.server.wait, lambda stats: stats.in_flight == 1)
        cancelled = asyncio.Event()

        async def beside(rounds: Rounds, slot: Slot, request: Any) -> dict[str, Any]:
            submit = kernel.service.journal.submit

            async def first(operation: Any, *touches: str, **options: Any) -> Any:
                issued = await submit(operation, *touches, **options)
                if not cancelled.is_set():
                    cancelled.set()
                    await kernel.ask("cancel", "s", "r", "enough")
                return issued

            with patch.object(kernel.service.journal, "submit", first):
                return await attach(rounds, slot, request)

        monkeypatch.setattr(Rounds, "_attach", beside)
        [worker] = kernel.workers.values()
        kernel.kill_node()
        kernel.kill(worker)
        await cancelled.wait()
        assert (await kernel.end("s"))["status"] == "cancelled"
        assert kernel.service.sweep.swept == 0
        await asyncio.to_thread(kernel.server.wait, lambda stats: stats.in_flight == 0)
        kernel.server.release()


async def test_a_repeated_step_gets_its_call_made_again_before_its_frame_turns_to_others(
    store: str, tmp_path: Path
) -> None:
    """Given two sessions that wait for a model, one of them in the only frame, when service and gateway die and the
    frame's step is repeated only after the takeover has queued the other, then both calls are made again at once, and
    the frame has one of the sessions."""
    queued, step = asyncio.Event(), NodeService.step

    async def late(service: NodeService, call: StepCall) -> Work | Exit:
        await queued.wait()
        return await step(service, call)

    with OfflineServer() as server:
        async with k.running(store, tmp_path, frames=1, server=server) as kernel:
            server.hold()
            for name in ("first", "second"):
                await kernel.spawn(name, k.spec())
                await kernel.send(name)
            await asyncio.to_thread(server.wait, lambda stats: stats.in_flight == 2)
            with patch.object(NodeService, "step", late):
                kernel.gateway.kill()
                kernel.kill_node()
                await kernel.quiet()
                assert len(kernel.service.frames.paging.ready) == 1
                queued.set()
                await asyncio.to_thread(server.wait, lambda stats: stats.requests == 4)
            server.release()
            for name in ("first", "second"):
                assert (await kernel.end(name))["status"] == "completed"
                assert (await kernel.types(name)).count("model_call_reissued") == 1
            assert kernel.service.sweep.swept == 0


async def test_a_session_found_ready_while_it_is_being_placed(tmp_path: Path) -> None:
    """Given a session for which a frame is reserved, when it is found ready, then it queues if no frame gets it, and
    not before."""
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, frames=0) as kernel:
        frames = kernel.service.frames
        await kernel.spawn("s", k.spec(k.script("done")))
        await kernel.send("s")
        assert frames.paging.remove("s") is not None
        with frames.assignments.being_placed("s", Slot("f", 1, "node1", "")):
            await kernel.service.notices.notice(News(["s"]))
            await kernel.service.deaths.look("s")
            assert "s" not in frames.paging.ready
        assert "s" in frames.paging.ready
        kernel.add_frame()
        assert (await kernel.end("s"))["status"] == "completed"


async def test_a_death_that_two_report_takes_one_frame(store: str, tmp_path: Path) -> None:
    """Given a session whose frame died, and two frames whose sessions wait for a model, when two report the death at
    once, as the node's socket and the supervisor do, then one of these frames is taken for it, and not both."""
    async with k.running(store, tmp_path, frames=0) as kernel, asyncio.timeout(60):
        service = kernel.service
        identity = FrameIdentity("f", 1, service.config.node_id, "")
        await kernel.spawn("s", k.spec(k.script("done")))
        await kernel.send("s")
        work = await service.step(StepCall(identity, 1))
        assert isinstance(work, Work)
        assert work.session_id == "s"
        kernel.server.hold()
        for name in ("a", "b"):
            kernel.add_frame()
            await kernel.spawn(name, k.spec(k.script("done")))
            await kernel.send(name)
        await asyncio.to_thread(kernel.server.wait, lambda stats: stats.in_flight == 2)
        await asyncio.gather(*(service.deaths.frame_died("f", "process_died") for _ in range(2)))
        held = {slot.session_id for slot in service.frames.paging.slots.values()}
        assert len(held & {"a", "b"}) == 1
        kernel.server.release()
        for name in ("a", "b", "s"):
            assert (await kernel.end(name))["status"] == "completed"
        assert (await kernel.types("s")).count("session_crashed") == 1
