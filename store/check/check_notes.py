"""Rules about notes and boards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sqlalchemy import and_, exists, func, not_, or_, select, true

from understudy.notes import HEAD, LONGEST_NOTE, MOST_NOTES, SESSION, TODO_KEY, TREE

from ..db.statements import NAMESPACE, NOTE, SESSION_IDS
from ..db.statements import SESSION as SESSIONS
from .check_scope import Books, Found, Scope, Wrong, selected


def _of(scope: Scope, table: Any) -> Any:
    """The condition that a note is checked: all of a namespace, or those that belong to some sessions."""
    chosen = and_(table.c.owner.in_(SESSION_IDS), table.c.scope.in_((SESSION, TREE))) if scope.some else true()
    return and_(table.c.namespace == NAMESPACE, chosen)


@selected
def notes(scope: Scope) -> Iterator[Wrong]:
    """A note's version was counted by its owner's head, and is no other note's; an owner has no more than it may, of
    no more characters; a session's notes and a tree's board belong to a session, and to a root."""
    head = NOTE.alias("head")
    mine = and_(
        head.c.namespace == NOTE.c.namespace, head.c.scope == NOTE.c.scope, head.c.owner == NOTE.c.owner,
        head.c.key == HEAD,
    )  # fmt: skip
    who = NOTE.c.owner.label("session_id")
    uncounted = select(who, NOTE.c.key).outerjoin(head, mine).where(
        _of(scope, NOTE), NOTE.c.key != HEAD, or_(head.c.version.is_(None), NOTE.c.version > head.c.version,
        NOTE.c.version < 1),
    )  # fmt: skip
    yield uncounted, lambda row: f"the version of note {row['key']!r} was never counted"
    versions = (
        select(who, NOTE.c.scope, NOTE.c.version)
        .where(_of(scope, NOTE), NOTE.c.key != HEAD)
        .group_by(NOTE.c.scope, NOTE.c.owner, NOTE.c.version)
        .having(func.count() > 1)
    )
    yield versions, lambda row: f"two of its {row['scope']} notes have version {row['version']}"
    counted = (
        select(who, NOTE.c.scope, func.count().label("number"))
        .where(_of(scope, NOTE), NOTE.c.key.not_in((HEAD, TODO_KEY)))
        .group_by(NOTE.c.scope, NOTE.c.owner)
        .having(func.count() > MOST_NOTES)
    )
    yield counted, lambda row: f"it may not have {row['number']} {row['scope']} notes"
    long = select(who, NOTE.c.key).where(
        _of(scope, NOTE), NOTE.c.key != TODO_KEY, func.length(NOTE.c.text) > LONGEST_NOTE
    )
    yield long, lambda row: f"the text of note {row['key']!r} is too long"
    session = exists().where(
        SESSIONS.c.namespace == NOTE.c.namespace, SESSIONS.c.session_id == NOTE.c.owner,
        or_(NOTE.c.scope == SESSION, SESSIONS.c.parent_id.is_(None)),
    )  # fmt: skip
    orphans = select(who, NOTE.c.scope).where(
        _of(scope, NOTE), NOTE.c.scope.in_((SESSION, TREE)), NOTE.c.key == HEAD, not_(session)
    )
    yield orphans, lambda row: f"{row['scope']} notes belong to no session, or to no root"


NOTE_RULES: dict[str, Callable[[Books], Iterable[Found]]] = {"notes": notes}
