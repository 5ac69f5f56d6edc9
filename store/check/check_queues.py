"""Rules about queues."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from sqlalchemy import and_, case, exists, false, func, not_, or_, select

from understudy.queues import BEGUN, BEHIND, FREE, WAITS

from ..db.statements import INBOX, RUN, SESSION, same_session
from .check_scope import Books, Found, Scope, Wrong, selected


@selected
def slots(scope: Scope) -> Iterator[Wrong]:
    """A run has a place in a queue as long as it has not ended: it has a slot if it is its session's current run, or
    the one that this is about to begin, waits for one if its session does nothing else, and else is behind another."""
    run, session = RUN.c, SESSION.c
    earlier = INBOX.alias("earlier")
    mine = and_(same_session(INBOX, RUN), INBOX.c.kind == "input", INBOX.c.key == run.run_id)
    behind = exists().where(
        same_session(earlier, INBOX), earlier.c.kind == "input", earlier.c.item < INBOX.c.item
    )  # fmt: skip
    is_next = and_(session.run_id.is_(None), exists().where(mine, not_(behind)))
    holds = and_(session.queue == run.queue, or_(func.coalesce(session.run_id == run.run_id, false()), is_next))
    wanted = case(
        (or_(run.queue == "", run.finished_at > 0), FREE),
        (holds, BEGUN),
        (and_(func.coalesce(session.wait, "") == "queue", is_next), WAITS),
        else_=BEHIND,
    )
    statement = (
        select(run.session_id, run.run_id, run.queue, run.slot, wanted.label("wanted"))
        .join(SESSION, same_session(SESSION, RUN))
        .where(scope.of(RUN), run.slot != wanted)
    )
    yield (
        statement,
        lambda row: f"run {row['run_id']!r} stands at {row['slot']} in queue {row['queue']!r}, not at {row['wanted']}",
    )


@selected
def queued(scope: Scope) -> Iterator[Wrong]:
    """A session counts its inputs that have no slot yet, and has one, or none, in the queue of the run that it is at or
    about to begin."""
    waiting = (
        select(func.count())
        .select_from(RUN)
        .where(same_session(RUN, SESSION), RUN.c.slot.in_((BEHIND, WAITS)))
        .scalar_subquery()
    )
    slot = exists().where(same_session(RUN, SESSION), RUN.c.slot == BEGUN, RUN.c.queue == SESSION.c.queue)
    counted = select(SESSION.c.session_id, SESSION.c.queue, SESSION.c.queued, waiting.label("waiting"))
    counted = counted.where(
        scope.of(SESSION),
        or_(SESSION.c.queued != waiting, and_(SESSION.c.queue != "", not_(slot))),
    )
    yield (
        counted,
        lambda row: (
            f"it counts {row['queued']} inputs without a slot of {row['waiting']}, and has one in queue "
            f"{row['queue']!r}"
        ),
    )


QUEUE_RULES: dict[str, Callable[[Books], Iterable[Found]]] = {"slots": slots, "queued": queued}
