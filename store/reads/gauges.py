"""What is counted for gauges: sessions, runs, inboxes, timers and budgets, of the sessions at home on a node.

Sessions at work are few, and found by an index. Those without work may be very many, and counting them by status reads
them all: `passive` is for now and then.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, and_, case, func, select

from ..db.statements import ACCOUNT, INBOX, SESSION, TIMER, same_session

MARK = "/* counts */"
"""Stands in these statements: they read more than they bring."""

BUDGET = ("allowed", "reserved", "spent")
NEAR = 9, 10
"""This share of what is allowed is spent."""


@dataclass(frozen=True)
class Counts:
    """What sessions at work are at.

    Attributes:
        sessions: by status.
        runs: accepted and not ended, queued ones included.
        stuck: sessions that died since their last progress, and count as stuck for it.
        inbox_oldest: when the oldest item arrived, microseconds since 1970 UTC; 0 without one.
        timers: of passive sessions too.
        budget: tokens of the accounts of their trees, by `BUDGET`.
        near: accounts of their trees that are nearly spent, by resource: `tokens` and `cost`.
    """

    sessions: dict[str, int] = field(default_factory=dict)
    runs: int = 0
    stuck: int = 0
    inbox: int = 0
    inbox_oldest: int = 0
    timers: int = 0
    budget: dict[str, int] = field(default_factory=dict)
    near: dict[str, int] = field(default_factory=dict)


def at_work(connection: Connection, namespace: str, home: str, others: Collection[str] | None) -> Counts:
    """Count what has work to do.

    Args:
        home: the node whose sessions are counted.
        others: None, or all other nodes: then sessions are counted too that are at home at no node that there is.
    """
    mine = (SESSION.c.namespace == namespace, SESSION.c.active == 1, _at_home(home, others))
    idle_since_death = and_(SESSION.c.stuck > 0, SESSION.c.progress == SESSION.c.progress_at_death)
    stuck = func.sum(case((idle_since_death, 1), else_=0))
    statement = select(SESSION.c.status, func.count(), func.count(SESSION.c.run_id), stuck).where(*mine)
    found = _all(connection, statement.group_by(SESSION.c.status))
    ids = select(SESSION.c.session_id).where(*mine)  # not a join, in which the planner may begin with all that have one
    queued = func.coalesce(func.sum(case((INBOX.c.kind == "input", 1), else_=0)), 0)
    oldest = func.coalesce(func.min(INBOX.c.created_at), 0)
    inboxes = select(func.count(), queued, oldest).where(INBOX.c.namespace == namespace, INBOX.c.session_id.in_(ids))
    [(inbox, waiting, arrived)] = _all(connection, inboxes)
    timers = select(func.count()).select_from(TIMER).join(SESSION, same_session(TIMER, SESSION))
    [(pending,)] = _all(connection, timers.where(TIMER.c.namespace == namespace, _at_home(home, others)))
    sums = [func.sum(ACCOUNT.c[name]) for name in BUDGET]
    near = func.sum(case((ACCOUNT.c.spent * NEAR[1] >= ACCOUNT.c.allowed * NEAR[0], 1), else_=0))
    trees = (ACCOUNT.c.namespace == namespace, ACCOUNT.c.scope == "tree", ACCOUNT.c.session_id.in_(ids))
    accounts = select(ACCOUNT.c.resource, near, *sums).where(*trees, ACCOUNT.c.resource.in_(["tokens", "cost"]))
    spent = {resource: rest for resource, *rest in _all(connection, accounts.group_by(ACCOUNT.c.resource))}
    nothing = [0] * (1 + len(BUDGET))
    return Counts(
        {status: number for status, number, _, _ in found},
        waiting + sum(runs for _, _, runs, _ in found),
        int(sum(number for _, _, _, number in found)),
        inbox,
        arrived,
        pending,
        {name: int(amount) for name, amount in zip(BUDGET, spent.get("tokens", nothing)[1:], strict=True)},
        {resource: int(spent.get(resource, nothing)[0]) for resource in ("tokens", "cost")},
    )


def passive(connection: Connection, namespace: str, home: str, others: Collection[str] | None) -> dict[str, int]:
    """How many sessions without work there are, by status; arguments as for `at_work`."""
    mine = (SESSION.c.namespace == namespace, SESSION.c.active == 0, _at_home(home, others))
    found = _all(connection, select(SESSION.c.status, func.count()).where(*mine).group_by(SESSION.c.status))
    return {status: number for status, number in found}


def _at_home(home: str, others: Collection[str] | None) -> Any:
    return SESSION.c.node_id == home if others is None else SESSION.c.node_id.not_in(sorted(others))


def _all(connection: Connection, statement: Any) -> Any:
    return connection.execute(statement.prefix_with(MARK)).all()
