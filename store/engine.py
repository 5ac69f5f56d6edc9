"""Opening a store: engines, schema, and the mapping of database errors to ours."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.pool import QueuePool

from understudy.config import check_store, redact, split_schema
from understudy.errors import StoreError, StoreUnreachable

from . import schema
from .prepared import Statements

CONNECT_SECONDS = 5
BUSY_SECONDS = 20
# A node that vanishes in the middle of a transaction holds locks on sessions until PostgreSQL notices, and whoever
# takes over waits for them: by default for hours. In milliseconds, for sessions of the journal.
TAKEOVER_LIMITS = {"idle_in_transaction_session_timeout": 5_000, "lock_timeout": 3_000}
KEEPALIVE: dict[str, Any] = {"keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3}
SERVER_KEEPALIVE = {"tcp_keepalives_idle": 5, "tcp_keepalives_interval": 2, "tcp_keepalives_count": 3}

COMMIT_BUSY_SECONDS = 0.25
"""The journal commits on the event loop (SQLite), so it waits for another process's lock not for long, but again."""


def now() -> int:
    """Microseconds since 1970 UTC."""
    return time.time_ns() // 1000


class StoreRace(StoreError):
    """Another process wrote the same key at the same time: looking again shows what it wrote."""

    code = "store_race"


class Database:
    """One store: an engine for the one writer, and one for readers.

    SQLite runs in WAL mode with `synchronous=FULL`: an acknowledged commit survives a power cut, and readers never wait
    for the writer. PostgreSQL gets a small pool: a node holds at most five connections.
    """

    def __init__(self, dsn: str) -> None:
        self.dsn = check_store(dsn)
        self.is_sqlite = self.dsn.startswith("sqlite")
        self.schema = ""
        if self.is_sqlite:
            self._make_directory(Path(self.dsn.removeprefix("sqlite:///")).parent)
            self._patience = float(BUSY_SECONDS)
            options = {"connect_args": {"timeout": BUSY_SECONDS, "check_same_thread": False}, "poolclass": QueuePool}
            self.writer = create_engine(self.dsn, pool_size=1, **options)
            self.reader = create_engine(self.dsn, pool_size=2, **options)
            _tune_sqlite(self.writer, "BEGIN IMMEDIATE", lambda: self._patience)
            _tune_sqlite(self.reader, "BEGIN", lambda: BUSY_SECONDS)
        else:
            address, self.schema = split_schema(self.dsn)

            def connect() -> psycopg.Connection[Any]:  # by libpq, which also knows several hosts, services, sslmode
                return psycopg.connect(
                    address, connect_timeout=CONNECT_SECONDS, application_name="understudy", **KEEPALIVE
                )

            backend = "postgresql+psycopg://"
            self.writer = create_engine(backend, creator=connect, pool_size=1, max_overflow=1)
            self.reader = create_engine(backend, creator=connect, pool_size=2, max_overflow=1, pool_pre_ping=True)
            _tune_postgresql(self.writer, self.schema, {**TAKEOVER_LIMITS, **SERVER_KEEPALIVE})
            _tune_postgresql(self.reader, self.schema, {})

        self.statements = Statements(self.writer.dialect)
        self._driver: Any = self.writer.dialect.loaded_dbapi

    def _make_directory(self, path: Path) -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreUnreachable(f"{self.dsn}: {path} can't be created: {error.strerror}") from None

    def prepare(self, policy: str = "auto") -> list[int]:
        """Bring the schema up to date (`auto`), or only check that it is (`verify`); returns the migrations applied.

        Safe when several processes boot at once.

        Raises:
            StoreUnreachable: no connection within 5 seconds.
            StoreVersion: the database is newer than this code; it was not touched.
            StoreSchema: it lacks something and may not be changed, or it has tables that are not ours.
            StoreOwned: it is older than this code, and a cluster works with it.
        """
        applied: list[int] = []
        if policy == "verify":
            with self.read() as connection:
                schema.require(connection)
        else:
            with self.errors(), self.writer.begin() as connection:
                if self.schema:
                    schema.create_schema(connection, self.schema)
                applied = schema.migrate(connection)
        if self.is_sqlite:
            self._patience = COMMIT_BUSY_SECONDS
            self.writer.dispose()
        return applied

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection for reading a consistent snapshot."""
        with self.errors(), self.reader.connect() as connection:
            yield connection

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """A connection that sees one state of the store throughout, for many reads that may take their time."""
        level = {} if self.is_sqlite else {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        with self.errors(), self.reader.connect() as connection:
            connection.execution_options(**level)
            if not self.is_sqlite:
                connection.exec_driver_sql("SET LOCAL statement_timeout = 0")
            yield connection

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Map database errors to `StoreUnreachable` (worth a retry) and `StoreError`; passwords never show."""
        try:
            yield
        except OperationalError as error:
            raise StoreUnreachable(f"{redact(self.dsn)}: {_reason(error.orig)}") from None
        except IntegrityError as error:
            raise StoreRace(f"{redact(self.dsn)}: {_reason(error.orig)}") from None
        except DBAPIError as error:
            kind = StoreUnreachable if error.connection_invalidated else StoreError
            raise kind(f"{redact(self.dsn)}: {_reason(error.orig)}") from None
        except SQLAlchemyError as error:
            raise StoreError(f"{redact(self.dsn)}: {type(error).__name__}") from None
        except self._driver.Error as error:  # of a prepared statement, which goes past SQLAlchemy
            kind = StoreError
            if isinstance(error, (self._driver.OperationalError, self._driver.InterfaceError)):
                kind = StoreUnreachable
            elif isinstance(error, self._driver.IntegrityError):
                kind = StoreRace
            raise kind(f"{redact(self.dsn)}: {_reason(error)}") from None

    def close(self) -> None:
        """Give all connections back."""
        self.writer.dispose()
        self.reader.dispose()


def _reason(error: BaseException | None) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {redact(lines[0]) if lines else 'no reason given'}"


def _tune_postgresql(engine: Engine, schema_name: str, settings: dict[str, int]) -> None:
    @event.listens_for(engine, "connect")
    def _connect(connection, _record) -> None:  # type: ignore[no-untyped-def]
        for name, value in settings.items():
            connection.execute(f"SET {name} = {value}")
        if schema_name:
            connection.execute(f'SET search_path TO "{schema_name}"')
        connection.commit()


def _tune_sqlite(engine: Engine, begin: str, patience: Callable[[], float]) -> None:
    @event.listens_for(engine, "connect")
    def _connect(connection, _record) -> None:  # type: ignore[no-untyped-def]
        connection.isolation_level = None  # we say BEGIN ourselves: the driver would defer the lock
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA busy_timeout={int(patience() * 1000)}")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA wal_autocheckpoint=2000")
        connection.execute("PRAGMA cache_size=-16000")

    @event.listens_for(engine, "begin")
    def _begin(connection) -> None:  # type: ignore[no-untyped-def]
        connection.exec_driver_sql(begin)
