"""Sub-agents that a model writes: what becomes of the call, whatever it says and whatever dies."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from understudy.actors.delegating import offered

from .. import tiers
from . import kernel as k
from .deaths import Deaths

LIMITS = {"tools": ["wait"], "models": ["small"], "budget": None}


@pytest.fixture
async def kernel(store: str, tmp_path: Path) -> AsyncIterator[k.Kernel]:
    async with k.running(store, tmp_path, frames=2) as made:
        yield made


def lead(**call: Any) -> dict[str, Any]:
    """An agent whose model makes this call, and then says that it is done."""
    made = k.spec(k.script([("spawn_agent", {"task": "dig", **call})], "done"), ["spawn_agent", "wait"])
    tools = [offered(tool, LIMITS, {}) for tool in made["tools"]]
    return {**made, "tools": tools, "delegation": LIMITS}


def asked(kernel: k.Kernel) -> list[tuple[str, str, tuple[str, ...]]]:
    """Model, instructions and tools of each request of a sub-agent's."""
    found = []
    for body in (request.body for request in kernel.server.requests):
        tools = tuple(tool["function"]["name"] for tool in body.get("tools", ()))
        if tools != ("spawn_agent", "wait"):
            found.append((body["model"], body["messages"][0]["content"], tools))
    return found


async def test_half_a_character_costs_no_process(kernel: k.Kernel) -> None:
    """Given instructions and a task with half a character, as models send them, then the sub-agent has something else
    in its place, and no process dies."""
    ended = await kernel.run("s", lead(instructions="half \ud83d", task="half \ud83d"))
    assert (ended["status"], ended["text"]) == ("completed", "done")
    assert asked(kernel) == [("offline", "half ?", ("wait",))]
    assert "session_crashed" not in [event["type"] for event in await kernel.events("s")]
    results = [message["content"] for message in await kernel.messages("s") if message["role"] == "tool"]
    assert results == ["offline: half ?"]


@pytest.mark.sweep
@pytest.mark.conformance
@pytest.mark.parametrize("victim", ["frame", "node"])
async def test_a_call_that_is_repeated_creates_the_same_sub_agent(store: str, tmp_path: Path, victim: str) -> None:
    """Given a death at each point, then the transcripts are those without one, and one sub-agent is started, with the
    model, the instructions and the tools that its call says."""
    compiled = lead(instructions="Dig.", tools=["wait"], model="small")
    async with k.running(store, tmp_path) as kernel:

        async def play(session_id: str) -> tuple[Any, ...]:
            kernel.server.requests.clear()
            await kernel.run(session_id, compiled)
            await kernel.quiet()
            spawned = [event for event in await kernel.events(session_id) if event["type"] == "child_spawned"]
            return len(spawned), set(asked(kernel)), await kernel.transcript(session_id)

        clean = await play("clean")
        assert clean[:2] == (1, {("small", "Dig.", ("wait",))})
        points = len(kernel.points)
        for at in tiers.points(range(points), is_sqlite=kernel.service.database.is_sqlite):
            deaths = Deaths(kernel, f"s{at}", at, victim)
            found = await play(f"s{at}")
            kernel.on_point = None
            assert found == clean, deaths.where
            kernel.check(f"s{at}")
