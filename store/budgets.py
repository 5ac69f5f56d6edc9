"""The arithmetic of budgets: what a call may take, and who refuses it. Pure functions of accounts; docs/budgets.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from understudy.messages import Usage
from understudy.prices import MILLION, Price, money

from .db.prepared import Row

MINIMAL_REPLY_TOKENS = 16
"""A budget that leaves less room for a reply is used up."""


class Charge(NamedTuple):
    """An account that a session is charged to; `level` is how many levels below it the session is."""

    level: int
    account: Row


@dataclass(frozen=True, slots=True)
class Ask:
    """A model call that wants to be made: its input as estimated, and the longest reply it wants, in tokens."""

    input_tokens: int
    output_tokens: int
    price: Price | None = None


@dataclass(frozen=True, slots=True)
class Grant:
    """What is set aside for a model call.

    Attributes:
        output: the longest reply that this pays for; 0 where nothing depends on its length.
    """

    tokens: int
    cost: int
    output: int

    def of(self, resource: str) -> int:
        """What is reserved in an account of this resource."""
        return {"tokens": self.tokens, "cost": self.cost, "rounds": 1}.get(resource, 0)


@dataclass(frozen=True, slots=True)
class Refusal:
    """An account that does not allow what was asked for, in whole units (millionths, microseconds)."""

    session_id: str
    scope: str
    resource: str
    limit: int
    left: int
    needed: int
    unpriced: bool = False

    @property
    def message(self) -> str:
        """In words, for people and models."""
        of = {"tree": "the tree of session", "session": "session", "run": "each run of session"}[self.scope]
        limit, left, needed = (shown(self.resource, amount) for amount in (self.limit, self.left, self.needed))
        what = f"the budget of {limit} {self.resource} for {of} {self.session_id}"
        if self.unpriced:
            return f"{what} can't be kept: the model has no price any more (UNDERSTUDY_PRICES)"
        return f"{what} does not allow it: {left} left, {needed} needed"

    def error(self, session_id: str) -> dict[str, Any]:
        """As the error of a run of this session."""
        details = {"session_id": self.session_id, "scope": self.scope, "resource": self.resource}
        details["limit"] = shown(self.resource, self.limit)
        return {
            "code": "budget_exceeded", "message": self.message, "session_id": session_id, "details": details,
        }  # fmt: skip


def shown(resource: str, amount: int) -> str:
    """An amount in the unit in which the budget was given."""
    if resource == "cost":
        return f"{money(amount):f}"
    return f"{amount / MILLION:g}" if resource == "seconds" else str(amount)


def limits_of(budget: Any) -> list[tuple[str, str, int]]:
    """`(scope, resource, limit)` of each limit of a compiled specification's budget, in order.

    Specifications of 0.2 have one budget of the tree, which can limit tokens only: `{"tokens": 1000}`.
    """
    budgets = [budget] if isinstance(budget, dict) else budget or ()
    return [
        (item.get("scope", "tree"), resource, limit)
        for item in budgets
        for resource, limit in item.items()
        if resource != "scope" and limit is not None
    ]


def new_account(session_id: str, scope: str, resource: str, allowed: int) -> Row:
    """An account of which nothing is used yet."""
    return {
        "session_id": session_id, "scope": scope, "resource": resource, "allowed": allowed, "reserved": 0, "spent": 0,
        "beyond": 0, "since": 0,
    }  # fmt: skip


@lru_cache(maxsize=4096)
def owners(accounts: str | None) -> tuple[tuple[str, int], ...]:
    """Who has the accounts that a session is charged to, nearest first, and how many levels above it."""
    parts = (item.rpartition(":") for item in (accounts or "").split(",") if item)
    return tuple((session_id, int(level)) for session_id, _, level in parts)


def written(found: Iterable[tuple[str, int]]) -> str | None:
    """The same as a session's row keeps it."""
    return ",".join(f"{session_id}:{level}" for session_id, level in found) or None


def left(account: Row) -> int:
    """What is neither spent nor reserved; below 0 where answers took more than was reserved for them."""
    amount: int = account["allowed"] - account["spent"] - account["reserved"]
    return amount


def grant(charges: Sequence[Charge], ask: Ask, now: int) -> Grant | Refusal:
    """What a model call gets: a reply as long as it wants, or as every account allows, but no useless one."""
    output, capped = ask.output_tokens, False
    minimal = min(MINIMAL_REPLY_TOKENS, ask.output_tokens)
    for _, account in charges:
        resource, available = account["resource"], left(account)
        if resource == "rounds" and available < 1:
            return _refusal(account, available, 1)
        if resource == "seconds" and account["since"] and account["since"] + account["allowed"] <= now:
            return _refusal(account, 0, 0)
        if resource not in ("tokens", "cost"):
            continue
        capped = True
        room = _room(resource, available, ask)
        if room is not None and room < minimal:
            return _refusal(account, available, _least(resource, ask, minimal), unpriced=_unpriced(resource, ask))
        output = output if room is None else min(output, room)
    cost = ask.price.most(ask.input_tokens, output) if ask.price is not None else 0
    return Grant(ask.input_tokens + output, cost, output if capped else 0)


def _unpriced(resource: str, ask: Ask) -> bool:
    return resource == "cost" and ask.price is None


def _room(resource: str, available: int, ask: Ask) -> int | None:
    """The longest reply that one account allows; None for any."""
    if resource == "tokens":
        return available - ask.input_tokens
    return ask.price.affordable(available, ask.input_tokens) if ask.price is not None else -1


def _least(resource: str, ask: Ask, output: int) -> int:
    if resource == "tokens":
        return ask.input_tokens + output
    return ask.price.most(ask.input_tokens, output) if ask.price is not None else 0


def _refusal(account: Row, available: int, needed: int, *, unpriced: bool = False) -> Refusal:
    where = (account["session_id"], account["scope"], account["resource"])
    return Refusal(*where, account["allowed"], max(0, available), needed, unpriced)


def child_refused(charges: Iterable[Charge]) -> Refusal | None:
    """The account that does not allow a session one more sub-agent."""
    for level, account in charges:
        if account["resource"] == "children" and left(account) < 1:
            return _refusal(account, left(account), 1)
        if account["resource"] == "depth" and level + 1 > account["allowed"]:
            return _refusal(account, account["allowed"] - level, 1)
    return None


def begin(account: Row, now: int) -> None:
    """A run of the session that has the account begins: its clock starts, and what counts by run starts from zero."""
    if account["scope"] == "run":
        account.update(spent=0, reserved=0, beyond=0, since=now)
    else:
        account["since"] = account["since"] or now


def book(account: Row, held: Grant | None, usage: Usage, rounds: int) -> None:
    """Give back what was held for a call and book what it took."""
    resource = account["resource"]
    reserved = held.of(resource) if held is not None else 0
    taken = {"tokens": usage.total_tokens, "cost": usage.cost, "rounds": rounds}.get(resource, 0)
    account["reserved"] -= reserved
    account["spent"] += taken
    account["beyond"] += max(0, taken - reserved)


class Deadline(NamedTuple):
    """When a run must have ended, microseconds since 1970 UTC, and how its end is reported."""

    due_at: int
    refusal: Refusal


def deadline_of(charges: Iterable[Charge]) -> Deadline | None:
    """The first moment at which a budget of seconds is used up; None without one, or before its scope began."""
    found = [account for _, account in charges if account["resource"] == "seconds" and account["since"]]
    if not found:
        return None
    first = min(found, key=lambda account: int(account["since"] + account["allowed"]))
    return Deadline(first["since"] + first["allowed"], _refusal(first, 0, 0))
