"""What a run that did not complete was asked for, asked for again: by requests that there are anyway."""

from __future__ import annotations

import re

from understudy.errors import SessionClosed, UnknownRun
from understudy.identifiers import digest, identifier_problem
from understudy.protocol import Input
from understudy.queues import QueuePlace
from understudy.reads import RunRecord, RunSummary
from understudy.records import FAILED_STATUSES

from .fleet import Source

LOOKED_AT = 500
AGAIN = re.compile(r"-again(?:-([2-9]|[1-9]\d+))?")


def again_id(run_id: str) -> str:
    """The id of the run that does the same again: `X-again`, after that `X-again-2`. Always the same for the same run,
    so that nobody begins it twice; from an id that is too long, or is no client's, a digest is made."""
    found = AGAIN.search(run_id)
    known = found is not None and found.end() == len(run_id)
    first = run_id[: found.start()] if found is not None and known else run_id
    number = int(found[1] or 1) + 1 if found is not None and known else 1
    wanted = f"{first}-again" + (f"-{number}" if number > 1 else "")
    return f"{digest(run_id)}-again" if identifier_problem(wanted, "run_id") else wanted


async def run_again(
    source: Source, session_id: str, run_id: str | None = None, by: str = ""
) -> tuple[str, bool] | None:
    """Send the input of a run again that did not complete, as a run of its own; the session is resumed if it has to be.

    Inputs whose runs ended with it, since they were a part of it or were queued when the session was given up, are sent
    again as well. It may be repeated: each run has one that does it again (`again_id`).

    Args:
        run_id: default: the session's last run. Name the one that was looked at: a repetition that comes after the new
            run has failed, too, would begin a third.
        by: who asks for it.

    Returns:
        The new run's id, and whether this request began it; None if the run goes on, completed, or was cancelled.

    Raises:
        UnknownSession, UnknownRun: there is none.
        SessionClosed: the session takes no more input.
        RunConflict: a client has used the new run's id for another input.
        ModelProfileMissing: no client has brought the key of the agent's model.
    """
    runs = await source.read(list[RunSummary], "latest_runs", session_id, LOOKED_AT)
    last = runs[0].run_id if runs and run_id is None else run_id
    wanted = next((run for run in runs if run.run_id == last), None)
    if wanted is None:
        raise UnknownRun(f"the latest runs have no {last!r}" if last else "it has no run", session_id=session_id)
    if wanted.status not in FAILED_STATUSES:
        return None
    await source.act("require_key", session_id, by=by)
    ended = [run.run_id for run in runs if run.finished_at == wanted.finished_at]  # in one transaction
    begun = False
    for name in reversed(ended):
        record = await source.read(RunRecord, "run", session_id, name)
        place = QueuePlace(record.queue, record.queue_key, -record.queue_rank) if record.queue else None
        run = Input(again_id(name), record.content, place=place)
        try:
            accepted = await source.act("send", session_id, run, by=by)
        except SessionClosed:
            # Not before: a late repetition would resume a session that was given up with the new run.
            await source.act("resume", session_id, by=by)
            accepted = await source.act("send", session_id, run, by=by)
        begun = begun or bool(accepted["created"])
    return again_id(wanted.run_id), begun
