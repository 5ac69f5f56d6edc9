"""The life of the schema: numbered SQL files, applied in order, and a table that says which ones were.

A file is never changed once it was released. Its text is the same for both backends but for BLOB, which PostgreSQL
calls BYTEA; that and the splitting into statements is all that happens to it, so what `understudy store ddl` prints is
what a database administrator may run by hand.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from sqlalchemy import Connection, Inspector, Integer, func, inspect, select, text
from sqlalchemy.schema import CreateColumn, CreateIndex, CreateTable

from understudy.errors import StoreForbidden, StoreOwned, StoreSchema, StoreVersion

from . import tables
from .tables import metadata

VERSIONS = tables.SchemaMigration.__table__  # type: ignore[attr-defined]
OWNER = tables.Owner.__table__  # type: ignore[attr-defined]

OURS = {"schema_migration", "owner", "session", "event"}
"""Tables that every version of ours has: without them a `schema_migration` is another tool's."""

LOCK = 0x756E6465
"""PostgreSQL's advisory lock of whoever changes the schema: any constant."""


@dataclass(frozen=True)
class Migration:
    """One numbered file."""

    version: int
    sql: str

    def statements(self, backend: str) -> list[str]:
        """Its statements, in order, for `sqlite` or `postgresql`."""
        lines = [line for line in self.sql.splitlines() if not line.startswith("--")]
        sql = "\n".join(lines)
        if backend == "postgresql":
            sql = sql.replace(" BLOB ", " BYTEA ")
        return [statement.strip().removesuffix(";") for statement in sql.split(";\n") if statement.strip()]


@cache
def migrations() -> tuple[Migration, ...]:
    """All that this version of Understudy knows, oldest first."""
    folder = resources.files(__package__) / "migrations"
    files = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".sql")), key=lambda entry: entry.name)
    return tuple(Migration(int(entry.name[:4]), entry.read_text()) for entry in files)


def newest() -> int:
    """The schema version of this code."""
    return migrations()[-1].version


def pending(version: int) -> list[Migration]:
    """What leads from a version to the newest; 0 stands for an empty database."""
    return [migration for migration in migrations() if migration.version > version]


def ddl(backend: str, version: int = 0, schema: str = "") -> str:
    """The exact SQL that leads from a version to the newest, as one transaction; empty if nothing is missing.

    Args:
        schema: the PostgreSQL schema that holds the tables; empty for the connection's own.
    """
    parts = []
    if schema and version == 0:
        parts += [f'CREATE SCHEMA IF NOT EXISTS "{schema}"']
    if schema:
        parts += [f'SET search_path TO "{schema}"']
    for migration in pending(version):
        parts += migration.statements(backend)
        parts.append(f"INSERT INTO schema_migration (version, applied_at) VALUES ({migration.version}, {_now()})")
    return _script(parts if pending(version) else [])


def _script(statements: list[str]) -> str:
    """One transaction."""
    return "".join(f"{part};\n\n" for part in ["BEGIN", *statements, "COMMIT"]) if statements else ""


def version_of(connection: Connection) -> int:
    """The schema version of a database; 0 for one without our tables.

    Raises:
        StoreForbidden: this role may not look into the schema, where there may be some.
        StoreSchema: it has tables of the same names that Understudy did not make.
    """
    _require_usage(connection)
    inspector: Inspector = inspect(connection)
    strangers = sorted(set(inspector.get_table_names()) & metadata.tables.keys())
    if set(strangers) >= OURS and _is_number(inspector):
        return connection.execute(select(func.max(VERSIONS.c.version))).scalar() or 0
    if strangers:
        raise StoreSchema(
            f"the database has tables that Understudy did not make: {', '.join(strangers)}. Use another database or "
            "file, or (PostgreSQL) a schema of its own: postgresql://…/DATABASE?schema=NAME"
        )
    return 0


def _require_usage(connection: Connection) -> None:
    """To a role without this right PostgreSQL shows a schema as if it were empty."""
    if connection.dialect.name != "postgresql":
        return
    path = """SELECT replace(btrim(name, ' "'), '$user', current_user)
        FROM unnest(string_to_array(current_setting('search_path'), ',')) AS name"""
    statement = f"SELECT nspname FROM pg_namespace WHERE NOT has_schema_privilege(oid, 'USAGE') AND nspname IN ({path})"
    names = connection.execute(text(statement)).scalars().all()
    if names:
        raise StoreForbidden(f"permission denied for schema {', '.join(names)}: this role has no USAGE on it")


def _is_number(inspector: Inspector) -> bool:
    """Whether the table of versions counts as ours does: other tools have one of this name."""
    columns = {column["name"]: column["type"] for column in inspector.get_columns(VERSIONS.name)}
    return columns.keys() == {"version", "applied_at"} and isinstance(columns["version"], Integer)


