"""Commands in the background, in the simulation: processes of a machine that no service takes along, who starts, reads
and stops them, and what must hold of them."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from understudy.commands import COMMAND, LOST, READ_COMMAND, START_COMMAND, CommandEnd, CommandProcess
from understudy.events import CommandEnded, Event
from understudy.jobs import LIST_JOBS, STOP_JOB
from understudy.store.db import statements
from understudy.store.db.statements import EVENT, MESSAGE, RUN, SESSION
from understudy.testing.policies import Reply, content_text

from .cluster import Machine
from .scheduler import Process
from .tasks import INPUTS, rewritten
from .tools import TOOLS

if TYPE_CHECKING:
    from .plan import Work
    from .world import World

TOOL_NAMES = (START_COMMAND, READ_COMMAND, LIST_JOBS, STOP_JOB)
NEWS = "Command "
"""How messages begin that tell of an end: the model does what it would have done without them."""

STARTED = "started command "
LAST = "(the last command)"
"""Instead of an id, which nobody knows before: the model names the command that it started last."""

BEGIN_SECONDS = 0.02


@dataclass(eq=False)
class Running:
    """A command's process.

    Attributes:
        deaf: it does not end at SIGTERM.
        waiting: the node services' processes that wait for its end.
    """

    key: str
    seconds: float
    code: int
    deaf: bool
    end: CommandEnd | None = None
    waiting: list[tuple[Process, asyncio.Future[None]]] = field(default_factory=list)


class SimulatedCommands:
    """The commands of a machine, as its node services see them (`understudy.ports.CommandProcesses`).

    Attributes:
        nodes: those of Ray that are on it. Commands go on while one is there.
        there: what can be found of commands.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.nodes: list[Machine] = []
        self.there: dict[str, Running] = {}

    @property
    def alive(self) -> bool:
        """Whether the machine is there."""
        return any(node.alive for node in self.nodes)

    def open(self) -> None:
        """Look after them."""

    def close(self) -> None:
        """Look after them no more."""

    def known(self) -> list[str]:
        """See the port."""
        return sorted(self.there)

    async def start(self, key: str, process: CommandProcess) -> None:
        """Who starts it may die before it begins, and before it hears of that."""
        await asyncio.sleep(BEGIN_SECONDS * self._world.commands.chosen.random())
        if key in self.there:
            return
        _, seconds, code, listens = process.arguments[-1].split()
        running = self.there[key] = Running(key, float(seconds), int(code), listens == "deaf")
        self._world.commands.began(self, running)
        self._world.cluster.after(running.seconds, self._over, running, CommandEnd(running.code, "done"))
        await asyncio.sleep(BEGIN_SECONDS * self._world.commands.chosen.random())

    async def ended(self, key: str) -> CommandEnd | None:
        """See the port."""
        running = self.there.get(key)
        if running is None:
            return None
        if running.end is None:
            over = asyncio.get_running_loop().create_future()
            running.waiting.append((self._world.scheduler.current, over))
            await over
        return running.end

    def stop(self, key: str, *, force: bool) -> None:
        """See the port."""
        running = self.there.get(key)
        if running is not None and (force or not running.deaf):
            self._world.cluster.after(0.005, self._over, running, CommandEnd(-9 if force else 143))

    def read(self, key: str, after: int | None, limit: int) -> tuple[int, bytes, int]:
        """See the port: it writes at its end."""
        running = self.there.get(key)
        data = b"done" if running is not None and running.end is not None else b""
        start = min(after or 0, len(data))
        return start, data[start:][:limit], len(data)

    async def grown(self, key: str, size: int, seconds: float) -> None:
        """See the port."""
        await asyncio.sleep(seconds)

    def remove(self, key: str) -> None:
        """See the port."""
        running = self.there.pop(key, None)
        if running is not None:
            self._over(running, CommandEnd(-9))

    def _over(self, running: Running, end: CommandEnd) -> None:
        if running.end is not None or not self.alive:
            return
        running.end = end
        self._world.note(f"command {running.key[:8]} has ended: {end.exit_code}")
        for process, over in running.waiting:
            process.soon(_resolve, over)


def _resolve(over: asyncio.Future[None]) -> None:
    if not over.done():
        over.set_result(None)


