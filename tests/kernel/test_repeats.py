"""A model that asks for the same call again and again: warned, then stopped. The verdict depends on messages alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy import AgentSpec
from understudy.actors.repeats import REPEATED, repeats
from understudy.actors.tools import tool
from understudy.errors import InvalidSpec
from understudy.messages import Message, ToolCall

from . import kernel as k


def history(*rounds: list[tuple[str, str, str | None]]) -> list[Message]:
    """A run's messages: each round `(tool, arguments, result)` of its calls; None for no result yet."""
    found = [Message("user", "go")]
    for number, asked in enumerate(rounds, 1):
        calls = [ToolCall(f"r/{number}/{index}", name, text) for index, (name, text, _) in enumerate(asked)]
        found.append(Message("assistant", None, tuple(calls), round=number))
        for call, (_, _, result) in zip(calls, asked, strict=True):
            if result is not None:
                found.append(Message("tool", result, tool_call_id=call.call_id, round=number))
    return found


A, B = ("look", '{"x": 1, "y": 2}', "same"), ("look", '{"x": 2}', "same")
NOW = (*A[:2], None)


@pytest.mark.parametrize(
    ("rounds", "count"),
    [
        ([[NOW]], 1),
        ([[A], [A], [NOW]], 3),
        ([[A], [B], [NOW]], 1),
        ([[B], [A], [NOW]], 2),
        ([[("look", '{"y":2,"x":1}', "same")], [NOW]], 2),
        ([[("other", A[1], "same")], [NOW]], 1),
        ([[A], [(*A[:2], "other")], [A], [NOW]], 2),
        ([[A], [A], [(*A[:2], REPEATED)], [(*A[:2], REPEATED)], [NOW]], 5),
        ([[(*A[:2], "other")], [A], [(*A[:2], REPEATED)], [NOW]], 3),
        ([[B, A], [A, B], [B, NOW]], 3),
        ([[("look", "{broken", "x")], [("look", "{broken", None)]], 2),
    ],
    ids=[
        "first", "thrice", "another between", "another before", "spelled otherwise", "another tool", "another result",
        "warned before", "warned after progress", "among others", "unreadable",
    ],
)  # fmt: skip
def test_examples(rounds: Any, count: int) -> None:
    """The same tool and arguments in consecutive rounds, with one result, however its JSON is written."""
    messages = history(*rounds)
    asked = [message for message in messages if message.role == "assistant"][-1]
    call = next(call for call in asked.tool_calls if call.name == NOW[0] and (call.arguments in (NOW[1], "{broken")))
    assert repeats(messages, call.call_id) == count


@given(st.lists(st.sampled_from([[A], [B], [A, B], [(*A[:2], REPEATED)], [(*A[:2], "other")]]), max_size=12))
def test_bounds(rounds: Any) -> None:
    """Never more than there are rounds with that call at the end, and never fewer than with one more before them."""
    count = repeats(history(*rounds, [NOW]), f"r/{len(rounds) + 1}/0")
    same = 0
    for asked in reversed(rounds):
        if not any(call[:2] == A[:2] for call in asked):
            break
        same += 1
    assert 1 <= count <= same + 1
    assert count <= repeats(history([A], *rounds, [NOW]), f"r/{len(rounds) + 2}/0")


# In a session.


Ticks = {"count": 0}


@tool(on_crash="rerun")
async def tick() -> int:
    """Return another number each time."""
    Ticks["count"] += 1
    return Ticks["count"]


@pytest.fixture
async def kernel(tmp_path: Path) -> AsyncIterator[k.Kernel]:
    async with k.running(f"sqlite:///{tmp_path}/store.db", tmp_path) as made:
        yield made


async def outcomes(kernel: k.Kernel, session_id: str = "s") -> list[str]:
    found = [event["data"] for event in await kernel.events(session_id) if event["type"] == "tool_finished"]
    return [data["outcome"] for data in found]


def look_at(path: Path, rounds: int) -> str:
    """A model that asks for the same call in so many rounds."""
    return k.script(*[[("look", {"path": str(path), "text": "x"})]] * rounds, "done")


