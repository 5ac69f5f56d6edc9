"""A server as a process of its own, spoken to by its standard input and output. It can't outlive this one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from subprocess import PIPE
from typing import Any

import anyio
from mcp.shared.message import SessionMessage
from mcp_types import INVALID_REQUEST, ErrorData, JSONRPCError, jsonrpc_message_adapter

from understudy.child_process import ChildProcess
from understudy.redaction import redacted
from understudy.tool_hosting import program_of, search_path

from .limits import LONGEST_MESSAGE

log = logging.getLogger(__name__)

CLOSE_SECONDS = 1.0
"""So long a server may take to end once its input has ended, and again after SIGTERM."""

KEPT_ERRORS = 4_000
"""Characters of what a server last wrote to its standard error, for whoever asks why it ended."""

LINES_A_MINUTE = 100
"""So many lines of a server's standard error are logged in a minute, each with its first `LONGEST_LINE` characters."""

LONGEST_LINE = 500

# The watcher in the server's group waits on a pipe whose other end only this process holds: however that dies, the pipe
# ends, and the group is killed (see `understudy.actors.shell`).
_GUARDED = """
(trap '' TERM; read -r _ </dev/fd/$0; kill -KILL 0) </dev/null >/dev/null 2>&1 &
exec "$@"
"""

_ID = re.compile(rb'"id"\s*:\s*(\d+)')


