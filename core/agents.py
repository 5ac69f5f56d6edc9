"""Sub-agents that work in the background: what a model may ask of the store about them. Pure."""

from __future__ import annotations

from typing import Any

from .messages import storable
from .records import child_text

SPAWN_AGENT = "spawn_agent"
"""The tool that starts a sub-agent and waits for its answer: the call is committed with the child."""

START_AGENT = "start_agent"
"""The tool that starts a sub-agent and does not wait for it."""

SEND_TO_AGENT = "send_to_agent"
"""The tool by which a session reaches a sub-agent that it has started, and the kind of what it asks of the store."""

CHILD = "child"
"""The source of an input that tells of a sub-agent's end, and the origin of the message that it becomes."""

LONGEST_MESSAGE = 100_000


def news_identifier(child_id: str, run_id: str, task: str) -> str:
    """The id of the input by which a session is notified of the end of a sub-agent's run; `task` is its first one's."""
    return f"news.{child_id}" if run_id == task else f"news.{child_id}.{run_id}"


def news_text(agent: str, payload: dict[str, Any]) -> str:
    """What a model reads of the end of a sub-agent that worked in the background."""
    who = f"Sub-agent {payload['child_id']} ({agent})"
    if payload["status"] == "completed":
        return f"{who} has finished. Its answer:\n{child_text(payload)}"
    return f"{who} has ended: {child_text(payload)}"


def agent_problem(agent: Any, message: Any) -> str | None:
    """What is wrong with the arguments of `SEND_TO_AGENT`; None if nothing is."""
    if not isinstance(agent, str) or not agent.strip() or storable(agent) != agent:
        return 'the argument "agent" must be the id of a sub-agent that you have started.'
    if not isinstance(message, str) or not message.strip():
        return 'the argument "message" must be a text.'
    if len(message) > LONGEST_MESSAGE:
        return f'the argument "message" must have at most {LONGEST_MESSAGE} characters.'
    return None
