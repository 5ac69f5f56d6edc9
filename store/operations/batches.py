"""A batch and what follows from it: each change is one function, with its key and its condition.

An operation runs inside a `Transaction`, possibly beside others. It first checks its condition and raises without
having changed anything, then changes rows in memory. docs/isolation.md has key and condition of each.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from msgspec.structs import replace

from understudy import events
from understudy.errors import BatchLost, Fenced
from understudy.prices import Price
from understudy.queues import BEGUN, FREE
from understudy.records import CALL_ENDED, Ack, Batch, CallState, Finish, answered_by
from understudy.workflows import APPROVED, DIVERGED, WORKFLOW, begins_record

from ..db.session_row import SessionRow
from ..transaction import Transaction
from . import (
    answering,
    charging,
    endings,
    follow_ups,
    handoffs,
    model_calls,
    questions,
    queues,
    steering,
    steps,
    waiting,
)
from .beginnings import spawn
from .endings import DEADLINE_TIMER, finish_run
from .holding import require_current, require_held


def commit(
    tx: Transaction, batch: Batch, frame_id: str, *, holder: str = "", price: Price | None = None, asks: bool = True
) -> CommitResult:
    """Commit one batch of an activation. Key: (activation, batch_no); a replay changes nothing.

    Args:
        frame_id: of the frame whose batch it is.
        holder: the node service that makes the model call, if the batch asks for one.
        price: of that call's model, if it has one.
        asks: False where no call is made here: whoever goes on with the session prepares it again.

    Raises:
        Fenced: a newer activation exists, the session has left its frame or was never in this one, or the run has ended
            without its agent.
        BatchLost: one that came before it is missing.
    """
    row = tx.session(batch.session_id)
    require_current(row, batch.activation, frame_id)
    if batch.batch_no < row.batch_no:
        message = f"batch {batch.batch_no} is fenced: the store has batch {row.batch_no} of epoch {row.epoch}"
        raise Fenced(message, session_id=batch.session_id)
    if batch.batch_no == row.batch_no:
        if row.frame_id is None and row.wait is None:
            # What it waited for has come before this repetition: somebody else was woken for it, and will have it.
            raise Fenced("the session left its frame with this batch", session_id=batch.session_id)
        return _committed(tx, row, 0, replayed=True)
    if batch.batch_no != row.batch_no + 1:
        raise BatchLost(
            f"batch {batch.batch_no} of epoch {batch.epoch} can't follow: the store has batch {row.batch_no}",
            session_id=batch.session_id,
        )
    require_held(row, batch.activation, frame_id)
    if row.run_id is None and batch.start_run is None and (batch.finish or batch.entries or batch.wait != "idle"):
        raise Fenced("the run has ended: it was asked to, and only waited", session_id=batch.session_id)
    to_agent = handoffs.wanted(tx, row, batch.handoff)
    tx.changed(row)
    row.batch_no = batch.batch_no
    row.wait_error = None
    cancel = row.cancel_reason
    if batch.start_run is not None:
        if not _start_run(tx, row, batch.start_run, batch.merge_runs):
            # The input was cancelled while a frame began it: the batch is void, and the frame looks again. Until it
            # has, the session is at work: its frame's death must be noticed, and an input must not wake it twice.
            if row.wait in ("idle", "queue") and not row.closed:
                row.wait, row.active, row.status = None, 1, "running"
            if any(item.kind == "input" and item.key == batch.start_run for item in tx.inbox(row)):
                row.redone = 1  # hooks saw it begin, with inputs that are not all there any more
            return CommitResult(_ack(tx, row, 0, replayed=True), None)
        cancel = row.cancel_reason
    follow_ups.take(tx, row, batch)
    finish = None if steering.outlives(tx, row, batch.finish) else batch.finish
    if finish is not None and row.calls_open > 0:
        waiting.drop_all(tx, row)
    first_seq = row.seq + 1
    prepare_again = (batch.wait == "model" and not asks) or steering.comes_first(tx, row, batch)
    for entry in batch.entries[: -batch.request_entries or None] if prepare_again else batch.entries:
        seq = tx.append(row, entry)
        if row.kind == WORKFLOW and begins_record(entry):
            row.record_seq = seq - 1
    # A cancelled run may not grow: its spawns, questions and next model call are left out, and the Ack says why.
    refused = _spawn(tx, row, batch) if cancel is None and batch.spawns else ()
    steps.begin(tx, row, batch.steps)
    _set_calls(tx, row, batch, refused, cancelled=cancel is not None)
    tx.take_inbox(row, batch.inbox_done)
    if (batch.asks or batch.given_up) and cancel is None:
        _hand_over(tx, row, batch)
    if finish is None and to_agent is None:
        _set_wait(tx, row, batch, holder, price, prepare_again=prepare_again)
        return _committed(tx, row, first_seq)
    _go_over(tx, row, to_agent, finish)
    return CommitResult(_ack(tx, row, first_seq), row.wait, over=row.epoch != batch.epoch)


def _go_over(tx: Transaction, row: SessionRow, to_agent: handoffs.Wanted | None, finish: Finish | None) -> None:
    """The session is handed off with this batch, or its run ends, or both."""
    handoffs.hand_off(tx, row, to_agent)
    if finish is not None:
        # The code of a workflow awaits its branches: what is at work when it fails nobody wants any more.
        finish_run(tx, row, finish, hold=row.kind != WORKFLOW or finish.status in ("completed", "cancelled"))
    else:
        tx.wake(row)


def _set_calls(tx: Transaction, row: SessionRow, batch: Batch, refused: Collection[str], *, cancelled: bool) -> None:
    """Write what the batch says of its calls.

    Args:
        refused: calls that get no sub-agent.
        cancelled: the batch's spawns are left out. Where one would not be waited for, its call stays as it is: it has
            no answer of the store, as it would have otherwise.
    """
    left_out = {wanted.call_id for wanted in batch.spawns if wanted.background and cancelled}
    for call in batch.calls:
        if call.call_id not in left_out:
            _set_call(tx, row, replace(call, child_id=None) if call.call_id in refused else call)


def _spawn(tx: Transaction, row: SessionRow, batch: Batch) -> list[str]:
    """Create the batch's sub-agents; returns the calls that get none."""
    interrupted = steering.is_interrupted(tx, row)
    tx.load(wanted.child_id for wanted in batch.spawns)  # at once
    return [wanted.call_id for wanted in batch.spawns if not spawn(tx, row, wanted, interrupted=interrupted)]


