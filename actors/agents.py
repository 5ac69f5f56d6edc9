"""Tools by which a model has sub-agents work in the background, and reaches them there (see also `jobs`).

A start is a part of the batch that creates the sub-agent; a message the store answers, in the transaction that has its
effect. So each is done once, whatever dies.
"""

from __future__ import annotations

from understudy.agents import SEND_TO_AGENT, START_AGENT, agent_problem
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

SEND_TO_AGENT_SPEC = store_tool(
    SEND_TO_AGENT,
    "Send a message to a sub-agent that you have started. One that is at work gets it between two of its turns. For "
    "one that has finished and is still open it is a new task, and you are told of its end again.",
    {"agent": AGENT, "message": {"type": "string", "minLength": 1}},
    "agent",
    "message",
)


def read_message_to_agent(call: CallState) -> Ask | str:
    """What a call of `send_to_agent` asks of the store; a text that says what is wrong with its arguments."""
    data = read_arguments(call)
    if isinstance(data, str):
        return data
    agent, message = data.get("agent"), data.get("message")
    wanted = {"agent": agent, "message": message}
    return agent_problem(agent, message) or Ask(call.call_id, call.tool, "", executions=1, arguments=wanted)
