"""What `test_plans` explains, and where: statements recorded at the driver, and a store with a million messages."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.pool import Pool

from understudy.store.db.engine import Database
from understudy.store.db.tables import metadata

NAMED = re.compile(r'\b(?:FROM|JOIN|INTO|UPDATE) "?(\w+)')


class Recorder:
    """Every distinct statement on our tables that reaches a driver, with the parameters of its first execution."""

    def __init__(self) -> None:
        self.statements: dict[str, Any] = {}

    def note(self, sql: str, parameters: Any) -> None:
        if tables_in(sql):
            self.statements.setdefault(" ".join(sql.split()), parameters)


def tables_in(sql: str) -> set[str]:
    """Our tables that a statement names; none for what the driver and SQLAlchemy say on their own."""
    return set(NAMED.findall(" ".join(sql.split()))) & metadata.tables.keys()


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record what connections that are opened from now on execute: SQLAlchemy's statements and prepared ones alike."""
    recorder = Recorder()

    class SqliteCursor(sqlite3.Cursor):
        def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
            recorder.note(sql, parameters)
            return super().execute(sql, parameters)

        def executemany(self, sql: str, parameters: Any, /) -> sqlite3.Cursor:
            rows = list(parameters)
            recorder.note(sql, rows[0])
            return super().executemany(sql, rows)

    class SqliteConnection(sqlite3.Connection):
        def cursor(self, factory: Any = SqliteCursor) -> Any:
            return super().cursor(factory)

    class PostgresCursor(psycopg.Cursor[Any]):
        def execute(self, query: Any, params: Any = None, **options: Any) -> Any:
            recorder.note(str(query), params)
            return super().execute(query, params, **options)

        def executemany(self, query: Any, params_seq: Any, **options: Any) -> None:
            rows = list(params_seq)
            recorder.note(str(query), rows[0])
            super().executemany(query, rows, **options)

    def before(dialect: Any, _record: Any, _arguments: Any, options: dict[str, Any]) -> None:
        if dialect.name == "sqlite":
            options["factory"] = SqliteConnection

    connections: list[Any] = []

    def after(connection: Any, _record: Any) -> None:
        connections.append(connection)
        if isinstance(connection, psycopg.Connection):
            connection.cursor_factory = PostgresCursor

    event.listen(Engine, "do_connect", before)
    event.listen(Pool, "connect", after)
    try:
        yield recorder
    finally:
        event.remove(Engine, "do_connect", before)
        event.remove(Pool, "connect", after)
        for connection in connections:  # a node service that was killed in the middle of a read left one open
            connection.close()


# The large store. Session `s<number>` of 10,000: every tenth is a root with nine children, and the last thousand
# are one tree. Few are active. Its root is also the one with the longest history.

SESSIONS = 10_000
LONGEST, TYPICAL = "s9000", "s5000"
MESSAGES, EVENTS, CALLS, RUNS = 90, 30, 10, 3
LONGEST_MESSAGES, LONGEST_EVENTS, LONGEST_CALLS, LONGEST_RUNS = 110_000, 20_000, 20_000, 2_000

NUMBERS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {count}) "
ANY = f"session s CROSS JOIN n WHERE s.session_id <> '{LONGEST}'"
ONLY = f"session s CROSS JOIN n WHERE s.session_id = '{LONGEST}'"
OWN = {"namespace": "s.namespace", "session_id": "s.session_id"}


def fill(database: Database) -> None:
    """Fill an empty store; what is not named here is empty or zero."""
    with database.writer.begin() as connection:
        if not database.is_sqlite:  # nobody cuts the power here
            for name in ("message", "event", "tool_call"):
                connection.exec_driver_sql(f"ALTER TABLE {name} SET UNLOGGED")
        _sessions(connection)
        _histories(connection)
        _few(connection)
    if not database.is_sqlite:
        with database.writer.connect() as connection:
            connection.execution_options(isolation_level="AUTOCOMMIT").exec_driver_sql("VACUUM ANALYZE")


