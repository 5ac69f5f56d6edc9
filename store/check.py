"""The accounting identity: what the tables of a store must say after every commit, proved from the tables alone.

Each rule is one small function or class whose docstring states it (`check_rows.py` and `check_tree.py`: SQL;
`check_log.py`: what takes reading the log). A violation is a bug of ours, or somebody else's hand in the database.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial

from sqlalchemy import Connection

from .check_log import LOG_RULES, read_logs
from .check_rows import ROW_RULES, Found, Scope
from .check_tree import TREE_RULES

TOLD_OF_ONE_RULE = 100
"""Violations of one rule that are told: where something is broken everywhere, these will do."""

SQL_RULES = {**ROW_RULES, **TREE_RULES}

RULES: dict[str, str] = {name: inspect.getdoc(rule) or "" for name, rule in {**SQL_RULES, **LOG_RULES}.items()}
"""What each rule demands, by its name."""


@dataclass(frozen=True)
class Violation:
    """A rule that a session breaks; `text` says what is wrong, and where."""

    session_id: str
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.session_id}: {self.rule}: {self.text}"


def check(connection: Connection, namespace: str, session_ids: Collection[str] | None = None) -> list[Violation]:
    """Everything that is wrong in a namespace, or with some of its sessions; empty when the books balance.

    It holds up nobody, and needs memory for the longest run, not for the store.

    Args:
        connection: of `Database.snapshot`, or in a transaction that holds these sessions.
        session_ids: at most a few thousand; only these are read, and what others say of them.
    """
    scope = Scope(connection, namespace, None if session_ids is None else sorted(session_ids))
    told: Counter[str] = Counter()
    violations = []
    for rule, (session_id, what) in _findings(scope):
        told[rule] += 1
        if told[rule] <= TOLD_OF_ONE_RULE:
            violations.append(Violation(session_id, rule, what))
    return violations


def _findings(scope: Scope) -> Iterator[tuple[str, Found]]:
    for name, rule in SQL_RULES.items():
        yield from map(partial(_named, name), rule(scope))
    yield from read_logs(scope)


def _named(name: str, found: Found) -> tuple[str, Found]:
    return name, found
