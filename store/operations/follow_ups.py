"""Inputs that are merged: one begins the run, the others are parts of it, and their runs end with it."""

from __future__ import annotations

from typing import Any

from sqlalchemy import update

from understudy import events
from understudy.identifiers import run_link
from understudy.messages import storable
from understudy.records import Batch, Finish, InboxItem

from ..db.session_row import SessionRow
from ..db.statements import RUN
from ..transaction import Transaction
from . import loops


def merge(tx: Transaction, row: SessionRow, inputs: list[InboxItem]) -> None:
    """Make inputs that wait a part of the run that has just begun, whose batch has their messages."""
    merged = []
    for item in inputs:
        payload = item.payload
        merged.append([item.key, payload["trace_id"], payload["parent_span_id"], payload.get("sampled")])
        where = (RUN.c.namespace == tx.namespace, RUN.c.session_id == row.session_id, RUN.c.run_id == item.key)
        tx.read(update(RUN).where(*where).values(status="running", merged_into=row.run_id), row.session_id)
        queued = tx.now - payload["accepted_at"]
        event = events.RunMerged(
            run_id=item.key, trace_id=payload["trace_id"], sampled=payload.get("sampled"), into=row.run_id or "",
            queued=queued,
        )  # fmt: skip
        tx.append(row, event)
    tx.take_inbox(row, [item.id for item in inputs])
    row.merged = [*(row.merged or ()), *merged] or None


def take(tx: Transaction, row: SessionRow, batch: Batch) -> None:
    """Make inputs that tell of sub-agents' ends a part of the run that is at work, if the batch says so. One that has
    ended meanwhile, since the run shall end, is left as it is: only the session's log has the message."""
    if batch.start_run is None and batch.merge_runs:
        merge(tx, row, [item for item in tx.inbox(row) if item.kind == "input" and item.key in batch.merge_runs])


def end(tx: Transaction, row: SessionRow, status: str, finish: Finish, error: dict[str, Any] | None) -> list[str]:
    """The current run has ended: so have those that are parts of it, with the same result; returns these. Rounds and
    usage are the run's alone, so that sums over runs are right.

    Args:
        status, error: how the run ended; `finish` is how its agent wanted it to.
    """
    into, merged = row.run_id or "", row.merged or ()
    for run_id, trace_id, parent_span_id, *sampled in merged:  # one that an earlier version began lacks the last
        tx.update_run(
            row.session_id, run_id, status=status, text=storable(finish.text), output=finish.output, error=error,
            rounds=0, usage=None, started_at=0, finished_at=tx.now,
        )  # fmt: skip
        tx.append(
            row,
            events.RunFinished(
                run_id=run_id, trace_id=trace_id, sampled=sampled[0] if sampled else None,
                parent_span_id=parent_span_id, status=status,
                error_code=(error or {}).get("code", ""),
                error_message=(error or {}).get("message", "")[: events.ERROR_UNCUT],
                links=[run_link(row.trace_id, row.session_id, into)], merged_into=into,
            ),
        )  # fmt: skip
        loops.run_ended(tx, row, run_id, status, error, finish.text)
    row.merged = None
    return [run_id for run_id, *_ in merged]
