"""What a tool host's process answers to its node service: MCP servers, and calls of them that outlast a frame and the
service. No Ray.

The process itself is Ray's actor (`understudy.cluster.ray.services.ToolHostActor`), a simulated one, or a part of the
user's (`understudy.cluster.local`).
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from understudy.errors import ServiceGone, ToolError
from understudy.tasks import Tasks
from understudy.tool_hosting import (
    ASKS,
    ERROR,
    LOST,
    UNKNOWN,
    Elicitation,
    ElicitationAnswer,
    HostAttached,
    ServerAnswer,
    ServerCall,
    ServerConfiguration,
    ServerTool,
    ServerTools,
)
from understudy.transport.one_service import OneService
from understudy.waiting import ticks

from .held_call import HeldCall
from .limits import AWAITED_SECONDS, KEPT_ANSWERS, KEPT_CALLS, KEPT_SECONDS, MOST_SERVERS

if TYPE_CHECKING:
    from .server import Server

log = logging.getLogger(__name__)

IDLE_SECONDS = 600.0
"""A server that nobody has needed for so long is ended; whoever needs it again starts it again."""

LOOK_SECONDS = 10.0

MISSING = (
    "MCP servers need the package `mcp`, which is not installed on this node: pip install 'understudy[mcp]' there, or "
    "in a checkout `make install EXTRAS=mcp`."
)


Ask = Callable[[Elicitation], Awaitable[ElicitationAnswer]]
"""Asks a person during a call."""


class McpServerProcess(Protocol):
    """A server, as `HostedServers` uses it (`server.Server`)."""

    used: float
    in_flight: int

    async def tools(self) -> tuple[list[ServerTool], list[str]]: ...
    async def call(self, call: ServerCall, ask: Ask) -> ServerAnswer: ...
    async def close(self) -> None: ...


Make = Callable[[ServerConfiguration], Awaitable[McpServerProcess]]
"""Makes a server, which is not started yet. Raises `ToolError` if none can be."""


async def make_server(configuration: ServerConfiguration) -> Server:
    """A server.

    Raises:
        ToolError: the package that is needed for it is not installed.
    """
    try:  # in a thread: to load the package takes seconds
        module = await asyncio.to_thread(importlib.import_module, "understudy.tool_host.server")
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("mcp", "mcp_types", "anyio"):
            raise
        raise ToolError(MISSING) from None
    made: Server = module.Server(configuration)
    return made


class HostedServers:
    """A `understudy.ports.ToolHost`: it makes each call once, and keeps its answer until that is committed.

    Args:
        make: makes a server.
    """

    def __init__(self, make: Make = make_server) -> None:
        self._make = make
        self._service = OneService("the tool host")
        self._servers: dict[str, McpServerProcess] = {}
        self._calls: dict[str, HeldCall] = {}
        self._tasks = Tasks(log)

    @property
    def held(self) -> int:
        """How many calls are under way, or have an answer that nobody has released."""
        return len(self._calls)

    @property
    def servers(self) -> list[McpServerProcess]:
        """Those that were asked for."""
        return list(self._servers.values())

    async def attach(self, service: str) -> HostAttached:
        """See `ToolHost.attach`."""
        self._service.attach(service)
        self._tasks.alone("look", self._look)
        calls = [key for key, held in self._calls.items() if not held.answer.done()]
        return HostAttached(self._service.identity, self._service.number, os.getpid(), calls)

    async def tools(self, number: str, server: ServerConfiguration) -> ServerTools:
        """See `ToolHost.tools`."""
        self._service.require(number)
        try:
            found, left_out = await (await self._server(server)).tools()
        except ToolError as error:
            return ServerTools(self._service.identity, error=error.message)
        return ServerTools(self._service.identity, found, left_out=left_out)

    async def call(self, number: str, key: str, server: ServerConfiguration, call: ServerCall) -> ServerAnswer:
        """See `ToolHost.call`."""
        self._service.require(number)
        held = self._calls.get(key)
        if held is None:
            if call.arguments is None:
                return ServerAnswer(UNKNOWN)
            if call.host != self._service.identity:
                return ServerAnswer(LOST, "the process that was to make the call has ended")
            held = self._calls[key] = HeldCall()
            held.task = self._tasks.spawn(self._answer(held, server, call))
        if call.said is not None:
            held.pass_on(call.said)
        while held.question is None and not held.answer.done():
            await held.changed()
        # First the questions, also of a call that has ended: another call of the session may have asked them.
        if held.question is not None:
            return ServerAnswer(ASKS, asks=held.question)
        if held.answer.cancelled():
            raise ServiceGone("the call was released")
        return held.answer.result()

    async def cancel(self, number: str, key: str) -> None:
        """See `ToolHost.cancel`."""
        self._service.require(number)
        held = self._calls.get(key)
        if held is not None and held.task is not None and not held.answer.done():
            held.answer.set_result(ServerAnswer(ERROR, "the call was cancelled"))
            held.ended = time.monotonic()
            held.give_up()
            held.task.cancel()

    async def release(self, number: str, keys: list[str]) -> None:
        """See `ToolHost.release`."""
        self._service.require(number)
        for key in keys:
            self._forget(key)

    async def heard(self, number: str) -> None:
        """See `ToolHost.heard`."""
        self._service.require(number)

    async def abandoned(self, seconds: float) -> None:
        """Return when no node service has been heard of for so long; while there are calls, for as long as they are
        kept. The next service attaches only once a session needs a server, and a person may be asked meanwhile."""

        def patience() -> float:
            kept = (KEPT_SECONDS if held.answer.done() else AWAITED_SECONDS for held in self._calls.values())
            return max(kept, default=seconds)

        await self._service.abandoned(patience, seconds / 60)

    async def close(self) -> None:
        """End all calls and all servers."""
        tasks = list(self._tasks)
        self._tasks.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for key in list(self._calls):
            self._forget(key)
        servers, self._servers = list(self._servers.values()), {}
        await asyncio.gather(*(server.close() for server in servers))

    async def _server(self, configuration: ServerConfiguration) -> McpServerProcess:
        while configuration.instance not in self._servers:
            if len(self._servers) >= MOST_SERVERS:
                await self._end_unused()
                continue
            made = await self._make(configuration)
            self._servers.setdefault(configuration.instance, made)  # another caller may have been faster
        server = self._servers[configuration.instance]
        server.used = time.monotonic()
        return server

    async def _end_unused(self) -> None:
        """End the server that nobody has needed for longest. Raises `ToolError` if all of them are at calls."""
        unused = [(server.used, instance) for instance, server in self._servers.items() if not server.in_flight]
        if not unused:
            raise ToolError(f"{MOST_SERVERS} MCP servers are at calls on this node, and there may be no more")
        log.info("an MCP server is ended, as there may be no more than %s", MOST_SERVERS)
        await self._servers.pop(min(unused)[1]).close()

    async def _answer(self, held: HeldCall, configuration: ServerConfiguration, call: ServerCall) -> None:
        """Make a call. It has an answer in the end, whatever happens."""
        try:
            answer = await (await self._server(configuration)).call(call, held.ask)
        except ToolError as error:
            answer = ServerAnswer(ERROR, error.message)
        except asyncio.CancelledError:
            if not held.answer.done():
                held.answer.cancel()
            raise
        except Exception as error:
            log.exception("a call of MCP server %s failed", configuration.name)
            answer = ServerAnswer(LOST, f"{type(error).__name__}: {error}")
        if not held.answer.done():
            held.answer.set_result(answer)
        held.ended = time.monotonic()
        self._make_room()

    def _make_room(self) -> None:
        """Forget the oldest answers where too much is kept, but not that the calls were made: one whose answer was not
        heard may come again."""
        ended = sorted((held.ended, key) for key, held in self._calls.items() if held.answer.done())
        size = sum(self._calls[key].size for _, key in ended)
        for at, key in ended:
            if size <= KEPT_ANSWERS and at > time.monotonic() - KEPT_SECONDS:
                break
            size -= self._calls[key].size
            self._calls[key].drop_answer()
        for _, key in ended[: max(0, len(ended) - KEPT_CALLS)]:
            self._forget(key)

    def _forget(self, key: str) -> None:
        held = self._calls.pop(key, None)
        if held is not None:
            held.give_up()
        if held is not None and held.task is not None and not held.answer.done():
            held.task.cancel()
            held.answer.cancel()

    async def _look(self) -> None:
        """End servers that nobody has needed for long, and forget old answers."""
        async for _ in ticks(LOOK_SECONDS):
            self._make_room()
            for instance, server in list(self._servers.items()):
                if not server.in_flight and time.monotonic() - server.used > IDLE_SECONDS:
                    del self._servers[instance]
                    log.info("an MCP server is ended: nobody has needed it for %.0f s", IDLE_SECONDS)
                    await server.close()
