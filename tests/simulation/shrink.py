"""Makes a failing plan shorter: leaves out faults, sessions and actions for as long as it goes on failing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from .plan import Action, Plan

Item = TypeVar("Item")


class Shrinker:
    """Leaves out what a plan does not need to fail; greedy, by halves and then one by one (ddmin, Zeller and
    Hildebrandt, 2002).

    Args:
        fails: whether a plan fails in the way that is looked for.
        seconds: for all of it.
    """

    def __init__(self, fails: Callable[[Plan], bool], seconds: float) -> None:
        self._fails = fails
        self._deadline = time.perf_counter() + seconds

    def shrink(self, plan: Plan) -> Plan:
        """The shortest plan found within the time that still fails."""
        simpler = {"calm": True, "endpoint_trouble": 0.0, "stuck": 0.0, "forked": 0.0, "limit": 0, "scales": 0.0}
        for change in (*({name: value} for name, value in simpler.items()), {"machines": 1}, {"machines": 2}):
            if change.get("machines", 0) < plan.machines:
                plan = self._first((replace(plan, **change), plan))  # type: ignore[arg-type]
        plan = self._without_faults(plan)
        plan = replace(plan, work=self._keep(plan.work, lambda left: replace(plan, work=left)))
        for number in range(len(plan.work)):
            plan = self._without_actions(plan, number)
        return self._without_faults(plan)

    def _first(self, plans: Sequence[Plan]) -> Plan:
        return next((plan for plan in plans[:-1] if self._fails(plan)), plans[-1])

    def _without_faults(self, plan: Plan) -> Plan:
        return replace(plan, faults=self._keep(plan.faults, lambda left: replace(plan, faults=left)))

    def _without_actions(self, plan: Plan, number: int) -> Plan:
        """Without some of what one client does; its session is always made."""

        def with_rest(rest: tuple[Action, ...]) -> Plan:
            work = list(plan.work)
            work[number] = replace(work[number], actions=(work[number].actions[0], *rest))
            return replace(plan, work=tuple(work))

        return with_rest(self._keep(plan.work[number].actions[1:], with_rest))

    def _keep(self, items: Sequence[Item], made: Callable[[tuple[Item, ...]], Plan]) -> tuple[Item, ...]:
        """The items that are needed: those without which the plan that is made of the others fails no more."""
        left, size = tuple(items), max(1, len(items) // 2)
        while size:
            start = 0
            while start < len(left) and time.perf_counter() < self._deadline:
                fewer = left[:start] + left[start + size :]
                if self._fails(made(fewer)):
                    left = fewer
                else:
                    start += size
            size //= 2
        return left
