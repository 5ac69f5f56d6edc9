"""A batch and what follows from it: each change is one function, with its key and its condition.

An operation runs inside a `Transaction`, possibly beside others. It first checks its condition and raises without
having changed anything, then changes rows in memory. The table in docs/architecture.md has key and condition of each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace
from sqlalchemy import bindparam, select

from understudy import events
from understudy.errors import BatchLost, Fenced
from understudy.identifiers import call_identifier, trace_identifier, wait_key
from understudy.messages import ALWAYS, NEVER, Message, ToolCall, Usage, encodable, storable
from understudy.prices import Price
from understudy.records import NO_USAGE, Ack, ActivationId, Batch, CallState, Finish, ModelAnswer

from ..budgets import Ask
from ..db.session_row import SessionRow
from ..db.statements import EVENT, RUN, TOOL_CALL
from ..transaction import Transaction
from . import answering, charging, follow_ups, handoffs, questions, steering, waiting
from .beginnings import spawn
from .endings import DEADLINE_TIMER, end_without_agent, finish_run

OUTCOMES = (events.ModelCallCompleted.type, events.ModelCallFailed.type)
"""What a model call can become; each attempt's is told once."""

LOOKED_AT = 100
"""So many events are read at a time, from the end of a log."""


def commit(
    tx: Transaction, batch: Batch, frame_id: str, *, holder: str = "", price: Price | None = None, asks: bool = True
) -> CommitResult:
    """Commit one batch of an activation. Key: (activation, batch_no); a replay changes nothing.

    Args:
        frame_id: of the frame whose batch it is.
        holder: the node service that makes the model call, if the batch asks for one.
        price: of that call's model, if it has one.
        asks: False where no call is made here: whoever goes on with the session prepares it anew.

    Raises:
        Fenced: a newer activation exists, the session has left its frame or was never in this one, or the run has ended
            without its agent.
        BatchLost: one that came before it is missing.
    """
    row = tx.session(batch.session_id)
    _require_current(row, batch.activation, frame_id)
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
        raise Fenced("the run has ended: it was told to, and only waited", session_id=batch.session_id)
    to_agent = handoffs.wanted(tx, row, batch.handoff)
    tx.changed(row)
    row.batch_no = batch.batch_no
    row.wait_error = None
    cancel = row.cancel_reason
    if batch.start_run is not None:
        if not _start_run(tx, row, batch.start_run, batch.merge_runs):
            # The input was cancelled while a frame took it up: the batch is void, and the frame looks again. Until it
            # has, the session is at work: its frame's death must be noticed, and an input must not wake it twice.
            if row.wait == "idle" and not row.closed:
                row.wait, row.active, row.status = None, 1, "running"
            if any(item.kind == "input" and item.key == batch.start_run for item in tx.inbox(row)):
                row.redone = 1  # hooks saw it begin, with inputs that are not all there any more
            return CommitResult(_ack(tx, row, 0, replayed=True), None, 0, "")
        cancel = row.cancel_reason
    follow_ups.take(tx, row, batch)
    finish = None if steering.outlives(tx, row, batch.finish) else batch.finish
    if finish is not None and row.calls_open > 0:
        waiting.drop_all(tx, row)
    first_seq = row.seq + 1
    asks_anew = (batch.wait == "model" and not asks) or steering.comes_first(tx, row, batch)
    for entry in batch.entries[: -batch.request_entries or None] if asks_anew else batch.entries:
        tx.append(row, entry)
    # A cancelled run may not grow: its spawns, questions and next model call are left out, and the Ack says why.
    refused = _spawn(tx, row, batch) if cancel is None and batch.spawns else ()
    _set_calls(tx, row, batch, refused, cancelled=cancel is not None)
    tx.take_inbox(row, batch.inbox_done)
    if batch.asks and cancel is None:
        _hand_over(tx, row, batch)
    if finish is None and to_agent is None:
        _set_wait(tx, row, batch, holder, price, asks_anew=asks_anew)
        return _committed(tx, row, first_seq)
    _go_over(tx, row, to_agent, finish)
    return CommitResult(_ack(tx, row, first_seq), row.wait, 0, "", over=row.epoch != batch.epoch)


