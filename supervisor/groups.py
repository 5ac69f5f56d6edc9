"""What becomes of a group of sub-agents when one of them ends: pure decisions, as OTP's supervisors make them.

The rules are in `docs/supervision.md`; their source is the Erlang/OTP documentation, "Supervisor Behaviour". A group is
made up of the sub-agents of one run whose results that run does not have yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from understudy.identifiers import digest
from understudy.ports import GroupDecision, GroupState, Member, Plan

MICROSECONDS = 1_000_000


def decide_end(
    policy: dict[str, Any], state: GroupState, members: Iterable[Member], child_id: str, now: int, salt: str = ""
) -> GroupDecision:
    """What to do about the end of a sub-agent.

    Exactly one of these becomes of each end: the result is delivered, or the sub-agent is started again, now or once
    those that must be stopped before have ended.

    Args:
        policy: the fields of `Supervision`.
        members: the whole group, the one that ended included.
        now: microseconds UTC.
        salt: makes the jitter of one group differ from another's.
    """
    group = {member.child_id: member for member in members}
    plan = state.plan
    if plan is not None and child_id in plan.stop:  # asked to, or before its turn came
        plan = replace(plan, stop=_without(plan.stop, child_id))
        if group[child_id].asked:
            plan = replace(plan, start=_without(plan.start, child_id))
        deliver = () if child_id in plan.start else (child_id,)
        return _go_on(replace(state, plan=plan), deliver)
    if not _restarts(group[child_id]) or (plan is not None and plan.escalate):  # the group is being given up
        return GroupDecision(state, deliver=(child_id,))
    # One in the future is of a clock that was set back since: nobody knows how long ago it is.
    recent = tuple(at for at in state.restarts if 0 <= now - at < policy["period"] * MICROSECONDS)
    if len(recent) >= policy["max_restarts"]:
        return _exceeded(policy, replace(state, restarts=recent), group, child_id)
    rested = not state.restarts or not 0 <= now - state.restarts[-1] < policy["reset_after"] * MICROSECONDS
    level = 0 if rested else state.level + 1
    affected = _affected(policy["strategy"], group, child_id)
    old = plan or Plan()
    stop = {member.child_id for member in affected if member.ended is None} | set(old.stop)
    again = (member for member in affected if member.restart != "temporary" and not member.asked)
    start = {member.child_id for member in again} | set(old.start)
    by_order = sorted(group.values(), key=lambda member: member.order)
    plan = Plan(
        stop=tuple(member.child_id for member in reversed(by_order) if member.child_id in stop),
        start=tuple(member.child_id for member in by_order if member.child_id in start),
        delay=max(old.delay, _pause(policy, level, salt)),
    )
    return _go_on(GroupState((*recent, now), level, plan))


def _restarts(member: Member) -> bool:
    """Whether this end calls for a restart. One that a person asked for never does."""
    if member.restart == "temporary" or member.asked or member.ended == "cancelled":
        return False
    return member.restart == "permanent" or member.ended != "completed"


def _without(ids: tuple[str, ...], child_id: str) -> tuple[str, ...]:
    return tuple(other for other in ids if other != child_id)


def _affected(strategy: str, group: dict[str, Member], child_id: str) -> list[Member]:
    if strategy == "one_for_one":
        return [group[child_id]]
    first = group[child_id].order if strategy == "rest_for_one" else 0
    return [member for member in group.values() if member.order >= first]


def _exceeded(policy: dict[str, Any], state: GroupState, group: dict[str, Member], child_id: str) -> GroupDecision:
    """The group restarts too often."""
    if policy["exceeded"] == "report":
        return GroupDecision(state, deliver=(child_id,))
    reason = (
        f"its sub-agents had to be restarted more than {policy['max_restarts']} times within {policy['period']:g} s; "
        f"the last one was {child_id}, which ended as {group[child_id].ended}"
    )
    at_work = sorted((m for m in group.values() if m.ended is None), key=lambda member: -member.order)
    plan = Plan(stop=tuple(member.child_id for member in at_work), escalate=reason)
    ended = tuple(member.child_id for member in group.values() if member.ended is not None)
    return _go_on(replace(state, plan=plan), ended)


def _go_on(state: GroupState, deliver: tuple[str, ...] = ()) -> GroupDecision:
    """Stop the next one, or, when all have stopped, do what they were stopped for."""
    plan = state.plan
    assert plan is not None
    if plan.stop:
        return GroupDecision(state, deliver, stop=plan.stop[0])
    done = replace(state, plan=None)
    return GroupDecision(done, deliver, start=plan.start, delay=plan.delay, escalate=plan.escalate)


def _pause(policy: dict[str, Any], level: int, salt: str) -> int:
    """Microseconds until a restart. A function of its arguments: who decides it twice decides the same."""
    pause = min(policy["backoff_max"], policy["backoff"] * 2.0 ** min(level, 60))
    share = int(digest(salt, str(level), size=4), 16) / 0xFFFFFFFF
    return int(pause * (1 + policy["jitter"] * share) * MICROSECONDS)
