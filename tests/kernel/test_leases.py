"""Code of the user's begins only on the strength of a commit whose lease still runs, whatever delays it until then."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from understudy.actors import call_outcomes, execution
from understudy.actors.commits import Commits, Patience
from understudy.actors.frame import Frame
from understudy.actors.tools import ToolContext, tool
from understudy.actors.window import Window
from understudy.records import LEASE_SECONDS, Ack, Batch

from . import kernel as k


class Clock:
    """The monotonic clock as the session's code reads it: `jump` is what a process that stands still sees."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.ahead = 0.0
        seen = SimpleNamespace(
            monotonic=lambda: time.monotonic() + self.ahead, monotonic_ns=time.monotonic_ns, time_ns=time.time_ns
        )
        patch.setattr(call_outcomes, "time", seen)
        patch.setattr(execution, "time", seen)

    def jump(self) -> None:
        self.ahead += LEASE_SECONDS + 1


BEGAN: list[tuple[str, int]] = []
"""What was executed, with the epoch of the activation that did."""


async def find_out(context: ToolContext) -> str:
    """Find out what became of a call."""
    BEGAN.append(("found out", context.epoch))
    return "found"


@tool
async def act(context: ToolContext) -> str:
    """Have an effect."""
    BEGAN.append(("acted", context.epoch))
    return "acted"


@tool
def act_in_a_thread(context: ToolContext) -> str:
    """Have an effect, in a thread."""
    BEGAN.append(("acted", context.epoch))
    return "acted"


@tool(on_crash=find_out)
async def careful(context: ToolContext) -> str:
    """Die of the first execution."""
    worker = k.WORKER.get()
    assert worker is not None
    BEGAN.append(("acted", context.epoch))
    worker.kernel.kill(worker)
    return await k.never()


@tool
async def cancelled_and_gone() -> str:
    """Have the run cancelled, and die."""
    worker = k.WORKER.get()
    assert worker is not None
    await worker.kernel.ask("cancel", "s", None, "enough")
    worker.kernel.kill(worker)
    return await k.never()


@tool(on_crash="ask")
async def doubtful() -> str:
    """Die."""
    worker = k.WORKER.get()
    assert worker is not None
    worker.kernel.kill(worker)
    return await k.never()


@tool
async def explode() -> str:
    """Never loaded."""
    return "loaded"


@pytest.fixture
async def kernel(tmp_path: Path) -> AsyncIterator[k.Kernel]:
    BEGAN.clear()
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, frames=2) as made:
        yield made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class SlowLoading:
    """The code of a tool comes late, to one activation."""

    def __init__(self, patch: pytest.MonkeyPatch, epoch: int) -> None:
        self.asked, self.there = asyncio.Event(), asyncio.Event()
        load = Frame._load

        async def slow(frame: Frame, spec: dict[str, Any]) -> Any:
            assert frame.activation is not None
            if frame.activation.window.epoch == epoch:
                self.asked.set()
                await self.there.wait()
            return await load(frame, spec)

        patch.setattr(Frame, "_load", slow)


async def cut_off(kernel: k.Kernel, session_id: str) -> k.Worker:
    """Have the session's frame given up although its process goes on: another one takes over the session."""
    worker = kernel.holder(session_id)
    assert worker is not None
    await kernel.service.deaths.frame_died(worker.frame_id, "unresponsive")
    return worker


