"""Sub-agents in the background: started without being waited for, their ends reported once, whatever dies."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from understudy.agents import CHILD
from understudy.identifiers import child_identifier
from understudy.testing.offline import Reply, register_policy

from .. import tiers
from . import kernel as k

pytestmark = pytest.mark.conformance

TOOLS = ["agents", "jobs", "wait"]
NEWS = "Sub-agent "


@pytest.fixture
async def kernel(store: str, tmp_path: Path) -> AsyncIterator[k.Kernel]:
    async with k.running(store, tmp_path) as made:
        yield made


def lead(*replies: Any, worker: dict[str, Any] | None = None, marker: str = "lead", **more: Any) -> dict[str, Any]:
    """An agent whose model gives these replies to its inputs, one after the other, and says what it heard of its
    sub-agents if they are all given."""
    elements = json.loads(k.script(*replies).partition(": ")[2])

    def policy(body: dict[str, Any]) -> Reply:
        said = sum(message["role"] == "assistant" for message in body["messages"])
        if said >= len(elements):
            return Reply(
                text=f"heard {sum(NEWS in str(m['content']) for m in body['messages'] if m['role'] == 'user')}"
            )
        element = elements[said]
        calls = tuple((name, arguments) for name, arguments in element.get("tool_calls", ()))
        return Reply(element.get("text"), calls, delay=element.get("delay", 0.0))

    register_policy(marker, policy)
    agents = {"worker": worker} if worker else {}
    return k.spec(f"offline-policy: {marker}", TOOLS, agents=agents, **more)


def worker(*replies: Any, **more: Any) -> dict[str, Any]:
    """The specification of a sub-agent."""
    tools = more.pop("tools", ["wait"])
    return k.spec(k.script(*replies), tools, name="worker", hash="worker", **more)


def start(task: str = "dig") -> tuple[str, dict[str, Any]]:
    return "start_agent", {"task": task}


def child(index: int = 0, round_number: int = 1, run_id: str = "r") -> str:
    return child_identifier("s", f"{run_id}/{round_number}/{index}")


async def reported(kernel: k.Kernel, session_id: str = "s") -> list[str]:
    """The sub-agents whose ends were reported to the session's model, in order."""
    found = [message for message in await kernel.messages(session_id) if message.get("origin") == CHILD]
    assert all(message["role"] == "user" and message["content"].startswith(NEWS) for message in found)
    return [message["content"].removeprefix(NEWS).split()[0] for message in found]


async def ends(kernel: k.Kernel, session_id: str = "s") -> list[str]:
    """The sub-agents whose ends the session's log has, in order."""
    return [e["data"]["child_id"] for e in await kernel.events(session_id) if e["type"] == "child_finished"]


async def until_reported(kernel: k.Kernel, session_id: str = "s", count: int = 1) -> None:
    """Wait until so many ends of sub-agents were reported, and the runs that they are parts of have ended."""
    await kernel.until(session_id, "child_finished", count)
    for child_id in await ends(kernel, session_id):
        await kernel.end(session_id, f"news.{child_id}")


async def test_the_call_has_its_result_at_once(kernel: k.Kernel) -> None:
    """Given a sub-agent that works on, when the parent has started it, then the parent's run goes on and ends; the
    sub-agent's end begins another run of the parent, whose model has its answer."""
    await kernel.spawn("s", lead([start()], "it digs", worker=worker({"text": "a bone", "delay": 0.3})))
    await kernel.send("s")
    ended = await kernel.end("s")
    assert (ended["status"], ended["text"]) == ("completed", "it digs")
    assert await kernel.results() == [f"started sub-agent {child()}"]
    await until_reported(kernel)
    news = await kernel.end("s", f"news.{child()}")
    assert (news["status"], news["text"], news["source"]) == ("completed", "heard 1", CHILD)
    assert await reported(kernel) == [child()]
    assert "a bone" in (await kernel.messages("s"))[-2]["content"]


