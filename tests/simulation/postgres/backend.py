"""What the server does for each client: transactions, statements with their waits, and how sessions end."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import psycopg
from psycopg import errors

from .host import Host, Signal
from .locks import EXCLUSIVE, Locks, Owner, Wait
from .parsing import ROWID, Advisory, Change, Insert, LockRows, NotSimulated, Read, Setting, Statement, parse
from .storage import Storage, Values, View, tables

DEADLOCK_SECONDS = 1.0
KEEPALIVE_SECONDS = 11.0
"""After so long PostgreSQL notices that a client's host is gone: see `SERVER_KEEPALIVE`."""

Key = tuple[str, tuple[Any, ...]]
"""A unique index, and a key in it."""

GONE = "server closed the connection unexpectedly"


@dataclasses.dataclass
class Result:
    """What a statement returned."""

    rows: Sequence[Sequence[Any]] = ()
    count: int = -1
    description: Any = None


class Transaction(Owner):
    """One transaction.

    Attributes:
        view: what it sees.
        is_snapshot: it sees what was committed before its first statement, and only reads.
        keys: of unique indexes that it has filled.
        failed: it is rolled back, and takes no statements any more.
        began: how many commits there were before its statement.
    """

    def __init__(self, session: Session, *, is_snapshot: bool) -> None:
        super().__init__()
        self.session = session
        self.view = View()
        self.is_snapshot = is_snapshot
        self.sees_snapshot = False
        self.keys: list[Key] = []
        self.failed = False
        self.began = 0


class Session:
    """The server's side of a connection.

    Attributes:
        settings: limits in milliseconds, 0 for none; `local` has those of the transaction.
        ended: why there is no such session any more.
        vanished: nothing that its client sends arrives.
        left: its client is gone, and the server has not noticed yet, since it waits for a lock or for its commit.
        committing: set when its commit, which hangs, has ended.
    """

    def __init__(self, number: int, client: str, settings: dict[str, int]) -> None:
        self.number = number
        self.client = client
        self.settings = settings
        self.local: dict[str, int] = {}
        self.transaction: Transaction | None = None
        self.ended: psycopg.Error | None = None
        self.vanished = False
        self.left = False
        self.committing: Signal | None = None
        self.takes_effect = False
        self.idle_since: int | None = None
        self.watched = False
        self.deadline: int | None = None

    def limit(self, name: str) -> int:
        """Microseconds; 0 for none."""
        return 1000 * self.local.get(name, self.settings.get(name, 0))


