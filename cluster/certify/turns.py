"""Whose turn it is under `understudy certify`: sub-agents in the background end at a moment that is the same each time.

When such a sub-agent ends, its parent learns of it in whatever round it is in then. Which one that is depends on
timing, and would differ after a death. So their answers are put in order: a session gets an answer of its model when
the sub-agents that it has started in the background have ended, in the order in which they were started; and they get
theirs while their parent waits, and not while it works, or is about to be resumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import takewhile

from understudy.reads import SessionRecord

WORKS = (None, "timer")
"""`wait` of a session that is at work, or that is about to be resumed after a death."""


def first_at_work(
    session_id: str, tree: Iterable[SessionRecord], started: Mapping[str, int], background: Iterable[str]
) -> SessionRecord | None:
    """A session that must come to an end, or to a wait, before this one gets its model's answer; None if none must.

    Args:
        started: in which order sub-agents were started, by id.
        background: which of them nobody waits for.
    """
    rows = {row.session_id: row for row in tree}
    if session_id not in rows:
        return None
    apart, mine = set(background), _path(session_id, rows)
    for row in rows.values():
        if not row.active or row.session_id == session_id:
            continue
        other = _path(row.session_id, rows)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(mine, other, strict=False)))
        own, its = (path[common] if common < len(path) else None for path in (mine, other))
        if its is None:  # it is above this one
            blocks = own in apart and row.wait in WORKS
        elif own is None:  # it is below
            blocks = its in apart
        else:
            blocks = its in apart and started.get(its, 0) < started.get(own, 0)
        if blocks:
            return row
    return None


def _path(session_id: str, rows: Mapping[str, SessionRecord]) -> list[str]:
    """The sessions from the root to this one."""
    found = [session_id]
    while (parent := rows[found[-1]].parent_id) is not None and parent in rows:
        found.append(parent)
    return found[::-1]
