"""Agents that wait and wake: the tools `wait` and `schedule_wakeup`, their timers, and what deaths make of them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.actors.tools import tool
from understudy.errors import InvalidInput, SessionClosed, UnknownSession
from understudy.store.operations import timers
from understudy.supervisor.pool import Demand
from understudy.testing.offline import OfflineServer
from understudy.wakeups import MOST_WAKEUPS, microseconds, next_due, spoken, wait_problem, wakeup_problem

from .. import tiers
from . import kernel as k
from .deaths import Deaths
from .test_notices import nodes

TOOLS = ["wait", "schedule_wakeup", "jobs"]
LONG = ("wait", {"seconds": 3600})
QUESTION = ("request_user_input", {"prompt": "Which colour?"})


@pytest.fixture
async def kernel(store: str, tmp_path: Path) -> AsyncIterator[k.Kernel]:
    async with k.running(store, tmp_path, frames=1) as made:
        yield made


async def begin(kernel: k.Kernel, *replies: Any, tools: Any = (), session_id: str = "s", **more: Any) -> None:
    """A session whose model gives these replies, at work on an input."""
    await kernel.spawn(session_id, k.spec(k.script(*replies), [*TOOLS, *tools], **more))
    await kernel.send(session_id)


async def waits(kernel: k.Kernel, session_id: str = "s", status: str = "waiting_for_timer") -> dict[str, Any]:
    """The session, once it waits so and no frame holds it; a free one may be kept while it waits for a child."""
    async with asyncio.timeout(k.STUCK_SECONDS):
        while True:  # no event says that it has left its frame
            info = await kernel.info(session_id)
            if info["status"] == status and (info["frame_id"] is None or status == "waiting_for_child"):
                return info
            await asyncio.sleep(0.005)


async def data(kernel: k.Kernel, event_type: str, session_id: str = "s") -> list[dict[str, Any]]:
    """What the session's events of a type say."""
    return [event["data"] for event in await kernel.events(session_id) if event["type"] == event_type]


async def due(kernel: k.Kernel) -> dict[tuple[str, str], int]:
    """When each timer of the node's sessions is due."""
    found = await kernel.service.reading.timers(kernel.node_id, 1 << 62)
    return {(timer.session_id, timer.name): timer.due_at for timer in found}


async def fire(kernel: k.Kernel, name: str, session_id: str = "s") -> None:
    """What happens when the timer's time has come."""
    due_at = (await due(kernel))[session_id, name]
    await kernel.service.journal.submit(lambda tx: timers.fire(tx, session_id, name, due_at))


async def schedule(kernel: k.Kernel, name: str = "w", session_id: str = "s", **fields: Any) -> dict[str, Any]:
    """What a client schedules."""
    wakeup = {"name": name, "prompt": "again", "seconds": 3600, "every": None, **fields}
    found: dict[str, Any] = await kernel.ask("schedule", session_id, wakeup)
    return found


async def woken(kernel: k.Kernel, due_at: int, name: str = "w", session_id: str = "s") -> dict[str, Any]:
    """The run that a wakeup began, once it has ended."""
    await kernel.until(session_id, "timer_fired")
    return await kernel.end(session_id, f"wakeup.{name}.{due_at}")


# Waits.


async def test_a_wait_holds_no_process(kernel: k.Kernel) -> None:
    """Given the only frame's session waits, then it has left the frame, another session works there, and the time lets
    it go on: the call's result says how long it was."""
    await begin(kernel, [LONG], "done")
    info = await waits(kernel)
    assert (info["wait"], info["restarts"]) == ("input", 0)
    assert (await kernel.ask("read", "run", ["s", "r"], {}))["status"] == "running"
    assert (await kernel.run("other", k.spec()))["status"] == "completed"
    assert kernel.service.frames.paging.demand()[""] == Demand(standby=1)
    kernel.check()
    [timer] = await data(kernel, "timer_set")
    asked_at = next(m["created_at"] for m in await kernel.messages("s") if m["role"] == "assistant")
    assert timer == {"kind": "wait", "name": "r/1/0", "due_at": asked_at + 3_600_000_000}
    await fire(kernel, "call:r/1/0")
    run = await kernel.end("s")
    assert (run["status"], await kernel.results()) == ("completed", ["waited 3600 seconds"])
    assert await due(kernel) == {}
    assert len(await data(kernel, "timer_fired")) == 1


