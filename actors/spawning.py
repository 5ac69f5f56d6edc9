"""What passes between an agent and its sub-agents: the task of a `spawn_agent` call, and the text of its result."""

from __future__ import annotations

import json
from typing import Any


def read_spawn(arguments: str, agents: dict[str, Any]) -> tuple[str | None, str, str | None]:
    """`(problem, task, agent)` of a `spawn_agent` call; `agent` is None for a copy of the caller."""
    try:
        data = json.loads(arguments)
    except ValueError as error:
        return f"the arguments are not readable JSON ({error}). Call again with valid JSON.", "", None
    task = data.get("task") if isinstance(data, dict) else None
    if not isinstance(task, str) or not task.strip():
        return 'the argument "task" must be a text that says what the sub-agent shall do.', "", None
    agent = data.get("agent")
    if agent is None and not agents:
        return None, task, None
    if agent is None and len(agents) == 1:
        return None, task, next(iter(agents))
    if agent not in agents:
        return f'the argument "agent" must be one of: {", ".join(sorted(agents)) or "(leave it out)"}.', "", None
    return None, task, agent


def child_text(payload: dict[str, Any]) -> str:
    """What the parent's model reads of a child's result: its answer, or how it ended and what it had."""
    if payload["status"] == "completed":
        return payload["text"] or ""
    error = (payload["error"] or {}).get("message", "")
    said = f"\nIts last words: {payload['text']}" if payload["text"] else ""
    return f"the sub-agent ended as {payload['status']}: {error}{said}"