async def test_a_run_at_work_takes_the_news_at_its_next_round(kernel: k.Kernel) -> None:
    """Given a parent at work when its sub-agent ends, then the next model call of that run has the news, whose own run
    is a part of it."""
    replies = [start()], [("wait", {"seconds": 0.5})], "done"
    await kernel.spawn("s", lead(*replies, worker=worker("a bone")))
    await kernel.send("s")
    assert (await kernel.end("s"))["status"] == "completed"
    news = await kernel.end("s", f"news.{child()}")
    assert (news["merged_into"], news["text"], news["rounds"]) == ("r", "done", 0)
    assert await reported(kernel) == [child()]


async def test_news_that_wait_are_reported_together(kernel: k.Kernel) -> None:
    """Given three sub-agents that end while the parent's model answers, then one run reports all three."""
    await kernel.spawn(
        "s", lead([start("a"), start("b"), start("c")], {"text": "ok", "delay": 1.0}, worker=worker("x"))
    )
    await kernel.send("s")
    await until_reported(kernel, count=3)
    rows = [await kernel.end("s", f"news.{child_id}") for child_id in await ends(kernel)]
    assert [row.get("merged_into", "") for row in rows] == ["", *[rows[0]["run_id"]] * 2]
    assert {row["text"] for row in rows} == {"heard 3"}
    assert await reported(kernel) == await ends(kernel)


async def test_one_that_fails_is_reported_as_well(kernel: k.Kernel) -> None:
    """Given a sub-agent that fails, and a type that would be restarted, then its end is reported, and nothing else."""
    bad = k.spec("offline-script: not JSON", name="worker", hash="worker", restart_type="transient")
    await kernel.spawn("s", lead([start()], "ok", worker=bad))
    await kernel.send("s")
    await until_reported(kernel)
    [message] = [m["content"] for m in await kernel.messages("s") if m.get("origin") == CHILD]
    assert "ended as failed" in message
    assert "child_restarted" not in await kernel.types("s")


async def test_a_budget_refuses_a_start(kernel: k.Kernel) -> None:
    """Given a budget of one sub-agent, when two are started, then the second call's result says why it was not."""
    budget = [{"scope": "tree", "children": 1}]
    await kernel.spawn("s", lead([start("a")], [start("b")], "ok", worker=worker("x"), budget=budget))
    await kernel.send("s")
    await kernel.end("s")
    first, second = await kernel.results()
    assert first == f"started sub-agent {child()}"
    assert second.startswith("no sub-agent was started: ")
    await until_reported(kernel)


async def test_waiting_and_background_sub_agents_beside_each_other(kernel: k.Kernel) -> None:
    """Given a round that starts one and waits for another, then the round ends with the one that is waited for."""
    spec = lead([start(), ("spawn_agent", {"task": "t"})], "ok", worker=worker({"text": "dug", "delay": 0.1}))
    spec["tools"] += k.spec(tools=["spawn_agent"])["tools"]
    await kernel.spawn("s", spec)
    await kernel.send("s")
    await kernel.end("s")
    assert await kernel.results() == [f"started sub-agent {child()}", "dug"]
    await kernel.end("s", f"news.{child()}")
    assert await reported(kernel) == [child()]


LONG = [("wait", {"seconds": 3600})]


@pytest.mark.parametrize(("rule", "status"), [("cancel", "cancelled"), ("abandon", ""), ("wait", "")])
async def test_a_cancelled_run_and_what_it_has_started(kernel: k.Kernel, rule: str, status: str) -> None:
    """Given a run with a sub-agent in the background, when the run is cancelled, then the sub-agent ends or goes on as
    its specification says, and only under `wait` is its end reported."""
    helper = worker({"tool_calls": [["wait", {"seconds": 0.8 if not status else 3600}]]}, "dug", on_parent_end=rule)
    await kernel.spawn("s", lead([start()], LONG, worker=helper))
    await kernel.send("s")
    await kernel.until(child(), "timer_set")
    await kernel.until("s", "timer_set")
    await kernel.ask("cancel", "s", None, "enough")
    assert (await kernel.end("s"))["status"] == "cancelled"
    ended = await kernel.end(child(), "task")
    assert ended["status"] == (status or "completed")
    if rule == "wait":
        await until_reported(kernel)
    assert await reported(kernel) == ([child()] if rule == "wait" else [])