async def test_time_passes_by_itself(kernel: k.Kernel) -> None:
    """A short wait ends when its time has come, and lasted as long."""
    await begin(kernel, [("wait", {"seconds": 0.05})], "done")
    assert (await kernel.end("s"))["status"] == "completed"
    [finished] = await data(kernel, "tool_finished")
    assert (finished["outcome"], finished["executions"]) == ("ok", 1)
    assert finished["duration"] >= 50_000
    assert await kernel.results() == ["waited 0.05 seconds"]


async def test_other_calls_of_the_round_go_on(kernel: k.Kernel, tmp_path: Path) -> None:
    """They have their results while it waits."""
    notes = tmp_path / "notes"
    looks = ("look", {"path": str(notes), "text": "x"})
    await begin(kernel, [LONG, looks], "done", tools=[k.look])
    await waits(kernel)
    assert [item["outcome"] for item in await data(kernel, "tool_finished")] == ["ok"]
    await fire(kernel, "call:r/1/0")
    await kernel.end("s")
    assert await kernel.results() == ["waited 3600 seconds", "noted x"]


@tool(on_crash="rerun")
async def patient() -> str:
    """Go on once the wait beside it is over."""
    worker = k.WORKER.get()
    assert worker is not None
    await worker.kernel.until("s", "timer_fired")
    return "seen"


async def test_a_wait_that_is_over_before_the_session_parks(kernel: k.Kernel) -> None:
    """Its answer waits in the inbox until the other calls of the round have their results."""
    await begin(kernel, [("wait", {"seconds": 0.01}), ("patient", {})], "done", tools=[patient])
    assert (await kernel.end("s"))["status"] == "completed"
    assert await kernel.results() == ["waited 0.01 seconds", "seen"]
    assert (await kernel.info("s"))["epoch"] == 1


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ("{broken", "JSON"), ({}, "number"), ({"seconds": 0}, "more than 0"), ({"seconds": -1}, "more than 0"),
        ({"seconds": 31 * 86_400}, "30 days"), ({"seconds": "60"}, "number"), ({"seconds": True}, "number"),
        ('{"seconds": NaN}', "number"), ('{"seconds": 1e999}', "number"), ([1], "number"),
    ],
)  # fmt: skip
async def test_a_wait_that_makes_no_sense(kernel: k.Kernel, arguments: Any, part: str) -> None:
    """The model reads what is wrong with it, and nothing is waited for."""
    await begin(kernel, [("wait", arguments if isinstance(arguments, str) else json.dumps(arguments))], "done")
    assert (await kernel.end("s"))["status"] == "completed"
    assert part in (await kernel.results())[0]
    assert [item["outcome"] for item in await data(kernel, "tool_finished")] == ["invalid"]
    assert await data(kernel, "timer_set") == []


async def test_a_wait_beside_a_question(kernel: k.Kernel) -> None:
    """The session waits for the person; once answered, for the time, in whichever order they come."""
    for session_id in ("s", "other"):
        await begin(kernel, [LONG, QUESTION], "done", tools=["request_user_input"], session_id=session_id)
        await waits(kernel, session_id, "waiting_for_input")
        kernel.check()
    await kernel.ask("answer", "s", "r/1/1", "ok", "red", 1)
    await kernel.until("s", "tool_finished")
    await waits(kernel, "s")
    assert (await kernel.ask("read", "run", ["s", "r"], {}))["status"] == "running"
    await fire(kernel, "call:r/1/0")
    await fire(kernel, "call:r/1/0", "other")
    await kernel.until("other", "tool_finished")
    await waits(kernel, "other", "waiting_for_input")
    await kernel.ask("answer", "other", "r/1/1", "ok", "red", 1)
    for session_id in ("s", "other"):
        assert (await kernel.end(session_id))["status"] == "completed"
        assert await kernel.results(session_id) == ["waited 3600 seconds", "red"]


