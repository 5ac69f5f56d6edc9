"""What accounts must say, reckoned from what the sessions charged to them have done: for the check and for imports."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import Connection, bindparam, func, select

from understudy.identifiers import COPIED
from understudy.messages import Usage
from understudy.workflows import WORKFLOW

from .budgets import Grant, owners
from .db.prepared import Row, read
from .db.statements import ACCOUNT, MESSAGE, NAMESPACE, RESERVATION, RUN, SESSION, SESSION_IDS

AT_ONCE = 500
"""Sessions whose rows are read with one SELECT."""


MEMBER = (
    "session_id", "kind", "parent_id", "parent_run_id", "accounts", "tokens_used", "cost_used", "run_id", "run_usage",
)  # fmt: skip
SELECT_MEMBERS = select(*(SESSION.c[name] for name in MEMBER)).where(
    SESSION.c.namespace == NAMESPACE, SESSION.c.root_id == bindparam("root")
)
SELECT_RUNS = select(RUN.c.run_id, RUN.c.usage).where(
    RUN.c.namespace == NAMESPACE,
    RUN.c.session_id == bindparam("session"),
    RUN.c.started_at == bindparam("since"),
    RUN.c.started_at > 0,
)
SELECT_ROUNDS = (
    select(MESSAGE.c.session_id, MESSAGE.c.run_id, func.count().label("rounds"))
    .where(
        MESSAGE.c.namespace == NAMESPACE,
        MESSAGE.c.session_id.in_(SESSION_IDS),
        MESSAGE.c.role == "assistant",
        ~MESSAGE.c.run_id.startswith(COPIED),
    )
    .group_by(MESSAGE.c.session_id, MESSAGE.c.run_id)
)


@cache
def _all_of(table: Any) -> Any:
    return select(table).where(table.c.namespace == NAMESPACE, table.c.session_id.in_(SESSION_IDS))


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

    Tokens and cost are what answers reported (late ones too, but of a run's account); rounds are answers that became
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
    return {row["session_id"]: row for row in read(connection, SELECT_MEMBERS, ns=namespace, root=root_id)}


def _rows(connection: Connection, table: Any, namespace: str, members: dict[str, Row]) -> list[Row]:
    found: list[Row] = []
    for ids in _some(members):
        found += read(connection, _all_of(table), ns=namespace, ids=ids)
    return found


def _run(connection: Connection, namespace: str, row: Row, since: int) -> tuple[str, Usage]:
    """The run that a session's accounts of a run are about, the one that began last, and what it used."""
    found = read(connection, SELECT_RUNS, ns=namespace, session=row["session_id"], since=since)
    if not found:
        return "", Usage()
    run_id, usage = found[0]["run_id"], found[0]["usage"]
    return run_id, Usage.from_wire(row["run_usage"] if row["run_id"] == run_id else usage)


def _rounds(connection: Connection, namespace: str, members: dict[str, Row]) -> Counter[tuple[str, str | None]]:
    """Answers by session and run; by session alone under None. Workflows have none: what asks for their steps is no
    answer of a model's."""
    found: Counter[tuple[str, str | None]] = Counter()
    for ids in _some({session_id: row for session_id, row in members.items() if row["kind"] != WORKFLOW}):
        for row in read(connection, SELECT_ROUNDS, ns=namespace, ids=ids):
            session_id, count = row["session_id"], row["rounds"]
            found.update({(session_id, None): count, (session_id, row["run_id"]): count})
    return found


def _some(members: dict[str, Row]) -> Iterator[list[str]]:
    ids = list(members)
    for start in range(0, len(ids), AT_ONCE):
        yield ids[start : start + AT_ONCE]
