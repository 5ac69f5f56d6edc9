"""Jobs: what a session has going on beside its runs. What each kind of them is and how it stops says its own module."""

from __future__ import annotations

from collections.abc import Callable

from understudy.jobs import LIST_JOBS, Job, described
from understudy.records import Ask

from ..db.session_row import SessionRow
from ..transaction import Transaction
from . import agents, commands, wakeups

KINDS: tuple[
    tuple[
        Callable[[Transaction, SessionRow], list[Job]],
        Callable[[Transaction, SessionRow, str, float | None], str | None],
    ],
    ...,
] = ((agents.jobs, agents.stop), (wakeups.jobs, wakeups.stop), (commands.jobs, commands.stop))
"""Of each kind: what there is, and what stops one; that says what became of it, or None where it knows no such job."""


def answer(tx: Transaction, row: SessionRow, asked: Ask) -> tuple[str, str]:
    """`(decision, text)`: the answer to a call of one of `JOB_TOOLS`, which has its effect here."""
    arguments = asked.arguments or {}
    if asked.kind == LIST_JOBS:
        return "ok", _listed(tx, row)
    job = arguments["job"]
    for _, stop in KINDS:
        said = stop(tx, row, job, arguments["grace"])
        if said is not None:
            return "ok", said
    return "error", f"you have no job {job!r}. {_listed(tx, row)}"


def _listed(tx: Transaction, row: SessionRow) -> str:
    return described([job for jobs, _ in KINDS for job in jobs(tx, row)], tx.now)
