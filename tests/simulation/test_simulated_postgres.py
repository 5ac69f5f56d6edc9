"""The simulated PostgreSQL: what it does as the real one does, and what it does when something goes wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from greenlet import GreenletExit
from sqlalchemy import delete, insert, select, update

from understudy.errors import StoreError, StoreUnreachable
from understudy.store.db.engine import Database
from understudy.store.db.failures import StoreRace
from understudy.store.db.statements import OWNER

from .. import differential
from ..round_robin import RoundRobin, Task
from .postgres.database import SimulatedDatabase
from .postgres.server import Server

SCHEDULES = int(os.environ.get("UNDERSTUDY_TEST_SCHEDULES", "200"))
TRIES = 5
FIRST_SCHEDULE = int(os.environ.get("UNDERSTUDY_TEST_FIRST_SCHEDULE", "0"))


@pytest.mark.thorough
@pytest.mark.timeout(60 + SCHEDULES)
async def test_random_schedules_end_as_on_the_real_server(postgres: str) -> None:
    """Sessions that read, lock, write and end at random get the same answers after each step, and wait for the same, as
    on a real server; and the tables are the same at the end."""
    database = Database(postgres)
    database.prepare()
    database.close()
    async with differential.real(postgres) as real:
        for seed in range(FIRST_SCHEDULE, FIRST_SCHEDULE + SCHEDULES):
            # Who looks for a deadlock first, and so is ended for it, differs from one run of a schedule to the next.
            for _ in range(TRIES):
                difference = await differential.compare(seed, real)
                if difference is None:
                    break
            assert difference is None, str(difference)


class Stage:
    """A server with rows `a` and `b`, and clients that do something with them, each in a task of its own.

    Attributes:
        notes: what clients noted, with the time (seconds).
    """

    def __init__(self, **options: Any) -> None:
        self.host = RoundRobin()
        self.server = Server(self.host, **options)
        self.notes: list[tuple[float, str]] = []
        self.databases: dict[str, SimulatedDatabase] = {}
        self.do("setup", lambda: self._insert("setup", "a", "b"))
        self.notes.clear()

    def _insert(self, client: str, *names: str) -> None:
        with self.database(client).write() as connection:
            for name in names:
                connection.execute(insert(OWNER).values(namespace=name, generation=0, holder="", lease_until=0))

    def database(self, client: str) -> SimulatedDatabase:
        """The client's."""
        if client not in self.databases:
            self.databases[client] = SimulatedDatabase(self.server, client)
        return self.databases[client]

    def start(self, client: str, function: Callable[[], Any]) -> Task:
        """Have a client do something; what it fails with is noted."""

        def run() -> None:
            try:
                function()
            except StoreError as error:
                self.note(f"{client}: {type(error).__name__}: {error}")
            else:
                self.note(f"{client}: done")

        return self.host.start(client, run)

    def do(self, client: str, function: Callable[[], Any]) -> None:
        """Have a client do something, to its end."""
        task = self.host.start(client, function)
        self.host.run_until_idle()
        assert task.done, "it waits"
        if task.error is not None:
            raise task.error

    def note(self, what: str) -> None:
        self.notes.append((self.host.now() / 1e6, what))

    def change(self, client: str, *names: str, seconds: float = 0.0, generation: int = 1) -> Callable[[], None]:
        """A transaction that changes rows in this order, and takes so long before it ends."""

        def run() -> None:
            with self.database(client).write() as connection:
                for name in names:
                    connection.execute(update(OWNER).where(OWNER.c.namespace == name).values(generation=generation))
                    if seconds:
                        self.host.sleep(seconds)

        return run

    def generations(self) -> dict[str, int]:
        """What is committed."""
        with self.server.committed() as connection:
            found = connection.execute(select(OWNER.c.namespace, OWNER.c.generation).order_by(OWNER.c.namespace))
            return {name: generation for name, generation in found}

    def idle(self) -> bool:
        """Whether nobody is in a transaction, or has a lock."""
        return not self.server.open_transactions() and not self.server.locks_held()


@pytest.fixture
def stage() -> Stage:
    return Stage()


# Limits.


