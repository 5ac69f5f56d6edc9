"""Rules of the accounting identity between the sessions of a tree: parents and children, and the budget they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from sqlalchemy import and_, case, exists, func, not_, or_, select

from understudy.identifiers import wait_key

from .beginnings import TASK, TASK_AT_WORK, TASK_UNTOLD
from .check_rows import Found, Scope, same_session
from .statements import EVENT, RESERVATION, RUN, SESSION, TOOL_CALL


def tree(scope: Scope) -> Iterator[Found]:
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
        columns.parent_run_id.is_(None),
    )  # fmt: skip
    below = and_(parent.c.root_id == columns.root_id, parent.c.depth + 1 == columns.depth)
    faults = case(
        (and_(columns.parent_id.is_(None), not_(alone)), "it is a root, and is placed as if it were none"),
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
    for row in scope.rows(select(found).where(found.c.fault.is_not(None))):
        yield row["session_id"], f"parent {row['parent_id']}, call {row['call_id']}: {row['fault']}"


def children_open(scope: Scope) -> Iterator[Found]:
    """`children_open` is the number of the current run's children that it wants to hear the end of, and has not."""
    child = SESSION.alias("child")
    at_work = (
        select(func.count())
        .select_from(child)
        .where(
            child.c.namespace == SESSION.c.namespace,
            child.c.parent_id == SESSION.c.session_id,
            child.c.parent_run_id == SESSION.c.run_id,
            child.c.task_open.in_((TASK_AT_WORK, TASK_UNTOLD)),
            child.c.abandoned == 0,
        )
        .scalar_subquery()
    )
    statement = select(SESSION.c.session_id, SESSION.c.children_open, at_work.label("at_work")).where(
        scope.of(SESSION), SESSION.c.run_id.is_not(None)
    )
    found = statement.subquery()
    for row in scope.rows(select(found).where(found.c.at_work != found.c.children_open)):
        yield row["session_id"], f"children_open is {row['children_open']}, and {row['at_work']} are at work"

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
    for row in scope.rows(tasks):
        yield row["session_id"], f"its task is {row['status']}, and task_open is {row['task_open']}"


def child_events(scope: Scope) -> Iterator[Found]:
    """A child's parent has one `child_spawned` event, and one `child_finished` with its status once its task ended,
    unless the parent's run had ended before: then the child was cancelled.
    """
    types = ("child_spawned", "child_finished")
    # The CASE decides what is read as JSON: PostgreSQL refuses to read texts with \u0000, which other events may have.
    named = {name: case((EVENT.c.type.in_(types), EVENT.c.body[name].as_string())) for name in ("child_id", "status")}
    child = SESSION.alias("child")
    tells = EVENT.c.namespace == scope.namespace
    if scope.session_ids is not None:
        parents = select(child.c.parent_id).where(
            child.c.namespace == scope.namespace, child.c.session_id.in_(scope.session_ids)
        )
        tells = and_(tells, or_(EVENT.c.session_id.in_(parents), EVENT.c.session_id.in_(scope.session_ids)))
    events = (
        select(EVENT.c.session_id, EVENT.c.type, *(value.label(name) for name, value in named.items()))
        .where(tells, EVENT.c.type.in_(types))
        .subquery()
    )
    counts = [func.sum(case((events.c.type == name, 1), else_=0)).label(name) for name in types]
    told = (
        select(events.c.session_id, events.c.child_id, func.max(events.c.status).label("status"), *counts)
        .group_by(events.c.session_id, events.c.child_id)
        .subquery()
    )
    parent, task, started_by = SESSION.alias("parent"), RUN.alias("task"), RUN.alias("started_by")
    spawned, finished = (func.coalesce(told.c[name], 0) for name in types)
    whole = parent.c.pruned_seq == 0
    # By what happened, not by times: two nodes' clocks need not agree.
    parent_was_gone = and_(
        started_by.c.finished_at > 0, or_(task.c.started_at == 0, task.c.cancel_requested.is_not(None))
    )
    columns = SESSION.c
    untold = or_(columns.task_open == TASK_UNTOLD, columns.replaced_by.is_not(None), columns.abandoned == 1)
    faults = case(
        (or_(spawned > 1, and_(whole, spawned == 0)), "was not spawned once"),
        (finished > 1, "was reported more than once"),
        (and_(finished == 1, task.c.finished_at == 0), "was reported before its task ended"),
        (and_(finished == 1, told.c.status != task.c.status), "was reported with another status than its task has"),
        (and_(finished > 0, columns.replaced_by.is_not(None)), "was reported, and started again"),
        (
            and_(whole, finished == 0, task.c.finished_at > 0, not_(or_(parent_was_gone, untold))),
            "ended, and its parent wasn't told",
        ),
    )
    found = (
        select(columns.session_id, columns.parent_id, faults.label("fault"))
        .join(parent, and_(parent.c.namespace == columns.namespace, parent.c.session_id == columns.parent_id))
        .join(task, and_(same_session(task, SESSION), task.c.run_id == TASK))
        .outerjoin(started_by, and_(same_session(started_by, parent), started_by.c.run_id == columns.parent_run_id))
        .outerjoin(told, and_(told.c.session_id == columns.parent_id, told.c.child_id == columns.session_id))
        .where(scope.of(SESSION))
        .subquery()
    )
    for row in scope.rows(select(found).where(found.c.fault.is_not(None))):
        yield row["session_id"], f"by the events of its parent {row['parent_id']}, it {row['fault']}"
    is_child = and_(child.c.parent_id == told.c.session_id, child.c.session_id == told.c.child_id)
    # A child that has ended may be missing: its parent can come from an archive without its tree.
    unspawned, unfinished = (func.coalesce(told.c[name], 0) == 0 for name in types)
    whole_log = exists().where(parent.c.namespace == scope.namespace, parent.c.session_id == told.c.session_id, whole)
    strange = select(told.c.session_id, told.c.child_id).where(
        or_(unfinished, and_(unspawned, whole_log)), ~exists().where(child.c.namespace == scope.namespace, is_child)
    )
    for row in scope.rows(strange):
        yield row["session_id"], f"its events tell of a child {row['child_id']}, which it does not have"


