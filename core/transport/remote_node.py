"""The node service as a frame reaches it, from another process. No Ray."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NoReturn, Protocol

from ..commands import CommandOutput, StartCommand
from ..errors import ServiceGone, UnderstudyError
from ..ports import Node
from ..protocol import Exit, Judged, StepCall, Work, packed
from ..reads import Note
from ..records import Ack, ActivationId, Batch
from ..tool_hosting import ServerAnswer, ServerCall, ServerTools
from ..tool_tasks import TaskNews, ToolTask
from .channel import Channel, Ticket
from .repeating import FRAME_PATIENCE, Repeating
from .signatures import signature_of

log = logging.getLogger(__name__)

ADMIT_SECONDS = 5.0
"""How long a ticket is waited for: what a service is asked that is killed can get lost."""

CONNECT_TRIES = 3
TRY_AGAIN_SECONDS = 60.0


class Attempt(Protocol):
    """Makes one attempt of a call. Raises `ServiceGone` when the service can't be reached."""

    def __call__(self, call_id: str, method: str, *arguments: Any) -> Awaitable[Any]: ...


class CalledNode(ABC):
    """A `understudy.ports.Node` in another process: what is sent of a call, and the result from what arrives."""

    @abstractmethod
    async def _send(self, method: str, arguments: Sequence[Any]) -> Any:
        """Have a call made; what arrives of its result."""

    async def step(self, call: StepCall) -> Work | Exit:
        """See `Node.step`."""
        return await self._call(Node.step, call)  # type: ignore[no-any-return]

    async def commit(self, frame_id: str, batch: Batch) -> Ack:
        """See `Node.commit`."""
        return await self._call(Node.commit, frame_id, batch)  # type: ignore[no-any-return]

    async def reload(self, frame_id: str, activation: ActivationId) -> Work:
        """See `Node.reload`."""
        return await self._call(Node.reload, frame_id, activation)  # type: ignore[no-any-return]

    async def interrupted(self, frame_id: str, activation: ActivationId, run_id: str, round_number: int) -> str:
        """See `Node.interrupted`."""
        return await self._call(  # type: ignore[no-any-return]
            Node.interrupted, frame_id, activation, run_id, round_number
        )

    async def judge(self, frame_id: str, verdict: Judged) -> None:
        """See `Node.judge`."""
        await self._call(Node.judge, frame_id, verdict)

    async def specification(self, frame_id: str, activation: ActivationId) -> dict[str, Any]:
        """See `Node.specification`."""
        return await self._call(Node.specification, frame_id, activation)  # type: ignore[no-any-return]

    async def memory(self, frame_id: str, activation: ActivationId) -> list[Note]:
        """See `Node.memory`."""
        return await self._call(Node.memory, frame_id, activation)  # type: ignore[no-any-return]

    async def blob(self, digest: str) -> bytes:
        """See `Node.blob`."""
        return await self._call(Node.blob, digest)  # type: ignore[no-any-return]

    async def task_service(self, frame_id: str) -> str:
        """See `Node.task_service`."""
        return await self._call(Node.task_service, frame_id)  # type: ignore[no-any-return]

    async def task(
        self, frame_id: str, activation: ActivationId, task: ToolTask, service: str, after: int | None
    ) -> TaskNews | None:
        """See `Node.task`."""
        return await self._call(  # type: ignore[no-any-return]
            Node.task, frame_id, activation, task, service, after
        )

    async def end_task(self, frame_id: str, activation: ActivationId, call_id: str) -> None:
        """See `Node.end_task`."""
        await self._call(Node.end_task, frame_id, activation, call_id)

    async def start_command(self, frame_id: str, activation: ActivationId, wanted: StartCommand) -> str:
        """See `Node.start_command`."""
        return await self._call(Node.start_command, frame_id, activation, wanted)  # type: ignore[no-any-return]

    async def read_command(
        self, frame_id: str, activation: ActivationId, job: str, after: int | None, wait: float
    ) -> CommandOutput:
        """See `Node.read_command`."""
        return await self._call(  # type: ignore[no-any-return]
            Node.read_command, frame_id, activation, job, after, wait
        )

    async def server_tools(self, frame_id: str, activation: ActivationId, server: str) -> ServerTools:
        """See `Node.server_tools`."""
        return await self._call(Node.server_tools, frame_id, activation, server)  # type: ignore[no-any-return]

    async def tool_host(self, frame_id: str, activation: ActivationId) -> str:
        """See `Node.tool_host`."""
        return await self._call(Node.tool_host, frame_id, activation)  # type: ignore[no-any-return]

    async def call_server(self, frame_id: str, activation: ActivationId, call: ServerCall) -> ServerAnswer:
        """See `Node.call_server`."""
        return await self._call(Node.call_server, frame_id, activation, call)  # type: ignore[no-any-return]

    async def cancel_server_call(self, frame_id: str, activation: ActivationId, key: str, attempt: int) -> None:
        """See `Node.cancel_server_call`."""
        await self._call(Node.cancel_server_call, frame_id, activation, key, attempt)

    async def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        found = await self._send(method.__name__, packed(arguments))
        return signature_of(method).result(found)