def test_a_lock_is_waited_for_until_its_holder_ends(stage: Stage) -> None:
    """The second of two that change a row goes on when the first has committed, and changes what that left."""
    stage.start("one", stage.change("one", "a", seconds=2))
    stage.start("two", stage.change("two", "a", generation=2))
    stage.host.run(1)
    assert stage.server.waiting() == {"two": ["one"]}
    stage.host.run()
    assert stage.notes == [(2.0, "one: done"), (2.0, "two: done")]
    assert stage.generations() == {"a": 2, "b": 0}
    assert stage.server.waits == 1
    assert stage.idle()


def test_a_lock_that_is_held_for_too_long_is_not_waited_for(stage: Stage) -> None:
    """After 3 s the waiting transaction is over; its connection goes on."""
    stage.start("one", stage.change("one", "a", seconds=4))
    stage.start("two", stage.change("two", "a"))
    stage.host.run()
    [(at, line), _] = stage.notes
    assert (at, line.split(": ")[:2]) == (3.0, ["two", "StoreBusy"])
    assert "LockNotAvailable" in line
    stage.do("two", stage.change("two", "a", generation=2))
    assert stage.generations()["a"] == 2


def test_of_two_in_a_deadlock_one_gives_way_after_a_second(stage: Stage) -> None:
    """Whose wait closes the circle looks first for one, 1 s after it began; the other goes on."""
    stage.start("one", stage.change("one", "a", "b", seconds=0.5))
    stage.start("two", lambda: (stage.host.sleep(0.1), stage.change("two", "b", "a", seconds=0.5, generation=2)()))
    stage.host.run()
    [(first, line), (last, done)] = stage.notes
    assert (first, "DeadlockDetected" in line, last, done) == (1.5, True, 2.0, "two: done")
    assert stage.generations() == {"a": 2, "b": 2}


def test_a_statement_takes_no_longer_than_its_limit(stage: Stage) -> None:
    """A statement that may wait for locks for ever is ended after 30 s; without that limit it waits on."""

    def patient(limit: str) -> None:
        with stage.database("two").write() as connection:
            for name in ("lock_timeout", limit):
                connection.exec_driver_sql(f"SET LOCAL {name} = 0")
            connection.execute(update(OWNER).where(OWNER.c.namespace == "a").values(generation=2))

    def busy() -> None:
        with stage.database("one").write() as connection:
            connection.execute(update(OWNER).where(OWNER.c.namespace == "a").values(generation=1))
            for _ in range(10):
                stage.host.sleep(4)
                connection.execute(select(OWNER))

    stage.start("one", busy)
    stage.start("two", lambda: patient("lock_timeout"))
    stage.host.run(35)
    [(at, line)] = stage.notes
    assert (at, "QueryCanceled" in line) == (30.0, True)
    stage.notes.clear()
    stage.host.run(1)
    stage.start("two", lambda: patient("statement_timeout"))
    stage.host.run()
    assert stage.notes == [(40.0, "one: done"), (40.0, "two: done")]


def test_a_session_that_is_idle_in_a_transaction_is_ended(stage: Stage) -> None:
    """After 5 s its locks are free, and it learns of it when it goes on; a session that does something is not idle."""
    stage.start("one", stage.change("one", "a", seconds=6))
    stage.start("three", stage.change("three", "b", "b", "b", seconds=4))
    stage.start("two", lambda: (stage.host.sleep(4.5), stage.change("two", "a", generation=2)()))
    stage.host.run()
    [(freed, two), (at, line), (_, three)] = stage.notes
    assert (freed, two, at, three) == (5.0, "two: done", 6.0, "three: done")
    assert line.startswith("one: StoreUnreachable")
    assert "IdleInTransactionSessionTimeout" in line
    assert stage.generations() == {"a": 2, "b": 1}
    assert stage.idle()


def test_an_error_ends_a_transaction_at_once(stage: Stage) -> None:
    """Who inserts a key that there is loses its locks then, not when it rolls back."""

    def doubled() -> None:
        with stage.database("one").write() as connection:
            connection.execute(update(OWNER).where(OWNER.c.namespace == "b").values(generation=1))
            with suppress(Exception):
                connection.execute(insert(OWNER).values(namespace="a", generation=1, holder="", lease_until=0))
            assert stage.server.locks_held() == 0
            connection.execute(select(OWNER))

    stage.start("one", doubled)
    stage.host.run()
    assert "InFailedSqlTransaction" in stage.notes[0][1]
    assert stage.generations() == {"a": 0, "b": 0}


