"""Tool calls that wait for people: asking, answering, giving up. One path for questions and for calls in doubt."""

from __future__ import annotations

from typing import Any

from sqlalchemy import func, select, update

from understudy import events
from understudy.errors import AnswerConflict, InvalidInput, NotAsked
from understudy.messages import storable
from understudy.records import Ask

from ..db.prepared import Row
from ..db.session_row import SessionRow
from ..db.statements import QUESTION, RUN
from ..transaction import Transaction
from .waiting import hand_in

DECISIONS = ("ok", "error", "rerun")
"""What a person can say of a call: the text is its result, or why it failed, or it shall run again."""

ABORTED = {"decision": "aborted", "text": "given up: nobody will answer this call"}


def ask(tx: Transaction, row: SessionRow, asked: Ask) -> None:
    """Let a tool call of the current run wait for a person; the run is paused until every question is answered."""
    where = (*_of_session(tx, row), QUESTION.c.call_id == asked.call_id)
    number = (tx.read(select(func.max(QUESTION.c.asked)).where(*where), row.session_id).scalar() or 0) + 1
    prompt, options = storable(asked.prompt), [storable(option) for option in asked.options]
    tx.insert(
        QUESTION,
        {"session_id": row.session_id, "call_id": asked.call_id, "asked": number, "run_id": row.run_id,
         "kind": asked.kind, "prompt": prompt, "options": options, "answer": None, "asked_at": tx.now,
         "answered_at": 0},
    )  # fmt: skip
    tx.update_call(
        row.session_id, asked.call_id, state="asked", epoch=row.epoch, executions=asked.executions, result=None,
        child_id=None,
    )  # fmt: skip
    event = events.InputRequested(
        call_id=asked.call_id, kind=asked.kind, asked=number, prompt=prompt, options=options or None
    )
    tx.append(row, event)
    _set_run_status(tx, row, "waiting_for_input")


def answer(tx: Transaction, session_id: str, call_id: str, decision: str, text: str = "", *, asked: int) -> bool:
    """Accept an answer into the session's inbox; True when it is new, False when the same one was accepted before.

    Args:
        decision: one of `DECISIONS`.
        asked: which time the call asked: an answer that is late must not be one to the next question.

    Raises:
        UnknownSession: there is no such session.
        InvalidInput: there is no such decision about this kind of question.
        NotAsked: the call did not ask, or nobody waits for its answer any more.
        AnswerConflict: it was answered otherwise.
    """
    row = tx.session(session_id)
    where = (*_of_session(tx, row), QUESTION.c.call_id == call_id, QUESTION.c.asked == asked)
    question = tx.read(select(QUESTION).where(*where), session_id).mappings().first()
    if question is None:
        raise NotAsked(f"call {call_id!r} did not ask for anything", session_id=session_id)
    if decision not in DECISIONS or (decision == "rerun" and question["kind"] == "question"):
        raise InvalidInput(f"{decision!r} is no answer to a call of kind {question['kind']!r}", session_id=session_id)
    said = {"decision": decision, "text": storable(text) if decision != "rerun" else ""}
    if question["answer"] is not None:
        if question["answer"] != said:
            raise AnswerConflict(f"call {call_id!r} was answered otherwise", session_id=session_id)
        return False
    if row.run_id != question["run_id"] or row.cancel_reason is not None:
        raise NotAsked(f"the run of call {call_id!r} has ended, or is about to", session_id=session_id)
    _accept(tx, row, dict(question), said)
    return True


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


def _accept(tx: Transaction, row: SessionRow, question: Row, said: dict[str, str]) -> None:
    """Put an answer into the inbox; who waits for it goes on."""
    call_id, number = question["call_id"], question["asked"]
    tx.changed(row)
    row.progress += 1  # a person may let a call run, and die, as often as they want
    where = (*_of_session(tx, row), QUESTION.c.call_id == call_id, QUESTION.c.asked == number)
    tx.read(update(QUESTION).where(*where).values(answer=said, answered_at=tx.now), row.session_id)
    event = events.InputReceived(
        call_id=call_id, kind=question["kind"], asked=number, decision=said["decision"],
        waited=tx.now - question["asked_at"],
    )  # fmt: skip
    tx.append(row, event)
    if not unanswered(tx, row):
        _set_run_status(tx, row, "running")
    hand_in(tx, row, call_id, {**said, "kind": question["kind"], "asked": number})


def _set_run_status(tx: Transaction, row: SessionRow, status: str) -> None:
    where = (RUN.c.namespace == tx.namespace, RUN.c.session_id == row.session_id, RUN.c.run_id == row.run_id)
    tx.read(update(RUN).where(*where).values(status=status), row.session_id)


def is_in_doubt(tx: Transaction, row: SessionRow, call_id: str) -> bool:
    """Whether a person is asked what became of a call, not what its answer is."""
    kinds = select(QUESTION.c.kind).where(*_of_session(tx, row), QUESTION.c.call_id == call_id)
    return "in_doubt" in tx.read(kinds, row.session_id).scalars()


def _of_session(tx: Transaction, row: SessionRow) -> tuple[Any, ...]:
    return QUESTION.c.namespace == tx.namespace, QUESTION.c.session_id == row.session_id
