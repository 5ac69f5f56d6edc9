"""What features do to each other: approvals and interrupts, hooks and folds, typed output and steering."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from msgspec import to_builtins

from understudy.actors.directives import Continue, HookContext, Inject, Refuse, Replace, Stop
from understudy.actors.hooks import describe_hook, hook
from understudy.actors.tools import ToolContext, tool
from understudy.actors.typed_output import FINAL_ANSWER
from understudy.protocol import Decision
from understudy.testing.offline import OfflineServer
from understudy.testing.policies import Reply, content_text

from . import kernel as k
from .test_context import INSTRUCTED, Stepping, step


@tool(approve=True)
async def pay(path: str, context: ToolContext) -> str:
    """Have an effect that nobody may have without approval."""
    await k.effect(path, context)
    return "paid"


@tool(on_crash="rerun")
async def lasts() -> str:
    """Go on for ever."""
    await asyncio.Event().wait()
    return "never"


def replies(body: dict[str, Any]) -> Reply:
    """The input's replies, one after the other, whatever else is said."""
    wanted = json.loads(next(m["content"] for m in body["messages"] if m["role"] == "user"))
    reply = wanted[sum(message["role"] == "assistant" for message in body["messages"])]
    if isinstance(reply, str):
        return Reply(reply)
    return Reply(tool_calls=tuple((name, arguments) for name, arguments in reply))


@pytest.fixture
async def kernel(tmp_path: Path) -> AsyncIterator[k.Kernel]:
    with OfflineServer(replies) as server:
        async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, server=server) as made:
            yield made


async def decide(kernel: k.Kernel, decision: str, *calls: str, **more: str) -> Any:
    """What a person says of calls of the session that ask for the first time."""
    return await kernel.ask("decide", "s", [to_builtins(Decision(call_id, 1, decision, **more)) for call_id in calls])


async def steer(kernel: k.Kernel, *, interrupt: bool = True) -> None:
    await kernel.ask("steer", "s", {"content": "left", "interrupt": interrupt})


async def results(kernel: k.Kernel) -> list[tuple[str, str]]:
    """Each call of the session with its result."""
    return [(m["tool_call_id"], m["content"]) for m in await kernel.messages("s") if m["role"] == "tool"]


async def begin(kernel: k.Kernel, *replies: Any, asks: int = 1, **more: Any) -> None:
    """Start a run whose first round asks for approval while another tool of it is at work."""
    await kernel.spawn("s", k.spec("", [pay, lasts, "request_user_input"], **more))
    await kernel.send("s", json.dumps(replies))
    await kernel.until("s", "input_requested", asks)


