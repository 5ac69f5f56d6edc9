"""A run is asked to end while a call of it is under way: nothing of that stays, neither for the next run nor at the
endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import patch

import pytest

from understudy import HookContext, hook
from understudy.actors.hooks import describe_hook
from understudy.actors.tools import ToolContext, tool
from understudy.errors import Fenced
from understudy.messages import Usage
from understudy.node.interrupts import Interrupts
from understudy.protocol import News
from understudy.records import INTERRUPTED_BY_STEER, ActivationId, Interrupted
from understudy.store.journal import Journal
from understudy.store.operations.beginnings import accept
from understudy.store.operations.endings import request_cancel

from . import kernel as k


@tool(on_crash="rerun")
async def watched() -> str:
    """Go on until the agent's frame has asked to be notified of a cancellation."""
    worker = k.WORKER.get()
    assert worker is not None
    while not worker.kernel.service.interrupts:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return "watched"


@tool(on_crash="rerun")
async def lasts() -> str:
    """Go on for ever."""
    await asyncio.Event().wait()
    return "never"


@pytest.fixture
async def kernel(store: str, tmp_path: Path) -> AsyncIterator[k.Kernel]:
    async with k.running(store, tmp_path) as made:
        yield made


def cancel(kernel: k.Kernel) -> asyncio.Task[list[bool]]:
    """Submit a cancel at once; it makes no points."""
    journal = kernel.service.journal
    submission = Journal.submit_all(journal, [lambda tx: request_cancel(tx, tx.session("s"), "enough")], "s")
    return asyncio.get_running_loop().create_task(submission)


async def test_a_watch_ends_with_its_tool(kernel: k.Kernel) -> None:
    """Given tools that took so long that their frame asked to be notified of a cancellation, when they have ended,
    then that call has, too: a service can have only so many."""
    run = await kernel.run("s", k.spec(k.script([("watched", {})], [("watched", {})], "done"), [watched]))
    assert run["status"] == "completed"
    assert not kernel.service.interrupts
    pending = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]  # type: ignore[union-attr]
    assert [name for name in pending if "interrupted" in name] == []


async def test_a_tool_that_has_long_been_at_work_hears_of_a_cancel(kernel: k.Kernel) -> None:
    """Given a tool for which its frame waits to be notified of a cancellation, when its run is cancelled, then it is
    interrupted: the run need not be ended by force."""
    await kernel.spawn("s", k.spec(k.script([("lasts", {})], "done"), [lasts]))
    await kernel.send("s")
    await kernel.until_watched()
    await kernel.ask("cancel", "s", "r", "enough")
    assert (await kernel.end("s"))["status"] == "cancelled"
    assert "shutdown_forced" not in {event["type"] for event in await kernel.events("s")}


