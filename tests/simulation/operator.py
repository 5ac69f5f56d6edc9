"""An operator's commands: processes of their own that open the store beside the services."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from understudy.errors import UnderstudyError
from understudy.store import retention
from understudy.store.journal import Journal

if TYPE_CHECKING:
    from .world import World

TRIES = 40


async def prune(world: World, root_id: str) -> bool:
    """`understudy store prune`: remove a tree that has ended; False if it is kept."""
    tree: list[str] = []
    for _ in range(TRIES):
        database = world.store.open(world.scheduler.current.name)
        journal = Journal(database, world.namespace, "operator", lambda _committed: None, patience=20.0)
        try:
            journal.start()
            found = [row[0] for row in world.committed(f"SELECT session_id FROM session WHERE root_id = '{root_id}'")]
            tree = found or tree
            removed = await journal.submit(lambda tx: retention.drop_tree(tx, root_id))
            if removed.kept:
                world.note(f"{root_id} is kept: {removed.kept}")
        except UnderstudyError as error:
            world.note(f"prune failed: {error}")
        finally:
            await journal.close()
        if tree and not world.committed(f"SELECT 1 FROM session WHERE session_id = '{root_id}'"):
            world.forget(tree)
            world.note(f"{root_id} is removed: {tree}")
            return True
        await asyncio.sleep(1.0)
    return False
