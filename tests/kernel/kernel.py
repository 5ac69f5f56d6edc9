"""The kernel without Ray: a real node service on a real store, in-process frames, and deaths as SIGKILL makes them.

What a process boundary does is done by hand: calls travel as JSON and run in tasks of the callee, a killed frame never
runs another line that matters, and a killed node service never commits again.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

from sqlalchemy import event

from understudy.actors.frame import Frame
from understudy.actors.tools import ToolContext, describe, tool
from understudy.cluster.local.local_node import LocalGateway, LocalNode, LocalToolHost
from understudy.config import ModelProfile
from understudy.errors import ServiceGone, StaleGeneration, StoreUnreachable
from understudy.gateway.gateway import Gateway
from understudy.gateway.gateway_calls import GatewayCalls
from understudy.identifiers import new_identifier
from understudy.messages import Message
from understudy.node.basis import NodeConfig
from understudy.node.node_service import NodeService
from understudy.node.requests import Requests
from understudy.ports import TaskRunner
from understudy.prices import Price
from understudy.protocol import News, packed, unpacked
from understudy.store.check.check import check
from understudy.store.db.engine import Database
from understudy.store.reads import queries
from understudy.testing.offline import OfflineServer
from understudy.transport.remote_node import CalledNode

from ..situation import describe as describe_situation

METRICS_SERVER = "understudy.node.projection.MetricsServer"
STUCK_SECONDS = 20.0
LEASE = 3_600_000_000
POLICY = {"max_restarts": 100, "period": 60, "stuck_after": 3, "backoff": 0.01, "backoff_max": 0.05}

WORKER: ContextVar[Worker | None] = ContextVar("worker", default=None)
BACKGROUND: ContextVar[bool] = ContextVar("background", default=False)


def script(*replies: Any) -> str:
    """Instructions for the offline model to give these replies: a text, a list of `(tool, arguments)`, or an object."""
    elements = []
    for reply in replies:
        if isinstance(reply, str):
            elements.append({"text": reply})
        else:
            elements.append(reply if isinstance(reply, dict) else {"tool_calls": [list(call) for call in reply]})
    return f"offline-script: {json.dumps(elements)}"


def spec(
    instructions: str = "", tools: Iterable[Any] = (), *, agents: dict[str, Any] | None = None, **more: Any
) -> dict:
    """A compiled specification; `tools` are functions or names."""
    described = [entry for item in tools for entry in describe(item, pickle=None)[0]]
    fields: dict[str, Any] = dict(
        name="agent", hash="hash", instructions=instructions, model="offline", profile="offline", tools=described,
        agents=agents or {}, workspace=None, max_rounds=20, max_continuations=2, tool_timeout=30.0, parallel_tools=8,
        max_depth=3, deadline=30.0, parameters={}, budget=None, metadata={}, restart=POLICY,
    )  # fmt: skip
    return {**fields, **more}


@contextmanager
def opened(dsn: str) -> Iterator[Database]:
    """A store with its schema, for as long as the context lasts."""
    database = Database(dsn)
    database.prepare()
    try:
        yield database
    finally:
        database.close()


WAITING: set[asyncio.Task[Any]] = set()
"""Tasks that wait for dead processes: nobody else may know them."""


async def never() -> Any:
    """What a dead process answers."""
    task = asyncio.current_task()
    assert task is not None
    WAITING.add(task)
    try:
        await asyncio.Event().wait()
    finally:
        WAITING.discard(task)


class Stuck(AssertionError):
    """A run did not end."""


class Worker:
    """A frame's process."""

    def __init__(self, kernel: Kernel, frame_id: str, placement: str) -> None:
        self.kernel = kernel
        self.dead = False
        self.frame_id = frame_id
        WORKER.set(self)
        self.frame = Frame(Link(self), frame_id, kernel.node_id, placement)
        self.task = asyncio.get_running_loop().create_task(self.frame.run(), name=frame_id)


