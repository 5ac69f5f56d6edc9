"""Workflows: sessions whose loop is code instead of a model. What their processes and the store have to agree on."""

from __future__ import annotations

from typing import Any

from .messages import Message

WORKFLOW, AGENT = "workflow", "agent"
"""Kinds of sessions (`SessionInfo.kind`)."""

ORIGIN = "workflow"
"""The origin of the messages that record a workflow's steps: what was asked for, and values that were taken."""

AGENT_STEP, MODEL_STEP, WORKFLOW_STEP = "agent", "model", "workflow"
SLEEP_STEP, ASK_STEP, EVENT_STEP = "sleep", "ask", "event"
"""The tools of the calls that steps are; those of others are tools by their names."""

DIVERGED = "workflow:diverged"
"""The tool of the question about code that asks for other steps than the log has: until it is answered, nothing else
that comes has an effect. No tool of an agent can have such a name."""

TIMEOUT_STEP = "workflow:timeout"
"""The tool of the call that is the timer of what shall be done within a time. No tool of an agent can have such a name.
"""

TIMERS = frozenset({SLEEP_STEP, TIMEOUT_STEP})
"""Steps that end when a time is over."""

CHILD_STEPS = frozenset({AGENT_STEP, MODEL_STEP, WORKFLOW_STEP})
"""Steps that a session of their own does."""

STEPS = CHILD_STEPS | {SLEEP_STEP, ASK_STEP, EVENT_STEP}
"""Names that no tool of a workflow may have."""

CREATE_WORKFLOW = "create_workflow"
"""The tool by which a model writes a workflow and has it done."""

WORKFLOW_STATUS = "workflow_status"
"""The tool by which it sees what one is at."""

SIGNAL = "signal"
"""The kind of an inbox row that a workflow waits for by name, or will."""

APPROVED = "approved"
"""The kind of an inbox row which says that a call of the workflow may be executed: its process may be at work."""

PUBLISHED = "publish:"
"""How the names begin under which a workflow's published values are recorded."""

CONTINUED, SNAPSHOT = "continued", "snapshot"
"""The names of records that make all before them needless: the code begins with a new input, or this is what it said.
"""

GOAL, GOAL_ROUNDS, MOST_GOAL_ROUNDS = "goal", 5, 1_000
"""The name of the workflow that pursues a goal; its rounds unless it says, and at most."""

VERDICT = "verdict-"
"""How the names begin under which a goal's verdicts are published; the number of the round follows."""

MODEL_AGENT = "model"
"""The agent of a workflow's specification that makes the model calls of its `model` steps."""

LONGEST_WRITTEN = 100_000
"""Characters of a workflow's definition that a model writes, as JSON."""

MOST_SIGNALS = 1_000
"""Signals that may wait for a workflow to ask for them."""


def begins_record(entry: Any) -> bool:
    """Whether an entry of a workflow's log makes the messages before it needless."""
    if not isinstance(entry, Message) or entry.origin != ORIGIN or entry.role != "system":
        return False
    return (entry.extra or {}).get("name") in (CONTINUED, SNAPSHOT)


def step_identifier(run_id: str, path: str) -> str:
    """The id of the call that a step is.

    Args:
        path: of the step in the code: of the branches that it is in, and its number in the innermost one (`2.3.0`).
    """
    return f"{run_id}/{path}"


def step_path(run_id: str, call_id: str) -> str:
    """The path of a step by the id of its call."""
    return call_id[len(run_id) + 1 :]