def test_what_postgresql_refuses_is_refused(stage: Stage) -> None:
    """A key that there is, a NULL, a number beyond 64 bits and NUL in a text have PostgreSQL's errors."""

    def refused(kind: type[StoreError], words: str, **values: Any) -> None:
        row = {"namespace": "c", "generation": 1, "holder": "", "lease_until": 0, **values}
        with pytest.raises(kind, match=words), stage.database("one").write() as connection:
            connection.execute(insert(OWNER).values(**row))

    stage.do("one", lambda: refused(StoreRace, "UniqueViolation", namespace="a"))
    stage.do("one", lambda: refused(StoreRace, "NotNullViolation", holder=None))
    stage.do("one", lambda: refused(StoreError, "NumericValueOutOfRange", generation=1 << 63))
    stage.do("one", lambda: refused(StoreError, "NUL", holder="\0"))
    assert stage.generations() == {"a": 0, "b": 0}


def test_a_snapshot_stays_as_it_was(stage: Stage) -> None:
    """Readers see what was committed before their first statement, whatever is changed, removed or added then; writers
    see each commit."""
    seen: list[Any] = []

    def look() -> None:
        with stage.database("one").snapshot() as still, stage.database("one").write() as moving:
            for _ in range(3):
                for connection in (still, moving):
                    found = connection.execute(
                        select(OWNER.c.namespace, OWNER.c.generation).order_by(OWNER.c.namespace)
                    )
                    seen.append([tuple(row) for row in found])
                stage.host.sleep(1)

    def change() -> None:
        stage.host.sleep(0.5)
        stage.change("two", "a", generation=7)()
        stage._insert("two", "c")
        stage.host.sleep(1)
        with stage.database("two").write() as connection:
            connection.execute(delete(OWNER).where(OWNER.c.namespace != "c"))
            connection.execute(insert(OWNER).values(namespace="a", generation=9, holder="", lease_until=0))

    stage.start("one", look)
    stage.start("two", change)
    stage.host.run()
    assert stage.notes == [(1.5, "two: done"), (3.0, "one: done")]
    before = [("a", 0), ("b", 0)]
    assert seen[0::2] == [before] * 3
    assert seen[1::2] == [before, [("a", 7), ("b", 0), ("c", 0)], [("a", 9), ("c", 0)]]


# Connections.


def test_a_pool_has_no_more_connections_than_on_postgresql(stage: Stage) -> None:
    """The fourth reader waits for one of three; one that waits for 30 s fails, since all are in use."""

    def read(seconds: float) -> Callable[[], None]:
        def run() -> None:
            with stage.database("one").read() as connection:
                connection.execute(select(OWNER))
                stage.host.sleep(seconds)

        return run

    for seconds in (10, 50, 51, 1, 40, 1):
        stage.start("one", read(seconds))
    stage.host.run()
    times = [(at, line.split(": ")[1]) for at, line in stage.notes]
    assert times == [(10, "done"), (11, "done"), (30, "StoreBusy"), (50, "done"), (51, "done"), (51, "done")]
    assert len(stage.server.backend.sessions) == 3  # the writer's, and two that readers left in the pool


def test_a_server_takes_so_many_connections_and_no_more() -> None:
    """Whoever comes when all are taken is refused."""
    stage = Stage(max_connections=2)
    stage.do("one", stage.change("one", "a"))
    with pytest.raises(StoreUnreachable, match="too many clients"):
        stage.do("two", stage.change("two", "a"))
    stage.do("one", stage.database("one").close)
    stage.do("two", stage.change("two", "a"))


# Unknown outcomes.


@pytest.mark.parametrize(
    ("what", "fault", "generation"),
    [("begin", "lost_before", 0), ("execute", "lost_before", 0), ("execute", "lost_after", 0),
     ("commit", "lost_before", 0), ("commit", "lost_after", 1)],
)  # fmt: skip
def test_a_connection_breaks_at_any_message(stage: Stage, what: str, fault: str, generation: int) -> None:
    """Only a commit that the server has got takes effect; the client gets the same error each time, no lock stays, and
    the next transaction has a new connection."""
    stage.host.faults["one", what] = [fault]
    with pytest.raises(StoreUnreachable, match="closed the connection"):
        stage.do("one", stage.change("one", "a"))
    assert stage.generations()["a"] == generation
    assert stage.idle()
    stage.do("one", stage.change("one", "a", generation=2))
    assert stage.generations()["a"] == 2
    assert [message for message in stage.host.messages if message == ("one", "connect")] == [("one", "connect")] * 2


