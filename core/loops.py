"""Loops: schedules whose firings know what became of those before them. How that is kept, and shown. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from .identifiers import digest
from .reads import LoopMemory, LoopRun, TriageEntry
from .records import FAILED_STATUSES

COMPLETED = "completed"

KEPT_RUNS = 10
"""Of those that have ended, the latest."""

KEPT_CHARACTERS = 400
"""Of what a run has said."""

SHOWN_ENTRIES = 10
"""Of the open ones in triage, the latest."""

HEAD = "<loop-memory>"
FOOT = "</loop-memory>"
MARKS = re.compile(r"<(\s*/?\s*loop-memory\b[^<>]*)>", re.IGNORECASE)
"""What a model could take for `HEAD` or `FOOT`."""

INTRODUCTION = (
    "What became of the runs of this loop before this one, as it was when this one began. It is not from the user, and "
    "asks nothing of you."
)


def has_failed(status: str) -> bool:
    """Whether a run that ended so goes to triage."""
    return status in FAILED_STATUSES


def begun(memory: LoopMemory, run_id: str) -> LoopMemory:
    """The memory once a run of the loop has been accepted."""
    return replace(memory, attempted=memory.attempted + 1, pending=(*memory.pending, run_id))


def ended(memory: LoopMemory, run: LoopRun) -> LoopMemory | None:
    """The memory once a run has ended; None if it knows nothing of that: it was reset since the run began."""
    if run.run_id not in memory.pending:
        return None
    outcome = outcome_of(run.status)
    return replace(
        memory,
        pending=tuple(run_id for run_id in memory.pending if run_id != run.run_id),
        recent=(run, *memory.recent)[:KEPT_RUNS],
        **{outcome: getattr(memory, outcome) + 1},
    )


def outcome_of(status: str) -> str:
    """What a run that ended so counts as: `passed`, `failed` or `cancelled`."""
    return "passed" if status == COMPLETED else "failed" if has_failed(status) else "cancelled"


def with_memory(content: Any, memory: LoopMemory, open_entries: Sequence[TriageEntry]) -> Any:
    """The input of a firing: what the schedule has, and behind it the memory, if there is any."""
    if not memory.attempted and not open_entries:
        return content
    shown = memory_text(memory, open_entries)
    return f"{content}\n\n{shown}" if isinstance(content, str) else [*content, {"type": "text", "text": shown}]


def memory_text(memory: LoopMemory, open_entries: Sequence[TriageEntry]) -> str:
    """The text that an agent reads. It has at most some 10,000 characters, since all that it is made of is cut."""
    counts = ", ".join(
        f"{number} {name}"
        for name, number in (
            ("attempted", memory.attempted),
            ("passed", memory.passed),
            ("failed", memory.failed),
            ("cancelled", memory.cancelled),
            ("pending", len(memory.pending)),
        )
    )
    lines = [HEAD, INTRODUCTION, f"Runs: {counts}."]
    lines += ["The latest that ended:"] if memory.recent else []
    lines += [f"- {spoken(run.at)} {outcome_of(run.status)}: {one_line(run.text)}" for run in memory.recent]
    lines += ["In triage, open:"] if open_entries else []
    lines += [_entry_line(entry) for entry in open_entries[:SHOWN_ENTRIES]]
    return "\n".join([*lines, FOOT])


def _entry_line(entry: TriageEntry) -> str:
    times = "once" if entry.count == 1 else f"{entry.count} times"
    return f"- {entry.id}: {times}, last {spoken(entry.last_at)}, {entry.code}: {one_line(entry.text)}"


def spoken(moment: int) -> str:
    """A time (microseconds since 1970) as models read it."""
    return f"{datetime.fromtimestamp(moment // 1_000_000, UTC):%Y-%m-%dT%H:%M:%SZ}"


def one_line(text: str) -> str:
    """A text on one line, cut, with nothing in it that could be taken for the end of the memory."""
    joined = " ".join(MARKS.sub(r"[\1]", text).split())
    return joined if len(joined) <= KEPT_CHARACTERS else f"{joined[:KEPT_CHARACTERS]}…"


def loop_name(task: str) -> str:
    """The name of a loop that was given none: another task has another one."""
    words = "-".join(re.findall(r"[a-z0-9]+", task.lower())[:5])[:40].strip("-")
    return f"{words or 'loop'}-{digest(task, size=3)}"
