"""How much of what a server says is taken. A server is a program of other people's."""

from __future__ import annotations

LONGEST_MESSAGE = 8 * 1024 * 1024
"""Bytes of one message."""

LONGEST_CONTENT = 1_000_000
"""Characters of a result; of a longer one the middle is left out."""

MOST_TOOLS = 512
"""Tools of one server."""

LONGEST_NAME = 200
"""Characters of a tool's name."""

LONGEST_DESCRIPTION = 10_000
"""Characters of a tool's description."""

LONGEST_SCHEMA = 50_000
"""Bytes of a tool's schema."""

MOST_SERVERS = 64
"""Servers of one host at once; those that nobody is at leave for others."""

MOST_QUESTIONS = 20
"""Questions that a server may ask a person during one call."""

LONGEST_LIST = 500_000
"""Bytes of all that is kept of a server's tools."""

MOST_PAGES = 100
"""Pages of a list."""

KEPT_ANSWERS = 64 * 1024 * 1024
"""Characters of all answers that are kept until somebody says that they are committed; the oldest go first."""

KEPT_SECONDS = 3_600.0
"""So long an answer is kept."""

KEPT_CALLS = 10_000
"""Of so many calls that have ended it is kept that they were made, without their answers; the oldest go first."""

AWAITED_SECONDS = 7 * 86_400.0
"""So long a host that no node service calls waits for one with a call that is under way: a person may be asked."""
