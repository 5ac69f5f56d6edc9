"""The client's side of a connection: what SQLAlchemy and our code use of psycopg."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg

from .backend import KEEPALIVE_SECONDS, Backend, Result, Session, again
from .host import Host

T = TypeVar("T")
Values = Mapping[str, Any]


class Connection:
    """A connection to the simulated server.

    Attributes:
        silence_limit: seconds after which a silent server is given up; None for no limit but the network's.
        isolation_level: of the transactions that begin from now on.
    """

    def __init__(self, backend: Backend, session: Session, isolation_level: str) -> None:
        self._backend = backend
        self._session = session
        self._in_transaction = False
        self._pipeline: list[Callable[[], Result]] | None = None
        self.closed = False
        self.silence_limit: float | None = None
        self.isolation_level = isolation_level

    def cursor(self) -> Cursor:
        return Cursor(self)

    def execute(self, sql: str, values: Values) -> Result:
        """Execute one statement."""
        return self._send(lambda: self._run(sql, values))

    def executemany(self, sql: str, rows: Sequence[Values]) -> Result:
        """Execute one statement several times, without waiting for each."""
        return self._send(lambda: Result(count=sum(self._run(sql, values).count for values in rows)))

    def _run(self, sql: str, values: Values) -> Result:
        for value in values.values():
            if type(value) is str and "\0" in value:
                raise psycopg.DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes")
        return self._backend.execute(self._session, sql, values)

    def _send(self, work: Callable[[], Result]) -> Result:
        if not self._in_transaction:
            self._exchange("begin", lambda: self._backend.begin(self._session, self.isolation_level))
            self._in_transaction = True
        if self._pipeline is None:
            return self._exchange("execute", work)
        self._pipeline.append(work)
        return Result()

    @contextmanager
    def pipeline(self) -> Iterator[None]:
        """What is executed inside is sent at once at the end; the first error is raised there."""
        works = self._pipeline = []
        try:
            yield
        finally:
            self._pipeline = None
        if works:
            self._exchange("execute", lambda: [work() for work in works])

    def commit(self) -> None:
        self._end("commit", self._backend.commit)

    def rollback(self) -> None:
        self._end("rollback", self._backend.rollback)

    def _end(self, what: str, work: Callable[[Session], None]) -> None:
        if self._in_transaction:
            self._in_transaction = False
            self._exchange(what, lambda: work(self._session))

    def ping(self) -> None:
        """Ask whether the server is there, outside of any transaction."""
        self._exchange("execute", lambda: None)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._backend.close(self._session)

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

    def executemany(self, sql: str, rows: Sequence[Values]) -> Cursor:
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