async def test_a_wait_beside_a_child(kernel: k.Kernel) -> None:
    """The child's result is taken when it comes, and the time waited for; or the other way round."""
    child = k.spec(k.script([QUESTION], "dug"), ["request_user_input"], name="worker", hash="worker")
    spawn = ("spawn_agent", {"agent": "worker", "task": "dig"})
    for session_id in ("s", "other"):
        await begin(
            kernel, [LONG, spawn], "done", tools=["spawn_agent"], agents={"worker": child}, session_id=session_id
        )
        await waits(kernel, session_id)
        [below] = [row for row in await kernel.ask("read", "tree", [session_id], {}) if row["parent_id"]]
        await kernel.paused(below["session_id"])
        if session_id == "other":
            await fire(kernel, "call:r/1/0", "other")
            await kernel.until("other", "tool_finished")
            await waits(kernel, "other", "waiting_for_child")
        await kernel.ask("answer", below["session_id"], "task/1/0", "ok", "red", 1)
        if session_id == "s":
            await kernel.until("s", "tool_finished")
            await waits(kernel, "s")
            await fire(kernel, "call:r/1/0")
        assert (await kernel.end(session_id))["status"] == "completed"
        assert await kernel.results(session_id) == ["waited 3600 seconds", "dug"]


@tool
async def wait() -> str:
    """Somebody's own."""
    return "my own"


async def test_a_tool_of_ones_own_may_be_called_wait(kernel: k.Kernel) -> None:
    """It is executed like any other."""
    await kernel.run("s", k.spec(k.script([("wait", {})], "done"), [wait]))
    assert await kernel.results() == ["my own"]


