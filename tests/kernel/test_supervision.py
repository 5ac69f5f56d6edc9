"""Supervision as it is done: restarts of sub-agents, shutdown, what a parent's end means, without Ray."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from understudy.actors.tools import tool
from understudy.node.node_service import NodeService
from understudy.spec import Supervision
from understudy.testing.offline import Reply, register_policy

from . import kernel as k

FAILS = "offline-script: this is not JSON"
"""Instructions under which every model call is refused, so that the run fails."""


def supervision(**fields: Any) -> dict[str, Any]:
    return Supervision(**{"backoff": 0.01, "backoff_max": 0.05, "jitter": 0.0, **fields}).model_dump()


def worker(instructions: str = "", tools: Any = (), *, name: str = "worker", **fields: Any) -> dict[str, Any]:
    """The specification of a sub-agent."""
    return k.spec(instructions, tools, name=name, hash=name, supervision=supervision(), **fields)


def lead(*agents: dict[str, Any], rules: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """An agent that starts one of each of these sub-agents and then says so."""
    spawns = [("spawn_agent", {"agent": agent["name"], "task": f"for {agent['name']}"}) for agent in agents]
    return k.spec(
        k.script(spawns, "done"), ["spawn_agent"], agents={agent["name"]: agent for agent in agents},
        supervision=rules or supervision(), **fields,
    )  # fmt: skip


def fails_first(marker: str, times: int) -> str:
    """Instructions under which the first so many model calls are refused."""
    left = Counter({marker: times})

    def policy(body: dict[str, Any]) -> Reply:
        if left[marker] > 0:
            left[marker] -= 1
            raise ValueError("refused")
        return Reply(text=f"{marker} says so")

    register_policy(marker, policy)
    return f"offline-policy: {marker}"


class Begun:
    """How far tools are."""

    number = asyncio.Semaphore(0)
    let_go = threading.Event()
    gate = asyncio.Event()


@tool(on_crash="rerun")
async def wait_for_ever() -> str:
    """Do so, unless cancelled."""
    Begun.number.release()
    return await k.never()


@tool
async def does_not_listen() -> str:
    """Go on when cancelled."""
    Begun.number.release()
    while not Begun.let_go.is_set():
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            continue
    return "at last"


@tool(on_crash="rerun")
async def look_at_gate() -> str:
    """Go on once the gate is open."""
    await Begun.gate.wait()
    return "open"


@tool(on_crash="rerun")
async def ends_when_let_go() -> str:
    """Go on when let go."""
    await asyncio.to_thread(Begun.let_go.wait)
    return "let go"


@tool(on_crash="rerun")
async def ends_later() -> str:
    """Go on until the result of another call of this round was committed."""
    worker = k.WORKER.get()
    assert worker is not None
    await asyncio.to_thread(Begun.let_go.wait)
    commits = worker.kernel.points.count("reply to commit")
    while worker.kernel.points.count("reply to commit") == commits:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return "later"


@pytest.fixture
async def kernel(tmp_path: Path) -> AsyncIterator[k.Kernel]:
    Begun.number, Begun.let_go, Begun.gate = asyncio.Semaphore(0), threading.Event(), asyncio.Event()
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, frames=3) as kernel:
        yield kernel
        Begun.let_go.set()


@pytest.fixture
async def stored(store: str, tmp_path: Path) -> AsyncIterator[k.Kernel]:
    """The same on either backend."""
    Begun.number, Begun.let_go, Begun.gate = asyncio.Semaphore(0), threading.Event(), asyncio.Event()
    async with k.running(store, tmp_path, frames=3) as kernel:
        try:
            yield kernel
        finally:
            Begun.let_go.set()


async def tree(kernel: k.Kernel) -> list[dict[str, Any]]:
    """The sub-agents of `s`, in the order of their creation."""
    return [row for row in await kernel.ask("read", "tree", ["s"], {}) if row["session_id"] != "s"]


async def test_a_failed_sub_agent_is_started_again(stored: k.Kernel) -> None:
    """In another session, with the same task; its parent gets one result, the last one's."""
    flaky = worker(fails_first("flaky", 2), restart_type="transient")
    run = await stored.run("s", lead(flaky))
    assert (run["status"], await stored.results()) == ("completed", ["flaky says so"])
    rows = await tree(stored)
    assert [row["status"] for row in rows] == ["failed", "failed", "completed"]
    first = [m["content"] for m in await stored.messages(rows[2]["session_id"])]
    assert first == ["for worker", "flaky says so"], "it knows nothing of those before it"
    restarted = [event["data"] for event in await stored.events("s") if event["type"] == "child_restarted"]
    assert [(data["restart"], data["status"], data["delay"]) for data in restarted] == [
        (1, "failed", 10_000), (2, "failed", 20_000),
    ]  # fmt: skip