def _go_over(tx: Transaction, row: SessionRow, to_agent: handoffs.Wanted | None, finish: Finish | None) -> None:
    """The session is handed off with this batch, or its run ends, or both."""
    handoffs.hand_off(tx, row, to_agent)
    if finish is not None:
        finish_run(tx, row, finish)
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
    return [wanted.call_id for wanted in batch.spawns if not spawn(tx, row, wanted, interrupted=interrupted)]


def _hand_over(tx: Transaction, row: SessionRow, batch: Batch) -> None:
    """Have the batch's questions answered: by the store, or by people."""
    for asked in batch.asks:
        (answering if asked.kind in answering.STORE_ANSWERS else questions).ask(tx, row, asked)
    if steering.is_interrupted(tx, row):
        steering.answer_waits(tx, row)
    elif any(asked.kind not in answering.STORE_ANSWERS for asked in batch.asks):
        questions.tell_above(tx, row)


def _require_current(row: SessionRow, activation: ActivationId, frame_id: str) -> None:
    """Refuse what another activation says, or another frame in the name of this one, as code of a user's may. Raises
    `Fenced`."""
    if row.activation != activation:
        message = f"epoch {activation.epoch} is fenced: the store has epoch {row.epoch}"
        if row.incarnation != activation.incarnation:
            message = f"epoch {activation.epoch} is fenced: it was of another incarnation of this session"
        raise Fenced(message, session_id=activation.session_id)
    if row.frame_id not in (None, frame_id):
        raise Fenced(f"the session is not in frame {frame_id}", session_id=activation.session_id)


def require_held(row: SessionRow, activation: ActivationId, frame_id: str) -> None:
    """Refuse as well what an activation says after its session left its frame: a death was noted, after which its calls
    may have been given up, or a predecessor of its node service committed late that the frame ends. Raises `Fenced`."""
    _require_current(row, activation, frame_id)
    if row.frame_id is None:
        raise Fenced("the session has left its frame", session_id=row.session_id)


def _set_wait(
    tx: Transaction, row: SessionRow, batch: Batch, holder: str, price: Price | None, *, asks_anew: bool
) -> None:  # fmt: skip
    if batch.wait == "idle" and row.run_id is None and row.inbox_count == 0:
        row.wait, row.active, row.redone = "idle", 0, 0
        row.status = row.status if row.closed else "idle"  # a closed one goes on saying how it ended
        return
    row.wait, row.status = None, "running"
    if batch.wait in (None, "idle") or row.cancel_reason is not None:
        return
    if batch.wait == "model":
        if asks_anew:
            row.redone = 1  # hooks saw the call
        else:
            _wait_for_model(tx, row, batch, holder, price)
    elif batch.wait == "child" and row.children_open:
        row.wait, row.wait_since, row.status = "child", tx.now, "waiting_for_child"
    elif batch.wait in ("input", "timer") and not _has_result(tx, row):
        # One wait, whoever answers the calls. The wait `timer` is a pause: nothing that arrives ends that.
        row.wait, row.wait_since, row.status = "input", tx.now, f"waiting_for_{batch.wait}"


def _has_result(tx: Transaction, row: SessionRow) -> bool:
    """Whether a result has come in for a call that has none yet, or an approval: the session takes it up instead of
    waiting."""
    told = {item.key for item in tx.inbox(row) if item.is_result}
    return any(
        call["state"] == "approved" or (call["call_id"] in told and call["state"] not in ("finished", "done"))
        for call in tx.current_calls(row)
    )


