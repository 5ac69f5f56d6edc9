"""Queues, in the simulation: which runs of clients wait in some, and what must hold of these at any moment."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from understudy.queues import BEGUN, WAITS
from understudy.schedules import SOURCE
from understudy.store.db.statements import EVENT, QUEUE, RUN, SCHEDULE

from .schedules import due_time

if TYPE_CHECKING:
    from .plan import Work
    from .world import World

NAMES = ("crawl", "mail")
KEYS = ("", "a", "a", "b", "c")


def some_in_queues(chosen: random.Random, work: tuple[Work, ...], window: float) -> tuple[Work, ...]:
    """The work of a plan; in some plans runs wait in queues, whose limits clients raise, and which they pause."""
    if chosen.random() >= 0.2:
        return work
    limits = [_limits(chosen, name) for name in NAMES]
    return tuple(_queued(chosen, item, limits, window) for item in work)


def _limits(chosen: random.Random, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "concurrency": chosen.choice((0, 1, 1, 2, 3))}
    if chosen.random() < 0.5:
        found["per_key"] = chosen.choice((1, 1, 2))
    if chosen.random() < 0.4:
        found["rate"] = {"limit": chosen.choice((1, 2, 5)), "seconds": chosen.choice((0.2, 1.0, 4.0))}
    return found


def _queued(chosen: random.Random, work: Work, limits: list[dict[str, Any]], window: float) -> Work:
    """The same work, some of whose runs wait in a queue."""
    from .plan import Action, _order

    actions = [Action(0.0, "set_queue", one) for one in limits]
    share = chosen.choice((0.4, 1.0))
    for action in work.actions:
        begins = action.kind == "set_schedule" or (action.kind == "send" and action.on is None)
        if begins and chosen.random() < share:
            action = replace(action, what={**action.what, "place": _place(chosen)})
        actions.append(action)
    for one in limits:
        if chosen.random() < 0.3 and one["concurrency"]:
            raised = {**one, "concurrency": one["concurrency"] + chosen.choice((1, 2))}
            actions.append(Action(round(chosen.random() * window, 3), "set_queue", raised))
        if chosen.random() < 0.3:
            seconds = round(chosen.random() * window / 2, 3)
            what = {"name": one["name"], "seconds": seconds}
            actions.append(Action(round(chosen.random() * window / 2, 3), "pause_queue", what))
        if chosen.random() < 0.2:
            actions.append(Action(round(chosen.random() * window, 3), "remove_queue", one))
    return replace(work, actions=tuple(sorted(actions, key=_order)))


def _place(chosen: random.Random) -> dict[str, Any]:
    return {"queue": chosen.choice(NAMES), "key": chosen.choice(KEYS), "priority": chosen.choice((0, 0, 1, -2))}


def overtaken(connection: Any) -> Iterator[str]:
    """Never more runs of a queue are at work than its limits allow, of all and of each key; and nobody waits whom they
    let begin, unless the queue is paused, or is to be looked at by itself; and the queue of a schedule is there. At any
    moment: plans only raise limits."""
    columns = (RUN.c.queue, RUN.c.queue_key, RUN.c.slot)
    runs = connection.execute(select(*columns).where(RUN.c.slot.in_((WAITS, BEGUN)))).all()
    for row in connection.execute(select(QUEUE)).mappings():
        name, most, per_key = row["name"], row["concurrency"], row["per_key"]
        at_work = Counter(key for queue, key, slot in runs if (queue, slot) == (name, BEGUN))
        if most and at_work.total() > most:
            yield f"{at_work.total()} runs of queue {name} are at work, and may be {most}"
        full = {key for key, number in at_work.items() if key and per_key and number >= per_key}
        for key in sorted(full):
            if at_work[key] > per_key:
                yield f"{at_work[key]} runs of key {key} of queue {name} are at work, and may be {per_key}"
        waiting = [key for queue, key, slot in runs if (queue, slot) == (name, WAITS) and key not in full]
        if waiting and not (row["paused"] or row["due_at"] or (most and at_work.total() >= most)):
            yield f"{len(waiting)} runs wait in queue {name}, where there is room"
    here = select(QUEUE.c.name).where(QUEUE.c.namespace == SCHEDULE.c.namespace, QUEUE.c.name == SCHEDULE.c.queue)
    gone = select(SCHEDULE.c.name, SCHEDULE.c.queue).where(SCHEDULE.c.queue != "", ~here.exists())
    for name, queue in connection.execute(gone):
        yield f"schedule {name} names queue {queue}, which is not there"


def violations(world: World, connection: Any, counts: Counter[str]) -> Iterator[str]:
    """No rate was exceeded, by the clocks of those who let runs begin; and all that waited has begun or ended."""
    begun: dict[str, list[int]] = {}
    found = select(EVENT.c.at, EVENT.c.body).where(EVENT.c.type == "run_admitted").order_by(EVENT.c.at)
    for at, body in connection.execute(found):
        begun.setdefault(body["queue"], []).append(at)
        counts["slots given"] += 1
        counts["slots waited for"] += body["waited"] > 0
    disturbed = any(fault.kind == "clock_step" for fault in world.plan.faults)
    for row in connection.execute(select(QUEUE)).mappings():
        times, rate, period = begun.get(row["name"], []), row["rate"], row["period"]
        if rate and not disturbed:
            pairs = zip(times, times[rate:], strict=False)
            for early, late in ((early, late) for early, late in pairs if late - early < period):
                yield f"{rate + 1} runs of queue {row['name']} began within {(late - early) / 1e6:.6f} s, at {late}"
    yield from _firings(connection, counts)
    left = select(RUN.c.session_id, RUN.c.run_id, RUN.c.slot).where(RUN.c.slot > 0)
    for session_id, run_id, slot in connection.execute(left):
        yield f"run {run_id} of {session_id} is left at {slot} in its queue"


def _firings(connection: Any, counts: Counter[str]) -> Iterator[str]:
    """The run of each firing is in the queue that its schedule names."""
    named = {row["name"]: row for row in connection.execute(select(SCHEDULE)).mappings()}
    for run_id, queue in connection.execute(select(RUN.c.run_id, RUN.c.queue).where(RUN.c.source == SOURCE)):
        name, due = due_time(run_id)
        counts["firings in queues"] += queue != ""
        if name in named and due >= named[name]["first_at"] and queue != named[name]["queue"]:
            yield f"run {run_id} is in queue {queue!r}, and its schedule names {named[name]['queue']!r}"
