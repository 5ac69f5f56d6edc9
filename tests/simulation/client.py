"""A client of the simulated cluster: does what its plan says, repeats what has no answer, waits for every run's end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from understudy.approvals import APPROVAL
from understudy.cluster.client.follower import Follower
from understudy.cluster.ray.directory import NodeDirectory
from understudy.config import Settings
from understudy.errors import (
    AnswerConflict,
    ClusterUnreachable,
    Conflict,
    InvalidInput,
    NotAsked,
    NotRunning,
    ServiceGone,
    SessionClosed,
    SessionConflict,
    StoreUnreachable,
    UnderstudyError,
    UnknownQueue,
    UnknownRun,
    UnknownSchedule,
    UnknownSession,
)
from understudy.events import ModelCallCompleted
from understudy.identifiers import new_identifier
from understudy.messages import Message
from understudy.placement import DEFAULT
from understudy.protocol import NewSession, ServiceDirectory, unpacked
from understudy.store.operations.beginnings import TASK_UNREPORTED
from understudy.transport.repeating import REPEAT_SECONDS
from understudy.wakeups import SCHEDULE_WAKEUP

from . import approvals, jobs, operator, schedules
from .moments import Moments
from .requested import NAMING
from .spans import caller_of
from .streams import Heard
from .tools import BLOBS

if TYPE_CHECKING:
    from understudy.events import Event

    from .plan import Action, Work
    from .world import World

LOOK_SECONDS = 0.7


class Directory(NodeDirectory):
    """The product's directory, with a simulated way to the actors."""

    def __init__(self, world: World) -> None:
        super().__init__(Settings(world.store.dsn, "offline"), self._ask)
        self._turn = len(world.clients)
        self._learned -= 2.0  # nothing is known yet
        self._world = world
        self._random = random.Random(f"{world.plan.seed}/directory {len(world.clients)}")
        self._here = world.outside

    async def _choose(self, session_id: str | None, attempt: int) -> str:
        astray = attempt == 0 and session_id is not None and self._random.random() < self._world.plan.astray
        return self._random.choice(sorted(self._handles)) if astray else await super()._choose(session_id, attempt)

    @property
    def known(self) -> bool:
        """Whether there is a node to ask."""
        return bool(self._handles)

    async def _ask(self) -> ServiceDirectory:
        supervisor = self._world.cluster.actors.get("supervisor")
        if supervisor is None:
            raise ServiceGone("there is no supervisor")
        found: ServiceDirectory = await self._world.call(supervisor, "directory", here=self._here)
        return found

    async def update(self, directory: ServiceDirectory) -> None:
        """See `NodeDirectory.update`."""
        names = {node.node_id: f"node/{node.node_id}" for node in directory.nodes}
        actors = self._world.cluster.actors
        found = {node_id: actors[name] for node_id, name in names.items() if name in actors}
        self._handles = found or self._handles

    async def call(
        self, node_id: str, method: str, *arguments: Any, call_id: str = "", timeout: float | None = REPEAT_SECONDS
    ) -> Any:  # fmt: skip
        """See `NodeDirectory.call`."""
        handle = self._handles.get(node_id)
        if handle is None:
            raise ServiceGone(f"node {node_id} has no service any more")
        if call_id:
            method, arguments = "repeated", (call_id, method, *arguments)
        return await asyncio.wait_for(self._world.call(handle, method, *arguments, here=self._here), timeout)


@dataclass(frozen=True)
class Steering:
    """What was accepted to steer a run, the times of the request and of its answer, and the log's end before it."""

    request_id: str
    run_id: str
    content: str
    interrupts: bool
    since: float
    until: float
    after: int


