"""A session's wait for its model: the call begins, has a name at the endpoint, goes out again, and is answered."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec.structs import replace
from sqlalchemy import bindparam, select

from understudy import events
from understudy.identifiers import call_identifier, trace_identifier, wait_key
from understudy.messages import ALWAYS, NEVER, Message, ToolCall, Usage, encodable, storable
from understudy.prices import Price
from understudy.records import NO_USAGE, ActivationId, Batch, CallState, Finish, KeptResponse, ModelAnswer

from ..budgets import Ask
from ..db.session_row import SessionRow
from ..db.statements import EVENT, RUN, TOOL_CALL
from ..transaction import Transaction
from . import charging, steering
from .endings import end_without_agent, finish_run
from .holding import require_held

OUTCOMES = (events.ModelCallCompleted.type, events.ModelCallFailed.type)
"""What a model call can become; each attempt's is reported once."""

LOOKED_AT = 100
"""So many events are read at a time, from the end of a log."""


def begin(tx: Transaction, row: SessionRow, batch: Batch, holder: str, price: Price | None) -> None:
    """Reserve what the call may take, and wait; where a budget forbids it, the session gets the error and goes on."""
    wanted = Ask(batch.request_tokens, batch.request_output, price)
    refusal = charging.reserve(tx, row, batch.request_round, wanted)
    if refusal is not None:
        row.wait_error = refusal.error(row.session_id)
        return
    row.wait, row.status, row.round = "model", "waiting_for_model", batch.request_round
    row.wait_attempt, row.wait_since, row.wait_holder = 1, tx.now, holder
    row.answer_key, row.response, row.answer_ended, row.redone = "", None, 0, 0
    event = events.ModelCallStarted(
        request_key=request_key(row), model=batch.request_model, profile=batch.request_profile, attempt=1,
        purpose=batch.request_purpose,
    )  # fmt: skip
    tx.append(row, event)


def request_key(row: SessionRow) -> str:
    """The key of the model call that the session waits for."""
    return f"{wait_key(row.session_id, row.run_id or '', row.round)}/{row.wait_attempt}"


SELECT_TRACE = select(RUN.c.trace_id, RUN.c.sampled).where(
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
    incarnation: int, ends_run: bool = False, purpose: str = "", fetched: bool = False,
) -> AnswerResult:  # fmt: skip
    """Commit a model's answer where it arrives. Key: the wait; the first answer wins, whatever its attempt.

    A late answer, or one that nobody waits for, leaves only an event: its tokens are counted. Of a session that was
    removed since, whose id another one has now, nothing is left.

    Args:
        incarnation: the session's when it asked.
        ends_run: it is the run's answer, which ends with it, unless there is a steer that the model was not sent.
        purpose: what it is for, if not for the run to go on with: then it asks for no tools, and no model sees it.
        fetched: it is the response that an earlier attempt had (`CallOrigin.is_fetched`): that is paid once.
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
    if not won and _is_known(tx, session_id, run_id, key, got):
        return AnswerResult(False, repeated=True)
    failed = got.error is not None
    if failed and not won:  # no run can be charged for it, and nobody knows what it took
        got = dataclasses.replace(got, usage=NO_USAGE)
    tokens = got.usage.total_tokens
    redone = attempt > 1 and tokens > 0 and not fetched
    tx.changed(row)
    row.tokens_used += tokens
    row.cost_used += got.usage.cost
    row.tokens_redone += tokens if redone else 0
    in_run = row.run_id == run_id
    trace_id, sampled = (row.trace_id, row.recorded) if in_run else _trace_of(tx, session_id, run_id)
    shared: dict[str, Any] = {
        "run_id": run_id, "round": round_number, "request_key": key, "attempt": attempt, "model": model,
        "provider": got.provider, "started_at": got.started_at, "duration": got.duration, "retries": got.retries,
        "waited": dict(got.waited) or None, "retried": dict(got.retried) or None,
        "chunk_times": list(got.chunk_times) or None, "currency": got.currency,
        "trace_id": trace_id, "sampled": sampled,
        "late": not current or attempt < row.wait_attempt, "server_address": got.server_address,
        "server_port": got.server_port, "parameters": got.parameters,
    }  # fmt: skip
    event: events.Event
    if failed:
        assert got.error is not None
        error_text = got.error["message"][: events.ERROR_UNCUT]
        event = events.ModelCallFailed(
            **shared, error_code=got.error["code"], error_message=error_text, redone=redone,
            usage=got.usage.to_wire() if tokens else None,
        )  # fmt: skip
    else:
        event = events.ModelCallCompleted(
            **shared, profile=got.profile, response_model=got.response_model, response_id=got.response_id,
            finish_reason=got.finish_reason, usage=got.usage.to_wire(), first_chunk=got.first_chunk, redone=redone,
            tool_calls=len(got.tool_calls),
        )  # fmt: skip
    if not won:
        charging.book_late(tx, row, got.usage)
        tx.append(row, event)
        return AnswerResult(False)
    row.run_usage = (Usage.from_wire(row.run_usage) + got.usage).to_wire()
    charging.book(tx, row, got.usage, rounds=0 if failed else 1)
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


def _is_known(tx: Transaction, session_id: str, run_id: str, request_key: str, got: ModelAnswer) -> bool:
    """Whether the log has this call's outcome: a commit that is tried again may have taken effect the first time, and
    a gateway may have an answer still that the service before this one committed. Or another attempt has fetched the
    same response of the same endpoint, which is paid once.

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
            if event.run_id == run_id and event.type in OUTCOMES:
                if event.body["request_key"] == request_key:
                    return True
                if got.background and got.response_id and _response_of(event.body) == (got.profile, got.response_id):
                    return True
            if event.run_id == run_id and event.type == events.RunStarted.type:
                return False
        if len(found) < LOOKED_AT:
            return False
        before = found[-1].seq


