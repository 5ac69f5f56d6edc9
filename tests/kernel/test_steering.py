"""Steering: what was accepted for a run is sent to its model once, in order, or the log says that it was dropped."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from understudy import HookContext, Inject, hook
from understudy.actors.hooks import describe_hook
from understudy.actors.tools import tool
from understudy.errors import InvalidInput, NotRunning
from understudy.records import STEER
from understudy.store.journal import Journal
from understudy.store.operations.endings import request_cancel
from understudy.testing.offline import Refusal, Reply, register_policy

from .. import tiers
from . import kernel as k
from .deaths import Deaths


def two_rounds(body: dict[str, Any]) -> Reply:
    """Two calls, one after the other, whatever else is said; then what was said."""
    messages = [message for message in body["messages"] if message["role"] != "system"]
    results = [message for message in messages if message["role"] == "tool"]
    if len(results) < 2:
        return Reply(tool_calls=(("look", {"path": messages[0]["content"], "text": str(len(results))}),))
    return Reply(" ".join(message["content"] for message in messages if message["role"] == "user"))


def cut_off(body: dict[str, Any]) -> Reply:
    """Half a reply to all but a message that steers."""
    last = body["messages"][-1]["content"]
    return Reply("offline: left") if last == "left" else Reply("half of", finish_reason="length")


def refuses(_body: dict[str, Any]) -> Reply:
    """An error that no repetition cures."""
    raise Refusal(400, "no")


for name, policy in (("two rounds", two_rounds), ("cut off", cut_off), ("refuses", refuses)):
    register_policy(name, policy)


def calling(name: str, **arguments: Any) -> str:
    """An input that has the model make this call, until another message comes."""
    return f"call {name} {json.dumps(arguments)}\n"


@hook("run_end")
def sees_ends(_context: HookContext) -> None:
    """Nothing comes of it."""


@tool(on_crash="rerun")
async def lasts() -> str:
    """Go on for ever."""
    await asyncio.Event().wait()
    return "never"


@tool
async def acts() -> str:
    """Go on for ever; in doubt after a crash."""
    await asyncio.Event().wait()
    return "never"


@pytest.fixture
async def kernel(store: str, tmp_path: Path) -> AsyncIterator[k.Kernel]:
    async with k.running(store, tmp_path) as made:
        yield made


async def steer(kernel: k.Kernel, content: Any = "left", *, interrupt: bool = False, session_id: str = "s") -> str:
    """Accept it; returns the run that it is for."""
    found = await kernel.ask("steer", session_id, {"content": content, "interrupt": interrupt})
    return str(found["run_id"])


async def said(kernel: k.Kernel, session_id: str = "s") -> list[tuple[str, Any]]:
    """The session's messages: role and text, those that steer by their origin."""
    found = await kernel.messages(session_id)
    return [(message.get("origin") or message["role"], message["content"]) for message in found]


def asked(kernel: k.Kernel) -> list[list[tuple[str, Any]]]:
    """What each request to the model had, without its instructions."""
    bodies = [request.body["messages"] for request in kernel.server.requests]
    return [[(m["role"], m["content"]) for m in body if m["role"] != "system"] for body in bodies]


async def in_flight(kernel: k.Kernel, session_id: str = "s") -> None:
    """Start a run whose answer waits for `release`."""
    kernel.server.hold()
    await kernel.send(session_id)
    await kernel.until(session_id, "model_call_started")
    await asyncio.to_thread(kernel.server.wait, lambda stats: stats.in_flight == 1)


@pytest.mark.parametrize("point", [None, sees_ends], ids=["ended by the store", "ended by its process"])
async def test_a_final_answer_does_not_end_a_run_that_was_steered(kernel: k.Kernel, point: Any) -> None:
    """Given a run that waits for its model, when it is steered and the final answer comes, then the model is sent the
    message behind that answer, and the run ends with the answer to it."""
    hooks = [describe_hook(point, pickle=None)[0]] if point is not None else []
    await kernel.spawn("s", k.spec(hooks=hooks))
    await in_flight(kernel)
    assert await steer(kernel) == "r"
    kernel.server.release()
    run = await kernel.end("s")
    assert (run["status"], run["text"], run["rounds"]) == ("completed", "offline: left", 2)
    first = ("user", "go"), ("assistant", "offline: go")
    assert await said(kernel) == [*first, (STEER, "left"), ("assistant", "offline: left")]
    assert asked(kernel) == [[("user", "go")], [*first, ("user", "left")]]


