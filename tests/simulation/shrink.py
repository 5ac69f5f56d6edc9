"""Makes a failing plan shorter: leaves out faults, sessions and actions for as long as it goes on failing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from .plan import Plan

Item = TypeVar("Item")


def shrunk(plan: Plan, fails: Callable[[Plan], bool], seconds: float) -> Plan:
    """The shortest plan found within the time that still fails; greedy, by halves and then one by one (ddmin, Zeller
    and Hildebrandt, 2002)."""
    deadline = time.perf_counter() + seconds

    def keep(items: Sequence[Item], made: Callable[[tuple[Item, ...]], Plan]) -> tuple[Item, ...]:
        left, size = tuple(items), max(1, len(items) // 2)
        while size and time.perf_counter() < deadline:
            start = 0
            while start < len(left) and time.perf_counter() < deadline:
                fewer = left[:start] + left[start + size :]
                if fails(made(fewer)):
                    left = fewer
                else:
                    start += size
            size //= 2
        return left

    for change in ({"calm": True}, {"endpoint_trouble": 0.0}, {"machines": 1}, {"machines": 2}):
        other = replace(plan, **change) if change.get("machines", 0) < plan.machines else plan
        if other != plan and fails(other):
            plan = other
    plan = replace(plan, faults=keep(plan.faults, lambda left: replace(plan, faults=left)))
    plan = replace(plan, work=keep(plan.work, lambda left: replace(plan, work=left)))
    for number, work in enumerate(plan.work):

        def with_actions(actions: tuple[Any, ...], number: int = number, work: Any = work) -> Plan:
            some = list(plan.work)
            some[number] = replace(work, actions=actions)
            return replace(plan, work=tuple(some))

        first, *rest = work.actions
        plan = with_actions((first, *keep(rest, lambda left: with_actions((first, *left)))))  # noqa: B023
    return replace(plan, faults=keep(plan.faults, lambda left: replace(plan, faults=left)))
