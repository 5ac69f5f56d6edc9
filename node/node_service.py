"""The node service: journal, model calls and ready queue of a node, joined by `step`. A plain class.

Frames call in (`step`, `commit`), clients call in (`spawn`, `send`), the supervisor calls in (`take_up`).
The service itself calls nobody but, through ports, its gateway and the services of other nodes, so it needs no Ray and
its tests need none either.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from understudy.config import ModelProfile
from understudy.errors import Fenced
from understudy.ports import ModelGateway
from understudy.profiles import Profiles
from understudy.protocol import Exit, News, StepCall, Work
from understudy.records import Ack, ActivationId, Batch, Cancelled
from understudy.redaction import know
from understudy.store import operations, queries
from understudy.store.journal import Committed
from understudy.store.operations import require_held
from understudy.store.transaction import Row, Transaction

from .basis import NodeBasis, NodeConfig
from .calls import Calls
from .draining import Draining
from .feed import Feed
from .frames import Frames, current_work
from .gateway_link import Kill, never_killed
from .projection import Projection
from .recovery import Recovery, cancelled
from .rounds import FENCED, Rounds
from .shown import show_all
from .timers import Timers

log = logging.getLogger(__name__)

KNOWN_SESSIONS = 10_000
MOST_UNTOLD = 1_000
"""So many sessions are remembered that were written before it was known which nodes there are; a sweep finds others."""

Tell = Callable[[str, News], Coroutine[Any, Any, None]]
"""Tells the service of a node what another did to its sessions (`NodeService.notice`). May get lost."""


async def alone(_node_id: str, _news: News) -> None:
    """The `Tell` of a service that is the only one."""


class NodeService(NodeBasis):
    """One per node (SQLite: one per cluster).

    Guarantees: what it acknowledges is committed; a call may be repeated after its death without a second effect; a
    session is given to one frame at a time, under a new epoch each time.

    Attributes:
        own: sessions for which commits of our own are under way, and how many; whoever commits learns of wake-ups.
        interrupts: what tells activations that their run shall end, with the run.
        cancelled: runs that were asked to end while commits of our own are under way for their sessions.
    """

    def __init__(
        self, config: NodeConfig, gateway: ModelGateway, tell: Tell = alone, kill: Kill = never_killed
    ) -> None:  # fmt: skip
        super().__init__(config, self._committed)
        self._tell = tell
        self.profiles = Profiles(config.prices)
        self.rounds = Rounds(self)
        self.calls = Calls(
            gateway, self.holder, self.profiles, answered=self.rounds.answered, lost=self.rounds.lost,
            grown=self._grown, followed=lambda session_id: self.feed.is_streamed(session_id), kill=kill,
        )  # fmt: skip
        self.frames = Frames(self)
        self.recovery = Recovery(self)
        self.timers = Timers(self)
        self.draining = Draining(self)
        self.feed = Feed(self.reading.events, self.calls.stream, self.reading.run)
        shown = partial(show_all, self, self.frames.paging, self.frames.supply, self.calls)
        self.projection = Projection(self, shown)
        self.own: Counter[str] = Counter()
        self._untold: dict[str, None] = {}
        self._missed: dict[str, Row] = {}
        self.cancelled: dict[str, str] = {}
        self.interrupts: dict[ActivationId, tuple[str, asyncio.Future[str]]] = {}
        self._specs: dict[str, tuple[int, dict[str, Any]]] = {}
        self._placements: dict[str, str] = {}

    async def start(self) -> None:
        """Open the store, catch up the projection, start committing.

        Raises:
            StoreUnreachable, StoreVersion, StoreSchema, StoreOwned: see `Database.prepare`.
        """
        await asyncio.to_thread(self.database.prepare, self.config.schema_policy)
        self.journal.start()
        await self.calls.link.start()
        await self.projection.start()
        self.spawn_task(self.recovery.sweeping())
        self.spawn_task(self.timers.firing())

    async def close(self) -> None:
        """Stop cleanly: what is unanswered stays a wait in the store."""
        await self.calls.close()
        self._tasks.cancel()
        await self.projection.close()
        await self.reading.close()
        await self.journal.close()

    @property
    def activates(self) -> bool:
        """Whether sessions are given to frames here: not without a generation, and not while the node is drained."""
        return bool(self.generation) and not self.draining.on

    # What frames call.

    async def step(self, call: StepCall) -> Work | Exit:
        """See `understudy.ports.Node.step`."""
        return await self.rounds.step(call)

    async def commit(self, frame_id: str, batch: Batch) -> Ack:
        """See `understudy.ports.Node.commit`."""
        self.claim(batch.session_id)
        try:
            result = await self.journal.submit(
                lambda tx: operations.commit(tx, batch, frame_id, holder=self.holder), batch.session_id
            )
        except BaseException as error:
            self.disown(batch.session_id, FENCED)
            if isinstance(error, Fenced):
                self.projection.metrics.count_fenced()
            raise
        self.disown(batch.session_id, batch.activation)
        return result.ack

    async def reload(self, frame_id: str, activation: ActivationId) -> Work:
        """See `understudy.ports.Node.reload`."""
        return await self.journal.submit(lambda tx: current_work(tx, activation, frame_id, 0))

    async def interrupted(self, frame_id: str, activation: ActivationId, run_id: str) -> str:
        """See `understudy.ports.Node.interrupted`."""
        self.frames.require_own(frame_id, activation)
        self.end_watch(activation)
        watch = self.interrupts[activation] = run_id, asyncio.get_running_loop().create_future()
        try:
            work = await self.journal.submit(lambda tx: current_work(tx, activation, frame_id, 1 << 62))
            if work.run_id != run_id:
                raise Fenced(f"run {run_id} is over", session_id=activation.session_id)
            return work.cancel if work.cancel is not None else await watch[1]
        finally:
            if self.interrupts.get(activation) is watch:
                del self.interrupts[activation]

    def end_watch(self, activation: ActivationId) -> None:
        """End the call that is pending for an activation: nobody waits for it any more, or asks anew. It would last as
        long as the service, which can have only so many."""
        watch = self.interrupts.pop(activation, None)
        if watch is not None:
            watch[1].cancel()

    def end_activation(self, activation: ActivationId, reason: str) -> None:
        """Tell an activation that waits for the end of its run that it is over itself."""
        watch = self.interrupts.pop(activation, None)
        if watch is not None and not watch[1].done():
            watch[1].set_exception(Fenced(reason, session_id=activation.session_id))
            watch[1].exception()  # nobody may be waiting

    async def specification(self, frame_id: str, activation: ActivationId) -> dict[str, Any]:
        """See `understudy.ports.Node.specification`."""

        def operation(tx: Transaction) -> dict[str, Any]:
            require_held(tx.session(activation.session_id), activation, frame_id)
            return self.specification_in(tx, activation.session_id)

        return await self.journal.submit(operation, activation.session_id)

    def specification_in(self, tx: Transaction, session_id: str) -> dict[str, Any]:
        """A session's compiled specification, for an operation."""
        row = tx.session(session_id)
        incarnation, spec = self._specs.get(session_id, (0, None))
        if spec is None or incarnation != row["incarnation"]:
            spec = tx.specification(session_id)
            self.remember_specification(row, spec)
        return spec

    def remember_specification(self, row: Row, spec: dict[str, Any]) -> None:
        """A session's specification as the store has it: it never changes."""
        if len(self._specs) > KNOWN_SESSIONS:
            self._specs.clear()
        self._specs[row["session_id"]] = row["incarnation"], spec

    async def placement(self, session_id: str) -> str:
        """The placement profile of a session. Raises `UnknownSession`."""
        if session_id not in self._placements:
            self.remember_placement(session_id, (await self.reading.session(session_id))["placement"])
        return self._placements[session_id]

    def remember_placement(self, session_id: str, placement: str) -> None:
        """A session's placement as the store has it: it never changes."""
        if len(self._placements) > KNOWN_SESSIONS:
            self._placements.clear()
        self._placements[session_id] = placement

    async def blob(self, digest: str) -> bytes:
        """See `understudy.ports.Node.blob`."""
        return await self.reading.blob(digest)

    def claim(self, session_id: str) -> None:
        """A commit of our own for a session begins; `disown` ends it."""
        self.own[session_id] += 1

    def disown(self, session_id: str, activation: ActivationId | None = None) -> Row | None:
        """End a commit of our own for a session; its row if it was woken within it.

        Where several are under way each is told: none may let the session wait.

        Args:
            activation: which committed. What was woken under another one is none of its business, and is told as if
                nobody had committed.
        """
        self.own[session_id] -= 1
        if self.own[session_id] > 0:
            row = self._missed.get(session_id)
        else:
            del self.own[session_id]
            self.cancelled.pop(session_id, None)
            row = self._missed.pop(session_id, None)
        if row is None or activation is None or ActivationId.of(row) == activation:
            return row
        if not self.elsewhere(row):
            self.frames.wake(row)
            self.frames.dispatch()
        return None

    def is_ready(self, row: Row) -> bool:
        """Whether an active session has something to do: it waits for nothing, or for a call that is lost."""
        return row["wait"] is None or (row["wait"] == "model" and self.calls.of_session(row["session_id"]) is None)

    # Commits and answers.

    def _committed(self, committed: Committed) -> None:
        self.projection.apply(committed)
        written = {session_id: (before, row["seq"]) for session_id, (before, row) in committed.written.items()}
        self.feed.publish(committed.events, written)
        if not self.nodes and len(self._untold) < MOST_UNTOLD:
            self._untold.update(dict.fromkeys(committed.written))
        for node_id, news in self._by_home(committed).items():
            self._tell_home(node_id, news)
        self._condemn(committed.killed)
        self.act(committed.cancelled, committed.woken)
        self.timers.note(committed.timers.items())
        if committed.repeated:  # what the try before this one changed was not told: look everywhere
            self.feed.forget_all()
            self.spawn_task(self.recovery.sweep_all(0))
        self.frames.dispatch()

    def _tell_home(self, node_id: str, news: News) -> None:
        self.feed.leave(news.sessions)
        self.spawn_task(self._tell(node_id, news))

    async def tell_homes(self) -> None:
        """Once it is known which nodes there are: tell them what was written here before to sessions that are at home
        there, and leave those to them."""
        untold = list(self._untold)
        if not untold:
            return
        found: dict[str, News] = {}
        for session_id, (node_id, _) in (await self.reading.query(queries.homes, untold)).items():
            if self.elsewhere({"node_id": node_id}):
                found.setdefault(node_id, News()).sessions.append(session_id)
                self.frames.paging.remove(session_id)
        for session_id in untold:
            self._untold.pop(session_id, None)
        for node_id, news in found.items():
            self._tell_home(node_id, news)

    def take_in(self, tx: Transaction, session_id: str) -> None:
        """Give a session that is being written a home, if its own is gone or drained: this node, unless it is too.

        Not one that may be at work, with a run or about to begin one: a drained node gives it away when it can be, a
        lost one's is adopted under the generation that follows from the loss. A node that is not known here may also
        have only just joined.
        """
        row = tx.session(session_id)
        if not self.nodes or row["node_id"] in self.draining.homes:
            return
        rested = row["run_id"] is None and (session_id in tx.woken or not row["active"])
        at_work = row["node_id"] in self.nodes or row["frame_id"] is not None or row["wait"] == "model"
        if at_work and not rested:
            return
        tx.changed(row)
        row["frame_id"] = row["actor_pid"] = None  # the frame that it rests in will not call in elsewhere
        row["node_id"] = self.draining.home_for(row["root_id"])

    def _by_home(self, committed: Committed) -> dict[str, News]:
        """What was done to sessions at home elsewhere: their own services must hear of it."""
        found: dict[str, News] = {}
        killed = {activation.session_id: (frame_id, activation) for frame_id, activation in committed.killed.items()}
        for session_id, (_, row) in committed.written.items():
            if not self.elsewhere(row):
                continue
            news = found.setdefault(row["node_id"], News())
            news.sessions.append(session_id)
            if session_id in committed.cancelled:
                news.cancelled[session_id] = committed.cancelled[session_id]
            if session_id in killed:
                frame_id, activation = killed[session_id]
                news.killed[frame_id] = activation
        return found

    def _condemn(self, killed: Mapping[str, ActivationId]) -> None:
        for frame_id, activation in killed.items():
            self.frames.condemn(frame_id, activation)

    async def notice(self, news: News) -> None:
        """Another node service wrote to sessions at home here: act as if it had been this one.

        A notice that gets lost costs time only: the sweep finds what it would have told.
        """
        self._condemn(news.killed)
        self.act(news.cancelled, {})
        self.feed.forget(news.sessions)
        self.spawn_task(self.timers.look())
        rows = await self.reading.active([self.config.node_id], session_ids=news.sessions)
        woken = {row["session_id"]: row for row in rows if self.is_ready(row)}
        self.act(cancelled(rows), woken)  # earlier news may have got lost
        self.frames.dispatch()

    def act(self, to_cancel: dict[str, Cancelled], woken: dict[str, Row]) -> None:
        """Interrupt what was cancelled, and let what was woken go on.

        What is told may be over: by the name of its run, nobody is interrupted for another.
        """
        for session_id, (run_id, incarnation, epoch, reason) in to_cancel.items():
            activation = ActivationId(session_id, incarnation, epoch)
            watch = self.interrupts.get(activation)
            if watch is not None and watch[0] == run_id:
                del self.interrupts[activation]
                if not watch[1].done():
                    watch[1].set_result(reason or "cancelled")
            # Also of a run that was ended by force: it waits for nothing any more.
            self.calls.abort(session_id, incarnation, run_id)
            if session_id in self.own:  # its call goes out only after this commit is told
                self.cancelled[session_id] = run_id
        for session_id, row in woken.items():
            if session_id in self.own:  # whoever commits for it looks at this before it lets the session wait
                self._missed[session_id] = row
            elif not self.elsewhere(row):
                self.frames.wake(row)

    def _grown(self, session_id: str) -> None:
        self.feed.delta(session_id)

    async def register(self, profile: ModelProfile) -> None:
        """Learn credentials. They stay in memory, here and at the gateway. Raises what `Profiles.learn` raises."""
        know(profile.api_key)
        await self.calls.link.register(self.profiles.learn(profile))
