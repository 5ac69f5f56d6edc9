"""Schedules, in the simulation: what clients have done at times, and what must hold of each due time."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from understudy.events import RunAccepted
from understudy.placement import DEFAULT
from understudy.schedules import SOURCE
from understudy.store.db.statements import RUN, SCHEDULE
from understudy.workflows import GOAL, WORKFLOW

if TYPE_CHECKING:
    from .plan import Work
    from .world import World

PREFIX = "schedule."
LATE = 15_000_000
"""Microseconds by which a firing may be late when nothing goes wrong any more: a sweep, and one for what is late."""


def some_with_schedules(chosen: random.Random, work: tuple[Work, ...], window: float) -> tuple[Work, ...]:
    """The work of a plan; in some plans clients set schedules, for their sessions or for sessions of their own."""
    if chosen.random() >= 0.25:
        return work
    return tuple(with_schedules(chosen, item, window) if chosen.random() < 0.7 else item for item in work)


def with_schedules(chosen: random.Random, work: Work, window: float) -> Work:
    """The same work with a schedule or two, which clients change, pause, trigger and delete, too."""
    from .plan import Action, _order

    actions = list(work.actions)
    for number in range(chosen.choice((1, 1, 2))):
        name, at = f"{work.session_id}.t{number}", round(chosen.random() * window / 2, 3)
        for _ in range(chosen.choice((1, 1, 1, 2))):
            actions.append(Action(at, "set_schedule", _definition(chosen, work, name)))
            at += round(chosen.random() * window / 2, 3)
        for kind in ("pause_schedule", "resume_schedule", "trigger_schedule", "delete_schedule"):
            if chosen.random() < (0.1 if kind == "delete_schedule" else 0.3):
                actions.append(Action(round(chosen.random() * window, 3), kind, {"name": name}))
    return replace(work, actions=tuple(sorted(actions, key=_order)))


def _definition(chosen: random.Random, work: Work, name: str) -> dict[str, Any]:
    thinking = round(chosen.choice((0.05, 2.0, 9.0)) * chosen.random(), 3)
    timing = {
        "every": chosen.choice((3.0, 7.0, 20.0)), "jitter": chosen.choice((0.0, 0.0, 0.5, 4.0)),
    }  # fmt: skip
    if chosen.random() < 0.2:
        timing = {"cron": "* * * * *", "zone": chosen.choice(("UTC", "Europe/Berlin"))}
    return {
        "name": name, "content": json.dumps({"name": name, "rounds": [], "thinking": [thinking]}), "timing": timing,
        "overlap": chosen.choice(("skip", "queue", "cancel", "all")),
        "catch_up": chosen.choice(("latest", "latest", "all")),
        "window": chosen.choice((0.0, 0.0, 3.0, 20.0)), "max_firings": chosen.choice((1, 2, 4, 8)),
        "own": chosen.random() < 0.5,
    }  # fmt: skip


def fires_workflows(work: Work) -> bool:
    """Whether schedules run its workflow in sessions of their own."""
    return _does_programs(work) and any(action.kind == "set_schedule" and action.what["own"] for action in work.actions)


def _does_programs(work: Work) -> bool:
    """Whether it is a workflow, and no goal: that can't do without its agents."""
    return work.spec.get("kind") == WORKFLOW and work.spec["name"] != GOAL


def wanted(work: Work, what: dict[str, Any]) -> dict[str, Any]:
    """The request of a client that sets a schedule."""
    from .plan import agent, policies_of

    definition = {name: value for name, value in what.items() if name not in ("own", "fails")}
    if not what["own"]:
        return {**definition, "session_id": work.session_id}
    if _does_programs(work):
        alone = {"tools": [], "agents": {}, "budget": None}  # nobody answers what it would ask
        return {**definition, "spec": {**work.spec, **alone}, "placement": work.spec.get("placement", DEFAULT)}
    more = {"hash": "hash-timed-fails", "max_rounds": 1} if what.get("fails") else {}
    return {**definition, "spec": agent("timed", policies_of(work.spec)[:1], **more)}


def due_time(run_id: str | None) -> tuple[str, int]:
    """The schedule and the due time of a run; 0 for one that was triggered."""
    name, _, due = (run_id or "").removeprefix(PREFIX).rpartition(".")
    return name, int(due) if due.isdigit() else 0


def too_early(world: World, event: RunAccepted) -> str | None:
    """What is wrong with a firing: nothing fires before its time, unless somebody has set a clock back since."""
    if event.source != SOURCE or any(fault.kind == "clock_step" for fault in world.plan.faults):
        return None
    name, due = due_time(event.run_id)
    early = due - event.at
    return f"schedule {name} fired {early / 1e6:.3f} s before its due time {due}" if early > 1_000 else None


def violations(world: World, connection: Any, counts: Counter[str]) -> Iterator[str]:
    """Each due time that fired has begun one run, at a time of the schedule; what has passed was dealt with. (That each
    is counted once is a rule of `check`.)"""
    runs: dict[str, list[tuple[str, int]]] = {}
    found = select(RUN.c.session_id, RUN.c.run_id).where(RUN.c.source == SOURCE)
    for session_id, run_id in connection.execute(found):
        name, due = due_time(run_id)
        runs.setdefault(name, []).append((session_id, due))
        counts["firings" if due else "triggered"] += 1
    removed = {client.session_id for client in world.clients if client.replaced}
    disturbed = any(fault.kind == "clock_step" for fault in world.plan.faults)
    for row in connection.execute(select(SCHEDULE)).mappings():
        name, definition = row["name"], row["definition"]
        for outcome in ("skipped", "missed", "failed"):
            counts[f"due times {outcome}"] += row[outcome]
        yield from _of_its_own(name, definition, runs.get(name, []), row["first_at"], counts)
        dues = [due for _, due in runs.get(name, ()) if due >= row["first_at"]]  # others are of earlier definitions
        if len(set(dues)) != len(dues):
            yield f"schedule {name} has begun two runs for one due time: {sorted(dues)}"
        gone = definition.get("session_id") in removed
        if len(dues) > row["fired"] or (len(dues) != row["fired"] and not gone):
            yield f"schedule {name} counts {row['fired']} firings, and there are {len(dues)} runs"
        every = definition["timing"].get("every")
        period = round(every * 1e6) if every else 60_000_000
        strays = [due for due in dues if (due - row["first_at"]) % period or due > max(row["last_at"], row["next_at"])]
        if strays:
            yield f"schedule {name} has fired at times that are none of its: {strays}"
        late = time.time_ns() // 1_000 - row["due_at"]
        if row["due_at"] and late > LATE and not disturbed:
            yield f"schedule {name} was due {late / 1e6:.1f} s ago, and nobody has dealt with it"


def _of_its_own(
    name: str, definition: dict[str, Any], runs: list[tuple[str, int]], since: int, counts: Counter[str]
) -> Iterator[str]:
    """Where each firing is to have a session, no two share one, and it is of the due time."""
    spec = definition.get("spec")
    for session_id, due in runs:
        if spec is None or due < since:
            continue
        counts["workflows fired"] += spec.get("kind") == WORKFLOW
        if session_id != f"{PREFIX}{name}.{due}":
            yield f"schedule {name} has run its due time {due} in session {session_id}, which is not of its own"
