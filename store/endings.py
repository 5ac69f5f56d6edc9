"""How things end: runs, children, cancels, sessions. What ends tells whoever waits for it, in the same transaction."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select, update

from understudy import events
from understudy.messages import storable
from understudy.records import Finish

from .charging import settle
from .statements import RUN, SESSION
from .transaction import Row, Transaction

TASK = "task"
"""Run id of a child's one task, given by its parent."""

TERMINAL = ("completed", "failed", "cancelled", "quarantined")


def finish_run(tx: Transaction, row: Row, finish: Finish) -> None:
    """End the current run: its row, its event, the parent's inbox, and what the session does next."""
    run_id = row["run_id"]
    if run_id is None:
        return
    status = "cancelled" if row["cancel_reason"] is not None and finish.status != "quarantined" else finish.status
    error = finish.error
    if status == "cancelled" and error is None:
        error = {"code": "cancelled", "message": row["cancel_reason"] or "cancelled", "session_id": row["session_id"]}
    settle(tx, row)
    tx.update_run(
        row["session_id"], run_id, status=status, text=storable(finish.text), output=finish.output, error=error,
        rounds=row["round"], usage=row["run_usage"], started_at=row["run_started_at"], finished_at=tx.now,
    )  # fmt: skip
    tx.append(
        row,
        events.RunFinished(
            status=status, rounds=row["round"], usage=row["run_usage"], started_at=row["run_started_at"],
            parent_span_id=row["parent_span_id"], error_code=(error or {}).get("code", ""),
            error_message=(error or {}).get("message", "")[:500],
        ),
    )  # fmt: skip
    is_task = row["parent_id"] is not None and run_id == TASK
    if is_task:
        _deliver(tx, row, status, finish, error)
        row["closed"] = 1
        row["status"] = status if status in TERMINAL else "completed"
    else:
        row["status"] = "quarantined" if status == "quarantined" else "completed" if row["closed"] else "idle"
    had_children = row["children_open"] > 0
    row.update(
        run_id=None, cancel_reason=None, children_open=0, calls_open=0, run_usage=None, trace_id="", parent_span_id="",
        round=0, error=error if status in ("failed", "quarantined") else None, wait="idle", active=0, wait_error=None,
    )  # fmt: skip
    if had_children:  # after the run is gone from the row, so that what they still deliver is dropped
        for child in children(tx, row["session_id"]):
            request_cancel(tx, child, "its parent's run ended")
    tx.take_inbox(row, [item["id"] for item in tx.inbox(row) if item["kind"] == "child_result"])
    if row["closed"] or status == "quarantined":
        end_queued(tx, row, status if status == "quarantined" else "cancelled", "the session ended")
    elif row["inbox_count"] > 0:
        tx.wake(row)


def _deliver(tx: Transaction, child: Row, status: str, finish: Finish, error: dict[str, Any] | None) -> None:
    """Put a child's result into its parent's inbox; the parent wakes when it has them all."""
    parent = tx.session(child["parent_id"])
    if parent["run_id"] is None or parent["run_id"] != child["parent_run_id"]:
        return
    tx.append(parent, events.ChildFinished(call_id=child["call_id"], child_id=child["session_id"], status=status))
    payload = {
        "child_id": child["session_id"], "status": status, "text": finish.text, "output": finish.output,
        "error": error, "usage": child["run_usage"], "rounds": child["round"],
    }  # fmt: skip
    tx.put_inbox(parent, "child_result", child["call_id"], payload)
    parent["children_open"] -= 1
    if parent["wait"] == "child" and parent["children_open"] == 0:
        tx.wake(parent)


def children(tx: Transaction, session_id: str) -> list[Row]:
    """The session's children that are at work."""
    statement = select(SESSION.c.session_id).where(
        SESSION.c.namespace == tx.namespace, SESSION.c.parent_id == session_id, SESSION.c.active == 1
    )
    ids = list(tx.read(statement).scalars())
    tx.load(ids)
    return [row for row in map(tx.session, ids) if row["active"]]


def request_cancel(tx: Transaction, row: Row, reason: str, run_id: str | None = None) -> bool:
    """Ask the current run (or the queued one named) to end, and all that it spawned; True if there was one.

    From this commit on the run can neither spawn nor call a model, so no child appears behind the walk.
    """
    queued = next((i for i in tx.inbox(row) if i["kind"] == "input" and i["key"] == (run_id or i["key"])), None)
    if row["run_id"] is None or (run_id is not None and run_id != row["run_id"]):
        if queued is None:
            return False
        _end_queued_run(tx, row, queued, "cancelled", reason)
        if row["closed"]:  # it was a child's task: whatever else was sent to the child would wait for ever
            end_queued(tx, row, "cancelled", reason)
        return True
    if row["cancel_reason"] is not None:
        return True
    tx.changed(row)
    row["cancel_reason"] = reason = storable(reason)
    tx.append(row, events.CancelRequested(reason=reason))
    where = (RUN.c.namespace == tx.namespace, RUN.c.session_id == row["session_id"], RUN.c.run_id == row["run_id"])
    tx.read(update(RUN).where(*where).values(cancel_requested=reason), row["session_id"])
    tx.cancelled[row["session_id"]] = row
    for child in children(tx, row["session_id"]):
        request_cancel(tx, child, reason)
    if row["wait"] == "timer" or (row["wait"] == "child" and row["children_open"] == 0):
        tx.wake(row)
    return True


def end_queued(tx: Transaction, row: Row, status: str, reason: str) -> None:
    """End every run that has not begun."""
    for item in tx.inbox(row):
        if item["kind"] == "input":
            _end_queued_run(tx, row, item, status, reason)


def _end_queued_run(tx: Transaction, row: Row, item: dict[str, Any], status: str, reason: str) -> None:
    error = {"code": status, "message": reason, "session_id": row["session_id"]}
    tx.changed(row)
    tx.take_inbox(row, [item["id"]])
    tx.update_run(
        row["session_id"], item["key"], status=status, text="", output=None, error=error, rounds=0, usage=None,
        started_at=0, finished_at=tx.now,
    )  # fmt: skip
    tx.append(
        row,
        events.RunFinished(
            run_id=item["key"], trace_id=item["payload"]["trace_id"], status=status, error_code=status,
            error_message=reason[:500],
        ),
    )  # fmt: skip
    if row["parent_id"] is not None and item["key"] == TASK:
        row["status"], row["closed"], row["active"], row["wait"] = status, 1, 0, "idle"
        _deliver(tx, row, status, Finish(status), error)
    elif row["run_id"] is None and row["inbox_count"] == 0 and row["status"] == "running":
        row["status"], row["active"], row["wait"] = "idle", 0, "idle"


def close(tx: Transaction, session_id: str, reason: str) -> bool:
    """Take no more input; cancel what runs, children included. True if the session was open."""
    row = tx.session(session_id)
    if row["closed"]:
        return False
    tx.changed(row)
    row["closed"] = 1
    tx.append(row, events.SessionClosed(reason=reason))
    end_queued(tx, row, "cancelled", reason)
    request_cancel(tx, row, reason)
    if row["run_id"] is None:
        row["status"], row["active"], row["wait"] = "completed", 0, "idle"
    return True
