"""What is left of a run that ends without its agent: its last words, what it had done, results for its open calls."""

from __future__ import annotations

from collections import Counter
from typing import Any

from sqlalchemy import select

from understudy import approvals, events
from understudy.approvals import result_of
from understudy.messages import GIVEN_UP, INTERRUPTED, Message, storable
from understudy.records import Finish, child_text
from understudy.worktrees import placed

from ..db.prepared import Row
from ..db.session_row import SessionRow
from ..db.statements import MESSAGE
from ..transaction import Transaction
from . import questions
from .waiting import CALL_TIMER, QUESTION_TIMER

CANCELLED = "cancelled"

LAST_ANSWERS = 8
"""So many are read to find one that is not a summary of the history."""

TIMED = {"waiting": CALL_TIMER, "asked": QUESTION_TIMER}
"""The timers of calls in these states."""

REPORTED_ROUNDS = 8
"""A parent gets the tools of so many last rounds: a long history is not read for it."""


def last_text(tx: Transaction, row: SessionRow) -> str:
    """The last thing the agent said in its current run, for a result that has no better one."""
    # Without the run: one in which the agent has said nothing yet would be looked for through the whole history.
    statement = (
        select(MESSAGE.c.run_id, MESSAGE.c.body)
        .where(
            MESSAGE.c.namespace == tx.namespace,
            MESSAGE.c.session_id == row.session_id,
            MESSAGE.c.role == "assistant",
        )
        .order_by(MESSAGE.c.seq.desc())
        .limit(LAST_ANSWERS)
    )
    for found in tx.read(statement, row.session_id):
        message = Message.from_wire(found.body)
        if message.run_id != row.run_id or not message.origin:
            return message.text if message.run_id == row.run_id else ""
    return ""


def tools_used(tx: Transaction, row: SessionRow, run_id: str, rounds: int) -> list[list[Any]]:
    """The tools that were executed in the last rounds of a run: `[name, count]`, by name."""
    found: Counter[str] = Counter()
    for number in range(max(1, rounds - REPORTED_ROUNDS + 1), rounds + 1):
        calls = tx.calls(row.session_id, run_id, number)
        found.update(call["tool"] for call in calls if call["executions"] > 0 and call["state"] == "done")
    return [list(item) for item in sorted(found.items())]


def of_worktree(tx: Transaction, row: SessionRow, status: str, finish: Finish) -> dict[str, Any]:
    """What a parent receives about its sub-agent's worktree, as a part of the payload: nothing where that has none. One
    whose run ended without its agent is as it was left."""
    found = finish.worktree
    if found is None and status != "completed" and row.epoch > 0:
        spec = placed(tx.specification(row.session_id), row.session_id)
        if "worktree" in spec:
            found = {"outcome": "kept", "branch": spec["worktree"]["branch"], "path": spec["workspace"]}
    return {} if found is None else {"worktree": found}


def finish_calls(tx: Transaction, row: SessionRow) -> None:
    """Give each open call of the current round its one result, as the agent would have: what it has, or that it ended.

    A call in doubt is not said to be cancelled: nobody knows what became of it.
    """
    if row.run_id is None or row.calls_open <= 0:
        return
    tx.changed(row)
    results = {item.key: item.payload for item in tx.inbox(row) if item.is_result}
    for call in tx.current_calls(row):
        if call["state"] == "done":
            continue
        if call["state"] in TIMED:
            tx.drop_timer(row, TIMED[call["state"]] + call["call_id"])
        content = (call["result"] or {}).get("content")
        if content is None:
            content = _finish_call(tx, row, call, results.get(call["call_id"]))
        message = Message(
            "tool", content, tool_call_id=call["call_id"], name=call["tool"], run_id=row.run_id, round=row.round
        )
        tx.append(row, message)
        row.calls_open -= 1
        tx.update_call(
            row.session_id, call["call_id"], state="done", epoch=row.epoch, executions=call["executions"],
            result=None, child_id=call["child_id"],
        )  # fmt: skip


def _finish_call(tx: Transaction, row: SessionRow, call: Row, result: dict[str, Any] | None) -> str:
    """The text of a call's result; `result` is a child's, or the answer to the call."""
    outcome, content = CANCELLED, CANCELLED
    kind = questions.kinds(tx, row).get(call["call_id"]) if call["state"] == "asked" else None
    if result is not None and "status" in result:
        outcome, content = "ok" if result["status"] == "completed" else "error", storable(child_text(result))
    elif result is not None and (found := result_of(result)) is not None:
        outcome, content = found
    elif kind == approvals.QUESTION and call["executions"] > 0:  # a server's, which is at the call
        outcome, content = "interrupted", GIVEN_UP
    elif (
        (call["state"] == "started" and call["child_id"] is None)
        or kind == approvals.IN_DOUBT
        or (call["state"] == "asked" and call["executions"] > 0)
    ):
        outcome, content = "interrupted", INTERRUPTED
    since = tx.now if call["state"] == "requested" else call["updated_at"]
    event = events.ToolFinished(
        call_id=call["call_id"], tool=call["tool"], outcome=outcome, started_at=since,
        duration=max(0, tx.now - since), executions=call["executions"],
        error_message="" if outcome == "ok" else content[: events.ERROR_UNCUT],
    )  # fmt: skip
    tx.append(row, event)
    return content
