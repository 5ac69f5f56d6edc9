"""What becomes of a tool call that was answered, or whose run ends before it has a result."""

from __future__ import annotations

from typing import Any

from understudy.approvals import IN_DOUBT, result_of
from understudy.messages import AGENT_PROCESS, interrupted
from understudy.records import CallState

from .asking import began
from .execution import Outcome, now


def without_result(call: CallState, died: str = AGENT_PROCESS) -> Outcome:
    """What is said of a call whose run ends first. One that a process had begun which died is in doubt, not cancelled:
    nobody knows what became of it.

    Args:
        died: which process that was.
    """
    asks_under_way = call.question == IN_DOUBT or (call.state == "asked" and call.executions > 0)
    if (call.state == "started" and call.child_id is None) or asks_under_way:
        since = call.updated_at or now()
        return Outcome("interrupted", interrupted(died), max(0, now() - since), since)
    return Outcome("cancelled", "cancelled")


def outcome_of(call: CallState, answer: dict[str, Any]) -> Outcome | None:
    """What an answer makes of a call; None to run it again."""
    found = result_of(answer)
    if found is None:
        return None
    since = began(call, answer)
    return Outcome(*found, now() - since, since)