async def test_waiting_is_no_lack_of_progress(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given a model that waits and looks again and again, with the same result, then nothing is refused."""
    looks = ("look", {"path": str(tmp_path / "notes"), "text": "x"})
    rounds = [[("wait", {"seconds": 0.001})], [("wait", {"seconds": 0.001}), looks]] * 4
    run = await kernel.run("s", k.spec(k.script(*rounds, "done"), [*TOOLS, k.look], repeat_limit=2))
    assert (run["status"], set(await kernel.results())) == ("completed", {"waited 0.001 seconds", "noted x"})


# The ends of a wait.


@pytest.mark.parametrize("how", ["cancel", "close", "deadline"])
async def test_a_wait_is_ended_without_a_process(kernel: k.Kernel, how: str) -> None:
    """Given there is no frame, when the run is asked to end, then it has ended, and no timer is left."""
    budget = {"seconds": 3_000_000_000} if how == "deadline" else None
    await begin(kernel, [LONG], "done", budget=budget)
    await waits(kernel)
    await kernel.stop_frames()
    if how == "deadline":
        await fire(kernel, "deadline")
    else:
        await kernel.ask(how, "s", *([None] if how == "cancel" else []), "enough")
    ended = await kernel.ask("read", "run", ["s", "r"], {})
    assert ended["status"] == ("budget_exceeded" if how == "deadline" else "cancelled")
    assert (await kernel.results(), await due(kernel)) == (["cancelled"], {})
    kernel.check()


async def test_a_raised_limit_of_seconds_counts_for_what_goes_on_below(kernel: k.Kernel) -> None:
    """Given a sub-agent that outlives its parent's run, when the parent's time is raised, then the sub-agent has it
    too: it is not asked to end at the old time, and has a timer for the new one."""
    child = k.spec(k.script([LONG], "dug"), TOOLS, name="worker", hash="worker", on_parent_end="abandon")
    spawn = ("spawn_agent", {"agent": "worker", "task": "dig"})
    lead = {"tools": ["spawn_agent"], "agents": {"worker": child}, "on_change": "migrate"}
    await begin(kernel, [spawn], "done", budget={"seconds": 3_000_000_000}, **lead)
    await kernel.until("s", "child_spawned")
    [below] = [row["session_id"] for row in await kernel.ask("read", "tree", ["s"], {}) if row["parent_id"]]
    await waits(kernel, below)
    await kernel.ask("cancel", "s", None, "enough")
    await kernel.end("s")
    before = (await due(kernel))[below, "deadline"]
    raised = k.spec(k.script([spawn], "done"), [*TOOLS, "spawn_agent"], agents=lead["agents"], on_change="migrate")
    await kernel.spawn("s", {**raised, "hash": "raised", "budget": {"seconds": 4_000_000_000}})
    await fire(kernel, "deadline", below)
    assert (await kernel.info(below))["status"] == "waiting_for_timer"
    assert (await due(kernel))[below, "deadline"] == before + 1_000_000_000
    await fire(kernel, "deadline", below)
    ended = await kernel.ask("read", "run", [below, "task"], {})
    assert (ended["status"], ended["error"]["details"]["limit"]) == ("budget_exceeded", "4000")


async def test_whose_time_counts_from_when(kernel: k.Kernel) -> None:
    """A queued run has all of its time when it begins; the session's time goes on from its first run, also while it is
    idle or its runs wait."""
    budget = [{"scope": "run", "seconds": 2_000_000_000}, {"scope": "session", "seconds": 3_000_000_000}]
    await begin(kernel, [LONG], [LONG], "done", budget=budget)
    await waits(kernel)
    await kernel.send("s", "next", "r2")
    first = await kernel.ask("read", "run", ["s", "r"], {})
    await kernel.ask("cancel", "s", "r", "enough")
    await kernel.until("s", "run_started", 2)
    second = await kernel.ask("read", "run", ["s", "r2"], {})
    assert (await due(kernel))["s", "deadline"] == second["started_at"] + 2_000_000_000
    since = {row["scope"]: row["since"] for row in await kernel.ask("read", "budgets", ["s"], {})}
    assert since == {"run": second["started_at"], "session": first["started_at"]}


async def test_a_parents_end_reaches_a_child_that_waits(kernel: k.Kernel) -> None:
    """It is cancelled with its parent, and leaves no timer."""
    child = k.spec(k.script([LONG], "dug"), TOOLS, name="worker", hash="worker")
    spawn = ("spawn_agent", {"agent": "worker", "task": "dig"})
    await begin(kernel, [spawn], "done", tools=["spawn_agent"], agents={"worker": child})
    await kernel.until("s", "child_spawned")
    [below] = [row for row in await kernel.ask("read", "tree", ["s"], {}) if row["parent_id"]]
    await waits(kernel, below["session_id"])
    await kernel.stop_frames()
    await kernel.ask("cancel", "s", None, "enough")
    assert (await kernel.end("s"))["status"] == "cancelled"
    assert ((await kernel.info(below["session_id"]))["status"], await due(kernel)) == ("cancelled", {})


@tool
async def stubborn() -> str:
    """Work for ever."""
    return str(await k.never())


@pytest.mark.parametrize("over", [False, True])
async def test_a_cancel_while_other_calls_work(kernel: k.Kernel, over: bool) -> None:
    """The wait's call has its result, its timer is gone, whether its time was over by then or not."""
    await begin(kernel, [LONG, ("stubborn", {})], "done", tools=[stubborn])
    await kernel.until("s", "tool_started")
    await kernel.until("s", "timer_set")
    if over:
        await fire(kernel, "call:r/1/0")
    await kernel.ask("cancel", "s", None, "enough")
    assert (await kernel.end("s"))["status"] == "cancelled"
    assert (await due(kernel), len(await kernel.results())) == ({}, 2)


@pytest.mark.parametrize("over", [False, True])
async def test_a_cancel_that_is_held_by_a_child(store: str, tmp_path: Path, over: bool) -> None:
    """Given a run that waits for a time and a child, when it is cancelled and the child takes long to end, then the
    books balance meanwhile."""
    child = k.spec(k.script([("stubborn", {})]), [stubborn], name="worker", hash="worker", shutdown=None)
    spawn = ("spawn_agent", {"agent": "worker", "task": "dig"})
    async with k.running(store, tmp_path, frames=2) as kernel:
        await begin(kernel, [LONG, spawn], "done", tools=["spawn_agent"], agents={"worker": child})
        await waits(kernel)
        [below] = [row for row in await kernel.ask("read", "tree", ["s"], {}) if row["parent_id"]]
        await kernel.until(below["session_id"], "tool_started")
        await kernel.stop_frames()  # the child can't say that it ends, and the parent can't take its answer
        if over:
            await fire(kernel, "call:r/1/0")
        await kernel.ask("cancel", "s", None, "enough")
        info = await kernel.info("s")
        assert (info["run_id"], info["status"]) == ("r", "waiting_for_child")
        kernel.check()


# Deaths.


async def test_nothing_is_done_while_it_waits(kernel: k.Kernel) -> None:
    """Neither the node service's death nor that of the frame it was in counts, activates it, or begins the time again;
    an answer that was sent twice is there once."""
    await begin(kernel, [LONG], "done")
    before, set_for = await waits(kernel), await due(kernel)
    kernel.kill_node()
    await kernel.quiet()
    for worker in list(kernel.workers.values()):
        kernel.kill(worker)
    await kernel.quiet()
    await kernel.service.sweep.run(0)
    after = await kernel.info("s")
    names = ("epoch", "restarts", "seq", "status")
    assert ({name: after[name] for name in names}, await due(kernel)) == (
        {name: before[name] for name in names}, set_for,
    )  # fmt: skip
    due_at = set_for["s", "call:r/1/0"]
    for _ in range(2):
        await kernel.service.journal.submit(lambda tx: timers.fire(tx, "s", "call:r/1/0", due_at))
    assert (await kernel.end("s"))["status"] == "completed"
    assert await kernel.results() == ["waited 3600 seconds"]


@tool(on_crash="rerun")
async def deadly() -> str:
    """Die once the wait beside it is committed, so many times."""
    worker = k.WORKER.get()
    assert worker is not None
    await worker.kernel.until("s", "timer_set")
    if deadly.times:  # type: ignore[attr-defined]
        deadly.times -= 1  # type: ignore[attr-defined]
        worker.kernel.kill(worker)
        await k.never()
    return "alive"


async def test_a_pause_is_no_wait(kernel: k.Kernel) -> None:
    """Given a round with a wait whose process dies, when the wait is over within the pause before the session is
    resumed, then the pause goes on; and a pause's timer that is left over ends no wait."""
    slow = {**k.POLICY, "backoff": 600.0, "backoff_max": 600.0}
    deadly.times = 2  # type: ignore[attr-defined]
    await begin(kernel, [LONG, ("deadly", {})], [LONG], "done", tools=[deadly], restart=slow)
    await kernel.until("s", "session_crashed", 2)  # after the first there was progress
    info = await waits(kernel)
    assert info["wait"] == "timer"
    await fire(kernel, "call:r/1/0")
    info = await kernel.info("s")
    assert (info["wait"], info["status"]) == ("timer", "waiting_for_timer")
    pause_at = (await due(kernel))["s", "pause"]
    await fire(kernel, "pause")
    await kernel.until("s", "timer_set", 2)
    info = await waits(kernel)
    assert info["wait"] == "input"
    await kernel.service.journal.submit(lambda tx: tx.set_timer(tx.session("s"), "pause", pause_at))
    await fire(kernel, "pause")
    assert (await kernel.info("s"))["wait"] == "input"
    await fire(kernel, "call:r/2/0")
    assert (await kernel.end("s"))["status"] == "completed"


@pytest.mark.parametrize("node_id", ["node1", "node2"])
async def test_due_while_everything_was_down(store: str, tmp_path: Path, server: OfflineServer, node_id: str) -> None:
    """Given a wait and wakeups that became due while nothing ran, when a service starts, the same node's or another's,
    then each happens once, a recurring one too, and the next is due later."""
    async with k.running(store, tmp_path, server=server, frames=1) as kernel:
        await begin(kernel, [("wait", {"seconds": 0.5})], "done")
        await waits(kernel)
        for session_id in ("once", "often"):
            await kernel.spawn(session_id, k.spec())
        once = await schedule(kernel, session_id="once", seconds=0.3)
        often = await schedule(kernel, session_id="often", seconds=0.3, every=1000)
        await kernel.lose()
        kernel.stop = kernel.quiet  # type: ignore[method-assign]
    await asyncio.sleep(0.8)  # nothing runs that could tell of the time
    kernel = k.Kernel(store, server, tmp_path, node_id=node_id)
    await kernel.start(1)
    try:
        assert (await kernel.end("s"))["status"] == "completed"
        for session_id, set_for in (("once", once), ("often", often)):
            run = await woken(kernel, set_for["due_at"], session_id=session_id)
            assert (run["status"], run["source"], run["text"]) == ("completed", "timer", "offline: again")
            assert len(await kernel.ask("read", "runs", [session_id], {})) == 1
        [left] = await kernel.ask("read", "wakeups", ["often"], {})
        assert left["due_at"] > often["due_at"] + 1_000_000_000
        assert await kernel.ask("read", "wakeups", ["once"], {}) == []
    finally:
        await kernel.stop()


CALLS = """call wait {"seconds": 0.02}
call look {"path": "PATH", "text": "0"}
call schedule_wakeup {"prompt": "again", "seconds": 0.05, "name": "w"}
call stop_job {"job": "none"}"""
"""An input whose round waits, looks and schedules."""


async def until_woken(kernel: k.Kernel, session_id: str, path: Path) -> list[Any]:
    """The transcript of both runs, without what names the session's own files and times."""
    await kernel.run(session_id, k.spec("", [*TOOLS, k.look]), CALLS.replace("PATH", str(path)))
    await kernel.until(session_id, "timer_set", 2)
    [due_at] = [item["due_at"] for item in await data(kernel, "timer_set", session_id) if item["kind"] == "wakeup"]
    run_id = f"wakeup.w.{due_at}"
    await kernel.until(session_id, "run_finished", 2)
    await kernel.end(session_id, run_id)
    found = json.dumps(await kernel.transcript(session_id)).replace(str(path), "PATH").replace(run_id, "WAKEUP")
    transcript: list[Any] = json.loads(re.sub(r"(due in|started) [0-9.]+ seconds?", r"\1 time", found))
    return transcript


@pytest.mark.sweep
@pytest.mark.conformance
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["frame", "node"])
async def test_a_death_anywhere_changes_nothing(store: str, tmp_path: Path, victim: str) -> None:
    """Frame or node service killed at each call, commit, tool and answer: the transcript is that of a session without
    deaths, each timer is set and fires once, and the wait's time counts from its request."""
    problems = []
    async with k.running(store, tmp_path) as kernel:
        start = len(kernel.points)
        wanted = await until_woken(kernel, "clean", tmp_path / "clean")
        points = len(kernel.points) - start
        texts = [entry[1] for entry in wanted if entry[0] == "tool"]
        assert texts[:2] == ["waited 0.02 seconds", "noted 0"]
        assert texts[2:] == [
            "wakeup w is scheduled: it is due in time",
            "you have no job 'none'. w (wakeup): due in time, started time ago: again",
        ]  # fmt: skip
        assert wanted[-1][1] == "offline: again"
        for at in tiers.points(range(points + 4), is_sqlite=kernel.service.database.is_sqlite):
            problems += await one_death(kernel, tmp_path, at, victim, wanted)
    assert not problems, "\n".join(problems)


