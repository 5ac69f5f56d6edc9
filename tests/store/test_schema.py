"""The life of the schema: made once, brought up to date in order, checked, and never touched where that is not due."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, inspect, text

from understudy.config import check_store, split_schema
from understudy.errors import InvalidConfiguration, StoreOwned, StoreSchema, StoreVersion
from understudy.messages import Usage
from understudy.records import ModelAnswer
from understudy.store.check.check import check
from understudy.store.check.check_budgets import BUDGET_RULES
from understudy.store.db import schema
from understudy.store.db.engine import Database
from understudy.store.db.tables import metadata
from understudy.store.journal import Journal
from understudy.store.operations import activation, beginnings, model_calls
from understudy.store.reads import queries

pytestmark = pytest.mark.conformance

NEWEST = schema.newest()


@pytest.fixture
def store(bare_store: str) -> str:
    """Here it is made by the tests."""
    return bare_store


@pytest.fixture
def postgres(bare_postgres: str) -> str:
    """Likewise."""
    return bare_postgres


@contextmanager
def opened(dsn: str) -> Iterator[Database]:
    database = Database(dsn)
    try:
        yield database
    finally:
        database.close()


def run_sql(database: Database, sql: str) -> None:
    """What an administrator does with a text of SQL: one transaction, whether it says so or not."""
    with database.writer.begin() as connection:
        for statement in sql.split(";\n"):
            if statement.strip() not in ("", "BEGIN", "COMMIT"):
                connection.exec_driver_sql(statement)


def at_version(database: Database, version: int) -> None:
    """Make the tables as an earlier release made them."""
    script = schema.ddl("sqlite" if database.is_sqlite else "postgresql")
    marker = f"INSERT INTO schema_migration (version, applied_at) VALUES ({version}, "
    head, _, rest = script.partition(marker)
    run_sql(database, head + marker + rest.partition("\n")[0] + "\n")


def shape(connection: Connection) -> dict[str, Any]:
    """Columns, keys and indexes of every table."""
    inspector = inspect(connection)
    return {
        name: (
            [(c["name"], str(c["type"]).replace("BYTEA", "BLOB"), c["nullable"]) for c in inspector.get_columns(name)],
            inspector.get_pk_constraint(name)["constrained_columns"],
            sorted(
                (str(i["name"]), tuple(map(str, i["column_names"])), bool(i["unique"]))
                for i in inspector.get_indexes(name)
            ),
        )
        for name in sorted(inspector.get_table_names())
    }


def dump(database: Database) -> list[Any]:
    with database.read() as connection:
        tables = inspect(connection).get_table_names()
        return [sorted(map(str, connection.execute(text(f"SELECT * FROM {name}")))) for name in sorted(tables)]


def test_migrations_make_the_tables_that_the_models_describe(store: str) -> None:
    """The numbered files and `tables.py` are one schema: the same columns, keys and indexes."""
    with opened(store) as database:
        database.prepare()
        with database.read() as connection:
            migrated = shape(connection)
        with database.writer.begin() as connection:
            metadata.drop_all(connection)
            metadata.create_all(connection)
            described = shape(connection)
    assert {name: (sorted(columns), *rest) for name, (columns, *rest) in migrated.items()} == {
        name: (sorted(columns), *rest) for name, (columns, *rest) in described.items()
    }


def test_files_are_numbered_without_gaps() -> None:
    """Version N is the N-th file."""
    assert [migration.version for migration in schema.migrations()] == list(range(1, NEWEST + 1))


def test_prepare_applies_each_migration_once(store: str) -> None:
    """The first call applies all, the next one none; the table of versions has each."""
    with opened(store) as database:
        assert [database.prepare(), database.prepare()] == [list(range(1, NEWEST + 1)), []]
        with database.read() as connection:
            versions = connection.execute(text("SELECT version FROM schema_migration ORDER BY version")).scalars().all()
    assert versions == list(range(1, NEWEST + 1))


async def test_a_store_of_the_first_release_is_brought_up_to_date(store: str) -> None:
    """Given a session in a store of version 1, it is there after the migration, and goes on."""
    with opened(store) as database:
        at_version(database, 1)
        with database.writer.begin() as connection:
            insert(connection, "session", session_id="s", root_id="s", agent="a", wait="idle", seq=1)
        assert database.prepare() == list(range(2, NEWEST + 1))
        journal = Journal(database, "tests", "w", lambda committed: None)
        journal.start()
        assert await journal.submit(lambda tx: beginnings.accept(tx, "s", "r", "go"))
        with database.read() as connection:
            assert queries.session_info(connection, "tests", "s").seq == 2
        await journal.close()


def insert(connection: Connection, table: str, **values: Any) -> None:
    """A row as an earlier release wrote it; what is not given is 0 or empty."""
    values["namespace"] = "tests"
    for column in inspect(connection).get_columns(table):
        if not column["nullable"] and column["name"] not in values:
            values[column["name"]] = 0 if "INT" in str(column["type"]) else ""
    names, marks = ", ".join(values), ", ".join(f":{name}" for name in values)
    connection.execute(text(f"INSERT INTO {table} ({names}) VALUES ({marks})"), values)


async def test_the_budgets_of_an_earlier_release_become_accounts(store: str) -> None:
    """Given a tree with a token budget, a call in flight in it, and one without a budget: all go on as they were."""
    with opened(store) as database:
        at_version(database, 2)
        with database.writer.begin() as connection:
            limited = {"root_id": "lead", "agent": "a", "active": 1}
            insert(
                connection, "session", session_id="lead", budget_tokens=100, budget_reserved=40, budget_spent=10,
                wait="idle", **limited,
            )  # fmt: skip
            insert(connection, "session", session_id="kid", parent_id="lead", depth=1, wait="model", **limited)
            insert(connection, "reservation", session_id="kid", wait_key="kid//0", root_id="lead", tokens=40)
            insert(connection, "session", session_id="free", root_id="free", wait="idle")
        database.prepare()
        with database.read() as connection:
            accounts = connection.execute(text("SELECT * FROM account")).mappings().all()
            charged = connection.execute(text("SELECT session_id, accounts FROM session ORDER BY 1")).all()
            held = connection.execute(text("SELECT tokens, cost, output FROM reservation")).all()
            broken = [found for found in check(connection, "tests") if found.rule in BUDGET_RULES]
    wanted = {"session_id": "lead", "scope": "tree", "resource": "tokens", "allowed": 100, "reserved": 40, "spent": 10}
    assert [{name: account[name] for name in wanted} for account in accounts] == [wanted]
    assert [tuple(row) for row in charged] == [("free", None), ("kid", "lead:1"), ("lead", "lead:0")]
    assert [tuple(row) for row in held] == [(40, 0, 0)]
    # No session here accounts for the 10 of the lead's account.
    assert {(found.session_id, found.rule) for found in broken} == {("lead", "budget")}


async def test_the_answers_of_an_earlier_release_are_known_again(store: str) -> None:
    """Given sessions whose last answer an earlier release noted in `wait_holder`, then it is repeated, not committed
    again; of an answer whose run is over nothing is left, and a call in flight keeps whose it is."""
    with opened(store) as database:
        at_version(database, 12)
        with database.writer.begin() as connection:
            one = {"agent": "a", "incarnation": 1, "first_incarnation": 1, "seq": 1, "root_id": "r"}
            insert(connection, "session", session_id="going", run_id="r", round=2, wait_holder="answered 1", **one)
            insert(connection, "session", session_id="ended", wait="idle", wait_holder="ended ended/r/2/3", **one)
            insert(connection, "session", session_id="over", wait="idle", wait_holder="answered 3", **one)
            insert(connection, "session", session_id="asks", run_id="r", wait="model", wait_holder="writer-a", **one)
        database.prepare()
        with database.read() as connection:
            found = connection.execute(
                text("SELECT session_id, answer_key, answer_ended, wait_holder FROM session ORDER BY session_id")
            ).all()
        assert [tuple(row) for row in found] == [
            ("asks", "", 0, "writer-a"),
            ("ended", "ended/r/2/3", 1, ""),
            ("going", "going/r/2/1", 0, ""),
            ("over", "", 0, ""),
        ]
        journal = Journal(database, "tests", "w", lambda committed: None)
        journal.start()
        got = ModelAnswer("again", usage=Usage())
        for session_id, attempt, ended in (("going", 1, False), ("ended", 3, True)):
            result = await journal.submit(
                partial(model_calls.answer, session_id=session_id, run_id="r", round_number=2, attempt=attempt,
                    model="offline", got=got, incarnation=1)
            )  # fmt: skip
            assert (result.repeated, result.ended) == (True, ended)
        await journal.close()


def test_a_newer_database_is_refused_untouched(store: str) -> None:
    """A database of a newer version is left exactly as it is, under either policy."""
    with opened(store) as database:
        database.prepare()
        with database.writer.begin() as connection:
            connection.execute(text("INSERT INTO schema_migration (version, applied_at) VALUES (99, 1)"))
            connection.execute(text("DROP TABLE timer"))
        before = dump(database)
        for policy in ("auto", "verify"):
            with pytest.raises(StoreVersion, match="99"):
                database.prepare(policy)
        assert dump(database) == before


def test_verify_changes_nothing_and_gives_the_exact_ddl(store: str) -> None:
    """Under the policy `verify` an old database is refused; the DDL in the error is what makes it acceptable."""
    with opened(store) as database:
        for version in (0, 1):
            if version:
                at_version(database, version)
            before = dump(database)
            with pytest.raises(StoreSchema) as refused:
                database.prepare("verify")
            assert dump(database) == before
        assert "migration 2 is not applied" in refused.value.message
        assert "column session.pruned_seq is missing" in refused.value.details["differences"]
        run_sql(database, refused.value.details["ddl"])
        assert database.prepare("verify") == []


def test_verify_names_what_somebody_dropped(store: str) -> None:
    """A missing index, column or table is found although the version is right, and the DDL puts it back."""
    with opened(store) as database:
        database.prepare()
        with database.writer.begin() as connection:
            connection.execute(text("DROP INDEX session_created"))
            connection.execute(text("DROP TABLE timer"))
            connection.execute(text("ALTER TABLE session DROP COLUMN pruned_seq"))
        before = dump(database)
        for policy in ("verify", "auto"):
            with pytest.raises(StoreSchema) as refused:
                database.prepare(policy)
            assert refused.value.details["differences"] == [
                "column session.pruned_seq is missing",
                "index session_created is missing",
                "table timer is missing",
            ]
        assert dump(database) == before
        run_sql(database, refused.value.details["ddl"])
        assert database.prepare("verify") == []


def test_tables_of_others_are_left_alone(store: str) -> None:
    """A database with a `session` table that is not ours is refused under either policy, with the way out."""
    with opened(store) as database:
        run_sql(database, "CREATE TABLE session (id INTEGER);\n")
        for policy in ("auto", "verify"):
            with pytest.raises(StoreSchema, match="schema=NAME"):
                database.prepare(policy)
        with database.read() as connection:
            assert inspect(connection).get_table_names() == ["session"]


async def test_a_running_cluster_keeps_its_schema(store: str) -> None:
    """While a cluster owns a store of an older version, a newer one does not change the tables under it."""
    with opened(store) as database:
        at_version(database, 1)
        with database.writer.begin() as connection:
            until = time.time_ns() // 1000 + 60_000_000
            values = {"until": until}
            statement = "INSERT INTO owner (namespace, generation, holder, lease_until) VALUES ('n', 1, 'h', :until)"
            connection.execute(text(statement), values)
        before = dump(database)
        with pytest.raises(StoreOwned, match="from version 1"):
            database.prepare()
        assert dump(database) == before
        with database.writer.begin() as connection:
            connection.execute(text("UPDATE owner SET lease_until = 1"))
        assert database.prepare() == list(range(2, NEWEST + 1))


BOOT = """
import multiprocessing, os, sys
from understudy.store.db.engine import Database