def test_a_message_may_meet_silence(stage: Stage) -> None:
    """A client whose statement gets no answer gives up after 35 s; the server ended its transaction long before."""
    stage.host.faults["one", "execute"] = ["", "hang"]
    stage.start("one", stage.change("one", "a", "b"))
    stage.start("two", lambda: (stage.host.sleep(2.5), stage.change("two", "a", generation=2)()))
    stage.host.run()
    [(freed, two), (at, line)] = stage.notes
    assert (freed, two, at) == (5.0, "two: done", 35.0)
    assert "the server gave no answer for 35 s" in line


@pytest.mark.parametrize(("takes_effect", "generation"), [(True, 1), (False, 0)])
def test_a_commit_that_hangs_ends_later(stage: Stage, takes_effect: bool, generation: int) -> None:
    """It keeps its locks and nobody sees it until then, also when its client gave up after 35 s."""
    stage.host.faults["one", "commit"] = ["hang"]
    stage.host.hangs = (60, takes_effect)
    stage.start("one", stage.change("one", "a"))
    stage.host.run(50)
    [(at, line)] = stage.notes
    assert (at, "the server gave no answer for 35 s" in line) == (35.0, True)
    assert stage.generations()["a"] == 0
    stage.start("two", stage.change("two", "a", generation=2))
    stage.host.run(9)
    assert "LockNotAvailable" in stage.notes[1][1]
    stage.host.run(1)
    assert stage.generations()["a"] == generation
    assert stage.idle()
    assert [session.client for session in stage.server.backend.sessions.values()] == ["setup", "two"]


def test_a_commit_that_hangs_for_a_while_is_only_slow(stage: Stage) -> None:
    """Its client waits, and learns that it took effect."""
    stage.host.faults["one", "commit"] = ["hang"]
    stage.host.hangs = (20, True)
    stage.start("one", stage.change("one", "a"))
    stage.host.run()
    assert (stage.notes, stage.generations()["a"]) == ([(20.0, "one: done")], 1)


@pytest.mark.parametrize(("takes_effect", "generation"), [(True, 1), (False, 0)])
def test_a_crash_decides_what_hangs(stage: Stage, takes_effect: bool, generation: int) -> None:
    """A server that crashes loses what is not committed; of commits that hang, those that were to take effect stay. For
    a while it takes no connections."""
    stage.host.faults["one", "commit"] = ["hang"]
    stage.host.hangs = (60, takes_effect)
    stage.start("one", stage.change("one", "a"))
    stage.start("two", stage.change("two", "b", seconds=4))
    stage.start("three", stage.change("three", "b"))
    stage.host.run(2)
    stage.server.crash(3)
    stage.host.run(2.5)
    errors = sorted((at, words.split(": ")[0], "closed the connection" in words) for at, words in stage.notes)
    assert errors == [(2.0, "one", True), (2.0, "three", True), (4.0, "two", True)]
    assert stage.generations() == {"a": generation, "b": 0}
    with pytest.raises(StoreUnreachable, match="starting up"):
        stage.do("one", stage.change("one", "a"))
    stage.host.run(1)
    stage.do("one", stage.change("one", "a", generation=3))
    assert stage.generations()["a"] == 3
    stage.host.run()
    assert stage.idle()


def test_what_a_killed_client_had_in_hand_is_rolled_back_at_once(stage: Stage) -> None:
    """Who waits for its locks goes on; a killed client that waits itself keeps its place until its turn, no longer."""
    one = stage.start("one", stage.change("one", "a", "b", seconds=3))
    stage.host.run(1)
    two = stage.start("two", stage.change("two", "a"))
    stage.start("three", stage.change("three", "a", generation=3))
    stage.host.run(1)
    for client, task in (("two", two), ("one", one)):
        stage.host.kill(task)
        stage.server.client_died(client)
    stage.host.run()
    assert stage.notes == [(2.0, "three: done")]
    assert isinstance(one.error, GreenletExit)
    assert stage.generations() == {"a": 3, "b": 0}
    assert stage.idle()