async def one_death(kernel: k.Kernel, directory: Path, at: int, victim: str, wanted: list[Any]) -> list[str]:
    """A session with one death at a point; what is not as it must be."""
    session_id = f"s{at}"
    deaths = Deaths(kernel, session_id, at, victim)
    try:
        async with asyncio.timeout(30):
            transcript = await until_woken(kernel, session_id, directory / session_id)
    except (TimeoutError, k.Stuck) as stuck:
        return [f"{deaths.where}: {type(stuck).__name__}: {stuck}"]
    finally:
        kernel.on_point = None
    await kernel.quiet()
    kernel.check(session_id)
    found = []
    if transcript != wanted:
        found.append(f"{deaths.where}: {transcript}")
    for kind in ("timer_set", "timer_fired"):
        kinds = [item["kind"] for item in await data(kernel, kind, session_id)]
        if sorted(kinds) != ["wait", "wakeup"]:
            found.append(f"{deaths.where}: {kind} {kinds}")
    asked_at = next(m["created_at"] for m in await kernel.messages(session_id) if m["role"] == "assistant")
    set_for = [item["due_at"] for item in await data(kernel, "timer_set", session_id) if item["kind"] == "wait"]
    if set_for != [asked_at + 20_000]:
        found.append(f"{deaths.where}: the wait was asked for at {asked_at} and is due at {set_for}")
    return found


