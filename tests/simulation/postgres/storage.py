"""What is committed, in a SQLite database in memory, and what each transaction sees instead of it.

At any time the database shows the committed state, or that with the changes of one transaction (a `View`) in an open
SQLite transaction. When somebody else needs it, the view's rows are put aside, and back when it is needed again. So
transactions that nobody disturbs cost what they cost SQLite, and the others a few rows more.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import psycopg
from sqlalchemy import create_engine
from sqlalchemy.pool import StaticPool

from understudy.store.db import schema
from understudy.store.db.tables import metadata

Values = Mapping[str, Any] | Sequence[Any]


@dataclass(frozen=True)
class Table:
    """How to read and write a table's rows by their numbers.

    Attributes:
        unique: the columns of each unique index by its name, the primary key first: PostgreSQL's order.
        find: selects a row's number by its key in such an index.
    """

    read: str
    put: str
    drop: str
    unique: dict[str, tuple[str, ...]]
    find: dict[str, str]


@cache
def tables() -> dict[str, Table]:
    """All tables of the product."""
    found = {}
    for table in metadata.sorted_tables:
        name, columns = table.name, ", ".join(f'"{column.name}"' for column in table.columns)
        unique = {f"{name}_pkey": tuple(column.name for column in table.primary_key.columns)}
        indexes = sorted((index for index in table.indexes if index.unique), key=lambda index: str(index.name))
        unique.update({str(index.name): tuple(column.name for column in index.columns) for index in indexes})
        found[name] = Table(
            f'SELECT rowid, {columns} FROM "{name}" WHERE rowid = ?',
            f'INSERT OR REPLACE INTO "{name}" (rowid, {columns}) VALUES (?, {", ".join("?" * len(table.columns))})',
            f'DELETE FROM "{name}" WHERE rowid = ?',
            unique,
            {
                index: f'SELECT rowid FROM "{name}" WHERE ' + " AND ".join(f'"{part}" = ?' for part in parts)
                for index, parts in unique.items()
            },
        )
    return found


@cache
def _template() -> sqlite3.Connection:
    """An empty store with the product's schema, made once in a process."""
    engine = create_engine("sqlite://", poolclass=StaticPool)
    with engine.begin() as connection:
        schema.migrate(connection)
        template: Any = connection.connection.driver_connection
    assert isinstance(template, sqlite3.Connection)
    return template


class View:
    """What a transaction sees beside the committed state.

    Attributes:
        written: the rows that it has changed, by number: their tables.
        images: while it is put aside, the rows that it sees: their tables and values, None for those that are gone.
    """

    def __init__(self) -> None:
        self.written: dict[int, str] = {}
        self.images: dict[int, tuple[str, Sequence[Any] | None]] = {}


class Storage:
    """The rows of a server."""

    def __init__(self) -> None:
        self._connection = sqlite3.connect(":memory:", isolation_level=None, cached_statements=2000)
        _template().backup(self._connection)
        self._connection.execute("PRAGMA case_sensitive_like=ON")
        self._shown: View | None = None
        self._snapshots: list[View] = []
        self._last_row = 1000
        self._tables = tables()

    def close(self) -> None:
        self._connection.close()

    # Reading and writing.

    def read(self, view: View | None, sql: str, values: Values) -> sqlite3.Cursor:
        """Execute a SELECT on what is committed, as a view sees it."""
        if view is not self._shown:
            self._show(view)
        return self._execute(sql, values)

    def exists(self, view: View, table: str, row: int) -> bool:
        """Whether a view sees a row."""
        return self.read(view, self._tables[table].read, (row,)).fetchone() is not None

    def find(self, view: View, table: str, index: str, key: Sequence[Any]) -> int | None:
        """The number of the row that has a key in a unique index."""
        found = self.read(view, self._tables[table].find[index], key).fetchone()
        return None if found is None else int(found[0])

    def write(self, view: View, sql: str, values: Values) -> int:
        """Execute a statement that changes rows, which the caller adds to the view's; returns how many."""
        if view is not self._shown:
            self._show(view)
            if self._shown is None:
                self._connection.execute("BEGIN")
                self._shown = view
        return self._execute(sql, values).rowcount

    def new_row(self) -> int:
        """A number for a row, which no other row of any table ever has."""
        self._last_row += 1
        return self._last_row

    def _execute(self, sql: str, values: Values) -> sqlite3.Cursor:
        try:
            return self._connection.execute(sql, values)
        except sqlite3.IntegrityError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_CONSTRAINT_NOTNULL:
                raise psycopg.errors.NotNullViolation(str(error)) from None
            raise
        except OverflowError:
            raise psycopg.errors.NumericValueOutOfRange("bigint out of range") from None
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):
                raise psycopg.errors.UndefinedTable(str(error)) from None
            raise

    # What is shown.

    def _show(self, view: View | None) -> None:
        if self._shown is not None:
            self._put_aside()
        if view is not None and view.images:
            self._connection.execute("BEGIN")
            self._apply(view)
            self._shown = view

    def _put_aside(self) -> None:
        view = self._shown
        assert view is not None
        if view.written:  # else it is a snapshot
            view.images = self._images(view.written)
        self._connection.execute("ROLLBACK")
        self._shown = None

    def _images(self, rows: Mapping[int, str]) -> dict[int, tuple[str, Sequence[Any] | None]]:
        """These rows as they are shown now."""
        read, tables = self._connection.execute, self._tables
        return {row: (table, read(tables[table].read, (row,)).fetchone()) for row, table in rows.items()}

    def _apply(self, view: View) -> None:
        for row, (table, image) in view.images.items():
            if image is None:  # before the others: a row that replaces it may have its key
                self._connection.execute(self._tables[table].drop, (row,))
        for table, image in view.images.values():
            if image is not None:
                self._connection.execute(self._tables[table].put, image)

    # Ends of transactions.

    def commit(self, view: View) -> None:
        """Make what a view has written what is committed."""
        if not view.written:
            self.discard(view)
            return
        self._show_again(view)
        if self._snapshots:
            self._put_aside()
            for row, image in self._images(view.written).items():
                for snapshot in self._snapshots:
                    snapshot.images.setdefault(row, image)
            self._show_again(view)
        self._connection.execute("COMMIT")
        self._shown = None

    def _show_again(self, view: View) -> None:
        if view is not self._shown:
            self._show(view)

    def discard(self, view: View) -> None:
        """Forget what a view has written."""
        if view is self._shown:
            self._connection.execute("ROLLBACK")
            self._shown = None

    def keep(self, snapshot: View) -> None:
        """Have a view see what is committed now, until it is let go."""
        self._snapshots.append(snapshot)

    def let_go(self, snapshot: View) -> None:
        self.discard(snapshot)
        self._snapshots.remove(snapshot)