def _hand_over(tx: Transaction, row: SessionRow, batch: Batch) -> None:
    """Have the batch's questions answered, by the store or by people, and end what it gives up."""
    people = [asked for asked in batch.asks if asked.kind not in answering.STORE_ANSWERS]
    answering.ask(tx, row, [asked for asked in batch.asks if asked.kind in answering.STORE_ANSWERS])
    questions.ask(tx, row, people)
    if steering.is_interrupted(tx, row):
        steering.answer_waits(tx, row)
    elif people:
        questions.tell_above(tx, row)
    if batch.given_up:
        endings.give_up(tx, row, batch.given_up)


def _set_wait(
    tx: Transaction, row: SessionRow, batch: Batch, holder: str, price: Price | None, *, prepare_again: bool
) -> None:  # fmt: skip
    if batch.wait == "idle" and row.run_id is None and queues.held_back(tx, row) is not None:
        queues.begin_next(tx, row)
        return
    if batch.wait == "idle" and row.run_id is None and row.inbox_count == 0:
        row.wait, row.active, row.redone = "idle", 0, 0
        row.status = row.status if row.closed else "idle"  # a closed one goes on saying how it ended
        return
    row.wait, row.status = None, "running"
    if batch.wait in (None, "idle") or row.cancel_reason is not None:
        return
    if batch.wait == "model":
        if prepare_again:
            row.redone = 1  # hooks saw the call
        else:
            model_calls.begin(tx, row, batch, holder, price)
    elif batch.wait == "child" and row.children_open and row.kind != WORKFLOW:
        row.wait, row.wait_since, row.status = "child", tx.now, "waiting_for_child"
    elif (batch.wait in ("input", "timer") or row.kind == WORKFLOW) and not _has_result(tx, row):
        # One wait, whoever answers the calls. The wait `timer` is a pause: nothing that arrives ends that.
        row.wait, row.wait_since, row.status = "input", tx.now, f"waiting_for_{batch.wait}"


