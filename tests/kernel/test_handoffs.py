"""Handoffs: a session goes on under another agent, in the same run, whatever dies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from understudy.actors.directives import Continue, Refuse, Stop
from understudy.actors.hooks import describe_hook, hook
from understudy.actors.tools import handoff_spec
from understudy.errors import Fenced, InvalidInput
from understudy.handoffs import ORIGIN, tool_name
from understudy.messages import FOLD, MEMORY
from understudy.node.node_service import NodeService
from understudy.records import Batch, Handoff
from understudy.testing.offline import OfflineServer
from understudy.testing.policies import Reply, content_text

from .. import tiers
from . import kernel as k
from .deaths import Deaths
from .test_context import INSTRUCTED

pytestmark = pytest.mark.conformance

SKIPPED = "never: this is what the agent before it said"
"""In a script: the offline model's counts the replies since the last input, whoever gave them."""


@pytest.fixture
async def kernel(store: str, tmp_path: Path) -> AsyncIterator[k.Kernel]:
    async with k.running(store, tmp_path) as made:
        yield made


def to(agent: str, **arguments: Any) -> tuple[str, dict[str, Any]]:
    """A call that hands off."""
    return tool_name(agent), arguments


def agent(name: str, *replies: Any, targets: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """An agent that may hand off to these."""
    made = k.spec(k.script(*replies), more.pop("tools", ()), name=name, hash=name, **more)
    return {**made, "tools": [*made["tools"], *map(handoff_spec, targets)]}


def session(first: dict[str, Any], *others: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What a session is spawned with, with the agents that it may come to be under."""
    return {**first, "handoffs": {other["name"]: other for other in others}, **more}


async def data(kernel: k.Kernel, kind: str, session_id: str = "s") -> list[dict[str, Any]]:
    return [event["data"] for event in await kernel.events(session_id) if event["type"] == kind]


def bodies(kernel: k.Kernel) -> list[dict[str, Any]]:
    return [request.body for request in kernel.server.requests]


async def test_the_next_request_is_the_other_agents(kernel: k.Kernel) -> None:
    """Given an agent that hands off, then the same run goes on: the next request has the whole conversation, and the
    other agent's instructions, tools, model and parameters; the event says from, to and why; the input of the next run
    is the other agent's from its beginning."""
    billing = agent("billing", SKIPPED, "paid", tools=[k.look], parameters={"temperature": 0.5}, max_rounds=1)
    triage = agent("triage", [to("billing", reason="money")], targets=("billing",), tools=["wait"])
    ended = await kernel.run("s", session(triage, billing))
    assert (ended["status"], ended["text"], ended["rounds"]) == ("completed", "paid", 2)
    first, second = bodies(kernel)
    assert [tool["function"]["name"] for tool in first["tools"]] == ["wait", "transfer_to_billing"]
    assert [tool["function"]["name"] for tool in second["tools"]] == ["look"]
    assert (second["messages"][0]["content"], second["temperature"]) == (billing["instructions"], 0.5)
    assert [message["role"] for message in second["messages"][1:]] == ["user", "assistant", "tool"]
    assert await kernel.results() == ["handed off: billing goes on from here"]
    assert await data(kernel, "agent_handed_off") == [
        {"call_id": "r/1/0", "from_agent": "triage", "to_agent": "billing", "reason": "money"}
    ]
    assert (await kernel.info("s"))["agent"] == "billing"
    named = [event["agent"] for event in await kernel.events("s") if event["type"] in ("run_started", "run_finished")]
    assert named == ["triage", "billing"]
    await kernel.send("s", "again", "r2")
    assert (await kernel.end("s", "r2"))["text"] == SKIPPED
    assert bodies(kernel)[2]["messages"][0] == second["messages"][0]


async def test_there_and_back_again(kernel: k.Kernel) -> None:
    """Given an agent whose target names it in its own handoffs, then the session goes there and back, and once more;
    `max_rounds` counts them all, and is the one of the agent that the session was spawned with."""
    triage = agent("triage", [to("billing")], SKIPPED, [to("billing")], targets=("billing",), max_rounds=4)
    billing = agent("billing", SKIPPED, [to("triage")], SKIPPED, [to("triage")], targets=("triage",), max_rounds=99)
    ended = await kernel.run("s", session(triage, billing))
    assert (ended["status"], ended["rounds"]) == ("round_limit", 4)
    went = [(event["from_agent"], event["to_agent"]) for event in await data(kernel, "agent_handed_off")]
    assert went == [("triage", "billing"), ("billing", "triage")] * 2
    assert (await kernel.info("s"))["agent"] == "triage"


async def test_other_calls_of_the_round_end_first(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given a round with a handoff, a tool and a second handoff, then the tool is executed and has its result, as the
    agent's that called it; the second handoff is refused, and its result says so."""
    notes = tmp_path / "notes"
    calls = [to("billing"), ("look", {"path": str(notes), "text": "x"}), to("legal")]
    triage = agent("triage", calls, targets=("billing", "legal"), tools=[k.look])
    billing, legal = agent("billing", SKIPPED, "paid"), agent("legal", SKIPPED, "sued")
    assert (await kernel.run("s", session(triage, billing, legal)))["text"] == "paid"
    results = await kernel.results()
    assert results[:2] == ["handed off: billing goes on from here", "noted x"]
    assert results[2].startswith("not executed: another handoff")
    finished = [(event["tool"], event["outcome"]) for event in await data(kernel, "tool_finished")]
    assert finished == [("transfer_to_legal", "refused"), ("look", "ok"), ("transfer_to_billing", "ok")]
    assert len(await data(kernel, "agent_handed_off")) == 1


async def test_a_handoff_waits_for_sub_agents_and_people(kernel: k.Kernel) -> None:
    """Given a round with a handoff beside a sub-agent and a question, then the session waits for both before it is
    handed off, and what they said is in the next request."""
    calls = [to("billing"), ("spawn_agent", {"task": "dig"}), ("request_user_input", {"prompt": "sure?"})]
    digger = k.spec(k.script("a bone"), name="digger", hash="digger")
    triage = agent(
        "triage", calls, targets=("billing",), tools=["spawn_agent", "request_user_input"], agents={"digger": digger}
    )
    await kernel.spawn("s", session(triage, agent("billing", SKIPPED, "paid")))
    await kernel.send("s")
    [asked] = await kernel.paused("s")
    assert not await data(kernel, "agent_handed_off")
    said = {"call_id": asked["call_id"], "asked": 1, "decision": "ok", "text": "yes"}
    await kernel.ask("decide", "s", [said])
    assert (await kernel.end("s"))["text"] == "paid"
    assert await kernel.results() == ["handed off: billing goes on from here", "a bone", "yes"]


@hook("before_tool")
def never(context: Any) -> Any:
    return Refuse("not on Fridays") if context.tool == "transfer_to_billing" else None


async def test_hooks_and_people_may_refuse_it(kernel: k.Kernel) -> None:
    """Given a hook that refuses the call, then the session stays under its agent, whose model reads why. Given a call
    that a person must approve, then it hands off once it is approved."""
    hooks = [describe_hook(never, pickle=None)[0]]
    triage = agent("triage", [to("billing")], "stays", targets=("billing",), hooks=hooks)
    assert (await kernel.run("s", session(triage, agent("billing", SKIPPED, "paid"))))["text"] == "stays"
    assert "not on Fridays" in (await kernel.results())[0]
    assert not await data(kernel, "agent_handed_off")
    careful = agent("triage", [to("billing")], targets=("billing",))
    careful["tools"][-1]["approve"] = True
    await kernel.spawn("t", session(careful, agent("billing", SKIPPED, "paid")))
    await kernel.send("t")
    [asked] = await kernel.paused("t")
    await kernel.ask("decide", "t", [{"call_id": asked["call_id"], "asked": 1, "decision": "approve", "text": ""}])
    assert (await kernel.end("t"))["text"] == "paid"


async def test_arguments_that_are_none_hand_nothing_off(kernel: k.Kernel) -> None:
    """Given a call with unreadable arguments, or a reason that is no text, then it is answered, and nothing changes."""
    bad = {"tool_calls": [["transfer_to_billing", "{"]]}
    triage = agent("triage", bad, [to("billing", reason=7)], "stays", targets=("billing",))
    assert (await kernel.run("s", session(triage, agent("billing"))))["text"] == "stays"
    assert [event["outcome"] for event in await data(kernel, "tool_finished")] == ["invalid", "invalid"]
    assert (await kernel.info("s"))["agent"] == "triage"


async def handing_off_beside_a_tool(kernel: k.Kernel, path: Path) -> asyncio.Event:
    """A session whose round hands off while a tool of it is at work; what lets that end when it is set."""
    begun, may_end = k.held_at_effect(kernel)
    calls = [to("billing"), ("look", {"path": str(path / "notes"), "text": "x"})]
    triage = agent("triage", calls, targets=("billing",), tools=[k.look])
    await kernel.spawn("s", session(triage, agent("billing", SKIPPED, "paid")))
    await kernel.send("s")
    await begun.wait()
    return may_end


async def test_a_cancel_ends_the_run_and_nobody_is_handed_off_half(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given a run that is cancelled while another tool of the round is at work, then the handoff was not begun: its
    result says so, and the session is under the agent that it was under."""
    may_end = await handing_off_beside_a_tool(kernel, tmp_path)
    await kernel.ask("cancel", "s", None, "enough")
    assert (await kernel.end("s"))["status"] == "cancelled"
    may_end.set()
    assert (await kernel.results())[0] == "cancelled"
    assert (await kernel.info("s"))["agent"] == "triage"


@hook("after_tools")
def stop(context: Any) -> Any:
    return Stop("that is all")


@hook("run_end")
def goes_on(context: Any) -> Any:
    return Continue("go on")


async def test_a_run_that_ends_with_its_handoff_leaves_the_session_to_the_other(kernel: k.Kernel) -> None:
    """Given a hook that stops the run once the handoff has its result, then the next run is the other agent's. Given
    one more hook that has the run go on, then that is under the other agent."""
    hooks = [describe_hook(stop, pickle=None)[0]]
    triage = agent("triage", [to("billing")], targets=("billing",), hooks=hooks)
    spec = session(triage, agent("billing", "hello"))
    assert (await kernel.run("s", spec))["text"] == "that is all"
    assert (await kernel.info("s"))["agent"] == "billing"
    await kernel.send("s", "again", "r2")
    assert (await kernel.end("s", "r2"))["text"] == "hello"
    more = {**spec, "hooks": [*hooks, describe_hook(goes_on, pickle=None)[0]]}
    await kernel.run("t", more)
    assert (await kernel.end("t"))["text"] == "hello"  # the first reply after the message that had it go on
    assert len(await data(kernel, "agent_handed_off", "t")) == 1


async def test_the_sessions_budget_stays(kernel: k.Kernel) -> None:
    """Given a session with a budget of rounds, when it is handed off to an agent that has a larger one of its own, then
    its own holds."""
    triage = agent("triage", [to("billing")], targets=("billing",), budget=[{"scope": "tree", "rounds": 2}])
    look = [("look", {"path": "/dev/null", "text": "x"})]
    billing = agent("billing", SKIPPED, look, "paid", tools=[k.look], budget=[{"scope": "tree", "rounds": 99}])
    ended = await kernel.run("s", session(triage, billing))
    assert (ended["status"], ended["rounds"]) == ("budget_exceeded", 2)


async def test_memory_of_the_next_agent_is_shown(kernel: k.Kernel) -> None:
    """Given agents with notes of their own, when the session is handed off, then the next request shows the other
    agent's notes, once."""
    memory = {"scopes": ["agent"], "project": None, "max_tokens": 500, "share": 0.1, "providers": [], "timeout": 5}
    note = [("add_note", {"key": "k", "text": "billing is closed", "scope": "agent"})]
    await kernel.run("before", agent("billing", note, "ok", tools=["notes"]))
    look = [("look", {"path": "/dev/null", "text": "x"})]
    triage = agent("triage", [to("billing")], targets=("billing",), memory=memory)
    await kernel.run("s", session(triage, agent("billing", SKIPPED, look, "paid", tools=[k.look], memory=memory)))
    shown = [message for message in await kernel.messages("s") if message.get("origin") == MEMORY]
    assert ["billing is closed" in message["content"] for message in shown] == [True]
    assert [str(body["messages"]).count("billing is closed") for body in bodies(kernel)[-3:]] == [0, 1, 1]


async def test_spawned_again_it_stays_where_it_is(kernel: k.Kernel) -> None:
    """Given a session that was handed off, when it is spawned again with what it was spawned with, then nothing
    changes. With other instructions, and the same agents, it goes on under the same agent, in the new form; with
    others, under the new first one."""
    triage = agent("triage", [to("billing")], targets=("billing",))
    spec = session(triage, agent("billing", SKIPPED, "paid"), on_change="migrate")
    await kernel.run("s", spec)
    assert not (await kernel.spawn("s", spec))["created"]  # type: ignore[index]
    assert (await kernel.info("s"))["agent"] == "billing"
    assert "session_migrated" not in await kernel.types("s")
    newer = session(triage, agent("billing", "new"), on_change="migrate", hash="newer")
    await kernel.spawn("s", newer)
    await kernel.send("s", "again", "r2")
    assert (await kernel.end("s", "r2"))["text"] == "new"
    assert [event["changed"] for event in await data(kernel, "session_migrated")] == [["handoffs.billing"]]
    await kernel.spawn("s", {**agent("triage", "alone"), "hash": "newest", "on_change": "migrate"})
    await kernel.send("s", "again", "r3")
    assert (await kernel.end("s", "r3"))["text"] == "alone"
    assert (await kernel.info("s"))["agent"] == "triage"


async def test_a_fork_is_under_the_agent_of_that_place(kernel: k.Kernel) -> None:
    """Given a session that was handed off, when it is forked before that, or behind it, then the fork goes on under the
    agent that the session had there."""
    triage = agent("triage", [to("billing")], "still here", targets=("billing",))
    await kernel.run("s", session(triage, agent("billing", "later", "paid")))
    messages = await kernel.messages("s")
    places = {"before": 0, "behind": messages[-1]["seq"]}
    for name, at in places.items():
        await kernel.ask("fork", "s", {"session_id": name, "at": at})
    assert [(await kernel.info(name))["agent"] for name in places] == ["triage", "billing"]
    await kernel.send("behind", "again")
    assert (await kernel.end("behind"))["text"] == "later"
    await kernel.send("before", "again")
    assert (await kernel.end("before"))["text"] == "paid"


async def test_a_sub_agent_that_is_started_again_begins_with_the_first(kernel: k.Kernel) -> None:
    """Given a sub-agent that hands off and then fails, when its task is started again, then under the agent that it was
    created with; the parent gets what the last one says."""
    triage = agent("triage", [to("billing")], targets=("billing",), restart_type="transient")
    child = session(triage, agent("billing", SKIPPED, {"finish_reason": "length"}, parameters={}, max_continuations=0))
    child["handoffs"]["billing"]["instructions"] = "offline-script: not JSON"
    supervision = {
        "strategy": "one_for_one", "max_restarts": 1, "period": 60, "backoff": 0.0, "backoff_max": 0.0, "jitter": 0.0,
        "reset_after": 60, "exceeded": "report",
    }  # fmt: skip
    spawn = [("spawn_agent", {"task": "dig"})]
    lead = k.spec(k.script(spawn, "ok"), ["spawn_agent"], agents={"triage": child}, supervision=supervision)
    await kernel.run("s", lead)
    spawned = [event["child_id"] for event in await data(kernel, "child_spawned")]
    assert len(spawned) == 2
    for child_id in spawned:
        kinds = [event["agent"] for event in await kernel.events(child_id) if event["type"] == "run_started"]
        assert kinds == ["triage"]
        assert len(await data(kernel, "agent_handed_off", child_id)) == 1


async def test_what_was_counted_of_the_agent_before_does_not_count(tmp_path: Path) -> None:
    """Given an agent of few words whose endpoint counted what it was sent, when it hands off to one with instructions
    that do not fit into the window beside the history, then that is summarised first: no request is refused, and
    nothing else is taken for the window."""
    brief = {"max_tokens": 100}
    patient = agent("billing", context={"window": 4_000}, parameters=brief)
    patient["instructions"] = "You are patient. " * 470
    triage = {**agent("triage", targets=("billing",), tools=[k.look]), "instructions": ""}

    def policy(body: dict[str, Any]) -> Reply:
        if content_text(body["messages"][-1]).startswith(INSTRUCTED):
            return Reply(text="a summary")
        if "patient" in content_text(body["messages"][0]):
            return Reply(text="paid")
        looked = sum(message["role"] == "tool" for message in body["messages"])
        look = ("look", {"path": "/dev/null", "text": f"{looked} {'lorem ipsum ' * 45}"})
        return Reply(tool_calls=(look if looked < 7 else to("billing"),))

    with OfflineServer(policy, window=4_000) as server:
        async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, server=server) as kernel:
            assert (await kernel.run("s", session(triage, patient)))["text"] == "paid"
            assert await data(kernel, "model_call_failed") == []
            folds = [message for message in await kernel.messages("s") if message.get("origin") == FOLD]
    assert {(fold["content"], fold["extra"].get("window", 0)) for fold in folds} == {("a summary", 0)}


async def test_another_placement_takes_the_session_elsewhere(kernel: k.Kernel) -> None:
    """Given a target that needs another process, then the session goes on in such a one."""
    other = kernel.add_frame("other")
    triage = agent("triage", [to("billing")], targets=("billing",))
    ended = await kernel.run("s", session(triage, agent("billing", SKIPPED, "paid", placement="other")))
    assert ended["text"] == "paid"
    frames = [event["frame_id"] for event in await data(kernel, "session_activated")]
    assert frames[-1] == other.frame_id
    assert len(frames) == 2


async def test_a_batch_that_names_another_call_is_refused(kernel: k.Kernel) -> None:
    """Given a batch that would hand off by a call which hands off to nobody, then it is refused and nothing changes."""
    begun, may_end = k.held_at_effect(kernel)
    look = [("look", {"path": "/dev/null", "text": "x"})]
    await kernel.spawn("s", session(agent("triage", look, "ok", tools=[k.look]), agent("billing")))
    await kernel.send("s")
    await begun.wait()
    holder = kernel.holder("s")
    assert holder is not None
    assert holder.frame.activation is not None
    window = holder.frame.activation.window
    batch = Batch("s", window.incarnation, window.epoch, window.batch_no + 1, handoff=Handoff("r/1/0"))
    with pytest.raises(InvalidInput):
        await kernel.service.commit(holder.frame_id, batch)
    may_end.set()
    assert (await kernel.end("s"))["text"] == "ok"
    assert (await kernel.info("s"))["agent"] == "triage"


async def test_a_steer_that_comes_with_the_handoff_reaches_the_other(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given a steer that is accepted while the last tool of the round is at work, then the other agent's first request
    has it."""
    begun, may_end = k.held_at_effect(kernel)
    calls = [to("billing"), ("look", {"path": str(tmp_path / "notes"), "text": "x"})]
    triage = agent("triage", calls, targets=("billing",), tools=[k.look])
    await kernel.spawn("s", session(triage, agent("billing", "with the steer")))
    await kernel.send("s")
    await begun.wait()
    await kernel.ask("steer", "s", {"content": "be quick"})
    may_end.set()
    assert (await kernel.end("s"))["text"] == "with the steer"
    assert bodies(kernel)[-1]["messages"][-1]["content"] == "be quick"
    assert len(bodies(kernel)) == 2


# Deaths.


def asked(kernel: k.Kernel, start: int) -> list[str]:
    return [json.dumps(body, sort_keys=True) for body in bodies(kernel)[start:]]


async def messages_of(kernel: k.Kernel, session_id: str) -> list[Any]:
    messages = await kernel.messages(session_id)
    return [(m["role"], m["content"], m.get("origin", ""), m["round"]) for m in messages]


@pytest.mark.sweep
@pytest.mark.parametrize("victim", ["frame", "node"])
async def test_a_death_at_every_point(victim: str, tmp_path: Path) -> None:
    """Given a run that is handed off, does something there and is handed back, when the frame or the node service dies
    at any point of it, then each handoff happened once, and the messages and requests are what they are without."""
    look = [("look", {"path": str(tmp_path / "notes"), "text": "x"})]
    triage = agent("triage", [to("billing", reason="a"), *look], SKIPPED, SKIPPED, "done", targets=("billing",),
                   tools=[k.look])  # fmt: skip
    billing = agent("billing", SKIPPED, look, [to("triage", reason="b")], targets=("triage",), tools=[k.look])
    spec = session(triage, billing)
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path) as kernel:
        start = len(kernel.points)
        await kernel.run("clean", spec)
        points, wanted, requests = len(kernel.points) - start, await messages_of(kernel, "clean"), asked(kernel, 0)
        assert [entry[2] for entry in wanted].count(ORIGIN) == 2
        for at in tiers.points(range(points + 4)):
            name, before = f"s{at}", len(kernel.server.requests)
            deaths = Deaths(kernel, name, at, victim)
            assert (await kernel.run(name, spec))["text"] == "done", deaths.where
            kernel.on_point = None
            await kernel.quiet()
            kernel.check(name)
            assert await messages_of(kernel, name) == wanted, deaths.where
            made = asked(kernel, before)
            assert set(made) == set(requests), deaths.where
            assert victim == "node" or made == requests, deaths.where
            went = [(event["from_agent"], event["to_agent"]) for event in await data(kernel, "agent_handed_off", name)]
            assert went == [("triage", "billing"), ("billing", "triage")], deaths.where


HELD: list[asyncio.Event] = []
"""Of the hook below: set when it was called, and what lets it end."""


@hook("after_tool")
async def held(context: Any) -> None:
    if context.tool == "transfer_to_billing":
        HELD[0].set()
        await HELD[1].wait()


@pytest.mark.parametrize("turns", range(2, 12))
async def test_no_commit_has_its_result_alone(turns: int, tmp_path: Path) -> None:
    """Given a run that is cancelled while the hook behind the handoff ends, and that commits what a sub-agent has said
    meanwhile, then the handoff's result is in no other commit than the one that hands off, however close they are."""
    HELD[:] = asyncio.Event(), asyncio.Event()
    calls = [to("billing"), ("spawn_agent", {"task": "dig"}), ("look", {"path": "/dev/null", "text": "x"})]
    triage = agent(
        "triage", calls, targets=("billing",), tools=["spawn_agent", k.look],
        agents={"digger": k.spec(k.script("a bone"), name="digger", hash="digger")},
        hooks=[describe_hook(held, pickle=None)[0]],
    )  # fmt: skip
    send, step, commit, watched, results = k.Link._send, NodeService.step, NodeService.commit, asyncio.Event(), []

    async def sent(link: k.Link, method: str, arguments: Any) -> Any:
        if method == "interrupted":
            watched.set()
        found = await send(link, method, arguments)
        if method == "interrupted":
            HELD[1].set()
            for _ in range(turns):
                await asyncio.sleep(0)
        return found

    def note(batch: Batch | None) -> None:
        for call in batch.calls if batch is not None else ():
            if call.call_id == "r/1/0":
                results.append((call.state, batch.handoff is not None))

    async def stepped(service: NodeService, call: Any) -> Any:
        note(call.batch)
        return await step(service, call)

    async def committed(service: NodeService, frame_id: str, batch: Batch) -> Any:
        note(batch)
        return await commit(service, frame_id, batch)

    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path) as kernel:
        begun, may_end = k.held_at_effect(kernel)
        with (
            patch.object(k.Link, "_send", sent),
            patch.object(NodeService, "step", stepped),
            patch.object(NodeService, "commit", committed),
        ):
            await kernel.spawn("s", session(triage, agent("billing")))
            await kernel.send("s")
            await begun.wait()
            await kernel.until("s", "child_finished")
            watched.clear()
            may_end.set()
            await HELD[0].wait()
            await watched.wait()
            await kernel.ask("cancel", "s", None, "enough")
            assert (await kernel.end("s"))["status"] == "cancelled"
        assert results == [("done", True)]
        assert len(await data(kernel, "agent_handed_off")) == 1


async def test_a_late_batch_of_the_agent_before_is_fenced(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given a session that was handed off, when a batch of the activation before comes late, then it is fenced."""
    may_end = await handing_off_beside_a_tool(kernel, tmp_path)
    holder = kernel.holder("s")
    assert holder is not None
    assert holder.frame.activation is not None
    before = holder.frame.activation.window.activation
    may_end.set()
    await kernel.end("s")
    with pytest.raises(Fenced):
        await kernel.service.commit(holder.frame_id, Batch(*before, 99))
