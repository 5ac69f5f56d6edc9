"""Questions of a run as forms that a client of the Model Context Protocol shows to its person (elicitation)."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

import mcp_types as types

from understudy.approvals import APPROVAL, APPROVE, QUESTION, REJECT
from understudy.errors import AnswerConflict, NotAsked
from understudy.reads import PendingInput

from .results import RunResult
from .session_handle import Session

RERUN, DONE, FAILED = "run it again", "it has its result", "it failed"


def key_of(item: PendingInput) -> str:
    """What a question is known by: a call that asks again asks another one."""
    return f"{item.session_id}/{item.call_id}/{item.asked}"


def question(item: PendingInput) -> types.ElicitRequestFormParams:
    """The form of a question."""
    return types.ElicitRequestFormParams(message=item.prompt, requested_schema=_schema(item))


def form_of(item: PendingInput) -> types.ElicitRequest:
    """The same as a request."""
    return types.ElicitRequest(params=question(item))


def _schema(item: PendingInput) -> dict[str, Any]:
    if item.form is not None:
        return item.form
    if item.kind == QUESTION:
        offered = f"One of: {', '.join(item.options)}; or another answer." if item.options else "The answer."
        return _object({"answer": {"type": "string", "minLength": 1, "description": offered}}, "answer")
    if item.kind == APPROVAL:
        reason = {"type": "string", "description": "Why not; the agent reads it."}
        return _object({"decision": {"type": "string", "enum": [APPROVE, REJECT]}, "reason": reason}, "decision")
    text = {"type": "string", "description": "Its result, or why it failed."}
    return _object({"decision": {"type": "string", "enum": [RERUN, DONE, FAILED]}, "text": text}, "decision")


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


async def answered(session: Session, item: PendingInput, response: types.ElicitResult) -> bool:
    """Have a person's answer accepted; False if there is none. One that somebody else has given by now counts."""
    content: Mapping[str, Any] = response.content or {}
    if response.action != "accept":
        return False
    try:
        if item.kind == QUESTION:
            text = json.dumps(content) if item.form is not None else str(content.get("answer") or "")
            if text:
                await session.answer.aio(item, text)
            return bool(text)
        decision = content.get("decision")
        if item.kind == APPROVAL and decision in (APPROVE, REJECT):
            if decision == APPROVE:
                await session.approve.aio(item)
            else:
                await session.reject.aio(item, str(content.get("reason") or ""))
            return True
        if item.kind != APPROVAL and decision in (RERUN, DONE, FAILED):
            text = str(content.get("text") or decision)
            await session.answer.aio(item, "" if decision == RERUN else text, failed=decision == FAILED,
                                     rerun=decision == RERUN)  # fmt: skip
            return True
    except (AnswerConflict, NotAsked):
        return True
    return False


def unanswered(result: RunResult, session_id: str, structured: dict[str, Any]) -> types.CallToolResult:
    """What a client that asks nobody receives: what the run waits for, and how it is answered elsewhere.

    Args:
        session_id: of the run.
        structured: the result as data.
    """
    lines = ["The agent waits for a person. It goes on once this is answered:"]
    for item in result.pending:
        verb = "approve" if item.kind == APPROVAL else "answer"
        words = ["understudy", verb, item.session_id or session_id, item.call_id]
        lines.append(f"- {item.prompt}\n  {shlex.join(words)}{'' if verb == 'approve' else ' TEXT'}")
    lines.append("Then call again with the same prompt, session and run_id for the answer.")
    text = "\n".join(lines)
    return types.CallToolResult(content=[types.TextContent(text=text)], structured_content={**structured, "text": text})
