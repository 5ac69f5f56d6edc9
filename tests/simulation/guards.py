"""The guards of simulated agents: hooks beside the model call, of which some trip, before or after its answer."""

from __future__ import annotations

import asyncio
import random
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from understudy.actors.hooks import HookContext, Refuse, Stop, describe_hook, hook
from understudy.store.db.statements import SESSION
from understudy.workflows import WORKFLOW

from .tools import WORLD

if TYPE_CHECKING:
    from .plan import Work
    from .world import World

STOPPED = "stopped by a guard"
"""The text of a run that a guard ended."""

SECONDS = (0.0, 0.0, 0.02, 0.1, 0.5, 2.0)
"""So long a guard is at work."""


def _world() -> World:
    return WORLD[-1]


def _drawn(name: str, call_key: str, of: int) -> int:
    """The same in every activation."""
    return zlib.crc32(f"{name} {call_key}".encode()) % of


def trips(name: str, call_key: str) -> Refuse | Stop | None:
    """What the guard of this name makes of a model call."""
    wanted = (Refuse("a guard does not want it"), Stop(STOPPED))
    drawn = _drawn(name, call_key, 40)
    return wanted[drawn] if drawn < len(wanted) else None


@hook("before_model", parallel=True)
async def guard(context: HookContext) -> Refuse | Stop | None:
    """Look at a model call for a while."""
    _world().invariants.guarded.begins("guard", context)
    await asyncio.sleep(SECONDS[_drawn("for", context.call_key, len(SECONDS))])
    _world().invariants.guarded.ends("guard", context)
    return trips("guard", context.call_key)


@hook("before_model", parallel=True)
def guard_in_thread(context: HookContext) -> Refuse | Stop | None:
    """The same without await."""
    _world().invariants.guarded.begins("guard_in_thread", context)
    seconds = SECONDS[_drawn("in thread for", context.call_key, len(SECONDS))]
    if seconds:
        _world().sleep_in_thread(seconds)
    _world().invariants.guarded.ends("guard_in_thread", context)
    return trips("guard_in_thread", context.call_key)


NAMES = ("guard", "guard_in_thread")

GUARDS: list[dict[str, Any]] = [describe_hook(item, pickle=None)[0] for item in (guard, guard_in_thread)]
"""Their compiled descriptions."""


def some_guarded(chosen: random.Random, work: tuple[Work, ...]) -> tuple[Work, ...]:
    """The same work; in some plans guards are at work beside the model calls of some agents, one or two of them."""
    if chosen.random() >= 0.2:
        return work
    return tuple(_guarded(chosen, item) if chosen.random() < 0.6 else item for item in work)


def _guarded(chosen: random.Random, work: Work) -> Work:
    some = GUARDS[: chosen.choice((1, 1, 2))]
    return replace(work, spec={**work.spec, "hooks": [*work.spec.get("hooks", ()), *some]})


class Guarded:
    """What guards have made of model calls: what may follow from their answers."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._names: dict[str, list[str]] = {}
        self._ended: set[tuple[str, str]] = set()
        self._begun: set[tuple[str, str]] = set()

    def names(self, session_id: str) -> list[str]:
        """The guards of a session; a sub-agent that is a copy of its parent has the same. Those of a workflow, which
        has no model, never have anything to look at."""
        if session_id not in self._names:
            with self._world.store.committed() as connection:
                where = SESSION.c.session_id == session_id
                spec = connection.execute(select(SESSION.c.spec).where(where)).scalar() or {}
            guards = [hook["name"] for hook in spec.get("hooks") or () if hook.get("parallel")]
            self._names[session_id] = guards if spec.get("kind") != WORKFLOW else []
        return self._names[session_id]

    def begins(self, name: str, context: HookContext) -> None:
        """A guard is called: it learns if it may have been called before."""
        known = (name, context.call_key)
        if self._world.invariants.is_current(context.session_id):
            if known in self._begun and not context.redone:
                self._world.invariants.violated(f"{name} was called again for {context.call_key}, without `redone`")
            self._begun.add(known)
        self._world.note(f"{name} looks at {context.call_key}{' again' if context.redone else ''}")

    def ends(self, name: str, context: HookContext) -> None:
        """It has its verdict."""
        self._ended.add((name, context.call_key))
        self._world.counts["guards tripped"] += trips(name, context.call_key) is not None

    def problem(self, wait_key: str) -> str | None:
        """Why nothing may follow from the answer of a model call; None if it may."""
        names = self.names(wait_key.partition("/")[0])
        waited_for = [name for name in names if (name, wait_key) not in self._ended]
        if waited_for:
            return f"{', '.join(waited_for)} had no verdict"
        refused = [name for name in names if trips(name, wait_key) is not None]
        return f"{', '.join(refused)} did not let it pass" if refused else None

    def forget(self, session_ids: set[str]) -> None:
        """Sessions were removed."""
        self._names = {name: found for name, found in self._names.items() if name not in session_ids}
        for known in (self._begun, self._ended):
            known -= {one for one in known if one[1].partition("/")[0] in session_ids}
