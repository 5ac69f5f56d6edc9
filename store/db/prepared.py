"""Statements that are compiled once in a process: those of the write path, and the SELECTs of the check.

SQLAlchemy writes the SQL and knows the types; going through its execution for each statement costs several times what
SQLite needs for the work itself, and a round executes dozens of them. Its own cache is no help to whoever opens a store
for a moment: each engine has one of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any, TypeVar

from sqlalchemy import Connection, Dialect, Select, insert

Row = dict[str, Any]
Convert = Callable[[Any], Any]
Object = TypeVar("Object")

READ_AT_ONCE = 1000
"""Rows of a streamed query that are held at the same time."""


class Prepared:
    """One statement of the write path in a dialect's own SQL, with what turns our values into the driver's and back.

    Args:
        names: of the columns that an INSERT fills.
    """

    def __init__(self, statement: Any, dialect: Dialect, names: Sequence[str] | None = None) -> None:
        compiled = statement.compile(dialect=dialect, column_keys=names)
        self._sql = str(compiled)
        self._order: list[str] | None = list(compiled.positiontup) if compiled.positional else None
        self._encode = _encoders(compiled, dialect)
        columns = statement.selected_columns if isinstance(statement, Select) else ()
        self._names = [str(column.key) for column in columns]
        self._decode = _decoders(columns, dialect)

    def _parameters(self, values: Mapping[str, Any]) -> Any:
        if self._encode:
            values = dict(values)
            for name, encode in self._encode:
                values[name] = encode(values[name])
        return values if self._order is None else tuple([values[name] for name in self._order])

    def rows(self, cursor: Any, values: Mapping[str, Any]) -> list[Row]:
        """Execute a SELECT."""
        cursor.execute(self._sql, self._parameters(values))
        return [dict(zip(self._names, row, strict=True)) for row in _decoded(cursor.fetchall(), self._decode)]

    def objects(self, cursor: Any, values: Mapping[str, Any], kind: Callable[..., Object]) -> list[Object]:
        """Execute a SELECT whose columns are the fields of a class, in order."""
        cursor.execute(self._sql, self._parameters(values))
        return [kind(*row) for row in _decoded(cursor.fetchall(), self._decode)]

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


class Query:
    """One SELECT in a dialect's own SQL. Unlike those of the write path it may have values in it, and lists as
    parameters."""

    def __init__(self, statement: Any, dialect: Dialect) -> None:
        self._compiled = statement.compile(dialect=dialect)
        self._encode = _encoders(self._compiled, dialect)
        self._names = [str(column.key) for column in statement.selected_columns]
        self._decode = _decoders(statement.selected_columns, dialect)

    def all(self, connection: Connection, values: Mapping[str, Any]) -> list[Row]:
        """Its rows, read at once.

        Args:
            values: by the names of the parameters; it may have more than there are.
        """
        return [dict(zip(self._names, row, strict=True)) for row in self._fetched(connection, values)]

    def objects(self, connection: Connection, values: Mapping[str, Any], kind: Callable[..., Object]) -> list[Object]:
        """The same as objects of a class whose fields are the columns, in order."""
        return [kind(*row) for row in self._fetched(connection, values)]

    def _fetched(self, connection: Connection, values: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
        if not connection.in_transaction():
            connection.begin()  # as SQLAlchemy does before its own statements
        with closing(cursor_of(connection)) as cursor:
            cursor.execute(*self._expanded(values))
            return _decoded(cursor.fetchall(), self._decode)

    def stream(self, connection: Connection, values: Mapping[str, Any]) -> Iterator[Row]:
        """The same, some at a time, which costs PostgreSQL a few more messages."""
        options = {"yield_per": READ_AT_ONCE}
        with connection.exec_driver_sql(*self._expanded(values), execution_options=options) as found:
            for rows in found.partitions():
                yield from (dict(zip(self._names, row, strict=True)) for row in _decoded(rows, self._decode))

    def _expanded(self, values: Mapping[str, Any]) -> tuple[str, Any]:
        """The SQL and its parameters; a list has become one parameter for each of its values."""
        whole = self._compiled.construct_expanded_state(values)
        given = dict(whole.parameters)
        for name, encode in (*self._encode, *whole.processors.items()):
            if name in given:
                given[name] = encode(given[name])
        if whole.positiontup is None:
            return whole.statement, given
        return whole.statement, tuple([given[name] for name in whole.positiontup])


def _decoded(rows: Sequence[Sequence[Any]], decoders: Sequence[tuple[int, Convert]]) -> Sequence[Sequence[Any]]:
    """Rows as the driver gives them, with our values in them."""
    if not decoders:
        return rows
    found = list(map(list, rows))
    for place, decode in decoders:
        for row in found:
            row[place] = decode(row[place])
    return found


def _encoders(compiled: Any, dialect: Dialect) -> list[tuple[str, Convert]]:
    """What turns our values into the driver's, by parameter; only where something has to."""
    found = ((name, bind.type.dialect_impl(dialect).bind_processor(dialect)) for name, bind in compiled.binds.items())
    return [(name, encode) for name, encode in found if encode is not None]


