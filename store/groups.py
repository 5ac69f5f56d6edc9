"""The group of sub-agents that a run waits for, from rows to the facts of a decision and back."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sqlalchemy import select

from understudy.ports import GroupDecision, GroupState, Member, Plan

from .beginnings import TASK_AT_WORK
from .statements import SESSION
from .transaction import Row, Transaction


def deliver_each(
    _policy: dict[str, Any], state: GroupState, _members: list[Member], child_id: str, _now: int, _salt: str
) -> GroupDecision:
    """The `DecideEnd` of a journal behind which nobody supervises: every end is a result."""
    return GroupDecision(state, deliver=(child_id,))


def decide(tx: Transaction, parent: Row, child: Row, status: str) -> GroupDecision:
    """What becomes of the parent's group now that this child's task has ended; the parent's row remembers it.

    Where nothing can be started again, because of the child's type or because the parent's run shall end, no more is
    read: the end is the result.
    """
    state = state_of(parent)
    unsupervised = child["restart_type"] == "temporary" and not parent["group_state"]
    if unsupervised or parent["cancel_reason"] is not None:
        return GroupDecision(state, deliver=(child["session_id"],))
    waiting = state.plan.start if state.plan is not None else ()
    members = {row["session_id"]: _member(row, None) for row in at_work(tx, parent)}
    ended = [session_id for session_id in waiting if session_id not in members]
    tx.load(ended)
    for row in map(tx.session, ended):
        members[row["session_id"]] = _member(row, row["status"])
    members[child["session_id"]] = _member(child, status)
    policy = tx.specification(parent["session_id"])["supervision"]
    salt = f"{parent['session_id']}/{parent['run_id']}"
    decision = tx.decide_end(policy, state, list(members.values()), child["session_id"], tx.now, salt)
    if decision.state != state:
        tx.changed(parent)
        parent["group_state"] = _to_wire(decision.state)
    return decision


def drop_plan(tx: Transaction, parent: Row) -> tuple[str, ...]:
    """Give up a restart that is under way; returns the children that have ended and were to be started again."""
    state = state_of(parent)
    if state.plan is None:
        return ()
    tx.changed(parent)
    parent["group_state"] = _to_wire(GroupState(state.restarts, state.level))
    return tuple(session_id for session_id in state.plan.start if session_id not in state.plan.stop)


def at_work(tx: Transaction, parent: Row) -> list[Row]:
    """The sub-agents of the parent's current run that have not ended, in the order of their start."""
    statement = select(SESSION.c.session_id).where(
        SESSION.c.namespace == tx.namespace,
        SESSION.c.parent_id == parent["session_id"],
        SESSION.c.task_open == TASK_AT_WORK,
        SESSION.c.parent_run_id == parent["run_id"],
        SESSION.c.abandoned == 0,
    )
    ids = list(tx.read(statement).scalars())
    tx.load(ids)
    rows = [row for row in map(tx.session, ids) if row["task_open"] == TASK_AT_WORK]
    return sorted(rows, key=lambda row: (row["start_order"], row["session_id"]))


def state_of(parent: Row) -> GroupState:
    """What the parent's row remembers of its current run's group."""
    found = parent["group_state"]
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


def _member(row: Row, ended: str | None) -> Member:
    return Member(row["session_id"], row["start_order"], row["restart_type"], ended)
