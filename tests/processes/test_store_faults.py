"""The store when PostgreSQL, the network and disks fail: real servers, sockets and file systems that break under load.

Whatever happens, each operation that was acknowledged is in the store once, and work goes on by itself.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import event, text

from understudy.errors import InvalidConfiguration, StoreBusy, StoreReadOnly, StoreRefused, StoreUnreachable
from understudy.store.db import postgresql
from understudy.store.db.engine import Database
from understudy.store.db.postgresql import Address, BoundedConnection
from understudy.store.operations import beginnings
from understudy.store.reads import queries

from ..postgres import PostgresServer, free_port
from ..store.test_store import Store, opened

PATIENCE = 60.0
PASSWORD = "hunter22"
SESSIONS = 8


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server that asks for a password, so that every test also shows that none gets into a log."""
    with PostgresServer(password=PASSWORD) as made:
        yield made


@pytest.fixture
def dsn(server: PostgresServer) -> str:
    return server.database()


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Faults are no errors of ours, are logged in a few lines, and no line has a password."""
    caplog.set_level(logging.DEBUG)
    yield
    records = caplog.get_records("call")
    said = [f"{record.getMessage()} {record.exc_text or ''}" for record in records]
    assert not any(PASSWORD in line for line in said)
    loud = [line for record, line in zip(records, said, strict=True) if record.levelno >= logging.WARNING]
    assert len(loud) <= 8, loud
    assert not any(record.levelno >= logging.ERROR for record in records), loud


class Work:
    """Operations on a few sessions, one after another on each, and the runs that were acknowledged."""

    def __init__(self, db: Store, size: int) -> None:
        self.db = db
        self.journal = db.journal
        self.acknowledged: list[tuple[str, str]] = []
        self._size = size
        self._stopped = False
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        for number in range(SESSIONS):
            await self.db.create(f"s{number}")
            self._tasks.append(asyncio.create_task(self._send(f"s{number}")))
        await self.go_on()

    async def _send(self, session_id: str) -> None:
        number = 0
        while not self._stopped:
            number += 1
            # Noise: PostgreSQL compresses what it can.
            await self.db.accept(session_id, f"r{number}", os.urandom(self._size // 2).hex())
            self.acknowledged.append((session_id, f"r{number}"))

    async def go_on(self, count: int = 5 * SESSIONS) -> None:
        """Wait until so many more operations were acknowledged."""
        wanted = len(self.acknowledged) + count
        await eventually(lambda: len(self.acknowledged) >= wanted, self._tasks)

    async def held_up(self) -> None:
        """Wait until the journal has noticed an outage."""
        await eventually(lambda: self.journal.outage.unreachable_since is not None, self._tasks)

    async def check(self) -> None:
        """Everything that was submitted is in the store once, and nothing is missing in between."""
        self._stopped = True
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*self._tasks)
        assert self.journal.outage.unreachable_since is self.journal.outage.busy_since is None
        numbers: list[int] = []
        for session_id in (f"s{number}" for number in range(SESSIONS)):
            wanted = sorted(run for session, run in self.acknowledged if session == session_id)
            events = self.db.read(queries.session_events, session_id)
            assert sorted(event.run_id for event in events if event.type == "run_accepted") == wanted
            assert sorted(run.run_id for run in self.db.read(queries.runs, session_id)) == wanted
            row = self.db.session(session_id)
            assert row["inbox_count"] == len(wanted)
            assert [seq for seq, _ in self.db.log(session_id)] == list(range(1, row["seq"] + 1))
            numbers += [event.writer_seq for event in events]
        assert sorted(numbers) == list(range(1, len(numbers) + 1))


async def eventually(condition: Callable[[], bool], tasks: list[asyncio.Task[None]] | None = None) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            for task in tasks or []:
                if task.done():
                    task.result()  # its error, rather than a long wait
            await asyncio.sleep(0.005)


@asynccontextmanager
async def working(dsn: str, size: int = 16) -> AsyncIterator[Work]:
    """Operations in flight; what the store then has is checked at the end."""
    async with opened(dsn) as db:
        work = Work(db, size)
        try:
            await work.start()
            yield work
            await work.check()
        finally:
            for task in work._tasks:
                task.cancel()


def warnings(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)


# PostgreSQL dies.


def kill_backend(server: PostgresServer) -> None:
    server.kill_backend()
    server.wait_until_ready()


def restart(end: Callable[[PostgresServer], Any]) -> Callable[[PostgresServer], None]:
    def act(server: PostgresServer) -> None:
        end(server)
        server.start()

    return act


DEATHS = {
    "stopped": restart(PostgresServer.stop),
    "killed": restart(PostgresServer.kill),
    "one process killed": kill_backend,
}


@pytest.mark.thorough
@pytest.mark.parametrize("death", DEATHS)
async def test_a_server_that_dies_comes_back(server: PostgresServer, dsn: str, death: str) -> None:
    """Given operations in flight, when PostgreSQL is stopped, killed or crashes, then they wait until it is back."""
    async with working(dsn) as work:
        happening = asyncio.create_task(asyncio.to_thread(DEATHS[death], server))
        await work.held_up()
        await happening
        await work.go_on()


@pytest.mark.thorough
async def test_a_failover_finds_the_new_primary() -> None:
    """Given a DSN with both hosts, the standby first, when the primary is killed and the standby promoted, then nothing
    acknowledged is missing there, and work goes on there."""
    with PostgresServer(password=PASSWORD) as primary, primary.standby() as standby:
        dsn = primary.database()
        known = "SELECT 1 FROM pg_database WHERE datname = %s"  # replicated, but not yet replayed
        await eventually(lambda: bool(standby.query(known, dsn.rpartition("/")[2])))
        both = dsn.replace("@", f"@127.0.0.1:{standby.port},")
        async with working(both) as work:
            await asyncio.to_thread(primary.kill)
            await work.held_up()
            await asyncio.to_thread(standby.promote)
            await work.go_on()


async def test_a_demoted_primary_is_left(server: PostgresServer, dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    """While the server only reads, operations wait, and each try makes a new connection, which may find another one."""
    async with working(dsn) as work:
        server.query("ALTER SYSTEM SET default_transaction_read_only = on")
        try:
            server.query("SELECT pg_reload_conf()")
            await work.held_up()
            connects = list[Any]()
            event.listen(work.journal.database.writer, "connect", lambda *made: connects.append(made))
            tried = work.journal.outage.tries
            await eventually(lambda: work.journal.outage.tries >= tried + 4)
            assert len(connects) >= 3  # the one that is under way may have connected before
        finally:
            server.query("ALTER SYSTEM RESET default_transaction_read_only")
            server.query("SELECT pg_reload_conf()")
        await work.go_on()
    assert "[store_readonly]" in warnings(caplog)


async def test_a_server_without_free_connections(
    server: PostgresServer, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """While others have all connections, operations wait."""
    async with opened(dsn) as db:
        await db.create("s")
        db.database.close()
        others = []
        try:
            with pytest.raises(psycopg.OperationalError, match="too many clients"):
                others.extend(psycopg.connect(server.dsn) for _ in range(1000))
            accepted = asyncio.create_task(db.accept("s"))
            await eventually(lambda: db.journal.outage.unreachable_since is not None)
            assert not accepted.done()
        finally:
            for other in others:
                other.close()
        assert await accepted is True
        assert db.journal.outage.unreachable_since is None
    assert "too many clients" in warnings(caplog)


# The network.


class Proxy:
    """A network between clients and a server that a test cuts; on a thread: tests read the store on their loop."""

    def __init__(self, target: int) -> None:
        self.port = free_port()
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._listener: asyncio.Server | None = None
        self._flows = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    def __enter__(self) -> Proxy:
        self._thread.start()
        self.heal()
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()

    def cut(self) -> None:
        """Break all connections and refuse new ones."""
        self._do(self._cut())

    def freeze(self) -> None:
        """Take bytes, and connections, but pass nothing on."""
        self._loop.call_soon_threadsafe(self._flows.clear)

    def heal(self) -> None:
        """Be a good network again; what was held back is delivered, even if its sender has given up."""
        self._do(self._heal())

    def _do(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE)

    async def _heal(self) -> None:
        self._flows.set()
        if self._listener is None or not self._listener.is_serving():
            self._listener = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def _cut(self) -> None:
        assert self._listener is not None
        self._listener.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _end(self) -> None:
        await self._cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            await self._flows.wait()
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
            self._writers.add(far_writer)
            await asyncio.gather(self._pass_on(reader, far_writer), self._pass_on(far_reader, writer))
        except asyncio.CancelledError:
            pass  # the test is over
        finally:
            writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


async def test_a_network_that_is_cut(server: PostgresServer, dsn: str) -> None:
    """Given operations in flight, when all connections break and new ones are refused, then they wait."""
    with Proxy(server.port) as proxy:
        async with working(dsn.replace(str(server.port), str(proxy.port))) as work:
            for _ in range(3):
                proxy.cut()
                await work.held_up()
                proxy.heal()
                await work.go_on()


@pytest.mark.thorough
async def test_a_network_that_takes_everything_and_delivers_nothing(
    server: PostgresServer, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the server falls silent, the journal gives its connection up; a commit that is delivered after that, while
    its repetition is on its way, happens once."""
    monkeypatch.setattr(postgresql, "JOURNAL_SECONDS", 0.5)
    monkeypatch.setattr(postgresql, "SILENCE_MARGIN", 0.5)
    monkeypatch.setitem(postgresql.DEFAULTS, "connect_timeout", 2)
    with Proxy(server.port) as proxy:
        async with working(dsn.replace(str(server.port), str(proxy.port))) as work:
            for _ in range(3):
                proxy.freeze()
                began = time.monotonic()
                await work.held_up()
                assert time.monotonic() - began < 20
                proxy.heal()
                await work.go_on()