class Backend:
    """The server without its connections."""

    def __init__(self, host: Host, on_commit: Callable[[], None]) -> None:
        self.host = host
        self._on_commit = on_commit
        self.storage = Storage()
        self.sessions: dict[int, Session] = {}
        self.locks = Locks(host.now, self._woken)
        self.commits = 0
        self.deadlocks: list[str] = []
        self._numbers = 0
        self._keys: dict[Key, Transaction] = {}
        self._writers: dict[Hashable, Transaction] = {}
        self._versions: dict[Hashable, int] = {}
        self._tables = tables()

    # Sessions.

    def open(self, client: str, settings: dict[str, int]) -> Session:
        """A new session."""
        self._numbers += 1
        session = self.sessions[self._numbers] = Session(self._numbers, client, settings)
        return session

    def end(self, session: Session, reason: psycopg.Error | None = None) -> None:
        """End a session now; what it has not committed is gone."""
        if session.ended is not None:
            return
        session.ended = reason or psycopg.OperationalError(GONE)
        del self.sessions[session.number]
        transaction, session.transaction = session.transaction, None
        if transaction is not None:
            if transaction.waiting is not None:
                signal = transaction.waiting.signal
                self.locks.give_up(transaction.waiting)
                if signal is not None:
                    signal.set()
            self._abort(transaction)
        if session.committing is not None:
            session.committing.set()

    def close(self, session: Session) -> None:
        """The client closes its connection."""
        if not session.vanished:
            self.leave(session)

    def leave(self, session: Session) -> None:
        """The client is gone: the server notices when it does nothing else."""
        transaction = session.transaction
        is_waiting = transaction is not None and transaction.waiting is not None
        if session.ended is not None:
            return
        if not is_waiting and session.committing is None:
            self.end(session)
            return
        session.left = True
        limit = session.limit("lock_timeout")
        if transaction is not None and transaction.waiting is not None and limit:
            since = transaction.waiting.since
            self.host.call_later((since + limit - self.host.now()) / 1e6, lambda: self.end(session))

    def vanish(self, session: Session) -> None:
        """The server hears nothing of a client any more, not even that it is gone."""
        session.vanished = True
        self.host.call_later(KEEPALIVE_SECONDS, lambda: self.leave(session))

    def rest(self, session: Session) -> None:
        """Nothing is asked of a session now: from here on it may be idle in its transaction for so long."""
        session.idle_since = self.host.now()
        limit = session.limit("idle_in_transaction_session_timeout")
        if session.transaction is not None and limit and not session.watched:
            session.watched = True
            self.host.call_later(limit / 1e6, lambda: self._look_after(session))

    def _look_after(self, session: Session) -> None:
        session.watched = False
        limit = session.limit("idle_in_transaction_session_timeout")
        if session.ended is not None or session.transaction is None:
            return
        idle = 0 if session.idle_since is None else self.host.now() - session.idle_since
        if idle >= limit:
            reason = "terminating connection due to idle-in-transaction timeout"
            self.end(session, errors.IdleInTransactionSessionTimeout(reason))
        else:
            session.watched = True
            self.host.call_later((limit - idle) / 1e6, lambda: self._look_after(session))

    # Transactions.

    def begin(self, session: Session, isolation: str) -> None:
        session.transaction = Transaction(session, is_snapshot=isolation != "READ COMMITTED")

    def commit(self, session: Session) -> None:
        """Commit; of a transaction that has failed nothing is left."""
        transaction = session.transaction
        changed = False
        if transaction is not None and not transaction.failed:
            changed = bool(transaction.view.written)
            self.commits += changed
            self._versions.update(dict.fromkeys(transaction.view.written, self.commits))
            self.storage.commit(transaction.view)
            self._finish(transaction)
        self._forget(session)
        if changed:
            self._on_commit()

    def commit_late(self, session: Session, seconds: float, takes_effect: bool) -> Signal:
        """A commit that ends after a while, or when the server crashes; whoever waits for it waits for the signal."""
        session.takes_effect = takes_effect
        session.committing = signal = self.host.signal()
        session.idle_since = None
        self.host.call_later(seconds, lambda: self.end_late(session))
        return signal

    def end_late(self, session: Session) -> None:
        """A commit that hangs has ended."""
        signal = session.committing
        if session.ended is not None or signal is None:
            return
        session.committing = None
        if session.takes_effect:
            self.commit(session)
        if session.left or not session.takes_effect:
            self.end(session)
        signal.set()

    def rollback(self, session: Session) -> None:
        if session.transaction is not None:
            self._abort(session.transaction)
        self._forget(session)

    def _forget(self, session: Session) -> None:
        session.transaction = None
        session.local = {}

    def _abort(self, transaction: Transaction) -> None:
        if not transaction.failed:
            transaction.failed = True
            self.storage.discard(transaction.view)
            self._finish(transaction)

    def _finish(self, transaction: Transaction) -> None:
        if transaction.sees_snapshot:
            self.storage.let_go(transaction.view)
        for key in transaction.keys:
            self._keys.pop(key, None)
        for row in transaction.view.written:
            self._writers.pop(row, None)
        self.locks.release_all(transaction, () if transaction.failed else transaction.view.written)

    # Statements.

    def execute(self, session: Session, sql: str, values: Values) -> Result:
        """Execute a statement in the session's transaction, which an error ends."""
        transaction = session.transaction
        assert transaction is not None
        if transaction.failed:
            raise errors.InFailedSqlTransaction(
                "current transaction is aborted, commands ignored until end of transaction block"
            )
        limit = session.limit("statement_timeout")
        session.deadline = self.host.now() + limit if limit else None
        session.idle_since = None
        transaction.began = self.commits
        try:
            results = [self._execute(transaction, statement, values) for statement in parse(sql)]
        except psycopg.Error:
            self._abort(transaction)
            raise
        if len(results) == 1:
            return results[0]
        return Result(count=sum(result.count for result in results))

    def _execute(self, transaction: Transaction, statement: Statement, values: Values) -> Result:
        if transaction.is_snapshot and not isinstance(statement, Setting):
            if not isinstance(statement, Read):
                raise NotSimulated("a snapshot only reads")
            if not transaction.sees_snapshot:
                transaction.sees_snapshot = True
                self.storage.keep(transaction.view)
        match statement:
            case Read():
                return _result(self.storage.read(transaction.view, statement.sql, values))
            case LockRows():
                return self._lock_rows(transaction, statement, values)
            case Change():
                return self._change(transaction, statement, values)
            case Insert():
                return self._insert(transaction, statement, values)
            case Advisory():
                return self._advisory(transaction, statement, values)
            case Setting():
                settings = transaction.session.local if statement.local else transaction.session.settings
                settings[statement.name] = int(statement.value)
                return Result()

    def _lock_rows(self, transaction: Transaction, statement: LockRows, values: Values) -> Result:
        view, table, one = transaction.view, statement.table, statement.one
        cursor = self.storage.read(view, statement.sql, values)
        description, found = cursor.description[:-1], cursor.fetchall()
        rows: list[Sequence[Any]] = []
        waited = False
        for columns in found:
            row = columns[-1]
            if statement.skip and not self.locks.is_free(transaction, row, statement.mode):
                continue
            if not statement.wait and not self.locks.is_free(transaction, row, statement.mode):
                raise errors.LockNotAvailable(f'could not obtain lock on row in relation "{table}"')
            waited |= self._take(transaction, row, statement.mode)
            if not waited:
                rows.append(columns[:-1])
            elif self._is_there(transaction, table, row):  # as others have left it; perhaps it does not match any more
                rows += self.storage.read(view, one, {**values, ROWID: row}).fetchall()
        return Result(rows, len(rows), description)

    def _is_there(self, transaction: Transaction, table: str, row: int) -> bool:
        """Whether a row was not deleted while it was waited for; of one that was nothing is left to be locked."""
        there = self.storage.exists(transaction.view, table, row)
        if not there:
            self.locks.release(transaction, row)
        return there

    def _change(self, transaction: Transaction, statement: Change, values: Values) -> Result:
        table = statement.table
        if any(statement.sets.intersection(columns) for columns in self._tables[table].unique.values()):
            raise NotSimulated(f"keys are not changed: {statement.sql}")
        rows = [row for (row,) in self.storage.read(transaction.view, statement.find, values)]
        if all(self.locks.is_free(transaction, row, EXCLUSIVE) for row in rows):
            for row in rows:
                self._take(transaction, row, EXCLUSIVE)
            return Result(count=self._write(transaction, statement.sql, values, table, rows) if rows else 0)
        count = 0
        for row in rows:
            self._take(transaction, row, EXCLUSIVE)
            changed = self._write(transaction, statement.one, {**values, ROWID: row}, table, [row])
            count += changed
            if not changed:
                self._is_there(transaction, table, row)
        return Result(count=count)

    def _write(self, transaction: Transaction, sql: str, values: Values, table: str, rows: Sequence[int]) -> int:
        count = self.storage.write(transaction.view, sql, values)
        if count:
            for row in rows:
                self._writers[row] = transaction
                transaction.view.written[row] = table
        return count

    def _insert(self, transaction: Transaction, statement: Insert, values: Values) -> Result:
        table, row = statement.table, self.storage.new_row()
        keys = self._keys_of(transaction, statement, values)
        with_row = {**values, ROWID: row}
        if statement.target is None and all(self._keys.get(key, transaction) is transaction for key in keys):
            try:
                return self._fill(transaction, statement, with_row, row, keys)
            except sqlite3.IntegrityError:
                pass  # a row has one of the keys: which, and whose is it?
        for index, key in keys:
            is_target = self._tables[table].unique[index] == statement.target
            locks = is_target and not statement.does_nothing
            found = self._row_with(transaction, table, index, key, locks=locks)
            if found is not None and is_target:
                return Result(count=self._write(transaction, statement.sql, with_row, table, [found] if locks else []))
            if found is not None:
                raise errors.UniqueViolation(f'duplicate key value violates unique constraint "{index}"')
            self._keys[index, key] = transaction
            transaction.keys.append((index, key))
        return self._fill(transaction, statement, with_row, row, keys)

    def _fill(self, transaction: Transaction, statement: Insert, values: Values, row: int, keys: list[Key]) -> Result:
        count = self._write(transaction, statement.sql, values, statement.table, [row])
        self._keys.update(dict.fromkeys(keys, transaction))
        transaction.keys += keys
        return Result(count=count)

    def _row_with(
        self, transaction: Transaction, table: str, index: str, key: tuple[Any, ...], *, locks: bool
    ) -> int | None:
        """The row that has a key, after the end of everybody who may give it away or take it."""
        while True:
            other = self._keys.get((index, key), transaction)
            if other is transaction:
                row = self.storage.find(transaction.view, table, index, key)
                if row is None:
                    return None
                other = self._writers.get(row, transaction)
                if other is transaction:
                    if locks:
                        self._take(transaction, row, EXCLUSIVE)
                    if not locks or self._is_there(transaction, table, row):
                        return row
                    continue
            self._wait_for_end(transaction, other)

    def _keys_of(self, transaction: Transaction, statement: Insert, values: Values) -> list[Key]:
        """The key of a new row in each unique index; without those that have a NULL."""
        keys = []
        for index, columns in statement.keys:
            if isinstance(columns, str):
                key = self.storage.read(transaction.view, columns, values).fetchone()
            else:
                key = tuple([values[name] for name in columns])
            if None not in key:
                keys.append((index, key))
        return keys

    def _advisory(self, transaction: Transaction, statement: Advisory, values: Values) -> Result:
        cursor = self.storage.read(transaction.view, statement.keys, values)
        rows: list[tuple[Any, ...]] = []
        for (key,) in cursor.fetchall():
            name = ("advisory", key)
            free = self.locks.is_free(transaction, name, statement.mode)
            if free or not statement.tries:
                self._take(transaction, name, statement.mode)
            rows.append((free if statement.tries else "",))
        return Result(rows, len(rows), cursor.description)

    # Waiting.

    def _take(self, transaction: Transaction, key: Hashable, mode: int) -> bool:
        """Take a lock; returns whether anybody had to be waited for."""
        wait = self.locks.take(transaction, key, mode, strays=self._strays(transaction, key))
        if wait is not None:
            self._wait(transaction.session, wait)
        return wait is not None

    def _strays(self, transaction: Transaction | None, key: Hashable) -> bool:
        """Whether a statement comes to a row from an old version of it, and somebody is about to make another."""
        assert transaction is not None
        return key in self._writers and self._versions.get(key, 0) > transaction.began

    def _wait_for_end(self, transaction: Transaction, other: Transaction) -> None:
        wait = self.locks.end_of(other, transaction)
        assert wait is not None
        self._wait(transaction.session, wait)
        self.locks.release(transaction, other)

    def _wait(self, session: Session, wait: Wait) -> None:
        """Suspend the caller until it has the lock; raises if that takes too long, or never ends."""
        while True:
            error, until = self._next_limit(session, wait)
            if until is not None and until <= self.host.now():
                wait.searched = True
                if error is None and self.locks.is_in_deadlock(wait):
                    error = errors.DeadlockDetected("deadlock detected")
                    self.deadlocks.append(session.client)
                if error is not None:
                    self.locks.give_up(wait)
                    raise error
                continue
            wait.signal = self.host.signal()
            self.host.wait(wait.signal, None if until is None else (until - self.host.now()) / 1e6)
            if session.ended is not None:
                raise again(session.ended)
            if self.locks.try_again(wait, strays=self._strays(session.transaction, wait.key)):
                return

    def _next_limit(self, session: Session, wait: Wait) -> tuple[psycopg.Error | None, int | None]:
        """Until when it may wait, and what follows then; no error: it looks for a deadlock."""
        limits: list[tuple[int, psycopg.Error | None]] = []
        if not wait.searched:
            limits.append((wait.since + int(DEADLOCK_SECONDS * 1e6), None))
        if limit := session.limit("lock_timeout"):
            limits.append((wait.since + limit, errors.LockNotAvailable("canceling statement due to lock timeout")))
        if session.deadline is not None:
            error = errors.QueryCanceled("canceling statement due to statement timeout")
            limits.append((session.deadline, error))
        if not limits:
            return None, None
        until, error_then = min(limits, key=lambda limit: limit[0])
        return error_then, until

    def _woken(self, wait: Wait) -> None:
        transaction = wait.owner
        assert isinstance(transaction, Transaction)
        if transaction.session.left and not wait.lock.blockers(wait):
            self.end(transaction.session)
        elif wait.signal is not None:
            wait.signal.set()


def again(error: psycopg.Error) -> psycopg.Error:
    """The same error, to be raised by another caller."""
    return type(error)(*error.args)


def _result(cursor: sqlite3.Cursor) -> Result:
    rows = cursor.fetchall()
    return Result(rows, len(rows), cursor.description)