async def test_a_call_names_the_sub_agent_that_was_started_again(stored: k.Kernel) -> None:
    """Also where the parent was resumed before, was at work on other calls meanwhile, and heard of the result only."""

    def die(_number: int, label: str, process: k.Worker | None) -> None:
        if label == "reply to commit" and process is not None:  # the sub-agent has been created
            stored.on_point = None
            stored.kill(process)

    stored.on_point = die
    child = worker(k.script([("look_at_gate", {})]), [look_at_gate], max_rounds=1, restart_type="transient")
    calls = [("ends_when_let_go", {}), ("ends_later", {}), ("spawn_agent", {"agent": "worker", "task": "t"})]
    tools, rules = [ends_when_let_go, ends_later, "spawn_agent"], supervision(max_restarts=1, exceeded="report")
    compiled = k.spec(k.script(calls, "done"), tools, agents={"worker": child}, supervision=rules)
    await stored.spawn("s", compiled)
    await stored.send("s")
    await stored.until("s", "session_crashed")
    Begun.gate.set()
    await stored.until("s", "child_finished")
    Begun.let_go.set()
    assert (await stored.end("s"))["status"] == "completed"
    assert [row["status"] for row in await tree(stored)] == ["completed", "completed"]
    stored.check()


async def test_too_many_restarts_fail_the_parent(kernel: k.Kernel) -> None:
    """The siblings are stopped, and the parent's run ends as failed, with how often and who."""
    rules = supervision(max_restarts=2)
    agents = (
        worker(FAILS, restart_type="transient"),
        worker(k.script([("wait_for_ever", {})]), [wait_for_ever], name="b"),
    )
    run = await kernel.run("s", lead(*agents, rules=rules))
    assert (run["status"], run["error"]["code"]) == ("failed", "restart_intensity")
    assert "more than 2 times" in run["error"]["message"]
    assert Counter(row["status"] for row in await tree(kernel)) == {"failed": 3, "cancelled": 1}


async def test_it_escalates_to_the_root(kernel: k.Kernel) -> None:
    """A supervisor that fails for its sub-agents is a failed sub-agent itself: its own parent starts it again, within
    its limits, and fails in the end."""
    bottom = worker(FAILS, restart_type="transient", name="bottom")
    middle = {
        **lead(bottom, rules=supervision(max_restarts=1)),
        "name": "middle",
        "hash": "m",
        "restart_type": "transient",
    }
    run = await kernel.run("s", lead(middle, rules=supervision(max_restarts=1)))
    assert (run["status"], run["error"]["code"]) == ("failed", "restart_intensity")
    found = Counter((row["agent"], row["status"]) for row in await tree(kernel))
    assert found == {("middle", "failed"): 2, ("bottom", "failed"): 4}


async def test_report_tells_the_model(kernel: k.Kernel) -> None:
    """With `exceeded="report"` the last failure is a result to the model, and the run goes on."""
    rules = supervision(max_restarts=1, exceeded="report")
    run = await kernel.run("s", lead(worker(FAILS, restart_type="transient"), rules=rules))
    assert run["status"] == "completed"
    assert "ended as failed" in (await kernel.results())[0]