async def test_an_interrupt_gives_up_approvals_beside_tools_at_work(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given a call that waits for approval beside a tool at work, when the run is interrupted, then the call is given
    up, as where the session had left its process, and nothing is left of the question."""
    await begin(kernel, [("pay", {"path": str(tmp_path / "notes")}), ("lasts", {})], "done")
    await steer(kernel)
    assert (await kernel.end("s"))["status"] == "completed"
    found = dict(await results(kernel))
    assert found["r/1/0"].startswith("given up")
    assert found["r/1/1"] == "cancelled"


async def test_a_remembered_decision_counts_behind_an_interrupt(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given a call that was rejected for the whole session beside a tool at work, when the run is interrupted, then
    later calls of the tool are asked about no more, in the same process as well."""
    call = ("pay", {"path": str(tmp_path / "notes")})
    await begin(kernel, [call, ("lasts", {})], [call], "done")
    await decide(kernel, "reject", "r/1/0", text="no", remember="tool")
    await steer(kernel)
    assert (await kernel.end("s"))["status"] == "completed"
    found = [text for name, text in await results(kernel) if name != "r/1/1"]
    assert found == ["not executed: it was not approved: no"] * 2


async def test_an_interrupt_does_not_execute_what_was_approved(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given a call that was approved beside a tool at work, when the run is interrupted, then it is not begun."""
    await begin(kernel, [("pay", {"path": str(tmp_path / "notes")}), ("lasts", {})], "done")
    await decide(kernel, "approve", "r/1/0", remember="tool")
    await steer(kernel)
    assert (await kernel.end("s"))["status"] == "completed"
    assert await results(kernel) == [("r/1/0", "cancelled"), ("r/1/1", "cancelled")]
    assert k.notes(tmp_path / "notes") == []


@pytest.mark.parametrize("kind", ["approval", "question"])
async def test_what_a_person_said_before_a_cancel_is_the_result(kernel: k.Kernel, tmp_path: Path, kind: str) -> None:
    """Given an answer that was accepted beside a tool at work, when the run is cancelled, then it is its call's."""
    call = ("pay", {"path": str(tmp_path / "notes")}) if kind == "approval" else ("request_user_input", {"prompt": "?"})
    await begin(kernel, [call, ("lasts", {})], "done")
    await decide(kernel, *(("reject",) if kind == "approval" else ("ok",)), "r/1/0", text="no")
    await kernel.ask("cancel", "s", "r", "enough")
    assert (await kernel.end("s"))["status"] == "cancelled"
    said = {"approval": "not executed: it was not approved: no", "question": "no"}
    assert dict(await results(kernel))["r/1/0"] == said[kind]


async def test_a_remembered_decision_counts_where_the_process_goes_on(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given a call that was rejected for the whole session, and an interrupt, of both of which a process hears with the
    result of another tool, when it goes on to the next round, then it has the record of the decision."""
    begun, may_end = k.held_at_effect(kernel)
    call = ("pay", {"path": str(tmp_path / "notes")})
    note = ("note", {"path": str(tmp_path / "noted"), "text": "x"})
    await kernel.spawn("s", k.spec("", [pay, lasts, k.note]))
    await kernel.send("s", json.dumps([[call, note, ("lasts", {})], [call], "done"]))
    await begun.wait()
    await kernel.until("s", "input_requested")
    await decide(kernel, "reject", "r/1/0", text="no", remember="tool")
    with patch.object(kernel.service.interrupts, "interrupt"):  # the notice is lost
        await steer(kernel)
    may_end.set()
    assert (await kernel.end("s"))["status"] == "completed"
    assert (await kernel.types("s")).count("input_requested") == 1


# Hooks.

WANTED: dict[str, Any] = {}
"""What the hook of each point returns; a function is called with the context."""


def _wanted(context: HookContext) -> Any:
    wanted = WANTED.get(context.point)
    return wanted(context) if callable(wanted) else wanted


@hook("run_start")
def run_start(context: HookContext) -> Any:
    return _wanted(context)


@hook("before_model")
async def before_model(context: HookContext) -> Any:
    wanted = _wanted(context)
    return await wanted if inspect.isawaitable(wanted) else wanted


@hook("after_model")
async def after_model(context: HookContext) -> None:
    wanted = _wanted(context)
    if wanted is not None:
        await wanted


@hook("after_tools")
def after_tools(context: HookContext) -> Any:
    return _wanted(context)


@hook("run_end")
def run_end(context: HookContext) -> Any:
    return _wanted(context)


@pytest.fixture(autouse=True)
def clean() -> None:
    WANTED.clear()


def hooked(*hooks: Any, **more: Any) -> dict[str, Any]:
    return {"hooks": [describe_hook(item, pickle=None)[0] for item in hooks], **more}


async def test_a_message_for_the_next_request_is_in_it_behind_a_fold(tmp_path: Path) -> None:
    """Given a hook that adds a message for the next round behind each round of tools, when the history is folded before
    that, then the request behind the fold has the message, and each of the others the latest only."""
    WANTED["after_tools"] = lambda context: Inject(f"mind {context.round}!", visibility="this_round")
    with OfflineServer(Stepping(20), window=2_000) as server:
        async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, server=server) as kernel:
            compiled = k.spec("", [step], context={"window": 2_000}, max_rounds=1_000, **hooked(after_tools))
            assert (await kernel.run("s", compiled))["status"] == "completed"
        asked = [[content_text(m) for m in request.body["messages"]] for request in server.requests]
    folds = [texts for texts in asked if texts[-1].startswith(INSTRUCTED)]
    others = [texts for texts in asked if not texts[-1].startswith(INSTRUCTED)]
    assert folds
    assert all(sum(text.startswith("mind ") for text in texts) == 1 for texts in others[1:])
    assert not any(text.startswith("mind ") for texts in folds for text in texts)


async def test_a_message_for_the_next_request_is_in_it_once_where_that_is_made_anew(tmp_path: Path) -> None:
    """Given a hook that adds a message for one round, and another that does so before each model call, when a call is
    interrupted before the model said anything, then the next one has each of these messages once."""
    WANTED["run_start"] = Inject("from the start", visibility="this_round")
    WANTED["before_model"] = Inject("before", visibility="this_round")

    def slow(body: dict[str, Any]) -> Reply:
        steered = any(content_text(message) == "left" for message in body["messages"])
        return Reply("done", delay=0.0 if steered else 60.0)

    with OfflineServer(slow) as server:
        async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path, server=server) as kernel:
            await kernel.spawn("s", k.spec("", **hooked(run_start, before_model)))
            await kernel.send("s")
            await kernel.until("s", "model_call_started")
            await steer(kernel)
            assert (await kernel.end("s"))["status"] == "completed"
        last = [content_text(m) for m in list(server.requests)[-1].body["messages"] if m["role"] == "user"]
    assert last == ["go", "left", "from the start", "before"]


async def test_a_request_that_is_made_anew_for_a_steer_has_what_hooks_want_now(
    kernel: k.Kernel, tmp_path: Path
) -> None:
    """Given a steer that is accepted while a hook before the model is called, then the hook is called again, and of
    what it wanted for this call only the latest is in the request; so it is where the call is made again."""
    called = []

    async def wanted(context: HookContext) -> Any:
        called.append(context.round)
        if called != [1, 2]:
            return Inject(f"mind {len(called)}", visibility="this_round")
        await steer(kernel, interrupt=False)
        return [Inject("mind 2", visibility="this_round"), Replace(parameters={"temperature": 0.5})]

    WANTED["before_model"] = wanted
    note = ("note", {"path": str(tmp_path / "notes"), "text": "x"})
    await kernel.spawn("s", k.spec("", [k.note], **hooked(before_model)))
    await kernel.send("s", json.dumps([[note], "done"]))
    assert (await kernel.end("s"))["status"] == "completed"
    last = list(kernel.server.requests)[-1].body
    said = [content_text(message) for message in last["messages"] if message["role"] == "user"]
    assert (called, said[1:], last.get("temperature")) == ([1, 2, 2], ["left", "mind 3"], None)


async def test_a_hook_that_stops_a_run_is_not_overruled_by_a_steer(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given a hook that stops the run behind a round, when the run is steered meanwhile, then it ends with the hook's
    text all the same, and the log says that the steer was dropped."""
    begun, may_end = k.held_at_effect(kernel)
    WANTED["after_tools"] = Stop("enough")
    await kernel.spawn("s", k.spec("", [k.note], **hooked(after_tools)))
    await kernel.send("s", json.dumps([[("note", {"path": str(tmp_path / "notes"), "text": "x"})], "done"]))
    await begun.wait()
    await steer(kernel, interrupt=False)
    may_end.set()
    ended = await kernel.end("s")
    assert (ended["status"], ended["text"]) == ("completed", "enough")
    assert "steer_dropped" in await kernel.types("s")


async def test_a_hook_that_refuses_and_goes_on_refuses(kernel: k.Kernel) -> None:
    """Given a hook at the end of a run that returns both, then the run is refused."""
    WANTED["run_end"] = [Continue("more"), Refuse("no")]
    await kernel.spawn("s", k.spec("", **hooked(run_end)))
    await kernel.send("s", json.dumps(["done", "done", "done"]))
    ended = await kernel.end("s")
    assert (ended["status"], ended["error"]["code"]) == ("failed", "refused")


# Typed output.

OUTPUT = {
    "name": "Verdict", "mode": "tool", "retries": 1, "strict": True, "wrapped": False,
    "schema": {"type": "object", "properties": {"years": {"type": "integer"}}, "required": ["years"],
               "additionalProperties": False},
}  # fmt: skip


def final(years: Any) -> tuple[str, dict[str, Any]]:
    return FINAL_ANSWER, {"years": years}


async def test_a_run_whose_final_answer_is_a_call_can_go_on(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given an agent that gives its answer by a tool, and a hook that lets the run go on, then it does: the model
    reads why, and its next answer ends the run."""
    WANTED["run_end"] = lambda context: Continue("once more") if "1" in context.text else None
    await kernel.spawn("s", k.spec("", [k.note], output=OUTPUT, **hooked(run_end)))
    note = ("note", {"path": str(tmp_path / "notes"), "text": "x"})
    await kernel.send("s", json.dumps([[note, final(1)], [final(2)]]))
    ended = await kernel.end("s")
    assert (ended["status"], ended["output"]) == ("completed", {"years": 2})
    kernel.check()


async def test_a_run_that_goes_on_behind_a_final_answer_can_reach_its_limit(kernel: k.Kernel) -> None:
    """The same where no round is left: the run ends at the limit, each call with one result."""
    WANTED["run_end"] = lambda context: Continue("once more") if context.outcome == "completed" else None
    await kernel.spawn("s", k.spec("", output=OUTPUT, max_rounds=1, **hooked(run_end)))
    await kernel.send("s", json.dumps([[final(1)], [final(2)]]))
    assert (await kernel.end("s"))["status"] == "round_limit"
    assert len(await results(kernel)) == 1
    kernel.check()


async def test_answers_that_were_accepted_are_no_retries(kernel: k.Kernel) -> None:
    """Given a run that goes on twice behind answers that fit, when the next one does not, then the model is asked again
    as often as the agent allows."""
    WANTED["run_end"] = lambda context: Continue("once more") if int(json.loads(context.text)["years"]) < 3 else None
    await kernel.spawn("s", k.spec("", output=OUTPUT, **hooked(run_end)))
    await kernel.send("s", json.dumps([[final(1)], [final(2)], [final("x")], [final(3)]]))
    ended = await kernel.end("s")
    assert (ended["status"], ended["output"]) == ("completed", {"years": 3})


async def test_a_final_answer_before_a_steer_is_no_retry(kernel: k.Kernel) -> None:
    """Given an answer that fits, of a run that is steered before it ends, when the next one does not fit, then the
    model is asked again all the same."""
    steered = []

    async def wanted(context: HookContext) -> None:
        if not steered:
            steered.append(context.round)
            await steer(kernel, interrupt=False)

    WANTED["after_model"] = wanted
    await kernel.spawn("s", k.spec("", output=OUTPUT, **hooked(after_model)))
    await kernel.send("s", json.dumps([[final(1)], [final("x")], [final(3)]]))
    ended = await kernel.end("s")
    assert (ended["status"], ended["output"]) == ("completed", {"years": 3})


# Forks.


async def test_what_is_remembered_of_a_session_is_not_of_its_fork(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given a tool that a person approved for a session, when the session is forked, then calls of the fork ask."""
    call = ("pay", {"path": str(tmp_path / "notes")})
    await begin(kernel, [call], "done", [call], "done")
    await decide(kernel, "approve", "r/1/0", remember="tool")
    assert (await kernel.end("s"))["status"] == "completed"
    last = (await kernel.messages("s"))[-1]["seq"]
    await kernel.ask("fork", "s", {"session_id": "f", "at": last})
    await kernel.send("f", "again")
    [asked] = await kernel.paused("f")
    assert asked["kind"] == "approval"
    await kernel.send("s", "again", "r2")
    assert (await kernel.end("s", "r2"))["status"] == "completed"
    assert len(k.notes(tmp_path / "notes")) == 2


# Questions of merged runs, and hooks that see what a person edited.


@hook("after_tool")
def after_tool(context: HookContext) -> None:
    EDITED.append(context.arguments)


EDITED: list[Any] = []


async def test_a_hook_sees_edited_arguments_however_the_call_ends(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given a call that was approved with other arguments beside a tool at work, when the run is interrupted, then the
    hook behind the call is given these."""
    EDITED.clear()
    await begin(kernel, [("pay", {"path": str(tmp_path / "a")}), ("lasts", {})], "done", **hooked(after_tool))
    edited = {"path": str(tmp_path / "b")}
    await decide(kernel, "approve", "r/1/0", text=json.dumps(edited))
    await steer(kernel)
    assert (await kernel.end("s"))["status"] == "completed"
    assert edited in EDITED
