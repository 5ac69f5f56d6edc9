"""What the simulated model answers: the task in the last input says it."""

from __future__ import annotations

import json
from typing import Any

from understudy.messages import ATTACHMENTS_MARK, MEMORY_MARK
from understudy.testing.policies import Reply, content_text, register_policy

SHOWN = (MEMORY_MARK, ATTACHMENTS_MARK)
"""How messages begin that look like a user's, and are none."""


def policy(body: dict[str, Any]) -> Reply:
    """The next round of the task, or the results of all its calls."""
    messages = body["messages"]
    said = [(index, content_text(message)) for index, message in enumerate(messages) if message["role"] == "user"]
    # A sub-agent that was cancelled before it had begun may be sent a message, with which nothing is to be done.
    start, given = max(((index, text) for index, text in said if not text.startswith(SHOWN)), default=(0, ""))
    following = messages[start + 1 :]
    try:
        task = json.loads(given.partition("\n\n")[0])  # a loop's has what it knows behind it
    except ValueError:
        return Reply(text="no task")
    done = sum(message["role"] == "assistant" for message in following)
    if done < len(task["rounds"]):
        calls = tuple((tool, arguments) for tool, arguments in task["rounds"][done])
        return Reply(tool_calls=calls, delay=task["thinking"][done])
    results = [content_text(message) for message in following if message["role"] == "tool"]
    return Reply(text=f"{task['name']}: {' | '.join(results)}"[:2000], delay=task["thinking"][-1])


register_policy("simulation", policy)
