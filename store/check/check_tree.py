"""Rules of the accounting identity between the sessions of a tree: parents and children."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from sqlalchemy import and_, case, exists, func, literal, not_, or_, select

from ..db.statements import EVENT, NAMESPACE, RUN, SESSION, SESSION_IDS, TOOL_CALL, same_session
from ..operations.beginnings import TASK, TASK_AT_WORK, TASK_UNREPORTED
from .check_scope import Books, Found, Scope, Wrong, selected


@selected
def tree(scope: Scope) -> Iterator[Wrong]:
    """A child has a parent, the tool call of it that made it, and a task; it is one deeper, under the same root."""
    parent, columns = SESSION.alias("parent"), SESSION.c
    made_by = exists().where(
        TOOL_CALL.c.namespace == columns.namespace, TOOL_CALL.c.session_id == columns.parent_id,
        TOOL_CALL.c.call_id == columns.call_id, TOOL_CALL.c.run_id == columns.parent_run_id,
        or_(TOOL_CALL.c.child_id == columns.session_id, columns.replaced_by.is_not(None)),
    )  # fmt: skip
    has_task = exists().where(same_session(RUN, SESSION), RUN.c.run_id == TASK)
    alone = and_(
        columns.root_id == columns.session_id, columns.depth == 0, columns.call_id.is_(None),
        columns.parent_run_id.is_(None), columns.task_open == 0, columns.background == 0,
    )  # fmt: skip
    below = and_(parent.c.root_id == columns.root_id, parent.c.depth + 1 == columns.depth)
    faults = case(
        (and_(columns.parent_id.is_(None), not_(alone)), "it is a root, and is kept as if it were none"),
        (columns.parent_id.is_(None), None),
        (parent.c.session_id.is_(None), "its parent does not exist"),
        (not_(below), "its root or its depth is not its parent's"),
        (not_(made_by), "its parent has no tool call that made it"),
        (not_(has_task), "it has no task"),
    )
    found = (
        select(columns.session_id, columns.parent_id, columns.call_id, faults.label("fault"))
        .outerjoin(parent, and_(parent.c.namespace == columns.namespace, parent.c.session_id == columns.parent_id))
        .where(scope.of(SESSION))
        .subquery()
    )
    yield (
        select(found).where(found.c.fault.is_not(None)),
        lambda row: f"parent {row['parent_id']}, call {row['call_id']}: {row['fault']}",
    )


@selected
def children_open(scope: Scope) -> Iterator[Wrong]:
    """`children_open` is the number of the current run's children that it wants to hear the end of, and has not."""
    child = SESSION.alias("child")
    at_work = (
        select(func.count())
        .select_from(child)
        .where(
            child.c.namespace == SESSION.c.namespace,
            child.c.parent_id == SESSION.c.session_id,
            child.c.parent_run_id == SESSION.c.run_id,
            child.c.task_open.in_((TASK_AT_WORK, TASK_UNREPORTED)),
            child.c.abandoned == 0,
            child.c.background == 0,
        )
        .scalar_subquery()
    )
    statement = select(SESSION.c.session_id, SESSION.c.children_open, at_work.label("at_work")).where(
        scope.of(SESSION), SESSION.c.run_id.is_not(None)
    )
    found = statement.subquery()
    yield (
        select(found).where(found.c.at_work != found.c.children_open),
        lambda row: f"children_open is {row['children_open']}, and {row['at_work']} are at work",
    )

    ended = RUN.c.finished_at > 0
    tasks = (
        select(SESSION.c.session_id, SESSION.c.task_open, RUN.c.status)
        .join(RUN, and_(same_session(RUN, SESSION), RUN.c.run_id == TASK))
        .where(
            scope.of(SESSION),
            SESSION.c.parent_id.is_not(None),
            or_(
                and_(SESSION.c.task_open == TASK_AT_WORK, ended), and_(SESSION.c.task_open != TASK_AT_WORK, not_(ended))
            ),
        )
    )
    yield tasks, lambda row: f"its task is {row['status']}, and task_open is {row['task_open']}"


@selected
def linked(scope: Scope) -> Iterator[Wrong]:
    """A linked child whose task has ended, also one whose task was started again, is closed with its parent."""
    parent = SESSION.alias("parent")
    statement = (
        select(SESSION.c.session_id, SESSION.c.parent_id)
        .join(parent, and_(parent.c.namespace == SESSION.c.namespace, parent.c.session_id == SESSION.c.parent_id))
        .where(
            scope.of(SESSION), SESSION.c.lifecycle == "linked", SESSION.c.closed == 0, parent.c.closed == 1,
            SESSION.c.task_open.not_in((TASK_AT_WORK, TASK_UNREPORTED)),
        )
    )  # fmt: skip
    yield statement, lambda row: f"its parent {row['parent_id']} is closed, and it takes input"


