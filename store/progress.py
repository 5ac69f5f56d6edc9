"""How far the metrics' checkpoint and the sinks have come with a writer's events."""

from __future__ import annotations

from typing import Any

from sqlalchemy import delete, insert

from .statements import EXPORT_CURSOR, METRIC_STATE
from .transaction import Row, Transaction

SPANS = "spans"
"""The sink that exports spans."""


def save_metrics(tx: Transaction, writer: str, writer_seq: int, state: dict[str, Any] | None) -> None:
    """Keep the metric totals up to here."""
    _replace(tx, METRIC_STATE, {"writer": writer}, {"writer_seq": writer_seq, "state": state})


def save_cursor(tx: Transaction, writer: str, sink: str, writer_seq: int) -> None:
    """Note that the sink has everything up to here."""
    _replace(tx, EXPORT_CURSOR, {"writer": writer, "sink": sink}, {"writer_seq": writer_seq})


def _replace(tx: Transaction, table: Any, key: Row, values: Row) -> None:
    tx.writes += 1
    where = [table.c[name] == value for name, value in key.items()]
    tx.connection.execute(delete(table).where(table.c.namespace == tx.namespace, *where))
    tx.connection.execute(insert(table).values(namespace=tx.namespace, **key, **values))
