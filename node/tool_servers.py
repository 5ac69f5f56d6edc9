"""MCP servers as frames ask for them: which server is meant, and the way to the host that has it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from understudy.errors import InvalidInput, ServiceGone
from understudy.events import Event, ToolFinished
from understudy.identifiers import digest
from understudy.ports import ToolHost
from understudy.records import ActivationId
from understudy.store.db.session_row import SessionRow
from understudy.store.operations import beginnings
from understudy.store.operations.activation import open_calls
from understudy.store.operations.holding import require_held
from understudy.store.transaction import Transaction
from understudy.tasks import Tasks
from understudy.tool_hosting import (
    LOST,
    UNKNOWN,
    HostAttached,
    ServerAnswer,
    ServerCall,
    ServerConfiguration,
    ServerTools,
)
from understudy.worktrees import placed

from .basis import NodeBasis
from .frames import Frames
from .service_link import Kill
from .specifications import Specifications
from .tool_link import NO_TOOL_HOST, ToolHostLink

log = logging.getLogger(__name__)

Result = TypeVar("Result")

NO_ANSWER = "the process that holds MCP servers on this node gives no answer"

START_SECONDS = 60.0
"""So long a tool host is waited for."""

RELEASE_SECONDS = 0.5
"""Calls that the host may forget within so many seconds are reported together."""

MOST_KNOWN = 10_000
"""Servers of sessions that are kept in mind."""


class ToolServers:
    """What frames ask of the MCP servers of their sessions' agents."""

    def __init__(
        self, node: NodeBasis, frames: Frames, specifications: Specifications, host: ToolHost, kill: Kill
    ) -> None:  # fmt: skip
        self.link = ToolHostLink(host, node.holder, kill)
        self._node = node
        self._frames = frames
        self._specifications = specifications
        self._host = host
        self._known: dict[tuple[ActivationId, str], ServerConfiguration] = {}
        self._made: dict[str, set[str]] = {}  # those that have no result yet, with their attempts
        self._given_up: set[str] = set()
        self._unwanted: list[str] = []
        self._number = ""  # of the attachment whose calls are known
        self._tasks = Tasks(log)

    async def tools(self, frame_id: str, activation: ActivationId, server: str) -> ServerTools:
        """See `understudy.ports.Node.server_tools`."""
        configuration = await self._configuration(frame_id, activation, server)
        while True:
            attached = await self._attached()
            if attached is None:
                return ServerTools("", error=f"the MCP server {server} can't be used: {NO_ANSWER}")
            try:
                return await self._host.tools(attached.number, configuration)
            except ServiceGone:
                self.link.lost(attached)

    async def host(self, frame_id: str, activation: ActivationId) -> str:
        """See `understudy.ports.Node.tool_host`."""
        self._frames.require_own(frame_id, activation)
        attached = await self._attached()
        return attached.host if attached is not None else ""

    async def call(self, frame_id: str, activation: ActivationId, call: ServerCall) -> ServerAnswer:
        """See `understudy.ports.Node.call_server`."""
        self._frames.require_own(frame_id, activation)
        key = _key(activation, call.key, call.attempt)
        self._made.setdefault(call.key, set()).add(key)
        configuration = await self._configuration(frame_id, activation, call.server)
        while True:
            attached = await self._attached()
            is_wanted = key in self._made.get(call.key, ()) and key not in self._given_up
            if call.arguments is not None and not is_wanted:
                # Nobody waits for it, or it has its result: a host that has forgotten it would make it again.
                await self._notify(lambda attached: self._host.cancel(attached.number, key))
                return ServerAnswer(LOST, "the call was given up")
            if attached is None:
                return ServerAnswer(UNKNOWN if call.arguments is None else LOST, "the tool host gives no answer")
            if call.arguments is not None and call.host != attached.host:
                return ServerAnswer(LOST, "the process that was to make the call has ended")
            # Nothing is awaited between this and the call: who is no longer the session's frame begins none.
            self._frames.require_own(frame_id, activation)
            try:
                return await self._host.call(attached.number, key, configuration, call)
            except ServiceGone:
                self.link.lost(attached)

    async def cancel(self, frame_id: str, activation: ActivationId, key: str, attempt: int) -> None:
        """See `understudy.ports.Node.cancel_server_call`."""
        self._frames.require_own(frame_id, activation)
        named = _key(activation, key, attempt)
        if named in self._made.get(key, ()):
            self._given_up.add(named)
        await self._notify(lambda attached: self._host.cancel(attached.number, named))

    def may_be_at_work(self, tx: Transaction, row: SessionRow) -> bool:
        """Whether the host may be at a call of a session: one that this service knows, or one that a service before it
        has made, which the store can't tell from one that nobody has begun."""
        if self._of_session(row.session_id):
            return True
        return bool(row.calls_open and self._specifications.within(tx, row.session_id).get("mcp_servers"))

    def drop(self, session_id: str, *, at_work: bool) -> None:
        """End and forget what the host is at for a session that is at home elsewhere now: nobody can ask for it here.

        Args:
            at_work: the host may be at a call of it. What a service before this one has left there is taken over now,
                which ends it: else it would end only when a session here needs a server again.
        """
        self._end(self._of_session(session_id))
        if at_work:
            self._tasks.alone("attach", self._attach)

    async def _attach(self) -> None:
        await self._attached()

    def _end(self, calls: Iterable[str]) -> None:
        """Have the host end and forget all attempts of these calls."""
        for call in calls:
            for key in self._forget(call):
                self._tasks.spawn(self._notify(lambda attached, key=key: self._host.cancel(attached.number, key)))  # type: ignore[misc]

    def committed(self, events: Iterable[Event]) -> None:
        """The host may forget calls whose results are committed."""
        for event in events if self._made else ():
            if isinstance(event, ToolFinished):
                self._forget(f"{event.session_id}/{event.call_id}")

    def abandon(self) -> None:
        """Ask for nothing more; the host goes on with what it has, for a successor."""
        self.link.close()
        self._tasks.cancel()

    def _of_session(self, session_id: str) -> list[str]:
        """The calls of a session that have no result yet."""
        return [key for key in list(self._made) if key.partition("/")[0] == session_id]

    def _forget(self, call: str) -> list[str]:
        """Have no call any more, and the host neither, soon; the keys of its attempts."""
        keys = sorted(self._made.pop(call, ()))
        self._given_up.difference_update(keys)
        self._unwanted += keys
        if self._unwanted:
            self._tasks.alone("release", self._release)
        return keys

    async def _release(self) -> None:
        while self._unwanted:
            await asyncio.sleep(RELEASE_SECONDS)
            keys, self._unwanted = self._unwanted, []
            await self._notify(lambda attached, keys=keys: self._host.release(attached.number, keys))  # type: ignore[misc]

    async def _notify(self, tell: Callable[[HostAttached], Awaitable[None]]) -> None:
        """Tell the host something, if there is one: another one does not have what it is about."""
        attached = self.link.current
        if attached is not None:
            try:
                await tell(attached)
            except ServiceGone:
                self.link.lost(attached)

    async def _attached(self) -> HostAttached | None:
        """The host, which is started if there is none; None if it gives no answer."""
        if self._host is NO_TOOL_HOST:
            return None
        try:
            async with asyncio.timeout(START_SECONDS):
                attached = await self.link.attached()
        except TimeoutError:
            return None
        if attached.number != self._number:
            self._number = attached.number
            self._take_over(attached.calls)
        return attached

    def _take_over(self, keys: list[str]) -> None:
        """Know the calls that a service before this one has left at the host. Those are ended that nobody can ask for
        here any more: their sessions may have moved or ended meanwhile."""
        left: dict[str, str] = {}
        for key in keys:
            incarnation, _, attempt = key.partition("/")
            call = attempt.rpartition("/")[0]
            if key not in self._made.get(call, ()):
                left[call] = incarnation
                self._made.setdefault(call, set()).add(key)

        def operation(tx: Transaction) -> list[str]:
            tx.load({call.partition("/")[0] for call in left})
            return [call for call, incarnation in left.items() if not self._is_open(tx, call, incarnation)]

        async def look() -> None:
            self._end(await self._node.journal.submit(operation))

        if left:
            self._tasks.spawn(look())

    def _is_open(self, tx: Transaction, call: str, incarnation: str) -> bool:
        """Whether a session that is at home here waits for the result of a call."""
        session_id, _, call_id = call.partition("/")
        row = tx.find(session_id)
        if row is None or row.node_id != self._node.homes.here or str(row.activation.incarnation) != incarnation:
            return False
        return any(one.call_id == call_id and one.state != "finished" for one in open_calls(tx, row))

    async def _configuration(self, frame_id: str, activation: ActivationId, server: str) -> ServerConfiguration:
        """What a server of a session's agent is started with.

        Raises:
            Fenced: the frame does not have the session.
            InvalidInput: its agent has no such server.
        """
        self._frames.require_own(frame_id, activation)
        known = self._known.get((activation, server))
        if known is not None:
            return known

        def operation(tx: Transaction) -> ServerConfiguration:
            row = tx.session(activation.session_id)
            require_held(row, activation, frame_id)
            spec = self._specifications.within(tx, activation.session_id)
            created = beginnings.created_at(tx, row.root_id)
            spec = placed(spec, row.session_id)
            return configuration_of(spec, server, f"{row.session_id}/{row.created_at}", f"{row.root_id}/{created}")

        found = await self._node.journal.submit(operation, activation.session_id)
        if len(self._known) > MOST_KNOWN:
            self._known.clear()
        self._known[activation, server] = found
        return found


def configuration_of(spec: dict[str, Any], server: str, session: str, tree: str) -> ServerConfiguration:
    """What a server of an agent is started with: who shares one has an equal one.

    Args:
        session, tree: name them, and no other ones that had their ids.

    Raises:
        InvalidInput: the agent has no such server.
    """
    entry = next((one for one in spec.get("mcp_servers", ()) if one["name"] == server), None)
    if entry is None:
        raise InvalidInput(f"agent {spec['name']!r} has no MCP server {server!r}")
    scope = {"session": f"session/{session}", "tree": f"tree/{tree}", "node": "node"}[entry["share"]]
    workspace = spec["workspace"] or ""
    return ServerConfiguration(
        digest(scope, entry["key"], workspace), server, list(entry["command"]), entry["url"] or "",
        list(entry["environment"]), dict(entry["headers"]), workspace,
    )  # fmt: skip


def _key(activation: ActivationId, key: str, attempt: int) -> str:
    """Names an attempt of a call: a session that is made again under a removed one's id has the same calls."""
    return f"{activation.incarnation}/{key}/{attempt}"