class RemoteNode(CalledNode):
    """One whose calls are repeated until they are answered.

    Args:
        attempt: how the service is reached.
    """

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._repeating = Repeating(FRAME_PATIENCE)

    async def _send(self, method: str, arguments: Sequence[Any]) -> Any:
        try:
            return await self._repeating.call(lambda call_id: self._attempt(call_id, method, *arguments))
        except ServiceGone as error:
            log.warning("the node service is gone for good: %s", error)
            return await self._leave()

    async def _leave(self) -> NoReturn:
        """End this process: nobody will ever give it work."""
        os._exit(1)


class SocketCalls:
    """Calls of a service of this machine, on its socket; a connection that was lost is made again.

    Where no connection can be made the call takes the other way; so do all for a while, if that happens `CONNECT_TRIES`
    times in a row: another container or user can be on the same machine and not reach the socket.

    Args:
        admit: asks the service for a ticket, on the other way. Raises `ServiceGone`, or what keeps it from having a
            socket.
        otherwise: the other way.
        service: what it is called in logs.
    """

    def __init__(
        self, admit: Callable[[], Awaitable[Ticket]], otherwise: Attempt, service: str = "the node service"
    ) -> None:  # fmt: skip
        self._admit = admit
        self._otherwise = otherwise
        self._service = service
        self._channel: Channel | None = None
        self._connecting = asyncio.Lock()
        self._failed, self._failed_at = 0, 0.0
        self._closed = False

    async def __call__(self, call_id: str, method: str, *arguments: Any) -> Any:
        """One attempt of a call. Raises what `Channel.call` raises."""
        channel = await self._connected()
        if channel is None:
            return await self._otherwise(call_id, method, *arguments)
        return await channel.call(call_id, method, *arguments)

    async def _connected(self) -> Channel | None:
        if self._failed >= CONNECT_TRIES and time.monotonic() - self._failed_at < TRY_AGAIN_SECONDS:
            return None
        async with self._connecting:
            if self._closed:
                raise ServiceGone("this connection was closed")
            if self._channel is None or self._channel.lost:
                self._channel = await self._connect()
            return self._channel

    async def _connect(self) -> Channel | None:
        try:
            # A service that gives no answer is not gone: the time-out goes to whoever repeats the call.
            async with asyncio.timeout(ADMIT_SECONDS):
                ticket = await self._admit()
        except ServiceGone:
            raise
        except UnderstudyError as error:  # it can't make a socket
            self._failing(error)
            return None
        try:
            channel = await Channel.connect(ticket)
        except ServiceGone as error:
            self._failing(error)
            return None
        self._failed = 0
        return channel

    def _failing(self, error: UnderstudyError) -> None:
        self._failed, self._failed_at = self._failed + 1, time.monotonic()
        level = logging.WARNING if self._failed == CONNECT_TRIES else logging.INFO
        log.log(level, "%s is called through Ray, more slowly: %s", self._service, error.message)

    async def close(self) -> None:
        """End the connection, if there is one, for good."""
        async with self._connecting:
            self._closed = True
            if self._channel is not None:
                await self._channel.close()