def _response_of(body: dict[str, Any]) -> tuple[str, str]:
    """Profile (empty: that of the request) and id of the response that an event tells of."""
    return body.get("profile", ""), body.get("response_id", "")


def _trace_of(tx: Transaction, session_id: str, run_id: str) -> tuple[str, bool | None]:
    """The trace of a run that has ended, and whether its caller records it."""
    found = tx.read(SELECT_TRACE.params(ns=tx.namespace, session=session_id, run=run_id), session_id).first()
    trace_id, sampled = found if found is not None else (None, None)
    return trace_id or trace_identifier(session_id, run_id), None if sampled is None else bool(sampled)


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


def identify(
    tx: Transaction, session_id: str, incarnation: int, run_id: str, round_number: int, attempt: int,
    response: KeptResponse,
) -> bool:  # fmt: skip
    """Note which endpoint has the response to a call, under which id: whoever takes the call over fetches it.

    Key and condition: the wait and its attempt. Of an attempt that was given up nothing is noted: the next one may have
    a response of its own by now. False if nobody waits for that attempt any more.
    """
    row = tx.find(session_id)
    wanted = (incarnation, run_id, round_number, attempt)
    if row is None or row.wait != "model":
        return False
    if (row.incarnation, row.run_id, row.round, row.wait_attempt) != wanted:
        return False
    if row.response != response:
        tx.changed(row)
        row.response = response
    return True


class Issued(NamedTuple):
    """A model call's attempt, the longest reply that is paid for (0: any), and the response that an earlier attempt has
    at an endpoint (None: none that is known)."""

    attempt: int
    longest_reply: int
    response: KeptResponse | None = None


NOT_ISSUED = Issued(0, 0)
"""Of a session that waits for no model."""


def issued(tx: Transaction, row: SessionRow) -> Issued:
    """The model call that the session waits for."""
    return Issued(row.wait_attempt, charging.longest_reply(tx, row), row.response)


def reissue(tx: Transaction, activation: ActivationId, frame_id: str, holder: str, model: str) -> Issued | None:
    """Take over a model call whose node service is gone, as the next attempt; None if nobody waits for it any more."""
    row = tx.session(activation.session_id)
    require_held(row, activation, frame_id)
    if row.wait != "model":
        return None
    if row.cancel_reason is not None:  # nothing is bought for a run that shall end
        end_without_agent(tx, row)
        return None
    tx.changed(row)
    lost_key, since = request_key(row), row.wait_since
    row.wait_attempt, row.wait_holder, row.wait_since = row.wait_attempt + 1, holder, tx.now
    tx.append(
        row,
        events.ModelCallReissued(
            request_key=request_key(row),
            lost_key=lost_key,
            model=model,
            attempt=row.wait_attempt,
            started_at=since,
            response_id=row.response_id,
            response_profile=row.response_profile,
            response_model=row.response_model,
        ),
    )  # fmt: skip
    return issued(tx, row)