def _decoders(columns: Any, dialect: Dialect) -> list[tuple[int, Convert]]:
    """What turns the driver's values into ours, by the column's place; only where something has to."""
    found = (each.type.dialect_impl(dialect).result_processor(dialect, None) for each in columns)
    return [(place, decode) for place, decode in enumerate(found) if decode is not None]


class Statements:
    """The statements that a process has prepared for one dialect."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._prepared: dict[Any, Prepared] = {}
        self._queries: dict[Any, Query] = {}
        self._defaults: dict[Any, Row] = {}

    def of(self, statement: Any, names: Sequence[str] | None = None) -> Prepared:
        """A statement that is a constant of its module, or made by a function that remembers it; see `Prepared`."""
        found = self._prepared.get(statement)
        if found is None:
            found = self._prepared[statement] = Prepared(statement, self._dialect, names)
        return found

    def query(self, statement: Any) -> Query:
        """A SELECT that is a constant of its module, or made by a function that remembers it."""
        found = self._queries.get(statement)
        if found is None:
            found = self._queries[statement] = Query(statement, self._dialect)
        return found

    def insert(self, cursor: Any, table: Any, rows: Sequence[Mapping[str, Any]]) -> None:
        """Insert rows; a column that a row does not name gets its default."""
        prepared = self._prepared.get(table)
        if prepared is None:
            names = [column.name for column in table.columns]
            self._defaults[table] = defaults(table)  # first: another thread's journal may find the statement below
            prepared = self._prepared[table] = Prepared(insert(table), self._dialect, names)
        standard = self._defaults[table]
        prepared.write(cursor, [{**standard, **row} for row in rows])


_STATEMENTS: dict[str, Statements] = {}


def statements_of(dialect: Dialect) -> Statements:
    """What this process has prepared for such databases; the SQL is the same for all of them."""
    return _STATEMENTS.setdefault(dialect.name, Statements(dialect))


def read(connection: Connection, statement: Any, **values: Any) -> list[Row]:
    """The rows of a SELECT that is a constant."""
    return statements_of(connection.dialect).query(statement).all(connection, values)


def objects(connection: Connection, statement: Any, kind: Callable[..., Object], **values: Any) -> list[Object]:
    """The same as objects of a class whose fields are the columns, in order."""
    return statements_of(connection.dialect).query(statement).objects(connection, values, kind)


def first(connection: Connection, statement: Any, **values: Any) -> Row | None:
    """The first of these rows; None if there is none."""
    return next(iter(read(connection, statement, **values)), None)


def write(connection: Connection, statement: Any, values: Mapping[str, Any]) -> None:
    """Insert a row by an INSERT that is a constant; it fills the columns that there are values for."""
    cursor = cursor_of(connection)
    statements_of(connection.dialect).of(statement, list(values)).write(cursor, [values])


def stream(connection: Connection, statement: Any, **values: Any) -> Iterator[Row]:
    """The same, some at a time, where there may be many."""
    return statements_of(connection.dialect).query(statement).stream(connection, values)


def defaults(table: Any) -> Row:
    """The default of each column of a table."""
    return {column.name: column.default.arg if column.default is not None else None for column in table.columns}


def pipelined(connection: Connection) -> AbstractContextManager[Any]:
    """Send the statements of a `with` block to PostgreSQL without waiting for each; the end waits for all, and raises
    the error of the first that failed."""
    driver: Any = connection.connection.driver_connection
    return driver.pipeline() if connection.dialect.name != "sqlite" else nullcontext()


def cursor_of(connection: Connection) -> Any:
    """The driver's cursor on a connection, inside its transaction."""
    return connection.connection.cursor()
