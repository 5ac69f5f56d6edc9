"""Tool calls that wait for people: asking, answering, giving up. Questions, approvals and calls in doubt alike."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace
from sqlalchemy import func, select, update

from understudy import approvals, events
from understudy.approvals import APPROVAL, APPROVE, IN_DOUBT, REJECT, memory
from understudy.errors import AnswerConflict, InvalidInput, NotAsked
from understudy.messages import encodable, storable
from understudy.protocol import Decision
from understudy.records import Ask
from understudy.workflows import APPROVED, WORKFLOW

from ..db.prepared import Row
from ..db.session_row import SessionRow
from ..db.statements import LOADED_AT_ONCE, QUESTION, RUN
from ..transaction import Transaction
from . import steps
from .waiting import QUESTION_TIMER, go_on, hand_in

DECISIONS = {approvals.QUESTION: ("ok", "error"), IN_DOUBT: ("ok", "error", "rerun"), APPROVAL: (APPROVE, REJECT)}
"""What a person can say of a call, by the kind of its question (`Decision`)."""

ABORTED = {"decision": "aborted", "text": "given up: nobody will answer this call"}


def ask(tx: Transaction, row: SessionRow, asks: Sequence[Ask]) -> None:
    """Let tool calls of the current run wait for people; the run is paused until every question is answered."""
    before: dict[str, int] = {}
    for start in range(0, len(asks), LOADED_AT_ONCE):
        known = QUESTION.c.call_id.in_([asked.call_id for asked in asks[start : start + LOADED_AT_ONCE]])
        numbers = select(QUESTION.c.call_id, func.max(QUESTION.c.asked)).where(*_of_session(tx, row), known)
        found = tx.read(numbers.group_by(QUESTION.c.call_id), row.session_id)
        before.update((call_id, number) for call_id, number in found)
    for asked in asks:
        _ask(tx, row, asked, before.get(asked.call_id, 0) + 1)
    if asks:
        _set_run_status(tx, row, "waiting_for_input")


def _ask(tx: Transaction, row: SessionRow, asked: Ask, number: int) -> None:
    prompt, options = storable(asked.prompt), [storable(option) for option in asked.options]
    tx.insert(
        QUESTION,
        {"session_id": row.session_id, "call_id": asked.call_id, "asked": number, "run_id": row.run_id,
         "kind": asked.kind, "prompt": prompt, "options": options, "form": encodable(asked.form),
         "elicitation": asked.elicitation, "answer": None, "asked_at": tx.now, "answered_at": 0},
    )  # fmt: skip
    tx.update_call(
        row.session_id, asked.call_id, state="asked", epoch=row.epoch, executions=asked.executions, result=None,
        child_id=None,
    )  # fmt: skip
    due_at = tx.now + asked.timeout if asked.timeout else 0
    event = events.InputRequested(
        call_id=asked.call_id, kind=asked.kind, asked=number, prompt=prompt, options=options or None, due_at=due_at
    )
    tx.append(row, event)
    if due_at:
        default = {"call_id": asked.call_id, "asked": number, "said": asked.default}
        tx.set_timer(row, QUESTION_TIMER + asked.call_id, due_at, default)


def tell_above(tx: Transaction, row: SessionRow) -> None:
    """A session waits for a person: note it in those above it whose current runs wait for it, so that their followers
    hear of it."""
    below = row
    while below.parent_id is not None and not below.abandoned:
        above = tx.find(below.parent_id)
        if above is None or above.run_id is None or above.run_id != below.parent_run_id:
            return
        calls = tx.current_calls(above)
        waits = any(call["child_id"] == below.session_id and call["state"] == "started" for call in calls)
        if not waits or above.cancel_reason is not None:
            return
        tx.append(above, events.ChildAsked(call_id=below.call_id or "", asking=row.session_id))
        below = above


def answer(tx: Transaction, session_id: str, call_id: str, decision: str, text: str = "", *, asked: int) -> bool:
    """Accept one answer: see `decide`. True when it is new, False when the same one was accepted before.

    Args:
        asked: which time the call asked: an answer that is late must not be one to the next question.
    """
    return bool(decide(tx, session_id, [Decision(call_id, asked, decision, text)]))


def decide(tx: Transaction, session_id: str, decisions: Sequence[Decision]) -> list[str]:
    """Accept what a person says of some calls, all of it or nothing; returns the calls of which it is new.

    An approval makes its call `approved` here, with the arguments that it is to be executed with; anything else goes
    into the session's inbox, as the call's result.

    Raises:
        UnknownSession: there is no such session.
        InvalidInput: there is no such decision about this kind of question, or its text is none.
        NotAsked: a call did not ask, or nobody waits for its answer any more.
        AnswerConflict: it was answered otherwise.
    """
    row = tx.session(session_id)
    checked = {(decision.call_id, decision.asked): _check(tx, row, decision) for decision in decisions}
    new = [(question, said) for question, said in checked.values() if question["answer"] is None]
    for question, said in new:
        _accept(tx, row, question, said)
    return [question["call_id"] for question, _ in new]


def _check(tx: Transaction, row: SessionRow, decision: Decision) -> tuple[Row, dict[str, str]]:
    """The question that a decision answers, and what is said; raises as `decide`."""
    call_id, session_id = decision.call_id, row.session_id
    where = (*_of_session(tx, row), QUESTION.c.call_id == call_id, QUESTION.c.asked == decision.asked)
    question = tx.read(select(QUESTION).where(*where), session_id).mappings().first()
    if question is None:
        raise NotAsked(f"call {call_id!r} did not ask for anything", session_id=session_id)
    possible = DECISIONS[question["kind"]]
    if decision.decision not in possible:
        raise InvalidInput(
            f"{decision.decision!r} is no answer to call {call_id!r}, of kind {question['kind']!r}; possible: "
            f"{', '.join(possible)}",
            session_id=session_id,
        )
    of_form = decision.decision == "ok" and question["form"] is not None
    if of_form or (decision.decision == APPROVE and decision.text):
        _require_object(decision.text, session_id)
    said = {"decision": decision.decision, "text": storable(decision.text) if decision.decision != "rerun" else ""}
    if decision.remember:
        said["remember"] = decision.remember
    if question["answer"] is not None:
        if question["answer"] != said:
            raise AnswerConflict(f"call {call_id!r} was answered otherwise", session_id=session_id)
    elif row.run_id != question["run_id"] or row.cancel_reason is not None:
        raise NotAsked(f"the run of call {call_id!r} has ended, or is about to", session_id=session_id)
    elif steps.is_out_of_time(tx, row, call_id):
        raise NotAsked(f"the time of call {call_id!r} is over", session_id=session_id)
    return dict(question), said


def _require_object(text: str, session_id: str) -> None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"the text is no JSON: {error}", session_id=session_id) from None
    if not isinstance(found, dict):
        raise InvalidInput("the text must be a JSON object", session_id=session_id)


def time_out(tx: Transaction, row: SessionRow, call_id: str, asked: int, said: dict[str, str]) -> None:
    """Nobody has answered in time: what the specification says is the answer."""
    found = unanswered(tx, row) if row.run_id is not None and row.cancel_reason is None else []
    for question in found:
        if (question["call_id"], question["asked"]) == (call_id, asked):
            _accept(tx, row, question, said, timed_out=True)


def abort(tx: Transaction, session_id: str, call_id: str | None = None) -> list[str]:
    """Give up the calls that wait for a person, or one of them; returns those that did.

    Raises:
        UnknownSession: there is no such session.
    """
    row = tx.session(session_id)
    if row.run_id is None or row.cancel_reason is not None:
        return []
    found = [item for item in unanswered(tx, row) if call_id in (None, item["call_id"])]
    for question in found:
        _accept(tx, row, question, ABORTED)
    return [question["call_id"] for question in found]


def unanswered(tx: Transaction, row: SessionRow) -> list[Row]:
    """What the session's current run asks, oldest first."""
    statement = select(QUESTION).where(
        *_of_session(tx, row), QUESTION.c.run_id == row.run_id, QUESTION.c.answered_at == 0
    )
    found = tx.read(statement.order_by(QUESTION.c.asked_at, QUESTION.c.call_id), row.session_id).mappings()
    return [dict(item) for item in found]


