"""The group of sub-agents that a run waits for, from rows to the facts of a decision and back."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from sqlalchemy import select

from understudy.handoffs import present
from understudy.ports import GroupDecision, GroupState, Member, Plan

from ..db.session_row import SessionRow
from ..db.statements import SESSION
from ..transaction import Transaction
from .beginnings import TASK_AT_WORK

ASKED = "asked"
"""Part of a run's `cancel_as` when somebody asked it to end that was ending already, for another reason."""


def deliver_each(
    _policy: dict[str, Any], state: GroupState, _members: list[Member], child_id: str, _now: int, _salt: str
) -> GroupDecision:
    """The `DecideEnd` of a journal behind which nobody supervises: every end is a result."""
    return GroupDecision(state, deliver=(child_id,))


def decide(tx: Transaction, parent: SessionRow, child: SessionRow, status: str, *, asked: bool) -> GroupDecision:
    """What becomes of the parent's group now that this child's task has ended; the parent's row remembers it.

    Where nothing can be started again, because of the child's type or because the parent's run shall end, no more is
    read: the end is the result.
    """
    state = state_of(parent)
    unsupervised = child.restart_type == "temporary" and not parent.group_state
    if unsupervised or parent.cancel_reason is not None:
        return GroupDecision(state, deliver=(child.session_id,))
    waiting = state.plan.start if state.plan is not None else ()
    members = {row.session_id: _member(row, None, asked=asked_to_end(row)) for row in at_work(tx, parent)}
    ended = [session_id for session_id in waiting if session_id not in members]
    tx.load(ended)
    for row in map(tx.session, ended):
        members[row.session_id] = _member(row, row.status)
    members[child.session_id] = _member(child, status, asked=asked)
    policy = present(tx.specification(parent.session_id), parent.agent)["supervision"]
    salt = f"{parent.session_id}/{parent.run_id}"
    decision = tx.decide_end(policy, state, list(members.values()), child.session_id, tx.now, salt)
    if decision.state != state:
        tx.changed(parent)
        parent.group_state = _to_wire(decision.state)
    return decision


def asked_to_end(row: SessionRow) -> bool:
    """Whether somebody asked the session's current run to end. A group, a budget and an escalation are nobody."""
    return row.cancel_reason is not None and (row.cancel_as is None or ASKED in row.cancel_as)


def leave_plan(tx: Transaction, parent: SessionRow, child_id: str) -> bool:
    """Take a child that has ended out of the restart that is under way; False if it is not part of one."""
    state = state_of(parent)
    plan = state.plan
    if plan is None or child_id not in plan.start or child_id in plan.stop:
        return False
    plan = replace(plan, start=tuple(other for other in plan.start if other != child_id))
    tx.changed(parent)
    parent.group_state = _to_wire(replace(state, plan=plan))
    return True


def drop_plan(tx: Transaction, parent: SessionRow) -> tuple[str, ...]:
    """Give up a restart that is under way; returns the children that have ended and were to be started again."""
    state = state_of(parent)
    if state.plan is None:
        return ()
    tx.changed(parent)
    parent.group_state = _to_wire(GroupState(state.restarts, state.level))
    return tuple(session_id for session_id in state.plan.start if session_id not in state.plan.stop)


def at_work(tx: Transaction, parent: SessionRow) -> list[SessionRow]:
    """The sub-agents of the parent's current run that have not ended, in the order of their start."""
    statement = select(SESSION.c.session_id).where(
        SESSION.c.namespace == tx.namespace,
        SESSION.c.parent_id == parent.session_id,
        SESSION.c.task_open == TASK_AT_WORK,
        SESSION.c.parent_run_id == parent.run_id,
        SESSION.c.background == 0,
        SESSION.c.abandoned == 0,
    )
    ids = list(tx.read(statement).scalars())
    tx.load(ids)
    rows = [row for row in map(tx.session, ids) if row.task_open == TASK_AT_WORK]
    return sorted(rows, key=lambda row: (row.start_order, row.session_id))


def parent_of(tx: Transaction, child: SessionRow) -> SessionRow:
    """The parent of a sub-agent."""
    assert child.parent_id is not None
    return tx.session(child.parent_id)


def waits_for(tx: Transaction, child: SessionRow) -> SessionRow | None:
    """The parent, if its current run still wants the child's result."""
    parent = parent_of(tx, child)
    wanted = not child.abandoned and parent.run_id is not None and parent.run_id == child.parent_run_id
    return parent if wanted and not child.background else None


def state_of(parent: SessionRow) -> GroupState:
    """What the parent's row remembers of its current run's group."""
    found = parent.group_state
    if not found:
        return GroupState()
    plan = found["plan"]
    if plan is not None:
        plan = Plan(**{**plan, "stop": tuple(plan["stop"]), "start": tuple(plan["start"])})
    return GroupState(tuple(found["restarts"]), found["level"], plan)


def _to_wire(state: GroupState) -> dict[str, Any]:
    wire = asdict(state)
    wire["restarts"] = list(state.restarts)
    if state.plan is not None:
        wire["plan"].update(stop=list(state.plan.stop), start=list(state.plan.start))
    return wire


def _member(row: SessionRow, ended: str | None, *, asked: bool = False) -> Member:
    return Member(row.session_id, row.start_order, row.restart_type, ended, asked)
