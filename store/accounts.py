"""The accounts of a transaction: read once under lock, changed in memory, written in bulk."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .budgets import Grant
from .db.prepared import Row, Statements
from .db.statements import (
    ACCOUNT,
    ACCOUNT_KEY,
    ACCOUNT_STATE,
    DELETE_RESERVATION,
    LOADED_AT_ONCE,
    RESERVATION,
    SELECT_RESERVATION,
    UPDATE_ACCOUNT,
    select_accounts,
)


class Accounts:
    """Accounts by the session that has them, and reservations by the session whose call they are for."""

    def __init__(self, statements: Statements, cursor: Any, namespace: str, *, lock: bool) -> None:
        self._statements = statements
        self._cursor = cursor
        self._namespace = namespace
        self._lock = lock
        self._accounts: dict[str, list[Row]] = {}
        self._written: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._created: list[Row] = []
        self._reservations: dict[str, Row | None] = {}
        self._stored: dict[str, Row | None] = {}

    def load(self, session_ids: Iterable[str]) -> None:
        """Lock and read accounts; two journals can't deadlock on them, by the rule of `Transaction.load`."""
        wanted = sorted(set(session_ids) - self._accounts.keys())
        wait = not self._accounts
        for start in range(0, len(wanted), LOADED_AT_ONCE):
            some = wanted[start : start + LOADED_AT_ONCE]
            self._accounts.update((session_id, []) for session_id in some)
            count = 1 << (len(some) - 1).bit_length()  # few statements to prepare: the last id is repeated
            ids = {f"id{number}": some[min(number, len(some) - 1)] for number in range(count)}
            statement = self._statements.of(select_accounts(count, self._lock, wait))
            for row in statement.rows(self._cursor, {"ns": self._namespace, **ids}):
                self._accounts[row["session_id"]].append(row)
                self._written[_key(row)] = _state(row)

    def has(self, session_ids: Iterable[str]) -> bool:
        """Whether the accounts of all these sessions were read."""
        return all(session_id in self._accounts for session_id in session_ids)

    def of(self, session_id: str) -> list[Row]:
        """The accounts that a session has; to be changed in place."""
        self.load([session_id])
        return self._accounts[session_id]

    def create(self, session_id: str, accounts: list[Row]) -> None:
        """Add the accounts of a new session."""
        rows = [{**account, "namespace": self._namespace} for account in accounts]
        self._accounts[session_id] = rows
        self._created += rows

    def reserved(self, session_id: str) -> Grant | None:
        """What is set aside for a session's model call."""
        if session_id not in self._reservations:
            values = {"ns": self._namespace, "session": session_id}
            found = self._statements.of(SELECT_RESERVATION).rows(self._cursor, values)
            self._stored[session_id] = self._reservations[session_id] = found[0] if found else None
        row = self._reservations[session_id]
        return Grant(row["tokens"], row["cost"], row["output"]) if row is not None else None

    def reserve(self, session_id: str, wait_key: str, granted: Grant | None) -> None:
        """Set something aside for a session's model call in place of what was; nothing for None."""
        self.reserved(session_id)
        row: Row | None = None
        if granted is not None:
            row = {"session_id": session_id, "wait_key": wait_key, "namespace": self._namespace}
            row.update(tokens=granted.tokens, cost=granted.cost, output=granted.output)
        self._reservations[session_id] = row

    def forget(self, session_ids: Iterable[str]) -> None:
        """These sessions were removed, with all that was theirs."""
        for session_id in session_ids:
            self._accounts[session_id] = []
            self._reservations[session_id] = self._stored[session_id] = None

    def write(self) -> None:
        """Write everything back."""
        if self._created:
            self._statements.insert(self._cursor, ACCOUNT, self._created)
            self._written.update((_key(row), _state(row)) for row in self._created)
            self._created = []
        changed = []
        for row in (row for _, rows in sorted(self._accounts.items()) for row in rows):
            if self._written.get(_key(row)) != _state(row):
                self._written[_key(row)] = _state(row)
                changed.append({f"b_{name}": row[name] for name in (*ACCOUNT_KEY, *ACCOUNT_STATE)})
        self._write(UPDATE_ACCOUNT, changed)
        other = {key: row for key, row in self._reservations.items() if row is not self._stored[key]}
        gone = [key for key in other if self._stored[key] is not None]
        self._write(DELETE_RESERVATION, [{"b_namespace": self._namespace, "b_session_id": key} for key in gone])
        new = [row for row in other.values() if row is not None]
        if new:
            self._statements.insert(self._cursor, RESERVATION, new)
        self._stored.update(other)

    def _write(self, statement: Any, rows: list[Row]) -> None:
        if rows:
            self._statements.of(statement).write(self._cursor, rows)


def _key(row: Row) -> tuple[Any, ...]:
    return tuple([row[name] for name in ACCOUNT_KEY])


def _state(row: Row) -> tuple[Any, ...]:
    return tuple([row[name] for name in ACCOUNT_STATE])