def _sessions(connection: Connection) -> None:
    number = "(n.i - 1)"
    root = f"CASE WHEN {number} < 9000 THEN {number} / 10 * 10 ELSE 9000 END"
    active = f"CASE WHEN {number} % 250 = 0 THEN 1 ELSE 0 END"
    _insert(
        connection, "session", f"(SELECT {number} AS i, {root} AS root, {active} AS active FROM n) AS n", SESSIONS,
        namespace="CASE WHEN n.i / 1000 IN (1, 2) THEN 'other' || (n.i / 1000) ELSE 'tests' END",
        session_id="'s' || n.i", parent_id="CASE WHEN n.i = n.root THEN NULL ELSE 's' || n.root END",
        root_id="'s' || n.root", depth="CASE WHEN n.i = n.root THEN 0 ELSE 1 END", created_at="1000000 + n.i * 10",
        updated_at="1000000 + n.i * 10", node_id="'node' || (1 + n.i / 250 % 2)", active="n.active",
        run_id="CASE WHEN n.active = 1 THEN 'r' END", round="n.active", calls_open="n.active", kind="'agent'",
        wait="CASE WHEN n.active = 1 THEN 'model' ELSE 'idle' END", status="'idle'", seq="1000000",
    )  # fmt: skip


def _histories(connection: Connection) -> None:
    """The current run, `r`, is the latest: one message and one call of it have been written."""
    for number, count, source in ((MESSAGES, MESSAGES, ANY), (LONGEST_MESSAGES, LONGEST_MESSAGES, ONLY)):
        _insert(
            connection, "message", source, count, **OWN, seq="n.i * 2",
            run_id=f"CASE WHEN n.i = {number} THEN 'r' ELSE 'r' || (n.i / 40) END",
            role=f"CASE WHEN n.i = {number} OR n.i % 2 = 0 THEN 'user' ELSE 'assistant' END", body="""'{"v": 1}'""",
        )  # fmt: skip
    for count, source, base in ((EVENTS, ANY, 0), (LONGEST_EVENTS, ONLY, 10_000_000)):
        _insert(
            connection, "event", source, count, **OWN, seq="n.i * 2 + 1", writer="'writer-' || s.node_id",
            writer_seq=f"{base} + n.i * {SESSIONS} + CAST(SUBSTR(s.session_id, 2) AS INTEGER)", body="'{}'",
        )  # fmt: skip
    for count, source in ((CALLS, ANY), (LONGEST_CALLS, ONLY)):
        run = f"CASE WHEN n.i = {count} THEN 'r' ELSE 'r' || (n.i / 10) END"
        call_round = f"CASE WHEN n.i = {count} THEN 1 ELSE n.i % 10 END"
        _insert(
            connection, "tool_call", source, count, **OWN, call_id=f"{run} || '/' || {call_round} || '/0'", run_id=run,
            round=call_round, state=f"CASE WHEN n.i = {count} THEN 'started' ELSE 'done' END",
        )  # fmt: skip
    for count, source in ((RUNS, ANY), (LONGEST_RUNS, ONLY)):
        run = f"CASE WHEN n.i = {count} THEN 'r' ELSE 'r' || n.i END"
        _insert(connection, "run", source, count, **OWN, run_id=run, accepted_at="n.i")


def _few(connection: Connection) -> None:
    _insert(connection, "inbox", ANY, 1, **OWN, item="n.i", kind="'input'", key="'k'", payload="'{}'")
    _insert(connection, "reservation", ANY, 1, **OWN)
    _insert(connection, "account", ANY, 2, **OWN, scope="'tree'", resource="'resource' || n.i")
    _insert(connection, "timer", ANY + " AND s.active = 1", 1, **OWN, name="'resume'", due_at="n.i")
    _insert(connection, "owner", "n", 3, namespace="CASE WHEN n.i = 3 THEN 'tests' ELSE 'other' || n.i END")


def _insert(connection: Connection, table: str, source: str, numbers: int, **values: str) -> None:
    """INSERT … SELECT of these SQL expressions for each row of the source."""
    for column in metadata.tables[table].columns:
        if column.name not in values and not column.nullable:
            values[column.name] = "0" if "INT" in str(column.type) else "''"
    if connection.dialect.name == "postgresql":
        for name in ("body", "payload"):
            values.update({name: f"CAST({values[name]} AS json)"} if name in values else {})
    names = ", ".join(f'"{name}"' for name in values)
    # SQLite wants WITH behind INSERT INTO, PostgreSQL takes it there too.
    head, rest = f'INSERT INTO "{table}" ({names}) ', f"SELECT {', '.join(values.values())} FROM {source}"
    connection.execute(text(head + NUMBERS.format(count=numbers) + rest))
