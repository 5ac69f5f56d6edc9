"""A tree's budget: tokens are reserved before a model call and settled after it."""

from __future__ import annotations

from sqlalchemy import delete, select

from understudy.identifiers import wait_key

from .statements import RESERVATION
from .transaction import Row, Transaction


def budget_left(tx: Transaction, row: Row) -> int | None:
    """Tokens neither spent nor reserved in the tree's budget; None where the root has no budget."""
    root = tx.session(row["root_id"])
    if root["budget_tokens"] is None:
        return None
    left: int = root["budget_tokens"] - root["budget_spent"] - root["budget_reserved"]
    return left


def reserve(tx: Transaction, row: Row, round_number: int, tokens: int) -> bool:
    """Set tokens aside for a session's model call; False, and nothing is, if the tree's budget does not allow them."""
    left = budget_left(tx, row)
    if left is None:
        return True
    if left < tokens:
        return False
    settle(tx, row, release=False)
    root = tx.session(row["root_id"])
    tx.changed(root)
    root["budget_reserved"] += tokens
    tx.insert(
        RESERVATION,
        {"session_id": row["session_id"], "root_id": row["root_id"], "tokens": tokens,
         "wait_key": wait_key(row["session_id"], row["run_id"], round_number)},
    )  # fmt: skip
    return True


def settle(tx: Transaction, row: Row, *, release: bool = True, spent: int = 0) -> None:
    """Give a reservation back to the tree's budget and book what was really spent."""
    root = tx.session(row["root_id"])
    if root["budget_tokens"] is None and not root["budget_reserved"]:  # else it had one before an upgrade
        return
    where = (RESERVATION.c.namespace == tx.namespace, RESERVATION.c.session_id == row["session_id"])
    held = tx.read(select(RESERVATION.c.tokens).where(*where), row["session_id"]).scalar()
    if held is not None:
        tx.connection.execute(delete(RESERVATION).where(*where))
    if release:
        tx.changed(root)
        root["budget_reserved"] -= held or 0
        root["budget_spent"] += spent


def settle_late(tx: Transaction, row: Row, tokens: int) -> None:
    """Book what a late answer spent, for which nothing is reserved any more."""
    root = tx.session(row["root_id"])
    if root["budget_tokens"] is not None:
        tx.changed(root)
        root["budget_spent"] += tokens
