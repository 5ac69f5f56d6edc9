"""Statements of the write path, compiled once and executed on the driver's own cursor.

SQLAlchemy writes the SQL and knows the types; going through its execution for each statement costs several times what
SQLite needs for the work itself, and a round executes dozens of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from sqlalchemy import Connection, Dialect, Select, insert

Row = dict[str, Any]
Convert = Callable[[Any], Any]


class Prepared:
    """One statement in a dialect's own SQL, with what turns our values into the driver's and back.

    Args:
        names: of the columns that an INSERT fills.
    """

    def __init__(self, statement: Any, dialect: Dialect, names: Sequence[str] | None = None) -> None:
        compiled = statement.compile(dialect=dialect, column_keys=names)
        self._sql = str(compiled)
        self._order: list[str] | None = list(compiled.positiontup) if compiled.positional else None
        self._encode: list[tuple[str, Convert]] = []
        for name, bind in compiled.binds.items():
            encode = bind.type.dialect_impl(dialect).bind_processor(dialect)
            if encode is not None:
                self._encode.append((name, encode))
        self._names: list[str] = []
        self._decode: list[tuple[str, Convert]] = []
        if isinstance(statement, Select):
            for column in statement.selected_columns:
                self._names.append(str(column.key))
                decode = column.type.dialect_impl(dialect).result_processor(dialect, None)
                if decode is not None:
                    self._decode.append((str(column.key), decode))

    def _parameters(self, values: Mapping[str, Any]) -> Any:
        if self._encode:
            values = dict(values)
            for name, encode in self._encode:
                values[name] = encode(values[name])
        return values if self._order is None else tuple([values[name] for name in self._order])

    def rows(self, cursor: Any, values: Mapping[str, Any]) -> list[Row]:
        """Execute a SELECT."""
        cursor.execute(self._sql, self._parameters(values))
        found = [dict(zip(self._names, row, strict=True)) for row in cursor.fetchall()]
        for name, decode in self._decode:
            for row in found:
                row[name] = decode(row[name])
        return found

    def scalar(self, cursor: Any, values: Mapping[str, Any]) -> Any:
        """The first column of a SELECT's first row; None if there is none."""
        found = self.rows(cursor, values)
        return found[0][self._names[0]] if found else None

    def write(self, cursor: Any, rows: Sequence[Mapping[str, Any]]) -> None:
        """Execute an INSERT, UPDATE or DELETE once per row."""
        if len(rows) == 1:
            cursor.execute(self._sql, self._parameters(rows[0]))
        else:
            cursor.executemany(self._sql, [self._parameters(row) for row in rows])


class Statements:
    """The prepared statements of one database."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._prepared: dict[Any, Prepared] = {}
        self._defaults: dict[Any, Row] = {}

    def of(self, statement: Any) -> Prepared:
        """A statement that is a constant of its module."""
        found = self._prepared.get(statement)
        if found is None:
            found = self._prepared[statement] = Prepared(statement, self._dialect)
        return found

    def insert(self, cursor: Any, table: Any, rows: Sequence[Mapping[str, Any]]) -> None:
        """Insert rows; a column that a row does not name gets its default."""
        prepared = self._prepared.get(table)
        if prepared is None:
            names = [column.name for column in table.columns]
            prepared = self._prepared[table] = Prepared(insert(table), self._dialect, names)
            self._defaults[table] = defaults(table)
        standard = self._defaults[table]
        prepared.write(cursor, [{**standard, **row} for row in rows])


def defaults(table: Any) -> Row:
    """The default of each column of a table."""
    return {column.name: column.default.arg if column.default is not None else None for column in table.columns}


def pipelined(connection: Connection) -> AbstractContextManager[Any]:
    """Send the statements of a `with` block to PostgreSQL without waiting for each; the end waits for all, and raises
    the error of the first that failed."""
    driver: Any = connection.connection.driver_connection
    return driver.pipeline() if connection.dialect.name == "postgresql" else nullcontext()


def cursor_of(connection: Connection) -> Any:
    """The driver's cursor on a connection, inside its transaction."""
    return connection.connection.cursor()