# Wakeups.


async def test_an_agent_wakes_itself(kernel: k.Kernel) -> None:
    """It schedules, lists and cancels; what it scheduled is an input to it when its time has come, and it holds nothing
    until then."""
    await kernel.spawn("s", k.spec("", TOOLS))
    inputs = (
        'call schedule_wakeup {"prompt": "look again", "seconds": 3600, "name": "w"}\n'
        'call schedule_wakeup {"prompt": "each day", "seconds": 60, "every": 86400}',
        "call list_jobs",
        'call stop_job {"job": "w"}\ncall stop_job {"job": "x"}',
    )
    for number, content in enumerate(inputs):
        await kernel.send("s", content, f"r{number}")
        assert (await kernel.end("s", f"r{number}"))["status"] == "completed"
    first, second, listed, cancelled, unknown = await kernel.results()
    assert first == "wakeup w is scheduled: it is due in 3600 seconds"
    assert second.endswith("it is due in 60 seconds, then every 86400 seconds")
    assert {line.partition(" (wakeup): due in ")[0] for line in listed.splitlines()} == {second.split()[1], "w"}
    assert sorted(line.rpartition(": ")[2] for line in listed.splitlines()) == ["each day", "look again"]
    assert cancelled == "wakeup w is stopped"
    assert unknown.startswith("you have no job 'x'. ")
    [left] = await kernel.ask("read", "wakeups", ["s"], {})
    assert (left["prompt"], left["every"]) == ("each day", 86400)
    info = await kernel.info("s")
    assert (info["status"], info["active"]) == ("idle", 0)
    await fire(kernel, f"wakeup:{left['name']}")
    run = await woken(kernel, left["due_at"], left["name"])
    assert (run["content"], run["source"], run["text"]) == ("each day", "timer", "offline: each day")
    [again] = await kernel.ask("read", "wakeups", ["s"], {})
    assert again["due_at"] > left["due_at"]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"seconds": 5}, "prompt"), ({"prompt": " ", "seconds": 5}, "prompt"), ({"prompt": "x"}, "seconds"),
        ({"prompt": "x", "seconds": 0}, "seconds"), ({"prompt": "x", "seconds": 5, "every": 0.5}, "every"),
        ({"prompt": "x", "seconds": 5, "every": "1"}, "every"), ({"prompt": "x", "seconds": 5, "name": "a/b"}, "name"),
    ],
)  # fmt: skip
async def test_a_wakeup_that_makes_no_sense(kernel: k.Kernel, arguments: Any, part: str) -> None:
    """The model reads what is wrong with it, and nothing is scheduled."""
    await begin(kernel, [("schedule_wakeup", arguments)], "done")
    await kernel.end("s")
    assert part in (await kernel.results())[0]
    assert await kernel.ask("read", "wakeups", ["s"], {}) == []


