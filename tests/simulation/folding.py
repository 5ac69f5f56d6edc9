"""Folded histories in the simulation: a summary has all that it is of, so that unfolded nothing may be missing."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from understudy.actors.context import FOLD_REQUEST, REMOVED, SUMMARY
from understudy.testing.policies import Reply, content_text

BEGINS = REMOVED + SUMMARY.partition("{")[0]
ASKED = "Do not go on with the task now."
SMALL = {"window": 10_000_000, "representation": "full", "fold_at": 0.00006, "keep": 0.000002}
"""Context for some hundred tokens. It is never nearly full, so nothing is left out without a summary."""


def folding(chosen: random.Random, spec: dict[str, Any]) -> dict[str, Any]:
    """The same specification; its agents fold their histories."""
    agents = {name: folding(chosen, agent) for name, agent in spec["agents"].items()}
    return {**spec, "context": {**SMALL, "fold": chosen.choice(("summarise", "notes"))}, "agents": agents}


def summary(messages: list[dict[str, Any]], longest: int | None) -> Reply | None:
    """The answer to a request for a summary: all messages before it; None for another request.

    Args:
        longest: tokens that the reply may have.
    """
    if not content_text(messages[-1]).startswith(ASKED):
        return None
    text = json.dumps([message for message in messages[:-1] if message["role"] != "system"])
    return Reply(text=text if len(text) <= 4 * (longest or len(text)) else "")  # a part of it could not be unfolded


def unfolded(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with those that a summary stands for."""
    found: list[dict[str, Any]] = []
    for message in messages:
        text = content_text(message)
        if message["role"] == "user" and text.startswith(BEGINS):
            found += json.JSONDecoder().raw_decode(text, len(BEGINS))[0]
        else:
            found.append(message)
    return found


def due_to_be_sent(rows: Sequence[Any], number: int) -> list[Any]:
    """Of a session's messages those that its model must be sent in this round, unfolded."""
    visible = [row for row in rows if "visibility" not in row.body]
    last = rows[-1].body if rows else {}
    if last.get("origin") == FOLD_REQUEST and last["round"] == number - 1:
        return [*(row for row in visible if row.seq <= rows[-1].body["extra"]["through"]), rows[-1]]
    return visible
