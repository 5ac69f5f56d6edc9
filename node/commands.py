"""Commands in the background: the processes of this node follow the rows that say what shall become of them."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

from understudy.commands import (
    LONGEST_READ,
    READ_BYTES,
    RUNNING,
    STOPPING,
    CommandEnd,
    CommandOutput,
    StartCommand,
)
from understudy.errors import InvalidInput, StaleGeneration, UnderstudyError
from understudy.ports import CommandProcesses
from understudy.records import ActivationId
from understudy.store.db.engine import now
from understudy.store.operations import commands
from understudy.store.operations.holding import require_held
from understudy.store.reads import queries
from understudy.store.transaction import Transaction
from understudy.tasks import Tasks

from .basis import NodeBasis
from .command_processes import GONE_SECONDS

log = logging.getLogger(__name__)

KEPT_SECONDS = 3_600
"""So long the output of a command that has ended is kept."""

MOST_KEPT = 16
"""So many commands of a session that have ended keep their output."""

REPEAT_SECONDS = 1.0

NOT_STARTED = "could not be started"


class Commands:
    """Starts, watches and ends the commands of this node, also those that a service before this one has started.

    Args:
        processes: None where commands can't be started.
    """

    def __init__(self, node: NodeBasis, processes: CommandProcesses | None) -> None:
        self._node = node
        self._processes = processes
        self._tasks = Tasks(log)
        self._starting: dict[str, int] = {}
        self._watched: dict[str, None] = {}
        self._stopping: dict[str, int] = {}
        self._look_task: asyncio.Task[Any] | None = None
        self._missing: tuple[list[str], asyncio.Task[Any]] | None = None
        self._looks_again = True  # what a service before this one has left is not known yet

    def open(self) -> None:
        """Look after the commands that there are."""
        if self._processes is not None:
            self._processes.open()

    def close(self) -> None:
        """Leave them to the next service."""
        self._tasks.cancel()
        if self._processes is not None:
            self._processes.close()

    # What frames ask.

    async def start(self, frame_id: str, activation: ActivationId, wanted: StartCommand) -> str:
        """See `understudy.ports.Node.start_command`. The row comes first: a process without one is killed."""
        processes, here = self._processes, self._node.config.node_id
        if processes is None or wanted.node_id != here:
            problem = "its process is on another node than the node service, which serves all nodes with SQLite"
            problem = "here no commands can be in the background" if processes is None else problem
            raise InvalidInput(f"the command can't be started: {problem}", session_id=activation.session_id)

        def operation(tx: Transaction) -> Any:
            row = tx.session(activation.session_id)
            require_held(row, activation, frame_id)
            return commands.start(tx, row, wanted)

        name = f"{activation.session_id}/{wanted.call_id}"
        self._starting[name] = self._starting.get(name, 0) + 1
        try:
            found = await self._node.journal.submit(operation, activation.session_id)
            if found.ended_at and found.problem.startswith(NOT_STARTED):  # whoever asked first has not heard so
                raise InvalidInput(f"the command {found.problem}", session_id=activation.session_id)
            if found.node_id == here and found.state == RUNNING and found.key not in self._watched:
                await self._begin(processes, found, wanted)
        finally:
            self._starting[name] -= 1
            if not self._starting[name]:
                del self._starting[name]
            self.look_soon()  # it may have been stopped meanwhile, and was left alone while it was started
        job: str = found.job
        return job

    async def _begin(self, processes: CommandProcesses, found: Any, wanted: StartCommand) -> None:
        try:
            await processes.start(found.key, wanted.process)
        except OSError as error:
            end = CommandEnd(problem=f"{NOT_STARTED}: {error}")
            await self._write_end(found.session_id, found.key, end, quiet=True)
            with suppress(OSError):
                processes.remove(found.key)
            raise InvalidInput(f"the command {end.problem}", session_id=found.session_id) from None
        self._watch(found.session_id, found.key)

    async def read(
        self, frame_id: str, activation: ActivationId, job: str, after: int | None, wait: float
    ) -> CommandOutput:
        """See `understudy.ports.Node.read_command`."""
        found = await self._found(frame_id, activation, job)
        processes, here = self._processes, self._node.config.node_id
        there = processes is not None and found.key in processes.known()
        if processes is None or not there:
            elsewhere = "" if found.node_id == here else found.node_id
            tail = found.tail.encode()
            return CommandOutput(
                state=found.state, exit_code=found.exit_code, problem=found.problem, node_id=elsewhere, data=tail,
                size=len(tail),
            )  # fmt: skip
        start, data, size = processes.read(found.key, after, READ_BYTES)
        if wait > 0 and not found.ended_at and not data:
            growth = asyncio.ensure_future(processes.grown(found.key, size, min(wait, LONGEST_READ)))
            end = asyncio.ensure_future(self._over(found.key))
            try:
                await asyncio.wait((growth, end), return_when=asyncio.FIRST_COMPLETED)
            finally:
                growth.cancel()
                end.cancel()
            found = await self._found(frame_id, activation, job)
            start, data, size = processes.read(found.key, after, READ_BYTES)
        return CommandOutput(
            state=found.state, exit_code=found.exit_code, problem=found.problem, start=start, data=data, size=size
        )

    async def _found(self, frame_id: str, activation: ActivationId, job: str) -> Any:
        def operation(tx: Transaction) -> Any:
            row = tx.session(activation.session_id)
            require_held(row, activation, frame_id)
            found = commands.find(tx, row, job)
            if found is None:
                raise InvalidInput(f"you have no command {job!r}", session_id=activation.session_id)
            return found

        return await self._node.journal.submit(operation, activation.session_id)

    async def _over(self, key: str) -> None:
        """Wait until the end of a command is written, if it is watched."""
        for task in self._tasks:
            if task.get_name() == key:
                await asyncio.wait((task,))

    # What follows from rows.

    @property
    def any_at_work(self) -> bool:
        """Whether commands run on this node, which end with its machine."""
        return bool(self._watched or self._starting)

    def note(self, nodes: dict[str, None]) -> None:
        """Something was written of commands of these nodes."""
        if self._node.config.node_id in nodes:
            self.look_soon()

    def look_soon(self) -> None:
        """Have processes follow rows, in the background."""
        self._looks_again = True
        if self._look_task is None or self._look_task.done():
            self._look_task = self._tasks.spawn(self._looking())

    def look_if_needed(self) -> None:
        """The same, if there is anything here that rows may say something of; the sweep asks now and then."""
        if self._looks_again or self._watched or (self._processes is not None and self._processes.known()):
            self.look_soon()

    def nodes_learned(self) -> None:
        """A supervisor has said which nodes have a service. The commands of others are taken over by who finds their
        processes; what is left after `GONE_SECONDS` is lost."""
        nodes = self._node.homes.nodes
        if self._missing is None or self._missing[0] != nodes:
            if self._missing is not None:
                self._missing[1].cancel()
            self._missing = nodes, self._tasks.spawn(self._lose(nodes))
        self.look_soon()

    async def _lose(self, nodes: list[str]) -> None:
        """Again and again: a node that was given up may have begun one since."""
        while True:
            await asyncio.sleep(GONE_SECONDS)
            try:
                if self._node.homes.leads and self._node.generation:
                    await self._node.journal.submit(lambda tx: commands.lost(tx, nodes))
            except StaleGeneration as error:
                self._node.stale(error)
            except UnderstudyError as error:
                log.warning("commands of nodes that are gone are lost later: %s", error)

    async def _looking(self) -> None:
        while self._looks_again:
            self._looks_again = False
            try:
                await self._look()
            except (UnderstudyError, OSError) as error:
                log.warning("commands are looked after later: %s", error)
                self._looks_again = True
                await asyncio.sleep(REPEAT_SECONDS)

    async def _look(self) -> None:
        """Compare processes with rows. What there is was listed first: a row is there before its process."""
        processes = self._processes
        known = processes.known() if processes is not None else []
        since = now() - KEPT_SECONDS * 1_000_000
        here = self._node.config.node_id
        rows = await self._node.reading.query(queries.commands_of_node, here, known, since)
        kept, of_session = set[str](), dict[str, int]()
        for row in rows:  # first those at work, then the last ones that have ended
            if row.ended_at:
                of_session[row.session_id] = of_session.get(row.session_id, 0) + 1
            if not row.ended_at or (of_session[row.session_id] <= MOST_KEPT and not row.closed):
                kept.add(row.key)
        for key in known:
            if processes is not None and key not in kept:
                log.info("what was left of command %s is removed", key)
                processes.remove(key)
        for row in rows:
            if row.ended_at:
                if processes is not None and row.key in known:
                    processes.stop(row.key, force=True)  # given up, or begun after that; as a rule it is gone
                continue
            if row.node_id != here and not await self._take_over(row):
                continue
            if processes is None or row.key not in known:
                await self._without_process(row)
            else:
                self._watch(row.session_id, row.key)
                if row.state == STOPPING:
                    self._stop(processes, row.key, row.stop_at)

    async def _take_over(self, row: Any) -> bool:
        """A command of another node has its process on this machine. If that node has no service any more, as when Ray
        was restarted, it is this one's from now on."""
        home, nodes, generation = self._node.config.node_id, self._node.homes.nodes, self._node.generation
        if not generation or row.node_id in nodes:
            return False

        def operation(tx: Transaction) -> bool:
            # While it waited the next generation may have begun: then `nodes` lacks those that have joined since.
            return tx.generation == generation and commands.take_over(tx, row.session_id, row.key, home, nodes)

        try:
            return await self._node.journal.submit(operation, row.session_id)
        except StaleGeneration as error:
            self._node.stale(error)
            return False

    async def _without_process(self, row: Any) -> None:
        """A row without a process: it is about to begin, its call will be repeated, or nobody starts it any more."""
        if row.key in self._watched or f"{row.session_id}/{row.call_id}" in self._starting:
            return
        if self._processes is not None and row.key in self._processes.known():  # it has begun since
            self._looks_again = True
            return
        if not await self._write_end(row.session_id, row.key, None, never_begun=True):
            self._tasks.spawn(self._later())

    async def _later(self) -> None:
        await asyncio.sleep(REPEAT_SECONDS)
        self.look_soon()

    def _stop(self, processes: CommandProcesses, key: str, stop_at: int) -> None:
        """Ask a command to end, and have it ended by force when its time is over."""
        before = self._stopping.get(key)
        if before is None:
            processes.stop(key, force=False)
        if before is None or stop_at < before:
            self._stopping[key] = stop_at
            self._tasks.spawn(self._force(processes, key, max(0, stop_at - now()) / 1e6))

    async def _force(self, processes: CommandProcesses, key: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if key in self._watched:
            processes.stop(key, force=True)

    def _watch(self, session_id: str, key: str) -> None:
        if key not in self._watched:
            self._watched[key] = None
            self._tasks.spawn(self._until_end(session_id, key)).set_name(key)

    async def _until_end(self, session_id: str, key: str) -> None:
        assert self._processes is not None
        try:
            end = await self._processes.ended(key)
            await self._write_end(session_id, key, end)
        finally:
            self._watched.pop(key, None)
            self._stopping.pop(key, None)

    async def _write_end(
        self, session_id: str, key: str, end: CommandEnd | None, *, quiet: bool = False, never_begun: bool = False
    ) -> bool:
        """See `commands.ended`; it is tried until it is written."""

        def operation(tx: Transaction) -> bool:
            closed = commands.ended(tx, session_id, key, end, quiet=quiet, never_begun=never_begun)
            if tx.find(session_id) is not None:
                self._node.homes.take_in(tx, session_id)
            return closed

        while True:
            try:
                return await self._node.journal.submit(operation, session_id)
            except UnderstudyError as error:
                log.warning("the end of command %s is written later: %s", key, error)
                await asyncio.sleep(REPEAT_SECONDS)
