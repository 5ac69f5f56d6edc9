"""Tools by which a model sees and ends what it has going on: sub-agents and commands in the background,
and wakeups.

The store answers them, in the transaction that has the effect. So a job is stopped once, whatever dies.
"""

from __future__ import annotations

from understudy.jobs import JOB_TOOLS, LIST_JOBS, LONGEST_ID, MOST_SHOWN, STOP_JOB, job_problem
from understudy.records import Ask, CallState
from understudy.wakeups import DAY_SECONDS

from .asking import read_arguments
from .waking import store_tool

JOBS_TOOLS = {
    tool["name"]: tool
    for tool in (
        store_tool(
            LIST_JOBS,
            "List your jobs: the sub-agents and commands that you have started in the background, and your wakeups, "
            "each with its id and how it stands. First what goes on, then what has ended, the newest first; "
            f"{MOST_SHOWN} at most.",
            {},
        ),
        store_tool(
            STOP_JOB,
            "Stop one of your jobs. A sub-agent is told to end what it is at, and you are told when it has, with what "
            "it had done. So it is with a command, which is sent SIGTERM. A wakeup will not come any more.",
            {
                "job": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": LONGEST_ID,
                    "description": "Id of the sub-agent or command, or name of the wakeup.",
                },
                "grace": {
                    "type": "number",
                    "minimum": 0,
                    "maximum": DAY_SECONDS,
                    "description": "Seconds after which a sub-agent or a command that has not ended is ended by force; "
                    "leave out for as long as it may take, which you can only shorten.",
                },
            },
            "job",
        ),
    )
}
"""What the store answers: the specification of each tool by its name."""

JOBS_GROUP = {"jobs": JOB_TOOLS}


def read_jobs(call: CallState) -> Ask | str:
    """What a call asks of the store; a text that says what is wrong with its arguments."""
    data = read_arguments(call)
    if isinstance(data, str):
        return data
    wanted = {name: data.get(name) for name in ("job", "grace")} if call.tool == STOP_JOB else {}
    problem = job_problem(call.tool, data.get("job"), data.get("grace"))
    return problem or Ask(call.call_id, call.tool, "", executions=1, arguments=wanted)