async def test_one_for_all(kernel: k.Kernel) -> None:
    """When one fails the other is stopped first, and then both start again."""
    Begun.let_go.set()
    flaky = worker(fails_first("all", 1), restart_type="transient", name="flaky")
    steady = worker(k.script({"text": "steady", "delay": 0.4}), restart_type="transient", name="steady")
    run = await kernel.run("s", lead(steady, flaky, rules=supervision(strategy="one_for_all")))
    assert (run["status"], await kernel.results()) == ("completed", ["steady", "all says so"])
    found = Counter((row["agent"], row["status"]) for row in await tree(kernel))
    assert found == {
        ("steady", "cancelled"): 1,
        ("steady", "completed"): 1,
        ("flaky", "failed"): 1,
        ("flaky", "completed"): 1,
    }


async def test_rest_for_one(kernel: k.Kernel) -> None:
    """Who started before the one that fails goes on; who started after it is started again."""
    flaky = worker(fails_first("rest", 1), restart_type="transient", name="flaky")
    before, after = (
        worker(k.script({"text": name, "delay": 0.4}), restart_type="transient", name=name)
        for name in ("before", "after")
    )
    run = await kernel.run("s", lead(before, flaky, after, rules=supervision(strategy="rest_for_one")))
    assert (run["status"], await kernel.results()) == ("completed", ["before", "rest says so", "after"])
    found = Counter(row["agent"] for row in await tree(kernel))
    assert found == {"before": 1, "flaky": 2, "after": 2}


@pytest.mark.parametrize("seed", range(6))
async def test_restarts_survive_deaths(stored: k.Kernel, seed: int) -> None:
    """Whatever commit a frame dies at, the tree ends with the same results and as many restarts."""

    def die(number: int, label: str, process: k.Worker | None) -> None:
        if process is not None and number % 11 == seed:
            stored.kill(process)

    stored.on_point = die
    # A slow machine has more points without progress, and thus more deaths.
    patient: dict[str, Any] = {"restart": {**k.POLICY, "stuck_after": 100}}
    flaky = worker(fails_first(f"deadly {seed}", 1), restart_type="transient", name="flaky", **patient)
    steady = worker(k.script({"text": "steady", "delay": 0.2}), restart_type="transient", name="steady", **patient)
    run = await stored.run("s", lead(steady, flaky, rules=supervision(strategy="one_for_all"), **patient))
    stored.on_point = None
    assert run["status"] == "completed"
    assert sorted(await stored.results()) == sorted(["steady", f"deadly {seed} says so"])
    assert [e["type"] for e in await stored.events("s")].count("child_restarted") in (1, 2)


# Shutdown.


async def test_a_run_that_does_not_end_is_ended_by_force(kernel: k.Kernel) -> None:
    """After its `shutdown` time, with a result for its open call; its process shall be killed, and may write nothing
    more; the session takes the next input elsewhere."""
    compiled = k.spec(k.script([("does_not_listen", {})], "done"), [does_not_listen], shutdown=0.3)
    await kernel.spawn("s", compiled)
    await kernel.send("s")
    await Begun.number.acquire()
    frame = kernel.holder("s")
    assert await kernel.ask("cancel", "s", None, "enough")
    run = await kernel.end("s")
    assert (run["status"], run["error"]["message"]) == ("cancelled", "enough")
    assert "shutdown_forced" in await kernel.types("s")
    assert await kernel.results() == [
        "interrupted: the agent's process died while this tool ran; its outcome is unknown"
    ]
    assert frame is not None
    assert kernel.service.frames.known.condemned == {frame.frame_id}
    Begun.let_go.set()
    await kernel.send("s", "again", "r2")
    assert (await kernel.end("s", "r2"))["status"] == "completed"
    assert kernel.service.sweep.swept == 0


@pytest.mark.thorough
async def test_a_process_in_which_a_tool_goes_on_serves_nobody_else(kernel: k.Kernel) -> None:
    """Given a tool that goes on when its run was ended by force, when its process hears of that before it is killed,
    then it leaves, and takes no other session."""
    compiled = k.spec(k.script([("does_not_listen", {})], "done"), [does_not_listen], shutdown=0.1)
    await kernel.spawn("s", compiled)
    await kernel.send("s")
    await Begun.number.acquire()
    worker = kernel.holder("s")
    assert worker is not None
    await kernel.ask("cancel", "s", None, "enough")
    await kernel.end("s")
    await asyncio.wait_for(asyncio.shield(worker.task), 30)  # it ends by itself
    assert kernel.holder("s") is None
    Begun.let_go.set()