async def test_a_cancelled_call_of_a_session_without_a_frame_needs_none(
    store: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Given a session that left its frame to another one during its model call, when its run is cancelled, then the run
    ends with that call, and the frame that is free is not offered to it."""
    caplog.set_level(logging.INFO)
    async with k.running(store, tmp_path, frames=1) as kernel:
        await kernel.spawn("s", k.spec(k.script({"text": "late", "delay": 60})))
        await kernel.send("s")
        await kernel.until("s", "model_call_started")
        assert (await kernel.run("t", k.spec(k.script("done"))))["status"] == "completed"
        assert (await kernel.info("s"))["frame_id"] is None
        kernel.add_frame()
        async with asyncio.timeout(k.STUCK_SECONDS):
            while not any(
                slot.resting and slot.session_id is None for slot in kernel.service.frames.paging.slots.values()
            ):
                await kernel.service.frames.supply.demand(0.1)
        await kernel.ask("cancel", "s", "r", "enough")
        assert (await kernel.end("s"))["status"] == "cancelled"
        assert not kernel.service.frames.paging.ready
        assert (await kernel.types("s")).count("session_activated") == 1
    assert "needs no frame" not in caplog.text


async def test_a_cancel_that_meets_the_answer_leaves_the_next_run_alone(kernel: k.Kernel) -> None:
    """Given a run that is cancelled while its answer is being committed, then the next run's model call is made."""
    kernel.server.hold()
    await kernel.spawn("s", k.spec())
    await kernel.send("s")
    await kernel.until("s", "model_call_started")
    await asyncio.to_thread(kernel.server.wait, lambda stats: stats.in_flight == 1)
    cancelled, point = asyncio.Event(), kernel.point

    async def held(label: str, worker: k.Worker | None) -> None:
        if label == "before the commit" and "s" in kernel.service.claims and not cancelled.is_set():  # the answer's
            await cancel(kernel)
            cancelled.set()
        await point(label, worker)

    kernel.point = held  # type: ignore[method-assign]
    kernel.server.release()
    assert (await kernel.end("s"))["status"] == "cancelled"
    assert cancelled.is_set()
    await kernel.send("s", "again", "r2")
    assert (await kernel.end("s", "r2"))["status"] == "completed"


async def test_a_call_of_a_run_that_is_ended_by_force_is_aborted(kernel: k.Kernel) -> None:
    """Given `shutdown=0`, when the run is cancelled during its model call, then the connection is closed."""
    kernel.server.hold()
    await kernel.spawn("s", k.spec(shutdown=0, deadline=300.0))
    await kernel.send("s")
    await asyncio.to_thread(kernel.server.wait, lambda stats: stats.in_flight == 1)
    await kernel.ask("cancel", "s", None, "enough")
    await asyncio.to_thread(kernel.server.wait, lambda stats: stats.in_flight == 0)
    assert (await kernel.end("s"))["status"] == "cancelled"
    kernel.server.release()


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)  # PostgreSQL's thread may take the commits one by one
async def test_no_call_is_made_for_a_run_that_was_ended_by_force(kernel: k.Kernel) -> None:
    """Given `shutdown=0`, when the run is cancelled in the transaction that lets it wait for a model, then the model is
    not called."""
    await kernel.spawn("s", k.spec(shutdown=0))
    submitted = list[asyncio.Task[list[bool]]]()
    point = kernel.point

    async def behind(label: str, worker: k.Worker | None) -> None:
        if label == "before the commit" and "s" in kernel.service.claims and not submitted:  # the first step's
            submitted.append(cancel(kernel))
        await point(label, worker)

    kernel.point = behind  # type: ignore[method-assign]
    await kernel.send("s")
    assert (await kernel.end("s"))["status"] == "cancelled"
    assert await submitted[0] == [True]
    await kernel.send("s", "again", "r2")
    assert (await kernel.end("s", "r2"))["status"] == "completed"
    assert kernel.server.count == 1


async def test_an_input_behind_a_run_that_was_ended_by_force(kernel: k.Kernel) -> None:
    """Given `shutdown=0` and a queued input, when the run is cancelled in the transaction that its frame commits in,
    then the next one begins at once, though that frame is fenced."""
    await kernel.spawn("s", k.spec(shutdown=0))
    submitted = list[asyncio.Task[list[bool]]]()
    point = kernel.point

    async def behind(label: str, worker: k.Worker | None) -> None:
        if label == "before the commit" and "s" in kernel.service.claims and not submitted:
            accepted = Journal.submit_all(kernel.service.journal, [lambda tx: accept(tx, "s", "r2", "again")], "s")
            submitted.append(asyncio.get_running_loop().create_task(accepted))
            submitted.append(cancel(kernel))
        await point(label, worker)

    kernel.point = behind  # type: ignore[method-assign]
    await kernel.send("s")
    assert (await kernel.end("s"))["status"] == "cancelled"
    assert (await kernel.end("s", "r2"))["status"] == "completed"
    assert kernel.service.sweep.swept == 0


@pytest.mark.parametrize("late", [("r", 0), ("before", 7)], ids=["round", "run"])
async def test_a_late_notice_takes_the_place_of_no_newer_one(kernel: k.Kernel, late: tuple[str, int]) -> None:
    """Given a round that is interrupted while the commit is under way that lets it wait for its model, when a notice
    of an earlier round or run arrives behind that, then the round's call is aborted all the same."""
    await kernel.spawn("s", k.spec())
    notified = list[str]()
    point = kernel.point

    async def behind(label: str, worker: k.Worker | None) -> None:
        if label == "before the commit" and "s" in kernel.service.claims and not notified:  # the first step's
            for run_id, round_number in (("r", 1), late):
                notified.append(run_id)
                interrupted = Interrupted(run_id, 0, 1, round_number)
                await kernel.service.notices.notice(News([], interrupted={"s": interrupted}))
        await point(label, worker)

    kernel.point = behind  # type: ignore[method-assign]
    await kernel.send("s")
    assert (await kernel.end("s"))["status"] == "completed"
    failed = [event for event in await kernel.events("s") if event["type"] == "model_call_failed"]
    assert [event["data"]["error_code"] for event in failed] == ["aborted"]


