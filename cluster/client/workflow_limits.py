"""What is wrong with the limits within which an agent's model writes workflows."""

from __future__ import annotations

from typing import Any

from understudy.actors.delegation import HANDED_OVER, STARTING
from understudy.actors.tools import builtin
from understudy.spec import AgentSpec
from understudy.workflows import CREATE_WORKFLOW, MODEL_AGENT, STEPS


def workflow_limit_problems(spec: AgentSpec, tools: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The problems, each with its field.

    Args:
        tools: of the agent, described.
    """
    by_name = {tool["name"]: tool for tool in tools}
    of_delegation = spec.delegation.tools if spec.delegation is not None else ()
    problems = [
        ("delegation.tools", f"{name!r} can't be given away: sub-agents that a model writes write no workflows")
        for name in of_delegation
        if name == CREATE_WORKFLOW
    ]
    if (spec.workflows is None) is (CREATE_WORKFLOW in by_name):
        text = "they can only be used with the tool 'create_workflow'"
        missing = ("tools", f"{CREATE_WORKFLOW} needs workflows=WorkflowLimits(…), which says what they may use")
        problems.append(missing if spec.workflows is None else ("workflows", text))
    if spec.workflows is None:
        return problems
    for name in spec.workflows.tools:
        if name not in by_name:
            known = ", ".join(by_name)
            problems.append(("workflows.tools", f"{name!r} is none of the agent's tools: {known}"))
        elif name in STEPS or builtin(by_name[name]) in STARTING | HANDED_OVER:
            problems.append(("workflows.tools", f"{name!r} can't be a step: no code of the agent's does it"))
    agents = [agent.name for agent in spec.agents]
    for name in spec.workflows.agents:
        if name not in agents:
            known = ", ".join(agents) or "none"
            problems.append(("workflows.agents", f"{name!r} is none of the agent's sub-agents: {known}"))
        elif name == MODEL_AGENT:
            problems.append(("workflows.agents", f"{name!r} means the model of `model` steps: rename it"))
    return problems