async def test_a_repeated_call_is_not_executed_again(kernel: k.Kernel, tmp_path: Path) -> None:
    """From the fourth round on the model reads that it has the result; when it goes on, so does the run."""
    path = tmp_path / "notes"
    run = await kernel.run("s", k.spec(look_at(path, 6), [k.look], repeat_limit=4))
    assert (run["status"], run["text"], run["rounds"]) == ("completed", "done", 7)
    assert (await outcomes(kernel), len(k.notes(path))) == (["ok"] * 3 + ["repeated"] * 3, 3)
    results = [m["content"] for m in await kernel.messages("s") if m["role"] == "tool"]
    assert results == ["noted x"] * 3 + [REPEATED] * 3


async def test_a_model_that_does_not_listen_is_stopped(kernel: k.Kernel, tmp_path: Path) -> None:
    """After twice as many rounds the run fails as `no_progress`; the session takes the next input."""
    path = tmp_path / "notes"
    run = await kernel.run("s", k.spec(look_at(path, 20), [k.look], repeat_limit=2))
    assert (run["status"], run["error"]["code"], run["rounds"]) == ("failed", "no_progress", 4)
    assert (await outcomes(kernel), len(k.notes(path))) == (["ok", "repeated", "repeated", "cancelled"], 1)
    assert (await kernel.info("s"))["status"] == "idle"


@pytest.mark.parametrize(("limit", "more"), [(0, {}), (None, {}), (4, {"other": True})], ids=["off", "old", "results"])
async def test_what_is_no_repetition(kernel: k.Kernel, tmp_path: Path, limit: int | None, more: Any) -> None:
    """Without a limit, in a session of a version that had none, or with another result each time (somebody who looks
    whether something is ready), every call is executed."""
    calls = [[("tick", {})]] * 9 if more else [[("look", {"path": str(tmp_path / "notes"), "text": "x"})]] * 9
    options = {} if limit is None else {"repeat_limit": limit}
    run = await kernel.run("s", k.spec(k.script(*calls, "done"), [k.look, tick], **options))
    assert (run["status"], await outcomes(kernel)) == ("completed", ["ok"] * 9)


async def test_the_verdict_is_the_same_after_a_death(kernel: k.Kernel, tmp_path: Path) -> None:
    """Given the frame dies before each step of the session, when others go on, then the same calls are executed."""
    path, killed = tmp_path / "notes", set[int]()

    def die(_number: int, label: str, worker: k.Worker | None) -> None:
        if label == "before step" and worker is not None and kernel.holder("s") is worker:
            rounds = kernel.server.stats.requests
            if rounds not in killed:
                killed.add(rounds)
                kernel.kill(worker)

    kernel.on_point = die
    run = await kernel.run("s", k.spec(look_at(path, 6), [k.look], repeat_limit=4))
    assert (run["status"], await outcomes(kernel)) == ("completed", ["ok"] * 3 + ["repeated"] * 3)
    assert len(killed) >= 6


@pytest.mark.parametrize("limit", [-1, 1, 1001])
def test_a_limit_that_makes_no_sense(limit: int) -> None:
    """1 would execute nothing at all."""
    with pytest.raises(InvalidSpec, match="repeat_limit"):
        AgentSpec(name="a", repeat_limit=limit)


SLEPT = ("wait", '{"seconds": 60}', "waited 60 seconds")


@pytest.mark.parametrize(
    ("rounds", "count"),
    [
        ([[A], [SLEPT, A], [NOW]], 1),
        ([[SLEPT, A], [A], [A], [NOW]], 3),
        ([[A], [SLEPT], [NOW]], 1),
    ],
)
def test_a_round_that_waited_begins_the_count_again(rounds: Any, count: int) -> None:
    """What is asked for after a time may have another result."""
    messages = history(*rounds)
    call_id = messages[-1].tool_calls[-1].call_id
    assert repeats(messages, call_id, {"wait"}) == count
