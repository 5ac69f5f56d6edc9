"""Rules of the accounting identity about budgets: accounts, what they were charged, and what is reserved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

from sqlalchemy import and_, case, exists, or_, select

from understudy.identifiers import wait_key

from .. import ledger
from ..budgets import owners, written
from ..db.prepared import Row
from ..db.statements import ACCOUNT, RESERVATION, SESSION, same_session
from .check_scope import Books, Found, Scope, Wrong, selected


@selected
def charged_accounts(scope: Scope) -> Iterator[Wrong]:
    """A session is charged to its own accounts, if it has any, and to those that its parent is charged to of a tree."""
    parent = SESSION.alias("parent")
    has_own = exists().where(same_session(ACCOUNT, SESSION))
    has_tree_above = exists().where(same_session(ACCOUNT, parent), ACCOUNT.c.scope == "tree")
    statement = (
        select(
            SESSION.c.session_id, SESSION.c.accounts, parent.c.accounts.label("above"), has_own.label("has_own"),
            has_tree_above.label("has_tree_above"),
        )
        .outerjoin(parent, and_(parent.c.namespace == SESSION.c.namespace, parent.c.session_id == SESSION.c.parent_id))
        .where(scope.of(SESSION), or_(SESSION.c.accounts.is_not(None), parent.c.accounts.is_not(None), has_own))
    )  # fmt: skip

    def tell(row: Row) -> str | None:
        above = [(owner, level + 1) for owner, level in owners(row["above"]) if level or row["has_tree_above"]]
        wanted = written([*([(row["session_id"], 0)] if row["has_own"] else []), *above])
        if row["accounts"] == wanted:
            return None
        return f"it is charged to {row['accounts']}, and should be to {wanted}"

    yield statement, tell


@cache
def _charged_roots(scope: Scope) -> Any:
    roots = select(SESSION.c.root_id).where(scope.of(SESSION), SESSION.c.accounts.is_not(None)).distinct()
    return roots.order_by(SESSION.c.root_id)


def budget(books: Books) -> Iterator[Found]:
    """An account says what was done: spent is what the sessions charged to it did, reserved what they hold."""
    chosen = None if books.session_ids is None else set(books.session_ids)
    root_ids = [row["root_id"] for row in books.read(_charged_roots(books.scope))]
    for account, spent, reserved in ledger.reckon(books.connection, books.namespace, root_ids):
        owner = account["session_id"]
        if (account["spent"], account["reserved"]) != (spent, reserved) and (chosen is None or owner in chosen):
            yield (
                owner,
                f"its {account['scope']} account of {account['resource']} has {account['spent']} spent and "
                f"{account['reserved']} reserved; by what was done it should be {spent} and {reserved}",
            )


@selected
def budget_limit(scope: Scope) -> Iterator[Wrong]:
    """No account goes below zero, or above its limit but by what answers took beyond what was reserved for them."""
    columns = ACCOUNT.c
    faults = case(
        (or_(columns.allowed < 0, columns.spent < 0, columns.reserved < 0, columns.beyond < 0), "is below zero"),
        (
            and_(columns.resource.in_(("depth", "seconds")), columns.spent + columns.reserved > 0),
            "is of a kind that nothing is spent of",
        ),
        (columns.spent + columns.reserved > columns.allowed + columns.beyond, "is above its limit"),
        (and_(columns.resource.in_(("rounds", "children")), columns.beyond > 0), "counts something beyond its limit"),
    )
    found = (
        select(columns.session_id, columns.scope, columns.resource, faults.label("fault"))
        .where(scope.of(ACCOUNT))
        .subquery()
    )
    yield (
        select(found).where(found.c.fault.is_not(None)),
        lambda row: f"its {row['scope']} account of {row['resource']} {row['fault']}",
    )


@selected
def reservation(scope: Scope) -> Iterator[Wrong]:
    """Something is reserved for the very call that a session waits for, and for every such call that is charged."""
    names = ("session_id", "run_id", "round", "wait", "cancel_reason", "accounts")
    statement = (
        select(*(SESSION.c[name] for name in names), RESERVATION.c.wait_key)
        .outerjoin(RESERVATION, same_session(RESERVATION, SESSION))
        .where(
            scope.of(SESSION),
            or_(
                RESERVATION.c.wait_key.is_not(None),
                and_(SESSION.c.wait == "model", SESSION.c.accounts.is_not(None)),
            ),
        )
    )

    def tell(row: Row) -> str | None:
        key = wait_key(row["session_id"], row["run_id"] or "", row["round"])
        # A call that was lost with its node is not issued again for a run that shall end: what is reserved for it is
        # given back when the run ends.
        waits = row["wait"] == "model" or (row["wait"] is None and row["cancel_reason"] is not None)
        if row["wait_key"] is None:
            return f"nothing is reserved for the model call {key}"
        if not waits or row["wait_key"] != key or row["accounts"] is None:
            return f"there is a reservation for {row['wait_key']}, which the session does not wait for"
        return None

    yield statement, tell


BUDGET_RULES: dict[str, Callable[[Books], Iterable[Found]]] = {
    rule.__name__: rule for rule in (charged_accounts, budget, budget_limit, reservation)
}