class Link(CalledNode):
    """The node service as a frame reaches it; each call makes a point before it and one when its reply arrives."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def _send(self, method: str, arguments: Sequence[Any]) -> Any:
        worker = self._worker
        if method != "interrupted":  # made by a clock, not by the session's progress
            await worker.kernel.point(f"before {method}", worker)
        if worker.dead:
            await never()
        result = await worker.kernel.call(method, *arguments)
        if method != "interrupted":
            await worker.kernel.point(f"reply to {method}", worker)
        if worker.dead:
            await never()
        return result


class Kernel:
    """A cluster in one process, or one node of it.

    Attributes:
        peers: the other nodes; one that is missing here can't be notified of anything.
        profile: more of the model profile that all agents have.
        others: model profiles beside that one.
        telemetry: variables of `understudy.telemetry`; exporters read `os.environ` as well.
        machine: which the node is on; its commands in the background are found there.
        numbers: of the frames to come.
        points: labels of what has happened so far: calls, commits, and what tools say.
        serves: whether its metrics are served over HTTP.
        on_point: called with the number and label of each point and the worker it belongs to, if it belongs to one.
    """

    def __init__(
        self,
        dsn: str,
        server: OfflineServer,
        directory: Path,
        namespace: str = "tests",
        *,
        node_id: str = "node1",
        machine: str = "",
        prices: Mapping[str, Price] | None = None,
        telemetry: Mapping[str, str] | None = None,
        profile: Mapping[str, Any] | None = None,
        others: Sequence[ModelProfile] = (),
        runner: TaskRunner | None = None,
    ) -> None:
        self.node_id = node_id
        self.machine = machine or node_id
        self._others = others
        self._profile = profile or {}
        self.nodes = [node_id]
        self.peers: dict[str, Kernel] = {}
        self.dsn = dsn
        self.server = server
        self.directory = directory
        self.namespace = namespace
        self.generation = 0
        self.serves = False
        self.workers: dict[str, Worker] = {}
        self.telemetry = telemetry or {}
        self.points: list[str] = []
        self.on_point: Callable[[int, str, Worker | None], None] | None = None
        self._prices = prices or {}
        self._runner = runner
        self.gateway = LocalGateway(lambda: GatewayCalls(Gateway(backoff=0.001, backoff_max=0.002)))
        self.tool_host = LocalToolHost()
        self.node = LocalNode(self._made)
        self.numbers = itertools.count()
        self._up = asyncio.Event()
        self._sent = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    def _made(self) -> NodeService:
        """A node service, with a point before each of its transactions and one after it."""
        config = NodeConfig(
            self.dsn, self.namespace, self.node_id, f"writer-{self.node_id}", span_directory=str(self.directory),
            command_directory=str(self.directory / f"commands-{self.machine}"),
            telemetry=self.telemetry, prices=self._prices,
        )  # fmt: skip
        service = NodeService(config, self.gateway, self._tell, runner=self._runner, tool_host=self.tool_host)
        service.profiles.learn(ModelProfile("offline", "key", self.server.url, **self._profile))
        for other in self._others:
            service.profiles.learn(other)
        if service.database.is_sqlite:  # nobody cuts the power here, and other tests use the disk
            event.listen(service.database.writer, "connect", _without_waiting_for_the_disk)
        submit_all = service.journal.submit_all

        async def submit(operations: list[Any], *touches: str, alone: bool = False) -> list[Any]:
            if BACKGROUND.get():
                return await submit_all(operations, *touches, alone=alone)
            await self.point("before the commit", None)
            results = await submit_all(operations, *touches, alone=alone)
            await self.point("after the commit", None)
            if service is not self.service:
                raise asyncio.CancelledError("it died at this point")
            return results

        service.journal.submit_all = submit  # type: ignore[method-assign]
        return service

    @property
    def service(self) -> NodeService:
        """The node service that there is now."""
        return self.node.service

    @property
    def is_up(self) -> bool:
        """Whether it has started."""
        return self._up.is_set()

    async def start(self, frames: int) -> None:
        await self.boot()
        self.generation = await self.ask("acquire", "tests", LEASE, "tests")
        await self.take_over(self.generation, self.nodes)
        for _ in range(frames):
            self.add_frame()
        while len(self.service.frames.paging.slots) < frames:
            await self.service.frames.supply.demand(1.0)

    async def take_over(self, generation: int, nodes: list[str]) -> None:
        """What a supervisor sends when it begins, and whenever a node has come or gone; then, which of the frames that
        the service names are dead."""
        self.generation, self.nodes = generation, nodes

        async def announce(service: NodeService) -> None:  # also the next one
            self._sent += 1
            await service.takeover.run(self.generation, self._sent, self.nodes)
            for frame_id in service.frames.named():
                if frame_id not in self.workers:
                    await service.deaths.frame_died(frame_id, "process_died")

        await self.remote(announce)

    async def stop(self) -> None:
        await self.quiet()
        await self._end_frames()
        await self.node.close()
        await self._end_dead()
        await self.gateway.close()
        await self.tool_host.close()
        self.check()

    def check(self, *session_ids: str) -> None:
        """The books balance, of these sessions or of all: now, in the middle of whatever is going on."""
        with closing(Database(self.dsn)) as database, database.snapshot() as connection:
            violations = check(connection, self.namespace, session_ids or None)
        assert not violations, "\n".join(map(str, violations))

    def _check_work(self) -> None:
        """The books balance of all with work: a death can harm no others, and in the end all are checked."""
        with closing(Database(self.dsn)) as database, database.read() as connection:
            rows = queries.active_sessions(connection, self.namespace, None)
        if rows:
            self.check(*(row.session_id for row in rows))

    async def stop_frames(self) -> None:
        """From now on nobody begins what is accepted."""
        await self._end_frames()
        self.service.frames.paging.slots.clear()

    async def _end_frames(self) -> None:
        for worker in self.workers.values():
            worker.dead = True
            worker.task.cancel()
        await asyncio.gather(*(worker.task for worker in self.workers.values()), return_exceptions=True)
        self.workers.clear()

    async def lose(self) -> None:
        """The node is gone, its frames and its service at once; nothing takes their place."""
        self._up.clear()
        self.node.kill()
        await self.node.close()
        await self._end_frames()
        await self._end_dead()
        await self.gateway.close()
        await self.tool_host.close()
        self.check()

    async def _end_dead(self) -> None:
        """Nothing of a dead frame is left to the garbage collector, which would complain."""
        tasks = set(WAITING)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)

    async def _tell(self, node_id: str, news: News) -> None:
        if node_id in self.peers:
            await self.peers[node_id].call("notice", packed(news))

    async def quiet(self) -> None:
        """Wait until deaths are dealt with."""
        while self._tasks:
            await asyncio.gather(*self._tasks)

    async def boot(self) -> None:
        """Start the node service; nobody has sent it anything yet."""
        BACKGROUND.set(True)
        try:
            with nullcontext() if self.serves else patch(METRICS_SERVER, return_value=Mock(port=0)):
                await self.node.start()
        finally:
            BACKGROUND.set(False)
        self._up.set()

    # Calls.

    async def call(self, method: str, *arguments: Any) -> Any:
        """A call of the node service that there is, repeated by the next one if it dies meanwhile. It goes on without
        its caller.

        Args:
            arguments: as they arrive, and so is the result.
        """
        call_id = new_identifier()
        return await self._repeated(lambda: self.node.repeated(call_id, method, *arguments))

    async def remote(self, ask: Callable[[NodeService], Coroutine[Any, Any, Any]]) -> Any:
        """The same for something else that is done in the node service."""
        return await self._repeated(lambda: self.node.process.call(ask(self.service)))

    async def _repeated(self, attempt: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        while True:
            await self._up.wait()
            service = self.service
            try:
                return await attempt()
            except ServiceGone:
                if service is self.service:
                    raise

    async def ask(self, method: str, *arguments: Any) -> Any:
        """A client's request; one that needs an id, and is given none, gets a new one."""
        wanted = list(inspect.signature(getattr(Requests, method)).parameters)
        if "request_id" in wanted and len(arguments) == wanted.index("request_id") - 1:
            arguments = (*arguments, new_identifier())
        return await self.call("request", method, *arguments)

    async def spawn(self, session_id: str, compiled: dict[str, Any]) -> bool:
        placement = compiled.get("placement", "")
        session = {"session_id": session_id, "spec": compiled, "placement": placement, "metadata": {}}
        return await self.ask("spawn", session, {})

    async def send(self, session_id: str, content: Any = "go", run_id: str = "r") -> bool:
        accepted = await self.ask("send", session_id, {"run_id": run_id, "content": content})
        return bool(accepted["created"])

    async def end(self, session_id: str, run_id: str = "r") -> dict[str, Any]:
        """The run's row once it has ended.

        Raises:
            Stuck: it does not end, and nothing else happens either.
        """
        after, points = 0, -1
        while True:
            row = await self.ask("read", "run", [session_id, run_id], {})
            if row["finished_at"]:
                return row
            follow = {session_id: {"after": after}}
            found = await self.ask("watch", f"{session_id}/{run_id}", follow, STUCK_SECONDS)
            if not found["events"] and len(self.points) == points:
                situation = describe_situation(self.dsn, self.namespace, self.service, list(self.workers))
                raise Stuck(f"run {run_id} of {session_id} does not end\n{situation}")
            after, points = found["events"][-1]["seq"] if found["events"] else after, len(self.points)

    async def run(self, session_id: str, compiled: dict[str, Any], content: Any = "go") -> dict[str, Any]:
        """A new session's first run, from its spawn to its end."""
        await self.spawn(session_id, compiled)
        await self.send(session_id, content)
        return await self.end(session_id)

    async def messages(self, session_id: str) -> list[dict[str, Any]]:
        found = unpacked(await self.ask("read", "messages", [session_id], {}), list[Message], "messages")
        return [message.to_wire() for message in found]

    async def results(self, session_id: str = "s") -> list[str]:
        """What the session's tools returned, in order."""
        return [message["content"] for message in await self.messages(session_id) if message["role"] == "tool"]

    async def transcript(self, session_id: str) -> list[tuple[Any, ...]]:
        """What of a session must be the same after any death."""
        return [
            (m["role"], m["content"], m.get("tool_calls"), m.get("tool_call_id"), m["run_id"], m["round"])
            for m in await self.messages(session_id)
        ]

    async def events(self, session_id: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = await self.ask("events", session_id, 0)
        return found

    async def types(self, session_id: str) -> list[str]:
        return [event["type"] for event in await self.events(session_id)]

    async def info(self, session_id: str) -> dict[str, Any]:
        found: dict[str, Any] = await self.ask("read", "info", [session_id], {})
        return found

    async def paused(self, session_id: str) -> list[dict[str, Any]]:
        """What the session asks, once it waits for a person and no frame holds it."""
        async with asyncio.timeout(STUCK_SECONDS):
            while True:  # no event says that it has left its frame
                info = await self.info(session_id)
                if info["status"] == "waiting_for_input" and info["frame_id"] is None:
                    found: list[dict[str, Any]] = await self.ask("read", "questions", [session_id], {})
                    return found
                await asyncio.sleep(0.005)

    async def until_watched(self) -> None:
        """Wait until a frame waits to be notified of an interruption of its tools, which a clock of its own decides."""
        async with asyncio.timeout(STUCK_SECONDS):
            while not self.service.interrupts:  # noqa: ASYNC110 - no event says so
                await asyncio.sleep(0.01)

    async def until(self, session_id: str, event_type: str, count: int = 1) -> list[dict[str, Any]]:
        """The session's events, once there are `count` of this type."""
        after, found = 0, list[dict[str, Any]]()
        while sum(event["type"] == event_type for event in found) < count:
            got = await self.ask("watch", f"{session_id}/until", {session_id: {"after": after}}, 30.0)
            found += got["events"]
            after = found[-1]["seq"] if found else 0
        return found

    # Deaths.

    async def point(self, label: str, worker: Worker | None) -> None:
        """Something happens; a test may let somebody die of it."""
        self.points.append(label)
        if self.on_point is not None:
            self.on_point(len(self.points) - 1, label, worker)
        if worker is not None and worker.dead:
            await never()

    def add_frame(self, placement: str = "") -> Worker:
        """Start a frame."""
        worker = Worker(self, f"f{next(self.numbers)}", placement)
        self.workers[worker.frame_id] = worker
        return worker

    def holder(self, session_id: str) -> Worker | None:
        """The frame's process that holds the session."""
        slot = self.service.frames.paging.holder(session_id)
        return self.workers.get(slot.frame_id) if slot is not None else None

    def kill(self, worker: Worker, *, replace: bool = True) -> None:
        """Kill a frame as SIGKILL does; the node service hears of it as from the supervisor."""
        if worker.dead:
            return
        worker.dead = True
        worker.task.cancel()
        del self.workers[worker.frame_id]
        self.later(self._tell_of_death(worker.frame_id))
        if replace:
            self.add_frame()

    async def _tell_of_death(self, frame_id: str) -> None:
        while True:
            try:
                return await self.call("frame_died", frame_id, "process_died", 0.0, False)
            except (StaleGeneration, StoreUnreachable):
                await asyncio.sleep(0.01)

    def kill_node(self) -> None:
        """Kill the node service; another one takes its place on the same store, as when Ray restarts it."""
        if self.is_up:
            self._up.clear()
            self.node.kill()
            self.later(self._follow())

    async def replace_service(self) -> None:
        """The node service dies; the next one has started, and has not been taken over."""
        self._up.clear()
        self.node.kill()
        await self._follow(taken_over=False)

    async def _follow(self, *, taken_over: bool = True) -> None:
        await self.node.buried()
        self._check_work()
        await self.boot()
        if taken_over:
            await self.take_over(self.generation, self.nodes)

    async def gateway_is_empty(self) -> None:
        """Wait until the gateway holds no call: it learns a moment later that it may forget one; no event says so."""
        async with asyncio.timeout(STUCK_SECONDS):
            while True:
                if not self.gateway.calls.held:
                    return
                await asyncio.sleep(0.005)

    def later(self, coroutine: Any) -> None:
        """Do something in the background, for which `quiet` waits."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _without_waiting_for_the_disk(connection: Any, _record: Any) -> None:
    connection.execute("PRAGMA synchronous=OFF")


@asynccontextmanager
async def running(
    dsn: str,
    directory: Path,
    *,
    frames: int = 2,
    server: OfflineServer | None = None,
    prices: Mapping[str, Price] | None = None,
    telemetry: Mapping[str, str] | None = None,
    profile: Mapping[str, Any] | None = None,
    others: Sequence[ModelProfile] = (),
    runner: TaskRunner | None = None,
    **options: Any,
) -> AsyncIterator[Kernel]:
    """A kernel with its own offline model, unless one is given."""
    made = server or OfflineServer(**options).start()
    kernel = Kernel(
        dsn, made, directory, prices=prices, telemetry=telemetry, profile=profile, others=others, runner=runner
    )  # fmt: skip
    try:
        await kernel.start(frames)
        try:
            yield kernel
        finally:
            await kernel.stop()
    finally:
        if server is None:
            made.stop()


# Tools. Each leaves a line per execution in a file, so that a second one shows.


async def effect(path: str, context: ToolContext) -> None:
    """A side effect with a point before it and one after it; a dead process has none."""
    worker = WORKER.get()
    assert worker is not None
    await worker.kernel.point("tool begins", worker)
    if worker.dead:
        await never()
    with open(path, "a") as file:  # noqa: ASYNC230
        file.write(f"{context.call_key}\n")
    await worker.kernel.point("tool has had its effect", worker)


@tool
async def note(path: str, text: str, context: ToolContext) -> str:
    """Leave a note; in doubt after a crash."""
    await effect(path, context)
    return f"noted {text}"


@tool(on_crash="rerun")
async def look(path: str, text: str, context: ToolContext) -> str:
    """The same, marked as harmless to repeat."""
    await effect(path, context)
    return f"noted {text}"


async def find_note(context: ToolContext) -> str:
    """Find out whether the note was left."""
    return f"found out about {context.call_id}"


@tool(on_crash=find_note)
async def careful(path: str, text: str, context: ToolContext) -> str:
    """The same, with a way to find out."""
    await effect(path, context)
    return f"noted {text}"


def before_step(kernel: Kernel, do: Callable[[], Awaitable[Any]]) -> None:
    """Do something before each step of a frame."""
    point = kernel.point

    async def doing(label: str, worker: Worker | None) -> None:
        if label == "before step":
            await do()
        await point(label, worker)

    kernel.point = doing  # type: ignore[method-assign]


def held_at_effect(kernel: Kernel) -> tuple[asyncio.Event, asyncio.Event]:
    """Let tools go no further than their effect: set when one has had it, and what lets all go on when it is set."""
    begun, may_end, point = asyncio.Event(), asyncio.Event(), kernel.point

    async def waiting(label: str, worker: Worker | None) -> None:
        if label == "tool has had its effect":
            begun.set()
            await may_end.wait()
        await point(label, worker)

    kernel.point = waiting  # type: ignore[method-assign]
    return begun, may_end


def notes(path: Path) -> list[str]:
    """The calls that had their effect, in order."""
    return path.read_text().splitlines() if path.exists() else []
