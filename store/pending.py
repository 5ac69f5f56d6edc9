"""What a transaction has changed and not written yet."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from msgspec import structs

from .db.prepared import Row, Statements
from .db.session_row import SessionRow
from .db.statements import (
    CALL_KEEPS,
    CALL_STATE,
    DELETE_INBOX,
    DELETE_TIMER,
    MUTABLE,
    RUN_END,
    SELDOM,
    SESSION,
    TIMER,
    TOOL_CALL,
    UPDATE_CALL,
    UPDATE_RUN,
    UPDATE_SESSION,
    UPDATE_SESSION_OFTEN,
)

PARAMETERS = [f"b_{name}" for name in MUTABLE]

_mutable: Callable[[SessionRow], tuple[Any, ...]] = attrgetter(*MUTABLE)
seldom_of: Callable[[SessionRow], tuple[Any, ...]] = attrgetter(*SELDOM)


class Pending:
    """Rows and changes that wait for being written, in bulk.

    Attributes:
        dirty: sessions that were changed, as they are now; they stay until the transaction ends.
        unwritten: sessions that something here concerns.
        created: new sessions, each with its specification and metadata.
        inserts: new rows of other tables.
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
        self.dirty: dict[str, SessionRow] = {}
        self.unwritten: set[str] = set()
        self.created: list[tuple[SessionRow, dict[str, Any], dict[str, Any]]] = []
        self.inserts: dict[Any, list[Row]] = {}
        self.call_updates: list[Row] = []
        self.inbox_deletes: list[Row] = []
        self.run_updates: list[Row] = []
        self.timer_changes: dict[tuple[str, str], Row | None] = {}

    def of(self, table: Any, session_id: str) -> list[Row]:
        """Rows that are not written yet, where writing them first would cost every activation a round trip."""
        return [row for row in self.inserts.get(table, ()) if row["session_id"] == session_id]

    def update_call(self, session_id: str, call_id: str, state: Row) -> None:
        """Set a tool call's state: all of `CALL_STATE`."""
        self.unwritten.add(session_id)
        key = {"b_namespace": self._namespace, "b_session_id": session_id, "b_call_id": call_id}
        self.call_updates.append({f"b_{name}": state[name] for name in CALL_STATE} | key)

    def update_run(self, session_id: str, run_id: str, end: Row) -> None:
        """Set how a run stands: all of `RUN_END`."""
        self.unwritten.add(session_id)
        key = {"b_namespace": self._namespace, "b_session_id": session_id, "b_run_id": run_id}
        self.run_updates.append({f"b_{name}": end[name] for name in RUN_END} | key)

    def calls(self, stored: list[Row], session_id: str, run_id: str, round_number: int) -> list[Row]:
        """The tool calls of a round as they are now, in order, from those that are stored."""
        found = {item["call_id"]: item for item in stored}
        for item in self.of(TOOL_CALL, session_id):
            if (item["run_id"], item["round"]) == (run_id, round_number):
                found[item["call_id"]] = {"result": None, "child_id": None, "edited": None, **item}
        for change in self.call_updates:
            if change["b_session_id"] == session_id and change["b_call_id"] in found:
                call = found[change["b_call_id"]]
                kept = {name: call[name] for name in CALL_KEEPS}
                call.update({name: change[f"b_{name}"] for name in CALL_STATE})
                call.update({name: value for name, value in kept.items() if call[name] is None})
        return sorted(found.values(), key=lambda item: int(item["index"]))

    def write(self, *, everything: bool) -> None:
        """Write what is unwritten, a statement per table.

        Args:
            everything: look at all sessions that were changed, since a row stays in hand after it was written:
                operations go on changing it without saying so again. It costs as much as there are of them, so not what
                concerns only one of them may ask for it.
        """
        if self.created:
            self._statements.insert(self._cursor, SESSION, [self._new(*session) for session in self.created])
            self._written.update((row.session_id, _mutable(row)) for row, _, _ in self.created)
        often: list[Row] = []
        all_columns: list[Row] = []
        for session_id in sorted(self.dirty.keys() if everything else self.unwritten & self.dirty.keys()):
            row = self.dirty[session_id]
            values = _mutable(row)
            if self._written.get(session_id) == values:
                continue
            self._written[session_id] = values
            seldom = seldom_of(row)
            (often if self.seldom.get(session_id) == seldom else all_columns).append(self._parameters(row, values))
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

    def _new(self, row: SessionRow, spec: dict[str, Any], metadata: dict[str, Any]) -> Row:
        return {"namespace": self._namespace, "spec": spec, "metadata_json": metadata, **structs.asdict(row)}

    def _parameters(self, row: SessionRow, values: tuple[Any, ...]) -> Row:
        key = {"b_namespace": self._namespace, "b_session_id": row.session_id}
        return dict(zip(PARAMETERS, values, strict=True)) | key
