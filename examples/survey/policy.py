"""The offline model's part in the job "survey a directory": what a sensible model would answer, computed.

It knows no files and no numbers, only the conversation: every number in the report comes from the tools.
"""

from __future__ import annotations

import json
import re
from typing import Any

from understudy.testing.policies import Reply, content_text

SURVEYOR_TOOLS = ("measure", "definitions", "todos")
"""One a round, in this order, so that a surveyor takes four rounds."""

_PART = re.compile(r'^Part: (".*")\s*$', re.MULTILINE)


def policy(body: dict[str, Any]) -> Reply:
    """Answer as the lead, if the request offers `survey_parts`, otherwise as a surveyor."""
    offered = {tool["function"]["name"] for tool in body.get("tools") or ()}
    user, results = _turn(body["messages"])
    return _lead(results) if "survey_parts" in offered else _surveyor(user, results)


def task(part: str) -> str:
    """What the lead asks a surveyor to do."""
    return f"Survey this part of the workspace.\nPart: {json.dumps(part, ensure_ascii=False)}"


def _lead(results: dict[str, list[str]]) -> Reply:
    if "survey_parts" not in results:
        return Reply(tool_calls=(("survey_parts", {}),))
    listed = _parse(results["survey_parts"][-1])
    if listed is None:
        return Reply(text=f"The directory could not be surveyed. {results['survey_parts'][-1]}")
    if "spawn_agent" not in results:
        spawns = [("spawn_agent", {"agent": "surveyor", "task": task(part)}) for part in listed["parts"]]
        return Reply(tool_calls=tuple(spawns))
    if "merge_report" not in results:
        answers = [_parse(text) or text for text in results["spawn_agent"]]
        return Reply(tool_calls=(("merge_report", {"parts": answers}),))
    return Reply(text=results["merge_report"][-1])


def _surveyor(user: str, results: dict[str, list[str]]) -> Reply:
    found = _PART.findall(user)
    if not found:
        return Reply(text="The task names no part of the workspace.")
    for name in SURVEYOR_TOOLS:
        if name not in results:
            return Reply(tool_calls=((name, {"path": json.loads(found[-1])}),))
    parsed = {name: _parse(results[name][-1]) or results[name][-1] for name in SURVEYOR_TOOLS}
    return Reply(text=json.dumps(parsed, ensure_ascii=False, separators=(",", ":")))


def _turn(messages: list[dict[str, Any]]) -> tuple[str, dict[str, list[str]]]:
    """The last user message's text, and the results after it by tool, in the order of the calls."""
    user, results, names = "", {}, {}  # type: str, dict[str, list[str]], dict[str, str]
    for message in messages:
        role = message["role"]
        if role == "user":
            user, results = content_text(message), {}
        elif role == "assistant":
            names = {call["id"]: call["function"]["name"] for call in message.get("tool_calls") or ()}
        elif role == "tool":
            results.setdefault(names[message["tool_call_id"]], []).append(content_text(message))
    return user, results


def _parse(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
