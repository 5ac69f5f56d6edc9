"""Workflows that a model writes itself, within the limits of its specification's `workflows`: what a call creates."""

from __future__ import annotations

from typing import Any

from understudy.errors import InvalidInput
from understudy.identifiers import child_identifier, digest
from understudy.json_text import to_json
from understudy.records import CallState, Spawn
from understudy.workflow_definition.checking import converted, definition_problems, to_data
from understudy.workflow_definition.limits import Limits
from understudy.workflow_definition.steps import Definition
from understudy.workflows import LONGEST_WRITTEN, MODEL_AGENT, WORKFLOW
from understudy.worktrees import for_child

from .asking import REQUEST_USER_INPUT, read_arguments
from .tools import builtin
from .window import Window
from .workflow_inputs import checked_inputs

SOURCE = {"import": "understudy.actors.workflow_interpreter:loaded"}
"""What does a definition in a frame."""

LEFT_OUT = frozenset({
    "delegation", "workflows", "output", "handoffs", "description", "mcp_servers", "skills", "memory", "follow_ups",
})  # fmt: skip
"""What an agent has, and a workflow that it writes does not."""

LIKE_A_STEP = {"restart_type": "temporary", "lifecycle": "ephemeral"}
"""It is done once: what is to be done about a failure its writer decides."""

ONE_QUESTION: dict[str, Any] = {"instructions": "", "tools": [], "agents": {}, "budget": None, "max_depth": 0}
"""What is different in the agent that makes the model calls of its `model` steps."""


def workflow_of(window: Window, call: CallState, *, background: bool) -> Spawn | str:
    """The session that does the workflow of a call; a text that says why there is none.

    Args:
        background: the call does not wait for it.
    """
    data = read_arguments(call)
    if isinstance(data, str):
        return data
    spec = window.spec
    if spec.get("workflows") is None:
        return "you may not write workflows."
    if spec["max_depth"] < 1:
        return f"no workflow may be created at depth {window.depth}: that is as deep as this tree may grow."
    definition = _read(data.get("definition"), spec)
    if isinstance(definition, str):
        return definition
    inputs = data.get("inputs")
    if inputs is not None and not isinstance(inputs, dict):
        return 'the argument "inputs" must be an object: a value for each input.'
    if not isinstance(data.get("detached", False), bool):
        return 'the argument "detached" must be true or false.'
    try:
        task = to_json(checked_inputs(definition, inputs or {}))
    except InvalidInput as error:
        return _problem_text("inputs", error.details["problems"])
    made = for_child(specification(definition, spec), spec, window.incarnation, copy=True)
    if isinstance(made, str):
        return made
    return Spawn(call.call_id, child_identifier(window.session_id, call.call_id), made, task, background)


def _read(data: Any, spec: dict[str, Any]) -> Definition | str:
    """The definition that a model has written; a text that says everything that is wrong with it."""
    if not isinstance(data, dict):
        return 'the argument "definition" must be an object: the workflow.'
    if len(to_json(data)) > LONGEST_WRITTEN:
        return f'the argument "definition" must have at most {LONGEST_WRITTEN} characters, as JSON.'
    limits = spec["workflows"]
    within = Limits(
        limits["steps"], limits["at_once"], limits["models"],
        asks=any(builtin(tool) == REQUEST_USER_INPUT for tool in spec["tools"]), sessions=spec["max_depth"] > 1,
    )  # fmt: skip
    problems = definition_problems(data, agents=limits["agents"], tools=limits["tools"], limits=within)
    return _problem_text("definition", problems) if problems else converted(data)


def _problem_text(argument: str, problems: list[dict[str, str]]) -> str:
    lines = "".join(f"\n- {item['field']}: {item['problem']}" for item in problems)
    number = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
    return f'nothing was done: the argument "{argument}" has {number}. Mend all of it, and call again:{lines}'


def specification(definition: Definition, spec: dict[str, Any]) -> dict[str, Any]:
    """The specification of the session that does a definition.

    Args:
        spec: of the agent that has written it.
    """
    limits = spec["workflows"]
    own = {name: value for name, value in spec.items() if name not in LEFT_OUT}
    function = {
        "name": definition.name, "source": SOURCE, "definition": to_data(definition), "most_steps": limits["steps"],
    }  # fmt: skip
    identity = digest(spec["hash"], to_json(function))
    asking = {**own, **LIKE_A_STEP, **ONE_QUESTION, "name": MODEL_AGENT, "hash": digest(identity, MODEL_AGENT)}
    return {
        **own, **LIKE_A_STEP, "hash": identity, "kind": WORKFLOW, "workflow": function, "instructions": "",
        "tools": [tool for tool in spec["tools"] if tool["name"] in limits["tools"]],
        "agents": {**{name: spec["agents"][name] for name in limits["agents"]}, MODEL_AGENT: asking},
        "budget": limits["budget"], "max_depth": spec["max_depth"] - 1,
    }  # fmt: skip