async def test_no_tool_of_an_activation_that_was_fenced_while_its_code_was_loaded(
    kernel: k.Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a frame that waits for a tool's code while another one takes over and executes the call, when the code
    comes, then the first one does not execute it."""
    loading = SlowLoading(monkeypatch, epoch=1)
    await kernel.spawn("s", k.spec(k.script([("act", {})], "done"), [act]))
    await kernel.send("s")
    await loading.asked.wait()
    worker = await cut_off(kernel, "s")
    assert (await kernel.end("s"))["status"] == "completed"
    loading.there.set()
    await asyncio.wait_for(worker.task, 10)  # it has to leave, after whatever it did
    assert BEGAN == [("acted", 2)]


async def test_nothing_is_found_out_by_an_activation_that_was_fenced_while_its_code_was_loaded(
    kernel: k.Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for the function that finds out what became of a call in doubt."""
    loading = SlowLoading(monkeypatch, epoch=2)
    await kernel.spawn("s", k.spec(k.script([("careful", {})], "done"), [careful]))
    await kernel.send("s")
    await loading.asked.wait()
    worker = await cut_off(kernel, "s")
    assert (await kernel.end("s"))["status"] == "completed"
    loading.there.set()
    await asyncio.wait_for(worker.task, 10)
    assert BEGAN == [("acted", 1), ("found out", 3)]


async def test_a_call_whose_code_can_not_be_loaded_never_starts(
    kernel: k.Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a result that says so, is never marked as started, and so is not in doubt if the process dies there."""

    async def broken(_frame: Frame, _spec: dict[str, Any]) -> Any:
        raise ImportError("no such module")

    monkeypatch.setattr(Frame, "_load", broken)
    assert (await kernel.run("s", k.spec(k.script([("explode", {})], "done"), [explode])))["status"] == "completed"
    events = {event["type"]: event["data"] for event in await kernel.events("s")}
    assert "tool_started" not in events
    assert (events["tool_finished"]["outcome"], events["tool_finished"]["executions"]) == ("error", 0)


async def test_a_lease_that_is_over_when_the_commit_is_acknowledged(kernel: k.Kernel, clock: Clock) -> None:
    """A process that was stopped from its commit on commits again before it starts the tool."""

    def stopped(_number: int, label: str, _worker: k.Worker | None) -> None:
        if label == "reply to commit" and kernel.points.count(label) == 1:
            clock.jump()

    kernel.on_point = stopped
    await kernel.run("s", k.spec(k.script([("act", {})], "done"), [act]))
    assert BEGAN == [("acted", 1)]
    assert (await kernel.types("s")).count("tool_started") == 2


async def test_no_tool_of_an_activation_that_was_fenced_after_its_commit(kernel: k.Kernel, clock: Clock) -> None:
    """Given a process that was stopped right after it committed the start of a tool, when it goes on after another one
    took over, then it does not start the tool, and the call is reported as in doubt once."""
    stopped, go_on = asyncio.Event(), asyncio.Event()
    committing = kernel.service.commit

    async def commit(frame_id: str, batch: Batch) -> Ack:
        ack = await committing(frame_id, batch)
        if not stopped.is_set():
            stopped.set()
            await go_on.wait()
        return ack

    kernel.service.commit = commit  # type: ignore[method-assign]
    await kernel.spawn("s", k.spec(k.script([("act", {})], "done"), [act]))
    await kernel.send("s")
    await stopped.wait()
    worker = await cut_off(kernel, "s")
    assert (await kernel.end("s"))["status"] == "completed"
    clock.jump()
    go_on.set()
    await asyncio.wait_for(worker.task, 10)
    assert BEGAN == []
    assert (await kernel.types("s")).count("tool_in_doubt") == 1


async def test_a_lease_that_is_over_when_the_thread_starts(
    kernel: k.Kernel, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that was started looks at the lease itself: where it is over the start is committed again."""

    class Late(Thread):
        def run(self) -> None:
            if clock.ahead == 0:
                clock.jump()
            super().run()

    monkeypatch.setattr(execution, "threading", SimpleNamespace(Thread=Late))
    await kernel.run("s", k.spec(k.script([("act_in_a_thread", {})], "done"), [act_in_a_thread]))
    assert BEGAN == [("acted", 1)]
    assert (await kernel.types("s")).count("tool_started") == 2


async def test_a_lease_that_is_over_when_a_task_begins(
    kernel: k.Kernel, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does the task of an async tool."""
    create = asyncio.create_task

    def late(coroutine: Any, **options: Any) -> Any:
        if coroutine.__name__ == "_run_async" and clock.ahead == 0:
            clock.jump()
        return create(coroutine, **options)

    monkeypatch.setattr(execution, "asyncio", _with(asyncio, create_task=late))
    await kernel.run("s", k.spec(k.script([("act", {})], "done"), [act]))
    assert BEGAN == [("acted", 1)]
    assert (await kernel.types("s")).count("tool_started") == 2


async def test_a_lease_that_is_over_when_a_function_is_to_find_out(kernel: k.Kernel, clock: Clock) -> None:
    """What finds out about a call in doubt begins on the strength of a commit as well; the doubt is reported once."""

    def stopped(_number: int, label: str, _worker: k.Worker | None) -> None:
        if label == "reply to commit" and kernel.points.count(label) == 2:
            clock.jump()

    kernel.on_point = stopped
    await kernel.run("s", k.spec(k.script([("careful", {})], "done"), [careful]))
    assert BEGAN == [("acted", 1), ("found out", 2)]
    assert (await kernel.types("s")).count("tool_in_doubt") == 1
    assert kernel.points.count("before commit") == 3


def _with(module: Any, **changed: Any) -> Any:
    return SimpleNamespace(**{**vars(module), **changed})


async def test_a_call_in_doubt_is_not_said_to_be_cancelled(kernel: k.Kernel) -> None:
    """Given a run that was cancelled, and whose process died in a tool before it heard of that, when another process
    ends the run, then the next one reads that nobody knows what became of the call."""
    await kernel.spawn("s", k.spec(k.script([("cancelled_and_gone", {})], "done"), [cancelled_and_gone]))
    await kernel.send("s")
    assert (await kernel.end("s"))["status"] == "cancelled"
    [result] = [m["content"] for m in await kernel.messages("s") if m["role"] == "tool"]
    assert result.startswith("interrupted")


async def test_a_call_that_a_person_is_asked_about_is_not_said_to_be_cancelled(kernel: k.Kernel) -> None:
    """The same where a person has been asked what became of the call, when the run is cancelled."""
    await kernel.spawn("s", k.spec(k.script([("doubtful", {})], "done"), [doubtful]))
    await kernel.send("s")
    await kernel.until("s", "input_requested")
    await kernel.ask("cancel", "s", None, "enough")
    assert (await kernel.end("s"))["status"] == "cancelled"
    [result] = [m["content"] for m in await kernel.messages("s") if m["role"] == "tool"]
    assert result.startswith("interrupted")


async def test_nothing_is_late_while_the_store_is_waited_for() -> None:
    """Given a call that waits for the commit of its start, however long the store is away, then its process is not
    past any deadline, though it is when the commit is acknowledged and code of the user's goes on running."""
    late: list[float] = []

    class Away:
        async def commit(self, _frame_id: str, _batch: Batch) -> Ack:
            late.append(patience.overdue(time.monotonic()))
            raise ConnectionError

    window = Window("s", {"instructions": ""})
    patience = Patience()
    commits = Commits(window, Away(), "f", patience)  # type: ignore[arg-type]
    patience.expect(time.monotonic() - 30.0)
    commits.draft.start_run = "r"
    with pytest.raises(ConnectionError):
        await commits.flush()
    assert late == [0.0]
    assert patience.overdue(time.monotonic()) >= 30.0