@dataclass(frozen=True)
class CommitResult:
    """What a commit led to: the Ack, and what the session waits for now (None: it can go on).

    Attributes:
        longest_reply: that is paid for, in tokens, if it waits for a model; 0 for any length.
        over: the activation has ended with it: the session goes on under another specification, or another agent.
    """

    ack: Ack
    wait: str | None
    attempt: int
    holder: str
    longest_reply: int = 0
    over: bool = False


def _committed(tx: Transaction, row: SessionRow, first_seq: int, *, replayed: bool = False) -> CommitResult:
    ack = _ack(tx, row, first_seq, replayed=replayed)
    return CommitResult(ack, row.wait, row.wait_attempt, row.wait_holder, charging.longest_reply(tx, row))


def _ack(tx: Transaction, row: SessionRow, first_seq: int, *, replayed: bool = False) -> Ack:
    if replayed and row.frame_id is None:  # who repeats it may be anybody: what else is known of it is not said
        return Ack(row.seq, replayed=True)
    return Ack(row.seq, first_seq, tx.inbox(row), row.cancel_reason, replayed)


def _start_run(tx: Transaction, row: SessionRow, run_id: str, merged: tuple[str, ...]) -> bool:
    inputs = {item.key: item for item in tx.inbox(row) if item.kind == "input"}
    if not inputs.keys() >= {run_id, *merged}:
        return False
    item = inputs[run_id]
    payload = item.payload
    row.run_id, row.round, row.run_usage, row.run_started_at = run_id, 0, None, tx.now
    row.trace_id, row.parent_span_id = payload["trace_id"], payload["parent_span_id"]
    row.active, row.status = 1, "running"
    row.cancel_reason = row.cancel_as = row.held = row.group_state = None
    row.children_open = row.calls_open = row.aborted = 0
    tx.take_inbox(row, [item.id])
    end = dict.fromkeys(("text", "output", "error", "usage"))
    tx.update_run(row.session_id, run_id, **end, status="running", rounds=0, started_at=tx.now, finished_at=0)
    tx.append(row, events.RunStarted(queued=tx.now - payload["accepted_at"]))
    if merged:
        follow_ups.merge(tx, row, [inputs[other] for other in merged])
    charging.begin_run(tx, row)
    deadline = charging.deadline(tx, row)
    if deadline is not None:
        tx.set_timer(row, DEADLINE_TIMER, deadline.due_at, {"run_id": run_id})
    return True


def _set_call(tx: Transaction, row: SessionRow, call: CallState) -> None:
    if call.state in ("finished", "done"):
        row.progress += 1
    if call.state == "done":
        row.calls_open -= 1
    tx.update_call(
        row.session_id, call.call_id, state=call.state, epoch=row.epoch, executions=call.executions,
        result=call.result if call.state == "finished" else None, child_id=call.child_id,
    )  # fmt: skip


def _wait_for_model(tx: Transaction, row: SessionRow, batch: Batch, holder: str, price: Price | None) -> None:
    """Reserve what the call may take, and wait; where a budget does not allow it, the session is told and goes on."""
    wanted = Ask(batch.request_tokens, batch.request_output, price)
    refusal = charging.reserve(tx, row, batch.request_round, wanted)
    if refusal is not None:
        row.wait_error = refusal.error(row.session_id)
        return
    row.wait, row.status, row.round = "model", "waiting_for_model", batch.request_round
    row.wait_attempt, row.wait_since, row.wait_holder = 1, tx.now, holder
    row.answer_key, row.answer_ended, row.redone = "", 0, 0
    event = events.ModelCallStarted(
        request_key=request_key(row), model=batch.request_model, profile=batch.request_profile, attempt=1,
        purpose=batch.request_purpose,
    )  # fmt: skip
    tx.append(row, event)


def request_key(row: SessionRow) -> str:
    """The key of the model call that the session waits for."""
    return f"{wait_key(row.session_id, row.run_id or '', row.round)}/{row.wait_attempt}"


SELECT_TRACE = select(RUN.c.trace_id).where(
    RUN.c.namespace == bindparam("ns"), RUN.c.session_id == bindparam("session"), RUN.c.run_id == bindparam("run")
)


