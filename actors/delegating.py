"""Sub-agents that a model writes itself, within the limits of its specification's `delegation`."""

from __future__ import annotations

from typing import Any

from understudy.agents import SPAWN_AGENT, START_AGENT
from understudy.identifiers import digest
from understudy.windows import known_window

LONGEST_INSTRUCTIONS = 100_000
"""Characters."""


def offered(tool: dict[str, Any], delegation: dict[str, Any] | None) -> dict[str, Any]:
    """The tool's specification with the arguments by which a model writes a sub-agent, if it is one that takes them."""
    if delegation is None or tool["source"].get("builtin") not in (SPAWN_AGENT, START_AGENT):
        return tool
    more: dict[str, Any] = {
        "instructions": {
            "type": "string",
            "minLength": 1,
            "description": "Instead of an agent by name: what the sub-agent is, and how it shall work.",
        },
        "tools": {
            "type": "array",
            "items": {"type": "string", "enum": delegation["tools"]},
            "description": "The tools that it has, only with instructions; all of these if left out.",
        },
    }
    if delegation["models"]:
        description = "The model that it uses, only with instructions; yours if left out."
        more["model"] = {"type": "string", "enum": delegation["models"], "description": description}
    parameters = tool["parameters"]
    return {**tool, "parameters": {**parameters, "properties": {**parameters["properties"], **more}}}


def written(data: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any] | str | None:
    """The specification of the sub-agent that a call writes; a text that says why it may not; None if it writes none.

    What the call does not say is as in the caller's specification, hooks included; but it may write no sub-agents
    itself, has no agents by name, answers with any text, and the budget is the one that `delegation` says.
    """
    instructions, wanted, model = (data.get(name) for name in ("instructions", "tools", "model"))
    delegation = spec.get("delegation")
    if instructions is None and (delegation is None or (wanted is None and model is None)):
        return None
    problem = _problem(instructions, wanted, model, delegation)
    if problem is None and data.get("agent") is not None:
        problem = "give either an agent's name or instructions, not both."
    if problem is not None or delegation is None:
        return problem
    names = delegation["tools"] if wanted is None else wanted
    own = {name: value for name, value in spec.items() if name not in ("delegation", "output")}
    made = {
        **own, "instructions": instructions, "agents": {}, "budget": delegation["budget"],
        "tools": [_plain(tool) for tool in spec["tools"] if tool["name"] in names],
        "hash": digest(spec["hash"], str(instructions), str(sorted(names)), str(model or "")),
    }  # fmt: skip
    if model is not None and model != spec["model"]:
        made["model"] = model
        made["context"] = {**(spec.get("context") or {}), "window": known_window(model)}
    return made


def _problem(instructions: Any, wanted: Any, model: Any, delegation: dict[str, Any] | None) -> str | None:
    if delegation is None:
        return "you may not write sub-agents of your own: leave out instructions, tools and model."
    if not isinstance(instructions, str) or not instructions.strip():
        return 'the argument "instructions" must be a text; without it, leave out tools and model.'
    if len(instructions) > LONGEST_INSTRUCTIONS:
        return f'the argument "instructions" must have at most {LONGEST_INSTRUCTIONS} characters.'
    if wanted is not None and not (isinstance(wanted, list) and all(name in delegation["tools"] for name in wanted)):
        return f'the argument "tools" may have only: {", ".join(delegation["tools"]) or "(none)"}.'
    if model is not None and model not in delegation["models"]:
        return f'the argument "model" must be one of: {", ".join(delegation["models"]) or "(leave it out)"}.'
    return None


def _plain(tool: dict[str, Any]) -> dict[str, Any]:
    """The tool without the arguments that `offered` has added."""
    if tool["source"].get("builtin") not in (SPAWN_AGENT, START_AGENT):
        return tool
    parameters = tool["parameters"]
    kept = {name: value for name, value in parameters["properties"].items() if name in ("agent", "task")}
    return {**tool, "parameters": {**parameters, "properties": kept}}
