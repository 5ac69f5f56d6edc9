"""Operations of budgets: opening accounts, reserving before a model call, booking after it, admitting sub-agents."""

from __future__ import annotations

from typing import Any

from understudy.identifiers import wait_key
from understudy.messages import Usage
from understudy.records import NO_USAGE

from .. import budgets
from ..db.session_row import SessionRow
from ..transaction import Transaction


def open_accounts(tx: Transaction, session_id: str, budget: Any, parent: SessionRow | None) -> str | None:
    """Give a new session the accounts of its budget; returns what it is charged to, those of its ancestors included."""
    own = [budgets.new_account(session_id, *limit) for limit in budgets.limits_of(budget)]
    if own:
        tx.accounts.create(session_id, own)
    found = [(session_id, 0)] if own else []
    if parent is not None:
        for owner, level in budgets.owners(parent.accounts):
            if level or any(account["scope"] == "tree" for account in tx.accounts.of(owner)):
                found.append((owner, level + 1))
    return budgets.written(found)


def begin_run(tx: Transaction, row: SessionRow) -> None:
    """A run of the session begins."""
    for charge in tx.charges(row):
        if charge.level == 0:
            budgets.begin(charge.account, tx.now)


def deadline(tx: Transaction, row: SessionRow) -> budgets.Deadline | None:
    """When the session's current run must have ended, if a budget of seconds says so."""
    return budgets.deadline_of(tx.charges(row))


def reserve(tx: Transaction, row: SessionRow, round_number: int, ask: budgets.Ask) -> budgets.Refusal | None:
    """Set aside what a session's model call may take; if an account does not allow it, say which, and do nothing."""
    if row.accounts is None:
        return None
    book(tx, row)  # a call that was lost, and not issued again for a run that shall end
    charges = tx.charges(row)
    granted = budgets.grant(charges, ask, tx.now)
    if isinstance(granted, budgets.Refusal):
        return granted
    for _, account in charges:
        account["reserved"] += granted.of(account["resource"])
    tx.accounts.reserve(row.session_id, wait_key(row.session_id, row.run_id or "", round_number), granted)
    return None


def longest_reply(tx: Transaction, row: SessionRow) -> int:
    """The longest reply that is paid for, of the call that the session waits for; 0 for any length."""
    if row.accounts is None or row.wait != "model":
        return 0
    granted = tx.accounts.reserved(row.session_id)
    return granted.output if granted is not None else 0


def book(tx: Transaction, row: SessionRow, usage: Usage = NO_USAGE, *, rounds: int = 0) -> None:
    """Give back what was reserved for a session's model call and book what it really took."""
    if row.accounts is None:
        return
    held = tx.accounts.reserved(row.session_id)
    for _, account in tx.charges(row):
        budgets.book(account, held, usage, rounds)
    tx.accounts.reserve(row.session_id, "", None)


def book_late(tx: Transaction, row: SessionRow, usage: Usage) -> None:
    """Book what a late answer took, for which nothing is reserved any more; it is of no run's account."""
    for _, account in tx.charges(row):
        if account["scope"] != "run":
            budgets.book(account, None, usage, 0)


def admit_child(tx: Transaction, row: SessionRow) -> budgets.Refusal | None:
    """Count one more sub-agent of a session; if an account does not allow it, say which, and do nothing."""
    charges = tx.charges(row)
    refusal = budgets.child_refused(charges)
    for _, account in charges:
        if refusal is None and account["resource"] == "children":
            account["spent"] += 1
    return refusal