def budget(scope: Scope) -> Iterator[Found]:
    """A tree's budget: spent is what its sessions used, reserved is what its reservations hold; else both are 0."""
    member = SESSION.alias("member")
    used = (
        select(func.coalesce(func.sum(member.c.tokens_used), 0))
        .where(member.c.namespace == SESSION.c.namespace, member.c.root_id == SESSION.c.session_id)
        .scalar_subquery()
    )
    held = (
        select(func.coalesce(func.sum(RESERVATION.c.tokens), 0))
        .where(RESERVATION.c.namespace == SESSION.c.namespace, RESERVATION.c.root_id == SESSION.c.session_id)
        .scalar_subquery()
    )
    counts = and_(SESSION.c.budget_tokens.is_not(None), SESSION.c.root_id == SESSION.c.session_id)
    found = (
        select(
            SESSION.c.session_id, SESSION.c.budget_spent, SESSION.c.budget_reserved,
            case((counts, used), else_=0).label("used"), case((counts, held), else_=0).label("held"),
        )
        .where(scope.of(SESSION))
        .subquery()
    )  # fmt: skip
    wrong = or_(found.c.used != found.c.budget_spent, found.c.held != found.c.budget_reserved)
    for row in scope.rows(select(found).where(wrong)):
        yield (
            row["session_id"],
            f"the tree's budget has {row['budget_spent']} spent and {row['budget_reserved']} reserved; its sessions "
            f"used {row['used']} and hold {row['held']}",
        )


def reservation(scope: Scope) -> Iterator[Found]:
    """Tokens are reserved for the very call that a session waits for, and for every such call under a budget."""
    root = SESSION.alias("root")
    names = ("session_id", "root_id", "run_id", "round", "wait", "cancel_reason")
    statement = (
        select(
            *(SESSION.c[name] for name in names), root.c.budget_tokens, RESERVATION.c.wait_key,
            RESERVATION.c.root_id.label("held_from"),
        )
        .join(root, and_(root.c.namespace == SESSION.c.namespace, root.c.session_id == SESSION.c.root_id))
        .outerjoin(RESERVATION, same_session(RESERVATION, SESSION))
        .where(
            scope.of(SESSION),
            or_(
                RESERVATION.c.wait_key.is_not(None),
                and_(SESSION.c.wait == "model", root.c.budget_tokens.is_not(None)),
            ),
        )
    )  # fmt: skip
    for row in scope.rows(statement):
        key = wait_key(row["session_id"], row["run_id"] or "", row["round"])
        # A call that was lost with its node is not issued again for a run that shall end: its tokens are given back
        # when the run ends.
        waits = row["wait"] == "model" or (row["wait"] is None and row["cancel_reason"] is not None)
        if row["wait_key"] is None:
            yield row["session_id"], f"nothing is reserved for the model call {key}"
        elif not waits or row["wait_key"] != key or row["held_from"] != row["root_id"] or row["budget_tokens"] is None:
            yield row["session_id"], f"tokens are reserved for {row['wait_key']}, which the session does not wait for"


TREE_RULES: dict[str, Callable[[Scope], Iterable[Found]]] = {
    rule.__name__: rule for rule in (tree, children_open, child_events, budget, reservation)
}
