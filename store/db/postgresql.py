"""Connections to PostgreSQL that wait for nothing without end: not for a host, a lock, a statement or an answer."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.types.json import set_json_dumps, set_json_loads

from understudy.config import redact, split_schema
from understudy.errors import InvalidConfiguration
from understudy.json_text import from_json, to_json

CONNECT_SECONDS = 5

JOURNAL_SECONDS = 30
"""Longest statement of the journal: all of them find their rows by a key, so one that takes longer than this is held
up by something that a new connection may not meet. Its group is committed again."""

READER_SECONDS = 60
"""Longest statement of a reader: some read whole transcripts. Migrations and maintenance have no limit."""

SILENCE_MARGIN = 5
"""A statement's limit is kept by the server. One that was cut off in such a way that its network still takes our bytes
can't tell: after so many seconds more without a byte from it, the connection is given up on this side."""

# A node that vanishes in the middle of a transaction holds locks on sessions until PostgreSQL notices, and whoever
# takes over waits for them: by default for hours. In milliseconds, for sessions of the journal.
TAKEOVER_LIMITS = {"idle_in_transaction_session_timeout": 5_000, "lock_timeout": 3_000}
SERVER_KEEPALIVE = {"tcp_keepalives_idle": 5, "tcp_keepalives_interval": 2, "tcp_keepalives_count": 3}

DEFAULTS: dict[str, Any] = {
    "connect_timeout": CONNECT_SECONDS,
    "application_name": "understudy",
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    # Keepalives rest while sent bytes wait for their receipt, which is when a host vanishes under load. Milliseconds.
    "tcp_user_timeout": 10_000,
}


class BoundedConnection(psycopg.Connection[Any]):
    """A connection that is closed when the server is silent for too long while we wait for it.

    Attributes:
        silence_limit: seconds; None for no limit.
    """

    silence_limit: float | None = None

    def wait(self, gen: Any, *arguments: Any, **options: Any) -> Any:
        if self.silence_limit is not None:
            gen = self._bounded(gen, self.silence_limit)
        return super().wait(gen, *arguments, **options)

    def _bounded(self, gen: Any, limit: float) -> Generator[Any, Any, Any]:
        """Psycopg's protocol: what to wait for goes out; what is ready comes in, every 0.1 s at least."""
        try:
            wanted = next(gen)
            deadline = time.monotonic() + limit
            while True:
                ready = yield wanted
                if ready:
                    deadline = time.monotonic() + limit
                elif time.monotonic() > deadline:
                    self.close()
                    raise psycopg.OperationalError(f"the server gave no answer for {limit:g} s")
                wanted = gen.send(ready)
        except StopIteration as end:
            return end.value


def _parameters(dsn: str) -> dict[str, Any]:
    """What a DSN says to libpq. Raises `InvalidConfiguration` if that can't read it."""
    try:
        given = conninfo_to_dict(split_schema(dsn)[0])
    except psycopg.ProgrammingError:  # whose words may hold a part of the password
        raise InvalidConfiguration(
            f"UNDERSTUDY_STORE={redact(dsn)!r} can't be read: special characters in a user's name or password must "
            "be percent-encoded, and parameters must be libpq's",
            details={"setting": "UNDERSTUDY_STORE"},
        ) from None
    several = "," in str(given.get("host", "")) or "," in str(given.get("hostaddr", ""))
    if several and "PGTARGETSESSIONATTRS" not in os.environ:
        given.setdefault("target_session_attrs", "read-write")  # after a failover, the one that is primary now
    return given


def without_password(dsn: str) -> tuple[str, str]:
    """What a DSN says, for the command line of libpq's own programs; and the password, which must not be there."""
    given = _parameters(dsn)
    password = given.pop("password", None) or ""
    return make_conninfo(**given), password


class Address:
    """A DSN as libpq understands it, several hosts, services and sslmode included, and the schema it names.

    Args:
        unlimited: statements may take as long as they need.

    Raises:
        InvalidConfiguration: libpq can't read it.
    """

    def __init__(self, dsn: str, *, unlimited: bool = False) -> None:
        self._unlimited = unlimited
        self.schema = split_schema(dsn)[1]
        self._parameters: dict[str, Any] = {**DEFAULTS, **_parameters(dsn)}

    def connect(self, statement_seconds: float, limits: dict[str, int]) -> BoundedConnection:
        """A new connection with these settings."""
        connection = BoundedConnection.connect(**self._parameters)
        set_json_dumps(to_json, connection)  # an engine's settings for it reach connections of its own making only
        set_json_loads(from_json, connection)
        if self._unlimited:
            statement_seconds = 0
        else:
            connection.silence_limit = statement_seconds + SILENCE_MARGIN
        settings = {"statement_timeout": int(statement_seconds * 1000), **limits}
        commands = [f"SET {name} = {value}" for name, value in settings.items()]
        if self.schema:
            commands.append(f'SET search_path TO "{self.schema}"')
        try:
            connection.autocommit = True
            connection.execute("; ".join(commands))
            connection.autocommit = False
        except BaseException:
            connection.close()
            raise
        return connection

    def connect_journal(self) -> BoundedConnection:
        """A connection for the one writer."""
        return self.connect(JOURNAL_SECONDS, {**TAKEOVER_LIMITS, **SERVER_KEEPALIVE})

    def connect_reader(self) -> BoundedConnection:
        """A connection for readers."""
        return self.connect(READER_SECONDS, {})