def boot():
    start.wait()
    applied = Database(sys.argv[1]).prepare()
    os.write(1, f"{applied}\\n".encode())  # in one piece, among those of the others

fork = multiprocessing.get_context("fork")  # so that they have imported everything, and all start at once
start = fork.Barrier(int(sys.argv[2]))
processes = [fork.Process(target=boot) for _ in range(start.parties)]
for process in processes:
    process.start()
for process in processes:
    process.join()
sys.exit(any(process.exitcode for process in processes))
"""


def boot(dsn: str, number: int) -> list[str]:
    """So many processes start together on a store; which migrations each of them applied."""
    done = subprocess.run([sys.executable, "-c", BOOT, dsn, str(number)], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


@pytest.mark.thorough
@pytest.mark.parametrize("version", [0, 1])
def test_many_nodes_may_boot_at_once(store: str, version: int) -> None:
    """Of eight processes that start together one applies the migrations; none fails."""
    if version:
        with opened(store) as database:
            at_version(database, version)
    assert boot(store, 8) == sorted([str(list(range(version + 1, NEWEST + 1))), *["[]"] * 7])


def test_a_schema_of_its_own(postgres: str) -> None:
    """With `?schema=NAME` the tables are in that PostgreSQL schema, beside others of the same names."""
    mark = "&" if "?" in postgres else "?"
    with opened(postgres) as database:
        run_sql(database, "CREATE TABLE session (id INTEGER);\n")
    with opened(f"{postgres}{mark}schema=agents") as database:
        assert database.prepare() == list(range(1, NEWEST + 1))
        assert database.prepare("verify") == []
        with database.read() as connection:
            assert inspect(connection).get_table_names(schema="public") == ["session"]
            assert set(inspect(connection).get_table_names(schema="agents")) == metadata.tables.keys()


def test_ddl_for_a_schema_of_its_own(postgres: str) -> None:
    """The printed DDL creates the schema too."""
    mark = "&" if "?" in postgres else "?"
    with opened(postgres) as database:
        run_sql(database, schema.ddl("postgresql", schema="agents"))
    with opened(f"{postgres}{mark}schema=agents") as database:
        assert database.prepare("verify") == []


@pytest.mark.parametrize(
    ("dsn", "expected"),
    [
        ("postgresql://u@h/db?schema=x", ("postgresql://u@h/db", "x")),
        ("postgresql://u@h/db?sslmode=require&schema=x&a=b", ("postgresql://u@h/db?sslmode=require&a=b", "x")),
        ("postgresql://u@h/db", ("postgresql://u@h/db", "")),
    ],
)  # fmt: skip
def test_the_schema_is_our_part_of_the_dsn(dsn: str, expected: tuple[str, str]) -> None:
    """libpq gets the DSN without it."""
    assert split_schema(dsn) == expected


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://u:p@h1:5432,h2:5433/db?target_session_attrs=read-write",
        "postgresql://u:p%40x@[::1]:5432/db",
        "postgresql:///db?host=/run/postgresql",
        "postgresql://h1,h2/db",
    ],
)
def test_several_hosts_are_libpqs_business(dsn: str) -> None:
    """DSNs with several hosts, IPv6 addresses or sockets are taken as they are."""
    assert check_store(dsn) == dsn


@pytest.mark.parametrize("dsn", ["postgresql://u:p@h1:5432,h2:x/db", "postgresql://u@h/db?schema=a-b", "mysql://h/db"])
def test_other_stores_are_refused(dsn: str) -> None:
    """A port that is no number, a schema that is no name, another database: an error before anything is opened."""
    with pytest.raises(InvalidConfiguration):
        Database(dsn)


async def test_an_owner_of_the_right_version_is_no_obstacle(store: str) -> None:
    """A node service that restarts beside its own supervisor's lease finds nothing to migrate."""
    with opened(store) as database:
        database.prepare()
        journal = Journal(database, "tests", "w", lambda committed: None)
        journal.start()
        await journal.submit(lambda tx: activation.acquire(tx, "me", 60_000_000, may_take=lambda _: False))
        assert await asyncio.to_thread(database.prepare) == []
        await journal.close()