async def test_a_name_has_one_wakeup(kernel: k.Kernel) -> None:
    """The same content again changes nothing, another one replaces it, what has fired or was cancelled is free."""
    await kernel.spawn("s", k.spec())
    first = await schedule(kernel)
    assert first["outcome"] == "scheduled"
    assert await schedule(kernel) == {"outcome": "unchanged", "due_at": first["due_at"]}
    other = await schedule(kernel, prompt="more")
    assert other["outcome"] == "replaced"
    assert [row["prompt"] for row in await kernel.ask("read", "wakeups", ["s"], {})] == ["more"]
    await kernel.service.journal.submit(lambda tx: timers.fire(tx, "s", "wakeup:w", first["due_at"]))
    assert await kernel.ask("read", "runs", ["s"], {}) == []
    assert await kernel.ask("cancel_wakeup", "s", "w") is True
    assert await kernel.ask("cancel_wakeup", "s", "w") is False
    assert (await schedule(kernel))["outcome"] == "scheduled"
    kernel.check()


async def test_no_more_than_there_may_be(kernel: k.Kernel) -> None:
    """One more is refused, in words that help; replacing one is not."""
    await begin(kernel, [("schedule_wakeup", {"prompt": "x", "seconds": 5})], "done", session_id="full")
    await kernel.end("full")
    for number in range(MOST_WAKEUPS - 1):
        await schedule(kernel, f"w{number}", "full")
    with pytest.raises(InvalidInput, match="cancel one"):
        await schedule(kernel, "more", "full")
    assert (await schedule(kernel, "w0", "full", prompt="other"))["outcome"] == "replaced"
    with pytest.raises(UnknownSession):
        await schedule(kernel, "more", "nobody")
    kernel.check()


async def test_who_can_not_be_woken(kernel: k.Kernel) -> None:
    """A sub-agent whose session ends with its task gets an error; one that stays can, until it is closed, which drops
    its wakeups; a closed session can't."""
    call = [("schedule_wakeup", {"prompt": "x", "seconds": 3600, "name": "w"})]
    agents = {
        name: k.spec(k.script(call, "done"), TOOLS, name=name, hash=name, lifecycle=name)
        for name in ("ephemeral", "linked")
    }
    spawns = [("spawn_agent", {"agent": name, "task": "go"}) for name in agents]
    await begin(kernel, spawns, "done", tools=["spawn_agent"], agents=agents)
    await kernel.end("s")
    below = {row["agent"]: row["session_id"] for row in await kernel.ask("read", "tree", ["s"], {})}
    assert "ephemeral" in (await kernel.results(below["ephemeral"]))[0]
    assert list(await due(kernel)) == [(below["linked"], "wakeup:w")]
    kernel.check()
    await schedule(kernel)
    await kernel.ask("close", "s", "enough")
    assert await due(kernel) == {}
    for session_id in ("s", below["linked"]):
        with pytest.raises(SessionClosed):
            await schedule(kernel, session_id=session_id)


