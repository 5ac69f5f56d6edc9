"""Notes: short texts that outlast runs. Their scopes, their limits, and what may be asked about them. Pure."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

ADD_NOTE = "add_note"
UPDATE_NOTE = "update_note"
DELETE_NOTE = "delete_note"
LIST_NOTES = "list_notes"
READ_BOARD = "read_board"
POST_TO_BOARD = "post_to_board"
UPDATE_BOARD = "update_board"
REMOVE_FROM_BOARD = "remove_from_board"
TODO = "todo"
CURRENT_TIME = "current_time"

NOTES = (ADD_NOTE, UPDATE_NOTE, DELETE_NOTE, LIST_NOTES)
BOARD = (READ_BOARD, POST_TO_BOARD, UPDATE_BOARD, REMOVE_FROM_BOARD)
NOTE_TOOLS = (*NOTES, *BOARD, TODO, CURRENT_TIME)
"""The tools that the store answers at once, and the kinds of what they ask of it."""

SESSION, AGENT, PROJECT, TREE = "session", "agent", "project", "tree"
SCOPES = (SESSION, AGENT, PROJECT, TREE)
"""Whose a note is: of one session, of all sessions of the agent's name, of a project, of a session tree (its board)."""

OWN_SCOPES = (SESSION, AGENT, PROJECT)
"""Those that the tools for notes know, the narrowest first; the board is the scope `tree`."""

HEAD = ""
"""The key of the row that counts the writes of an owner's notes."""

TODO_KEY = "~todo"
"""The key of a session's todo list; no other note can have it."""

MOST_NOTES = 64
"""That an owner may have, the todo list not counted."""

LONGEST_NOTE = 4_000
"""Characters of a note's text."""

SHOWN_CHARACTERS = 200
"""Characters of each note in a list."""

MOST_ITEMS = 50
LONGEST_ITEM = 300
"""Of a todo list: how many items, and how many characters each."""

MARKS = {"pending": "[ ]", "in_progress": "[~]", "done": "[x]"}
STATUSES = tuple(MARKS)

KEY = re.compile(r"[A-Za-z0-9._-]{1,64}")
OFFSET = re.compile(r"([+-])(\d{2}):(\d{2})")


def key_problem(key: Any) -> str | None:
    """What is wrong with a note's key; None if nothing is."""
    if isinstance(key, str) and KEY.fullmatch(key):
        return None
    return f"key is {key!r}, and must be 1 to 64 characters of A-Z a-z 0-9 . _ -"


def text_problem(text: Any) -> str | None:
    """What is wrong with a note's text; None if nothing is."""
    if not isinstance(text, str) or not text.strip():
        return "text must be a text that is not empty."
    if len(text) > LONGEST_NOTE:
        return f"the text has {len(text)} characters, and may have {LONGEST_NOTE}: shorten it, or split it."
    return None


def version_problem(version: Any, *, required: bool) -> str | None:
    """What is wrong with an expected version; None if nothing is."""
    if version is None and not required:
        return None
    if isinstance(version, int) and not isinstance(version, bool) and version > 0:
        return None
    return f"expected_version is {version!r}, and must be the version that you have read."


def todo_problem(items: Any) -> str | None:
    """What is wrong with a todo list; None if nothing is."""
    if not isinstance(items, list) or len(items) > MOST_ITEMS:
        return f"items must be a list of at most {MOST_ITEMS} items: the whole list, each time."
    for place, item in enumerate(items):
        text, status = (item.get("text"), item.get("status")) if isinstance(item, dict) else (None, None)
        if not isinstance(text, str) or not text.strip() or len(text) > LONGEST_ITEM:
            return f"items[{place}].text must be a text of 1 to {LONGEST_ITEM} characters."
        if status not in STATUSES:
            return f"items[{place}].status is {status!r}, and must be one of {', '.join(STATUSES)}."
    return None


def offset_of(offset: Any) -> timedelta | None:
    """A time zone's offset as `+02:00`; None if it is none."""
    found = OFFSET.fullmatch(offset) if isinstance(offset, str) else None
    if found is None:
        return None
    hours, minutes = int(found[2]), int(found[3])
    if hours > 14 or minutes > 59:
        return None
    return timedelta(hours=hours, minutes=minutes) * (1 if found[1] == "+" else -1)


def todo_line(item: dict[str, str]) -> str:
    """An item of a todo list as a model reads it."""
    return f"{MARKS[item['status']]} {item['text']}"
