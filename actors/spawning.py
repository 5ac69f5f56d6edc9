"""What a `spawn_agent` or `start_agent` call asks for."""

from __future__ import annotations

from typing import Any

from understudy.identifiers import child_identifier
from understudy.records import CallState, Spawn
from understudy.worktrees import for_child

from .asking import read_arguments
from .delegating import written
from .window import Window


def read_spawn(data: dict[str, Any], agents: dict[str, Any]) -> tuple[str | None, str | None]:
    """`(problem, agent)` of what such a call asks; `agent` is None for a copy of the caller."""
    agent = data.get("agent")
    if agent is None and not agents:
        return None, None
    if agent is None and len(agents) == 1:
        return None, next(iter(agents))
    if not isinstance(agent, str) or agent not in agents:
        return f'the argument "agent" must be one of: {", ".join(sorted(agents)) or "(leave it out)"}.', None
    return None, agent


def spawn_of(window: Window, call: CallState, *, background: bool = False) -> Spawn | str:
    """The sub-agent that a call creates; a text that says why it may not.

    Args:
        background: the call does not wait for it.
    """
    data = read_arguments(call)
    if isinstance(data, str):
        return data
    task = data.get("task")
    if not isinstance(task, str) or not task.strip():
        return 'the argument "task" must be a text that says what the sub-agent shall do.'
    template, agent = written(data, window.spec), None
    if template is None:
        problem, agent = read_spawn(data, window.spec["agents"])
        template = problem or (window.spec["agents"][agent] if agent else {**window.spec, "budget": None})
    if not isinstance(template, str):
        template = for_child(template, window.spec, window.incarnation, copy=agent is None)
    if isinstance(template, str):
        return template
    if window.spec["max_depth"] < 1:
        return f"no sub-agent may be created at depth {window.depth}: that is as deep as this tree may grow."
    depth = min(template["max_depth"], window.spec["max_depth"] - 1)
    child = child_identifier(window.session_id, call.call_id)
    return Spawn(call.call_id, child, {**template, "max_depth": depth}, task, background)
