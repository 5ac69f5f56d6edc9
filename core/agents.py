"""Sub-agents that work in the background: what a model may ask of the store about them. Pure."""

from __future__ import annotations

from typing import Any

from .records import child_text

SPAWN_AGENT = "spawn_agent"
"""The tool that starts a sub-agent and waits for its answer: the call is committed with the child."""

START_AGENT = "start_agent"
"""The tool that starts a sub-agent and does not wait for it."""

LIST_AGENTS = "list_agents"
SEND_TO_AGENT = "send_to_agent"
STOP_AGENT = "stop_agent"

AGENT_TOOLS = (LIST_AGENTS, SEND_TO_AGENT, STOP_AGENT)
"""Tools by which a session reaches the sub-agents that it has started, and the kinds of what they ask of the store."""

CHILD = "child"
"""The source of an input that tells of a sub-agent's end, and the origin of the message that it becomes."""

LONGEST_MESSAGE = 100_000
SHOWN_ANSWER = 500
"""Characters of a sub-agent's answer that `list_agents` shows."""


def news_identifier(child_id: str, run_id: str, task: str) -> str:
    """The id of the input by which a session is told of the end of a sub-agent's run; `task` is its first one's."""
    return f"news.{child_id}" if run_id == task else f"news.{child_id}.{run_id}"


def news_text(agent: str, payload: dict[str, Any]) -> str:
    """What a model reads of the end of a sub-agent that worked in the background."""
    who = f"Sub-agent {payload['child_id']} ({agent})"
    if payload["status"] == "completed":
        return f"{who} has finished. Its answer:\n{child_text(payload)}"
    return f"{who} has ended: {child_text(payload)}"


def agent_problem(kind: str, agent: Any, message: Any) -> str | None:
    """What is wrong with the arguments of one of `AGENT_TOOLS`; None if nothing is."""
    if kind != LIST_AGENTS and (not isinstance(agent, str) or not agent.strip()):
        return 'the argument "agent" must be the id of a sub-agent that you have started.'
    if kind != SEND_TO_AGENT:
        return None
    if not isinstance(message, str) or not message.strip():
        return 'the argument "message" must be a text.'
    if len(message) > LONGEST_MESSAGE:
        return f'the argument "message" must have at most {LONGEST_MESSAGE} characters.'
    return None
