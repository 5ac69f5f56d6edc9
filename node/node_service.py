"""The node service: journal, model calls and ready queue of a node, joined by `step`. A plain class.

Frames call in (`step`, `commit`, …), clients by `Requests`, the supervisor by parts of the service (`Takeover`, …).
The service itself calls nobody but, through ports, its gateway and the services of other nodes, so it needs no Ray and
its tests need none either.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from understudy.config import ModelProfile
from understudy.errors import Fenced
from understudy.ports import ClusterHead, CommandProcesses, ModelGateway, TaskRunner, ToolHost
from understudy.protocol import Exit, Judged, StepCall, Work
from understudy.reads import Note
from understudy.records import INTERRUPTED_BY_STEER, Ack, ActivationId, Batch
from understudy.redaction import know
from understudy.store.db.engine import now
from understudy.store.db.session_row import ActiveSession
from understudy.store.journal import Committed
from understudy.store.operations import batches, notes
from understudy.store.operations.holding import require_held
from understudy.store.transaction import Transaction
from understudy.tool_hosting import ServerAnswer, ServerCall, ServerTools

from .answers import Answers
from .basis import NodeBasis, NodeConfig
from .calls import Calls
from .claims import Claims
from .command_processes import LocalCommands
from .commands import Commands
from .deaths import Deaths
from .draining import Draining
from .feed import Feed
from .frames import Frames, current_work
from .interrupts import Interrupts
from .notices import Notices, Tell, alone
from .projection import Projection
from .rates import NodeRates
from .rounds import Rounds
from .service_link import Kill, NoHead, never_killed
from .sharing import Sharing
from .shown import show_all
from .specifications import Specifications
from .sweep import Sweep
from .takeover import Takeover
from .timers import Timers
from .tool_link import NO_TOOL_HOST
from .tool_servers import ToolServers
from .tool_tasks import NobodyRuns, ToolTasks
from .verdicts import Verdicts


class NodeService(NodeBasis):
    """One per node (SQLite: one per cluster).

    Guarantees: what it acknowledges is committed; a call may be repeated after its death without a second effect; a
    session is given to one frame at a time, under a new epoch each time.

    Its parts are given what they need, and nothing else. Where one needs a part that is made after it, it
    is given a way to call that.
    """

    def __init__(
        self, config: NodeConfig, gateway: ModelGateway, tell: Tell = alone, kill: Kill = never_killed, *,
        runner: TaskRunner | None = None, processes: CommandProcesses | None = None,
        tool_host: ToolHost = NO_TOOL_HOST, kill_tool_host: Kill = never_killed, head: ClusterHead | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config, lambda committed: self._committed(committed))
        self.specifications = Specifications(self.reading)
        self.interrupts = Interrupts()
        self.claims = Claims(self._woken_unnoticed)
        self.verdicts = Verdicts()
        self.frames = Frames(
            self, self.specifications, self.claims, self.interrupts, self.verdicts,
            look=lambda session_id: self.deaths.look(session_id),
            died=lambda slot, lost: self.deaths.crashed(slot, lost, "process_died", now()),
        )  # fmt: skip
        self.calls = Calls(
            gateway, self.holder, self.profiles, answered=lambda *answer: self.answers.answered(*answer),
            identified=lambda *response: self.answers.identified(*response),
            lost=lambda call: self.answers.lost(call), grown=lambda session_id: self.feed.delta(session_id),
            followed=lambda session_id: self.feed.is_streamed(session_id), verdicts=self.verdicts,
            attended=self.frames.attends, unattended=lambda call: self.answers.unattended(call), kill=kill,
        )  # fmt: skip
        self.rates = NodeRates(self.calls.link, self.frames.supply.changed)
        self.feed = Feed(self.reading.events, self.calls.stream, self.reading.run)
        self.timers = Timers(self)
        if processes is None and config.command_directory:
            processes = LocalCommands(config.command_directory)
        self.commands = Commands(self, processes)
        self.projection = Projection(
            self,
            partial(show_all, self, self.frames.paging, self.frames.supply, self.calls, self.rates, head or NoHead()),
        )
        self.tasks = ToolTasks(self, self.frames, runner or NobodyRuns())
        self.tool_servers = ToolServers(self, self.frames, self.specifications, tool_host, kill_tool_host)
        self.draining = Draining(
            self, self.frames, self.calls, self.claims, self.interrupts, self.tasks, self.tool_servers
        )  # fmt: skip
        self.sharing = Sharing(self, self.frames, self.specifications, self.tasks, self.tool_servers)
        self.notices = Notices(
            self, self.frames, self.calls, self.claims, self.interrupts, self.feed, self.timers,
            self.commands, tell=tell,
            sweep=lambda: self.sweep.run(0),
        )  # fmt: skip
        self.deaths = Deaths(
            self, self.frames, self.calls, self.claims, self.interrupts, self.specifications
        )  # fmt: skip
        self.takeover = Takeover(
            self,
            self.frames,
            self.calls,
            self.deaths,
            self.draining,
            self.notices,
            self.timers,
            self.projection,
            self.commands,
        )
        self.sweep = Sweep(
            self, self.frames, self.calls, self.interrupts, self.deaths, self.notices, self.takeover, self.timers,
            self.feed, self.tasks, self.commands,
        )  # fmt: skip
        self.rounds = Rounds(self, self.frames, self.calls, self.claims, self.draining)
        self.answers = Answers(self, self.frames, self.calls, self.claims, self.draining)

    async def start(self) -> None:
        """Open the store, catch up the projection, start committing.

        Raises:
            StoreUnreachable, StoreVersion, StoreSchema, StoreOwned: see `Database.prepare`.
            MetricsPortTaken, InvalidConfiguration: see `Projection.listen`.
        """
        await asyncio.to_thread(self.database.prepare, self.config.schema_policy)
        await self.projection.listen()
        self.journal.start()
        self.commands.open()
        await self.calls.link.start()
        await self.projection.start()
        self.spawn_task(self.sweep.sweeping())
        self.spawn_task(self.timers.firing())
        self.spawn_task(self.rates.following())

    def abandon(self) -> None:
        """Stop at once, as SIGKILL stops a process: nothing more is committed, asked of the gateway, exported or
        reported. Whoever waits for a commit is cancelled. `close` lets go of what is open.
        """
        self.journal.abandon()
        self.tasks.close()
        self._tasks.cancel()
        self.calls.abandon()
        self.commands.close()
        self.tool_servers.abandon()
        self.projection.abandon()

    async def close(self) -> None:
        """Stop cleanly: what is unanswered stays a wait in the store. One that was abandoned only lets go of its store
        and its files."""
        await self.calls.close()
        self.tasks.close()
        self.tool_servers.abandon()
        self._tasks.cancel()
        self.commands.close()
        await self.projection.close()
        await self.reading.close()
        await self.journal.close()

    # What frames call.

    async def step(self, call: StepCall) -> Work | Exit:
        """See `understudy.ports.Node.step`."""
        return await self.rounds.step(call)

    async def commit(self, frame_id: str, batch: Batch) -> Ack:
        """See `understudy.ports.Node.commit`."""
        try:
            with self.claims.committing(batch.session_id) as claim:
                claim.activation = batch.activation
                result = await self.journal.submit(
                    lambda tx: batches.commit(tx, batch, frame_id, holder=self.holder), batch.session_id
                )
        except Fenced:
            self.metrics.count_fenced()
            raise
        return result.ack

    async def reload(self, frame_id: str, activation: ActivationId) -> Work:
        """See `understudy.ports.Node.reload`."""
        return await self.journal.submit(lambda tx: current_work(tx, activation, frame_id, 0), activation.session_id)

    async def interrupted(self, frame_id: str, activation: ActivationId, run_id: str, round_number: int) -> str:
        """See `understudy.ports.Node.interrupted`."""
        self.frames.require_own(frame_id, activation)
        with self.interrupts.watching(activation, run_id, round_number) as reason:
            work = await self.journal.submit(
                lambda tx: current_work(tx, activation, frame_id, 1 << 62), activation.session_id
            )
            if (work.run_id, work.round) != (run_id, round_number):
                raise Fenced(f"round {round_number} of run {run_id} is over", session_id=activation.session_id)
            if work.cancel is not None:
                return work.cancel or "cancelled"
            return INTERRUPTED_BY_STEER if any(item.interrupts for item in work.inbox) else await reason

    async def judge(self, frame_id: str, verdict: Judged) -> None:
        """See `understudy.ports.Node.judge`."""
        if not self.frames.may_judge(frame_id, verdict):
            return
        with self.verdicts.kept(frame_id, verdict) as over:
            self.calls.judge(verdict)
            self.frames.judged(frame_id, verdict)
            await over

    async def specification(self, frame_id: str, activation: ActivationId) -> dict[str, Any]:
        """See `understudy.ports.Node.specification`."""

        def operation(tx: Transaction) -> dict[str, Any]:
            require_held(tx.session(activation.session_id), activation, frame_id)
            return self.specifications.within(tx, activation.session_id)

        return await self.journal.submit(operation, activation.session_id)

    async def memory(self, frame_id: str, activation: ActivationId) -> list[Note]:
        """See `understudy.ports.Node.memory`."""

        def operation(tx: Transaction) -> list[Note]:
            row = tx.session(activation.session_id)
            require_held(row, activation, frame_id)
            memory = self.specifications.within(tx, activation.session_id).get("memory")
            return notes.shown(tx, row, memory) if memory else []

        return await self.journal.submit(operation, activation.session_id)

    async def blob(self, digest: str) -> bytes:
        """See `understudy.ports.Node.blob`."""
        return await self.reading.blob(digest)

    async def server_tools(self, frame_id: str, activation: ActivationId, server: str) -> ServerTools:
        """See `understudy.ports.Node.server_tools`."""
        return await self.tool_servers.tools(frame_id, activation, server)

    async def tool_host(self, frame_id: str, activation: ActivationId) -> str:
        """See `understudy.ports.Node.tool_host`."""
        return await self.tool_servers.host(frame_id, activation)

    async def call_server(self, frame_id: str, activation: ActivationId, call: ServerCall) -> ServerAnswer:
        """See `understudy.ports.Node.call_server`."""
        return await self.tool_servers.call(frame_id, activation, call)

    async def cancel_server_call(self, frame_id: str, activation: ActivationId, key: str, attempt: int) -> None:
        """See `understudy.ports.Node.cancel_server_call`."""
        await self.tool_servers.cancel(frame_id, activation, key, attempt)

    # What others tell.

    async def register(self, profile: ModelProfile) -> None:
        """Learn credentials. They stay in memory, here and at the gateway. Raises what `Profiles.learn` raises."""
        know(profile.api_key)
        await self.calls.register(self.profiles.learn(profile))

    def _committed(self, committed: Committed) -> None:
        self.projection.apply(committed)
        self.notices.committed(committed)
        self.tool_servers.committed(committed.events)

    def _woken_unnoticed(self, row: ActiveSession) -> None:
        self.notices.wake(row)
        self.frames.dispatch()
