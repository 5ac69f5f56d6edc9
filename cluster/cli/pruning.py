"""`understudy store prune`: what a run of it removes, and what a dry run says that it would. Needs no Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from .command import counted

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from understudy.store.transaction import Transaction
    from understudy.store.upkeep.retention import Removed

SHOWN = 20
"""So many ids a dry run prints; `--json` has all."""


@dataclass(frozen=True)
class Rules:
    """What was asked for; times in microseconds since 1970 UTC, 0 for a rule that was not named."""

    session: str
    trees_before: int
    events_before: int
    at: int


@dataclass
class Totals:
    """What was removed, or would be, so far."""

    trees: list[str] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)
    sessions: int = 0
    runs: int = 0
    messages: int = 0
    events: int = 0
    kept_at_work: int = 0
    kept_unexported: int = 0
    code: int = 0

    def add(self, name: str, removed: Removed) -> None:
        """Count the tree of a root, or the events of a session."""
        self.sessions += removed.sessions
        self.runs += removed.runs
        self.messages += removed.messages
        self.events += removed.events
        self.kept_at_work += removed.kept in ("at work", "not over")
        self.kept_unexported += removed.kept == "not exported yet"
        if not removed.kept:
            (self.trees if removed.sessions else self.logs).append(name)

    def to_wire(self) -> dict[str, Any]:
        """For `--json`."""
        return {**vars(self), "trees": len(self.trees), "logs": len(self.logs)}

    def ids(self) -> dict[str, list[str]]:
        """Roots of the trees, and sessions whose events go, for `--json`."""
        return {"tree_ids": self.trees, "log_ids": self.logs}

    def lines(self) -> Iterable[str]:
        """The first ids."""
        shown = [f"  tree {name}" for name in self.trees] + [f"  old events of {name}" for name in self.logs]
        yield from shown[:SHOWN]
        if len(shown) > SHOWN:
            yield f"  and {len(shown) - SHOWN} more (--json names all)"

    def __str__(self) -> str:
        parts = [(self.sessions, "session"), (self.runs, "run"), (self.messages, "message")]
        tree = f" ({', '.join(counted(*part) for part in parts)})" if self.trees else ""
        text = f"{counted(len(self.trees), 'tree')}{tree}, {counted(self.events, 'event')}"
        text += f", {counted(self.code, 'piece')} of unused code" if self.code else ""
        kept = [(self.kept_at_work, "at work"), (self.kept_unexported, "not exported yet")]
        why = ", ".join(f"{number} {reason}" for number, reason in kept if number)
        return text + (f"; kept {why}" if why else "")


def candidates(connection: Connection, namespace: str, rules: Rules) -> tuple[list[tuple[str, int | None]], list[str]]:
    """Roots to look at, each with the time before which its last change must have been; sessions with old events."""
    from understudy.store.upkeep import retention

    before = rules.trees_before
    roots = retention.finished_trees(connection, namespace, before) if before else []
    trees: list[tuple[str, int | None]] = [(root, before) for root in roots if root != rules.session]
    logs = retention.sessions_with_events(connection, namespace, rules.events_before) if rules.events_before else []
    return [(rules.session, None), *trees] if rules.session else trees, logs


def planned(connection: Connection, namespace: str, rules: Rules) -> Totals:
    """What a run would remove, decided as the run decides.

    Raises:
        UnknownSession, Conflict, SessionActive: the session that was named can't be removed.
    """
    from understudy.store.upkeep import retention

    totals = Totals()
    gone: set[str] = set()
    trees, logs = candidates(connection, namespace, rules)
    for root, before in trees:
        removed = retention.tree_to_drop(connection, namespace, root, before)
        totals.add(root, removed)
        gone.update(removed.session_ids)
    for log in logs:
        if log not in gone:
            totals.add(log, retention.events_to_drop(connection, namespace, log, rules.events_before))
    totals.code = len(retention.unneeded_code(connection, namespace, rules.at, gone))
    return totals


def operations(
    connection: Connection, namespace: str, rules: Rules
) -> list[tuple[str, Callable[[Transaction], Removed]]]:
    """What removes it: each tree, and each session's events, in a transaction of its own."""
    from understudy.store.upkeep import retention

    trees, logs = candidates(connection, namespace, rules)
    found: list[tuple[str, Callable[[Transaction], Removed]]] = []
    for root, before in trees:
        found.append((root, partial(retention.drop_tree, root_id=root, before=before)))
    for log in logs:
        found.append((log, partial(retention.drop_events, session_id=log, before=rules.events_before)))
    return found