def _is_asked(tx: Transaction, row: SessionRow) -> bool:
    """Whether a question of the session's current run has no answer."""
    mine = (*_of_session(tx, row), QUESTION.c.run_id == row.run_id, QUESTION.c.answered_at == 0)
    return tx.read(select(QUESTION.c.call_id).where(*mine).limit(1), row.session_id).first() is not None


def _accept(
    tx: Transaction, row: SessionRow, question: Row, said: dict[str, str], *, timed_out: bool = False
) -> None:  # fmt: skip
    """Let an answer have its effect, and whoever waits for it go on."""
    call_id, number = question["call_id"], question["asked"]
    tx.changed(row)
    row.progress += 1  # a person may let a call run, and die, as often as they want
    where = (*_of_session(tx, row), QUESTION.c.call_id == call_id, QUESTION.c.asked == number)
    tx.read(update(QUESTION).where(*where).values(answer=said, answered_at=tx.now), row.session_id)
    event = events.InputReceived(
        call_id=call_id, kind=question["kind"], asked=number, decision=said["decision"],
        waited=tx.now - question["asked_at"], timed_out=timed_out, by=tx.by,
    )  # fmt: skip
    tx.append(row, event)
    tx.drop_timer(row, QUESTION_TIMER + call_id)
    if said.get("remember"):
        call = next(item for item in tx.current_calls(row) if item["call_id"] == call_id)
        record = memory(call["tool"], call["arguments"], said["decision"], said["text"], said["remember"])
        tx.append(row, replace(record, run_id=row.run_id, round=row.round))
    if not _is_asked(tx, row):
        _set_run_status(tx, row, "running")
    if said["decision"] == APPROVE:
        _approve(tx, row, call_id, said["text"])
    else:
        asked = {"elicitation": question["elicitation"]} if question["elicitation"] else {}
        hand_in(tx, row, call_id, {**said, "kind": question["kind"], "asked": number, **asked})


