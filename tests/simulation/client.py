"""A client of the simulated cluster: does what its plan says, repeats what has no answer, waits for every run's end."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Any

from understudy.cluster.repeating import CLIENT_PATIENCE, Repeating
from understudy.errors import (
    AnswerConflict,
    NotAsked,
    ServiceGone,
    SessionClosed,
    StoreUnreachable,
    UnderstudyError,
    UnknownRun,
    UnknownSession,
)
from understudy.identifiers import new_identifier

from . import operator
from .tools import BLOBS

if TYPE_CHECKING:
    from .cluster import Actor
    from .plan import Action, Work
    from .world import World

LOOK_SECONDS = 0.7


class Client:
    """A driver.

    Attributes:
        accepted: the runs that were acknowledged, in order.
        cancelled: runs whose cancel was acknowledged; None where the request named none.
        answered: runs whose end was seen, with what they ended as.
    """

    def __init__(self, world: World, work: Work) -> None:
        self.world = world
        self.work = work
        self.session_id = work.session_id
        self.accepted: list[str] = []
        self.refused: list[str] = []
        self.closed = False
        self._random = random.Random(f"{world.plan.seed}/client/{work.session_id}")
        self.process = world.scheduler.process(f"client.{work.session_id}")

    def start(self) -> asyncio.Task[None]:
        """Begin, in a process of its own."""
        return self.process.spawn(self._run())

    async def request(self, method: str, *arguments: Any) -> Any:
        """A request, repeated at any node until it is answered (`directory.NodeDirectory.request`)."""
        actor: Actor | None = None
        home = next(iter(self.world.cluster.machines.values()))

        async def choose(_number: int) -> None:
            nonlocal actor
            while True:
                actors = [actor for name, actor in self.world.cluster.actors.items() if name.startswith("node/")]
                if actors:
                    actor = self._random.choice(actors)
                    return
                await asyncio.sleep(0.1)

        def attempt(call_id: str) -> Any:
            assert actor is not None
            return self.world.call(actor, "repeated", call_id, "request", method, *arguments, here=home)

        while True:
            try:
                return await Repeating(CLIENT_PATIENCE).call(attempt, choose=choose)
            except (ServiceGone, StoreUnreachable):
                await asyncio.sleep(0.5)

    async def _run(self) -> None:
        began = time.monotonic()
        self._attending = asyncio.get_running_loop().create_task(self._attend())  # as long as the world lasts
        for action in self.work.actions:
            await asyncio.sleep(max(0.0, began + action.at - time.monotonic()))
            await getattr(self, f"_{action.kind}")(action)
        await self._until_all_ended()

    async def _spawn(self, _action: Action) -> None:
        session = {"session_id": self.session_id, "spec": self.work.spec, "placement": "", "metadata": {}}
        await self.request("spawn", session, BLOBS)

    async def _send(self, action: Action) -> None:
        try:
            await self.request("send", self.session_id, action.what)
        except SessionClosed:
            self.refused.append(action.what["run_id"])
        else:
            self.accepted.append(action.what["run_id"])
            self.world.counts["sent"] += 1

    async def _cancel(self, action: Action) -> None:
        await self.request("cancel", self.session_id, action.what["run_id"], f"cancel {action.at}", new_identifier())
        self.world.counts["cancelled"] += 1

    async def _close(self, _action: Action) -> None:
        await self.request("close", self.session_id, "the plan says so", new_identifier())
        self.closed = True

    async def _replace(self, action: Action) -> None:
        """When all has ended, retention removes the session, and another one is made under its id."""
        await self._close(action)
        await self._until_all_ended()
        if await operator.prune(self.world, self.session_id):
            self.closed = False
            self.accepted.clear()
            self.world.counts["replaced"] += 1
            await self._spawn(action)
            await self._send(action)

    async def _abort(self, _action: Action) -> None:
        await self.request("abort_pending", self.session_id, None, new_identifier())

    async def _schedule(self, action: Action) -> None:
        try:
            await self.request("schedule", self.session_id, action.what, new_identifier())
        except UnderstudyError as error:
            self.world.note(f"no wakeup: {error}")

    async def _attend(self) -> None:
        """Answer what sessions of the tree ask."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if not self.world.committed("SELECT 1 FROM question WHERE answered_at = 0"):
                continue  # a person would be told; asking all the time takes the simulation's time
            try:
                tree = await self.request("read", "tree", [self.session_id], {})
            except UnknownSession:
                continue
            for row in tree:
                for question in row.get("pending") or ():
                    await self._answer(row["session_id"], question)

    async def _answer(self, session_id: str, question: dict[str, Any]) -> None:
        kind = question["kind"]
        decision = self._random.choice(("ok", "rerun")) if kind == "in_doubt" else "ok"
        try:
            await self.request(
                "answer", session_id, question["call_id"], decision, "" if decision == "rerun" else "said so",
                question["asked"], new_identifier(),
            )  # fmt: skip
            if decision == "rerun":
                self.world.invariants.permitted[f"{session_id}/{question['call_id']}"] += 1
            self.world.counts["answered"] += 1
        except (NotAsked, AnswerConflict, SessionClosed):
            pass

    async def _until_all_ended(self) -> None:
        for run_id in self.accepted:
            ended = f"SELECT finished_at FROM run WHERE session_id = '{self.session_id}' AND run_id = '{run_id}'"
            while True:
                if self.world.committed(ended) == [(0,)]:
                    await asyncio.sleep(LOOK_SECONDS)
                    continue
                try:
                    row = await self.request("read", "run", [self.session_id, run_id], {})
                except UnknownRun:
                    self.world.invariants.violated(f"{self.session_id}: the accepted run {run_id} is unknown")
                    return
                if row["finished_at"]:
                    self.world.counts[f"run {row['status']}"] += 1
                    break
