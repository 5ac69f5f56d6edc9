"""Tools for what an agent keeps in mind: notes, the board of its tree, a todo list, the time. The store answers them.

Their calls execute nothing in a frame: each has its effect, once, in the transaction that commits it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from understudy.notes import (
    ADD_NOTE,
    BOARD,
    CURRENT_TIME,
    DELETE_NOTE,
    LIST_NOTES,
    LONGEST_ITEM,
    LONGEST_NOTE,
    MOST_ITEMS,
    MOST_NOTES,
    NOTES,
    OWN_SCOPES,
    POST_TO_BOARD,
    PROJECT,
    READ_BOARD,
    REMOVE_FROM_BOARD,
    STATUSES,
    TODO,
    UPDATE_BOARD,
    UPDATE_NOTE,
    key_problem,
    offset_of,
    text_problem,
    todo_problem,
    version_problem,
)
from understudy.records import Ask, CallState

from .asking import read_arguments
from .waking import store_tool

KEY = {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$", "description": "Its short name."}
TEXT = {"type": "string", "minLength": 1, "maxLength": LONGEST_NOTE, "description": "What it says."}
VERSION = {"type": "integer", "minimum": 1, "description": "The version that you have read."}
SCOPE = {
    "type": "string",
    "enum": list(OWN_SCOPES),
    "description": "Whose the note is: of this conversation (session), of all conversations of your kind of agent "
    "(agent), or of the project you work on (project).",
}
PINNED = {"type": "boolean", "description": "Pinned notes are shown to you before others."}


NOTEBOOK_TOOLS = {
    tool["name"]: tool
    for tool in (
        store_tool(
            ADD_NOTE,
            f"Keep a short text that you will need later. At most {MOST_NOTES} notes of a scope.",
            {"text": TEXT, "key": {**KEY, "description": "Its short name; leave out for a new one."},
             "scope": {**SCOPE, "description": f"{SCOPE['description']} Default: session."}, "pinned": PINNED},
            "text",
        ),
        store_tool(
            UPDATE_NOTE,
            "Replace the text of a note.",
            {"key": KEY, "text": TEXT, "scope": SCOPE, "pinned": PINNED,
             "expected_version": {**VERSION, "description": "Change it only if it still has this version."}},
            "key",
            "text",
        ),
        store_tool(DELETE_NOTE, "Delete a note.", {"key": KEY, "scope": SCOPE}, "key"),
        store_tool(
            LIST_NOTES,
            "List your notes with their versions, long ones shortened; or read one whole, by its key.",
            {"scope": SCOPE, "key": KEY},
        ),
        store_tool(
            READ_BOARD,
            "Read the board that you share with all agents of this task: its entries with their versions, long ones "
            "shortened; or one whole, by its key.",
            {"key": KEY},
        ),
        store_tool(
            POST_TO_BOARD,
            "Put a new entry on the board that you share with all agents of this task. "
            f"At most {MOST_NOTES} entries.",
            {"key": KEY, "text": TEXT},
            "key",
            "text",
        ),
        store_tool(
            UPDATE_BOARD,
            "Replace the text of an entry of the board, if nobody has changed it since you read it. Otherwise you get "
            "its present text and version: decide again.",
            {"key": KEY, "text": TEXT, "expected_version": VERSION},
            "key",
            "text",
            "expected_version",
        ),
        store_tool(
            REMOVE_FROM_BOARD,
            "Remove an entry from the board.",
            {"key": KEY, "expected_version": {**VERSION, "description": "Only if it still has this version."}},
            "key",
        ),
        store_tool(
            TODO,
            "Set your todo list: the whole list, each time. Use it for work of several steps, and keep one item in "
            "progress.",
            {
                "items": {
                    "type": "array",
                    "maxItems": MOST_ITEMS,
                    "items": {
                        "type": "object",
                        "properties": {
                            "text": {"type": "string", "minLength": 1, "maxLength": LONGEST_ITEM},
                            "status": {"type": "string", "enum": list(STATUSES)},
                        },
                        "required": ["text", "status"],
                        "additionalProperties": False,
                    },
                }
            },
            "items",
        ),
        store_tool(
            CURRENT_TIME,
            "The date and time now.",
            {"offset": {"type": "string", "description": "A time zone's offset from UTC, as +02:00; default: UTC."}},
        ),
    )
}  # fmt: skip
"""The specification of each tool by its name."""

NOTEBOOK_GROUPS = {"notes": NOTES, "board": BOARD}


def read_for_notes(call: CallState, project: str | None, presentable: Callable[[str], str]) -> Ask | str:
    """What a call asks of the store; a text that says what is wrong with its arguments.

    Args:
        project: whose notes the agent may use beside its own; None for none.
        presentable: makes of a text what may be stored.
    """
    data = read_arguments(call)
    if isinstance(data, str):
        return data
    problem = _problem(call.tool, data, project)
    if problem is not None:
        return problem
    wanted = {name: value for name, value in data.items() if value is not None}
    if "text" in wanted:
        wanted["text"] = presentable(wanted["text"])
    if "items" in wanted:
        wanted["items"] = [{"text": presentable(item["text"]), "status": item["status"]} for item in wanted["items"]]
    wanted["project"] = project
    return Ask(call.call_id, call.tool, "", executions=1, arguments=wanted)


def _problem(kind: str, data: dict[str, Any], project: str | None) -> str | None:
    """What is wrong with the arguments of a call of this tool."""
    if kind == TODO:
        return todo_problem(data.get("items"))
    if kind == CURRENT_TIME:
        offset = data.get("offset")
        known = offset is None or offset_of(offset) is not None
        return None if known else f"offset is {offset!r}, and must be of the form +02:00"
    parameters = NOTEBOOK_TOOLS[kind]["parameters"]
    key, scope, pinned = data.get("key"), data.get("scope"), data.get("pinned")
    problem = key_problem(key) if key is not None or "key" in parameters["required"] else None
    if problem is None and "text" in parameters["properties"]:
        problem = text_problem(data.get("text"))
    if problem is None and "expected_version" in parameters["properties"]:
        required = "expected_version" in parameters["required"]
        problem = version_problem(data.get("expected_version"), required=required)
    if problem is None and pinned is not None and not isinstance(pinned, bool):
        problem = f"pinned is {pinned!r}, and must be true or false"
    if problem is None and "scope" in parameters["properties"] and scope is not None:
        may_be = OWN_SCOPES if project is not None else tuple(name for name in OWN_SCOPES if name != PROJECT)
        problem = None if scope in may_be else f"scope is {scope!r}, and must be one of {', '.join(may_be)}"
    return problem
