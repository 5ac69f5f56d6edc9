"""One run under `understudy certify`: a node service on a store of its own, a frame, and a SIGKILL at one point.

What follows the kill is what follows any death: the node service is notified, decides, and gives the session to the
next frame. Nothing here helps it.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from msgspec import structs

from understudy.errors import UnderstudyError
from understudy.events import CustomEvent, ToolFinished, ToolProgress, ToolStarted
from understudy.gateway.gateway_calls import GatewayCalls
from understudy.identifiers import new_identifier
from understudy.messages import Message
from understudy.node.basis import NodeConfig
from understudy.node.node_service import NodeService
from understudy.node.requests import Requests
from understudy.ports import Node
from understudy.protocol import Following, Input, NewSession, unpacked
from understudy.reads import RunRecord, SessionRecord
from understudy.records import Batch
from understudy.transport.signatures import signature_of

from .frame_processes import FrameProcess, FrameProcesses
from .recording import FIRST_RUN, Asked, Call, Entry, Round, WatchedGateway, call_key, named, text_of
from .turns import first_at_work
from .watched_frame import TOOL_BEGINS, TOOL_DONE
from .workspaces import File

log = logging.getLogger(__name__)

Result = TypeVar("Result")

NODE = "certify"
LEASE = 3_600_000_000
WATCH_SECONDS = 5.0

BEFORE_COMMIT = "before_commit"
MODEL_CALL = "model_call"
REPLY_LOST = "reply_lost"


@dataclass(frozen=True)
class Point:
    """A moment at which a session's process can die.

    Attributes:
        session: its name.
        number: of the session's commit, or the round of its model call; 0 for a tool.
        call: `round/index` of the tool's call.
        what: what the commit brings, for people.
    """

    moment: str
    session: str
    number: int = 0
    call: str = ""
    tool: str = ""
    what: str = field(default="", compare=False)

    def __str__(self) -> str:
        where = {
            BEFORE_COMMIT: f"before commit {self.number} ({self.what})",
            REPLY_LOST: f"after commit {self.number} ({self.what}), its reply lost",
            MODEL_CALL: f"while the model call of round {self.number} is in flight",
            TOOL_BEGINS: f"when {self.tool} ({self.call}) begins",
            TOOL_DONE: f"after the effect of {self.tool} ({self.call}), its result not committed",
        }[self.moment]
        return f"{self.session}: {where}"


@dataclass
class Record:
    """What was seen of one run.

    Attributes:
        victim: where a process was to be killed; None for nowhere.
        forced: the tool that was made to `rerun`, if any.
        killed: a process was killed.
        points: all that were passed, in order.
        begun: how often each tool call's function was about to start; `executed`: how often it did.
        confirmed: calls that had their effect before anybody was killed.
        in_doubt: calls that had started when their process died, and what was done about each.
        error: why the run ended as it did.
    """

    victim: Point | None = None
    forced: str = ""
    killed: bool = False
    points: list[Point] = field(default_factory=list)
    begun: dict[Call, int] = field(default_factory=dict)
    executed: dict[Call, int] = field(default_factory=dict)
    confirmed: set[Call] = field(default_factory=set)
    in_doubt: dict[Call, str] = field(default_factory=dict)
    status: str = ""
    error: str = ""
    transcript: dict[str, list[Entry]] = field(default_factory=dict)
    asked: dict[Round, Asked] = field(default_factory=dict)
    files: dict[str, File] = field(default_factory=dict)


class _Killed(Exception):
    """The frame that called is dead."""


class Stage:
    """A node service and one frame at a time, for as long as its context lasts.

    Args:
        directory: for the store and what else the service keeps.
        record: gets what is seen; its `victim` is killed.
    """

    def __init__(self, directory: Path, gateway: WatchedGateway, processes: FrameProcesses, record: Record) -> None:
        self._gateway = gateway
        self._processes = processes
        self._record = record
        self._names = gateway.names
        self._commits: dict[str, int] = {}
        self._root = ""
        self._started: dict[str, int] = {}  # sub-agents, in order
        self._background: set[str] = set()
        self._frame: FrameProcess | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lost: asyncio.Event = asyncio.Event()
        self._uncommitted: set[Call] = set()
        self._finished: set[Call] = set()
        self._committed = asyncio.Condition()
        gateway.halt = self._model_call
        config = NodeConfig(f"sqlite:///{directory / 'store.db'}", "default", NODE, NODE, span_directory=str(directory))
        self._calls = GatewayCalls(gateway)
        self._service = NodeService(config, self._calls)
        self._requests = Requests(self._service)

    async def __aenter__(self) -> Stage:
        try:
            await self._service.start()
            generation = await self._requests.acquire(NODE, LEASE, NODE, new_identifier())
            await self._service.takeover.run(generation, 1, [NODE])
        except BaseException:
            await self._close()
            raise
        self._go(self._attend())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            if self._frame is not None:
                await self._processes.release(self._frame)
        finally:
            await self._close()

    async def _close(self) -> None:
        await self._service.close()
        await self._calls.close()

    async def run(
        self, session_id: str, spec: dict[str, Any], blobs: dict[str, bytes], content: str, timeout: float
    ) -> None:  # fmt: skip
        """Work on an input to its end, or until `timeout` seconds have passed, and record what became of it.

        Args:
            blobs: what the specification needs beside itself, by hash.
        """
        record = self._record
        self._root = session_id
        self._names[session_id] = spec["name"]
        await self._requests.spawn(NewSession(session_id, spec), blobs)
        try:
            async with asyncio.timeout(timeout):
                run = await self._ended(session_id, content)
                await self._until_rest()
        except TimeoutError:
            record.status, record.error = "timeout", f"no end within {timeout:g} s"
        else:
            record.status, record.error = run.status, (run.error or {}).get("message", "")
        for session in await self._tree():
            await self._read(session.session_id)
        record.asked = dict(self._gateway.asked)

    async def _ended(self, session_id: str, content: str) -> RunRecord:
        await self._requests.send(session_id, Input(FIRST_RUN, content), new_identifier())
        after = 0
        while True:
            run = await self._asked(RunRecord, "run", session_id, FIRST_RUN)
            if run.finished_at:
                return run
            self._raise_failures()
            found = await self._requests.watch(FIRST_RUN, {session_id: Following(after)}, WATCH_SECONDS)
            after = found.events[-1]["seq"] if found.events else after

    async def _until_rest(self) -> None:
        """Wait until no session of the tree is at work: sub-agents in the background outlive the run, and their ends
        begin others."""
        while (row := next((row for row in await self._tree() if row.active), None)) is not None:
            self._raise_failures()
            await self._requests.watch(FIRST_RUN, {row.session_id: Following(row.seq)}, WATCH_SECONDS)

    def _raise_failures(self) -> None:
        failed = next((task for task in self._tasks if task.done() and not task.cancelled()), None)
        if failed is not None:
            failed.result()

    async def _tree(self) -> list[SessionRecord]:
        return await self._asked(list[SessionRecord], "tree", self._root)

    def _key(self, call_id: str) -> str:
        return call_key(call_id, self._names)

    async def _name(self, session_id: str) -> str:
        """A session's name. One in which a sub-agent's task is started again is named when it first acts."""
        if session_id not in self._names:
            rows = {row.session_id: row for row in await self._tree()}
            row = rows[session_id]
            above = self._names.get(row.parent_id or "", "")
            place = f"{above} › {row.agent} {self._key(row.call_id or '/')}"
            self._names[session_id] = f"{place} again {sum(name.startswith(place) for name in self._names.values())}"
        return self._names[session_id]

    async def _asked(self, kind: type[Result], what: str, *arguments: Any) -> Result:
        """What a client would read (`requests.READS`)."""
        found: Result = unpacked(await self._requests.read(what, list(arguments), {}), kind, f"what was read of {what}")
        return found

    async def _read(self, session_id: str) -> None:
        name = await self._name(session_id)
        tools: dict[str, str] = {}
        entries = []
        for message in await self._asked(list[Message], "messages", session_id):
            calls = [(self._key(call.call_id), call.name, call.arguments) for call in message.tool_calls]
            tools.update({key: tool for key, tool, _ in calls})
            key = self._key(message.tool_call_id) if message.tool_call_id else ""
            shown = tuple((key, tool, named(arguments, self._names)) for key, tool, arguments in calls)
            text = named(text_of(message.content), self._names)
            entries.append(Entry(message.role, text, key, tools.get(key, ""), shown))
        self._record.transcript[name] = entries
        for event in await self._requests.events(session_id, 0):
            if event["type"] == "tool_in_doubt":
                self._record.in_doubt[name, self._key(event["data"]["call_id"])] = event["data"]["policy"]

    # Frames.

    async def _attend(self) -> None:
        """Answer the frame's calls until it is dead; then tell the node service, and put the next one in its place."""
        while True:
            frame = self._frame = await self._processes.take()
            frame.begin(NODE)
            async for message in frame.messages():
                self._go(self._answer(frame, message))
            await self._processes.release(frame)
            self._frame = None
            await self._clear_uncommitted(set(self._uncommitted))
            await self._service.deaths.frame_died(frame.frame_id, "process_died")
            self._lost.set()

    async def _answer(self, frame: FrameProcess, message: dict[str, Any]) -> None:
        try:
            result = await self._handle(frame, message["method"], message["arguments"])
        except _Killed:
            return
        except UnderstudyError as error:
            frame.say({"id": message["id"], "error": error.to_wire()})
        else:
            frame.say({"id": message["id"], "result": result})

    async def _handle(self, frame: FrameProcess, method: str, arguments: list[Any]) -> Any:
        if method == "halt":
            return await self._tool(frame, *arguments)
        function = getattr(self._service, method)
        signature = signature_of(getattr(Node, method))
        given = signature.arguments(arguments)
        batch = given[0].batch if method == "step" else given[1] if method == "commit" else None
        if batch is None or only_reports(batch):
            return signature.sent(await function(*given))
        name = await self._name(batch.session_id)
        for spawn in batch.spawns:
            self._names[spawn.child_id] = f"{name} › {spawn.spec['name']} {self._key(spawn.call_id)}"
            self._started.setdefault(spawn.child_id, len(self._started))
            if spawn.background:
                self._background.add(spawn.child_id)
        number = self._commits[name] = self._commits.get(name, 0) + 1
        what = _described(batch)
        await self._pass(Point(BEFORE_COMMIT, name, number, what=what))
        result = await function(*given)
        finished = {(name, self._key(call.call_id)) for call in batch.calls if call.state != "started"}
        self._finished |= finished
        await self._clear_uncommitted(finished)
        await self._pass(Point(REPLY_LOST, name, number, what=what))
        return signature.sent(result)

    async def _tool(self, frame: FrameProcess, moment: str, session_id: str, call_id: str, tool: str) -> None:
        name, record = await self._name(session_id), self._record
        call = name, self._key(call_id)
        if moment == TOOL_BEGINS:
            await self._alone(name)
            if frame is not self._frame:  # it died while it waited
                raise _Killed
            record.begun[call] = record.begun.get(call, 0) + 1
        elif not record.killed:
            record.confirmed.add(call)
        await self._pass(Point(moment, name, 0, call[1], tool))
        if moment == TOOL_BEGINS:
            record.executed[call] = record.executed.get(call, 0) + 1
        elif call not in self._finished:  # it may have run on after its timeout, which is its result
            self._uncommitted.add(call)

    async def _alone(self, session: str) -> None:
        """Let a tool begin when the results of those before it are committed: a death then repeats one call only.

        Results that come soon after another share its commit, so this lasts as long as a frame waits for others.
        """
        async with self._committed:
            await self._committed.wait_for(lambda: not any(name == session for name, _ in self._uncommitted))

    async def _clear_uncommitted(self, calls: set[Call]) -> None:
        """These calls' results are committed, or gone with their process."""
        async with self._committed:
            self._uncommitted -= calls
            self._committed.notify_all()

    async def _model_call(self, session_id: str, place: Round) -> None:
        try:
            await self._pass(Point(MODEL_CALL, *place))
        except _Killed:  # the call itself goes on, in the node service
            await self._lost.wait()
        while self._background:
            first = first_at_work(session_id, await self._tree(), self._started, self._background)
            if first is None:
                return
            await self._requests.watch(session_id, {first.session_id: Following(first.seq)}, WATCH_SECONDS)

    async def _pass(self, point: Point) -> None:
        """Note that a point is passed, or let the process die here."""
        record = self._record
        record.points.append(point)
        if record.killed or point != record.victim or self._frame is None:
            return
        record.killed = True
        await self._frame.kill()
        raise _Killed

    def _go(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled() or task.exception() is None:
            self._tasks.discard(task)
        else:  # kept, so that the run ends with it
            log.error("certifying failed", exc_info=task.exception())


def only_reports(batch: Batch) -> bool:
    """Whether a batch has nothing but what tools report while they run: how many there are is a matter of time, and so
    they are no points, which each run must pass alike."""
    empty = structs.replace(batch, entries=())
    bare = Batch(batch.session_id, batch.incarnation, batch.epoch, batch.batch_no)
    return (
        bool(batch.entries)
        and empty == bare
        and all(isinstance(entry, (ToolProgress, CustomEvent)) for entry in batch.entries)
    )


def _described(batch: Batch) -> str:
    """What a batch brings, in a few words."""
    found = []
    if batch.start_run:
        found.append("input")
    for entry in batch.entries:
        if isinstance(entry, (ToolStarted, ToolFinished)):
            found.append(f"{entry.tool} {'started' if isinstance(entry, ToolStarted) else 'result'}")
    found += [f"child {spawn.spec['name']}" for spawn in batch.spawns]
    if batch.finish:
        found.append(f"end: {batch.finish.status}")
    if batch.request_round:
        found.append(f"model call {batch.request_round}")
    return ", ".join(found) or "nothing new"
