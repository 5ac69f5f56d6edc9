"""The client's side of a connection: what SQLAlchemy and our code use of psycopg."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg

from .backend import GONE, KEEPALIVE_SECONDS, Backend, Result, Session, again
from .host import Host

T = TypeVar("T")

Error = psycopg.Error
Rows = Sequence[Mapping[str, Any]]


class Connection:
    """A connection to the simulated server.

    Attributes:
        silence_limit: seconds after which a silent server is given up; None for no limit but the network's.
    """

    def __init__(self, backend: Backend, session: Session) -> None:
        self._backend = backend
        self._session = session
        self._pipeline: list[Callable[[], Any]] | None = None
        self.closed = False
        self.silence_limit: float | None = None
        self.autocommit = False

    @property
    def broken(self) -> bool:
        """Whether it was closed by somebody else."""
        return self.closed

    @property
    def isolation_level(self) -> str:
        return self._session.isolation

    @isolation_level.setter
    def isolation_level(self, level: str) -> None:
        self._session.isolation = level

    def cursor(self) -> Cursor:
        return Cursor(self)

    def execute(self, sql: str, values: Mapping[str, Any]) -> Result:
        """Execute one statement."""
        return self._send("execute", lambda: self._run(sql, values))

    def executemany(self, sql: str, rows: Rows) -> Result:
        """Execute one statement several times, without waiting for each."""
        return self._send("execute", lambda: Result(count=sum(self._run(sql, values).count for values in rows)))

    def _run(self, sql: str, values: Mapping[str, Any]) -> Result:
        if any(type(value) is str and "\0" in value for value in values.values()):
            raise psycopg.DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes")
        return self._backend.execute(self._session, sql, values)

    def _send(self, what: str, work: Callable[[], Result]) -> Result:
        if self._session.transaction is None:
            self._exchange("begin", lambda: self._backend.begin(self._session))
        if self._pipeline is not None:
            self._pipeline.append(work)
            return Result()
        result = self._exchange(what, work)
        if self.autocommit:
            self.commit()
        return result

    @contextmanager
    def pipeline(self) -> Iterator[None]:
        """What is executed inside is sent at once at the end; the first error is raised there."""
        self._pipeline = []
        try:
            yield
            works, self._pipeline = self._pipeline, None
            if works:
                self._exchange("execute", lambda: [work() for work in works])
        finally:
            self._pipeline = None

    def commit(self) -> None:
        if self._session.transaction is not None or self.closed:
            self._exchange("commit", lambda: self._backend.commit(self._session))

    def rollback(self) -> None:
        if self._session.transaction is not None or self.closed:
            self._exchange("rollback", lambda: self._backend.rollback(self._session))

    def ping(self) -> None:
        """Ask whether the server is there, outside of any transaction."""
        self._exchange("execute", lambda: None)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._backend.leave(self._session)

    # Round trips.

    def _exchange(self, what: str, work: Callable[[], T]) -> T:
        """One message to the server, and its reply."""
        if self.closed:
            raise psycopg.OperationalError("the connection is closed")
        fault = self._backend.host.round_trip(self._session.client, what)
        if self._session.ended is None and fault == "lost_before":
            self._backend.end(self._session)
        self._require_session()
        if fault == "hang" and what == "commit":
            return self._hang()  # type: ignore[return-value]
        if fault == "hang":
            self._backend.vanish(self._session)
            self._wait_in_vain()
        try:
            result = work()
        except psycopg.Error:
            self._require_session()
            raise
        if fault == "lost_after":
            self._backend.end(self._session)
        self._require_session()
        self._backend.rest(self._session)
        return result

    def _require_session(self) -> None:
        ended = self._session.ended
        if ended is not None:
            self.closed = True
            raise again(ended)

    def _hang(self) -> None:
        """A commit that takes longer than the client may wait."""
        host: Host = self._backend.host
        signal = self._backend.commit_late(self._session, *host.hanging(self._session.client))
        if not host.wait(signal, self.silence_limit):
            self._give_up()
        self._require_session()

    def _wait_in_vain(self) -> None:
        host: Host = self._backend.host
        host.wait(host.signal(), self.silence_limit or KEEPALIVE_SECONDS)
        self._give_up()

    def _give_up(self) -> None:
        self.close()
        raise psycopg.OperationalError(f"the server gave no answer for {self.silence_limit or KEEPALIVE_SECONDS:g} s")


class Cursor:
    """Executes statements and holds their rows."""

    arraysize = 1
    lastrowid = None

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._take(Result())

    def _take(self, result: Result) -> None:
        self.description = result.description
        self.rowcount = result.count
        self._rows = iter(result.rows)

    def execute(self, sql: str, values: Any = None) -> Cursor:
        self._take(self.connection.execute(sql, values or {}))
        return self

    def executemany(self, sql: str, rows: Rows) -> Cursor:
        self._take(self.connection.executemany(sql, rows))
        return self

    def fetchone(self) -> Any:
        return next(self._rows, None)

    def fetchmany(self, size: int | None = None) -> list[Any]:
        return [row for _, row in zip(range(size or self.arraysize), self._rows, strict=False)]

    def fetchall(self) -> list[Any]:
        return list(self._rows)

    def __iter__(self) -> Iterator[Any]:
        return self._rows

    def close(self) -> None:
        self._rows = iter(())


def lost(what: str = GONE) -> psycopg.OperationalError:
    """The error of a connection that broke."""
    return psycopg.OperationalError(what)
