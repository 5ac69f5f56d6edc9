"""MCP servers of simulated agents, and the tool hosts that hold them: which calls were made, and how often."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import structs
from sqlalchemy import select

from understudy.identifiers import new_identifier
from understudy.ports import ToolHost
from understudy.store.db.statements import QUESTION
from understudy.tool_host.hosted_servers import Ask, HostedServers
from understudy.tool_hosting import (
    ACCEPT,
    CANCEL,
    LOST,
    OK,
    Elicitation,
    ElicitationAnswer,
    HostAttached,
    ServerAnswer,
    ServerCall,
    ServerConfiguration,
    ServerTool,
)
from understudy.transport.serving import Serving

from .tasks import with_calls

if TYPE_CHECKING:
    from .cluster import Actor
    from .plan import Work
    from .scheduler import Process
    from .world import World

SERVER = "srv"

ON_CRASH = {"serve": "report", "peek": "rerun"}
"""The server's tools, and what is done about a call in doubt."""

OFFERED = {f"{SERVER}_{name}" for name in ON_CRASH}
"""Their names, as agents have them."""

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "seconds": {"type": "number"}, "dies": {"type": "integer"}},
    "required": ["name", "seconds", "dies"],
}


FORM: dict[str, Any] = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
"""Of the answers to its questions."""


def some_with_servers(chosen: random.Random, work: tuple[Work, ...]) -> tuple[Work, ...]:
    """The work of a plan; in some plans its root sessions have an MCP server, and call it."""
    if chosen.random() >= 0.2:
        return work
    return tuple(with_server(chosen, item) for item in work)


def have_servers(work: tuple[Work, ...]) -> bool:
    """Whether some sessions of this work have an MCP server."""
    return any("mcp_servers" in item.spec for item in work)


def with_server(chosen: random.Random, work: Work) -> Work:
    """The same work with such calls: some take long, and with some of them the server dies."""

    server = {
        "name": SERVER, "key": "key", "command": ["server"], "url": None, "environment": [], "headers": {},
        "share": chosen.choice(("session", "tree", "node")), "include": ["*"], "exclude": [], "on_crash": {},
        "approve": [], "timeout": 12.0, "required": False,
    }  # fmt: skip
    return with_calls(chosen, replace(work, spec={**work.spec, "mcp_servers": [server]}), "srv", partial(_call, chosen))


def _call(chosen: random.Random, name: str) -> list[Any]:
    seconds = round(chosen.choice((0.0, 0.1, 1.0, 6.0, 11.0)) * chosen.random(), 3)
    dies = chosen.choice((1, 1, 4)) if chosen.random() < 0.15 else 0
    return [f"{SERVER}_{chosen.choice(sorted(ON_CRASH))}", {"name": name, "seconds": seconds, "dies": dies}]


@dataclass
class Made:
    """A call that was made."""

    process: Process
    lost: bool = False


class Served:
    """Which calls of servers were made: once, unless the server or its host died with it.

    A session that went elsewhere, from a machine that was given up, has another host: what the one it had is at is lost
    to it.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._made: dict[str, list[Made]] = defaultdict(list)

    def forget(self, session_ids: set[str]) -> None:
        """Sessions were removed."""
        for key in [key for key in self._made if key.partition("/")[0] in session_ids]:
            del self._made[key]

    def make(self, call: ServerCall) -> Made:
        """A server does what a call asks for."""
        world, before = self._world, self._made[call.key]
        world.note(f"server call {call.key} attempt {call.attempt}")
        world.counts["server calls"] += 1
        made = Made(world.scheduler.current)
        if before and ON_CRASH[call.tool] == "report":
            world.invariants.violated(f"{call.key} is made again, which may not be")
        if any(not self._is_lost(one) for one in before):
            world.invariants.violated(f"{call.key} is made again, and its server and host live")
        before.append(made)
        return made

    def times(self, key: str) -> int:
        """How often a call was made."""
        return len(self._made[key])

    def answered(self, call: ServerCall, said: ElicitationAnswer) -> None:
        """A server receives what a person says to its question: what is committed, or that nobody says anything."""
        self._world.counts[f"server questions: {said.action}"] += 1
        if said.action == CANCEL:
            return
        with self._world.store.committed() as connection:
            where = QUESTION.c.elicitation == said.id
            answers = connection.execute(select(QUESTION.c.answer).where(where)).scalars().all()
        content = json.dumps(said.content) if said.action == ACCEPT else None
        committed = [(answer["decision"], answer["text"] if content else None) for answer in answers if answer]
        if committed != [("ok" if content else "error", content)]:
            self._world.invariants.violated(f"{call.key}: its server receives {said}, and committed is {committed}")

    def _is_lost(self, made: Made) -> bool:
        elsewhere = self._world.machine_of(made.process) is not self._world.machine_of(self._world.scheduler.current)
        return made.lost or made.process.dead or elsewhere


class SimulatedServer:
    """A server (`understudy.tool_host.hosted_servers.McpServerProcess`)."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.used = time.monotonic()
        self.in_flight = 0

    async def tools(self) -> tuple[list[ServerTool], list[str]]:
        await asyncio.sleep(0.01)
        return [ServerTool(name, f"To {name}.", SCHEMA, on_crash) for name, on_crash in ON_CRASH.items()], []

    async def call(self, call: ServerCall, ask: Ask) -> ServerAnswer:
        given = call.arguments
        assert given is not None
        self.in_flight += 1
        try:
            made = self._world.invariants.served.make(call)
            await asyncio.sleep(given["seconds"])
            await self._ask_some(call, ask)
        finally:
            self.in_flight -= 1
        if self._world.invariants.served.times(call.key) <= given["dies"]:
            made.lost = True
            return ServerAnswer(LOST, "it died")
        return ServerAnswer(OK, f"served {given['name']}")

    async def _ask_some(self, call: ServerCall, ask: Ask) -> None:
        """In some calls it asks a person, once or twice."""
        chosen = random.Random(f"{self._world.plan.seed}/asks {call.key} {call.attempt}")
        while chosen.random() < self._world.plan.asks:
            asked = Elicitation(new_identifier(), "which word?", FORM)
            self._world.counts["server questions"] += 1
            self._world.invariants.served.answered(call, await ask(asked))

    async def close(self) -> None:
        pass


class ToolHostProcess:
    """A tool host's process (`understudy.cluster.ray.services.ToolHostActor`)."""

    def __init__(self, world: World, actor: Actor) -> None:
        self._world = world
        self._actor = actor
        self.servers = HostedServers(self._make)
        self._serving = Serving(ToolHost, self)

    def __getattr__(self, method: str) -> Any:
        return getattr(self.servers, method)

    async def attach(self, service: str) -> HostAttached:
        return structs.replace(await self.servers.attach(service), pid=self._actor.pid)

    async def repeated(self, call_id: str, method: str, *arguments: Any) -> Any:
        return await self._serving.answer(call_id, method, *arguments)

    async def _make(self, _configuration: ServerConfiguration) -> SimulatedServer:
        return SimulatedServer(self._world)
