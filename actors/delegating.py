"""Sub-agents that a model writes itself, within the limits of its specification's `delegation`."""

from __future__ import annotations

import json
from typing import Any

from understudy.agents import SPAWN_AGENT, START_AGENT
from understudy.identifiers import digest
from understudy.json_schemas import EXPENSIVE, MOST_SCHEMAS, is_bounded, schemas
from understudy.json_text import to_json
from understudy.messages import storable
from understudy.skills import LOAD_SKILL
from understudy.windows import known_window

from .output_schemas import output_for

THERE_ARE = " There are:"
"""What follows in the description of the argument that names an agent."""

LONGEST_INSTRUCTIONS = 100_000
"""Characters."""

LONGEST_SCHEMA = 20_000
"""Characters, as JSON."""

OUTPUT_RETRIES = 2

SHOWN_PROBLEMS, SHOWN_PROBLEM = 10, 300
"""So much is reported of what is wrong with a schema."""


def offered(
    tool: dict[str, Any], delegation: dict[str, Any] | None, agents: dict[str, dict[str, Any]]
) -> dict[str, Any]:  # fmt: skip
    """The tool's specification as this agent's model is offered it, if it is one that creates sub-agents: with the
    arguments by which a model writes one, and with what the agents are for that it may name.

    Args:
        agents: their specifications by their names.
    """
    if tool["source"].get("builtin") not in (SPAWN_AGENT, START_AGENT):
        return tool
    parameters = tool["parameters"]
    properties = {**parameters["properties"], **_writing(delegation)}
    if any("description" in agent for agent in agents.values()):
        lines = [f"\n- {name}: {agent.get('description', '')}".rstrip(": ") for name, agent in agents.items()]
        named = f"{properties['agent']['description']}{THERE_ARE}{''.join(lines)}"
        properties["agent"] = {**properties["agent"], "description": named}
    return {**tool, "parameters": {**parameters, "properties": properties}}


def _writing(delegation: dict[str, Any] | None) -> dict[str, Any]:
    """The arguments by which a model writes a sub-agent, if it may."""
    if delegation is None:
        return {}
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
    if delegation.get("output"):
        description = "A JSON Schema that its answer, which is JSON then, must fit. Only with instructions."
        more["output_schema"] = {"type": "object", "description": description}
    return more


def written(data: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any] | str | None:
    """The specification of the sub-agent that a call writes; a text that says why it may not; None if it writes none.

    What the call does not say is as in the caller's specification, hooks included; but it may write no sub-agents
    itself, has no agents by name, hands off to none, answers with any text unless the call says with what, and the
    budget is the one that `delegation` says.
    """
    instructions, wanted, model, schema = (
        data.get(name) for name in ("instructions", "tools", "model", "output_schema")
    )  # fmt: skip
    delegation = spec.get("delegation")
    if instructions is None and (delegation is None or (wanted is None and model is None and schema is None)):
        return None
    problem = _problem(instructions, wanted, model, delegation)
    if problem is None and data.get("agent") is not None:
        problem = "give either an agent's name or instructions, not both."
    if problem is not None or delegation is None:
        return problem
    output = _output(schema, delegation) if schema is not None else None
    if isinstance(output, str):
        return output
    names = delegation["tools"] if wanted is None else wanted
    left_out = {"delegation", "output", "handoffs", "description", "mcp_servers"}
    tools = [_plain(tool) for tool in spec["tools"] if tool["name"] in names]
    if not any(tool["source"].get("builtin") == LOAD_SKILL for tool in tools):
        left_out.add("skills")  # which it could not read
    own = {name: value for name, value in spec.items() if name not in left_out}
    made = {
        **own, "instructions": storable(str(instructions)), "agents": {}, "budget": delegation["budget"],
        "tools": tools,
        "hash": digest(spec["hash"], str(instructions), str(sorted(names)), str(model or "")),
    }  # fmt: skip
    if output is not None:
        made["output"] = output
        made["hash"] = digest(made["hash"], to_json(output))
    if model is not None and model != spec["model"]:
        made["model"] = model
        made["context"] = {**(spec.get("context") or {}), "window": known_window(model)}
    return made


def _output(schema: Any, delegation: dict[str, Any]) -> dict[str, Any] | str:
    """What the sub-agent's specification says of its output; a text that says why its schema can't be used."""
    if not delegation.get("output"):
        return "you may not say what the sub-agent answers with: leave out output_schema."
    if not isinstance(schema, dict):
        return 'the argument "output_schema" must be a JSON Schema: an object.'
    try:
        text = json.dumps(schema, allow_nan=False, ensure_ascii=False)
        if len(text) > LONGEST_SCHEMA:
            return f'the argument "output_schema" must have at most {LONGEST_SCHEMA} characters.'
        if storable(text) != text or "\\u0000" in text:
            return 'the argument "output_schema" has characters that can\'t be stored.'
        found = output_for(schema, None, mode="auto", retries=OUTPUT_RETRIES)
        if isinstance(found, dict) and any(name in one for _, one in schemas(schema) for name in EXPENSIVE):
            found = [f"{', '.join(EXPENSIVE)} are not supported here"]
        if isinstance(found, dict) and not is_bounded(schema, MOST_SCHEMAS):
            found = ["what must fit one value is too much, or refers to itself without an end"]
    except RecursionError:
        found = ["it is nested too deeply"]
    except ValueError as error:
        found = [str(error)]
    if isinstance(found, dict):
        return found
    lines = "".join(f"\n- {problem[:SHOWN_PROBLEM]}" for problem in found[:SHOWN_PROBLEMS])
    return f'the argument "output_schema" can\'t be used:{lines}'


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
    """The tool without what `offered` has added."""
    if tool["source"].get("builtin") not in (SPAWN_AGENT, START_AGENT):
        return tool
    parameters = tool["parameters"]
    kept = {name: value for name, value in parameters["properties"].items() if name in ("agent", "task")}
    kept["agent"] = {**kept["agent"], "description": kept["agent"]["description"].partition(THERE_ARE)[0]}
    return {**tool, "parameters": {**parameters, "properties": kept}}