async def test_a_closed_session_ends_all_that_it_has_started(kernel: k.Kernel) -> None:
    """Given a session at rest with a sub-agent at work, when it is closed, then the sub-agent ends, nobody is
    notified, and the books balance."""
    await kernel.spawn("s", lead([start()], "ok", worker=worker(LONG)))
    await kernel.send("s")
    await kernel.end("s")
    await kernel.until(child(), "timer_set")
    await kernel.ask("close", "s", "over")
    assert (await kernel.end(child(), "task"))["status"] == "cancelled"
    assert await reported(kernel) == []


async def test_a_sub_agent_that_ends_for_good_ends_what_it_has_started(kernel: k.Kernel) -> None:
    """Given an ephemeral sub-agent that starts another in the background, when its task ends, then that one ends."""
    inner = worker(LONG)
    middle = {**lead([start("inner")], {"text": "off", "delay": 0.3}, worker=inner, marker="middle"), "name": "middle"}
    await kernel.spawn("s", lead([start("middle")], "ok", worker={**middle, "hash": "middle"}))
    await kernel.send("s")
    await until_reported(kernel)
    grandchild = child_identifier(child(), "task/1/0")
    assert (await kernel.end(grandchild, "task"))["status"] == "cancelled"


async def test_list_send_and_stop(kernel: k.Kernel) -> None:
    """Given a sub-agent at work, when its parent lists it, sends it a message and stops it, then each is answered at
    once, and its end is reported as cancelled."""
    replies = [
        [start()], [("wait", {"seconds": 0.5})], [("list_jobs", {})],
        [("send_to_agent", {"agent": child(), "message": "deeper"})], [("stop_job", {"job": child()})], "ok",
    ]  # fmt: skip
    await kernel.spawn("s", lead(*replies, worker=worker(LONG)))
    await kernel.send("s")
    await kernel.end("s")
    _, _, listed, sent, stopped = await kernel.results()
    state = r"at work \(\w+\), started \d+ seconds? ago: dig"
    assert re.fullmatch(rf"{re.escape(child())} \(sub-agent worker\): {state}", listed), listed
    assert sent == f"sub-agent {child()} is at work, and gets the message in its next turn"
    assert stopped == f"sub-agent {child()} is stopped"
    await until_reported(kernel)
    assert (await kernel.end(child(), "task"))["status"] == "cancelled"
    assert await reported(kernel) == [child()]


async def test_a_message_steers_a_sub_agent(kernel: k.Kernel) -> None:
    """Given a sub-agent at work, when its parent sends it a message, then its next model call has it."""
    wait = [("wait", {"seconds": 0.6})]
    replies = (
        [start()],
        [("wait", {"seconds": 0.2})],
        [("send_to_agent", {"agent": child(), "message": "deeper"})],
        "ok",
    )
    await kernel.spawn("s", lead(*replies, worker=k.spec("", ["wait"], name="worker", hash="worker")))
    task = f"call wait {json.dumps(wait[0][1])}"
    register_policy("lead", _with_task(task, replies))
    await kernel.send("s")
    await until_reported(kernel)
    steer = [m["content"] for m in await kernel.messages(child()) if m.get("origin") == "steer"]
    assert steer == ["deeper"]


def _with_task(task: str, replies: Any) -> Any:
    elements = json.loads(k.script(*replies).partition(": ")[2])
    elements[0]["tool_calls"][0][1]["task"] = task

    def policy(body: dict[str, Any]) -> Reply:
        said = sum(message["role"] == "assistant" for message in body["messages"])
        if said >= len(elements):
            return Reply(text="heard")
        calls = tuple((name, arguments) for name, arguments in elements[said].get("tool_calls", ()))
        return Reply(elements[said].get("text"), calls)

    return policy


