"""The node services as a client knows them: which there are, which looks after a session, and how to ask it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

from understudy.config import Settings
from understudy.errors import ClusterUnreachable, ServiceGone, StoreUnreachable, UnderstudyError
from understudy.identifiers import new_identifier
from understudy.node.node_socket import CLIENT
from understudy.protocol import NewSession, ServiceDirectory, Spawned
from understudy.transport.channel import Ticket
from understudy.transport.remote_node import SocketCalls
from understudy.transport.repeating import CLIENT_PATIENCE, REPEAT_SECONDS, Repeating

from ..client.follower import asked
from .names import node_name
from .ray_edge import find_actor, own_node, through_ray, ticket

LEARN_SECONDS = 1.0
REFRESH_SECONDS = 30.0
KNOWN_HOMES = 100_000


class NodeDirectory:
    """Handles of the node services, and the home of each session. Lives on the client's loop.

    Any service can commit any request, and every request is idempotent. So a session's home is only the best one to
    ask (its frames and its feed are there); when it is gone another one is asked.
    """

    def __init__(self, settings: Settings, read: Callable[[], Awaitable[ServiceDirectory]]) -> None:
        self._settings = settings
        self._read = read
        self._single = settings.store.startswith("sqlite")
        self._handles: dict[str, Any] = {}
        self._homes: dict[str, str] = {}
        self._learned = time.monotonic()
        self._turn = random.randrange(1_000)
        self._learning: asyncio.Task[None] | None = None
        self._name = new_identifier()
        self._here: str | None = None
        self._socket = SocketCalls(self._admit, self._otherwise)

    async def update(self, directory: ServiceDirectory) -> None:
        """Take over what the supervisor says (`Supervisor.directory`)."""
        found: dict[str, Any] = {}
        for node in directory.nodes:
            name = node_name(self._settings.instance, node.node_id)
            found[node.node_id] = await asyncio.to_thread(find_actor, name)
        self._handles = {node_id: handle for node_id, handle in found.items() if handle is not None} or self._handles
        if not self._handles:
            raise ClusterUnreachable("the node service can't be found")

    async def learn(self) -> None:
        """Ask the supervisor again, at most once a second; nothing changes if it gives no answer."""
        if self._learning is None or (self._learning.done() and time.monotonic() - self._learned > LEARN_SECONDS):
            self._learning = asyncio.get_running_loop().create_task(self._learn())
        await asyncio.wait({self._learning}, timeout=LEARN_SECONDS)

    async def _learn(self) -> None:
        try:
            async with asyncio.timeout(REPEAT_SECONDS):
                found = await self._read()
            await self.update(found)
        except (TimeoutError, UnderstudyError):
            pass
        self._learned = time.monotonic()

    def remember(self, session_id: str, node_id: str) -> None:
        """Remember a session's home."""
        if len(self._homes) >= KNOWN_HOMES:
            self._homes.clear()
        self._homes[session_id] = node_id

    async def spawn(self, session: NewSession, blobs: dict[str, bytes]) -> Spawned:
        """Create a session on the next node, or find it. Raises `SessionConflict`."""
        if not self._single and time.monotonic() - self._learned > REFRESH_SECONDS:
            await self.learn()  # nodes may have joined
        self._turn += 1
        found = await asked(self, Spawned, None, "spawn", session, blobs, turn=self._turn)
        self.remember(session.session_id, found.node_id)
        return found

    async def homes(self, session_ids: list[str]) -> dict[str, tuple[str, int]]:
        """For each session the node to ask and to follow, as the store has it now, and the session's `seq`."""
        anyone = next(iter(self._handles))
        found = await asked(self, dict[str, tuple[str, int]], None, "read", "homes", [session_ids], {})
        if not self._single and any(node_id not in self._handles for node_id, _ in found.values()):
            await self.learn()
        homes = {}
        for session_id in session_ids:
            node_id, seq = found.get(session_id, (anyone, 0))
            # A passive session can still have a home that is gone: whoever gets its next input is its next home.
            homes[session_id] = (node_id if node_id in self._handles else next(iter(self._handles)), seq)
            self.remember(session_id, homes[session_id][0])
        return homes

    async def home(self, session_id: str) -> str:
        """The node that looks after the session, as far as is known: it may have moved, or the store be away."""
        if self._single:
            return next(iter(self._handles))
        known = self._homes.get(session_id)
        if known in self._handles:
            return known
        try:
            return (await self.homes([session_id]))[session_id][0]
        except StoreUnreachable:  # any node will do: it waits for the store, and who follows there compares again
            return next(iter(self._handles))

    async def _choose(self, session_id: str | None, attempt: int) -> str:
        """The session's home, and every other time another node."""
        nodes = list(self._handles)
        if session_id is None or len(nodes) == 1:
            return nodes[attempt % len(nodes)]
        home = await self.home(session_id)
        others = [node_id for node_id in nodes if node_id != home]
        return others[attempt // 2 % len(others)] if attempt % 2 else home

    async def request(self, session_id: str | None, method: str, *arguments: Any, turn: int = 0) -> Any:
        """A request (`Requests`) of a session's home, or of any node; repeated, elsewhere too, until it is answered.

        Args:
            turn: the node to begin with, where any will do.

        Raises:
            UnderstudyError: what the service raised.
            ClusterUnreachable: no service could be reached for `RETRY_SECONDS`.
        """
        node_id = ""

        async def choose(number: int) -> None:
            nonlocal node_id
            if number:
                self._homes.pop(session_id or "", None)
                await self.learn()
            node_id = await self._choose(session_id, turn + number)

        try:
            return await Repeating(CLIENT_PATIENCE).call(
                lambda call_id: self.call(node_id, "request", method, *arguments, call_id=call_id, timeout=None),
                choose=choose,
            )
        except ServiceGone as error:
            raise ClusterUnreachable(f"the services don't answer: {error.message}") from None

    async def call(
        self, node_id: str, method: str, *arguments: Any, call_id: str = "", timeout: float | None = REPEAT_SECONDS
    ) -> Any:  # fmt: skip
        """Call a method of a node's service, once: on its socket if it is on this machine, else through Ray.

        Args:
            call_id: of the call whose attempt this is, if it is repeated.

        Raises:
            UnderstudyError: what the service raised.
            ServiceGone: the service is dead, restarting or out of reach.
            TimeoutError: there is no answer.
        """
        handle = self._handle(node_id)
        if self._here is None:
            self._here = own_node()
        way = self._socket if node_id == self._here else through_ray(handle)
        async with asyncio.timeout(timeout):
            return await way(call_id, method, *arguments)

    def _handle(self, node_id: str) -> Any:
        handle = self._handles.get(node_id)
        if handle is None:  # also where it was one a moment ago
            raise ServiceGone(f"node {node_id[:8]} has no service any more")
        return handle

    async def _admit(self) -> Ticket:
        """A ticket of the service on this machine."""
        return await ticket(self._handle(self._here or ""), CLIENT, self._name)

    async def _otherwise(self, call_id: str, method: str, *arguments: Any) -> Any:
        return await through_ray(self._handle(self._here or ""))(call_id, method, *arguments)

    async def close(self) -> None:
        """End the connection to this machine's service."""
        await self._socket.close()
