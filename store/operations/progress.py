"""How far the metrics' checkpoint and the sinks have come with a writer's events."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any

from sqlalchemy import delete, insert, select
from sqlalchemy.dialects import postgresql, sqlite

from ..db.prepared import Row, write
from ..db.statements import EXPORT_CURSOR, METRIC_STATE
from ..transaction import Transaction

SPANS, EVENTS = "spans", "events"
"""The sinks: spans, and the event log as JSON lines."""


def save_metrics(tx: Transaction, writer: str, writer_seq: int, state: dict[str, Any] | None) -> None:
    """Keep the metric totals up to here; nothing if those of later events are kept."""
    _advance(tx, METRIC_STATE, {"writer": writer}, {"writer_seq": writer_seq, "state": state})


def save_cursor(tx: Transaction, writer: str, sink: str, writer_seq: int) -> None:
    """Note that the sink has everything up to here; nothing if it is known to have more."""
    _advance(tx, EXPORT_CURSOR, {"writer": writer, "sink": sink}, {"writer_seq": writer_seq})


def keep_sinks(tx: Transaction, writer: str, kept: Collection[str]) -> None:
    """Have cursors for these sinks of a writer, from the start of its log on, and for no others: nothing waits for what
    nobody asks for any more."""
    where = (EXPORT_CURSOR.c.namespace == tx.namespace, EXPORT_CURSOR.c.writer == writer)
    tx.connection.execute(delete(EXPORT_CURSOR).where(*where, EXPORT_CURSOR.c.sink.not_in(kept)))
    for sink in kept:
        save_cursor(tx, writer, sink, 0)


def take(tx: Transaction, writer: str, number: int, runs: tuple[int, int]) -> int:
    """Note the next places in a writer's log as measured and exported, and return the last one before them.

    Two that do it at once: the second waits for the first at this row, finds it replaced, and its journal tries again.

    Args:
        runs: how many runs come with these events, and how many of them have ended. Nobody else counts them.
    """
    where = (METRIC_STATE.c.namespace == tx.namespace, METRIC_STATE.c.writer == writer)
    found = tx.connection.execute(select(METRIC_STATE.c.writer_seq, METRIC_STATE.c.state).where(*where)).first()
    last, state = found if found is not None else (0, None)
    before = (state or {}).get("runs", (0, 0))
    state = {"runs": [known + new for known, new in zip(before, runs, strict=True)]}
    _replace(tx, METRIC_STATE, {"writer": writer}, {"writer_seq": last + number, "state": state})
    _replace(tx, EXPORT_CURSOR, {"writer": writer, "sink": SPANS}, {"writer_seq": last + number})
    return int(last)


def _advance(tx: Transaction, table: Any, key: Row, values: Row) -> None:
    """Insert a row, or replace it by one that is further; of two that do it at once the further one stays."""
    tx.writes += 1
    statement = _advancing(tx.connection.dialect.name, table, tuple(key), tuple(values))
    write(tx.connection, statement, {"namespace": tx.namespace, **key, **values})


@cache
def _advancing(dialect_name: str, table: Any, key: tuple[str, ...], names: tuple[str, ...]) -> Any:
    dialect = sqlite if dialect_name == "sqlite" else postgresql
    new = dialect.insert(table)
    further = new.excluded.writer_seq >= table.c.writer_seq
    return new.on_conflict_do_update(
        index_elements=["namespace", *key], set_={name: new.excluded[name] for name in names}, where=further
    )


def _replace(tx: Transaction, table: Any, key: Row, values: Row) -> None:
    tx.writes += 1
    where = [table.c[name] == value for name, value in key.items()]
    tx.connection.execute(delete(table).where(table.c.namespace == tx.namespace, *where))
    tx.connection.execute(insert(table).values(namespace=tx.namespace, **key, **values))