def test_a_killed_client_that_waits_is_not_waited_for_longer_than_for_its_lock(stage: Stage) -> None:
    """What it holds besides is free when its own wait is over, after 3 s."""
    stage.start("one", stage.change("one", "a", seconds=4.9))
    two = stage.start("two", stage.change("two", "b", "a"))
    stage.host.run(1)
    stage.host.kill(two)
    stage.server.client_died("two")
    stage.start("three", stage.change("three", "b", generation=3))
    stage.host.run()
    assert stage.notes == [(3.0, "three: done"), (4.9, "one: done")]


def test_a_client_whose_host_is_gone_is_noticed_late(stage: Stage) -> None:
    """The server ends its transaction as idle after 5 s, and a reader's after 11 s."""

    def read() -> None:
        with stage.database("one").read() as connection:
            connection.execute(select(OWNER))
            stage.host.sleep(100)

    tasks = [stage.start("one", stage.change("one", "a", seconds=100)), stage.start("one", read)]
    stage.host.run(1)
    stage.server.client_died("one", silently=True)
    for task in tasks:
        stage.host.kill(task)
    assert stage.server.open_transactions() == ["one", "one"]
    stage.start("two", lambda: (stage.host.sleep(2.5), stage.change("two", "a", generation=2)()))
    stage.host.run(10)
    assert stage.notes == [(5.0, "two: done")]
    assert stage.server.open_transactions() == ["one"]
    stage.host.run(1)
    assert stage.idle()


def test_a_commit_of_a_client_that_was_killed_meanwhile_takes_effect(stage: Stage) -> None:
    """A commit that hangs goes on without its client."""
    stage.host.faults["one", "commit"] = ["hang"]
    task = stage.start("one", stage.change("one", "a"))
    stage.host.run(1)
    stage.host.kill(task)
    stage.server.client_died("one")
    stage.host.run()
    assert stage.generations()["a"] == 1
    assert stage.idle()


def test_pooled_connections_do_not_survive_a_crash(stage: Stage) -> None:
    """A reader asks first whether its connection still leads somewhere; a writer finds out with its first statement."""

    def read() -> None:
        with stage.database("one").read() as connection:
            assert len(connection.execute(select(OWNER)).all()) == 2

    stage.do("one", read)
    stage.do("one", stage.change("one", "a"))
    stage.server.crash(0)
    stage.do("one", read)
    with pytest.raises(StoreUnreachable):
        stage.do("one", stage.change("one", "a", generation=2))
    stage.do("one", stage.change("one", "a", generation=3))
    assert stage.generations()["a"] == 3


def test_statements_of_a_pipeline_are_one_message(stage: Stage) -> None:
    """They are executed in order; the first that fails ends the transaction, and its error is raised at the end."""

    def write(*names: str) -> None:
        with stage.database("one").write() as connection:
            driver: Any = connection.connection.driver_connection
            with driver.pipeline():
                for name in names:
                    connection.execute(insert(OWNER).values(namespace=name, generation=5, holder="", lease_until=0))

    stage.do("one", lambda: write("c", "d"))
    assert [what for _, what in stage.host.messages][-4:] == ["connect", "begin", "execute", "commit"]
    with pytest.raises(StoreRace):
        stage.do("one", lambda: write("e", "a", "f"))
    assert stage.generations() == {"a": 0, "b": 0, "c": 5, "d": 5}


def test_a_callback_runs_after_each_commit_that_changed_something() -> None:
    """After each commit that changed something, and only then, what is committed can be looked at."""
    seen: list[dict[str, int]] = []
    stages: list[Stage] = []
    stages.append(Stage(on_commit=lambda: seen.extend(stage.generations() for stage in stages)))
    [stage] = stages
    stage.host.faults["one", "commit"] = ["", "lost_before", "lost_after"]
    for generation in (1, 2, 3):
        with suppress(StoreUnreachable):
            stage.do("one", stage.change("one", "a", generation=generation))
    stage.do("one", stage.change("one"))
    assert seen == [{"a": 1, "b": 0}, {"a": 3, "b": 0}]
    assert stage.server.commits == 3  # the first made the rows


def test_the_same_is_done_twice_in_the_same_way() -> None:
    """What waits, in which order it goes on and who gives way depends on nothing but the schedule."""

    def play() -> list[Any]:
        stage = Stage()
        for number, names in enumerate(("ab", "ba", "a", "b", "ba", "ab")):
            stage.start(f"c{number}", stage.change(f"c{number}", *names, seconds=0.4, generation=number))
        stage.host.run()
        return [*stage.notes, stage.generations(), stage.host.messages, stage.server.waits]

    assert play() == play()
