"""Whether a death was judged by what had happened: what the log says of it, and what follows by docs/guarantees.md."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from understudy.events import (
    CancelRequested,
    ChildFinished,
    ChildRestarted,
    ChildSpawned,
    Event,
    InputReceived,
    InputRequested,
    ModelCallCompleted,
    ModelCallFailed,
    ModelCallReissued,
    ModelCallStarted,
    RunFinished,
    RunStarted,
    SessionCrashed,
    SessionResumed,
    TimerFired,
    TimerSet,
    ToolFinished,
    ToolStarted,
)
from understudy.manifest import is_guarded
from understudy.records import LEASE_SECONDS
from understudy.store.db.statements import EVENT, MESSAGE, SESSION
from understudy.store.entries import event_from_row

from .tools import POLICY_OF

if TYPE_CHECKING:
    from .world import World

LEASE = int(LEASE_SECONDS * 1e6)


def judge(world: World, death: SessionCrashed) -> Iterator[str]:
    """What is wrong with a death that was committed; nothing of a session that was removed since."""
    with world.store.committed() as connection:
        mine = (EVENT.c.session_id == death.session_id, EVENT.c.seq <= death.seq)
        rows = connection.execute(select(EVENT).where(*mine).order_by(EVENT.c.seq)).mappings().all()
        said = select(MESSAGE.c.seq, MESSAGE.c.role).where(MESSAGE.c.session_id == death.session_id)
        messages = {row.seq: row.role for row in connection.execute(said) if row.seq < death.seq}
        spec = connection.execute(select(SESSION.c.spec).where(SESSION.c.session_id == death.session_id)).scalar()
    log = [event_from_row(row) for row in rows]
    if spec is None or not log or (log[-1].seq, log[-1].at) != (death.seq, death.at):
        return
    before = log[:-1]
    guarded = is_guarded(spec)
    waited = waits(before, messages)
    waited = None if waited and guarded else waited  # guards may have been at work beside the model call
    if waited is not None and waited is not death.waiting:
        yield f"it {'only waited' if waited else 'was acting'}"
    least, most = progress(before, messages)
    if not least <= death.progress <= most:
        yield f"there was {'progress' if least else 'no progress'} since the last one"
    stepped = any(fault.kind == "clock_step" for fault in world.plan.faults)
    yield from _decided(before, death, spec["restart"], stepped=stepped, guarded=guarded)


def waits(log: Sequence[Event], messages: dict[int, str]) -> bool | None:
    """Whether a session only waits, as its log says; None where that does not tell."""
    run = _of_run(log)
    model, answers, begun, others = False, 0, set[str](), set[tuple[str, str]]()
    for event in run:
        if isinstance(event, ModelCallStarted | ModelCallReissued):
            model, answers = True, 0
        elif isinstance(event, ModelCallCompleted | ModelCallFailed):
            model, answers = model and event.late, answers + event.late
        elif isinstance(event, ToolStarted) and event.tool in POLICY_OF:
            begun.add(event.call_id)
        elif isinstance(event, ToolFinished):
            begun.discard(event.call_id)
            others -= {(kind, event.call_id) for kind in ("child", "person", "wait")}
        elif isinstance(event, InputRequested):
            begun.discard(event.call_id)
            others.add(("person", event.call_id))
        elif isinstance(event, TimerSet) and event.kind == "wait":
            others.add(("wait", event.name))
        elif isinstance(event, ChildSpawned | ChildRestarted):
            others.add(("child", event.call_id))
        elif isinstance(event, InputReceived | ChildFinished):
            others.discard(("person" if isinstance(event, InputReceived) else "child", event.call_id))
        elif isinstance(event, TimerFired):
            others.discard((event.kind, event.name))
    if begun:
        return False
    if model:  # an answer of an earlier attempt may have been the one that was waited for
        return None if answers else True
    # What others are at may be waited for, or something of its own goes on beside it; a cancelled run waits for less.
    return None if others or any(isinstance(event, CancelRequested) for event in run) else False


def _of_run(log: Sequence[Event]) -> Sequence[Event]:
    """The events of the run that has begun and not ended; not those of others, which may end while they are queued."""
    run = list[Event]()
    for event in log:
        if isinstance(event, RunStarted):
            run = [event]
        elif run and event.run_id == run[0].run_id:
            run = [] if isinstance(event, RunFinished) else [*run, event]
    return run


def progress(log: Sequence[Event], messages: dict[int, str]) -> tuple[bool, bool]:
    """Whether there must have been progress since the last death, and whether there may have been."""
    marks = [index for index, event in enumerate(log) if isinstance(event, SessionCrashed | SessionResumed)]
    new, last = (log[marks[-1] + 1 :], log[marks[-1]]) if marks else (log, None)
    since, at = (last.seq, last.at) if last is not None else (0, 0)
    ending = {event.run_id for event in log if isinstance(event, CancelRequested | RunFinished)}
    certain = possible = any(isinstance(event, InputReceived) for event in new)
    possible |= any(seq > since and role in ("assistant", "tool") for seq, role in messages.items())
    for event in new:
        if isinstance(event, ModelCallCompleted):
            certain |= messages.get(event.seq - 1) == "assistant"
        elif isinstance(event, ToolFinished) and event.at != at:  # else it was given up for that death
            possible = True
            # What the store says of the calls of a run that ends without its agent is no progress of the agent.
            certain |= event.run_id not in ending and event.outcome in ("ok", "error", "timeout")
    return certain, certain or possible


def _decided(
    log: Sequence[Event], death: SessionCrashed, policy: dict[str, Any], *, stepped: bool, guarded: bool
) -> Iterator[str]:
    """What the restart rule says, of how many deaths there were and how many of them in a row."""
    counted, stuck, gave_up = list[int](), 0, False
    for event in (*log, death):
        if isinstance(event, SessionResumed):
            counted, stuck = [], 0
        elif isinstance(event, RunStarted):
            gave_up = False
        elif isinstance(event, SessionCrashed) and not event.waiting:
            counted.append(event.at)
            stuck = 0 if event.progress else stuck + 1
            if event.decision == "abort" and event is not death:
                stuck, gave_up = 0, True
    recent = sum(0 <= death.at - at < policy["period"] * 1e6 for at in counted)
    allowed: Collection[str] = ("resume",)
    if not death.waiting and stuck >= policy["stuck_after"]:
        allowed = ("quarantine",) if gave_up else ("abort", "quarantine")
    elif not death.waiting and recent > policy["max_restarts"]:
        allowed = ("quarantine",)
    place = f"the {stuck}th in a row without progress, the {recent}th within {policy['period']:g} s"
    if death.decision not in allowed and not (stepped and len(counted) > policy["max_restarts"]):
        yield f"it is {place}, and the decision was {death.decision}, not {' or '.join(allowed)}"
    most = min(policy["backoff_max"], policy["backoff"] * 2 ** max(0, stuck - 1)) * 1e6
    least = min(policy["backoff_max"], policy["backoff"]) * (1 - policy.get("jitter", 0.0)) * 1e6
    if death.waiting or death.progress or death.decision != "resume":
        least = most = 0
    if guarded:  # one that waits for its model goes on with that
        least = 0
    if not (int(least) <= death.delay <= most or death.delay == LEASE):
        yield f"it is {place}, and the pause was {death.delay / 1e6} s"
