"""Tool calls that wait for an answer: what is asked, and what an answer makes of the call.

All take the same path. A person answers a question of the model's (`request_user_input`) or of an MCP server's, a call
that needs approval (`approval.py`) and a call of an `on_crash="ask"` tool that had started when its process died; the
store answers calls of the tools that `waking.store_tool` specifies.
"""

from __future__ import annotations

import json
import time
from typing import Any

from understudy.approvals import IN_DOUBT, QUESTION
from understudy.messages import encodable
from understudy.records import Ask, CallState, InboxItem
from understudy.tool_hosting import ACCEPT, CANCEL, DECLINE, Elicitation, ElicitationAnswer

REQUEST_USER_INPUT = "request_user_input"
"""The tool by which a model asks a person; the session loop executes it itself."""

SHOWN_ARGUMENTS = 2_000
"""Characters of a call's arguments that a person is shown."""

REQUEST_USER_INPUT_SPEC: dict[str, Any] = {
    "name": REQUEST_USER_INPUT,
    "description": "Ask the person you work for, and wait for the answer. It may take long: ask only what you can't "
    "find out or decide yourself.",
    "parameters": {
        "type": "object",
        "properties": {
            "prompt": {
                "type": "string",
                "minLength": 1,
                "description": "The question, with all that is needed to answer it: the person sees nothing else.",
            },
            "options": {
                "type": "array",
                "items": {"type": "string"},
                "description": "Answers to choose from, if there are such; the person may answer otherwise.",
            },
        },
        "required": ["prompt"],
        "additionalProperties": False,
    },
    "on_crash": "rerun",
    "timeout": None,
    "source": {"builtin": REQUEST_USER_INPUT},
}


def read_arguments(call: CallState) -> dict[str, Any] | str:
    """The arguments of a call by name, as UTF-8 can have them; a text that says why they can't be read."""
    try:
        data = encodable(json.loads(call.arguments))
    except (ValueError, RecursionError) as error:
        return f"the arguments are not readable JSON ({error}). Call again with valid JSON."
    return data if isinstance(data, dict) else {}


def read_question(call: CallState) -> Ask | str:
    """What a `request_user_input` call asks; a text that says what is wrong with its arguments."""
    data = read_arguments(call)
    if isinstance(data, str):
        return data
    prompt = data.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        return 'the argument "prompt" must be a text: the question.'
    options = data.get("options") or []
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
        return 'the argument "options" must be a list of texts.'
    return Ask(call.call_id, QUESTION, prompt, tuple(options), call.executions)


def shown(arguments: str) -> str:
    """A call's arguments as a person is shown them."""
    return arguments if len(arguments) <= SHOWN_ARGUMENTS else f"{arguments[:SHOWN_ARGUMENTS]}…"


def ask_about(call: CallState, died: str) -> Ask:
    """The question about a call that had started when a process died that was at it."""
    prompt = (
        f"{died[0].upper()}{died[1:]} died while {call.tool} ran with {shown(call.arguments)}; whether it had its "
        "effect is unknown. Say what its result is, that it failed, or that it shall run again."
    )
    return Ask(call.call_id, IN_DOUBT, prompt, (), call.executions)


def ask_for_server(call: CallState, asked: Elicitation) -> Ask:
    """The question of an MCP server that is at a call."""
    prompt = (
        f"The MCP server asks, during {call.tool} with {shown(call.arguments)}: {asked.message}\n"
        f"Answer with JSON that fits: {shown(json.dumps(asked.form))}"
    )
    return Ask(call.call_id, QUESTION, prompt, (), call.executions, form=asked.form, elicitation=asked.id)


def answer_for_server(said: dict[str, Any]) -> ElicitationAnswer | None:
    """What is passed on to an MCP server of an answer to a call; None if it is to no question of a server's."""
    if not said.get("elicitation"):
        return None
    action = {"ok": ACCEPT, "error": DECLINE}.get(said["decision"], CANCEL)
    return ElicitationAnswer(said["elicitation"], action, json.loads(said["text"]) if action == ACCEPT else None)


def answer_to(call: CallState, inbox: list[InboxItem]) -> InboxItem | None:
    """The inbox row that answers this call, if it has come."""
    return next((item for item in inbox if item.kind == "answer" and item.key == call.call_id), None)


def began(call: CallState, answer: dict[str, Any]) -> int:
    """When an answered call began: a question when it was asked, a wait when the model wanted it, one in doubt nobody
    knows when."""
    now = time.time_ns() // 1000
    since = answer.get("since") or (call.updated_at if answer["kind"] == QUESTION else now)
    return min(since or now, now)