def test_a_file_that_may_not_be_written(tmp_path: Path) -> None:
    """`verify` reads only: the file of a current store stays byte for byte."""
    path = tmp_path / "store.db"
    with opened(f"sqlite:///{path}") as database:
        database.prepare()
    before = path.read_bytes()
    with opened(f"sqlite:///{path}") as database:
        assert database.prepare("verify") == []
    assert path.read_bytes() == before


@pytest.mark.thorough
def test_many_nodes_may_boot_at_once_in_a_schema_of_their_own(postgres: str) -> None:
    """The schema itself is made once, too."""
    dsn = f"{postgres}{'&' if '?' in postgres else '?'}schema=agents"
    assert boot(dsn, 4) == sorted([str(list(range(1, NEWEST + 1))), *["[]"] * 3])


def test_the_ddl_of_the_error_makes_a_schema_of_its_own(postgres: str) -> None:
    """Under `verify`, what the error says is for the schema that the DSN names."""
    with opened(f"{postgres}{'&' if '?' in postgres else '?'}schema=agents") as database:
        with pytest.raises(StoreSchema) as refused:
            database.prepare("verify")
        run_sql(database, refused.value.details["ddl"])
        assert database.prepare("verify") == []


@pytest.mark.parametrize("columns", ["version VARCHAR(50)", "version BIGINT", "id INTEGER, name TEXT"])
def test_the_versions_of_another_tool_are_not_ours(store: str, columns: str) -> None:
    """A `schema_migration` that is not ours is left alone, and not taken for a newer version."""
    with opened(store) as database:
        run_sql(database, f"CREATE TABLE schema_migration ({columns});\n")
        for policy in ("auto", "verify"):
            with pytest.raises(StoreSchema, match="did not make"):
                database.prepare(policy)


def test_a_strangers_file_is_not_touched(tmp_path: Path) -> None:
    """Not a byte of a SQLite file that is not ours changes, whatever is asked of it."""
    path = tmp_path / "other.db"
    with opened(f"sqlite:///{path}") as database:
        run_sql(database, "CREATE TABLE session (id INTEGER);\n")
    before = path.read_bytes()
    with opened(f"sqlite:///{path}") as database:
        for policy in ("verify", "auto"):
            with pytest.raises(StoreSchema):
                database.prepare(policy)
    assert path.read_bytes() == before
