"""One MCP server: started when it is needed, started again when it has died, ended when nobody needs it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Iterator
from importlib.metadata import version
from typing import Any, TypeVar
from urllib.parse import quote

from mcp import Client
from mcp.client.session import ClientRequestContext
from mcp.shared.exceptions import MCPError
from mcp_types import (
    CONNECTION_CLOSED,
    INVALID_REQUEST,
    REQUEST_TIMEOUT,
    ElicitRequestParams,
    ElicitResult,
    Implementation,
    ListRootsResult,
    Root,
)
from msgspec.structs import replace
from pydantic import FileUrl

from understudy.environment import for_tools
from understudy.errors import ToolError, UnderstudyError
from understudy.json_text import with_texts
from understudy.redaction import HIDDEN, SHORTEST, know, redacted
from understudy.tasks import Tasks
from understudy.tool_hosting import (
    ERROR,
    GET_PROMPT,
    LIST_RESOURCES,
    LOST,
    OK,
    READ_RESOURCE,
    TIMEOUT,
    ServerAnswer,
    ServerCall,
    ServerConfiguration,
    ServerTool,
)

from .eliciting import Ask, Eliciting
from .http import by_http
from .listing import bounded, prompt_of, resource_of, resources_of, text_of, tools_of
from .stdio import ServerProcess

log = logging.getLogger(__name__)

Result = TypeVar("Result")

START_SECONDS = 60.0
"""A server that is not ready by then is killed: some fetch themselves from a registry first."""

LIST_SECONDS = 30.0

CHECK_SECONDS = 5.0
"""A server that was at a call which timed out, or was cancelled, is asked for its tools; it is killed if it has not
answered by then."""

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 30.0
"""Seconds between two starts of a server; doubled with each start that did not lead to an answer."""

LONGEST_WAIT = 5.0
"""So many seconds somebody waits for the next start; whoever would have to wait longer is refused."""

END_SECONDS = 5.0
"""A connection that has not ended by then is cut off: a server by HTTP may hang when its session is ended."""

CLOSED, FORGOTTEN = "Connection closed", "Session terminated"
"""What the `mcp` package says itself of a connection that has ended, and of a session that a server does not know."""


class _Dead(Exception):
    """The server's process has ended, or can't be reached."""


class _Forgotten(Exception):
    """A server by HTTP does not know the session any more, and has done nothing of what it was asked for."""


class _Unlisted(Exception):
    """Why a connection gave no list; another one may."""


CLIENT = Implementation(name="understudy", version=version("understudy"))
"""How the client introduces itself to servers."""


class _NotConnected(Exception):
    """Why a connection could not be made."""


class Server:
    """A server and its process, or its connection.

    Attributes:
        used: when it was last needed (monotonic).
        in_flight: how many calls and lists it is at, or is started for.
    """

    def __init__(self, configuration: ServerConfiguration) -> None:
        self.configuration = configuration
        self.used = time.monotonic()
        self.in_flight = 0
        self._client: Client | None = None
        self._process: ServerProcess | None = None
        self._connection: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._connecting = asyncio.Lock()
        self._end = asyncio.Event()
        self._end.set()
        self._pause = FIRST_PAUSE
        self._not_before = 0.0
        self._problem = ""
        self._given: set[str] = set()
        self._eliciting = Eliciting()
        self._checking: asyncio.Task[None] | None = None
        self._tasks = Tasks(log)

    @property
    def pid(self) -> int:
        """Of its process; 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    async def tools(self) -> tuple[list[ServerTool], list[str]]:
        """What it offers now, and what of that was left out.

        Raises:
            ToolError: it can't be used; the text says why.
        """
        with self._at_work():
            await self._checked()
            again = self._client is not None and not self._end.is_set()
            while True:
                client = await self._connected()
                try:
                    return await self._listed(client)
                except _Unlisted as error:
                    self._drop(client)
                    if not again:
                        raise self._unusable(str(error)) from None
                    # It may have hung, or been dead, for long. A list has no effect: a new one is asked.
                    log.info("MCP server %s is started again: %s", self.configuration.name, error)
                    again = False

    async def _listed(self, client: Client) -> tuple[list[ServerTool], list[str]]:
        try:
            async with asyncio.timeout(LIST_SECONDS):
                found = await self._asked(tools_of(client))
        except TimeoutError:
            raise _Unlisted(f"it did not list its tools within {LIST_SECONDS:.0f} s") from None
        except _Dead:
            raise _Unlisted("it ended while it listed its tools") from None
        except _Forgotten:
            raise _Unlisted("it does not know its session any more") from None
        except Exception as error:
            raise self._unusable(f"it did not list its tools: {_message(error)}") from None
        self._pause = FIRST_PAUSE
        listed, left_out = found
        return [self._shown(tool) for tool in listed], left_out

    async def call(self, call: ServerCall, ask: Ask) -> ServerAnswer:
        """Have it do something, and say how that ended. Raises `CancelledError` when the caller cancels: the server is
        notified.

        Args:
            ask: asks a person what the server wants to know meanwhile.
        """
        with self._at_work():
            try:
                try:
                    return await self._called(await self._connected(), call, ask)
                except _Forgotten:
                    return await self._called(await self._connected(), call, ask)
            except (ToolError, _Forgotten) as error:
                return ServerAnswer(ERROR, f"{_message(error)} Nothing was executed.")

    async def _called(self, client: Client, call: ServerCall, ask: Ask) -> ServerAnswer:
        try:
            async with self._eliciting.at(call, ask):
                ok, text = await self._asked(_asked_for(client, call))
                text = self._without_secrets(text)
        except asyncio.CancelledError:
            self._begin_check()
            raise
        except TimeoutError:
            return self._timed_out(call)
        except _Forgotten:
            raise
        except _Dead:
            return ServerAnswer(
                LOST, f"the server {self.configuration.name} ended during the call. {self._last_words()}"
            )
        except MCPError as error:
            if error.code == REQUEST_TIMEOUT:
                return self._timed_out(call)
            return ServerAnswer(ERROR, self._without_secrets(bounded(error.message)))
        except Exception as error:  # its answer is none that the protocol has
            said = bounded(f"the call was made, and its answer can't be used: {_message(error)}")
            return ServerAnswer(ERROR, self._without_secrets(said))
        self._pause = FIRST_PAUSE
        return ServerAnswer(OK if ok else ERROR, text)

    async def close(self) -> None:
        """End its process, or its connection."""
        self._end.set()
        if self._ready is not None and not self._ready.done():  # whoever waited for it may be gone
            self._cut_off()
        await self._until_ended()
        self._tasks.cancel()

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            self.used = time.monotonic()

    def _timed_out(self, call: ServerCall) -> ServerAnswer:
        self._begin_check()
        return ServerAnswer(TIMEOUT, f"{call.tool} did not finish within {call.timeout:g} s and was given up.")

    def _begin_check(self) -> None:
        if self._checking is None or self._checking.done():
            self._checking = self._tasks.spawn(self._check())

    async def _checked(self) -> None:
        """Wait for a check that is under way: a server that hangs is killed by then."""
        if self._checking is not None:
            await asyncio.wait((self._checking,))

    async def _check(self) -> None:
        """Kill a server that does not answer any more."""
        client = self._client
        if client is None:
            return
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                await self._asked(client.list_tools(cache_mode="bypass"))
        except TimeoutError:
            log.warning("MCP server %s hangs: killed", self.configuration.name)
            self._drop(client)
        except Exception as error:
            log.info("MCP server %s: %s", self.configuration.name, _message(error))

    def _drop(self, client: Client) -> None:
        """End a connection that is of no use, unless there is another one meanwhile."""
        if self._client is client:
            self._kill()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
        self._end.set()

    async def _asked(self, question: Awaitable[Result]) -> Result:
        """An answer of the server. Raises `_Dead` if the connection ends first."""
        end = self._end
        asked = asyncio.ensure_future(question)
        ended = asyncio.ensure_future(end.wait())
        try:
            await asyncio.wait((asked, ended), return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise _Dead
            return asked.result()
        except MCPError as error:
            if (error.code, error.message) == (INVALID_REQUEST, FORGOTTEN):
                end.set()  # the next connection is a new session
                raise _Forgotten(f"the server {self.configuration.name} does not know its session any more.") from None
            # A server may have errors of its own with this code.
            closed = error.code == CONNECTION_CLOSED and (error.message == CLOSED or self.configuration.url)
            if closed or end.is_set():
                end.set()
                raise _Dead from None
            raise
        except OSError:
            raise _Dead from None
        finally:
            ended.cancel()
            if not asked.done():
                asked.cancel()
                await asyncio.wait((asked,), timeout=1.0)
            if asked.done() and not asked.cancelled():
                asked.exception()

    # Its process, or its connection.

    async def _connected(self) -> Client:
        """The connection to the server, which is started if there is none. Raises `ToolError` if it can't be used."""
        self.used = time.monotonic()
        await self._checked()
        async with self._connecting:
            while self._client is None or self._end.is_set():
                wait = self._not_before - time.monotonic()
                if wait > LONGEST_WAIT and self._end.is_set():
                    raise self._unusable(f"it is started again in {wait:.0f} s, since it {self._problem}")
                if self._connection is None or self._end.is_set():
                    await asyncio.sleep(max(0.0, wait))
                    await self._begin()
                await self._until_ready()
            return self._client

    async def _begin(self) -> None:
        """Begin to connect, once the connection before has ended."""
        await self._until_ended()
        self._not_before = time.monotonic() + self._pause
        self._pause = min(LONGEST_PAUSE, 2 * self._pause)
        self._end, self._ready = asyncio.Event(), asyncio.get_running_loop().create_future()
        self._connection = asyncio.get_running_loop().create_task(self._serve(self._ready, self._end))

    async def _until_ready(self) -> None:
        """Wait for the connection that somebody has begun. Raises `ToolError` if it is not made."""
        assert self._ready is not None
        try:
            async with asyncio.timeout(START_SECONDS):
                await asyncio.shield(self._ready)
        except TimeoutError:
            self._cut_off()
            problem = f"was not ready within {START_SECONDS:.0f} s"
        except Exception as error:
            problem = f"could not be started: {_message(error)}"
        else:
            return
        await self._until_ended()
        self._problem = problem
        raise self._unusable(f"it {problem}")

    async def _until_ended(self) -> None:
        """Wait for the end of the connection, and cut it off if that takes too long."""
        connection = self._connection
        # Again and again: what a connection does at its end starts over with a cancellation.
        while connection is not None and not (await asyncio.wait((connection,), timeout=END_SECONDS))[0]:
            self._cut_off()

    def _cut_off(self) -> None:
        """End the connection without a word to the server."""
        self._kill()
        if self._connection is not None:
            self._connection.cancel()

    async def _serve(self, ready: asyncio.Future[None], end: asyncio.Event) -> None:
        """Hold the connection, from its beginning to its end: both have to be in one task."""
        try:
            async with Client(
                self._transport(end), mode="auto", cache=None, client_info=CLIENT,
                list_roots_callback=self._roots if self.configuration.workspace else None,
                elicitation_callback=self._elicit,
            ) as client:  # fmt: skip
                client.session.validate_tool_result = _unchecked  # type: ignore[method-assign,assignment]
                self._client = client
                if not ready.done():
                    ready.set_result(None)
                await end.wait()
                self._client = None
        except BaseException as error:
            if not ready.done():
                ready.set_exception(_NotConnected(_message(error)))
                ready.exception()
            if isinstance(error, asyncio.CancelledError):
                raise
            log.info("MCP server %s: the connection ended: %s", self.configuration.name, _message(error))
        finally:
            self._client = None
            self._problem = "ended"
            end.set()

    def _transport(self, end: asyncio.Event) -> Any:
        configuration = self.configuration
        named = [*configuration.environment, *configuration.headers.values()]
        environment = for_tools(os.environ, named)
        self._given = {environment[name] for name in named}
        know(*self._given)
        if configuration.url:
            headers = {header: environment[name] for header, name in configuration.headers.items()}
            return by_http(configuration.url, headers)
        self._process = ServerProcess(
            configuration.name, configuration.command, environment, configuration.workspace or None, end.set
        )
        return self._process

    async def _roots(self, context: ClientRequestContext) -> ListRootsResult:
        workspace = self.configuration.workspace
        root = Root(uri=FileUrl(f"file://{quote(workspace)}"), name=os.path.basename(workspace))
        return ListRootsResult(roots=[root])

    async def _elicit(self, context: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult:
        return await self._eliciting.answer(params, self._without_secrets)

    def _unusable(self, why: str) -> ToolError:
        said = f"the MCP server {self.configuration.name} can't be used: {why}. {self._last_words()}"
        return ToolError(redacted(said.strip()))

    def _shown(self, tool: ServerTool) -> ServerTool:
        """A tool as it may be committed and sent to a model."""
        described = self._without_secrets(tool.description)
        return replace(tool, description=described, parameters=with_texts(tool.parameters, self._without_secrets))

    def _without_secrets(self, text: str) -> str:
        """A text of the server's without the values that it was given, which are nobody else's."""
        for value in self._given:
            text = text.replace(value, HIDDEN) if len(value) >= SHORTEST else text
        return text

    def _last_words(self) -> str:
        words = self._process.errors.tail() if self._process is not None else ""
        return f"It wrote last: {words[-500:]}" if words else ""


async def _unchecked(_tool: str, _result: Any) -> None:
    """A result is not compared with the output schema that its server has for it: nothing here relies on that, and a
    hostile schema could keep this process, and so all servers of the node, busy for ever."""


async def _asked_for(client: Client, call: ServerCall) -> tuple[bool, str]:
    """Whether it went well, and the text."""
    given: dict[str, Any] = call.arguments or {}
    if call.does == LIST_RESOURCES:
        return True, await resources_of(client)
    if call.does == READ_RESOURCE:
        return True, await resource_of(client, str(given["uri"]))
    if call.does == GET_PROMPT:
        wanted = {name: str(value) for name, value in (given.get("arguments") or {}).items()}
        return True, await prompt_of(client, str(given["name"]), wanted)
    result = await client.call_tool(call.tool, given)
    return not result.is_error, text_of(result)


def _message(error: BaseException) -> str:
    """What an error says; of a group, what the first one in it says."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, _NotConnected):
        return str(error)
    if isinstance(error, UnderstudyError):
        return error.message
    with contextlib.suppress(Exception):
        text = str(error)
        return f"{type(error).__name__}: {text}" if text else type(error).__name__
    return type(error).__name__
