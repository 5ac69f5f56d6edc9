"""Looking after a store as a whole: its size, its free space, copies of it."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, func, select

from understudy.config import redact
from understudy.errors import InvalidInput, StoreError, StoreOwned

from ..db import schema
from ..db.engine import Database, now
from ..db.postgresql import without_password
from ..db.statements import RUN, SESSION
from ..db.tables import metadata
from ..operations import presence
from ..reads.queries import owner as owner_of

Progress = Callable[[int, int], None]
"""Called with how much of how much is done."""

PAGES_AT_ONCE = 2_000


def statistics(database: Database, namespace: str) -> dict[str, Any]:
    """What the store holds: rows by table, sessions by status, bytes on disk, owner, how far the sinks are."""
    with database.snapshot() as connection:
        return {
            "store": redact(database.dsn),
            "backend": connection.dialect.name,
            "schema_version": schema.version_of(connection),
            "namespace": namespace,
            "bytes": _bytes(database, connection),
            "rows": {table.name: _count(connection, table, namespace) for table in metadata.sorted_tables},
            "sessions": _by(connection, SESSION, SESSION.c.status, namespace),
            "runs": _by(connection, RUN, RUN.c.status, namespace),
            "owner": _owner(connection, namespace),
            "writers": _writers(connection, namespace),
        }


def _count(connection: Connection, table: Any, namespace: str) -> int:
    statement = select(func.count()).select_from(table)
    if "namespace" in table.columns:
        statement = statement.where(table.c.namespace == namespace)
    return connection.execute(statement).scalar() or 0


def session_count(connection: Connection, namespace: str) -> int:
    """How many sessions the namespace has."""
    return _count(connection, SESSION, namespace)


def _by(connection: Connection, table: Any, column: Any, namespace: str) -> dict[str, int]:
    statement = select(column, func.count()).where(table.c.namespace == namespace).group_by(column).order_by(column)
    return {str(value): number for value, number in connection.execute(statement)}


def _bytes(database: Database, connection: Connection) -> int:
    if not database.is_sqlite:
        sizes = [
            connection.exec_driver_sql("SELECT pg_total_relation_size(to_regclass(%s))", (f'"{name}"',)).scalar() or 0
            for name in metadata.tables
        ]
        return sum(sizes)
    path = Path(database.dsn.removeprefix("sqlite:///"))
    parts = [path, path.with_name(f"{path.name}-wal")]
    return sum(part.stat().st_size for part in parts if part.exists())


def _owner(connection: Connection, namespace: str) -> dict[str, Any] | None:
    owner = owner_of(connection, namespace)
    if owner is None:
        return None
    left = max(0.0, (owner.lease_until - now()) / 1e6)
    return {"holder": owner.holder, "generation": owner.generation, "lease_seconds": round(left, 1)}


def _writers(connection: Connection, namespace: str) -> list[dict[str, Any]]:
    return [
        {"writer": log.writer, "events": log.last, "unmeasured": log.unmeasured, "unexported": log.unexported}
        for log in presence.logs(connection, namespace)
    ]


def vacuum(database: Database) -> tuple[int, int]:
    """Give the space of removed rows back; returns the bytes before and after.

    PostgreSQL also renews its planner's statistics. SQLite's stay unused: its plans are the same in every store.

    Raises:
        StoreOwned: SQLite is rewritten as a whole, and a cluster works with it.
    """
    with database.read() as connection:
        before = _bytes(database, connection)
        if database.is_sqlite:
            _require_no_owner(connection)
    with database.errors():
        if database.is_sqlite:
            with closing(sqlite3.connect(database.dsn.removeprefix("sqlite:///"), isolation_level=None)) as file:
                file.execute("VACUUM")
                file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        else:
            with database.reader.connect() as connection:
                connection.execution_options(isolation_level="AUTOCOMMIT")
                connection.exec_driver_sql("SET statement_timeout = 0")
                connection.connection.driver_connection.silence_limit = None  # type: ignore[union-attr]
                names = ", ".join(f'"{name}"' for name in metadata.tables)
                connection.exec_driver_sql(f"VACUUM (ANALYZE) {names}")
                connection.invalidate()  # with its settings
    with database.read() as connection:
        return before, _bytes(database, connection)


def _require_no_owner(connection: Connection) -> None:
    owner = metadata.tables["owner"]
    held = connection.execute(select(owner).where(owner.c.lease_until > now())).mappings().first()
    if held is not None:
        raise StoreOwned(
            f"namespace {held['namespace']!r} is owned by {held['holder']}, which writes to this file",
            details={"hint": "Stop that cluster first (`understudy down`)."},
        )


def backup(database: Database, target: Path, progress: Progress) -> int:
    """Copy the whole store into a new file while it is in use; returns its bytes.

    SQLite: a database file, complete as of its end. PostgreSQL: an archive of `pg_dump`, for `pg_restore`.

    Raises:
        InvalidInput: the file exists, or can't be made.
        StoreError: the copy failed; nothing is left of it.
    """
    if os.path.lexists(target):
        raise InvalidInput(f"{target} exists; a backup never overwrites one")
    partial = target.with_name(f"{target.name}.partial")
    try:
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))  # it holds whole conversations
    except OSError as error:
        raise InvalidInput(f"{target} can't be written: {error.strerror}") from None
    try:
        if database.is_sqlite:
            _copy_sqlite(database, partial, progress)
        else:
            _dump_postgresql(database, partial)
        os.replace(partial, target)
    except (OSError, sqlite3.Error) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise StoreError(f"the backup to {target} failed: {said}") from None
    finally:
        for leftover in (partial, partial.with_name(f"{partial.name}-journal")):
            leftover.unlink(missing_ok=True)
    return target.stat().st_size


def _copy_sqlite(database: Database, target: Path, progress: Progress) -> None:
    with (
        closing(sqlite3.connect(database.dsn.removeprefix("sqlite:///"), timeout=20)) as source,
        closing(sqlite3.connect(target)) as copy,
    ):
        # Otherwise every commit of another process would make it start over. Writers are not held up by it.
        source.isolation_level = None
        source.execute("BEGIN")
        source.execute("SELECT 1 FROM sqlite_master").fetchone()
        source.backup(copy, pages=PAGES_AT_ONCE, progress=lambda _, left, total: progress(total - left, total))


def _dump_postgresql(database: Database, target: Path) -> None:
    program = shutil.which("pg_dump")
    if program is None:
        raise StoreError("there is no pg_dump on PATH: it comes with PostgreSQL's client programs")
    with database.read() as connection:
        schema_name = connection.exec_driver_sql("SELECT current_schema()").scalar()
        server = connection.connection.driver_connection.info.server_version // 10_000  # type: ignore[union-attr]
    # Only what the DSN says: a connection's own parameters have defaults that an older pg_dump does not know. The
    # password goes by the environment: a command line can be read by every user of the machine.
    address, password = without_password(database.dsn)
    environment = {**os.environ, **({"PGPASSWORD": password} if password else {})}
    done = subprocess.run(
        [program, "--format=custom", "--no-owner", f'--schema="{schema_name}"', f"--file={target}", "--no-password",
         f"--dbname={address}"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        reason = redact(done.stderr.strip().splitlines()[0]) if done.stderr.strip() else f"exit code {done.returncode}"
        if "version mismatch" in done.stderr:
            reason += f". The pg_dump on PATH, {program}, must be of PostgreSQL {server} or newer, as the server is"
        raise StoreError(f"pg_dump failed: {reason}")
