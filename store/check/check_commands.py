"""The rule of commands in the background. A function per rule, as in `check_rows`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from sqlalchemy import and_, func, not_, or_, select, true

from understudy.commands import ENDED, LOST, MOST_COMMANDS, RUNNING, STOPPED, STOPPING

from ..db.statements import COMMAND, EVENT, SESSION, same_session
from .check_scope import Books, Found, Scope, Wrong, selected


@selected
def commands(scope: Scope) -> Iterator[Wrong]:
    """A command is at work or has ended, as its state says; one of a session that takes no more input is asked to end;
    and no session has more at work than it may have."""
    columns = COMMAND.c
    at_work = and_(columns.ended_at == 0, columns.state.in_((RUNNING, STOPPING)))
    over = and_(columns.ended_at > 0, columns.state.in_((ENDED, STOPPED, LOST)))
    names = [columns[name] for name in ("session_id", "job", "state", "ended_at")]
    yield (
        select(*names).where(scope.of(COMMAND), not_(or_(at_work, over))),
        "command {job} is {state}, and ended at {ended_at}".format_map,
    )
    yield (
        select(*names)
        .join(SESSION, same_session(SESSION, COMMAND))
        .where(scope.of(COMMAND), columns.state == RUNNING, SESSION.c.closed == 1),
        "command {job} is at work, and its session is closed".format_map,
    )
    number = func.count().label("number")
    counted = select(columns.session_id, number).where(scope.of(COMMAND), columns.ended_at == 0)
    yield (
        counted.group_by(columns.session_id).having(func.count() > MOST_COMMANDS),
        "it has {number} commands at work".format_map,
    )


@selected
def command_events(scope: Scope) -> Iterator[Wrong]:
    """Every command has one `command_started` event, and one `command_ended` if it has ended here."""
    sure = {"command_started": true(), "command_ended": and_(COMMAND.c.ended_at > 0, COMMAND.c.state != LOST)}
    possible = {"command_started": true(), "command_ended": COMMAND.c.ended_at > 0}  # an imported one is just lost
    for name in sure:
        logged = select(func.count()).select_from(EVENT).where(same_session(EVENT, SESSION), EVENT.c.type == name)
        least, most = (
            select(func.count()).select_from(COMMAND).where(same_session(COMMAND, SESSION), counted[name])
            for counted in (sure, possible)
        )
        counts = (
            select(
                SESSION.c.session_id, SESSION.c.pruned_seq, logged.scalar_subquery().label("logged"),
                least.scalar_subquery().label("least"), most.scalar_subquery().label("most"),
            )
            .where(scope.of(SESSION))
            .subquery()
        )  # fmt: skip
        wrong = or_(counts.c.logged > counts.c.most, and_(counts.c.logged < counts.c.least, counts.c.pruned_seq == 0))
        yield select(counts).where(wrong), f"{{logged}} {name} events, and {{most}} commands that have one".format_map


COMMAND_RULES: dict[str, Callable[[Books], Iterable[Found]]] = {
    rule.__name__: rule for rule in (commands, command_events)
}
