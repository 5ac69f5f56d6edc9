"""The same schedule on two servers, step by step: what each step returned, who waits after it, and what is left.

A schedule is made up while it runs: each step is a statement of a session that does not wait. A step is over when
everybody who has something to do has done it or waits for a lock.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import IsolationLevel

from .round_robin import RoundRobin, Task
from .simulation.postgres.driver import Connection
from .simulation.postgres.server import Server

NAMES = "abcd"
TABLES = {"timer": "name", "event": "seq", "export_cursor": "sink"}
DEADLOCK_SECONDS = 0.004
MOST_ORDERS = 1000


@dataclass(frozen=True)
class Step:
    """What a session does."""

    session: int
    sql: str
    values: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.session}: " + re.sub(r":(\w+)", lambda found: repr(self.values[found[1]]), self.sql)


@dataclass(frozen=True)
class Seen:
    """What a step led to: the answer of each session that got one, and who waits now."""

    answers: dict[int, Any]
    waiting: tuple[int, ...]


FILL = (
    *(f"INSERT INTO timer (namespace, session_id, name, due_at) VALUES ('n', 's', '{name}', {number})"
      for number, name in enumerate(NAMES[:3])),
    *(f"INSERT INTO event (namespace, session_id, seq, v, writer, writer_seq, type, at) "
      f"VALUES ('n', 's', {number}, 1, 'w', {number}, 't', 0)" for number in (1, 2)),
    "INSERT INTO export_cursor (namespace, writer, sink, writer_seq) VALUES ('n', 'w', 'a', 5)",
)  # fmt: skip

KEY = "namespace = 'n' AND session_id = 's'"


class Author:
    """Makes up what sessions do."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.sessions = self.random.randint(2, 4)
        self.length = self.random.randint(8, 30)
        self.snapshots: set[int] = set()
        self.open: set[int] = set()

    def step(self, session: int) -> Step:
        """The next thing that a session does."""
        chance = self.random.random()
        if session in self.open and chance < 0.25:
            self.open.discard(session)
            self.snapshots.discard(session)
            return Step(session, self.random.choice(("COMMIT", "COMMIT", "ROLLBACK")))
        if session not in self.open and chance < 0.08:
            self.snapshots.add(session)
            return Step(session, "SNAPSHOT")
        self.open.add(session)
        if session in self.snapshots:
            return Step(session, *self._read())
        makers = (self._read, self._lock, self._lock, self._update, self._update, self._insert, self._delete,
                  self._event, self._upsert, self._advisory)  # fmt: skip
        return Step(session, *self.random.choice(makers)())

    def _names(self) -> str:
        names = self.random.sample(NAMES, self.random.randint(1, 3))
        return "(" + ", ".join(f"'{name}'" for name in names) + ")"

    def _read(self) -> tuple[str, dict[str, Any]]:
        return self.random.choice((
            (f"SELECT name, due_at FROM timer WHERE {KEY} ORDER BY name", {}),
            (f"SELECT count(*), max(due_at) FROM timer WHERE {KEY} AND name IN {self._names()}", {}),
            (f"SELECT seq, writer_seq, at FROM event WHERE {KEY} ORDER BY seq DESC", {}),
            ("SELECT sink, writer_seq FROM export_cursor ORDER BY sink", {}),
        ))  # fmt: skip

    def _lock(self) -> tuple[str, dict[str, Any]]:
        order = self.random.choice((" ORDER BY name", " ORDER BY name", " ORDER BY name DESC", ""))
        mode = self.random.choice(("UPDATE", "UPDATE", "SHARE"))
        wait = self.random.choice(("", "", "", " NOWAIT", " SKIP LOCKED"))
        where = self.random.choice((f"name IN {self._names()}", f"name IN {self._names()} AND due_at + 0 > 1"))
        return f"SELECT name, due_at FROM timer WHERE {KEY} AND {where}{order} FOR {mode}{wait}", {}

    def _update(self) -> tuple[str, dict[str, Any]]:
        number, change = self.random.randint(0, 4), self.random.choice(("due_at + 1", "due_at - 1", ":x"))
        where = self.random.choice((
            f"name IN {self._names()}", f"name IN {self._names()} AND due_at + 0 = :n", "due_at + 0 >= :n",
        ))  # fmt: skip
        sql = f"UPDATE timer SET due_at = {change} WHERE {KEY} AND {where}"
        values = {"n": number, "x": self.random.randint(0, 4)}
        return sql, {name: value for name, value in values.items() if f":{name}" in sql}

    def _insert(self) -> tuple[str, dict[str, Any]]:
        values = {"name": self.random.choice(NAMES), "due": self.random.randint(0, 4)}
        return "INSERT INTO timer (namespace, session_id, name, due_at) VALUES ('n', 's', :name, :due)", values

    def _delete(self) -> tuple[str, dict[str, Any]]:
        where = self.random.choice((f"name IN {self._names()}", f"name = '{self.random.choice(NAMES)}'"))
        return f"DELETE FROM timer WHERE {KEY} AND {where}", {}

    def _event(self) -> tuple[str, dict[str, Any]]:
        values = {"seq": self.random.randint(1, 5), "writer": self.random.randint(1, 5)}
        insert = (
            "INSERT INTO event (namespace, session_id, seq, v, writer, writer_seq, type, at) "
            "VALUES ('n', 's', :seq, 1, 'w', :writer, 't', 0)"
        )
        return self.random.choice((
            (insert, values), (insert, values),
            (f"DELETE FROM event WHERE {KEY} AND seq <= :seq", {"seq": values["seq"]}),
            (f"UPDATE event SET at = at + 1 WHERE {KEY} AND seq = :seq", {"seq": values["seq"]}),
        ))  # fmt: skip

    def _upsert(self) -> tuple[str, dict[str, Any]]:
        values = {"sink": self.random.choice("ab"), "seq": self.random.randint(0, 9)}
        return self.random.choice((
            (
                "INSERT INTO export_cursor (namespace, writer, sink, writer_seq) VALUES ('n', 'w', :sink, :seq) "
                "ON CONFLICT (namespace, writer, sink) DO UPDATE SET writer_seq = excluded.writer_seq "
                "WHERE excluded.writer_seq >= export_cursor.writer_seq",
                values,
            ),
            ("DELETE FROM export_cursor WHERE namespace = 'n' AND sink = :sink", {"sink": values["sink"]}),
        ))  # fmt: skip

    def _advisory(self) -> tuple[str, dict[str, Any]]:
        name = self.random.choice(("pg_advisory_xact_lock", "pg_advisory_xact_lock", "pg_advisory_xact_lock_shared",
                                   "pg_try_advisory_xact_lock", "pg_try_advisory_xact_lock_shared"))  # fmt: skip
        return f"SELECT {name}(:key)", {"key": self.random.randint(1, 2)}