def _approve(tx: Transaction, row: SessionRow, call_id: str, edited: str) -> None:
    """The call may be executed: whichever process finds it so executes it, and asks nobody again."""
    call = next(item for item in tx.current_calls(row) if item["call_id"] == call_id)
    tx.update_call(
        row.session_id, call_id, state="approved", epoch=row.epoch, executions=call["executions"], result=None,
        child_id=None, edited=edited or None,
    )  # fmt: skip
    if row.kind == WORKFLOW:  # whose process may be at work with other steps, and does not wait for their end
        tx.put_inbox(row, APPROVED, call_id, {"edited": edited or None})
    go_on(tx, row)


def _set_run_status(tx: Transaction, row: SessionRow, status: str) -> None:
    where = (RUN.c.namespace == tx.namespace, RUN.c.session_id == row.session_id, RUN.c.run_id == row.run_id)
    tx.read(update(RUN).where(*where).values(status=status), row.session_id)


def kinds(tx: Transaction, row: SessionRow) -> dict[str, str]:
    """What calls of the session's current run asked last, by call: kinds of questions."""
    mine = (*_of_session(tx, row), QUESTION.c.run_id == row.run_id)
    found = tx.read(select(QUESTION.c.call_id, QUESTION.c.kind).where(*mine).order_by(QUESTION.c.asked), row.session_id)
    return {call_id: kind for call_id, kind in found}


def _of_session(tx: Transaction, row: SessionRow) -> tuple[Any, ...]:
    return QUESTION.c.namespace == tx.namespace, QUESTION.c.session_id == row.session_id
