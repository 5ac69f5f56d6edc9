"""Tools by which a model has a workflow done that it writes itself, and sees what one is at: their specifications, and
what the second one asks of the store. What the first one creates is in `workflow_writing`, which loads more."""

from __future__ import annotations

from typing import Any

from understudy.jobs import LONGEST_ID
from understudy.messages import storable
from understudy.records import Ask, CallState
from understudy.workflows import CREATE_WORKFLOW, WORKFLOW_STATUS

from .asking import read_arguments
from .waking import store_tool

FORMAT = """A definition is {"name": "...", "inputs": {NAME: JSON Schema}, "steps": [STEP, ...], "output": data}. \
Steps are done one after the other. A STEP has exactly one of:
- "tool": {"name", "arguments": {...}}
- "agent": {"name", "task": text}
- "model": {"prompt": text}: a model is asked once, without tools
- "sequence": [STEP, ...]; "parallel": [STEP, ...]: at the same time
- "foreach": {"items": list or "{{variable}}", "do": STEP}: at the same time, for each "{{item}}"
- "branch": {"cases": [{"when": condition, "do": STEP}], "else": STEP}
- "loop": {"do": STEP, "max": number, "until": condition}; "{{last}}" is the result of the round before
- "wait": {"seconds": number}
- "ask": {"question": text}: a person is asked
and any of: "id" (later steps see its result as "{{id}}", parts as "{{id.field.0}}"), "when" (a condition as \
"a.ok and n > 3", without braces), "output_schema" (JSON Schema of an agent's, model's or tool's result), "retry" \
({"max_attempts": 3}), "timeout" (seconds; of all but "wait"), "fallback" (a STEP instead), \
"on_error" ("continue", or a STEP), \
"undo" (a STEP that is done if the workflow fails later), "max_concurrency" (of parallel and foreach). \
A text that is nothing but "{{variable}}" is the value itself."""

CREATE_WORKFLOW_SPEC = store_tool(
    CREATE_WORKFLOW,
    "Write a workflow, and have it done: many steps of your tools and sub-agents, in the order that you say, without a "
    "turn of yours for each. It goes on by itself, whatever dies, and each step is done once. You get its result; if "
    "you detach it, at once its id, and are told of its end by a message in this conversation, as of a sub-agent's. "
    f"If something is wrong with it, nothing is done, and you get all problems with their places.\n{FORMAT}",
    {
        "definition": {"type": "object", "description": "The workflow."},
        "inputs": {"type": "object", "description": "Its inputs, by name; leave out if it has none."},
        "detached": {"type": "boolean", "description": "Go on without waiting for it. Leave out to wait."},
    },
    "definition",
)

WORKFLOW_STATUS_SPEC = store_tool(
    WORKFLOW_STATUS,
    "See what a workflow that you have written is at: its open steps, and the last results.",
    {"workflow": {"type": "string", "minLength": 1, "maxLength": LONGEST_ID, "description": "Its id."}},
    "workflow",
)

WORKFLOWS_GROUP = {"workflows": (CREATE_WORKFLOW, WORKFLOW_STATUS)}


def limited(tool: dict[str, Any], limits: dict[str, Any] | None) -> dict[str, Any]:
    """The tool's specification as an agent's model is offered it: `create_workflow` says what a workflow may use.

    Args:
        limits: the compiled form of the agent's `WorkflowLimits`.
    """
    if limits is None or tool["source"].get("builtin") != CREATE_WORKFLOW:
        return tool
    named = {name: ", ".join(limits[name]) or "none" for name in ("tools", "agents")}
    models = f'; models that a step may name ("model"): {", ".join(limits["models"])}' if limits["models"] else ""
    said = (
        f"\nTools: {named['tools']}; agents: {named['agents']}{models}. At most {limits['steps']} steps, rounds and "
        f"tries counted, and {limits['at_once']} at once: give each foreach a max_concurrency."
    )
    return {**tool, "description": tool["description"] + said}


def read_status(call: CallState) -> Ask | str:
    """What a call of `workflow_status` asks of the store; a text that says what is wrong with its arguments."""
    data = read_arguments(call)
    if isinstance(data, str):
        return data
    workflow = data.get("workflow")
    if not isinstance(workflow, str) or not workflow.strip() or storable(workflow) != workflow:
        return 'the argument "workflow" must be the id of a workflow that you have written.'
    return Ask(call.call_id, call.tool, "", executions=1, arguments={"workflow": workflow})
