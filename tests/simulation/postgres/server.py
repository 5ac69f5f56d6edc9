"""The simulated server as the simulation sees it: connections, deaths of clients, crashes, and what is committed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from sqlalchemy import Connection as SqlConnection
from sqlalchemy import Engine, make_url
from sqlalchemy.pool import StaticPool

from .backend import Backend, Result
from .dialect import Dialect
from .driver import Connection, Cursor
from .host import Host
from .storage import Storage, Values

DIALECT = Dialect()
URL = make_url("simulated://")

REFUSED = 'connection failed: connection to server at "simulated", port 5432 failed: '


class Server:
    """One PostgreSQL server.

    Args:
        on_commit: called after each transaction that has changed something, where nobody is suspended.
    """

    def __init__(self, host: Host, *, max_connections: int = 100, on_commit: Callable[[], None] = lambda: None) -> None:
        self.host = host
        self.backend = Backend(host, on_commit)
        self._max_connections = max_connections
        self._refuses_until = 0
        pool = StaticPool(lambda: Observer(self.backend.storage), dialect=DIALECT)  # type: ignore[arg-type,return-value]
        self._observer = Engine(pool, DIALECT, URL)

    def connect(self, client: str, *, isolation_level: str = "READ COMMITTED", **settings: int) -> Connection:
        """A new connection.

        Args:
            settings: limits in milliseconds, by the names that PostgreSQL gives them.
        """
        fault = self.host.round_trip(client, "connect")
        if fault == "refused":
            raise psycopg.OperationalError(REFUSED + "Connection refused")
        if fault == "hang":
            self.host.wait(self.host.signal(), 5.0)
            raise psycopg.errors.ConnectionTimeout("connection timeout expired")
        if fault:
            raise psycopg.OperationalError(REFUSED + "server closed the connection unexpectedly")
        if self.host.now() < self._refuses_until:
            raise psycopg.OperationalError(REFUSED + "FATAL:  the database system is starting up")
        if len(self.backend.sessions) >= self._max_connections:
            raise psycopg.OperationalError(REFUSED + "FATAL:  sorry, too many clients already")
        return Connection(self.backend, self.backend.open(client, settings), isolation_level)

    # Faults.

    def client_died(self, client: str, *, silently: bool = False) -> None:
        """A client's process was killed; silently: its whole host is gone, and nobody tells the server.

        To be called before its greenlets unwind, or they would close their connections.
        """
        for session in [session for session in self.backend.sessions.values() if session.client == client]:
            if silently:
                self.backend.vanish(session)
            else:
                self.backend.leave(session)

    def crash(self, seconds: float) -> None:
        """Lose all sessions, and refuse connections for a while. Commits that hang end as they were to end."""
        self._refuses_until = self.host.now() + int(seconds * 1e6)
        for session in list(self.backend.sessions.values()):
            self.backend.end_late(session)
            self.backend.end(session)

    def accept(self) -> None:
        """It is up again, if it was starting."""
        self._refuses_until = 0

    # What invariants and tests look at.

    @contextmanager
    def committed(self) -> Iterator[SqlConnection]:
        """What is committed, past all sessions, locks and faults."""
        with self._observer.connect() as connection:
            yield connection

    @property
    def commits(self) -> int:
        """Transactions that changed something and were committed."""
        return self.backend.commits

    @property
    def waits(self) -> int:
        """How often somebody had to wait for a lock."""
        return self.backend.locks.waits

    def open_transactions(self) -> list[str]:
        """The clients of sessions that are in a transaction."""
        return [session.client for session in self.backend.sessions.values() if session.transaction is not None]

    def waiting(self) -> dict[str, list[str]]:
        """The clients that wait for a lock, each with those that it waits for."""
        found: dict[str, list[str]] = {}
        for session in self.backend.sessions.values():
            wait = session.transaction.waiting if session.transaction is not None else None
            if wait is not None:
                found[session.client] = [owner.session.client for owner in wait.lock.blockers(wait)]  # type: ignore[attr-defined]
        return found

    def locks_held(self) -> int:
        """How many locks there are, on rows, numbers and transactions."""
        return self.backend.locks.count()


class Observer:
    """A connection that sees what is committed, at once and for nothing."""

    closed = False

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def cursor(self) -> Cursor:
        return Cursor(self)  # type: ignore[arg-type]

    def execute(self, sql: str, values: Values) -> Result:
        cursor: Any = self._storage.read(None, sql, values)
        return Result(cursor.fetchall(), -1, cursor.description)

    def commit(self) -> None:
        """There is no transaction."""

    rollback = close = commit
