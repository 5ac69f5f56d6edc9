"""Jobs: what a session has going on beside its runs, and what a model may ask of the store about them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from .messages import storable
from .wakeups import DAY_SECONDS, spoken

LIST_JOBS = "list_jobs"
STOP_JOB = "stop_job"

JOB_TOOLS = (LIST_JOBS, STOP_JOB)
"""The tools, and the kinds of what they ask of the store."""

MOST_SHOWN = 50
"""Jobs that a model is shown at once."""

SHOWN_TEXT = 300
"""Characters that it is shown of what a job is, or has said."""

READ_TEXT = 4 * SHOWN_TEXT
"""Characters of it that are looked at: spaces and line breaks in a row are shown as one."""

LONGEST_ID = 128


class Job(NamedTuple):
    """Something that a session has started, and that outlives the run which has.

    Attributes:
        id: what its start has said, and `stop_job` takes.
        kind: as a model reads it.
        at: when it was started or, if it has `ended`, when that was (microseconds since 1970 UTC).
        state: how it stands, in words.
        text: what it is about, or what it has said.
    """

    id: str
    kind: str
    at: int
    state: str
    text: str
    ended: bool = False


def described(jobs: Iterable[Job], now: int) -> str:
    """The jobs as a model reads them, a line for each: first what goes on, then what has ended, the newest first."""
    found = sorted(jobs, key=lambda job: (job.ended, -job.at, job.id))
    lines = [_line(job, now) for job in found[:MOST_SHOWN]]
    if len(found) > MOST_SHOWN:
        lines.append("Older ones are not listed.")
    return "\n".join(lines) or "You have no jobs."


def _line(job: Job, now: int) -> str:
    text = " ".join(job.text[:READ_TEXT].split())
    text = f"{text[:SHOWN_TEXT]}…" if len(text) > SHOWN_TEXT or len(job.text) > READ_TEXT else text
    began = "ended" if job.ended else "started"
    return f"{job.id} ({job.kind}): {job.state}, {began} {ago(job.at, now)}" + (f": {text}" if text else "")


def ago(at: int, now: int) -> str:
    """How long ago something was, in whole seconds."""
    return f"{spoken(max(0, now - at) // 1_000_000 * 1_000_000)} ago"


def job_problem(kind: str, job: Any, grace: Any) -> str | None:
    """What is wrong with the arguments of one of `JOB_TOOLS`; None if nothing is."""
    if kind != STOP_JOB:
        return None
    if not isinstance(job, str) or not job.strip() or len(job) > LONGEST_ID or storable(job) != job:
        return 'the argument "job" must be the id of a job of yours.'
    if grace is None:
        return None
    if isinstance(grace, bool) or not isinstance(grace, (int, float)) or not 0 <= grace <= DAY_SECONDS:
        return f'the argument "grace" must be a number of seconds, 0 to {DAY_SECONDS}.'
    return None