def answer_of(rows: list[Any] | None, count: int, error: BaseException | None) -> Any:
    """What a session received, in a form that can be compared."""
    if error is not None:
        if not isinstance(error, psycopg.Error):
            raise error
        return error.sqlstate or type(error).__name__
    return count if rows is None else [tuple(row) for row in rows]


# The simulated server.


class Simulated:
    """Sessions as greenlets."""

    def __init__(self, sessions: int, choices: Sequence[int] = ()) -> None:
        self.host = RoundRobin(choices)
        self.server = Server(self.host)
        self.connections: list[Connection] = []
        self._run(self._fill)
        self._run(lambda: self.connections.extend(self.server.connect(str(number)) for number in range(sessions)))
        self._tasks: dict[int, Task] = {}

    def _run(self, function: Any) -> None:
        task = self.host.start("test", function)
        self.host.run_until_idle()
        assert task.error is None

    def _fill(self) -> None:
        connection = self.server.connect("test")
        for sql in FILL:
            connection.execute(sql, {})
        connection.commit()

    def step(self, step: Step) -> Seen:
        self._tasks[step.session] = self.host.start(str(step.session), lambda: self._do(step))
        self.host.run_until_idle()
        if self.server.waiting():
            self.host.run(10)  # who is in a deadlock finds out
        done = {number: task for number, task in sorted(self._tasks.items()) if task.done}
        answers = {
            number: task.result if task.error is None else answer_of(None, 0, task.error)
            for number, task in done.items()
        }
        for number in done:
            del self._tasks[number]
        return Seen(answers, tuple(sorted(self._tasks)))

    def _do(self, step: Step) -> Any:
        connection = self.connections[step.session]
        match step.sql:
            case "COMMIT":
                connection.commit()
            case "ROLLBACK":
                connection.rollback()
            case "SNAPSHOT":
                connection.isolation_level = "REPEATABLE READ"
            case _:
                result = connection.execute(step.sql, step.values)
                return answer_of(list(result.rows) if result.description else None, result.count, None)
        if step.sql != "SNAPSHOT":
            connection.isolation_level = "READ COMMITTED"
        return "done"

    def tables(self) -> dict[str, list[Any]]:
        with self.server.committed() as connection:
            return {
                name: [tuple(row) for row in connection.exec_driver_sql(f"SELECT * FROM {name} ORDER BY {order}")]
                for name, order in TABLES.items()
            }


