"""Finding what hangs: a process that does not answer, or one that answers but does not progress."""

from __future__ import annotations

from understudy.waiting import answered_within

from .ports import FrameHandle, NodeHandle

PROBE_DEADLINE = 4.0
SILENCE_LIMIT = 10.0
"""A frame whose event loop stood still for so long is hung, unless one of its tools is within its deadline."""

JOURNAL_LIMIT = 60.0
"""A node service that could commit nothing for so long is replaced, unless the store is away: its successor looks again
at what the store has."""

OVERDUE_LIMIT = 5.0
"""A tool that is past its deadline by so much hangs its frame."""


async def frame_hangs(frame: FrameHandle) -> str:
    """Why the frame must be replaced; empty if it is well. Raises what its probe raises: its watch tells of a death."""
    try:
        health = await answered_within(frame.probe(), PROBE_DEADLINE)
    except TimeoutError:
        return f"no answer within {PROBE_DEADLINE:g} s"
    if health["overdue"] > OVERDUE_LIMIT:
        return f"its tool is {health['overdue']:.0f} s past its deadline"
    if health["silent"] > SILENCE_LIMIT and not health["busy"]:
        return "its event loop is blocked"
    return ""


async def node_hangs(node: NodeHandle) -> str:
    """The same of a node service."""
    try:
        health = await answered_within(node.probe(), PROBE_DEADLINE)
    except TimeoutError:
        return f"no answer within {PROBE_DEADLINE:g} s"
    if health["silent"] >= SILENCE_LIMIT:
        return "its event loop is blocked"
    if health["failing"] >= JOURNAL_LIMIT:
        return "its operations fail though the store answers"
    return "" if health["journal"] < JOURNAL_LIMIT else "its journal is blocked"
