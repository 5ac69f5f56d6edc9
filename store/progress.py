"""How far the metrics' checkpoint and the sinks have come with a writer's events."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import delete, insert, select

from .statements import EXPORT_CURSOR, METRIC_STATE
from .transaction import Row, Transaction

SPANS, EVENTS = "spans", "events"
"""The sinks: spans, and the event log as JSON lines."""


def save_metrics(tx: Transaction, writer: str, writer_seq: int, state: dict[str, Any] | None) -> None:
    """Keep the metric totals up to here."""
    _replace(tx, METRIC_STATE, {"writer": writer}, {"writer_seq": writer_seq, "state": state})


def save_cursor(tx: Transaction, writer: str, sink: str, writer_seq: int) -> None:
    """Note that the sink has everything up to here."""
    _replace(tx, EXPORT_CURSOR, {"writer": writer, "sink": sink}, {"writer_seq": writer_seq})


def forget_sinks(tx: Transaction, writer: str, kept: Collection[str]) -> None:
    """Drop the cursors of a writer's other sinks, which nobody asks for any more: nothing waits for them."""
    tx.writes += 1
    where = (EXPORT_CURSOR.c.namespace == tx.namespace, EXPORT_CURSOR.c.writer == writer)
    tx.connection.execute(delete(EXPORT_CURSOR).where(*where, EXPORT_CURSOR.c.sink.not_in(kept)))


def take(tx: Transaction, writer: str, number: int) -> int:
    """Note the next places in a writer's log as measured and exported, and return the last one before them.

    Two that do it at once: the second waits for the first at this row, finds it replaced, and its journal tries again.
    """
    where = (METRIC_STATE.c.namespace == tx.namespace, METRIC_STATE.c.writer == writer)
    last: int = tx.connection.execute(select(METRIC_STATE.c.writer_seq).where(*where)).scalar() or 0
    save_metrics(tx, writer, last + number, None)
    save_cursor(tx, writer, SPANS, last + number)
    return last


def _replace(tx: Transaction, table: Any, key: Row, values: Row) -> None:
    tx.writes += 1
    where = [table.c[name] == value for name, value in key.items()]
    tx.connection.execute(delete(table).where(table.c.namespace == tx.namespace, *where))
    tx.connection.execute(insert(table).values(namespace=tx.namespace, **key, **values))
