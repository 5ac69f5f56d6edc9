"""What tools report while they run: progress and events of their own are in the log, between a call's start and its
result, at once, in order, and as often as the tool said so."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from understudy.actors import reports
from understudy.actors.tools import ToolContext, tool
from understudy.errors import ToolError

from .. import tiers
from . import kernel as k
from .deaths import Deaths

REPORTED = ("tool_progress", "custom")


@pytest.fixture
async def kernel(store: str, tmp_path: Path) -> AsyncIterator[k.Kernel]:
    async with k.running(store, tmp_path) as made:
        yield made


def here() -> k.Kernel:
    """The kernel of the process that runs a tool."""
    worker = k.WORKER.get()
    assert worker is not None
    return worker.kernel


async def reported(kernel: k.Kernel, session_id: str = "s") -> list[Any]:
    """What the log has of calls: `started`, the outcome, a fraction with its text, or a name with data."""
    found: list[Any] = []
    for event in await kernel.events(session_id):
        data = event["data"]
        if event["type"] == "tool_progress":
            found.append((data["fraction"], data["text"]))
        elif event["type"] == "custom":
            found.append((data["name"], data["data"]))
        elif event["type"] in ("tool_started", "tool_finished"):
            found.append(data.get("outcome", "started"))
    return found


async def outcome(kernel: k.Kernel, called: Any, session_id: str = "s") -> str:
    """What the model is shown of the one call of a run."""
    name = called.__understudy_tool__.name
    await kernel.run(session_id, k.spec(k.script([(name, {})], "done"), [called], tool_timeout=5.0))
    [result] = [m["content"] for m in await kernel.messages(session_id) if m["role"] == "tool"]
    return str(result)


@tool
async def waits_until_seen(context: ToolContext) -> str:
    """End when others have seen what it reported."""
    context.emit("begun", {"with": ["a", 1, None]})
    await here().until("s", "custom")
    context.progress(0.5, "half way")
    await here().until("s", "tool_progress")
    context.emit("last")
    context.progress(1)
    return "done"


async def test_reports_are_committed_while_the_tool_runs(kernel: k.Kernel) -> None:
    """Given a tool that reports, then whoever follows the session sees it before the tool ends; what it said last is in
    the log before its result."""
    assert await outcome(kernel, waits_until_seen) == "done"
    assert await reported(kernel) == [
        "started", ("begun", {"with": ["a", 1, None]}), (0.5, "half way"), ("last", None), (1.0, ""), "ok",
    ]  # fmt: skip
    kernel.check("s")


@tool(on_crash="rerun")
def from_a_thread(context: ToolContext) -> str:
    """Report from the threads of a tool without await."""
    said = threading.Thread(target=lambda: context.emit("other thread"))
    said.start()
    said.join()
    for number in range(1_000):
        context.progress(number / 999, f"{number} \x00 done")
    context.emit("own thread", "x\ud800")
    return "done"


async def test_the_latest_progress_of_a_moment_is_kept(kernel: k.Kernel) -> None:
    """Given a tool in a thread that says its progress a thousand times at once, and has threads of its own, then little
    of that is in the log, its last word is, and every event of its own, in order."""
    assert await outcome(kernel, from_a_thread) == "done"
    found = await reported(kernel)
    progress = [item for item in found if isinstance(item[0], float)]
    assert len(progress) <= 3
    assert progress[-1] == (1.0, "999 � done")
    assert [item for item in found if item not in progress] == [("other thread", None), ("own thread", "x?"), "ok"]


@tool(on_crash="rerun")
async def too_much(context: ToolContext) -> str:
    """Emit without end."""
    while True:
        context.emit("one more", "x" * 100)


async def test_events_of_a_call_are_bounded(kernel: k.Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a tool that emits without end, then it gets an error that says what to do; what it had emitted is kept."""
    monkeypatch.setattr(reports, "MOST_EVENTS", 20)
    assert "Emit fewer" in await outcome(kernel, too_much)
    assert await reported(kernel) == [*[("one more", "x" * 100)] * 20, "error"]
    monkeypatch.setattr(reports, "MOST_BYTES", 1_000)
    assert "Emit fewer" in await outcome(kernel, too_much, "t")
    assert await reported(kernel, "t") == [*[("one more", "x" * 100)] * 9, "error"]


