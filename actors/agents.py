"""Tools by which a model has sub-agents work in the background, and reaches them there.

A start is a part of the batch that creates the sub-agent; what else is asked the store answers, in the transaction that
has its effect. So each is done once, whatever dies.
"""

from __future__ import annotations

from understudy.agents import LIST_AGENTS, SEND_TO_AGENT, START_AGENT, STOP_AGENT, agent_problem
from understudy.records import Ask, CallState

from .asking import read_arguments
from .waking import store_tool

AGENT = {"type": "string", "minLength": 1, "description": "Id of the sub-agent, as start_agent said it."}

START_AGENT_SPEC = store_tool(
    START_AGENT,
    "Start a sub-agent that works on a task in the background, and go on without waiting for it. The result says its "
    "id. You are told of its end, with its answer, by a message in this conversation: between two of your turns or, if "
    "you have given your final answer by then, as a new input. So do not wait or ask again and again.",
    {
        "agent": {"type": "string", "description": "Name of the agent to create; leave out for the default one."},
        "task": {
            "type": "string",
            "minLength": 1,
            "description": "The whole task: the sub-agent sees nothing of this conversation.",
        },
    },
    "task",
)

BACKGROUND_TOOLS = {
    tool["name"]: tool
    for tool in (
        store_tool(
            LIST_AGENTS, "List the sub-agents that you have started in the background, and how each stands.", {}
        ),
        store_tool(
            SEND_TO_AGENT,
            "Send a message to a sub-agent that you have started. One that is at work gets it between two of its "
            "turns. For one that has finished and is still open it is a new task, and you are told of its end again.",
            {"agent": AGENT, "message": {"type": "string", "minLength": 1}},
            "agent",
            "message",
        ),
        store_tool(
            STOP_AGENT,
            "Have a sub-agent that you have started end its task. You are told when it has, with what it had done.",
            {"agent": AGENT},
            "agent",
        ),
    )
}
"""What the store answers: the specification of each tool by its name."""


def read_background(call: CallState) -> Ask | str:
    """What a call asks of the store; a text that says what is wrong with its arguments."""
    data = read_arguments(call)
    if isinstance(data, str):
        return data
    agent, message = data.get("agent"), data.get("message")
    wanted = {"agent": agent, "message": message}
    return agent_problem(call.tool, agent, message) or Ask(call.call_id, call.tool, "", executions=1, arguments=wanted)