class Gate:
    """Where a tool that can't be interrupted is."""

    begun, opened = asyncio.Event(), asyncio.Event()


@tool(on_crash="rerun")
async def stubborn() -> str:
    """Go on until the gate is opened, cancelled or not."""
    Gate.begun.set()
    while not Gate.opened.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await Gate.opened.wait()
    return "at last"


@pytest.mark.parametrize("way", ["sweep", "notice"])
@pytest.mark.parametrize("at", ["call", "tool"])
async def test_the_next_run_is_not_ended_for_the_one_before(kernel: k.Kernel, at: str, way: str) -> None:
    """Given a row that says a run shall end, when it is acted upon after the next run of that activation has begun,
    then neither the next one's model call nor its tool is ended."""
    Gate.begun, Gate.opened = asyncio.Event(), asyncio.Event()
    await kernel.spawn("s", k.spec(k.script([("stubborn", {})], "done"), [stubborn]))
    await kernel.send("s")
    await asyncio.wait_for(Gate.begun.wait(), k.STUCK_SECONDS)
    await kernel.ask("cancel", "s", None, "enough")
    rows = await kernel.service.reading.active(None, session_ids=["s"])
    assert rows[0].cancel_reason == "enough"
    Gate.opened.set()
    assert (await kernel.end("s"))["status"] == "cancelled"
    Gate.begun, Gate.opened = asyncio.Event(), asyncio.Event()
    if at == "call":
        kernel.server.hold()
    await kernel.send("s", "again", "r2")
    if at == "call":
        await asyncio.to_thread(kernel.server.wait, lambda stats: stats.in_flight == 1)
    else:
        await asyncio.wait_for(Gate.begun.wait(), k.STUCK_SECONDS)
        while not kernel.service.interrupts:  # noqa: ASYNC110 - asked by a clock of the frame's
            await asyncio.sleep(0.01)

    async def read_before(*_nodes: object, **_only: object) -> list[dict[str, object]]:
        return rows

    with patch.object(kernel.service.reading, "active", read_before):
        if way == "sweep":
            await kernel.service.sweep.run(0)
        else:
            await kernel.service.notices.notice(News(["s"]))
    watched = len(kernel.service.interrupts)
    Gate.opened.set()  # before anything fails: nothing else ends the tool
    kernel.server.release()
    assert watched == (1 if at == "tool" else 0)
    assert (await kernel.end("s", "r2"))["status"] == "completed"


