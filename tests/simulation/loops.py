"""Loops and triage, in the simulation: what clients look after, and what must be known of each run of a schedule."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from understudy.events import Event, RunAccepted, RunFinished
from understudy.records import FAILED_STATUSES
from understudy.schedules import ALL, SOURCE, schedule_of
from understudy.store.db.statements import LOOP_MEMORY, RUN, TRIAGE

if TYPE_CHECKING:
    from .plan import Action, Work
    from .world import World

NOT_BEGUN = ("session_closed", "unknown_session", "session_conflict", "run_conflict")
"""Codes of due times of which nothing began; no run ends with one of them."""

SUMMARY = re.compile(r"Runs: (\d+) attempted, (\d+) passed, (\d+) failed, (\d+) cancelled, (\d+) pending\.")

LOOKING_AFTER = ("resolve_triage", "retry_triage", "reset_loop")


def some_loops(chosen: random.Random, work: tuple[Work, ...], window: float) -> tuple[Work, ...]:
    """The work of a plan; some of the schedules in it are loops, and some fail."""
    return tuple(with_loops(chosen, item, window) for item in work)


def with_loops(chosen: random.Random, work: Work, window: float) -> Work:
    """The same work. A schedule is a loop in all of its definitions or in none, so what it knows is well defined."""
    from .plan import Action, _order

    mine = {action.what["name"] for action in work.actions if action.kind == "set_schedule"}
    loops = {name for name in sorted(mine) if chosen.random() < 0.6}
    actions = [_as_loop(chosen, action) if action.what.get("name") in loops else action for action in work.actions]
    for name in sorted(mine):
        for kind in LOOKING_AFTER:
            if chosen.random() < (0.15 if kind == "reset_loop" else 0.4):
                actions.append(Action(round(chosen.random() * window, 3), kind, {"name": name}))
    return replace(work, actions=tuple(sorted(actions, key=_order)))


def _as_loop(chosen: random.Random, action: Action) -> Action:
    if action.kind != "set_schedule":
        return action
    overlap = "cancel" if action.what["overlap"] == ALL else action.what["overlap"]
    what = {**action.what, "own": True, "memory": True, "overlap": overlap}
    if chosen.random() < 0.5:  # it calls tools for ever, and may make one model call
        content = json.loads(what["content"])
        wait = ["wait", {"seconds": 0.1}]
        content |= {"rounds": [[wait]], "thinking": content["thinking"] * 2}
        what |= {"content": json.dumps(content), "fails": True}
    return replace(action, what=what)


class Outcomes:
    """How the runs of schedules were begun and ended, as the log says."""

    def __init__(self) -> None:
        self.accepted: dict[str, list[str]] = {}
        self.finished: dict[str, dict[str, str]] = {}
        self._from: set[tuple[str, str | None]] = set()

    def event(self, event: Event) -> None:
        """An event was committed."""
        name = schedule_of(event.run_id or "")
        if name is None:
            return
        if isinstance(event, RunAccepted) and event.source == SOURCE:
            self._from.add((event.session_id, event.run_id))
            self.accepted.setdefault(name, []).append(event.run_id or "")
        elif isinstance(event, RunFinished) and (event.session_id, event.run_id) in self._from:
            self.finished.setdefault(name, {})[f"{event.session_id}/{event.run_id}"] = event.status

    def failed(self, name: str) -> int:
        """How many runs of a schedule have failed."""
        return sum(status in FAILED_STATUSES for status in self.finished.get(name, {}).values())


def violations(world: World, connection: Any, counts: Counter[str]) -> Iterator[str]:
    """Each run of a schedule that failed is counted once in triage; what a loop knows is what became of its runs, and
    the input of each counts all before it."""
    outcomes = world.invariants.outcomes
    counted: Counter[str] = Counter()
    for row in connection.execute(select(TRIAGE)).mappings():
        counts["in triage, resolved" if row["resolved_at"] else "in triage, open"] += 1
        counts["reopened"] += row["reopened"]
        counts["resolved by a retry"] += bool(row["resolved_at"] and row["retry_run"] and not row["resolved_by"])
        counted[row["schedule"]] += 0 if row["code"] in NOT_BEGUN else row["count"]
    for name in sorted({*outcomes.accepted, *counted}):
        if counted[name] != outcomes.failed(name):
            yield f"{outcomes.failed(name)} runs of schedule {name} have failed, and triage counts {counted[name]}"
    reset = {action.what["name"] for work in world.plan.work for action in work.actions if action.kind == "reset_loop"}
    for row in connection.execute(select(LOOP_MEMORY)).mappings():
        name, ended = row["name"], outcomes.finished.get(row["name"], {})
        counts["loops"] += 1
        for run in row["recent"]:
            if ended.get(f"{run['run_id']}/{run['run_id']}") != run["status"]:
                yield f"loop {name} knows that {run['run_id']} ended as {run['status']}, and the log says otherwise"
        for run_id in row["pending"]:
            if f"{run_id}/{run_id}" in ended:
                yield f"loop {name} takes {run_id} for pending, and it has ended"
        if name in reset:
            continue
        became = Counter(map(_outcome, ended.values()))
        known = {what: row[what] for what in ("passed", "failed", "cancelled") if row[what]}
        if known != became or row["attempted"] != len(outcomes.accepted.get(name, ())):
            yield f"loop {name} knows of {row['attempted']} runs, {known}: there were {dict(became)}"
    yield from _summaries(connection, outcomes, reset, counts)


def _outcome(status: str) -> str:
    return "passed" if status == "completed" else "failed" if status in FAILED_STATUSES else "cancelled"


def _summaries(connection: Any, outcomes: Outcomes, reset: set[str], counts: Counter[str]) -> Iterator[str]:
    loops = set(connection.execute(select(LOOP_MEMORY.c.name)).scalars()) - reset
    for run_id, content in connection.execute(select(RUN.c.run_id, RUN.c.content).where(RUN.c.source == SOURCE)):
        name = schedule_of(run_id)
        if name not in loops:
            continue
        found = SUMMARY.search(content)
        summary = [int(number) for number in found.groups()] if found else [0] * 5
        counts["firings with a summary"] += bool(found)
        before = outcomes.accepted[name].index(run_id)
        if summary[0] != before or sum(summary[1:]) != before:
            yield f"run {run_id} of loop {name} has the summary {summary}, and there were {before} before it"