def migrate(connection: Connection, schema: str = "") -> list[int]:
    """Bring the schema to the newest version, in the caller's transaction; returns the versions that were applied.

    Whoever comes at the same time waits, and then finds nothing left to do.

    Args:
        schema: the PostgreSQL schema that holds the tables, made if there is none; empty for the connection's own.

    Raises:
        StoreVersion: the database is newer than this code.
        StoreOwned: a cluster works with the older schema.
        StoreSchema: there are tables of the same names that Understudy did not make, or some of ours are incomplete.
    """
    backend = connection.dialect.name
    if backend == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
    if schema and not inspect(connection).has_schema(schema):  # only then the right to make one is needed
        connection.exec_driver_sql(f'CREATE SCHEMA "{schema}"')
    version = check_not_newer(connection)
    missing = pending(version)
    if missing and version:
        _require_no_owner(connection, version)
    for migration in missing:
        for statement in migration.statements(backend):
            connection.exec_driver_sql(statement)
        connection.execute(VERSIONS.insert().values(version=migration.version, applied_at=_now()))
    require(connection, schema)
    return [migration.version for migration in missing]


def check_not_newer(connection: Connection) -> int:
    """The database's version. Raises `StoreVersion` if this code does not know it yet."""
    version = version_of(connection)
    if version > newest():
        raise StoreVersion(f"the database has schema version {version}; this code knows {newest()}")
    return version


def differences(connection: Connection) -> list[str]:
    """What the database lacks of the schema that this code needs, in words; additions of others are no concern.

    Raises:
        StoreVersion: the database is newer than this code.
        StoreSchema: there are tables of the same names that Understudy did not make.
    """
    version = check_not_newer(connection)
    if version == 0:
        return ["no tables yet"]
    found = [f"migration {migration.version} is not applied" for migration in pending(version)]
    return found + [words for words, _ in _gaps(connection)]


def missing_ddl(connection: Connection, schema: str = "") -> str:
    """The exact SQL that a database lacks: migrations, else what somebody took out of the newest version."""
    version = version_of(connection)
    if pending(version):
        return ddl(connection.dialect.name, version, schema)
    statements = [statement for _, statements in _gaps(connection) for statement in statements]
    head = [f'SET search_path TO "{schema}"'] if schema and statements else []
    compiled = [str(statement.compile(dialect=connection.dialect)).strip() for statement in statements]
    return _script([*head, *compiled])


def _gaps(connection: Connection) -> Iterator[tuple[str, list[Any]]]:
    """Each table, column and index that is missing, in words, with the statements that make it."""
    inspector: Inspector = inspect(connection)
    # All tables at once: every start of a node service, a restarted one's too, waits for this.
    columns_of = _names(inspector.get_multi_columns(filter_names=list(metadata.tables)))
    indexes_of = _names(inspector.get_multi_indexes(filter_names=list(metadata.tables)))
    for table in metadata.sorted_tables:
        if table.name not in columns_of:
            yield f"table {table.name} is missing", [CreateTable(table), *map(CreateIndex, table.indexes)]
            continue
        for column in table.columns:
            if column.name not in columns_of[table.name]:
                made = CreateColumn(column).compile(dialect=connection.dialect)
                statement = text(f"ALTER TABLE {table.name} ADD COLUMN {made}")
                yield f"column {table.name}.{column.name} is missing", [statement]
        for index in table.indexes:
            if index.name not in indexes_of[table.name]:
                yield f"index {index.name} is missing", [CreateIndex(index)]


def _names(found: Mapping[Any, Sequence[Any]]) -> dict[str, set[str]]:
    """What the inspector found, by table: the names alone."""
    return {table: {item["name"] for item in items} for (_, table), items in found.items()}


def require(connection: Connection, schema: str = "") -> None:
    """Refuse a database that lacks something.

    Raises:
        StoreSchema: with every difference, and the exact DDL that is missing, in its details.
        StoreVersion: the database is newer than this code.
    """
    found = differences(connection)
    if found:
        details = {"differences": found, "ddl": missing_ddl(connection, schema)}
        if not pending(version_of(connection)):  # then `migrate` would say the same again
            details["hint"] = "`understudy store verify` prints the SQL that puts it back: run that by hand."
        raise StoreSchema(f"the database lacks what this version needs: {'; '.join(found)}.", details=details)


def _require_no_owner(connection: Connection, version: int) -> None:
    """A running cluster of an older version would go on with a schema that it does not know."""
    statement = select(OWNER.c.namespace, OWNER.c.holder, OWNER.c.lease_until).where(OWNER.c.lease_until > _now())
    row = connection.execute(statement).first()
    if row is not None:
        seconds = (row.lease_until - _now()) / 1e6
        raise StoreOwned(
            f"the schema must go from version {version} to {newest()}, but namespace {row.namespace!r} is owned by "
            f"{row.holder} for another {seconds:.0f} s",
            details={"holder": row.holder, "seconds": seconds, "hint": "Stop that cluster first (`understudy down`)."},
        )


def _now() -> int:
    return time.time_ns() // 1000