# The real server.


class Real:
    """Sessions as connections, each with a task while it has something to do."""

    def __init__(self, connections: list[psycopg.AsyncConnection[Any]], monitor: psycopg.AsyncConnection[Any]) -> None:
        self._connections = connections
        self._monitor = monitor
        self._pids = {connection.info.backend_pid: number for number, connection in enumerate(connections)}
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self._searched: dict[int, Any] = {}
        self.patience = 1.0

    async def empty(self) -> None:
        """Reset the connections and the tables."""
        for connection in self._connections:
            await connection.rollback()
            await connection.set_isolation_level(None)
        for table in TABLES:
            await self._monitor.execute(f"DELETE FROM {table}")
        for sql in FILL:
            await self._monitor.execute(sql)

    async def step(self, step: Step) -> Seen:
        self._tasks[step.session] = asyncio.create_task(self._do(step))
        answers: dict[int, Any] = {}
        while True:
            await asyncio.wait(self._tasks.values(), timeout=0.001, return_when=asyncio.FIRST_COMPLETED)
            for number in [number for number, task in self._tasks.items() if task.done()]:
                task = self._tasks.pop(number)
                answers[number] = answer_of(None, 0, task.exception()) if task.exception() else task.result()
                self._searched.pop(number, None)
            if not self._tasks or (not any(task.done() for task in self._tasks.values()) and await self._all_wait()):
                return Seen(dict(sorted(answers.items())), tuple(sorted(self._tasks)))

    async def _all_wait(self) -> bool:
        """Whether everybody waits for a lock, and nobody is in a deadlock that PostgreSQL has yet to find."""
        sql = "SELECT pid, pg_blocking_pids(pid), waitstart FROM pg_locks WHERE NOT granted AND pid = ANY(%s)"
        rows = await (await self._monitor.execute(sql, (list(self._pids),))).fetchall()
        blockers = {self._pids[pid]: [self._pids.get(other, -1) for other in others] for pid, others, _ in rows}
        since = {self._pids[pid]: begin for pid, _, begin in rows}
        if blockers.keys() != self._tasks.keys() or not all(blockers.values()) or _has_circle(blockers):
            return False
        if since != self._searched:
            self._searched = since
            await asyncio.sleep(DEADLOCK_SECONDS * 2 * self.patience)  # they look for a deadlock now, and not later
            return False
        return True

    async def _do(self, step: Step) -> Any:
        connection = self._connections[step.session]
        match step.sql:
            case "COMMIT":
                await connection.commit()
            case "ROLLBACK":
                await connection.rollback()
            case "SNAPSHOT":
                await connection.set_isolation_level(IsolationLevel.REPEATABLE_READ)
            case _:
                sql = re.sub(r":(\w+)", r"%(\1)s", step.sql)
                cursor = await connection.execute(sql, step.values or None)
                rows = await cursor.fetchall() if cursor.description else None
                return answer_of(rows, cursor.rowcount, None)
        if step.sql != "SNAPSHOT":
            await connection.set_isolation_level(None)
        return "done"

    async def tables(self) -> dict[str, list[Any]]:
        found = {}
        for name, order in TABLES.items():
            cursor = await self._monitor.execute(f"SELECT * FROM {name} ORDER BY {order}")
            found[name] = [tuple(row) for row in await cursor.fetchall()]
        return found