async def test_times_that_are_missed_are_one(kernel: k.Kernel) -> None:
    """Given a recurring wakeup whose input has not begun, when it is due again, then no other input is queued; once it
    has begun, the next one is."""
    await kernel.spawn("s", k.spec("", TOOLS))
    await kernel.send("s", 'call wait {"seconds": 3600}')
    await waits(kernel)
    first = await schedule(kernel, every=1000)
    for _ in range(3):
        await fire(kernel, "wakeup:w")
    queued = [run["run_id"] for run in await kernel.ask("read", "runs", ["s"], {}) if run["status"] == "queued"]
    assert queued == [f"wakeup.w.{first['due_at']}"]
    kernel.check()
    await fire(kernel, "call:r/1/0")
    assert (await kernel.end("s", queued[0]))["status"] == "completed"
    [next_one] = await kernel.ask("read", "wakeups", ["s"], {})
    await fire(kernel, "wakeup:w")
    assert (await kernel.end("s", f"wakeup.w.{next_one['due_at']}"))["status"] == "completed"


async def test_a_quarantined_session_is_woken_after_it_is_resumed(kernel: k.Kernel, tmp_path: Path) -> None:
    """What becomes due meanwhile is put off, not lost."""

    def die(_number: int, label: str, worker: k.Worker | None) -> None:
        if label == "tool begins" and worker is not None:
            kernel.kill(worker)

    looks = ("look", {"path": str(tmp_path / "notes"), "text": "x"})
    kernel.on_point = die
    await begin(kernel, [looks], [looks], "woken", tools=[k.look])
    set_for = await schedule(kernel)
    assert (await kernel.end("s"))["status"] == "quarantined"
    kernel.on_point = None
    await kernel.quiet()
    await fire(kernel, "wakeup:w")
    assert len(await kernel.ask("read", "runs", ["s"], {})) == 1
    with pytest.raises(SessionClosed):
        await schedule(kernel, "other")
    kernel.check()
    assert await kernel.ask("resume", "s")
    await fire(kernel, "wakeup:w")
    assert (await woken(kernel, set_for["due_at"]))["status"] == "completed"


# Nodes.


async def test_scheduled_elsewhere_it_fires_at_home(postgres: str, server: OfflineServer, tmp_path: Path) -> None:
    """Given a session at home on `a`, when `b` schedules a wakeup of it, then it is woken and runs at `a`."""
    async with nodes(postgres, server, tmp_path) as (a, b):
        await a.spawn("s", k.spec())
        set_for = await schedule(b, seconds=0.05)
        assert (await woken(a, set_for["due_at"]))["status"] == "completed"
        activated = [event["data"]["node_id"] for event in await a.events("s") if event["type"] == "session_activated"]
        assert activated == ["a"]
        assert len(await a.ask("read", "runs", ["s"], {})) == 1


# The rules, alone.


TIMES = st.integers(1, 1 << 52)


@given(TIMES, st.integers(1_000_000, 366 * 86_400_000_000), TIMES)
def test_the_next_time(due_at: int, every: int, now: int) -> None:
    """It is ahead, a whole delay after this one, whether that was in time, late by many delays, or early by a clock
    that was set back."""
    found = next_due(due_at, every, now)
    assert found - max(due_at, now) == every
    assert found > now


@given(st.integers(1, 1000), st.lists(st.integers(0, 10_000), min_size=1, max_size=50))
def test_a_history_of_a_recurring_wakeup(every: int, lateness: list[int]) -> None:
    """However late each time is, no two are closer than the delay, and none is made up for twice."""
    at, fired = 1, list[int]()
    for late in lateness:
        now = at + late
        fired.append(now)
        at = next_due(at, every, now)
    gaps = [later - earlier for earlier, later in pairwise(fired)]
    assert all(gap >= every for gap in gaps)
    assert gaps == [every + late for late in lateness[1:]]


@given(st.floats(allow_nan=True, allow_infinity=True) | st.integers())
def test_only_times_that_can_be_waited(seconds: float) -> None:
    """More than 0 and at most 30 days; whatever passes can be counted in microseconds, and said."""
    assert (wait_problem(seconds) is None) == (0 < seconds <= 30 * 86_400)
    if wait_problem(seconds) is None:
        assert microseconds(seconds) >= 1
        assert wakeup_problem("x", seconds, None, "n") is None
        assert spoken(microseconds(seconds)).endswith(("second", "seconds"))