@dataclass(frozen=True)
class AnswerResult:
    """What became of an answer: the session's new message and open calls.

    Attributes:
        won: False for a late one, which changed nothing for the session.
        repeated: it was committed before, by a transaction whose outcome was not known.
        ended: the run was asked to end, and has with this answer.
    """

    won: bool
    message: Message | None = None
    repeated: bool = False
    calls: tuple[CallState, ...] = ()
    ended: bool = False


def answer(
    tx: Transaction, session_id: str, run_id: str, round_number: int, attempt: int, model: str, got: ModelAnswer, *,
    incarnation: int, ends_run: bool = False, purpose: str = "",
) -> AnswerResult:  # fmt: skip
    """Commit a model's answer where it arrives. Key: the wait; the first answer wins, whatever its attempt.

    A late answer, or one that nobody waits for, leaves only an event: its tokens are counted. Of a session that was
    removed since, whose id another one has now, nothing is left.

    Args:
        incarnation: the session's when it asked.
        ends_run: it is the run's answer, which ends with it, unless there is a steer that the model was not sent.
        purpose: what it is for, if not for the run to go on with: then it asks for no tools, and no model sees it.
    """
    row = tx.session(session_id)
    key = f"{wait_key(session_id, run_id, round_number)}/{attempt}"
    current = (row.incarnation, row.run_id, row.round) == (incarnation, run_id, round_number)
    if current and row.wait is None and row.answer_key == key:
        return AnswerResult(True, repeated=True)
    if row.answer_ended and row.answer_key == key:
        return AnswerResult(True, repeated=True, ended=True)
    if incarnation < row.first_incarnation:  # between that and the present one it had another specification
        return AnswerResult(False)
    won = current and row.wait == "model"
    if not won and _is_known(tx, session_id, run_id, key):
        return AnswerResult(False, repeated=True)
    failed = got.error is not None
    if failed and not won:  # no run can be charged for it, and nobody knows what it took
        got = dataclasses.replace(got, usage=NO_USAGE)
    tokens = got.usage.total_tokens
    tx.changed(row)
    row.tokens_used += tokens
    row.cost_used += got.usage.cost
    row.tokens_redone += tokens if attempt > 1 else 0
    shared: dict[str, Any] = {
        "run_id": run_id, "round": round_number, "request_key": key, "attempt": attempt, "model": model,
        "provider": got.provider, "started_at": got.started_at, "duration": got.duration, "retries": got.retries,
        "trace_id": row.trace_id if row.run_id == run_id else _trace_of(tx, session_id, run_id),
        "late": not current or attempt < row.wait_attempt,
    }  # fmt: skip
    event: events.Event
    if failed:
        assert got.error is not None
        told = got.error["message"][: events.ERROR_UNCUT]
        event = events.ModelCallFailed(
            **shared, error_code=got.error["code"], error_message=told, redone=attempt > 1 and tokens > 0,
            usage=got.usage.to_wire() if tokens else None,
        )  # fmt: skip
    else:
        event = events.ModelCallCompleted(
            **shared, response_model=got.response_model, response_id=got.response_id, finish_reason=got.finish_reason,
            usage=got.usage.to_wire(), first_chunk=got.first_chunk, redone=attempt > 1, tool_calls=len(got.tool_calls),
        )  # fmt: skip
    if not won:
        charging.settle_late(tx, row, got.usage)
        tx.append(row, event)
        return AnswerResult(False)
    row.run_usage = (Usage.from_wire(row.run_usage) + got.usage).to_wire()
    charging.settle(tx, row, got.usage, rounds=0 if failed else 1)
    message: Message | None = None
    calls: tuple[CallState, ...] = ()
    if failed:
        aborted = got.error is not None and got.error["code"] == "aborted"
        row.wait_error = None if aborted and steering.is_interrupted(tx, row) else got.error
    else:
        row.progress += 1
        row.redone = 0  # while it waited, its process could do nothing
        # A cancelled run keeps the late answer's text and usage, but its tool calls would never be answered.
        wanted = got.tool_calls if row.cancel_reason is None and not purpose else ()
        message, calls = _append_answer(tx, row, run_id, round_number, got, wanted, purpose)
    tx.append(row, event)
    row.wait, row.answer_key = None, key
    ends_run = ends_run and not steering.unread(tx, row)
    if row.cancel_reason is not None or ends_run:
        row.answer_ended = 1
        if row.cancel_reason is not None:
            end_without_agent(tx, row)
        else:
            assert message is not None  # no failure ends a run here
            finish_run(tx, row, Finish("completed", message.text))
        return AnswerResult(True, message, ended=True)
    tx.wake(row)
    return AnswerResult(True, message, calls=calls)


