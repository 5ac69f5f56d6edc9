"""What features do to each other: approvals and interrupts, hooks and folds, typed output and steering."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from msgspec import to_builtins

from understudy.actors.tools import ToolContext, tool
from understudy.protocol import Decision
from understudy.testing.offline import OfflineServer
from understudy.testing.policies import Reply

from . import kernel as k


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
