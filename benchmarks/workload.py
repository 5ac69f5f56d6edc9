"""What the measured agents do. Frames import this module for its tools, so it imports as little as they do."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from understudy import AgentSpec, WorkflowContext, tool, workflow

MODEL_CALLS, TOOL_CALLS = 4, 3


@tool(on_crash="rerun")
async def lookup(city: str) -> str:
    """Look a city up.

    Args:
        city: its name.
    """
    return f"{city}: 7 degrees"


@tool
async def note(city: str) -> str:
    """Note a city. It is not `rerun`, so its start is an event.

    Args:
        city: its name.
    """
    return f"{city}: noted"


@tool
async def linger(seconds: float) -> str:
    """Take some time. It is not `rerun`, so its start is an event.

    Args:
        seconds: how long.
    """
    await asyncio.sleep(seconds)
    return "done"


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """An element of a script: the model asks for one tool call."""
    return {"tool_calls": [[name, arguments]]}


def scripted(script: list[dict[str, Any]]) -> str:
    """Instructions that make the endpoint play a script (`understudy.testing.policies.policy_from_script`)."""
    return "offline-script: " + json.dumps(script)


def agent(name: str, script: list[dict[str, Any]], **fields: Any) -> AgentSpec:
    """An agent whose model plays a script."""
    fields.setdefault("tools", [lookup, linger])
    return AgentSpec(name=name, instructions=scripted(script), **fields)


def rounds_of(tool_name: str, delay: float) -> list[dict[str, Any]]:
    """Four model calls of `delay` seconds, and three calls of a tool."""
    script = [{**call(tool_name, city="Oslo"), "delay": delay} for _ in range(TOOL_CALLS)]
    return [*script, {"text": "done", "delay": delay}]


def typical(delay: float = 0.0) -> AgentSpec:
    """The same as an agent, with a tool that may be run again."""
    return agent("typical", rounds_of("lookup", delay))


def noting(delay: float = 0.0) -> AgentSpec:
    """The same with a tool that must not be repeated blindly."""
    return agent("noting", rounds_of("note", delay), tools=[note])


def answering(delay: float = 0.0, **fields: Any) -> AgentSpec:
    """One model call of `delay` seconds and no tools: it runs in frames of the default placement."""
    return agent("answering", [{"text": "done", "delay": delay}], tools=[], **fields)


one_answer = answering()


@workflow
async def over_items(ctx: WorkflowContext, count: int, at_once: int) -> int:
    """A call of a tool for each item."""
    return len(await ctx.foreach(range(count), lambda number: ctx.tool(lookup, str(number)), limit=at_once))


@workflow(agents=[one_answer])
async def over_agents(ctx: WorkflowContext, count: int, at_once: int) -> int:
    """An agent for each item."""
    return len(await ctx.foreach(range(count), lambda number: ctx.agent(one_answer, f"item {number}"), limit=at_once))


@workflow
async def many_steps(ctx: WorkflowContext, count: int) -> int:
    """A call of a tool for each item, then a wait for a signal."""
    found = await ctx.foreach(range(count), lambda number: ctx.tool(lookup, str(number)), limit=100)
    await ctx.event("go")
    return len(found)
