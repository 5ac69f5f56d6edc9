"""The stores of a simulation: a SQLite file, which is its own model, and the simulated PostgreSQL."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, event

from understudy.store.db.engine import Database

if TYPE_CHECKING:
    from .world import World

RAM = Path("/dev/shm")


@cache
def _template() -> Path:
    """A SQLite store with its schema, made once in a process."""
    directory = Path(tempfile.mkdtemp(prefix="understudy-simulation-", dir=RAM if RAM.is_dir() else None))
    database = Database(f"sqlite:///{directory}/template.db")
    database.prepare()
    database.close()
    return directory / "template.db"


class SqliteStore:
    """A SQLite file. A commit is one step, as it is in the product, where it works on the event loop."""

    def __init__(self, world: World) -> None:
        self._directory = Path(tempfile.mkdtemp(dir=_template().parent))
        shutil.copy(_template(), self._directory / "store.db")
        self.dsn = f"sqlite:///{self._directory}/store.db"
        self._reader = Database(self.dsn)
        self._raw = sqlite3.connect(self._directory / "store.db", isolation_level=None)

    def open(self, _process: str) -> Database:
        """What a node service opens."""
        database = Database(self.dsn)
        database.prepare = lambda policy="auto": _begin(database)  # type: ignore[method-assign]
        for engine in (database.writer, database.reader):
            event.listen(engine, "connect", _without_waiting_for_the_disk)
        return database

    @contextmanager
    def committed(self) -> Iterator[Connection]:
        """What is committed now."""
        with self._reader.reader.connect() as connection:
            yield connection

    def rows(self, sql: str) -> list[Any]:
        """Rows of what is committed now."""
        return self._raw.execute(sql).fetchall()

    def close(self) -> None:
        """Remove it."""
        self._raw.close()
        self._reader.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def _begin(database: Any) -> list[int]:
    database._patience = 0.25
    return []


def _without_waiting_for_the_disk(connection: Any, _record: Any) -> None:
    connection.execute("PRAGMA synchronous=OFF")


def store_of(world: World, backend: str) -> Any:
    """The store that a plan asks for."""
    if backend == "sqlite":
        return SqliteStore(world)
    from .postgresql import PostgresqlStore

    return PostgresqlStore(world)