async def test_what_a_cancelled_answer_had_streamed_is_paid(store: str, tmp_path: Path) -> None:
    """Given an answer of which a tool call has come in part, and no text, when its run is cancelled, then the tokens of
    that part are estimated: in the event of the call, in the run, and in the session's sum; no call is made of it."""
    async with k.running(store, tmp_path, chunk_delay=0.1) as kernel:
        await kernel.spawn("s", k.spec(k.script([("lasts", {"x": "y" * 600})]), [lasts]))
        await kernel.send("s")
        await kernel.until("s", "model_call_started")
        async with asyncio.timeout(k.STUCK_SECONDS):
            while not any(sum(call.parts.lengths) for call in kernel.gateway.calls._calls.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await kernel.ask("cancel", "s", "r", "enough")
        assert (await kernel.end("s"))["status"] == "cancelled"
        [failed] = [event for event in await kernel.events("s") if event["type"] == "model_call_failed"]
        assert failed["data"]["error_code"] == "aborted"
        usage = Usage.from_wire(failed["data"]["usage"])
        assert usage.output_tokens >= 100
        assert usage.estimated
        assert (await kernel.end("s"))["usage"] == usage.to_wire()
        assert (await kernel.info("s"))["tokens_used"] == usage.total_tokens
        assert [message["role"] for message in await kernel.messages("s")] == ["user"]
        kernel.check("s")


@pytest.mark.parametrize("dies", [False, True], ids=["lives", "dies"])
async def test_a_sub_agents_result_from_before_a_cancel_is_its_calls(kernel: k.Kernel, dies: bool) -> None:
    """Given a tool at work beside a sub-agent that has ended since the process looked into its inbox, when the run is
    cancelled, then the sub-agent's answer is the result of its call: also where the process is not the one that had
    started the sub-agent."""
    child = k.spec(k.script([("request_user_input", {"prompt": "Which?"})], "dug"), ["request_user_input"], name="w")
    calls = [("spawn_agent", {"agent": "w", "task": "dig"}), ("lasts", {})]
    await kernel.spawn("s", k.spec(k.script(calls, "done"), ["spawn_agent", lasts], agents={"w": child}))
    await kernel.send("s")
    child_id = (await kernel.until("s", "child_spawned"))[-1]["data"]["child_id"]
    [question] = await kernel.paused(child_id)
    if dies:
        worker = kernel.holder("s")
        assert worker is not None
        kernel.kill(worker)
        await kernel.until("s", "session_activated", 2)
    await kernel.until_watched()
    await kernel.ask("answer", child_id, question["call_id"], "ok", "left", question["asked"])
    assert (await kernel.end(child_id, "task"))["status"] == "completed"
    await kernel.ask("cancel", "s", "r", "enough")
    assert (await kernel.end("s"))["status"] == "cancelled"
    results = [message["content"] for message in await kernel.messages("s") if message["role"] == "tool"]
    assert results == ["dug", "cancelled"]
    assert (await kernel.types("s")).count("child_finished") == 1


class Thread:
    """Where code in a thread is, which nothing can stop: it has begun, and may end."""

    begun, may_end = threading.Event(), threading.Event()

    @classmethod
    def go_on(cls) -> None:
        cls.begun.set()
        cls.may_end.wait(k.STUCK_SECONDS)


def finds_out(_context: ToolContext) -> str:
    """Take long to find out."""
    Thread.go_on()
    return "found out"


@tool(on_crash=finds_out)
async def in_doubt() -> str:
    """Go on until the process dies."""
    Gate.begun.set()
    await asyncio.Event().wait()
    return "never"


@hook("before_tool")
def ponders(_context: HookContext) -> None:
    """Take long to permit a call."""
    Thread.go_on()


@pytest.mark.parametrize("what", ["finder", "hook"])
async def test_an_interrupted_process_with_a_thread_that_goes_on_does_nothing_else(kernel: k.Kernel, what: str) -> None:
    """Given a function of the user's in a thread, that finds out about a call or permits one, when its run is
    interrupted, then the run goes on in another process: the thread can't be stopped, and its process ends."""
    Thread.begun, Thread.may_end, Gate.begun = threading.Event(), threading.Event(), asyncio.Event()
    hooks = [describe_hook(ponders, pickle=None)[0]] if what == "hook" else []
    await kernel.spawn("s", k.spec(tools=[in_doubt], hooks=hooks))
    await kernel.send("s", "call in_doubt {}")
    if what == "finder":
        await asyncio.wait_for(Gate.begun.wait(), k.STUCK_SECONDS)
        worker = kernel.holder("s")
        assert worker is not None
        kernel.kill(worker)
    assert await asyncio.to_thread(Thread.begun.wait, k.STUCK_SECONDS)
    busy = kernel.holder("s")
    assert busy is not None
    try:
        await kernel.until_watched()
        await kernel.ask("steer", "s", {"content": "left", "interrupt": True})
        assert (await kernel.end("s"))["status"] == "completed"
        async with asyncio.timeout(k.STUCK_SECONDS):
            await asyncio.wait([busy.task])
    finally:
        Thread.may_end.set()
    frames = [e["data"]["frame_id"] for e in await kernel.events("s") if e["type"] == "session_activated"]
    assert frames[-2] == busy.frame_id != frames[-1]


async def test_a_late_call_leaves_the_watch_of_a_later_round_alone() -> None:
    """Given a process that waits for an interruption of its present round, when its call for an earlier one arrives,
    then that is refused; and only what interrupts the present round is reported."""
    interrupts, held = Interrupts(), ActivationId("s", 1, 1)
    with interrupts.watching(held, "r", 2) as reason:
        with pytest.raises(Fenced, match="round 1"), interrupts.watching(held, "r", 1):
            pass
        interrupts.interrupt(held, "r", 1)
        assert not reason.done()
        interrupts.interrupt(held, "r", 2)
        assert reason.result() == INTERRUPTED_BY_STEER