async def test_what_steers_a_run_is_behind_the_results_of_its_round(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given a run whose tool is at work, when it is steered twice, then the model is sent the tool's result and then
    both messages, in order."""
    begun, may_end = k.held_at_effect(kernel)
    path = str(tmp_path / "notes")
    await kernel.spawn("s", k.spec(tools=[k.note]))
    await kernel.send("s", calling("note", path=path, text="a"))
    await begun.wait()
    await steer(kernel, "left")
    await steer(kernel, [{"type": "text", "text": "right"}])
    may_end.set()
    assert (await kernel.end("s"))["status"] == "completed"
    found = [entry for entry in await said(kernel) if entry[0] != "assistant"]
    parts = [{"type": "text", "text": "right"}]
    assert found[1:] == [("tool", "noted a"), (STEER, "left"), (STEER, parts)]
    assert asked(kernel)[1][-3:] == [("tool", "noted a"), ("user", "left"), ("user", parts)]


async def test_a_steer_wakes_nobody(kernel: k.Kernel) -> None:
    """Given a run that waits for a person, when it is steered, then it waits on; the model is sent the message behind
    the answer."""
    await kernel.spawn("s", k.spec(tools=["request_user_input"]))
    await kernel.send("s", calling("request_user_input", prompt="which?"))
    [asks] = await kernel.paused("s")
    await steer(kernel)
    info = await kernel.info("s")
    assert (info["status"], info["frame_id"]) == ("waiting_for_input", None)
    await kernel.ask("answer", "s", asks["call_id"], "ok", "this one", asks["asked"])
    assert (await kernel.end("s"))["status"] == "completed"
    assert [entry for entry in await said(kernel) if entry[0] in ("tool", STEER)] == [
        ("tool", "this one"), (STEER, "left"),
    ]  # fmt: skip


async def test_who_has_no_run_can_not_be_steered(kernel: k.Kernel) -> None:
    """Given a session without a run, or with one that was asked to end, when it is steered, then that is refused and
    the error says to send; nothing changes."""
    await kernel.spawn("s", k.spec())
    with pytest.raises(NotRunning, match="Use `send`"):
        await steer(kernel)
    with pytest.raises(InvalidInput):
        await steer(kernel, "  ")
    await in_flight(kernel)
    journal = kernel.service.journal
    await Journal.submit_all(journal, [lambda tx: request_cancel(tx, tx.session("s"), "enough")], "s")
    with pytest.raises(NotRunning):
        await steer(kernel)
    kernel.server.release()
    assert (await kernel.end("s"))["status"] == "cancelled"
    with pytest.raises(NotRunning):
        await steer(kernel)
    assert "steer_dropped" not in await kernel.types("s")


@pytest.mark.parametrize("how", ["cancel", "limit", "failure"])
async def test_a_run_that_ends_otherwise_drops_what_was_to_steer_it(kernel: k.Kernel, how: str) -> None:
    """Given a run that was steered, when it is cancelled, reaches its limit or fails before the model was sent that,
    then an event in front of its end says that it was dropped, and the next run does not have it."""
    instructions = "offline-policy: refuses" if how == "failure" else ""
    await kernel.spawn("s", k.spec(instructions, max_rounds=1 if how == "limit" else 20))
    await in_flight(kernel)
    await steer(kernel)
    if how == "cancel":
        await kernel.ask("cancel", "s", "r", "enough")
    kernel.server.release()
    status = {"cancel": "cancelled", "limit": "round_limit", "failure": "failed"}[how]
    assert (await kernel.end("s"))["status"] == status
    events = await kernel.events("s")
    [dropped] = [event for event in events if event["type"] == "steer_dropped"]
    assert (dropped["data"]["status"], len(dropped["data"]["steers"]), dropped["run_id"]) == (status, 1, "r")
    assert dropped["seq"] < next(event["seq"] for event in events if event["type"] == "run_finished")
    await kernel.send("s", run_id="q")
    await kernel.end("s", "q")
    assert STEER not in dict(await said(kernel))


async def test_a_steer_that_is_repeated_is_one(kernel: k.Kernel) -> None:
    """Given a request to steer that is sent twice, then the model is sent the message once."""
    await kernel.spawn("s", k.spec())
    await in_flight(kernel)
    for _ in range(2):
        await kernel.call("request", "steer", "s", {"content": "left"}, "the-same")
    kernel.server.release()
    await kernel.end("s")
    assert [entry[0] for entry in await said(kernel)].count(STEER) == 1


async def test_a_steer_that_was_refused_stays_refused(kernel: k.Kernel) -> None:
    """Given a request to steer that was refused, when an attempt of it arrives once there is a run, then that one is
    refused as well, and the run's model is not sent the message."""
    await kernel.spawn("s", k.spec())
    for _ in range(2):
        with pytest.raises(NotRunning, match="no run is at work"):
            await kernel.call("request", "steer", "s", {"content": "left"}, "the-same")
        await in_flight(kernel)
    kernel.server.release()
    await kernel.end("s")
    assert STEER not in dict(await said(kernel))


async def test_a_reply_that_was_cut_off_is_not_continued_but_steered(kernel: k.Kernel) -> None:
    """Given a reply that reached its longest length, when the run was steered, then the model is sent the message
    instead of being asked to continue, and the run's text is the answer to it."""
    await kernel.spawn("s", k.spec("offline-policy: cut off"))
    await in_flight(kernel)
    await steer(kernel)
    kernel.server.release()
    run = await kernel.end("s")
    assert [entry[0] for entry in await said(kernel)] == ["user", "assistant", STEER, "assistant"]
    assert run["text"] == "offline: left"


def steer_before_step(kernel: k.Kernel, is_due: Callable[[], Awaitable[bool]], *, interrupt: bool = False) -> None:
    """Steer the run once, before a step of its process that has not heard of it."""
    done = asyncio.Event()

    async def steer_first() -> None:
        if not done.is_set() and await is_due():
            done.set()
            await steer(kernel, interrupt=interrupt)

    k.before_step(kernel, steer_first)


async def test_a_reply_that_is_being_continued_stays_one(kernel: k.Kernel) -> None:
    """Given a process that is about to have a reply continued, when the run is steered before that commit, then both
    messages are sent, and the run's text has the piece that was cut off and the rest."""
    await kernel.spawn("s", k.spec("offline-policy: cut off", hooks=[describe_hook(sees_ends, pickle=None)[0]]))

    async def is_due() -> bool:
        return "model_call_completed" in await kernel.types("s")

    await kernel.send("s")
    steer_before_step(kernel, is_due)
    run = await kernel.end("s")
    origins = ["user", "assistant", "continuation", STEER, "assistant"]
    assert [entry[0] for entry in await said(kernel)] == origins
    assert run["text"] == "half ofoffline: left"


# Interrupting.


async def test_an_interrupted_model_call_is_an_answer_and_the_run_goes_on(kernel: k.Kernel) -> None:
    """Given a model call in flight of which nothing has come, when the run is interrupted, then the endpoint's
    connection is closed, nothing is made of it, and the next round has the message."""
    await kernel.spawn("s", k.spec())
    await in_flight(kernel)
    await steer(kernel, interrupt=True)
    await asyncio.to_thread(kernel.server.wait, lambda stats: stats.aborted == 1)
    kernel.server.release()
    run = await kernel.end("s")
    assert (run["status"], run["text"], run["rounds"]) == ("completed", "offline: left", 2)
    assert await said(kernel) == [("user", "go"), (STEER, "left"), ("assistant", "offline: left")]
    [failed] = [event for event in await kernel.events("s") if event["type"] == "model_call_failed"]
    assert failed["data"]["error_code"] == "aborted"
    kernel.check("s")


async def test_what_an_interrupted_model_has_said_is_kept_and_paid(store: str, tmp_path: Path) -> None:
    """Given an answer that has come in part, when the run is interrupted, then that part is a message with the usage
    that it is estimated at, also where the answer would have ended the run."""
    async with k.running(store, tmp_path, chunk_delay=0.1) as kernel:
        await kernel.spawn("s", k.spec(k.script({"text": "one two three four five six seven eight nine ten" * 9})))
        await kernel.send("s")
        await kernel.until("s", "model_call_started")
        async with asyncio.timeout(k.STUCK_SECONDS):
            while not any(call.parts.lengths for call in kernel.gateway.calls._calls.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await steer(kernel, interrupt=True)
        run = await kernel.end("s")
        assert run["status"] == "completed"
        assert [entry[0] for entry in await said(kernel)] == ["user", "assistant", STEER, "assistant"]
        part = (await kernel.messages("s"))[1]
        assert part["content"]
        assert part["extra"]["finish_reason"] == "aborted"
        first, second = [e["data"]["usage"] for e in await kernel.events("s") if e["type"] == "model_call_completed"]
        assert first[1] > 0
        assert first[4] is True
        assert run["usage"][1] == first[1] + second[1]


@pytest.mark.parametrize("function", [lasts, acts])
async def test_interrupted_tools_are_cancelled_and_the_run_goes_on(kernel: k.Kernel, function: Any) -> None:
    """Given a tool that has long been at work, when the run is interrupted, then it is cancelled, its call has that as
    its result, and the model is sent the message behind it."""
    await kernel.spawn("s", k.spec(tools=[function]))
    await kernel.send("s", calling(function.__name__))
    await kernel.until_watched()
    await steer(kernel, interrupt=True)
    run = await kernel.end("s")
    assert (run["status"], run["rounds"]) == ("completed", 2)
    assert [entry[0] for entry in await said(kernel)] == ["user", "assistant", "tool", STEER, "assistant"]
    assert (await said(kernel))[2][1] == "cancelled"
    assert "cancel_requested" not in await kernel.types("s")


async def test_an_interrupt_gives_up_questions_and_waits(kernel: k.Kernel) -> None:
    """Given a session in no frame that waits for a person and a time, when it is interrupted, then both calls have a
    result, nothing is asked any more, and the run goes on with the message."""
    calls = calling("request_user_input", prompt="which?") + calling("wait", seconds=3600)
    await kernel.spawn("s", k.spec(tools=["request_user_input", "wait"]))
    await kernel.send("s", calls)
    await kernel.paused("s")
    await steer(kernel, interrupt=True)
    assert (await kernel.end("s"))["status"] == "completed"
    assert [entry[0] for entry in await said(kernel)] == ["user", "assistant", "tool", "tool", STEER, "assistant"]
    outcomes = [e["data"]["outcome"] for e in await kernel.events("s") if e["type"] == "tool_finished"]
    assert sorted(outcomes) == ["aborted", "cancelled"]
    assert await kernel.ask("read", "questions", ["s"], {}) == []


async def test_an_interrupt_leaves_sub_agents_at_work(kernel: k.Kernel) -> None:
    """Given a session that waits for its sub-agent, when it is interrupted, then the sub-agent goes on, and the message
    is sent behind its result."""
    child = k.spec(tools=["request_user_input"], name="helper")
    await kernel.spawn("s", k.spec(tools=["spawn_agent"], agents={"helper": child}))
    task = calling("request_user_input", prompt="where?")
    await kernel.send("s", calling("spawn_agent", agent="helper", task=task))
    events = await kernel.until("s", "child_spawned")
    child_id = next(event["data"]["child_id"] for event in events if event["type"] == "child_spawned")
    [asks] = await kernel.paused(child_id)
    await steer(kernel, interrupt=True)
    assert (await kernel.info("s"))["status"] == "waiting_for_child"
    await kernel.ask("answer", child_id, asks["call_id"], "ok", "here", asks["asked"])
    assert (await kernel.end("s"))["status"] == "completed"
    found = [entry for entry in await said(kernel) if entry[0] in ("tool", STEER)]
    assert found == [("tool", "offline: here"), (STEER, "left")]


async def test_an_interrupt_that_meets_the_commit_of_a_round_has_no_call_made(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given a process that is about to ask its model, when the run is interrupted before that commit, then nothing is
    asked without the message."""
    path = str(tmp_path / "notes")
    await kernel.spawn("s", k.spec(tools=[k.look]))

    async def is_due() -> bool:
        return bool(k.notes(Path(path)))

    steer_before_step(kernel, is_due, interrupt=True)
    await kernel.send("s", calling("look", path=path, text="a"))
    run = await kernel.end("s")
    assert (run["status"], run["rounds"]) == ("completed", 2)
    assert [len(request) for request in asked(kernel)] == [1, 4]
    assert asked(kernel)[1][-1] == ("user", "left")


@pytest.mark.parametrize("name", ["spawn_agent", "start_agent"])
async def test_an_interrupt_that_meets_the_commit_of_a_spawn_starts_no_sub_agent(kernel: k.Kernel, name: str) -> None:
    """Given a process that is about to start a sub-agent, when the run is interrupted before that commit, then none is
    started, its call says so, and the run goes on with the message."""
    child = k.spec(k.script([("wait", {"seconds": 3600})], "dug"), ["wait"], name="helper")
    await kernel.spawn("s", k.spec(tools=[name], agents={"helper": child}))
    done, point = asyncio.Event(), kernel.point

    async def held(label: str, worker: k.Worker | None) -> None:
        if label == "before commit" and not done.is_set():
            done.set()
            await steer(kernel, interrupt=True)
        await point(label, worker)

    kernel.point = held  # type: ignore[method-assign]
    await kernel.send("s", calling(name, agent="helper", task="dig"))
    run = await kernel.end("s")
    assert (run["status"], done.is_set()) == ("completed", True)
    assert "child_spawned" not in await kernel.types("s")
    none = "no sub-agent was started: the run was interrupted. Go on without it."
    found = [entry for entry in await said(kernel) if entry[0] in ("tool", STEER)]
    assert found == [("tool", none), (STEER, "left")]
    kernel.check("s")


REMINDED: list[bool] = []
"""Whether what the hook did might have been done before, each time it was called."""


@hook("before_model")
def reminds(context: HookContext) -> list[Inject]:
    """Add a message that stays, and one for the call only."""
    REMINDED.append(context.redone)
    stays = f"reminder {len(REMINDED)}"
    return [Inject(stays), Inject(f"only {len(REMINDED)}", visibility="this_round")]


@pytest.mark.parametrize("interrupt", [False, True], ids=["steer", "interrupt"])
async def test_what_a_hook_adds_to_a_call_that_is_prepared_again_is_added_once(
    kernel: k.Kernel, tmp_path: Path, interrupt: bool
) -> None:
    """Given a hook that adds to each model call, when the run is steered before the commit of a call that was prepared
    without the message, then the hook is called again, and only what it adds then is in the log and in the request."""
    REMINDED.clear()
    hooks = [describe_hook(reminds, pickle=None)[0]]
    await kernel.spawn("s", k.spec("offline-policy: two rounds", [k.look], hooks=hooks))

    async def is_due() -> bool:
        return len(REMINDED) == 2

    steer_before_step(kernel, is_due, interrupt=interrupt)
    await kernel.send("s", str(tmp_path / "notes"))
    run = await kernel.end("s")
    assert (run["status"], run["rounds"]) == ("completed", 3)
    assert REMINDED == [False, False, True, False]
    added = [content for origin, content in await said(kernel) if origin == "hook:reminds"]
    assert added == ["reminder 1", "only 1", "reminder 3", "only 3", "reminder 4", "only 4"]
    assert [content for _, content in asked(kernel)[1]][-4:] == ["noted 0", "left", "reminder 3", "only 3"]
    kernel.check("s")


# Deaths.


async def steered_run(kernel: k.Kernel, session_id: str, path: Path, *, interrupt: bool) -> list[str]:
    """A run of two rounds of tools that is steered at its first tool and at its second model call."""
    texts: list[str] = []
    await kernel.spawn(session_id, k.spec("offline-policy: two rounds", [k.look]))
    await kernel.send(session_id, str(path))

    async def when(event: str, count: int, text: str) -> None:
        await kernel.until(session_id, event, count)
        try:
            await steer(kernel, text, interrupt=interrupt, session_id=session_id)
            texts.append(text)
        except NotRunning:
            pass

    await asyncio.gather(when("model_call_completed", 1, "first"), when("model_call_started", 2, "second"))
    return texts


@pytest.mark.sweep
@pytest.mark.parametrize("interrupt", [False, True], ids=["steer", "interrupt"])
@pytest.mark.parametrize("victim", ["frame", "node"])
async def test_a_death_anywhere_loses_no_steer_and_doubles_none(
    store: str, tmp_path: Path, victim: str, interrupt: bool
) -> None:
    """Given a death of the frame or the node service at any point of a run that is steered, then each message that was
    accepted is in the log once, in order; and what the model is sent in a round begins with what it was sent before."""
    async with k.running(store, tmp_path) as kernel:
        for at in tiers.points(range(0, 60, 2 if interrupt else 1), is_sqlite=kernel.service.database.is_sqlite):
            session_id = f"s{at}"
            deaths = Deaths(kernel, session_id, at, victim)
            texts = await steered_run(kernel, session_id, tmp_path / f"notes{at}", interrupt=interrupt)
            run = await kernel.end(session_id)
            kernel.on_point = None
            await kernel.quiet()
            where = deaths.where
            assert run["status"] == "completed", f"{where}: {run['error']}"
            found = [text for origin, text in await said(kernel, session_id) if origin == STEER]
            assert found == texts, where
            kernel.check(session_id)
            mine = [body for body in asked(kernel) if body[0][1] == str(tmp_path / f"notes{at}")]
            for before, after in itertools.pairwise(mine):
                assert after[: len(before)] == before or before[: len(after)] == after, where