# Others are in the way.


def options(dsn: str, setting: str) -> str:
    return f"{dsn}?options=-c%20{setting.replace('=', '%3D')}"


async def waits_for_a_lock(server: PostgresServer) -> None:
    """Until a journal does."""
    statement = "SELECT 1 FROM pg_stat_activity WHERE application_name = 'understudy' AND wait_event_type = 'Lock'"
    await eventually(lambda: bool(server.query(statement)))


LOCK = "SELECT 1 FROM session WHERE session_id = %s FOR UPDATE"


@pytest.mark.thorough
async def test_a_deadlock_is_retried(server: PostgresServer, dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    """When PostgreSQL ends the journal's transaction to break a deadlock, it is repeated, and no outage is logged."""
    async with opened(options(dsn, "deadlock_timeout=2s")) as db:
        for session_id in ("a", "b"):
            await db.create(session_id)

        def both(tx: Any) -> None:
            tx.session("a")
            beginnings.accept(tx, "b", "r", "go")

        with psycopg.connect(dsn) as peer:
            peer.execute("SET deadlock_timeout = '60s'")  # the journal is the one that is sent back
            peer.execute(LOCK, ["b"])
            submitted = asyncio.create_task(db.journal.submit(both))
            await waits_for_a_lock(server)
            await asyncio.to_thread(peer.execute, LOCK, ["a"])
            assert not submitted.done()
            assert db.journal.outage.unreachable_since is None
        await submitted
        assert db.session("b")["inbox_count"] == 1
        assert db.journal.outage.busy_since is None
    assert "deadlock detected" in server.log()
    assert warnings(caplog) == ""


async def test_a_serialization_failure_is_retried(
    server: PostgresServer, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """When somebody else's commit makes the journal's transaction impossible, it is repeated; no outage is logged."""
    async with opened(options(dsn, "default_transaction_isolation=serializable")) as db:
        await db.create("s")
        with psycopg.connect(dsn) as peer:
            peer.execute("UPDATE session SET updated_at = updated_at + 1")
            accepted = asyncio.create_task(db.accept("s"))
            await waits_for_a_lock(server)
        assert await accepted is True
        assert db.session()["inbox_count"] == 1
    assert "could not serialize access" in server.log()
    assert warnings(caplog) == ""


@pytest.mark.thorough
async def test_a_statement_that_takes_too_long(
    server: PostgresServer, dsn: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The journal's statements and readers' are ended by their limits, logged once and repeated; maintenance is not."""
    monkeypatch.setattr(postgresql, "JOURNAL_SECONDS", 0.3)
    monkeypatch.setattr(postgresql, "READER_SECONDS", 0.3)
    async with opened(dsn) as db:
        await db.create("s")
        slow = text("SELECT pg_sleep(0.6)")
        with pytest.raises(StoreUnreachable, match="statement timeout"), db.database.read() as connection:
            connection.execute(slow)
        with pytest.raises(StoreUnreachable, match="statement timeout"), db.database.write() as connection:
            connection.execute(slow)
        with db.database.maintenance() as connection:
            connection.execute(slow)
        with psycopg.connect(dsn) as peer:
            peer.execute(LOCK, ["s"])
            accepted = asyncio.create_task(db.accept("s"))
            await eventually(lambda: server.log().count("canceling statement due to statement timeout") >= 4)
            assert not accepted.done()
        assert await accepted is True
    assert warnings(caplog).count("retrying") == 1


PEER = """
import asyncio, sys
from understudy.store.db import postgresql
from understudy.store.operations import beginnings
from understudy.store.db.engine import Database
from understudy.store.journal import Journal

postgresql.TAKEOVER_LIMITS["idle_in_transaction_session_timeout"] = 1000

async def main(dsn):
    journal = Journal(Database(dsn), "tests", "peer", lambda committed: None)
    journal.start()
    def operation(tx):
        tx.session("s")
        print("has the lock", flush=True)
        sys.stdin.readline()
        return beginnings.accept(tx, "s", "of the peer", "go")
    await journal.submit(operation)
    await journal.close()
    print("committed", flush=True)

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.thorough
async def test_a_peer_that_vanishes_with_a_lock(dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    """Given a journal that stands still inside a transaction, when another one needs its row, then PostgreSQL ends the
    first one's transaction; which is repeated when it is back."""
    async with opened(dsn) as db:
        await db.create("s")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        peer = await asyncio.create_subprocess_exec(sys.executable, "-c", PEER, dsn, **pipes)
        assert peer.stdout is not None
        assert peer.stdin is not None
        try:
            async with asyncio.timeout(PATIENCE):
                assert await peer.stdout.readline() == b"has the lock\n"
                peer.send_signal(signal.SIGSTOP)
                assert await db.accept("s") is True
                assert warnings(caplog) == ""
                peer.send_signal(signal.SIGCONT)
                said, _ = await peer.communicate(b"go on\ngo on\n")
        finally:
            if peer.returncode is None:
                peer.kill()
                await peer.wait()
        assert said == b"has the lock\ncommitted\n"
        assert [seq for seq, _ in db.log()] == list(range(1, db.session()["seq"] + 1))
        assert db.session()["inbox_count"] == 2


# Disks.


@contextmanager
def disk(size: str) -> Iterator[Path]:
    """A small disk, where PostgreSQL's user can reach it too."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    with tempfile.TemporaryDirectory(prefix="understudy-disk-") as directory:
        os.chmod(directory, 0o755)
        path = Path(directory) / "disk"
        path.mkdir()
        mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path))
        try:
            yield path
        finally:
            unmount(path)


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, timeout=PATIENCE)


def unmount(path: Path) -> None:
    subprocess.run(["umount", "--lazy", str(path)], check=True, timeout=PATIENCE)


@contextmanager
def filled(directory: Path) -> Iterator[None]:
    """The directory's disk has no space left."""
    ballast = directory / "ballast"
    with open(ballast, "wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        file.writelines(itertools.repeat(bytes(4096)))
    try:
        yield
    finally:
        ballast.unlink()


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """This process may make no file larger than this."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_sqlite_on_a_full_disk(caplog: pytest.LogCaptureFixture) -> None:
    """While the disk is full, operations wait and the error says so; with space again they are committed."""
    with disk("16m") as path:
        async with working(f"sqlite:///{path}/store.db", 20_000) as work:
            with filled(path):
                await work.held_up()
            await work.go_on()
    assert "[store_full]" in warnings(caplog)


async def test_sqlite_at_the_limit_of_a_files_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same for a limit of the process; to SQLite that is an I/O error."""
    async with working(f"sqlite:///{tmp_path}/store.db", 20_000) as work:
        with file_size_limit(1_000_000):
            await work.held_up()
        await work.go_on()
    assert "[store_full]" in warnings(caplog)


async def test_postgresql_on_a_full_disk(caplog: pytest.LogCaptureFixture) -> None:
    """While the server's disk is full, operations wait and the error says so; with space again they are committed."""
    with disk("128m") as path:
        (path / "data").mkdir()
        with PostgresServer(password=PASSWORD, data=path / "data") as server:
            async with working(server.database(), 20_000) as work:
                with filled(path):
                    await work.held_up()
                await work.go_on()
    assert "[store_full]" in warnings(caplog)


@contextmanager
def read_only(path: Path) -> Iterator[None]:
    """A directory, or a file alone, that nobody may write, not even root."""
    mount("--bind", str(path), str(path))
    try:
        mount("-o", "remount,bind,ro", str(path))
        yield
    finally:
        unmount(path)


@pytest.mark.parametrize("what", ["store.db", "."], ids=["file", "directory"])
async def test_sqlite_that_may_not_be_written(tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture) -> None:
    """A read-only file or directory is named; operations wait until it is writable."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    directory = tmp_path / "stores"
    dsn = f"sqlite:///{directory}/store.db"
    async with opened(dsn) as db:
        await db.create("s")
        db.database.close()
        with read_only(directory / what):
            with pytest.raises(StoreReadOnly) as refused:
                Database(dsn).prepare()
            assert f"{directory / what} may not be written" in str(refused.value)
            accepted = asyncio.create_task(db.accept("s"))
            await eventually(lambda: db.journal.outage.unreachable_since is not None)
            assert not accepted.done()
        assert await accepted is True
        assert db.journal.outage.unreachable_since is None
        assert db.session()["inbox_count"] == 1
    assert f"{directory / what} may not be written" in warnings(caplog)


def test_a_directory_that_can_not_be_made(tmp_path: Path) -> None:
    """On a read-only file system the error names the directory."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    with read_only(tmp_path), pytest.raises(StoreReadOnly, match="new can't be created: Read-only file system"):
        Database(f"sqlite:///{tmp_path}/new/store.db")


# Credentials.


@pytest.mark.parametrize(
    ("pattern", "instead", "said"),
    [
        (f":{PASSWORD}@", ":hunter23@", "password authentication failed"),
        (f":{PASSWORD}@", "@", "no password supplied"),
        ("//postgres:", "//nobody:", 'password authentication failed for user "nobody"'),
        ("/postgres$", "/missing", 'database "missing" does not exist'),
    ],
    ids=["wrong", "none", "role", "database"],
)
def test_who_is_not_let_in_learns_why(server: PostgresServer, pattern: str, instead: str, said: str) -> None:
    """Wrong password, none, unknown role or database: an error of its own that says which, without the password."""
    database = Database(re.sub(pattern, instead, server.dsn))
    with pytest.raises(StoreRefused) as refused:
        database.prepare()
    assert said in str(refused.value)
    assert "hunter" not in str(refused.value)


async def test_a_password_that_is_changed(server: PostgresServer, dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    """Operations wait until the password is the one that the journal knows."""
    with psycopg.connect(server.dsn, autocommit=True) as admin:
        async with working(dsn) as work:
            admin.execute("ALTER ROLE postgres PASSWORD 'another'")
            try:
                admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
                await eventually(lambda: "[store_refused]" in warnings(caplog))
            finally:
                admin.execute(f"ALTER ROLE postgres PASSWORD '{PASSWORD}'")
            await work.go_on()


def test_an_address_that_can_not_be_read() -> None:
    """The message has no part of the password, where libpq's would."""
    with pytest.raises(InvalidConfiguration, match="percent-encoded") as refused:
        Database("postgresql://user:hun%zzter22@127.0.0.1/db")
    assert "zzter" not in str(refused.value)


def test_a_pool_that_is_used_up(dsn: str) -> None:
    """When all connections of this process are in use, the error says so, not that the store is unreachable."""
    database = Database(dsn)
    database.reader.pool._timeout = 0.1  # type: ignore[attr-defined]
    with database.read(), database.read(), database.read(), pytest.raises(StoreBusy, match="in use"):
        database.prepare("verify")
    database.close()


@pytest.mark.thorough
def test_an_outage_that_comes_and_goes_leaves_no_connections(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given commits that fail while readers open connections, again and again, then no more are open than the pools may
    have, without the garbage collector's help, and what was opened before an outage is not used after it."""
    database = Database(dsn)
    database.prepare()
    connect = Address.connect

    def fail() -> None:
        with pytest.raises(StoreUnreachable), database.write():
            raise psycopg.OperationalError("server closed the connection unexpectedly")

    def connect_while_commits_fail(self: Address, *arguments: Any) -> BoundedConnection:
        opened = connect(self, *arguments)
        monkeypatch.setattr(Address, "connect", connect)
        fail()
        return opened

    gc.disable()
    try:
        before = 0
        for _ in range(8):
            fail()
            monkeypatch.setattr(Address, "connect", connect_while_commits_fail)
            with database.read() as connection:
                pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar()
            assert pid != before
            before = pid
        with database.read() as connection:
            mine = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            assert connection.exec_driver_sql(mine).scalar() <= 5
    finally:
        gc.enable()
        database.close()
