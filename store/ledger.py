"""What accounts must say, reckoned from what the sessions charged to them have done: for the check and for imports."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Connection, func, select

from understudy.messages import Usage

from .budgets import Grant, owners
from .statements import ACCOUNT, MESSAGE, RESERVATION, RUN, SESSION
from .transaction import Row

AT_ONCE = 500
"""Sessions whose rows are read with one SELECT."""


class Reckoned(NamedTuple):
    """An account, and what its `spent` and `reserved` must be."""

    account: Row
    spent: int
    reserved: int


@dataclass
class _Done:
    """What one session did, alone: over its life, or in one run."""

    usage: Usage
    rounds: int
    children: int

    def of(self, resource: str) -> int:
        found = {"tokens": self.usage.total_tokens, "cost": self.usage.cost, "rounds": self.rounds}
        return {**found, "children": self.children}.get(resource, 0)


def reckon(connection: Connection, namespace: str, root_ids: Sequence[str]) -> Iterator[Reckoned]:
    """The accounts of whole trees with what they must say, tree by tree.

    Tokens and cost are what answers told (late ones too, but of a run's account); rounds are answers that became
    messages; children are sessions that exist.
    """
    for root_id in root_ids:
        members = _members(connection, namespace, root_id)
        accounts = _rows(connection, ACCOUNT, namespace, members)
        if accounts:
            yield from _reckon(connection, namespace, members, accounts)


def _reckon(connection: Connection, namespace: str, members: dict[str, Row], accounts: list[Row]) -> Iterator[Reckoned]:
    rounds = _rounds(connection, namespace, members)
    children: Counter[tuple[str, str | None]] = Counter()
    for row in members.values():
        children.update({(row["parent_id"], None): 1, (row["parent_id"], row["parent_run_id"]): 1})
    held = {row["session_id"]: row for row in _rows(connection, RESERVATION, namespace, members)}
    charged: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for session_id, row in members.items():
        for owner, level in owners(row["accounts"]):
            charged[owner].append((session_id, level))
    lives = {
        session_id: _Done(
            Usage(row["tokens_used"], cost=row["cost_used"]),
            rounds[session_id, None],
            children[session_id, None],
        )
        for session_id, row in members.items()
        if row["accounts"] is not None
    }
    for account in accounts:
        owner, resource = account["session_id"], account["resource"]
        who = [session_id for session_id, level in charged[owner] if level == 0 or account["scope"] == "tree"]
        done = [lives[session_id] for session_id in who]
        if account["scope"] == "run":
            run_id, usage = _run(connection, namespace, members[owner], account["since"])
            done = [_Done(usage, rounds[owner, run_id], children[owner, run_id])]
        grants = [Grant(row["tokens"], row["cost"], row["output"]) for row in map(held.get, who) if row is not None]
        yield Reckoned(
            account, sum(each.of(resource) for each in done), sum(granted.of(resource) for granted in grants)
        )


def _members(connection: Connection, namespace: str, root_id: str) -> dict[str, Row]:
    names = (
        "session_id", "parent_id", "parent_run_id", "accounts", "tokens_used", "cost_used", "run_id", "run_usage",
    )  # fmt: skip
    statement = select(*(SESSION.c[name] for name in names)).where(
        SESSION.c.namespace == namespace, SESSION.c.root_id == root_id
    )
    return {row["session_id"]: dict(row) for row in connection.execute(statement).mappings()}


def _rows(connection: Connection, table: Any, namespace: str, members: dict[str, Row]) -> list[Row]:
    found: list[Row] = []
    for ids in _some(members):
        statement = select(table).where(table.c.namespace == namespace, table.c.session_id.in_(ids))
        found += map(dict, connection.execute(statement).mappings())
    return found


def _run(connection: Connection, namespace: str, row: Row, since: int) -> tuple[str, Usage]:
    """The run that a session's accounts of a run are about, the one that began last, and what it used."""
    statement = select(RUN.c.run_id, RUN.c.usage).where(
        RUN.c.namespace == namespace,
        RUN.c.session_id == row["session_id"],
        RUN.c.started_at == since,
        RUN.c.started_at > 0,
    )
    found = connection.execute(statement).first()
    if found is None:
        return "", Usage()
    return str(found.run_id), Usage.from_wire(row["run_usage"] if row["run_id"] == found.run_id else found.usage)


def _rounds(connection: Connection, namespace: str, members: dict[str, Row]) -> Counter[tuple[str, str | None]]:
    """Answers by session and run; by session alone under None."""
    found: Counter[tuple[str, str | None]] = Counter()
    for ids in _some(members):
        statement = (
            select(MESSAGE.c.session_id, MESSAGE.c.run_id, func.count())
            .where(MESSAGE.c.namespace == namespace, MESSAGE.c.session_id.in_(ids), MESSAGE.c.role == "assistant")
            .group_by(MESSAGE.c.session_id, MESSAGE.c.run_id)
        )
        for session_id, run_id, count in connection.execute(statement):
            found.update({(session_id, None): count, (session_id, run_id): count})
    return found


def _some(members: dict[str, Row]) -> Iterator[list[str]]:
    ids = list(members)
    for start in range(0, len(ids), AT_ONCE):
        yield ids[start : start + AT_ONCE]