class Commands:
    """All commands of the simulated machines, and how often each has begun. In some worlds all nodes are on one
    machine: then a node that is lost leaves its commands there."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._on_one = random.Random(f"{world.plan.seed}/hosts").random() < 0.4
        self._machines: dict[str, SimulatedCommands] = {}
        self._starts: Counter[str] = Counter()
        self._of: dict[str, SimulatedCommands] = {}
        self.chosen = random.Random(f"{world.plan.seed}/command-times")

    def of(self, machine: Machine) -> SimulatedCommands:
        """Those that a node finds on its machine."""
        found = self._machines.setdefault("" if self._on_one else machine.node_id, SimulatedCommands(self._world))
        if machine not in found.nodes:
            found.nodes.append(machine)
        return found

    def committed(self, event: Event) -> None:
        """An event was committed: nothing is lost that another node finds on its machine."""
        if not self._on_one or not isinstance(event, CommandEnded) or event.state != LOST:
            return
        table = statements.COMMAND
        with self._world.store.committed() as connection:
            wanted = select(table.c.key).where(table.c.session_id == event.session_id, table.c.job == event.job)
            key = connection.execute(wanted).scalar()
        if key in self._machines[""].there:
            self._world.invariants.violated(f"command {event.job} of {event.session_id} is lost, and is there")

    def began(self, machine: SimulatedCommands, running: Running) -> None:
        """A command has begun: it may not again, wherever."""
        self._starts[running.key] += 1
        self._of[running.key] = machine
        self._world.note(f"command {running.key[:8]} begins on the machine of {machine.nodes[0].node_id}")
        self._world.counts["commands"] += 1
        if self._starts[running.key] > 1:
            self._world.invariants.violated(f"command {running.key} began {self._starts[running.key]} times")

    def violations(self, connection: Any, counts: Counter[str]) -> Iterator[str]:
        """Each has begun once at most, and has ended; its end is reported once, unless nobody is to hear of it; and
        none is lost that began on a machine which was there and could be reached all the time."""
        for node_id, there in self._machines.items():
            for running in there.there.values():
                if running.end is None and there.alive:
                    yield f"command {running.key} is at work on {node_id}, and all work has ended"
        table = statements.COMMAND
        sessions = {row.session_id: row for row in connection.execute(select(SESSION.c.session_id, SESSION.c.closed))}
        given_up = set(
            connection.execute(select(EVENT.c.session_id).where(EVENT.c.type == "session_quarantined")).scalars()
        )
        news = Counter(
            (row.session_id, row.run_id)
            for row in connection.execute(select(RUN.c.session_id, RUN.c.run_id).where(RUN.c.source == COMMAND))
        )
        messages = connection.execute(
            select(MESSAGE.c.session_id, MESSAGE.c.body).where(MESSAGE.c.role == "user")
        ).all()
        reported = Counter(
            (row.session_id, row.body["content"].split()[1]) for row in messages if row.body.get("origin") == COMMAND
        )
        for row in connection.execute(select(table)):
            name = f"command {row.job} of {row.session_id}"
            if not row.ended_at:
                yield f"{name} is {row.state}, and all work has ended"
            times, said = news[row.session_id, f"news.{row.job}"], reported[row.session_id, row.job]
            silent = row.quiet or sessions[row.session_id].closed or row.session_id in given_up or not row.node_id
            counts["ends of commands reported"] += said
            if times > 1 or said > 1 or (times == 0 and not silent and self._starts[row.key]):
                yield f"the end of {name} was accepted {times} times as an input, and reported {said} times"
            machine = self._of.get(row.key)
            if row.state == LOST and row.node_id and machine is not None:
                counts["lost commands"] += 1
                if machine.alive and not any(node.disturbed_until for node in machine.nodes):
                    yield f"{name} is lost, and its machine is there"


def some_with_commands(chosen: random.Random, work: tuple[Work, ...]) -> tuple[Work, ...]:
    """The work of a plan; in some plans its root sessions have commands in the background."""
    if chosen.random() >= 0.25:
        return work
    return tuple(with_commands(chosen, item) for item in work)


def with_commands(chosen: random.Random, work: Work) -> Work:
    """The same work; its root session starts commands, reads, lists and stops them."""
    known = {tool["name"] for tool in work.spec["tools"]}
    tools = [TOOLS[name] for name in TOOL_NAMES if name not in known]

    def added(text: str) -> str:
        said = json.loads(text)
        rounds, thinking = said["rounds"], said["thinking"]
        for _ in range(chosen.choice((1, 1, 2))):
            at = chosen.randrange(len(rounds) + 1)
            more: list[list[list[Any]]] = [[_start(chosen) for _ in range(chosen.choice((1, 1, 2)))]]
            for _ in range(chosen.choice((0, 1, 2))):
                more.append([_reaching(chosen)])
            rounds[at:at] = more
            thinking[at:at] = [round(chosen.choice((0.0, 0.3, 3.0)) * chosen.random(), 3) for _ in more]
        return json.dumps(said)

    spec = {**work.spec, "tools": [*work.spec["tools"], *tools], "workspace": "/tmp"}
    return rewritten(replace(work, spec=spec), added, kinds=INPUTS)


def _start(chosen: random.Random) -> list[Any]:
    seconds = round(chosen.choice((0.1, 1.0, 10.0, 40.0)) * chosen.random(), 3)
    ends = chosen.choice(("listens", "listens", "deaf"))
    return [START_COMMAND, {"command": f"run {seconds} {chosen.choice((0, 0, 1))} {ends}"}]


def _reaching(chosen: random.Random) -> list[Any]:
    tool = chosen.choice((READ_COMMAND, READ_COMMAND, LIST_JOBS, STOP_JOB))
    if tool == READ_COMMAND:
        return [tool, {"job": LAST, "wait": chosen.choice((0, 2, 20))}]
    grace = {"grace": chosen.choice((0, 0.5, 3))} if chosen.random() < 0.5 else {}
    return [tool, {} if tool == LIST_JOBS else {"job": LAST, **grace}]


def unheard(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages without those that tell of ends."""
    return [said for said in messages if not (said["role"] == "user" and content_text(said).startswith(NEWS))]


def named(reply: Reply, messages: list[dict[str, Any]]) -> Reply:
    """The reply with the id of the command that was started last, where it names that."""
    texts = [content_text(message) for message in messages if message["role"] == "tool"]
    found = (re.fullmatch(rf"{STARTED}(\S+)", text) for text in reversed(texts))
    last = next((match[1] for match in found if match), LAST)
    calls = tuple(
        (tool, {name: last if value == LAST else value for name, value in given.items()})
        if isinstance(given, dict)
        else (tool, given)
        for tool, given in reply.tool_calls
    )
    return replace(reply, tool_calls=calls)
