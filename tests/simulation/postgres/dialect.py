"""SQLAlchemy's side: SQL that the simulated server takes apart and SQLite executes, with PostgreSQL's meaning."""

from __future__ import annotations

from typing import Any, ClassVar

import psycopg
from sqlalchemy import Column, LargeBinary
from sqlalchemy.dialects.sqlite.base import SQLiteCompiler, SQLiteDialect
from sqlalchemy.sql import operators
from sqlalchemy.sql.elements import UnaryExpression


class Compiler(SQLiteCompiler):
    """SQLite's SQL with PostgreSQL's order of NULLs, and with the clauses that lock."""

    def order_by_clause(self, select: Any, **options: Any) -> str:
        parts = [self._ordered(clause, **options) for clause in select._order_by_clauses]
        return f" ORDER BY {', '.join(parts)}" if parts else ""

    def _ordered(self, clause: Any, **options: Any) -> str:
        """PostgreSQL takes NULL for the largest value, SQLite for the smallest."""
        text = self.process(clause, **options)
        if isinstance(clause, Column) and not clause.nullable:
            return text
        modifier = clause.modifier if isinstance(clause, UnaryExpression) else None
        if modifier in (operators.nulls_first_op, operators.nulls_last_op):
            return text
        return text + (" NULLS FIRST" if modifier is operators.desc_op else " NULLS LAST")

    def for_update_clause(self, select: Any, **_: Any) -> str:
        asked = select._for_update_arg
        if asked.key_share or asked.of:
            raise NotImplementedError(f"not simulated: {asked}")
        beyond = " NOWAIT" if asked.nowait else " SKIP LOCKED" if asked.skip_locked else ""
        return (" FOR SHARE" if asked.read else " FOR UPDATE") + beyond


class Bytes(LargeBinary):
    """Bytes as they are."""

    def bind_processor(self, dialect: Any) -> None:
        return None


class Dialect(SQLiteDialect):
    """What SQLAlchemy must know of the simulated server."""

    colspecs: ClassVar[Any] = {**SQLiteDialect.colspecs, LargeBinary: Bytes}
    name = "simulated"
    driver = "simulated"
    default_paramstyle = "named"
    statement_compiler = Compiler
    supports_statement_cache = True
    supports_sane_rowcount = True
    supports_sane_multi_rowcount = False
    insert_returning = update_returning = delete_returning = False
    postfetch_lastrowid = False

    def __init__(self, isolation_level: str | None = None) -> None:
        super().__init__(paramstyle="named", isolation_level=isolation_level)
        self.default_isolation_level = isolation_level or "READ COMMITTED"
        self.dbapi = psycopg
        self.loaded_dbapi = psycopg

    def initialize(self, connection: Any) -> None:
        """There is nothing to be asked."""

    def do_ping(self, dbapi_connection: Any) -> bool:
        dbapi_connection.ping()
        return True

    def is_disconnect(self, e: Any, connection: Any, cursor: Any) -> bool:
        return isinstance(e, psycopg.Error) and connection is not None and connection.closed

    def get_isolation_level_values(self, dbapi_connection: Any) -> list[str]:
        return ["READ COMMITTED", "REPEATABLE READ"]

    def get_isolation_level(self, dbapi_connection: Any) -> str:
        level: str = dbapi_connection.isolation_level
        return level

    def get_default_isolation_level(self, dbapi_conn: Any) -> str:
        return "READ COMMITTED"

    def set_isolation_level(self, dbapi_connection: Any, level: str) -> None:
        dbapi_connection.isolation_level = level