def _has_result(tx: Transaction, row: SessionRow) -> bool:
    """Whether a result has come in for a call that has none yet, or an approval: the session handles it instead of
    waiting. A workflow whose code does not fit its log handles the answer about that, and nothing else."""
    inbox = tx.inbox(row)
    answered = answered_by(inbox)
    if row.kind == WORKFLOW and not answered and all(item.kind != APPROVED for item in inbox):
        return False
    calls = tx.current_calls(row)
    stopped = [call for call in calls if call["tool"] == DIVERGED and row.kind == WORKFLOW]
    return any(
        call["state"] == "approved" or (call["call_id"] in answered and call["state"] not in CALL_ENDED)
        for call in stopped or calls
    )


@dataclass(frozen=True)
class CommitResult:
    """What a commit led to: the Ack, and what the session waits for now (None: it can go on).

    Attributes:
        issued: the model call, if it waits for one.
        over: the activation has ended with it: the session goes on under another specification, or another agent.
    """

    ack: Ack
    wait: str | None
    issued: model_calls.Issued = model_calls.NOT_ISSUED
    holder: str = ""
    over: bool = False


def _committed(tx: Transaction, row: SessionRow, first_seq: int, *, replayed: bool = False) -> CommitResult:
    ack = _ack(tx, row, first_seq, replayed=replayed)
    return CommitResult(ack, row.wait, model_calls.issued(tx, row), row.wait_holder)


def _ack(tx: Transaction, row: SessionRow, first_seq: int, *, replayed: bool = False) -> Ack:
    if replayed and row.frame_id is None:  # who repeats it may be anybody: what else is known of it is not said
        return Ack(row.seq, replayed=True)
    return Ack(row.seq, first_seq, steps.inbox(tx, row), row.cancel_reason, replayed)


def _start_run(tx: Transaction, row: SessionRow, run_id: str, merged: tuple[str, ...]) -> bool:
    inputs = {item.key: item for item in steps.inbox(tx, row) if item.kind == "input"}
    if not inputs.keys() >= {run_id, *merged}:
        return False
    item = inputs[run_id]
    payload = item.payload
    row.run_id, row.round, row.run_usage, row.run_started_at = run_id, 0, None, tx.now
    row.trace_id, row.parent_span_id = payload["trace_id"], payload["parent_span_id"]
    row.recorded = payload.get("sampled")
    row.active, row.status = 1, "running"
    row.cancel_reason = row.cancel_as = row.held = row.group_state = None
    row.children_open = row.calls_open = row.aborted = 0
    tx.take_inbox(row, [item.id])
    end = dict.fromkeys(("text", "output", "error", "usage"))
    slot = BEGUN if row.queue else FREE
    tx.update_run(
        row.session_id, run_id, **end, status="running", rounds=0, started_at=tx.now, finished_at=0, slot=slot
    )  # fmt: skip
    seq = tx.append(row, events.RunStarted(queued=tx.now - payload["accepted_at"]))
    if row.kind == WORKFLOW:
        row.record_seq = seq
    if merged:
        follow_ups.merge(tx, row, [inputs[other] for other in merged])
    charging.begin_run(tx, row)
    deadline = charging.deadline(tx, row)
    if deadline is not None:
        tx.set_timer(row, DEADLINE_TIMER, deadline.due_at, {"run_id": run_id})
    return True


def _set_call(tx: Transaction, row: SessionRow, call: CallState) -> None:
    if call.state in CALL_ENDED:
        row.progress += 1
    if call.state == "done":
        row.calls_open -= 1
    tx.update_call(
        row.session_id, call.call_id, state=call.state, epoch=row.epoch, executions=call.executions,
        result=call.result if call.state == "finished" else None, child_id=call.child_id,
    )  # fmt: skip
