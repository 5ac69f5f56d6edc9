"""What a driver's error means: who is in the way, what is gone, what a person must mend. Pure functions.

PostgreSQL says it by SQLSTATE, SQLite by its result code. Only a refused connection has neither: libpq passes on the
server's words, so those of English servers are recognized; of others the message is the same and the hint is general.
"""

from __future__ import annotations

import re
import sqlite3

import psycopg

from understudy.config import redact
from understudy.errors import (
    StoreBusy,
    StoreError,
    StoreForbidden,
    StoreFull,
    StoreReadOnly,
    StoreRefused,
    StoreUnreachable,
)


class StoreRace(StoreError):
    """Another process wrote the same key at the same time: looking again shows what it wrote."""

    code = "store_race"


SQLSTATES: dict[str, type[StoreError]] = {
    "40001": StoreBusy,  # serialization failure
    "40P01": StoreBusy,  # deadlock
    "55P03": StoreBusy,  # a lock was not to be had in time
    "25006": StoreReadOnly,  # a primary that was demoted, or whose administrator stopped writes
    "25P03": StoreUnreachable,  # PostgreSQL ended our session: it was idle in a transaction (this process stood still)
    "25P04": StoreUnreachable,  # the same, for a transaction that took too long
    "40003": StoreUnreachable,  # whether it was committed is not known
    "53100": StoreFull,
    "42501": StoreForbidden,
    "28000": StoreRefused,
    "28P01": StoreRefused,
    "3D000": StoreRefused,
}
OUTAGES = ("08", "53", "57", "58")
"""Classes: connection, resources (memory, connections), operator (shutdown, start, statement timeout), system."""

REFUSED = re.compile(
    r"password authentication failed|no password supplied|(role|database) \".*\" does not exist|no pg_hba\.conf entry"
    r"|is not permitted to log in|permission denied for database|authentication failed"
)

RESULT_CODES: dict[int, type[StoreError]] = {
    sqlite3.SQLITE_BUSY: StoreBusy,
    sqlite3.SQLITE_LOCKED: StoreBusy,
    sqlite3.SQLITE_PROTOCOL: StoreBusy,  # the locks of the write-ahead log changed hands too often
    sqlite3.SQLITE_READONLY: StoreReadOnly,
    sqlite3.SQLITE_PERM: StoreReadOnly,
    sqlite3.SQLITE_FULL: StoreFull,
    sqlite3.SQLITE_IOERR: StoreUnreachable,
    sqlite3.SQLITE_CANTOPEN: StoreUnreachable,
    sqlite3.SQLITE_CONSTRAINT: StoreRace,
}


def kind_of(error: BaseException | None, *, lost: bool = False) -> type[StoreError]:
    """Which of our errors a driver's error is.

    Args:
        lost: its connection is gone, so whatever it says, another one is worth a try.
    """
    if isinstance(error, sqlite3.Error):
        return _of_sqlite(error)
    kind = _of_postgresql(error) if isinstance(error, psycopg.Error) else StoreError
    return StoreUnreachable if lost and not issubclass(kind, StoreUnreachable) else kind


def _of_sqlite(error: sqlite3.Error) -> type[StoreError]:
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:
        return StoreError
    if code == sqlite3.SQLITE_IOERR_WRITE:  # what the limit of a file's size and a quota are to SQLite
        return StoreFull
    return RESULT_CODES.get(code & 0xFF, StoreError)


def _of_postgresql(error: psycopg.Error) -> type[StoreError]:
    state = error.sqlstate
    if state is None:
        if not isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError)):
            return StoreError
        return StoreRefused if REFUSED.search(str(error)) else StoreUnreachable
    if state.startswith("23"):
        return StoreRace
    return SQLSTATES.get(state) or (StoreUnreachable if state.startswith(OUTAGES) else StoreError)


def is_outage(kind: type[StoreError]) -> bool:
    """Whether the connection is of no use any more, or may not be: the next try should make another."""
    return issubclass(kind, StoreUnreachable) and kind is not StoreBusy


def reason(error: BaseException | None) -> str:
    """The driver's words in one line, without passwords; of several hosts, what each of them said."""
    lines = str(error).strip().splitlines()
    hosts = [
        re.sub(r"^- host: .* hostaddr: ('[^']*'|None): ", "", line) for line in lines if line.startswith("- host: ")
    ]
    said = "; ".join(dict.fromkeys(hosts)) if hosts else lines[0] if lines else "no reason given"
    return f"{type(error).__name__}: {redact(said)}"
