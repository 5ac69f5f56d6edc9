"""The node services that there are or were, and how far the log that each of them wrote is dealt with."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select

from ..db.statements import EVENT, EXPORT_CURSOR, METRIC_STATE, SERVICE, columns_of
from ..transaction import Transaction
from .progress import SPANS

FORGOTTEN_AFTER = 86_400_000_000
"""Microseconds since its start after which the row of a service that is gone may go; no start takes that long."""


@dataclass(frozen=True)
class Log:
    """The log of one writer, and how much of it is in the metrics' checkpoint and with the sinks.

    Attributes:
        last: the `writer_seq` of its newest event that the store still has; 0 for none.
        measured: the checkpoint's; None without one.
        exported: by sink.
    """

    writer: str
    last: int
    measured: int | None
    exported: dict[str, int]

    @property
    def unmeasured(self) -> int:
        """How many of its events are not in the metrics' checkpoint."""
        return max(0, self.last - (self.measured or 0))

    @property
    def unexported(self) -> int:
        """How many of its events the slowest sink does not have."""
        return max(0, self.last - min({SPANS: 0, **self.exported}.values()))

    def is_done(self) -> bool:
        """Whether nothing of it is left to be measured or exported."""
        return not self.unmeasured and not self.unexported


@dataclass(frozen=True)
class Announced:
    """What a node's service has said of itself; see `tables.Service`."""

    node_id: str
    writer: str
    address: str
    started_at: int


def announce(tx: Transaction, node_id: str, writer: str, address: str) -> None:
    """Note that a node's service is there; replaces what was known of that node."""
    forget(tx, [node_id])
    values = {"node_id": node_id, "writer": writer, "address": address, "started_at": tx.now}
    tx.connection.execute(insert(SERVICE).values(namespace=tx.namespace, **values))


def forget(tx: Transaction, node_ids: Collection[str]) -> None:
    """Remove what is known of these nodes' services."""
    tx.writes += 1
    where = (SERVICE.c.namespace == tx.namespace, SERVICE.c.node_id.in_(list(node_ids)))
    tx.connection.execute(delete(SERVICE).where(*where))


def services(connection: Connection, namespace: str) -> list[Announced]:
    """What was announced, by node."""
    statement = select(*columns_of(SERVICE, Announced))
    statement = statement.where(SERVICE.c.namespace == namespace).order_by(SERVICE.c.node_id)
    return [Announced(*row) for row in connection.execute(statement)]


def logs(connection: Connection, namespace: str) -> list[Log]:
    """The logs of all writers: of those that have events, a checkpoint or a cursor."""
    measured: dict[str, int] = dict(_rows(connection, namespace, METRIC_STATE, "writer", "writer_seq"))
    exported: dict[str, dict[str, int]] = {}
    for writer, sink, seq in _rows(connection, namespace, EXPORT_CURSOR, "writer", "sink", "writer_seq"):
        exported.setdefault(writer, {})[sink] = seq
    last = log_ends(connection, namespace)
    return [
        Log(writer, last.get(writer, 0), measured.get(writer), exported.get(writer, {}))
        for writer in sorted({*measured, *exported, *last})
    ]


def _rows(connection: Connection, namespace: str, table: Any, *names: str) -> Any:
    statement = select(*(table.c[name] for name in names)).where(table.c.namespace == namespace)
    return connection.execute(statement).all()


def log_ends(connection: Connection, namespace: str) -> dict[str, int]:
    """The journals that have events, each with the `writer_seq` of the newest one that the store has.

    One statement, however many have come and gone: it goes from one to the next in the index of their logs, where
    DISTINCT and GROUP BY would read all of it.
    """
    here = EVENT.c.namespace == namespace
    log = select(func.min(EVENT.c.writer).label("writer")).where(here).cte("log", recursive=True)
    following = select(func.min(EVENT.c.writer)).where(here, EVENT.c.writer > log.c.writer).scalar_subquery()
    log = log.union_all(select(following).where(log.c.writer.is_not(None)))
    end = select(func.max(EVENT.c.writer_seq)).where(here, EVENT.c.writer == log.c.writer).scalar_subquery()
    found = connection.execute(select(log.c.writer, end).where(log.c.writer.is_not(None)))
    return {writer: seq for writer, seq in found}