async def test_a_process_that_has_not_called_in_since_a_restart_is_condemned(
    kernel: k.Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a tool whose node service was restarted meanwhile, when its run is ended by force, and its process does not
    hear of it, then that shall be killed, and no other; one that calls in before that is no longer at it."""
    compiled = k.spec(k.script([("does_not_listen", {})], "done"), [does_not_listen], shutdown=0)
    await kernel.spawn("s", compiled)
    await kernel.send("s")
    await Begun.number.acquire()
    frame, slot = kernel.holder("s"), kernel.service.frames.paging.holder("s")
    assert frame is not None
    assert slot is not None
    assert slot.activation is not None
    before = slot.activation._replace(epoch=slot.epoch - 1)
    monkeypatch.setattr(NodeService, "interrupted", lambda *_: k.never())  # else it would leave by itself
    kernel.kill_node()
    await kernel.quiet()
    frames = kernel.service.frames
    frames.condemn(frame.frame_id, before)  # by news that came late
    assert frames.known.condemned == set()
    assert await kernel.ask("cancel", "s", None, "enough")
    assert (await kernel.end("s"))["status"] == "cancelled"
    assert (frames.known.condemned, frame.frame_id in frames.known.expected) == ({frame.frame_id}, False)
    Begun.let_go.set()
    while frame.frame_id not in frames.paging.slots:
        await frames.supply.demand(1.0)
    assert frames.known.condemned == set()
    await kernel.send("s", "again", "r2")
    assert (await kernel.end("s", "r2"))["status"] == "completed"


async def test_a_condemned_frame_that_is_gone_is_forgotten(kernel: k.Kernel) -> None:
    """Given a frame whose process shall be killed, when a supervisor finds that it is gone, then nobody is asked to
    kill it any more."""
    kernel.service.frames.known.condemned.add("of a process that died unnoticed")
    await kernel.take_over(kernel.generation, [kernel.node_id])
    assert kernel.service.frames.known.condemned == set()


@pytest.mark.parametrize("moment", ["in a tool", "in a model call", "waiting for a child"])
async def test_a_run_past_its_time_is_ended(kernel: k.Kernel, moment: str) -> None:
    """Given a run with a budget of 0.3 s, wherever it is then, it is asked to end, with everything below it."""
    child = k.spec("", [wait_for_ever], name="child", hash="child")
    script: list[Any] = {
        "in a tool": [[("wait_for_ever", {})]],
        "in a model call": ["late"],
        "waiting for a child": [[("spawn_agent", {"task": "call wait_for_ever {}"})]],
    }[moment]
    if moment == "in a model call":
        kernel.server.hold()
    tools = [wait_for_ever, "spawn_agent"]
    budget = [{"scope": "run", "seconds": 300_000}]
    await kernel.spawn("s", k.spec(k.script(*script), tools, agents={"child": child}, budget=budget))
    await kernel.send("s")
    run = await kernel.end("s")
    assert (run["status"], run["error"]["details"]["resource"]) == ("budget_exceeded", "seconds")
    kernel.server.release()
    for session in await kernel.ask("read", "tree", ["s"], {}):
        assert not (await kernel.info(session["session_id"]))["active"]
    assert kernel.service.sweep.swept == 0


async def test_brutal_kill(kernel: k.Kernel) -> None:
    """With `shutdown=0` nobody is waited for."""
    await kernel.spawn("s", k.spec(k.script([("wait_for_ever", {})]), [wait_for_ever], shutdown=0))
    await kernel.send("s")
    await Begun.number.acquire()
    await kernel.ask("cancel", "s", None, "enough")
    types = await kernel.types("s")
    assert types[-3:] == ["shutdown_forced", "tool_finished", "run_finished"]


async def test_the_time_to_end_survives_the_node_service(kernel: k.Kernel) -> None:
    """The timer is in the store: another node service ends the run just as well."""
    compiled = k.spec(k.script([("does_not_listen", {})]), [does_not_listen], shutdown=0.5)
    await kernel.spawn("s", compiled)
    await kernel.send("s")
    await Begun.number.acquire()
    await kernel.ask("cancel", "s", None, "enough")
    kernel.kill_node()
    assert (await kernel.end("s"))["status"] == "cancelled"
    Begun.let_go.set()


async def test_nothing_is_needed_to_end_what_only_waits(kernel: k.Kernel) -> None:
    """A tree of which nobody acts is cancelled without any process, children first."""
    child = worker(k.script({"text": "late", "delay": 30}))
    await kernel.spawn("s", lead(child, {**child, "name": "other", "hash": "other"}))
    await kernel.send("s")
    await asyncio.to_thread(kernel.server.wait, lambda stats: stats.in_flight == 2)
    activations = (await kernel.types("s")).count("session_activated")
    await kernel.ask("cancel", "s", None, "enough")
    run = await kernel.end("s")
    assert run["status"] == "cancelled"
    assert await kernel.results() == ["the sub-agent ended as cancelled: enough"] * 2
    assert (await kernel.types("s")).count("session_activated") == activations
    finished = {row["session_id"]: row["updated_at"] for row in await tree(kernel)}
    assert all(at <= run["finished_at"] for at in finished.values())
    await asyncio.to_thread(kernel.server.wait, lambda stats: stats.in_flight == 0)


async def test_a_cancelled_child_gives_what_it_had(kernel: k.Kernel) -> None:
    """Its parent reads which tools it had used and what it said last."""
    child = worker(
        k.script(
            {"text": "half way", "tool_calls": [["look", {"path": "/dev/null", "text": "x"}]]},
            {"text": "x", "delay": 30},
        ),
        [k.look],
    )
    await kernel.spawn("s", lead(child))
    await kernel.send("s")
    kid = (await kernel.until("s", "child_spawned"))[-1]["data"]["child_id"]
    await kernel.until(kid, "model_call_started", 2)
    await kernel.ask("cancel", kid, None, "too slow")
    assert (await kernel.end("s"))["status"] == "completed"
    [said] = await kernel.results()
    assert "ended as cancelled: too slow" in said
    assert "It had used: look." in said


# A parent's end.


def family(child: dict[str, Any]) -> dict[str, Any]:
    return lead(child, shutdown=5.0)


async def test_abandoned_children_go_on(kernel: k.Kernel) -> None:
    """`on_parent_end="abandon"`: the parent's run ends at once, the child works on, its result stays its own."""
    await kernel.spawn("s", family(worker(k.script({"text": "alone", "delay": 0.5}), on_parent_end="abandon")))
    await kernel.send("s")
    kid = (await kernel.until("s", "child_spawned"))[-1]["data"]["child_id"]
    await kernel.until(kid, "model_call_started")
    await kernel.ask("cancel", "s", None, "enough")
    assert (await kernel.end("s"))["status"] == "cancelled"
    run = await kernel.end(kid, "task")
    assert (run["status"], run["text"]) == ("completed", "alone")


async def test_a_parent_may_wait(kernel: k.Kernel) -> None:
    """`on_parent_end="wait"`: the parent's run ends after the child, which nobody disturbed."""
    await kernel.spawn("s", family(worker(k.script({"text": "finished", "delay": 0.5}), on_parent_end="wait")))
    await kernel.send("s")
    kid = (await kernel.until("s", "child_spawned"))[-1]["data"]["child_id"]
    await kernel.until(kid, "model_call_started")
    await kernel.ask("cancel", "s", None, "enough")
    parent, child = await kernel.end("s"), await kernel.end(kid, "task")
    assert (parent["status"], child["status"]) == ("cancelled", "completed")
    assert parent["finished_at"] >= child["finished_at"]


async def test_results_of_a_parent_that_waits_for_its_children_to_end(stored: k.Kernel) -> None:
    """A run that waits for a person has a result of one sub-agent in its inbox, and another one at work, when it is
    cancelled: until that has ended, too, the books balance."""
    deaf, quick = worker(k.script([("does_not_listen", {})], "done"), [does_not_listen]), worker(name="quick")
    calls = [("spawn_agent", {"agent": name, "task": "t"}) for name in ("worker", "quick")]
    calls.append(("request_user_input", {"prompt": "Go on?"}))
    agents = {"worker": deaf, "quick": quick}
    await stored.spawn("s", k.spec(k.script(calls), ["request_user_input", "spawn_agent"], agents=agents))
    await stored.send("s")
    await Begun.number.acquire()
    await stored.until("s", "child_finished")
    await stored.ask("cancel", "s", None, "enough")
    stored.check()
    Begun.let_go.set()
    assert (await stored.end("s"))["status"] == "cancelled"
    assert (await stored.results())[1] == "offline: t"


async def test_a_question_of_a_parent_that_waits_for_its_children_to_end(stored: k.Kernel) -> None:
    """A run that asks a person and has a sub-agent at work is cancelled: until the sub-agent has ended, too, the run
    asks nothing more, and the books balance."""
    child = worker(k.script([("does_not_listen", {})], "done"), [does_not_listen])
    calls = [("request_user_input", {"prompt": "Go on?"}), ("spawn_agent", {"agent": "worker", "task": "t"})]
    await stored.spawn("s", k.spec(k.script(calls), ["request_user_input", "spawn_agent"], agents={"worker": child}))
    await stored.send("s")
    await Begun.number.acquire()
    assert len(await stored.paused("s")) == 1
    await stored.ask("cancel", "s", None, "enough")
    assert (await stored.info("s"))["status"] == "waiting_for_child"
    assert await stored.ask("read", "questions", ["s"], {}) == []
    stored.check()
    Begun.let_go.set()
    assert (await stored.end("s"))["status"] == "cancelled"


@pytest.mark.parametrize(("lifecycle", "closed"), [("ephemeral", True), ("linked", False), ("detached", False)])
async def test_lifecycles(kernel: k.Kernel, lifecycle: str, closed: bool) -> None:
    """After its task an ephemeral sub-agent takes no input; a linked one does until its parent is closed; a detached
    one for good."""
    await kernel.spawn("s", lead(worker(lifecycle=lifecycle)))
    await kernel.send("s")
    await kernel.end("s")
    [row] = await tree(kernel)
    kid = row["session_id"]
    assert bool((await kernel.info(kid))["closed"]) == closed
    if not closed:
        await kernel.send(kid, "more", "second")
        assert (await kernel.end(kid, "second"))["status"] == "completed"
    await kernel.ask("close", "s", "enough")
    assert bool((await kernel.info(kid))["closed"]) == (lifecycle != "detached")


@pytest.mark.parametrize("lifecycle", ["ephemeral", "linked"])
async def test_a_linked_child_of_a_child(kernel: k.Kernel, lifecycle: str) -> None:
    """A sub-agent that is linked to a sub-agent is closed with that, whatever closes it: its end, or its parent's."""
    inner = lead(worker(lifecycle="linked"))
    middle = {**inner, "name": "middle", "hash": "middle", "lifecycle": lifecycle}
    assert (await kernel.run("s", lead(middle)))["status"] == "completed"
    await kernel.ask("close", "s", "enough")
    rows = await tree(kernel)
    assert [row["agent"] for row in rows] == ["middle", "worker"]
    assert [bool((await kernel.info(row["session_id"]))["closed"]) for row in rows] == [True, True]
    kernel.check()


async def test_a_linked_child_whose_end_ends_its_parent(stored: k.Kernel) -> None:
    """Given a linked sub-agent of a sub-agent that asks a person, when the whole tree is cancelled, so that its end
    ends its parent in the same transaction, then it is closed with that, and the books balance."""
    asking = worker(k.script([("request_user_input", {"prompt": "?"})]), ["request_user_input"], lifecycle="linked")
    middle = {**lead(asking), "name": "middle", "hash": "middle"}
    await stored.spawn("s", lead(middle))
    await stored.send("s")
    async with asyncio.timeout(k.STUCK_SECONDS):
        while not (kids := await tree(stored)) or kids[-1]["agent"] == "middle":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await stored.paused(kids[-1]["session_id"])
    await stored.ask("cancel", "s", None, "enough")
    assert (await stored.end("s"))["status"] == "cancelled"
    assert [bool((await stored.info(row["session_id"]))["closed"]) for row in kids] == [True, True]
    stored.check()


async def test_a_linked_child_that_was_started_again(kernel: k.Kernel) -> None:
    """Given a linked sub-agent whose task was started again in another session, then both are closed with their
    parent."""
    flaky = worker(fails_first("linked", 1), restart_type="transient", lifecycle="linked")
    assert (await kernel.run("s", lead(flaky)))["status"] == "completed"
    kids = [row["session_id"] for row in await tree(kernel)]
    assert [bool((await kernel.info(kid))["closed"]) for kid in kids] == [False, False]
    await kernel.ask("close", "s", "enough")
    assert [bool((await kernel.info(kid))["closed"]) for kid in kids] == [True, True]


async def test_a_linked_child_whose_restart_is_given_up(stored: k.Kernel) -> None:
    """Given a linked sub-agent that failed, and waits for its group to stop before it is started again, when the parent
    is quarantined, then it stays linked: it is closed with the parent."""
    deaf = worker(k.script([("does_not_listen", {})]), [does_not_listen], name="deaf")
    fails = worker(
        k.script([("look_at_gate", {})]), [look_at_gate], name="fails", max_rounds=1, restart_type="transient",
        lifecycle="linked",
    )  # fmt: skip
    calls = [("spawn_agent", {"agent": name, "task": "t"}) for name in ("deaf", "fails")]
    compiled = k.spec(
        k.script([*calls, ("wait_for_ever", {})]), ["spawn_agent", wait_for_ever],
        agents={"deaf": deaf, "fails": fails}, supervision=supervision(strategy="one_for_all"),
        restart={**k.POLICY, "max_restarts": 0},
    )  # fmt: skip
    await stored.spawn("s", compiled)
    await stored.send("s")
    for _ in range(2):  # the sub-agent that goes on when cancelled, and the parent's own tool
        await Begun.number.acquire()
    Begun.gate.set()
    kids = {row["agent"]: row["session_id"] for row in await tree(stored)}
    await stored.until(kids["deaf"], "cancel_requested")
    frame = stored.holder("s")
    assert frame is not None
    stored.kill(frame)
    assert (await stored.end("s"))["status"] == "quarantined"
    stored.check()
    await stored.ask("close", "s", "enough")
    assert (await stored.info(kids["fails"]))["closed"]


@pytest.mark.parametrize("kills", [False, True])
async def test_no_child_appears_behind_a_cancel(stored: k.Kernel, kills: bool) -> None:
    """A tree that goes on spawning is cancelled in the midst of it, also with deaths during the walk: all of it ends,
    and nothing is created after."""
    inner = lead(*(worker(k.script({"text": "late", "delay": 5}), name=f"leaf{n}") for n in range(4)))
    middles = [{**inner, "name": f"middle{n}", "hash": f"m{n}", "max_depth": 2} for n in range(4)]
    await stored.spawn("s", lead(*middles))
    await stored.send("s")
    await stored.until("s", "child_spawned", 2)
    if kills:
        stored.on_point = lambda number, _label, process: stored.kill(process) if process and number % 7 == 0 else None
    await stored.ask("cancel", "s", None, "enough")
    assert (await stored.end("s"))["status"] == "cancelled"
    stored.on_point = None
    end = (await stored.ask("read", "run", ["s", "r"], {}))["finished_at"]
    rows = await tree(stored)
    assert {row["status"] for row in rows} == {"cancelled"}
    assert all(row["created_at"] <= end for row in rows)
    await asyncio.to_thread(stored.server.wait, lambda stats: stats.in_flight == 0)
    assert len(await tree(stored)) == len(rows)
