"""Triage: failures of what schedules begin, the same ones as one entry. Pure."""

from __future__ import annotations

import re

from .identifiers import digest

MOST_ENTRIES = 100
"""That a schedule may have. Behind that, failures of one code share an entry, whatever their texts say."""

LONGEST_TEXT = 2_000
"""Characters of the last failure's text that an entry keeps."""

COMPARED_CHARACTERS = 500
"""Of a text that decide which failure it is."""

VARYING = re.compile(
    r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"  # a UUID
    r"|0x[0-9a-f]+|(?=[0-9a-f]*[0-9])[0-9a-f]{7,}|\d+",
    re.IGNORECASE,
)
"""What differs between two failures of one cause: ids, addresses, hashes, times, counts."""


def normalized(text: str) -> str:
    """A failure's text without what differs each time: two of one cause are the same then."""
    return " ".join(VARYING.sub("#", text[:LONGEST_TEXT]).lower().split())[:COMPARED_CHARACTERS]


def entry_identifier(schedule: str, code: str, text: str) -> str:
    """The entry that a failure belongs to."""
    return digest(schedule, code, normalized(text), size=6)


def shared_identifier(schedule: str, code: str) -> str:
    """The entry of a code's failures that have none of their own."""
    return digest(schedule, code, size=6)
