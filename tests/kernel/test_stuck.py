"""Sessions that die again and again: what poisons them is given up once, then they are; a person may let them go on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from understudy.actors.tools import tool
from understudy.errors import SessionClosed, UnknownSession

from . import kernel as k

GIVEN_UP = "given up: the agent's process died 3 times in a row while this call was open"


@tool(on_crash="rerun")
async def poison() -> str:
    """Kill the process that runs it."""
    worker = k.WORKER.get()
    assert worker is not None
    worker.kernel.kill(worker)
    return await k.never()


@tool(on_crash="rerun")
async def fine() -> str:
    """Do no harm."""
    return "fine"


@pytest.fixture
async def kernel(store: str, tmp_path: Path) -> AsyncIterator[k.Kernel]:
    async with k.running(store, tmp_path) as made:
        yield made


async def finished(kernel: k.Kernel, session_id: str = "s") -> list[tuple[str, str, int]]:
    """`(call, outcome, executions)` of each finished call, in the order of the log."""
    found = [event["data"] for event in await kernel.events(session_id) if event["type"] == "tool_finished"]
    return [(data["call_id"], data["outcome"], data["executions"]) for data in found]


async def crashes(kernel: k.Kernel, session_id: str = "s") -> list[str]:
    return [
        event["data"]["decision"] for event in await kernel.events(session_id) if event["type"] == "session_crashed"
    ]


async def test_a_poisonous_call_is_given_up_and_the_agent_completes(kernel: k.Kernel) -> None:
    """Given a call that kills its process every time, then after `stuck_after` deaths it gets a result that says so,
    the session resumes at once, and what the model does next is done."""
    run = await kernel.run("s", k.spec(k.script([("poison", {})], [("fine", {})], "done"), [poison, fine]))
    assert (run["status"], run["text"], await kernel.results()) == ("completed", "done", [GIVEN_UP, "fine"])
    assert await crashes(kernel) == ["resume", "resume", "resume", "abort"]  # the first one had made progress
    assert await finished(kernel) == [("r/1/0", "aborted", 0), ("r/2/0", "ok", 1)]
    assert kernel.server.stats.requests == 3


async def test_calls_that_are_not_to_blame_go_down_too_but_not_those_with_a_result(kernel: k.Kernel) -> None:
    """Of a round with a poisonous call, what has a result keeps it; what a child or a person is at goes on."""
    child = k.spec(name="worker", hash="worker")
    calls = [("poison", {}), ("fine", {}), ("spawn_agent", {"agent": "worker", "task": "dig"})]
    question = ("request_user_input", {"prompt": "Well?"})
    tools = [poison, fine, "spawn_agent", "request_user_input"]
    compiled = k.spec(k.script([*calls, question], "done"), tools, agents={"worker": child}, parallel_tools=1)
    await kernel.spawn("s", compiled)
    await kernel.send("s")
    await kernel.until("s", "tool_finished", 3)
    assert await kernel.ask("answer", "s", "r/1/3", "ok", "well", 1)
    assert (await kernel.end("s"))["status"] == "completed"
    assert await kernel.results() == [GIVEN_UP, GIVEN_UP, "offline: dig", "well"]


async def test_stuck_again_in_the_same_run_is_the_end(kernel: k.Kernel) -> None:
    """A model that asks for the poison again, though it was warned: the second time the session is quarantined."""
    run = await kernel.run("s", k.spec(k.script([("poison", {})], [("poison", {})], "never"), [poison]))
    assert (run["status"], run["error"]["code"]) == ("quarantined", "quarantined")
    assert await crashes(kernel) == ["resume"] * 3 + ["abort"] + ["resume"] * 3 + ["quarantine"]
    assert await finished(kernel) == [("r/1/0", "aborted", 0), ("r/2/0", "cancelled", 0)]


async def test_the_next_run_has_its_own_chance(kernel: k.Kernel) -> None:
    """Calls are given up once per run, not once per session."""
    compiled = k.spec(k.script([("poison", {})], "done"), [poison])
    await kernel.run("s", compiled)
    await kernel.send("s", "again", "r2")
    assert (await kernel.end("s", "r2"))["status"] == "completed"
    assert [call for call, _, _ in await finished(kernel)] == ["r/1/0", "r2/1/0"]


def die_of_the_model(kernel: k.Kernel, session_id: str) -> None:
    """Whoever activates the session dies before it has committed anything."""

    def die(_number: int, label: str, worker: k.Worker | None) -> None:
        if label in ("before step", "before commit") and worker is not None and kernel.holder(session_id) is worker:
            kernel.kill(worker)

    kernel.on_point = die


async def quarantined(kernel: k.Kernel) -> None:
    """A session that was given up with one input at work and one in its queue."""
    await kernel.spawn("s", k.spec())
    die_of_the_model(kernel, "s")
    await kernel.send("s")
    await kernel.send("s", "later", "r2")
    for run_id in ("r", "r2"):
        assert (await kernel.end("s", run_id))["status"] == "quarantined"
    kernel.on_point = None
    await kernel.quiet()


async def test_a_poisonous_model_ends_in_quarantine(kernel: k.Kernel) -> None:
    """Where no call is open there is nothing to give up."""
    await quarantined(kernel)
    assert await crashes(kernel) == ["resume", "resume", "quarantine"]
    info = await kernel.info("s")
    assert (info["status"], info["error"]["code"]) == ("quarantined", "quarantined")
    with pytest.raises(SessionClosed):
        await kernel.send("s", "more", "r3")


async def test_a_quarantined_session_is_resumed_by_a_person(kernel: k.Kernel) -> None:
    """It takes input again, its deaths count no more, its runs stay as they ended; a repetition changes nothing."""
    await quarantined(kernel)
    assert await kernel.ask("resume", "s") is True
    assert await kernel.ask("resume", "s") is False
    kernel.check()
    info = await kernel.info("s")
    assert (info["status"], info["error"]) == ("idle", None)
    await kernel.send("s", "more", "r3")
    assert (await kernel.end("s", "r3"))["status"] == "completed"
    die_of_the_model(kernel, "s")
    await kernel.send("s", "and more", "r4")
    assert (await kernel.end("s", "r4"))["status"] == "quarantined"
    assert await crashes(kernel) == ["resume", "resume", "quarantine"] + ["resume"] * 3 + ["quarantine"]
    runs = {row["run_id"]: row["status"] for row in await kernel.ask("read", "runs", ["s"], {})}
    assert runs == {"r": "quarantined", "r2": "quarantined", "r3": "completed", "r4": "quarantined"}


async def test_what_can_not_be_resumed(kernel: k.Kernel) -> None:
    """A closed session stays closed, a sub-agent ended with its task, and one that works needs no resuming."""
    await quarantined(kernel)
    await kernel.ask("close", "s", "enough")
    assert await kernel.ask("resume", "s") is False
    child = k.spec(k.script([("poison", {})], [("poison", {})], "never"), [poison], name="worker", hash="worker")
    spawn = ("spawn_agent", {"agent": "worker", "task": "dig"})
    await kernel.run("lead", k.spec(k.script([spawn], "done"), ["spawn_agent"], agents={"worker": child}))
    [below] = [row for row in await kernel.ask("read", "tree", ["lead"], {}) if row["parent_id"]]
    assert below["status"] == "quarantined"
    with pytest.raises(SessionClosed):
        await kernel.ask("resume", below["session_id"])
    assert await kernel.ask("resume", "lead") is False
    with pytest.raises(UnknownSession):
        await kernel.ask("resume", "nobody")


async def test_deaths_while_it_waits_count_for_nothing(kernel: k.Kernel) -> None:
    """A session whose frame is killed ten times while its model thinks is neither stuck nor given up."""
    slow: dict[str, Any] = {"text": "late", "delay": 60.0}
    await kernel.spawn("s", k.spec(k.script(slow), restart={**k.POLICY, "max_restarts": 0, "stuck_after": 1}))
    await kernel.send("s")
    await kernel.until("s", "model_call_started")
    for _ in range(10):
        if (holder := kernel.holder("s")) is not None:
            kernel.kill(holder)
        await kernel.quiet()
    decisions = await crashes(kernel)
    assert decisions
    assert set(decisions) == {"resume"}
    info = await kernel.info("s")
    assert (info["status"], info["run_id"]) == ("waiting_for_model", "r")
    await kernel.ask("cancel", "s", None, "enough")
    assert (await kernel.end("s"))["status"] == "cancelled"