def _has_circle(blockers: dict[int, list[int]]) -> bool:
    def reach(start: int) -> Iterator[int]:
        todo, seen = [start], set()
        while todo:
            for other in blockers.get(todo.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    todo.append(other)
                    yield other

    return any(number in reach(number) for number in blockers)


@asynccontextmanager
async def real(dsn: str) -> Any:
    """The real server's side, on a database with our tables."""
    settings = {"deadlock_timeout": f"{int(DEADLOCK_SECONDS * 1000)}ms", "enable_seqscan": "off",
                "enable_bitmapscan": "off"}  # fmt: skip
    options = " ".join(f"-c {name}={value}" for name, value in settings.items())
    connections = [await psycopg.AsyncConnection.connect(dsn, options=options) for _ in range(4)]
    monitor = await psycopg.AsyncConnection.connect(dsn, autocommit=True)
    await monitor.execute("DROP INDEX timer_due")  # so that rows come in the order of their keys
    for table in TABLES:
        await monitor.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
    try:
        yield Real(connections, monitor)
    finally:
        for connection in (*connections, monitor):
            await connection.close()


# Both.


@dataclass
class Difference:
    """Where the two servers part."""

    seed: int
    steps: list[Step]
    simulated: Any
    real: Any

    def __str__(self) -> str:
        steps = "\n".join(f"    {step}" for step in self.steps)
        return f"seed {self.seed}:\n{steps}\n  simulated: {self.simulated}\n  real:      {self.real}"


async def compare(seed: int, other: Real) -> Difference | None:
    """Run one schedule on both servers."""
    author = Author(seed)
    await other.empty()
    simulated = Simulated(author.sessions)
    steps: list[Step] = []
    expected: list[Seen] = []
    waiting: tuple[int, ...] = ()
    while len(steps) < author.length or author.open:
        free = [number for number in range(author.sessions) if number not in waiting]
        if len(steps) < author.length:
            step = author.step(author.random.choice(free))
        else:
            number = next(number for number in free if number in author.open)
            author.open.discard(number)
            step = Step(number, "COMMIT")
        steps.append(step)
        seen = simulated.step(step)
        expected.append(await other.step(step))
        if seen != expected[-1]:
            found = _other_order(simulated, steps, expected)
            if found is None:
                return Difference(seed, steps, seen, expected[-1])
            simulated = found
        waiting = expected[-1].waiting
    tables = simulated.tables(), await other.tables()
    return Difference(seed, steps, *tables) if tables[0] != tables[1] else None


def _other_order(simulated: Simulated, steps: list[Step], expected: list[Seen]) -> Simulated | None:
    """A simulated server that answers the same, since those that were woken at once went on in another order."""
    made = simulated.host.made
    for _ in range(MOST_ORDERS):
        while made and made[-1][0] + 1 == made[-1][1]:
            made = made[:-1]
        if not made:
            return None
        choices = [pick for pick, _ in made]
        choices[-1] += 1
        again = Simulated(len(simulated.connections), choices)
        if all(again.step(step) == seen for step, seen in zip(steps, expected, strict=True)):
            return again
        made = again.host.made  # what was chosen after the step that answered something else was not reached
    return None
