"""Operations of a drain: which nodes give their sessions away, and the move of a session to its next home."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from msgspec import Struct
from sqlalchemy import delete, insert, select, update

from understudy import events
from understudy.errors import CannotDrain
from understudy.identifiers import home_of
from understudy.scaling import SCALED_DOWN

from ..db.session_row import SessionRow
from ..db.statements import DRAIN, columns_of
from ..transaction import Transaction


class Drain(Struct):
    """A node that is drained, or was; see `tables.Drain`."""

    node_id: str
    reason: str
    stop: int
    started_at: int
    deadline: int
    finished_at: int


def check_drain(node_id: str, nodes: Collection[str], drained: Collection[str], *, stop: bool) -> None:
    """Refuse a drain that would leave nobody to go on.

    Args:
        nodes: those that have a service.
        drained: those of them that are drained already.
        stop: the services are about to stop: nobody has to go on.

    Raises:
        CannotDrain: the node is unknown, or the last one.
    """
    if node_id not in nodes:
        raise CannotDrain(f"node {node_id!r} has no service here", details={"nodes": sorted(nodes)})
    if not stop and not set(nodes) - set(drained) - {node_id}:
        raise CannotDrain(
            f"node {node_id[:8]} is the only one that sessions can be on", details={"nodes": sorted(nodes)}
        )


def begin(
    tx: Transaction, node_id: str, deadline: int, *, reason: str, stop: bool = False, nodes: Collection[str] = ()
) -> None:
    """Have a node give its sessions away until `deadline` (microseconds UTC). Repeated, the earlier deadline holds, and
    the first reason, unless that was the load: who drains it for another reason does not get it back when that rises.

    Args:
        nodes: those that have a service, if it is to be refused where it can't be; finished drains of others are
            forgotten.

    Raises:
        StaleGeneration: the supervisor of this journal no longer owns the store.
        CannotDrain: see `check_drain`.
    """
    found = drains(tx, lock=True)
    tx.require_generation()
    if nodes:
        check_drain(node_id, nodes, found, stop=stop)
    known = found.get(node_id)
    gone = [drain.node_id for drain in found.values() if nodes and drain.finished_at and drain.node_id not in nodes]
    if gone:
        end(tx, gone)
    where = (DRAIN.c.namespace == tx.namespace, DRAIN.c.node_id == node_id)
    tx.writes += 1
    if known is None:
        values = {"reason": reason, "stop": int(stop), "started_at": tx.now, "deadline": deadline, "finished_at": 0}
        tx.connection.execute(insert(DRAIN).values(namespace=tx.namespace, node_id=node_id, **values))
    else:
        changed: dict[str, Any] = {"deadline": min(deadline, known.deadline), "stop": max(int(stop), known.stop)}
        if known.reason == SCALED_DOWN:
            changed["reason"] = reason
        tx.connection.execute(update(DRAIN).where(*where).values(**changed))


def end(tx: Transaction, node_ids: Collection[str]) -> int:
    """Take drains back, or forget those of nodes that are gone; returns how many there were.

    Raises:
        StaleGeneration: the supervisor of this journal no longer owns the store.
    """
    tx.require_generation()
    tx.writes += 1
    where = (DRAIN.c.namespace == tx.namespace, DRAIN.c.node_id.in_(list(node_ids)))
    return int(tx.connection.execute(delete(DRAIN).where(*where)).rowcount)


def finish(tx: Transaction, node_id: str, started_at: int) -> None:
    """Note that a drained node has nothing left; nothing if the drain that began then was taken back, or it was noted
    before: this may come late, when another drain of the node has begun."""
    tx.require_generation()
    tx.writes += 1
    where = (DRAIN.c.namespace == tx.namespace, DRAIN.c.node_id == node_id, DRAIN.c.started_at == started_at)
    tx.connection.execute(update(DRAIN).where(*where, DRAIN.c.finished_at == 0).values(finished_at=tx.now))


def end_stops(tx: Transaction) -> None:
    """The services that were to stop have, and others start: what was parked goes on."""
    tx.connection.execute(
        delete(DRAIN).where(DRAIN.c.namespace == tx.namespace, DRAIN.c.stop == 1, DRAIN.c.finished_at > 0)
    )


def drains(tx: Transaction, *, lock: bool = False) -> dict[str, Drain]:
    """The nodes that are drained, or were, and how that stands; locked for who writes what follows from it."""
    statement = select(*columns_of(DRAIN, Drain))
    statement = statement.where(DRAIN.c.namespace == tx.namespace).order_by(DRAIN.c.node_id)
    return {row.node_id: Drain(*row) for row in tx.connection.execute(tx.locking(statement) if lock else statement)}


def leave(tx: Transaction, row: SessionRow, here: str, homes: Collection[str], *, forced: bool = False) -> bool:
    """Have a session leave its frame and a node that is drained; False if it is not at home there, or has no work.

    Its activation is over with this: whatever still holds it is fenced. That is no death, and counts for nothing.

    Args:
        here: the drained node.
        homes: the nodes that it can go to; without any it stays, parked, for the next start of the services.
    """
    if not row.active or row.node_id != here:
        return False
    tx.changed(row)
    row.epoch += 1
    row.frame_id = row.actor_pid = None
    if homes:
        target = home_of(row.root_id, homes)
        tx.append(row, events.SessionMoved(from_node=here, to_node=target, forced=forced))
        row.node_id, row.moved = target, 1
    elif forced:
        row.redone = 1
    return True