class Client:
    """A driver.

    Attributes:
        sent: the content of each run that it wants of the present session.
        accepted: the runs that were acknowledged, in order.
        followed: the `seq` of every event that it received.
        steers: what was accepted to steer its runs.
        asked_to_end: ephemeral sub-agents, and which incarnation of each, whose tasks it asked to end.
        finished: it has seen the end of all that it has begun.
        replaced: another session had the id before, whose last events a follower can be shown (docs/guarantees.md).
    """

    def __init__(self, world: World, work: Work) -> None:
        self.world = world
        self.work = work
        self.session_id = work.session_id
        self.followed: list[int] = []
        self.finished = self.replaced = False
        self._moments = Moments(work.actions)
        self._specification = 0
        self._recurring: list[str] = []
        self._schedules: set[str] = set()
        self._forks: list[str] = []
        self.sent: dict[str, str] = {}
        self.accepted: list[str] = []
        self.refused: list[str] = []
        self.steers: list[Steering] = []
        self.asked_to_end: list[tuple[str, int]] = []
        self.closed = False
        self._random = random.Random(f"{world.plan.seed}/client/{work.session_id}")
        self._signaller = random.Random(f"{world.plan.seed}/signaller/{work.session_id}")
        self._approver = random.Random(f"{world.plan.seed}/approver/{work.session_id}")
        self.process = world.scheduler.process(f"client.{work.session_id}")

    def start(self) -> asyncio.Task[None]:
        """Begin, in a process of its own."""
        return self.process.spawn(self._run())

    def committed(self, event: Event) -> None:
        """An event was committed: what shall be done then is."""
        if (event.root_id or event.session_id) != self.session_id:
            return
        for action in self._moments.come(event):
            self.world.cluster.after(action.at, self._act_now, action)

    def _act_now(self, action: Action) -> None:
        self.world.note(f"{self.session_id}: {action.kind} now")
        self.process.spawn(self._act(action))

    async def request(self, method: str, *arguments: Any, session_id: str | None = None) -> Any:
        """A request, repeated until it is answered; what changes a session says who asks."""
        if method in NAMING and session_id is not None:
            arguments = (*arguments, self.world.requested.asks(method, session_id))
        return await self._patiently(lambda: self.directory.request(session_id, method, *arguments))

    async def _patiently(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        """However long nobody can be reached."""
        while True:
            try:
                return await ask()
            except (ClusterUnreachable, StoreUnreachable) as error:
                self.world.note(f"nobody answers: {error.code}")
                await asyncio.sleep(0.5)

    async def _run(self) -> None:
        began = time.monotonic()
        loop = asyncio.get_running_loop()
        self.directory = Directory(self.world)
        while not self.directory.known:
            await asyncio.sleep(0.2)
            await self.directory.learn()
        self.follower = Follower(self.directory)
        self._attending = loop.create_task(self._attend())  # as long as the world lasts
        for action in self.work.actions:
            if action.on is None:
                await asyncio.sleep(max(0.0, began + action.at - time.monotonic()))
                await self._act(action)
        await self._until_all_ended()
        self.finished = True

    async def _act(self, action: Action) -> None:
        await getattr(self, f"_{action.kind}")(action)

    async def _spawn(self, _action: Action) -> None:
        await self._found(self.work.spec)
        self._following = asyncio.get_running_loop().create_task(self._follow())

    async def _found(self, spec: dict[str, Any]) -> None:
        placement = spec.get("placement", DEFAULT)
        session = NewSession(self.session_id, spec, placement)
        await self._patiently(lambda: self.directory.spawn(session, BLOBS))

    async def _upgrade(self, action: Action) -> None:
        """The session shall go on under another specification, from its next run on."""
        self._specification += 1
        name = f"{self.work.spec['hash']}.{self._specification}"
        spec = {**self.work.spec, "max_rounds": 20 + self._specification, "hash": name, "on_change": "migrate"}
        if "placement" in action.what:
            spec["placement"] = action.what["placement"]
        self.world.invariants.upgraded.add(self.session_id)  # also if no answer says that this was done
        try:
            await self._found(spec)
            self.world.counts["upgraded"] += 1
        except UnderstudyError as error:
            self.world.note(f"no upgrade: {error}")

    async def _follow(self) -> None:
        """Follow the session from its beginning: every event comes, once, in order."""
        self.followed.clear()
        streams = self.world.plan.reports
        heard = Heard(self.session_id, self.world.invariants.violated)
        async with self.follower.follow(self.session_id, stream=streams) as subscription:
            while True:
                kind, *found = await subscription.queue.get()
                if kind == "event":
                    self.followed.append(found[0].seq)
                    if streams and isinstance(found[0], ModelCallCompleted):
                        await self._compare(heard, found[0])
                elif kind == "stream":
                    heard.stream(*found)
                    self.world.counts["streamed"] += len(found[1])
                elif kind == "error":
                    self.world.note(f"following ended: {found[0]}")
                    return

    async def _compare(self, heard: Heard, event: ModelCallCompleted) -> None:
        """What was streamed of an answer is what is committed; it is the message right before the event."""
        place = [self.session_id, event.seq - 2, 1]
        try:
            found = unpacked(
                await self.request("read", "messages", place, {}, session_id=self.session_id), list[Message], "messages"
            )
        except UnknownSession:
            return
        if found and (found[0].seq, found[0].role, found[0].run_id) == (event.seq - 1, "assistant", event.run_id):
            heard.completed(event, found[0])

    async def _send(self, action: Action) -> None:
        self.sent[action.what["run_id"]] = action.what["content"]
        run = {**action.what, **caller_of(self.session_id, action.what["run_id"])}
        try:
            while True:
                try:
                    await self.request("send", self.session_id, run, new_identifier(), session_id=self.session_id)
                    break
                except UnknownQueue:  # it was removed, and will be set again
                    await asyncio.sleep(0.2)
        except SessionClosed:
            self.refused.append(action.what["run_id"])
        else:
            self.accepted.append(action.what["run_id"])
            self.world.counts["sent"] += 1

    async def _steer(self, action: Action) -> None:
        request_id, since = new_identifier(), self.world.scheduler.time()
        try:
            done = await self.request("steer", self.session_id, action.what, request_id, session_id=self.session_id)
        except (NotRunning, UnknownSession) as error:
            self.world.note(f"not steered: {error.code}")
            return
        until, what = self.world.scheduler.time(), action.what
        self.steers.append(
            Steering(request_id, done["run_id"], what["content"], what["interrupt"], since, until, done["after"])
        )
        self.world.counts["interrupted" if what["interrupt"] else "steered"] += 1

    async def _signal(self, action: Action) -> None:
        await self._signal_to(self.session_id, action.what["name"])

    async def _signal_to(self, session_id: str, name: str) -> None:
        steps, since = self.world.invariants.stepped, self.world.scheduler.time()
        number = steps.numbered()
        wanted = {"name": name, "payload": number}
        try:
            waited = await self.request("signal", session_id, wanted, new_identifier(), session_id=session_id)
        except (NotRunning, UnknownSession) as error:
            self.world.note(f"not signalled: {error.code}")
            return
        steps.signalled(session_id, name, number, since)
        self.world.counts["signalled while a step waits" if waited else "signalled before"] += 1

    async def _fork(self, action: Action) -> None:
        """Fork the session at one of its messages, or at the nearest place, and send the fork an input."""
        fork_id, pick = action.what["session_id"], action.what["pick"]
        try:
            found = await self.request("read", "messages", [self.session_id], {}, session_id=self.session_id)
            places = [0, *(message["seq"] for message in found)]
            at = places[min(int(pick * len(places)), len(places) - 1)]
            try:
                await self._fork_at(fork_id, at)
            except InvalidInput as error:
                await self._fork_at(fork_id, error.details["allowed"][0])
        except (UnknownSession, SessionConflict) as error:
            self.world.note(f"no fork: {error}")
            return
        self._forks.append(fork_id)
        run = {"run_id": "r0", "content": action.what["content"]}
        await self.request("send", fork_id, run, new_identifier(), session_id=fork_id)
        self.world.counts["forked"] += 1

    async def _fork_at(self, fork_id: str, at: int) -> None:
        wanted = {"session_id": fork_id, "at": at}
        await self.request("fork", self.session_id, wanted, new_identifier(), session_id=self.session_id)

    async def _cancel(self, action: Action) -> None:
        run_id = action.what["run_id"]
        await self._change("cancel", self.session_id, run_id, f"cancel {run_id} {action.at} {action.on or ''}")
        self.world.counts["cancelled"] += 1

    def _child(self) -> str | None:
        """A sub-agent that is at work, or that has ended and waits for its group to start it again."""
        at_work = (
            f"SELECT session_id FROM session WHERE root_id = '{self.session_id}'"
            f" AND (active = 1 OR task_open = {TASK_UNREPORTED})"
        )
        found = sorted(row[0] for row in self.world.committed(at_work) if row[0] != self.session_id)
        return self._random.choice(found) if found else None

    async def _cancel_child(self, _action: Action) -> None:
        if (child := self._child()) is not None:
            await self._end_child("cancel", child, None, "a client cancels a sub-agent")
            self.world.counts["sub-agents cancelled"] += 1

    async def _close_child(self, _action: Action) -> None:
        if (child := self._child()) is not None:
            await self._end_child("close", child, "a client closes a sub-agent")
            self.world.counts["sub-agents closed"] += 1

    async def _end_child(self, method: str, session_id: str, *arguments: Any) -> None:
        """Note whose tasks were asked to end: ephemeral ones have no other run."""
        only = "lifecycle = 'ephemeral' AND replaced_by IS NULL"
        found = f"SELECT incarnation FROM session WHERE session_id = '{session_id}' AND {only}"
        before = self.world.committed(found)
        if await self._change(method, session_id, *arguments) is True and before:
            self.asked_to_end.append((session_id, before[0][0]))

    async def _change(self, method: str, session_id: str, *arguments: Any) -> Any:
        """A request that a client may repeat."""
        try:
            return await self.request(method, session_id, *arguments, new_identifier(), session_id=session_id)
        except (UnknownSession, SessionClosed) as error:
            self.world.note(f"no {method}: {error}")

    async def _close(self, _action: Action) -> None:
        await self._change("close", self.session_id, "the plan says so")
        self.closed = True

    async def _replace(self, action: Action) -> None:
        """When all has ended, retention removes the session, and another one is made under its id."""
        await self._close(action)
        await self._until_all_ended()
        self._following.cancel()
        if gone := await operator.prune(self.world, self.session_id):
            self.world.forget(gone)
            self.closed, self.replaced = False, True
            self.accepted.clear()
            self.sent.clear()
            self.world.counts["replaced"] += 1
            await self._spawn(action)
            await self._send(action)

    async def _put_away(self, action: Action) -> None:
        """When all has ended, the session is exported, removed and imported, and goes on."""
        await self._until_all_ended()
        if self._child() is None and await operator.put_away(self.world, self.session_id):
            self.world.counts["put away"] += 1
            self.replaced = True
            self.directory.remember(self.session_id, "")
            await self._send(action)

    async def _resume(self, _action: Action) -> None:
        if await self._change("resume", self.session_id):
            self.world.counts["resumed"] += 1

    async def _abort(self, _action: Action) -> None:
        await self._change("abort_pending", self.session_id, None)

    async def _schedule(self, action: Action) -> None:
        try:
            await self._change("schedule", self.session_id, action.what)
        except UnderstudyError as error:
            self.world.note(f"no wakeup: {error}")
        if action.what["every"] is not None:
            self._recurring.append(action.what["name"])

    async def _no_wakeup(self) -> None:
        """Wakeups that recur would go on for ever."""
        if any(tool["name"] == SCHEDULE_WAKEUP for tool in self.work.spec["tools"]):
            self._recurring += jobs.NAMES
        while self._recurring:
            await self._change("cancel_wakeup", self.session_id, self._recurring.pop())

    async def _set_schedule(self, action: Action) -> None:
        try:
            await self.request("set_schedule", schedules.wanted(self.work, action.what), {}, new_identifier())
        except UnderstudyError as error:
            self.world.note(f"no schedule: {error}")
        self._schedules.add(action.what["name"])

    async def _pause_schedule(self, action: Action) -> None:
        await self._change_schedule("pause_schedule", action.what["name"], True)

    async def _resume_schedule(self, action: Action) -> None:
        await self._change_schedule("pause_schedule", action.what["name"], False)

    async def _trigger_schedule(self, action: Action) -> None:
        await self._change_schedule("trigger_schedule", action.what["name"])

    async def _delete_schedule(self, action: Action) -> None:
        await self._change_schedule("delete_schedule", action.what["name"])

    async def _change_schedule(self, method: str, name: str, *arguments: Any) -> None:
        try:
            await self.request(method, name, *arguments, new_identifier())
        except UnknownSchedule as error:
            self.world.note(f"no {method}: {error}")

    async def _reset_loop(self, action: Action) -> None:
        await self._change_schedule("reset_loop", action.what["name"])

    async def _resolve_triage(self, action: Action) -> None:
        await self._look_after("resolve_triage", action.what["name"])

    async def _retry_triage(self, action: Action) -> None:
        await self._look_after("retry_triage", action.what["name"])

    async def _look_after(self, method: str, name: str) -> None:
        """Do something about the last failure of a schedule, if it has one."""
        mine = [one for one in await self.request("read", "triage", [], {}) if one["schedule"] == name]
        if mine:
            await self._change_schedule(method, mine[0]["id"])

    async def _set_queue(self, action: Action) -> None:
        await self.request("set_queue", action.what, new_identifier())

    async def _pause_queue(self, action: Action) -> None:
        """It is resumed after a while, whatever this client waits for by then."""
        await self._let_begin(action.what["name"], 0.0, paused=True)
        self.process.spawn(self._let_begin(action.what["name"], action.what["seconds"], paused=False))

    async def _let_begin(self, name: str, seconds: float, *, paused: bool) -> None:
        await asyncio.sleep(seconds)
        with contextlib.suppress(UnknownQueue):
            await self.request("pause_queue", name, paused, new_identifier())

    async def _remove_queue(self, action: Action) -> None:
        """A queue is removed if nothing of it waits or is at work, and set again: others need it."""
        try:
            removed = await self.request("remove_queue", action.what["name"], new_identifier())
            self.world.counts["queues removed"] += bool(removed)
        except Conflict as error:
            self.world.note(f"no remove_queue: {error}")
        else:
            await self._set_queue(action)

    async def _no_schedule(self) -> None:
        """Schedules would go on; what they were due at is counted all the same."""
        for name in sorted(self._schedules):
            await self._change_schedule("pause_schedule", name, True)

    async def _attend(self) -> None:
        """Answer what sessions of the tree, and of forks, ask."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for session_id, name in self.world.invariants.stepped.awaited(self.session_id, self._signaller):
                await self._signal_to(session_id, name)
            if not self.world.committed("SELECT 1 FROM question WHERE answered_at = 0"):
                continue  # a person would be notified; asking all the time takes the simulation's time
            for root_id in (self.session_id, *self._forks):
                try:
                    tree = await self.request("read", "tree", [root_id], {}, session_id=root_id)
                except UnknownSession:
                    continue
                for row in tree:
                    await self._answer_all(row["session_id"], row.get("pending") or ())

    async def _answer_all(self, session_id: str, asked: Sequence[dict[str, Any]]) -> None:
        for question in asked:
            if question["kind"] != APPROVAL:
                await self._answer(session_id, question)
        held = [question for question in asked if question["kind"] == APPROVAL]
        said = approvals.decisions(self.world, self._approver, session_id, held)
        if said:
            await self._decide(session_id, said)

    async def _decide(self, session_id: str, said: list[dict[str, Any]]) -> None:
        try:
            await self.request("decide", session_id, said, new_identifier(), session_id=session_id)
        except (NotAsked, AnswerConflict, SessionClosed, UnknownSession):
            pass

    async def _answer(self, session_id: str, question: dict[str, Any]) -> None:
        kind, text = question["kind"], "said so"
        decision = self._random.choice(("ok", "rerun")) if kind == "in_doubt" else "ok"
        if question["prompt"].startswith("workflow_diverged"):  # which is wrong: nobody changes their code
            text = "fail"
        if question.get("form"):  # a server's
            decision = self._random.choice(("ok", "ok", "error"))
            text = json.dumps({"word": f"word {question['asked']}"}) if decision == "ok" else "no"
        try:
            await self.request(
                "answer", session_id, question["call_id"], decision, "" if decision == "rerun" else text,
                question["asked"], new_identifier(), session_id=session_id,
            )  # fmt: skip
            self.world.counts["answered"] += 1
        except (NotAsked, AnswerConflict, SessionClosed, UnknownSession):
            pass

    async def _until_all_ended(self) -> None:
        for run_id in self.accepted:
            ended = f"SELECT finished_at FROM run WHERE session_id = '{self.session_id}' AND run_id = '{run_id}'"
            while True:
                if self.world.committed(ended) == [(0,)]:
                    await asyncio.sleep(LOOK_SECONDS)
                    continue
                try:
                    row = await self.request("read", "run", [self.session_id, run_id], {}, session_id=self.session_id)
                except UnknownRun:
                    self.world.invariants.violated(f"{self.session_id}: the accepted run {run_id} is unknown")
                    return
                if row["finished_at"]:
                    self.world.counts[f"run {row['status']}"] += 1
                    break
        await self._no_wakeup()
        await self._no_schedule()
