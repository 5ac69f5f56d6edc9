"""What a transaction has changed and not written yet."""

from __future__ import annotations

from typing import Any

from .prepared import Row, Statements
from .statements import (
    DELETE_INBOX,
    DELETE_TIMER,
    MUTABLE,
    SELDOM,
    SESSION,
    TIMER,
    UPDATE_CALL,
    UPDATE_RUN,
    UPDATE_SESSION,
    UPDATE_SESSION_OFTEN,
)


class Pending:
    """Rows and changes that wait for being written, in bulk.

    Attributes:
        dirty: sessions that were changed, as they are now; they stay until the transaction ends.
        unwritten: sessions that something here concerns.
        created, inserts: new sessions, and new rows of other tables.
        call_updates, run_updates, inbox_deletes: parameters of those statements.
        timer_changes: by session and name; None where a timer is dropped.
        seldom: what each session has in the columns that change seldom, as far as that is known.
    """

    def __init__(self, statements: Statements, cursor: Any, namespace: str) -> None:
        self._statements = statements
        self._cursor = cursor
        self._namespace = namespace
        self._written: dict[str, tuple[Any, ...]] = {}
        self.seldom: dict[str, tuple[Any, ...]] = {}
        self.dirty: dict[str, Row] = {}
        self.unwritten: set[str] = set()
        self.created: list[Row] = []
        self.inserts: dict[Any, list[Row]] = {}
        self.call_updates: list[Row] = []
        self.inbox_deletes: list[Row] = []
        self.run_updates: list[Row] = []
        self.timer_changes: dict[tuple[str, str], Row | None] = {}

    def of(self, table: Any, session_id: str) -> list[Row]:
        """Rows that are not written yet, where writing them first would cost every activation a round trip."""
        return [row for row in self.inserts.get(table, ()) if row["session_id"] == session_id]

    def write(self) -> None:
        """Write everything, a statement per table."""
        if self.created:
            self._statements.insert(self._cursor, SESSION, self.created)
            self._written.update((row["session_id"], _mutable(row)) for row in self.created)
        # A row stays in hand after it was written: operations go on changing it without saying so again.
        often: list[Row] = []
        all_columns: list[Row] = []
        for session_id, row in sorted(self.dirty.items()):
            values = _mutable(row)
            if self._written.get(session_id) == values:
                continue
            self._written[session_id] = values
            seldom = tuple([row[name] for name in SELDOM])
            (often if self.seldom.get(session_id) == seldom else all_columns).append(self._parameters(row))
            self.seldom[session_id] = seldom
        self._write(UPDATE_SESSION_OFTEN, often)
        self._write(UPDATE_SESSION, all_columns)
        keys = [
            {"b_namespace": self._namespace, "b_session_id": session, "b_name": name}
            for session, name in self.timer_changes
        ]
        self._write(DELETE_TIMER, keys)
        for table, rows in self.inserts.items():
            self._statements.insert(self._cursor, table, rows)
        timers = [row for row in self.timer_changes.values() if row is not None]
        if timers:
            self._statements.insert(self._cursor, TIMER, timers)
        self._write(DELETE_INBOX, self.inbox_deletes)  # after the inserts: what came in here may have gone here too
        self._write(UPDATE_CALL, self.call_updates)
        self._write(UPDATE_RUN, self.run_updates)
        self.created, self.unwritten = [], set()
        self.inbox_deletes, self.inserts, self.call_updates, self.run_updates = [], {}, [], []
        self.timer_changes = {}

    def _write(self, statement: Any, rows: list[Row]) -> None:
        if rows:
            self._statements.of(statement).write(self._cursor, rows)

    def _parameters(self, row: Row) -> Row:
        values = {f"b_{name}": row[name] for name in MUTABLE}
        return {"b_namespace": self._namespace, "b_session_id": row["session_id"], **values}


def _mutable(row: Row) -> tuple[Any, ...]:
    return tuple([row[name] for name in MUTABLE])
