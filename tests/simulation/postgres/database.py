"""A store on the simulated server, as the product uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
from sqlalchemy import Engine
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import Pool
from sqlalchemy.util import LRUCache

from understudy.store.db.engine import Database
from understudy.store.db.postgresql import JOURNAL_SECONDS, READER_SECONDS, SILENCE_MARGIN, TAKEOVER_LIMITS
from understudy.store.db.prepared import statements_of

from .dialect import Dialect
from .driver import Connection
from .host import Host, Signal
from .server import DIALECT, URL, Server

POOL_SECONDS = 30.0

READER = Dialect("REPEATABLE READ")

COMPILED: Any = LRUCache(2000)
"""The SQL of SQLAlchemy's statements, for all engines."""


class HostPool(Pool):
    """SQLAlchemy's QueuePool, but who waits for a connection waits in the simulation."""

    def __init__(self, creator: Any, *, host: Host, size: int, most: int, **options: Any) -> None:
        super().__init__(creator, **options)
        self._host = host
        self._size = size
        self._most = most
        self._open = 0
        self._idle: list[Any] = []
        self._waiting: list[Signal] = []

    def _do_get(self) -> Any:
        until = self._host.now() + int(POOL_SECONDS * 1e6)
        while not self._idle and self._open >= self._most:
            signal = self._host.signal()
            self._waiting.append(signal)
            if not self._host.wait(signal, (until - self._host.now()) / 1e6):
                self._waiting.remove(signal)
                raise PoolTimeout(f"all {self._most} connections are in use for {POOL_SECONDS:g} s")
        if self._idle:
            return self._idle.pop(0)
        self._open += 1
        try:
            return self._create_connection()
        except BaseException:
            self._left()
            raise

    def _do_return_conn(self, record: Any) -> None:
        if len(self._idle) < self._size:
            self._idle.append(record)
            self._next()
        else:
            try:
                record.close()
            finally:
                self._left()

    def _left(self) -> None:
        self._open -= 1
        self._next()

    def _next(self) -> None:
        if self._waiting:
            self._waiting.pop(0).set()

    def dispose(self) -> None:
        idle, self._idle = self._idle, []
        for record in idle:
            record.close()
            self._open -= 1

    def recreate(self) -> HostPool:
        return HostPool(
            self._creator, host=self._host, size=self._size, most=self._most, pre_ping=self._pre_ping,
            dialect=self._dialect, _dispatch=self.dispatch,
        )  # fmt: skip


class SimulatedDatabase(Database):
    """One client's store. It is what `Database` is on PostgreSQL, with the same limits and the same pools.

    Args:
        client: the name of the simulated process.
        unlimited: statements may take as long as they need.
    """

    def __init__(self, server: Server, client: str, *, unlimited: bool = False) -> None:
        self.dsn = f"postgresql://{client}@simulated/understudy"
        self.is_sqlite = False
        self.schema = ""
        self._server = server
        self._client = client
        self._unlimited_statements = unlimited
        self._outages = 0
        self.writer = self._engine(self._dated(self._connect_journal), DIALECT, size=1, most=2)
        self.reader = self._engine(self._dated(self._connect_reader), READER, size=2, most=3)
        self.statements = statements_of(DIALECT)
        self._driver = psycopg

    def _connect_journal(self) -> Connection:
        return self._connect(JOURNAL_SECONDS, "READ COMMITTED", TAKEOVER_LIMITS)

    def _connect_reader(self) -> Connection:
        return self._connect(READER_SECONDS, "REPEATABLE READ", {})

    def _connect(self, seconds: float, isolation_level: str, limits: dict[str, int]) -> Connection:
        if self._unlimited_statements:
            seconds = 0
        settings = {"statement_timeout": int(seconds * 1000), **limits}
        connection = self._server.connect(self._client, isolation_level=isolation_level, **settings)
        if seconds:
            connection.silence_limit = seconds + SILENCE_MARGIN
        return connection

    def _engine(self, creator: Callable[[Any], Any], dialect: Dialect, **options: Any) -> Engine:
        pool = HostPool(creator, host=self._server.host, dialect=dialect, **options)
        engine = Engine(pool, dialect, URL)
        engine._compiled_cache = COMPILED
        self._watch_pool(engine)
        return engine

    def prepare(self, policy: str = "auto") -> list[int]:
        """The schema is there."""
        return []