@tool(on_crash="rerun")
async def odd(context: ToolContext) -> str:
    """Report what is none."""
    anything: Any = context
    wrong = (
        lambda: anything.emit("e", object()),
        lambda: anything.emit("", 1),
        lambda: anything.progress(float("nan")),
        lambda: anything.progress("half"),
    )
    said = []
    for report in wrong:
        with pytest.raises(ToolError) as error:
            report()
        said.append(error.value.message)
    return " | ".join(said)


async def test_what_is_no_report_is_an_error_in_the_tool(kernel: k.Kernel) -> None:
    """Given a tool that reports what can't be stored, then it gets an error that says why, and nothing is."""
    said = (await outcome(kernel, odd)).split(" | ")
    wanted = ("is not JSON", "1 to 100 characters", "from 0 to 1", "from 0 to 1")
    assert len(said) == len(wanted)
    assert all(text in error for text, error in zip(wanted, said, strict=True))
    assert await reported(kernel) == ["ok"]


GIVEN_UP, OVER = threading.Event(), threading.Event()
LATE: list[str] = []


@tool(on_crash="rerun", timeout=0.05)
def goes_on(context: ToolContext) -> None:
    """Report before and after the timeout."""
    context.emit("in time")
    GIVEN_UP.wait()
    context.progress(1.0)
    try:
        context.emit("late")
    except ToolError as error:
        LATE.append(error.message)
    OVER.set()


async def test_nothing_is_reported_after_the_result(kernel: k.Kernel) -> None:
    """Given a tool in a thread that goes on after its timeout, when it reports then, then its progress is ignored, an
    event of its own is an error there, and the log ends with the result."""
    for each in (GIVEN_UP, OVER, LATE):
        each.clear()
    assert "given up" in await outcome(kernel, goes_on)
    GIVEN_UP.set()
    assert OVER.wait(10)
    assert "comes too late" in LATE[0]
    assert await reported(kernel) == [("in time", None), "timeout"]


@tool(on_crash="rerun")
async def tells(context: ToolContext) -> None:
    """Say what it must not."""
    context.emit("swordfish-12", {"swordfish-12": ["is swordfish-12"]})
    context.progress(text="x" * 495 + "swordfish-12")


async def test_secrets_are_taken_out_of_reports(kernel: k.Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a tool that reports the value of a secret variable, then it is not in the log, wherever it was."""
    monkeypatch.setenv("SERVICE_TOKEN", "swordfish-12")
    await outcome(kernel, tells)
    assert await reported(kernel) == [("***", {"***": ["is ***"]}), (None, "x" * 495 + "***"), "ok"]


@tool
async def act_and_tell(context: ToolContext) -> str:
    """Act once, and report before and after."""
    context.emit("before", context.epoch)
    context.progress(0.5)
    await here().until(context.session_id, "custom")
    context.emit("after", context.epoch)
    return "acted"


@tool(on_crash="rerun")
async def look_and_tell(context: ToolContext) -> str:
    """The same, and it may run again."""
    context.emit("before", context.epoch)
    context.progress(0.5)
    await here().until(context.session_id, "custom")
    context.emit("after", context.epoch)
    return "looked"


@pytest.mark.parametrize("called", [act_and_tell, look_and_tell], ids=["report", "rerun"])
@pytest.mark.parametrize("victim", ["frame", "node"])
async def test_a_death_anywhere_doubles_no_report(called: Any, victim: str, tmp_path: Path) -> None:
    """Frame or node service killed at each point: what one execution of a call reported is in the log once, in order,
    before the call's result; a call that ran again has reported again."""
    name = called.__understudy_tool__.name
    compiled = k.spec(k.script([(name, {})], "done"), [called])
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path) as kernel:
        await kernel.run("clean", compiled)
        points = len(kernel.points)
        for at in tiers.points(range(points)):
            session_id = f"s{at}"
            deaths = Deaths(kernel, session_id, at, victim)
            assert (await kernel.run(session_id, compiled))["status"] == "completed", deaths.label
            kernel.on_point = None
            await kernel.quiet()
            kernel.check(session_id)
            found = await reported(kernel, session_id)
            events = [item for item in found if item[0] in ("before", "after")]
            epochs = [epoch for event, epoch in events if event == "before"]
            assert epochs == sorted(set(epochs)), deaths.label
            whole = [(event, epoch) for epoch in epochs for event in ("before", "after")]
            assert [item for item in whole if item in events] == events, deaths.label
            assert found.count("ok") + found.count("interrupted") == 1
            assert found[-1] in ("ok", "interrupted"), deaths.label
            if victim == "node":
                assert events == whole, deaths.label