def _is_known(tx: Transaction, session_id: str, run_id: str, request_key: str) -> bool:
    """Whether the log has this call's outcome: a commit that is tried again may have taken effect the first time, and
    a gateway may have an answer still that the service before this one committed.

    Read from the end back to the run's start: what is looked for is among the latest events as a rule.
    """
    mine = (EVENT.c.namespace == tx.namespace, EVENT.c.session_id == session_id)
    latest = (
        select(EVENT.c.seq, EVENT.c.type, EVENT.c.run_id, EVENT.c.body).order_by(EVENT.c.seq.desc()).limit(LOOKED_AT)
    )
    before = tx.session(session_id).seq + 1
    while True:
        found = tx.read(latest.where(*mine, EVENT.c.seq < before), session_id).all()
        for event in found:
            if event.run_id == run_id and event.type in OUTCOMES and event.body["request_key"] == request_key:
                return True
            if event.run_id == run_id and event.type == events.RunStarted.type:
                return False
        if len(found) < LOOKED_AT:
            return False
        before = found[-1].seq


def _trace_of(tx: Transaction, session_id: str, run_id: str) -> str:
    """The trace of a run that has ended."""
    found: str | None = tx.read_one(SELECT_TRACE, session_id, session=session_id, run=run_id)
    return found or trace_identifier(session_id, run_id)


def _facts(got: ModelAnswer) -> dict[str, Any]:
    """What is kept of an answer beside what it says."""
    facts: dict[str, Any] = {"finish_reason": got.finish_reason}
    if got.usage.input_tokens and not got.usage.estimated:
        facts["input_tokens"] = got.usage.input_tokens
    return {**facts, "provider": encodable(got.extra)} if got.extra else facts


def _append_answer(
    tx: Transaction,
    row: SessionRow,
    run_id: str,
    round_number: int,
    got: ModelAnswer,
    wanted: tuple[tuple[str, str, str], ...],
    purpose: str,
) -> tuple[Message, tuple[CallState, ...]]:  # fmt: skip
    calls = tuple(
        CallState(
            call_identifier(run_id, round_number, index),
            "requested",
            storable(name),
            storable(arguments),
            storable(provider_id),
            index,
        )
        for index, (provider_id, name, arguments) in enumerate(wanted)
    )
    message = Message(
        role="assistant",
        content=storable(got.content) if got.content is not None else None,
        tool_calls=tuple(ToolCall(call.call_id, call.tool, call.arguments, call.provider_id) for call in calls),
        run_id=run_id,
        round=round_number,
        extra=_facts(got),
        created_at=tx.now,
        origin=purpose,
        visibility=NEVER if purpose else ALWAYS,
    )
    seq = tx.append(row, message)
    row.calls_open = len(calls)
    for call in calls:
        tx.insert(
            TOOL_CALL,
            {"session_id": row.session_id, "call_id": call.call_id, "run_id": run_id, "round": round_number,
             "index": call.index, "tool": call.tool, "arguments": call.arguments, "provider_id": call.provider_id,
             "state": "requested", "epoch": row.epoch, "executions": 0, "updated_at": tx.now},
        )  # fmt: skip
    return replace(message, seq=seq), calls
