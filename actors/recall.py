"""Tools by which a model finds what is no longer in its context: the store answers them from the session's log."""

from __future__ import annotations

from typing import Any

from understudy.recall import (
    LONGEST_PIECE,
    MOST_FOUND,
    READ_MESSAGE,
    RECALL,
    read_problem,
    recall_problem,
)
from understudy.records import Ask, CallState

from .asking import read_arguments
from .waking import store_tool

RECALL_TOOLS = {
    tool["name"]: tool
    for tool in (
        store_tool(
            RECALL,
            "Search all messages of this conversation, also those that were removed from what you see since it became "
            "too long. Finds messages that have all words of the query, the newest first.",
            {
                "query": {"type": "string", "minLength": 1, "description": "Words to look for; case does not matter."},
                "limit": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": MOST_FOUND,
                    "description": "How many messages; 5 if left out.",
                },
                "before": {"type": "integer", "minimum": 1, "description": "Only messages before this number."},
            },
            "query",
        ),
        store_tool(
            READ_MESSAGE,
            "Read a message of this conversation in full, or a part of it, by its number: one that recall has found, "
            "or of which only a part is shown.",
            {
                "number": {"type": "integer", "minimum": 1},
                "offset": {"type": "integer", "minimum": 0, "description": "In characters; 0 if left out."},
                "length": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": LONGEST_PIECE,
                    "description": f"In characters; {LONGEST_PIECE} if left out.",
                },
            },
            "number",
        ),
    )
}
"""The specification of each tool by its name."""


def read_recall(call: CallState) -> Ask | str:
    """What a call asks of the store; a text that says what is wrong with its arguments."""
    data = read_arguments(call)
    if isinstance(data, str):
        return data
    wanted: dict[str, Any]
    if call.tool == RECALL:
        wanted = {"query": data.get("query"), "limit": data.get("limit", 5), "before": data.get("before")}
        problem = recall_problem(**wanted)
    else:
        offset, length = data.get("offset", 0), data.get("length", LONGEST_PIECE)
        wanted = {"number": data.get("number"), "offset": offset, "length": length}
        problem = read_problem(**wanted)
    return problem or Ask(call.call_id, call.tool, "", executions=1, arguments=wanted)
