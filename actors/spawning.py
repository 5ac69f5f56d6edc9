"""What a `spawn_agent` call asks for."""

from __future__ import annotations

import json
from typing import Any

from understudy.identifiers import child_identifier
from understudy.records import CallState, Spawn

from .window import Window


def read_spawn(arguments: str, agents: dict[str, Any]) -> tuple[str | None, str, str | None]:
    """`(problem, task, agent)` of a `spawn_agent` call; `agent` is None for a copy of the caller."""
    try:
        data = json.loads(arguments)
    except (ValueError, RecursionError) as error:
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


def spawn_of(window: Window, call: CallState) -> Spawn | str:
    """The sub-agent that a call creates; a text that says why it may not."""
    problem, task, agent = read_spawn(call.arguments, window.spec["agents"])
    if problem is None and window.spec["max_depth"] < 1:
        problem = f"no sub-agent may be created at depth {window.depth}: that is as deep as this tree may grow."
    if problem is not None:
        return problem
    template = window.spec["agents"][agent] if agent else {**window.spec, "budget": None}
    depth = min(template["max_depth"], window.spec["max_depth"] - 1)
    child = child_identifier(window.session_id, call.call_id)
    return Spawn(call.call_id, child, {**template, "max_depth": depth}, task)
