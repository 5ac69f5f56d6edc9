"""Opening a store: engines, schema, and the mapping of database errors to ours."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError, DisconnectionError, InvalidRequestError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import QueuePool

from understudy.config import check_store, redact
from understudy.errors import (
    InvalidConfiguration,
    StoreBusy,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreUnreachable,
)
from understudy.json_text import from_json, to_json

from . import failures, schema
from .postgresql import Address
from .prepared import statements_of

BUSY_SECONDS = 20

CONNECT_TRIES = 3

COMMIT_BUSY_SECONDS = 0.25
"""The journal commits on the event loop (SQLite), so it waits for another process's lock not for long, but again."""


def now() -> int:
    """Microseconds since 1970 UTC."""
    return time.time_ns() // 1000


class Database:
    """One store: an engine for the one writer, and one for readers.

    SQLite runs in WAL mode with `synchronous=FULL`: an acknowledged commit survives a power cut as far as the disk
    keeps its word, and readers never wait for the writer. PostgreSQL gets a small pool: a node holds at most five
    connections.

    Args:
        unlimited: statements may take as long as they need (PostgreSQL): for commands that somebody waits for.
    """

    def __init__(self, dsn: str, *, unlimited: bool = False) -> None:
        self.dsn = check_store(dsn)
        self.is_sqlite = self.dsn.startswith("sqlite")
        self.schema = ""
        self._outages = 0
        if self.is_sqlite:
            self._path = Path(self.dsn.removeprefix("sqlite:///"))
            if self._path.is_dir():
                raise InvalidConfiguration(f"UNDERSTUDY_STORE={self.dsn!r} is a directory: name a file in it")
            self._make_directory(self._path.parent)
            self._patience = float(BUSY_SECONDS)
            arguments = {"timeout": BUSY_SECONDS, "check_same_thread": False}
            options = {"connect_args": arguments, "poolclass": QueuePool}
            options |= {"json_serializer": to_json, "json_deserializer": from_json}
            self.writer = create_engine(self.dsn, pool_size=1, **options)
            self.reader = create_engine(self.dsn, pool_size=2, **options)
            _tune_sqlite(self.writer, "BEGIN IMMEDIATE", lambda: self._patience)
            _tune_sqlite(self.reader, "BEGIN", lambda: BUSY_SECONDS)
        else:
            address = Address(self.dsn, unlimited=unlimited)
            self.schema = address.schema
            backend = "postgresql+psycopg://"
            connect = self._dated(address.connect_journal)
            self.writer = create_engine(backend, creator=connect, pool_size=1, max_overflow=1)
            options = {"pool_size": 2, "max_overflow": 1, "isolation_level": "REPEATABLE READ"}
            self.reader = create_engine(backend, creator=self._dated(address.connect_reader), **options)

        for engine in (self.writer, self.reader):
            self._watch_pool(engine)
        self.statements = statements_of(self.writer.dialect)
        self._driver: Any = self.writer.dialect.loaded_dbapi

    def _make_directory(self, path: Path) -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            kind = _KINDS_OF_SYSTEM_ERRORS.get(error.errno or 0, StoreUnreachable)
            raise kind(f"{self.dsn}: {path} can't be created: {error.strerror}") from None

    def prepare(self, policy: str = "auto") -> list[int]:
        """Bring the schema up to date (`auto`), or only check that it is (`verify`); returns the migrations applied.

        Safe when several processes boot at once.

        Raises:
            StoreUnreachable: no connection within 5 seconds, or one of its subclasses: refused, read-only, full, busy.
            StoreVersion: the database is newer than this code; it was not touched.
            StoreSchema: it lacks something and may not be changed, or it has tables that are not ours.
            StoreOwned: it is older than this code, and a cluster works with it.
        """
        applied: list[int] = []
        if policy == "verify":
            with self.read() as connection:
                schema.require(connection, self.schema)
        else:
            with self.maintenance() as connection:
                applied = schema.migrate(connection, self.schema)
            if self.is_sqlite:
                for path in self._not_writable():  # else only the first commit would tell
                    raise StoreReadOnly(f"{self.dsn}: {path} may not be written")
                self._use_wal()
        if self.is_sqlite:
            self._patience = COMMIT_BUSY_SECONDS
            self.writer.dispose()
        return applied

    def _use_wal(self) -> None:
        """Kept in the file from then on; not before it is known to be ours.

        Two processes that switch at once would wait for each other's read lock, so SQLite refuses one of them without
        waiting its `busy_timeout`: that one asks again, and finds it done.
        """
        self.writer.dispose()
        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                with self.errors(), self.reader.connect() as connection:
                    driver: Any = connection.connection.driver_connection
                    driver.execute("PRAGMA journal_mode=WAL")
                return
            except StoreBusy:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection that sees one state of the store throughout: that of its first statement."""
        with self.errors(), self._connected(self.reader) as connection, self._watched(connection):
            yield connection

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """The same for many reads that may take their time."""
        with self.read() as connection, self._unlimited(connection):
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that writes, committed at the end.

        After an outage no connection from before it is used: which server an old one leads to, nobody knows.
        """
        try:
            with (
                self.errors(), self._connected(self.writer) as connection, connection.begin(), self._watched(connection)
            ):  # fmt: skip
                yield connection
        except StoreError as error:
            if failures.is_outage(type(error)):
                self._outages += 1
            raise

    @contextmanager
    def maintenance(self) -> Iterator[Connection]:
        """The same without limits of time: for migrations, and for what goes over whole tables."""
        with self.write() as connection, self._unlimited(connection):
            yield connection

    def _connected(self, engine: Engine) -> Connection:
        """A connection of a pool, or a new one."""
        for _ in range(CONNECT_TRIES):
            try:
                return engine.connect()
            except InvalidRequestError:  # others met an outage while it was opened, and again
                continue
        raise StoreUnreachable(f"{redact(self.dsn)}: connections are lost while they are opened")

    def _dated(self, connect: Callable[[], Any]) -> Callable[[Any], Any]:
        """The same, noting how many outages there were before: while it takes long, there may be one more."""

        def connect_and_note(record: Any) -> Any:
            record.info["outages"] = self._outages
            return connect()

        return connect_and_note

    def _watch_pool(self, engine: Engine) -> None:
        """Have what was opened before an outage replaced when it is wanted next.

        Giving the pool up at the outage would leave what others have of it to the garbage collector, open for as long
        as that takes: in an outage that comes and goes, more than PostgreSQL allows.
        """

        @event.listens_for(engine, "connect")
        def _connect(_connection, record) -> None:  # type: ignore[no-untyped-def]
            record.info.setdefault("outages", self._outages)
            record.info["pool"], record.info["used"] = engine.pool, False

        @event.listens_for(engine, "checkout")
        def _checkout(connection, record, _proxy) -> None:  # type: ignore[no-untyped-def]
            if record.info["outages"] != self._outages:
                raise DisconnectionError("opened before an outage")
            used, record.info["used"] = record.info["used"], True
            if engine is not self.reader or self.is_sqlite or not used:
                return
            try:  # not `pool_pre_ping`, which would first ask a server that may have been silent since that outage
                engine.dialect.do_ping(connection)
            except self._driver.Error as error:
                raise DisconnectionError(str(error)) from error

        @event.listens_for(engine, "checkin")
        def _checkin(_connection, record) -> None:  # type: ignore[no-untyped-def]
            if record.info.get("pool") is not engine.pool:  # after `close`: SQLAlchemy leaves it to the garbage
                record.invalidate()

    @contextmanager
    def _unlimited(self, connection: Connection) -> Iterator[None]:
        """No statement of this transaction takes too long."""
        if self.is_sqlite:
            yield
            return
        for limit in ("statement_timeout", "lock_timeout"):
            connection.exec_driver_sql(f"SET LOCAL {limit} = 0")
        driver: Any = connection.connection.driver_connection
        before, driver.silence_limit = driver.silence_limit, None
        try:
            yield
        finally:
            driver.silence_limit = before

    @contextmanager
    def _watched(self, connection: Connection) -> Iterator[None]:
        """Keep a connection out of its pool if an error says that it is of no use any more.

        SQLAlchemy does so for its own statements only, and ours use the driver's cursor. It must happen before the
        rollback, whose own error would hide the one that tells what happened.
        """
        try:
            yield
        except (DBAPIError, self._driver.Error) as error:
            original = error.orig if isinstance(error, DBAPIError) else error
            lost = connection.invalidated or getattr(connection.connection.driver_connection, "closed", False)
            ours = self._ours(original, lost=lost)
            if failures.is_outage(type(ours)):
                connection.invalidate(original)
            raise ours from None

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Map database errors to `StoreUnreachable` (worth a retry) and `StoreError`; passwords never show."""
        try:
            yield
        except DBAPIError as error:
            raise self._ours(error.orig, lost=error.connection_invalidated) from None
        except PoolTimeout:
            raise StoreBusy(f"{redact(self.dsn)}: all connections of this process are in use") from None
        except SQLAlchemyError as error:
            raise StoreError(f"{redact(self.dsn)}: {type(error).__name__}") from None
        except self._driver.Error as error:  # of a prepared statement, which goes past SQLAlchemy
            raise self._ours(error) from None

    def _ours(self, error: BaseException | None, *, lost: bool = False) -> StoreError:
        kind, said = failures.kind_of(error, lost=lost), failures.reason(error)
        if self.is_sqlite and kind in (StoreReadOnly, StoreUnreachable):
            for path in self._not_writable():
                return StoreReadOnly(f"{self.dsn}: {path} may not be written: {said}")
        return kind(f"{redact(self.dsn)}: {said}")

    def _not_writable(self) -> list[Path]:
        """Which of the directory and SQLite's files this process may not write; SQLite doesn't say."""
        files = [self._path.with_name(self._path.name + suffix) for suffix in ("", "-wal", "-shm")]
        return [path for path in (self._path.parent, *files) if path.exists() and not os.access(path, os.W_OK)]

    def close(self) -> None:
        """Give all connections back; those that are asked for later are new ones."""
        self.writer.dispose()
        self.reader.dispose()


_KINDS_OF_SYSTEM_ERRORS: dict[int, type[StoreUnreachable]] = {
    errno.EACCES: StoreReadOnly,
    errno.EPERM: StoreReadOnly,
    errno.EROFS: StoreReadOnly,
    errno.ENOSPC: StoreFull,
    errno.EDQUOT: StoreFull,
}


def _tune_sqlite(engine: Engine, begin: str, patience: Callable[[], float]) -> None:
    @event.listens_for(engine, "connect")
    def _connect(connection, _record) -> None:  # type: ignore[no-untyped-def]
        connection.isolation_level = None  # we say BEGIN ourselves: the driver would defer the lock
        try:
            connection.execute(f"PRAGMA busy_timeout={int(patience() * 1000)}")
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute("PRAGMA wal_autocheckpoint=2000")
            connection.execute("PRAGMA cache_size=-16000")
        except BaseException:  # the pool does not know it yet
            connection.close()
            raise

    @event.listens_for(engine, "begin")
    def _begin(connection) -> None:  # type: ignore[no-untyped-def]
        connection.exec_driver_sql(begin)
