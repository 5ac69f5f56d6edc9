"""What a `spawn_agent` call asks for."""

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
