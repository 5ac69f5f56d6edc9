"""Recall: what may be asked of a session's log by its model. Pure.

A model knows messages by their number among all messages of the session, which is the same whatever died meanwhile;
`seq` also counts events.
"""

from __future__ import annotations

from typing import Any

RECALL = "recall"
READ_MESSAGE = "read_message"
"""The tools, and the kinds of what they ask of the store."""

MOST_FOUND = 20
LONGEST_PIECE = 20_000
"""Characters of a message that are read at a time."""

LONGEST_QUERY = 1_000


def recall_problem(query: Any, limit: Any, before: Any) -> str | None:
    """What is wrong with a search; None if nothing is."""
    if not isinstance(query, str) or not query.split():
        return "query must be a text: the words to look for."
    if len(query) > LONGEST_QUERY:
        return f"query must have at most {LONGEST_QUERY} characters."
    return _no_integer("limit", limit, 1, MOST_FOUND) or (
        _no_integer("before", before, 1) if before is not None else None
    )


def read_problem(number: Any, offset: Any, length: Any) -> str | None:
    """What is wrong with a wish to read a message; None if nothing is."""
    return (
        _no_integer("number", number, 1)
        or _no_integer("offset", offset, 0)
        or _no_integer("length", length, 1, LONGEST_PIECE)
    )


def _no_integer(name: str, value: Any, least: int, most: int = 2**62) -> str | None:
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return None
    upto = f" to {most}" if most < 2**62 else " or more"
    return f"{name} must be a whole number, {least}{upto}."
