"""The offline model's part in the job "mend a repository": what a sensible model would do, step by step.

It knows no files but those that it has read: a step whose result is not what it needs is taken again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from understudy.messages import INTERRUPTED
from understudy.testing.policies import Reply, content_text

TEST = "python3 -m unittest 2>&1"

MERGE = """*** Begin Patch
*** Update File: schedule/merge.py
@@ def merged(busy):
     for start, end in sorted(busy):
-        if result and start < result[-1][1]:
-            result[-1] = (result[-1][0], end)
+        if result and start <= result[-1][1]:
+            result[-1] = (result[-1][0], max(result[-1][1], end))
         else:
*** End Patch"""

FREE = """*** Begin Patch
*** Update File: schedule/free.py
@@ def free_times(busy, opens, closes):
     for start, end in merged(busy):
+        if start >= closes:
+            break
         if start > at:
             result.append((at, start))
-        at = end
+        at = max(at, end)
     if at < closes:
*** End Patch"""

# Nothing is committed twice, if this is cut off and run again.
COMMIT = (
    "git add --all && { git diff --cached --quiet || git commit --quiet --message 'Mend merging and free times'; }"
    " && git log --oneline"
)


@dataclass(frozen=True)
class Step:
    """One thing that is done.

    Attributes:
        is_done: whether its result is what the next step needs.
    """

    tool: str
    arguments: dict[str, Any]
    is_done: Callable[[str], bool] = lambda _result: True


STEPS = (
    Step("bash", {"command": "git log --oneline && git status --short"}),
    Step("glob", {"pattern": "**/*.py"}, lambda result: "schedule/merge.py" in result),
    Step("bash", {"command": TEST}, lambda result: "FAILED" in result),
    Step("read_file", {"path": "tests/test_schedule.py"}, lambda result: "test_touching_times_are_one" in result),
    Step("read_file", {"path": "schedule/merge.py"}, lambda result: "def merged" in result),
    Step("apply_patch", {"patch": MERGE}),
    Step("bash", {"command": TEST}, lambda result: "FAILED" in result and "test_touching" not in result),
    Step("grep", {"pattern": "merged\\(", "path": "schedule"}, lambda result: "schedule/free.py" in result),
    Step("read_file", {"path": "schedule/free.py"}, lambda result: "def free_times" in result),
    Step("apply_patch", {"patch": FREE}),
    Step("bash", {"command": TEST}, lambda result: "OK" in result),
    Step("bash", {"command": "git diff --stat"}, lambda result: "2 files changed" in result),
    Step("bash", {"command": COMMIT}, lambda result: "Mend merging" in result),
)

TRIES = 6
"""So often a step is taken whose result is of no use."""


def policy(body: dict[str, Any]) -> Reply:
    """The next step, or what was done."""
    at, tried, last = 0, 0, ""
    for tool, arguments, result in _calls(body["messages"]):
        if at < len(STEPS) and (tool, arguments) == (STEPS[at].tool, STEPS[at].arguments):
            done = INTERRUPTED not in result and STEPS[at].is_done(result)
            at, tried = (at + 1, 0) if done else (at, tried + 1)
            last = result
    if tried >= TRIES:
        return Reply(text=f"I could not go on with {STEPS[at].tool}: {last[:500]}")
    if at < len(STEPS):
        return Reply(tool_calls=((STEPS[at].tool, STEPS[at].arguments),))
    return Reply(text="The tests pass: times that touch or contain others are merged, and free times end at closing.")


def _calls(messages: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any], str]]:
    """All calls that have results: tool, arguments and result."""
    asked: dict[str, tuple[str, dict[str, Any]]] = {}
    found = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            asked[call["id"]] = call["function"]["name"], json.loads(call["function"]["arguments"])
        if message["role"] == "tool" and message["tool_call_id"] in asked:
            found.append((*asked[message["tool_call_id"]], content_text(message)))
    return found
