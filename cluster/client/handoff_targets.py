"""`AgentSpec.handoffs`: which agents a session may come to be under, and what is wrong with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from understudy.handoffs import tool_name
from understudy.spec import AgentSpec

LONGEST_TOOL_NAME = 64


def named(spec: AgentSpec) -> list[str]:
    """The names of the agents that one may hand off to."""
    return [agent if isinstance(agent, str) else agent.name for agent in spec.handoffs]


def handoff_targets(spec: AgentSpec) -> tuple[dict[str, AgentSpec], list[dict[str, str]]]:
    """All agents that can be reached from one by handoffs, by name, and what is wrong with them together, as `{"field",
    "problem"}`: different ones of a name, and names that none of them has."""
    found: dict[str, AgentSpec] = {}
    wanted, several, queue = list[str](), set[str](), [spec]
    while queue:
        agent = queue.pop(0)
        for other in agent.handoffs:
            if isinstance(other, str):
                wanted.append(other)
            elif other.name not in found and other.name != spec.name:
                found[other.name] = other
                queue.append(other)
            elif other != found.get(other.name, spec):
                several.add(other.name)
    known = {spec.name, *found}
    texts = [f"there are several agents named {name!r}, and they are not the same" for name in sorted(several)]
    texts += [
        f"{name!r} is no agent that is known here: {', '.join(sorted(known))}"
        for name in dict.fromkeys(wanted)
        if name not in known
    ]
    return found, [{"field": "handoffs", "problem": text} for text in texts]


def output_type_of(spec: AgentSpec) -> Any:
    """The type of a session's outputs, whichever agent it is under; None where that depends on it."""
    types = [spec.output_type, *(agent.output_type for agent in handoff_targets(spec)[0].values())]
    return spec.output_type if all(kind is spec.output_type for kind in types) else None


def own_handoff_problems(spec: AgentSpec, tools: Sequence[str]) -> list[str]:
    """What is wrong with the handoffs of one agent.

    Args:
        tools: the names of its tools.
    """
    names = named(spec)
    problems = ["an agent can't hand off to itself"] if spec.name in names else []
    unique = dict.fromkeys(names)
    made = Counter(map(tool_name, unique))
    for name in unique:
        tool = tool_name(name)
        if tool in tools:
            problems.append(f"the tool {tool!r}, which hands off to {name!r}, is among the agent's own")
        if made[tool] > 1:
            problems.append(f"{name!r} and another one would have the same tool, {tool!r}")
        if len(tool) > LONGEST_TOOL_NAME:
            problems.append(f"{name!r} is too long: its tool {tool!r} may have {LONGEST_TOOL_NAME} characters")
    return problems