class Errors:
    """The standard error of a server: logged, without secrets and within bounds; its end is kept."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._tail = ""
        self._logged, self._since = 0, 0.0

    async def read(self, stream: asyncio.StreamReader) -> None:
        """Read until it ends."""
        rest = b""
        while chunk := await stream.read(65_536):
            *lines, rest = (rest + chunk).split(b"\n")
            rest = rest[-KEPT_ERRORS:]
            for line in lines:
                self.add(line.decode(errors="replace"))
        self.add(rest.decode(errors="replace"))

    def tail(self) -> str:
        """The end of what it has written."""
        return redacted(self._tail).strip()

    def add(self, line: str) -> None:
        """One more line that its users may want to see."""
        if not line.strip():
            return
        self._tail = f"{self._tail}{line}\n"[-KEPT_ERRORS:]
        now = time.monotonic()
        if now - self._since > 60.0:
            self._logged, self._since = 0, now
        self._logged += 1
        if self._logged <= LINES_A_MINUTE:
            log.info("MCP server %s: %s", self._server, redacted(line)[:LONGEST_LINE])


class ServerProcess:
    """A transport of the `mcp` package: it starts the process, and ends it and all of its group.

    Args:
        ended: called once the process has closed its output, or can't be spoken to.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], directory: str | None,
        ended: Callable[[], None],
    ) -> None:  # fmt: skip
        self.errors = Errors(name)
        self._name = name
        self._command = list(command)
        self._environment = dict(environment)
        self._directory = directory
        self._ended = ended
        self._stack = contextlib.AsyncExitStack()
        self._process: ChildProcess | None = None

    @property
    def pid(self) -> int:
        """Of the process; 0 before it was started."""
        return self._process.pid if self._process is not None else 0

    async def __aenter__(self) -> Any:
        return await self._stack.enter_async_context(self._streams())

    async def __aexit__(self, *_error: object) -> None:
        await self._stack.aclose()

    def kill(self) -> None:
        """End it at once; whoever waits for it hears that it has ended."""
        if self._process is not None:
            self._process.signal_group(signal.SIGKILL)

    @contextlib.asynccontextmanager
    async def _streams(self) -> AsyncIterator[Any]:
        guard_read, guard_write = os.pipe()
        try:
            process = self._start(guard_read)
        except BaseException:
            os.close(guard_write)
            raise
        finally:
            os.close(guard_read)
        incoming, received = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        sending, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
        assert process.stderr is not None
        reading = asyncio.ensure_future(self._read(process, incoming))
        writing = asyncio.ensure_future(self._write(process, outgoing))
        errors = asyncio.ensure_future(self.errors.read(process.stderr))
        watching = asyncio.ensure_future(self._watch(process, reading))
        try:
            yield received, sending
        finally:
            try:
                await self._end(process)
            finally:
                self.kill()
                os.close(guard_write)
                for task in (reading, writing, errors, watching):
                    task.cancel()
                await asyncio.gather(reading, writing, errors, watching, return_exceptions=True)
                for stream in (incoming, received, sending, outgoing):
                    stream.close()
                process.close()  # a child of the server may keep pipes open

    def _start(self, guard: int) -> ChildProcess:
        """Start the process. Raises `OSError` if it can't be."""
        path = self._environment.get("PATH")
        program = program_of(self._command, path)
        if program is None:
            raise FileNotFoundError(f"there is no program {self._command[0]!r} on this node")
        # A workspace that this node does not have is an error of this, which names it.
        self._process = ChildProcess(
            ("/bin/sh", "-c", _GUARDED, str(guard), program, *self._command[1:]), stdin=PIPE, stdout=PIPE, stderr=PIPE,
            environment={**self._environment, "PATH": search_path(path)}, directory=self._directory, passed=(guard,),
            own_session=True, ends_group=True, line_limit=LONGEST_MESSAGE,
        )  # fmt: skip
        return self._process

    async def _read(self, process: ChildProcess, incoming: Any) -> None:
        assert process.stdout is not None
        try:
            async with incoming:
                while line := await self._line(process.stdout):
                    if isinstance(line, bytes):
                        if not line.strip():
                            continue
                        try:
                            message: Any = SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
                        except ValueError:
                            said = line[:LONGEST_LINE].decode(errors="replace")
                            self.errors.add(f"no message on its standard output: {said}")
                            await asyncio.sleep(0)  # a flood of these is in the reader: others have their turn
                            continue
                    else:
                        message = SessionMessage(line)
                    await incoming.send(message)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # nobody listens any more
        finally:
            self._ended()

    async def _watch(self, process: ChildProcess, reading: asyncio.Future[None]) -> None:
        """Notice that it has died, even if another process has its output: of what it wrote, all is read first."""
        await process.wait()
        await asyncio.wait({reading}, timeout=CLOSE_SECONDS)
        self._ended()

    async def _line(self, stream: asyncio.StreamReader) -> bytes | JSONRPCError:
        """The next line; empty at the end. Of one that is too long an error stands in the place."""
        try:
            return await stream.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:
            return error.partial + b"\n" if error.partial else b""
        except asyncio.LimitOverrunError as error:
            return await self._skipped(stream, error.consumed)

    async def _skipped(self, stream: asyncio.StreamReader, consumed: int) -> bytes | JSONRPCError:
        """Pass over the rest of a line."""
        beginning = (await stream.readexactly(consumed))[:1_000]
        while True:
            try:
                await stream.readuntil(b"\n")
                break
            except asyncio.IncompleteReadError:
                break
            except asyncio.LimitOverrunError as error:
                await stream.readexactly(error.consumed)
        log.warning("MCP server %s wrote a message of more than %d bytes: left out", self._name, LONGEST_MESSAGE)
        found = _ID.search(beginning)
        if found is None:
            return b" \n"
        said = ErrorData(code=INVALID_REQUEST, message=f"the answer was longer than {LONGEST_MESSAGE} bytes")
        return JSONRPCError(jsonrpc="2.0", id=int(found[1]), error=said)

    async def _write(self, process: ChildProcess, outgoing: Any) -> None:
        assert process.stdin is not None
        try:
            async with outgoing:
                async for one in outgoing:
                    text = one.message.model_dump_json(by_alias=True, exclude_unset=True)
                    await process.stdin.write(text.encode() + b"\n")
        except (OSError, anyio.ClosedResourceError):
            self._ended()

    async def _end(self, process: ChildProcess) -> None:
        """Have it end: by the end of its input, then by SIGTERM, then by SIGKILL."""
        assert process.stdin is not None
        process.stdin.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            if await _has_ended(process):
                return
            process.signal_group(number)
        await _has_ended(process)


async def _has_ended(process: ChildProcess) -> bool:
    """Whether it ends within `CLOSE_SECONDS`."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), CLOSE_SECONDS)
    return process.returncode is not None