async def test_a_finished_sub_agent_gets_another_task(kernel: k.Kernel) -> None:
    """Given a linked sub-agent that has finished, when its parent sends it a message, then that is a new task in the
    same conversation, and its end is reported again."""
    replies = [start()], [("wait", {"seconds": 0.5})], [("send_to_agent", {"agent": child(), "message": "more"})], "ok"
    await kernel.spawn("s", lead(*replies, worker=k.spec("", name="worker", hash="worker", lifecycle="linked")))
    await kernel.send("s")
    await kernel.end("s")
    assert (await kernel.results())[-1] == f"sub-agent {child()} has the message as a new task"
    await kernel.until("s", "run_accepted", 3)
    [again] = [e["run_id"] for e in await kernel.events("s") if e["type"] == "run_accepted"][2:]
    assert again.startswith(f"news.{child()}.task-")
    assert (await kernel.end("s", again))["status"] == "completed"
    assert await reported(kernel) == [child(), child()]
    texts = [m["content"] for m in await kernel.messages("s") if m.get("origin") == CHILD]
    assert texts[1].endswith("offline: more")


async def test_the_end_of_each_task_is_reported_also_of_one_that_was_merged(kernel: k.Kernel) -> None:
    """Given a linked sub-agent that merges its inputs, when its parent gives it two more tasks in one round, then they
    are one run of the sub-agent, and the parent learns of the end of each."""
    helper = k.spec("", name="worker", hash="worker", lifecycle="linked", follow_ups="merge")
    await kernel.spawn("s", k.spec("", TOOLS, agents={"worker": helper}))
    await kernel.send("s", f"call start_agent {json.dumps({'agent': 'worker', 'task': 'dig'})}\n")
    await kernel.end("s")
    await until_reported(kernel)
    tasks = ("more", "and more")
    messages = [json.dumps({"agent": child(), "message": message}) for message in tasks]
    await kernel.send("s", "".join(f"call send_to_agent {message}\n" for message in messages), run_id="r2")
    await kernel.end("s", "r2")
    runs = [e for e in await kernel.events(child()) if e["type"] == "run_finished"]
    async with asyncio.timeout(k.STUCK_SECONDS):
        while len(runs) < 3:
            runs = [e for e in await kernel.until(child(), "run_finished", 3) if e["type"] == "run_finished"]
    assert runs[2]["data"]["merged_into"] == runs[1]["run_id"]
    news = [e["run_id"] for e in await kernel.events("s") if e["type"] == "run_accepted" and CHILD in str(e["data"])]
    assert len(news) == 3
    for run_id in news:
        assert (await kernel.end("s", run_id))["status"] == "completed"
    assert await reported(kernel) == [child()] * 3


async def test_only_its_own_sub_agents(kernel: k.Kernel) -> None:
    """Given another session, when a model names it as its sub-agent, then it reads that it has none of that name."""
    await kernel.spawn("other", k.spec())
    await kernel.spawn(
        "s", lead([("send_to_agent", {"agent": "other", "message": "x"})], [("send_to_agent", {"agent": 5})], "ok")
    )
    await kernel.send("s")
    await kernel.end("s")
    refused, invalid = await kernel.results()
    assert refused == "you have started no sub-agent 'other': give the id that start_agent has said."
    assert invalid == 'the argument "agent" must be the id of a sub-agent that you have started.'


