"""What all tables have in common: their base, and kinds of columns."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON as SqlJson
from sqlalchemy import BigInteger, MetaData, Text
from sqlmodel import Field, SQLModel

# Not JSONB: `json` keeps key order and bytes as given, and takes \u0000 escapes that JSONB refuses.
Json = SqlJson(none_as_null=True)

metadata = MetaData()


class Table(SQLModel):
    """Base of our tables: own metadata, so that a user's SQLModel tables stay apart."""

    metadata = metadata


def key_column(**options: Any) -> Any:
    return Field(primary_key=True, sa_type=Text, **options)


def text_column(default: Any = None) -> Any:
    return Field(default=default, sa_type=Text, nullable=default is None)


def number_column(default: Any = 0) -> Any:
    return Field(default=default, sa_type=BigInteger, nullable=default is None)


def json_column(default: Any = None) -> Any:
    return Field(default=default, sa_type=Json, nullable=True)


class NamespaceTable(Table):
    """Base of those whose rows belong to a namespace, which is part of every key."""

    namespace: str = key_column()
