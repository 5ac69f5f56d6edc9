"""An operator's commands: processes of their own that open the store beside the services."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from understudy.errors import Conflict, UnderstudyError
from understudy.store.journal import Journal
from understudy.store.operations import activation
from understudy.store.upkeep import archive, retention
from understudy.supervisor.supervisor import LEASE_SECONDS as OWNER_LEASE_SECONDS
from understudy.supervisor.supervisor import RENEW_SECONDS

if TYPE_CHECKING:
    from understudy.store.transaction import Transaction

    from .world import World

TRIES = 40

RIVAL = "rival/"
"""So the holders of the store begin that belong to another cluster."""


async def prune(world: World, root_id: str, exported: dict[str, int] | None = None) -> list[str]:
    """`understudy store prune`: remove a tree that has ended; the sessions that are gone, none if it is kept.

    Args:
        exported: only while it is as it was exported: the `seq` of each session. A late answer of a model changes it
            also when nothing is left to do.
    """

    def drop(tx: Transaction) -> retention.Removed:
        tx.load(exported or ())
        if any((row := tx.find(name)) is not None and row.seq != seq for name, seq in (exported or {}).items()):
            raise Conflict("something has happened since it was exported", session_id=root_id)
        return retention.drop_tree(tx, root_id)

    tree: list[str] = []
    for _ in range(TRIES):
        found = [row[0] for row in world.committed(f"SELECT session_id FROM session WHERE root_id = '{root_id}'")]
        tree = found or tree
        removed = await _do(world, drop)
        if removed is not None and removed.kept:
            world.note(f"{root_id} is kept: {removed.kept}")
        if tree and not world.committed(f"SELECT 1 FROM session WHERE session_id = '{root_id}'"):
            world.note(f"{root_id} is removed: {tree}")
            return tree
        await asyncio.sleep(1.0)
    return []


async def put_away(world: World, root_id: str) -> bool:
    """`understudy store export`, `prune`, `import`: a tree that has nothing to do, now or later, goes, and is back."""
    if world.committed(
        "SELECT 1 FROM session, timer WHERE session.session_id = timer.session_id"
        f" AND session.root_id = '{root_id}' UNION SELECT 1 FROM session WHERE root_id = '{root_id}' AND active = 1"
    ):
        return False
    with world.store.committed() as connection:
        data = "".join(archive.export(connection, world.namespace, root_id, tree=True)).encode()
    tree = world.committed(f"SELECT session_id, seq FROM session WHERE root_id = '{root_id}'")
    if not await prune(world, root_id, dict(tree)):
        return False
    found = archive.read(data, "archive")
    for _ in range(TRIES):
        if await _do(world, lambda tx: archive.load(tx, found, trust_code=True)) is not None:
            world.note(f"{root_id} is back")
            return True
        await asyncio.sleep(1.0)
    world.invariants.violated(f"{root_id} was removed and can't be imported")
    return False


async def own(world: World, number: int, seconds: float) -> None:
    """Another cluster, which believes that the store's owner is dead, owns it for a while, or until nothing goes wrong
    any more."""
    holder, lease = f"{RIVAL}{number}/elsewhere:0:0", round(OWNER_LEASE_SECONDS * 1e6)
    generation = await _do(world, lambda tx: activation.acquire(tx, holder, lease, may_take=lambda _: True))
    if generation is None:
        return
    world.note(f"{holder} owns the store, as generation {generation}")
    until = world.scheduler.time() + seconds
    while world.scheduler.time() < until and not world.faults.over:
        await asyncio.sleep(min(RENEW_SECONDS, until - world.scheduler.time()))
        await _do(world, lambda tx: activation.renew(tx, generation, holder, lease))
    await _do(world, lambda tx: activation.renew(tx, generation, holder, 0))


async def _do(world: World, operation: Callable[[Any], Any]) -> Any:
    """An operation in a journal of its own; None if it failed."""
    database = world.store.open(world.scheduler.current.name)
    journal = Journal(database, world.namespace, "operator", lambda _committed: None, patience=20.0)
    try:
        journal.start()
        return await journal.submit(operation)
    except UnderstudyError as error:
        world.note(f"an operator's command failed: {error}")
        return None
    finally:
        await journal.close()
