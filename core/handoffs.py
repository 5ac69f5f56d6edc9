"""Handoffs: a session goes on under another agent of its specification. Pure.

A compiled specification has all agents that may be reached by handoffs, from whichever of them, in one table
(`handoffs`, by name), and each agent has a tool for each of those that it may hand off to. Which agent a session is
under says its row, by name: `present` is that agent's specification.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

HANDOFF = "transfer_to_agent"
"""The built-in tool that the tools are of; `source` says to which agent."""

ORIGIN = "handoff"
"""The origin of the record of a handoff, which no model is sent: `from`, `to`, `reason`."""

LONGEST_REASON = 500
"""Characters."""

KEPT = (
    "v", "budget", "max_rounds", "max_depth", "restart", "restart_type", "on_parent_end", "lifecycle", "shutdown",
    "follow_ups", "metadata", "on_change",
)  # fmt: skip
"""Fields that say what the session may use and what it is to others: those of the agent that it was spawned with."""


def tool_name(agent: str) -> str:
    """The tool by which a model hands off to an agent. Endpoints take no dots in names."""
    return f"transfer_to_{agent.replace('.', '_')}"


def target(spec: dict[str, Any], tool: str) -> str | None:
    """The agent that a tool of this specification hands off to; None if it is no such tool."""
    found: dict[str, str] = next((entry["source"] for entry in spec["tools"] if entry["name"] == tool), {})
    return found["agent"] if found.get("builtin") == HANDOFF else None


def present(spec: dict[str, Any], agent: str) -> dict[str, Any]:
    """The specification of the agent that a session is under, with what stays the session's (`KEPT`).

    It has all the others in its table, so it is a whole specification by itself: a copy of the agent has it.

    Args:
        spec: what the session was spawned with.
        agent: a name that it does not have means the first one, which it was spawned with.
    """
    others = spec.get("handoffs") or {}
    if agent == spec["name"] or agent not in others:
        return spec
    own = {name: value for name, value in others[agent].items() if name not in KEPT}
    kept = {name: spec[name] for name in KEPT if name in spec}
    first = {name: value for name, value in spec.items() if name != "handoffs"}
    table = {name: other for name, other in others.items() if name != agent}
    return {**own, **kept, "handoffs": {**table, spec["name"]: first}}


def agent_at(records: Iterable[tuple[int, dict[str, Any]]], seq: int, agent: str) -> str:
    """The agent that a session was under at a place in its log.

    Args:
        records: of its handoffs, oldest first, each with its `seq`.
        agent: that it is under now.
    """
    return next((str(record["from"]) for at, record in records if at > seq), agent)