@selected
def child_events(scope: Scope) -> Iterator[Wrong]:
    """A child's parent has one `child_spawned` event, and one `child_finished` with its status once its task ended,
    unless the parent's run had ended before: then the child was cancelled. The end of one in the background is
    reported to whatever run the parent is in, by one input, unless it is not wanted any more.
    """
    types = ("child_spawned", "child_finished")
    # The CASE decides what is read as JSON: PostgreSQL refuses to read texts with \u0000, which other events may have.
    named = {name: case((EVENT.c.type.in_(types), EVENT.c.body[name].as_string())) for name in ("child_id", "status")}
    child = SESSION.alias("child")
    tells = EVENT.c.namespace == NAMESPACE
    if scope.some:
        parents = select(child.c.parent_id).where(scope.of(child))
        tells = and_(tells, or_(EVENT.c.session_id.in_(parents), EVENT.c.session_id.in_(SESSION_IDS)))
    events = (
        select(EVENT.c.session_id, EVENT.c.type, *(value.label(name) for name, value in named.items()))
        .where(tells, EVENT.c.type.in_(types))
        .subquery()
    )
    counts = [func.sum(case((events.c.type == name, 1), else_=0)).label(name) for name in types]
    logged = (
        select(events.c.session_id, events.c.child_id, func.max(events.c.status).label("status"), *counts)
        .group_by(events.c.session_id, events.c.child_id)
        .subquery()
    )
    parent, task, started_by = SESSION.alias("parent"), RUN.alias("task"), RUN.alias("started_by")
    spawned, finished = (func.coalesce(logged.c[name], 0) for name in types)
    whole = parent.c.pruned_seq == 0
    # By what happened, not by times: two nodes' clocks need not agree.
    parent_was_gone = and_(
        SESSION.c.background == 0,
        started_by.c.finished_at > 0,
        or_(task.c.started_at == 0, task.c.cancel_requested.is_not(None)),
    )
    columns = SESSION.c
    news = exists().where(
        RUN.c.namespace == columns.namespace, RUN.c.session_id == columns.parent_id,
        RUN.c.run_id == literal("news.") + columns.session_id,
    )  # fmt: skip
    unreported = or_(columns.task_open == TASK_UNREPORTED, columns.replaced_by.is_not(None), columns.abandoned == 1)
    faults = case(
        (or_(spawned > 1, and_(whole, spawned == 0)), "was not spawned once"),
        (finished > 1, "was reported more than once"),
        (and_(finished == 1, task.c.finished_at == 0), "was reported before its task ended"),
        (and_(finished == 1, logged.c.status != task.c.status), "was reported with another status than its task has"),
        (and_(finished > 0, columns.replaced_by.is_not(None)), "was reported, and started again"),
        (
            and_(columns.background == 1, (finished > 0) != news),
            "was reported without an event, or the other way round",
        ),
        (
            and_(whole, finished == 0, task.c.finished_at > 0, not_(or_(parent_was_gone, unreported))),
            "ended, and its parent was not notified",
        ),
    )
    found = (
        select(columns.session_id, columns.parent_id, faults.label("fault"))
        .join(parent, and_(parent.c.namespace == columns.namespace, parent.c.session_id == columns.parent_id))
        .join(task, and_(same_session(task, SESSION), task.c.run_id == TASK))
        .outerjoin(started_by, and_(same_session(started_by, parent), started_by.c.run_id == columns.parent_run_id))
        .outerjoin(logged, and_(logged.c.session_id == columns.parent_id, logged.c.child_id == columns.session_id))
        .where(scope.of(SESSION))
        .subquery()
    )
    yield (
        select(found).where(found.c.fault.is_not(None)),
        lambda row: f"by the events of its parent {row['parent_id']}, it {row['fault']}",
    )
    is_child = and_(child.c.parent_id == logged.c.session_id, child.c.session_id == logged.c.child_id)
    # A child that has ended may be missing: its parent can come from an archive without its tree.
    unspawned, unfinished = (func.coalesce(logged.c[name], 0) == 0 for name in types)
    whole_log = exists().where(parent.c.namespace == NAMESPACE, parent.c.session_id == logged.c.session_id, whole)
    strange = select(logged.c.session_id, logged.c.child_id).where(
        or_(unfinished, and_(unspawned, whole_log)), ~exists().where(child.c.namespace == NAMESPACE, is_child)
    )
    yield strange, lambda row: f"its events tell of a child {row['child_id']}, which it does not have"


TREE_RULES: dict[str, Callable[[Books], Iterable[Found]]] = {
    rule.__name__: rule for rule in (tree, children_open, linked, child_events)
}
