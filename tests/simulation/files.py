"""Files that simulated sessions leave in the working directories of their nodes: who comes back to them finds them."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from understudy.events import SessionActivated

from .delegating import STARTING
from .tasks import INPUTS, rewritten
from .tools import KEEP_FILE, TOOLS

if TYPE_CHECKING:
    from .plan import Work
    from .world import World

WORKSPACE = "/files"


def with_files(chosen: random.Random, work: Work) -> Work:
    """The same work; its agents leave files at their nodes, or only its sub-agents do, where it has some."""
    below = bool(work.spec["agents"]) and chosen.random() < 0.4

    def added(text: str, *, here: bool) -> str:
        said = json.loads(text)
        for tool, given in (call for calls in said["rounds"] for call in calls):
            if tool in STARTING and isinstance(given, dict) and given.get("task", "").startswith("{"):
                given["task"] = added(given["task"], here=True)
        if here:
            at = chosen.randrange(len(said["rounds"]) + 1)
            said["rounds"].insert(at, [[KEEP_FILE, {"name": f"{said['name']}.file"}]])
            said["thinking"].insert(at, round(0.3 * chosen.random(), 3))
        return json.dumps(said)

    spec = _with_workspace(work.spec, here=not below)
    return rewritten(replace(work, spec=spec), lambda text: added(text, here=not below), kinds=INPUTS)


def _with_workspace(spec: dict[str, Any], *, here: bool) -> dict[str, Any]:
    """An agent with those that it may start or hand off to.

    Args:
        here: it has a workspace itself, not only its sub-agents.
    """
    others = {
        kind: {name: _with_workspace(agent, here=here or kind == "agents") for name, agent in spec[kind].items()}
        for kind in ("agents", "handoffs")
        if spec.get(kind)
    }
    own = {"workspace": WORKSPACE, "tools": [*spec["tools"], TOOLS[KEEP_FILE]]} if here else {}
    return {**spec, **others, **own}


def leaves_files(spec: dict[str, Any]) -> bool:
    """Whether an agent, or a sub-agent of its, leaves files."""
    own = any(tool["name"] == KEEP_FILE for tool in spec["tools"])
    return own or any(map(leaves_files, spec["agents"].values()))


class Files:
    """Where sessions have left files. One that has, or whose sub-agent has, goes to another node only from one that was
    lost, given up or drained since."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._at: dict[str, str] = {}
        self._left: dict[str, dict[str, float]] = defaultdict(dict)
        self._given_up: dict[str, float] = {}

    def forget(self, session_ids: set[str]) -> None:
        """Sessions were removed."""
        for session_id in session_ids:
            self._at.pop(session_id, None)
            self._left.pop(session_id, None)

    def given_up(self, node_id: str) -> None:
        """A node is given up, or was drained until now."""
        self._given_up[node_id] = self._world.scheduler.time()

    def keep(self, session_id: str) -> bool:
        """A session's tool leaves a file; returns whether it finds others there, its own or those of its sub-agents."""
        machine = self._world.machine_of(self._world.scheduler.current)
        if machine is None or not self._world.invariants.is_current(session_id):
            return False  # its session is elsewhere by now, and does not come back to what it leaves
        found = machine.node_id in self._left[session_id]
        for mine in self._with_parents(session_id):
            self._left[mine][machine.node_id] = self._world.scheduler.time()
        self._world.counts["files"] += 1
        self._world.counts["files found"] += found
        return found

    def activated(self, event: SessionActivated) -> None:
        """A session goes on: where its files are, if it was there last."""
        before, self._at[event.session_id] = self._at.get(event.session_id, event.node_id), event.node_id
        if before == event.node_id:
            return
        since = self._left[event.session_id].pop(before, None)
        if since is not None and not self._may_leave(before, since):
            self._world.invariants.violated(
                f"{event.session_id} left files at {before}, and goes on at {event.node_id} ({event.cause})"
            )

    def _may_leave(self, node_id: str, since: float) -> bool:
        if not self._world.cluster.machines[node_id].alive or self._given_up.get(node_id, -1.0) >= since:
            return True
        services = [
            actor.target.service for actor in self._world.cluster.actors.values() if hasattr(actor.target, "service")
        ]
        return any(node_id in service.homes.nodes and node_id not in service.homes.available for service in services)

    def _with_parents(self, session_id: str) -> Iterator[str]:
        while session_id:
            yield session_id
            rows = self._world.committed(f"SELECT parent_id FROM session WHERE session_id = '{session_id}'")
            session_id = rows[0][0] if rows else ""
