"""A person who decides about the tool calls of simulated agents: approves, edits, rejects, remembers; often late."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, select

from understudy.approvals import APPROVAL, APPROVE, REJECT
from understudy.store.db.statements import MESSAGE, QUESTION

if TYPE_CHECKING:
    from .world import World

EDITED = "[a person approved this call with other arguments"
"""Begins the result of such a call."""


def decisions(
    world: World, chosen: random.Random, session_id: str, asked: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """What is said now of these calls; nothing of some."""
    found = []
    for question in asked:
        if chosen.random() < 0.3:
            continue  # later
        said = {"call_id": question["call_id"], "asked": question["asked"]}
        draw = chosen.random()
        edited = _edited(world, session_id, question["call_id"]) if 0.25 <= draw < 0.45 else ""
        if draw < 0.25:
            said |= {"decision": REJECT, "text": "not now"}
        else:
            said |= {"decision": APPROVE, "text": edited}
        if not edited and chosen.random() < 0.2:
            said["remember"] = chosen.choice(("tool", "arguments"))
        world.counts["edited" if edited else "rejected" if draw < 0.25 else "approved"] += 1
        found.append(said)
    return found


def _edited(world: World, session_id: str, call_id: str) -> str:
    """Other arguments for a call; empty where it has none that fit."""
    where = f"session_id = '{session_id}' AND call_id = '{call_id}'"
    for (text,) in world.committed(f"SELECT arguments FROM tool_call WHERE {where}"):
        try:
            arguments = json.loads(text)
        except (ValueError, RecursionError):
            return ""
        if isinstance(arguments, dict) and isinstance(arguments.get("seconds"), float):
            return json.dumps({**arguments, "seconds": 0.0})
    return ""


def is_held(spec: dict[str, Any], tool: str) -> bool:
    """Whether an agent's calls of a tool need an approval."""
    return any(item["name"] == tool and item.get("approve") for item in spec["tools"])


def problem(connection: Connection, session_id: str, call_id: str, tool: str) -> str | None:
    """Why a call that needs an approval may not act, by what is committed; None if it may."""
    asked = select(QUESTION.c.answer).where(
        QUESTION.c.session_id == session_id, QUESTION.c.call_id == call_id, QUESTION.c.kind == APPROVAL
    )
    said = {(answer or {}).get("decision") for answer in connection.execute(asked).scalars()}
    if REJECT in said:
        return "which was rejected"
    if APPROVE in said:
        return None
    records = connection.execute(select(MESSAGE.c.body).where(MESSAGE.c.session_id == session_id)).scalars()
    extras = [body["extra"] for body in records if body.get("origin") == APPROVAL]
    remembered = any(extra["tool"] == tool and extra["decision"] == APPROVE for extra in extras)
    return None if remembered else "which nobody had approved"