async def test_ids_that_are_none(kernel: k.Kernel) -> None:
    """Given ids that no store can look for, or names that are no texts, when a model gives them, then the result of the
    call says what is wrong, and the run goes on."""
    sends = [("send_to_agent", {"agent": "a\x00", "message": "x"}), ("stop_job", {"job": "a\x00"})]
    starts = [("start_agent", {"task": "dig", "agent": agent}) for agent in (["worker"], {}, 5, "worker\x00")]
    agents = {"worker": worker("dug"), "other": k.spec(name="other")}
    spec = k.spec(k.script([*sends, *starts], "ok"), [*TOOLS, "jobs"], agents=agents)
    assert (await kernel.run("s", spec))["status"] == "completed"
    results = await kernel.results()
    assert results[:2] == [
        'the argument "agent" must be the id of a sub-agent that you have started.',
        'the argument "job" must be the id of a job of yours.',
    ]
    assert results[2:] == ['the argument "agent" must be one of: other, worker.'] * 4


CHILDREN, KILLS = 64, 20


@pytest.mark.sweep
async def test_sixty_four_in_the_background_and_twenty_kills(store: str, tmp_path: Path) -> None:
    """Given 64 sub-agents started by one parent, when 20 frames are killed at random points, then each one's end is
    reported to the parent once, in the order of the ends."""
    chosen = random.Random(64)
    starts = [start(f"task {number}") for number in range(CHILDREN)]
    helper = worker({"tool_calls": [["wait", {"seconds": 0.05}]]}, "dug")
    async with k.running(store, tmp_path, frames=4) as kernel:
        kills: list[str] = []
        next_at = 20

        def on_point(number: int, label: str, victim: k.Worker | None) -> None:
            nonlocal next_at
            if number < next_at or len(kills) == KILLS:
                return
            alive = [one for one in kernel.workers.values() if not one.dead]
            target = victim if victim is not None and not victim.dead else chosen.choice(alive)
            next_at = number + chosen.randint(20, 60)
            kills.append(label)
            kernel.kill(target)

        kernel.on_point = on_point
        await kernel.spawn("s", lead(starts, "all at work", worker=helper, restart={**k.POLICY, "max_restarts": 1000}))
        await kernel.send("s")
        await until_reported(kernel, count=CHILDREN)
        kernel.on_point = None
        await kernel.quiet()
        assert len(kills) == KILLS, f"{len(kills)} kills, {len(kernel.points)} points"
        finished = await ends(kernel)
        assert sorted(finished) == sorted(child(index) for index in range(CHILDREN))
        assert await reported(kernel) == finished
        assert await kernel.results() == [f"started sub-agent {child(index)}" for index in range(CHILDREN)]
        kernel.check()


@pytest.mark.sweep
@pytest.mark.parametrize("victim", ["frame", "node"])
async def test_a_death_at_every_point(victim: str, tmp_path: Path) -> None:
    """Given a parent with two sub-agents in the background, when a frame or the node service dies at any point, then
    both are made once, and their ends reported once; no other model call is made than without a death."""
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path) as kernel:
        names = {"clean": await _pair(kernel, "clean")}
        points = len(kernel.points)
        problems = []
        for at in tiers.points(range(points)):
            session_id, begin = f"s{at}", len(kernel.points)

            def on_point(number: int, label: str, one: k.Worker | None, begin: int = begin, at: int = at) -> None:
                if number - begin == at:
                    if victim == "node":
                        kernel.kill_node()
                    else:
                        kernel.kill(one or next(iter(kernel.workers.values())))

            kernel.on_point = on_point
            found = await _pair(kernel, session_id)
            kernel.on_point = None
            await kernel.quiet()
            kernel.check(session_id)
            if found != names["clean"]:
                problems.append(f"point {at}: {found}")
        assert not problems, "\n".join(problems)


async def _pair(kernel: k.Kernel, session_id: str) -> tuple[Any, ...]:
    """What comes of a session that starts two sub-agents, without what names it."""
    await kernel.spawn(session_id, lead([start("a"), start("b")], "ok", worker=worker("dug")))
    await kernel.send(session_id)
    await kernel.end(session_id)
    await until_reported(kernel, session_id, 2)
    ids = [child_identifier(session_id, f"r/1/{index}") for index in range(2)]
    said = await reported(kernel, session_id)
    return sorted(map(ids.index, said)), said == await ends(kernel, session_id), len(await kernel.results(session_id))
