"""Tools by which a session waits and is woken: what their calls ask of the store, which answers them.

They execute nothing in a frame, so no process is held, and none is needed when their time has come.
"""

from __future__ import annotations

from typing import Any

from understudy.records import Ask, CallState
from understudy.wakeups import (
    DAY_SECONDS,
    LONGEST_WAIT_DAYS,
    LONGEST_WAKEUP_DAYS,
    MOST_WAKEUPS,
    SCHEDULE_WAKEUP,
    SHORTEST_PERIOD_SECONDS,
    WAIT,
    wait_problem,
    wakeup_problem,
)

from .asking import read_arguments


def store_tool(name: str, description: str, properties: dict[str, Any], *required: str) -> dict[str, Any]:
    """The specification of a tool that the store answers."""
    parameters = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    return {
        "name": name, "description": description, "parameters": parameters, "on_crash": "rerun", "timeout": None,
        "source": {"builtin": name},
    }  # fmt: skip


NAME = {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$", "description": "Name of the wakeup."}

STORE_TOOLS = {
    tool["name"]: tool
    for tool in (
        store_tool(
            WAIT,
            "Wait for a time, then go on. Other calls of the same turn don't wait for it: look at what you wait for in "
            "your next turn.",
            {
                "seconds": {
                    "type": "number",
                    "exclusiveMinimum": 0,
                    "maximum": LONGEST_WAIT_DAYS * DAY_SECONDS,
                    "description": f"How long, from now; at most {LONGEST_WAIT_DAYS} days.",
                }
            },
            "seconds",
        ),
        store_tool(
            SCHEDULE_WAKEUP,
            "Have yourself woken later: you will get the prompt as a new input in this conversation. You can give your "
            f"final answer meanwhile. At most {MOST_WAKEUPS} wakeups at a time; one of the same name is replaced.",
            {
                "prompt": {"type": "string", "minLength": 1, "description": "What you will be told then."},
                "seconds": {
                    "type": "number",
                    "exclusiveMinimum": 0,
                    "maximum": LONGEST_WAKEUP_DAYS * DAY_SECONDS,
                    "description": "When, from now.",
                },
                "every": {
                    "type": "number",
                    "minimum": SHORTEST_PERIOD_SECONDS,
                    "maximum": LONGEST_WAKEUP_DAYS * DAY_SECONDS,
                    "description": "Seconds after which you are woken again, and so on; leave out for once.",
                },
                "name": NAME,
            },
            "prompt",
            "seconds",
        ),
    )
}
"""What the store answers: the specification of each tool by its name."""


def read_for_store(call: CallState) -> Ask | str:
    """What a call asks of the store; a text that says what is wrong with its arguments."""
    data = read_arguments(call)
    if isinstance(data, str):
        return data
    seconds, name = data.get("seconds"), data.get("name")
    wanted: dict[str, Any] = {}
    problem: str | None = None
    if call.tool == WAIT:
        problem, wanted = wait_problem(seconds), {"seconds": seconds}
    elif call.tool == SCHEDULE_WAKEUP:
        prompt, every = data.get("prompt"), data.get("every")
        problem = wakeup_problem(prompt, seconds, every, "wakeup" if name is None else name)
        wanted = {"prompt": prompt, "seconds": seconds, "every": every, "name": name}
    return problem or Ask(call.call_id, call.tool, "", executions=1, arguments=wanted)
