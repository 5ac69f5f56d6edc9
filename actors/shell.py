"""The `bash` tool: one command in a process group of its own that can't outlive its call, nor the frame."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass

from understudy.errors import ToolError

from .tools import ToolContext, tool
from .workspace import Workspace

MAX_TIMEOUT = 600
"""Seconds that one command may take at most."""

KEPT_BYTES = 20_000
"""How much is kept of a command's output: this much of its beginning and as much of its end."""

TERMINATE_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL for a command past its timeout."""

CANCEL_GRACE = 1.0
"""The same for a cancelled call: shorter than what `execution` waits before it calls a tool stuck."""

KILL_GRACE = 0.5
"""Seconds that a killed command has to be gone: so that nothing of it outlives its call, unless it can't be killed."""

DRAIN_SECONDS = 0.5
"""How long output is still read once the command's group is dead; only a process that left the group keeps it open."""

# The watcher in the command's group waits on a pipe whose other end only the frame holds. However the frame dies, the
# pipe ends and the watcher kills the group. PR_SET_PDEATHSIG would reach the shell alone and not its children, and
# needs Python code between fork and exec, which can deadlock in a process with threads.
# SIGTERM is for the command: the watcher must outlast it, and the shell stay to wait for the command.
GUARDED = """
exec 3<&0 </dev/null
(trap '' TERM; read -r _ <&3; kill -KILL 0) >/dev/null 2>&1 &
watcher=$!
trap : TERM
"$@" 3<&-
code=$?
exec >/dev/null 2>&1
kill -KILL $watcher
wait $watcher
exit $code
"""


@dataclass(frozen=True)
class ShellCommand:
    """What a command line is executed as, in the workspace.

    Attributes:
        arguments: program and arguments, below a guard: standard input must be a pipe, and whoever has its other end
            keeps the command alive.
    """

    arguments: tuple[str, ...]
    directory: str
    environment: dict[str, str]


def shell_command(command: str, context: ToolContext) -> ShellCommand:
    """How a command line is executed: the only place that says so. Raises `ToolError`: it can't be."""
    if "\0" in command:
        raise ToolError("a command can't contain NUL")
    traced = {"TRACEPARENT": context.traceparent} if context.traceparent else {}
    return ShellCommand(
        ("/bin/sh", "-c", GUARDED, "sh", "bash", "-c", command),
        str(Workspace(context.workspace).root),
        {**os.environ, **traced},
    )


@tool(on_crash="report", timeout=MAX_TIMEOUT + 30)
async def bash(command: str, context: ToolContext, timeout: int = 120) -> str:
    """Run a command with bash in the workspace and return its output (stdout and stderr together) and exit code.

    There is no input to read from. Background processes end with the command. Long output is cut in its middle.

    Args:
        command: The command line or script.
        timeout: Seconds after which the command is killed, at most 600.
    """
    wanted = shell_command(command, context)
    guard_read, guard_write = os.pipe()
    output_read, output_write = os.pipe()
    output = _Output()
    transport: asyncio.BaseTransport | None = None
    try:
        try:
            stream = os.fdopen(output_read, "rb", buffering=0)
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: output, stream)
            process = await asyncio.create_subprocess_exec(
                *wanted.arguments,
                stdin=guard_read,
                stdout=output_write,
                stderr=output_write,
                cwd=wanted.directory,
                env=wanted.environment,
                start_new_session=True,
            )
        finally:
            os.close(guard_read)
            os.close(output_write)
        ending = await _finish(process, min(max(timeout, 1), MAX_TIMEOUT))
        await asyncio.wait({output.closed}, timeout=DRAIN_SECONDS)
    finally:
        os.close(guard_write)
        if transport is not None:
            transport.close()
    return f"{output.text()}\n{ending}".lstrip("\n")


async def _finish(process: asyncio.subprocess.Process, limit: int) -> str:
    """Wait for the command, kill what is left of its group, and say how it ended."""
    try:
        await asyncio.wait_for(process.wait(), limit)
    except TimeoutError:
        await _terminate(process, TERMINATE_GRACE)
        return f"[timed out after {limit} s: the command and what it started were killed]"
    except asyncio.CancelledError:
        await _terminate(process, CANCEL_GRACE)
        raise
    finally:
        _signal(process, signal.SIGKILL)
    code = process.returncode or 0
    return f"[exit code {code}]" if code >= 0 else f"[killed by {signal.Signals(-code).name}]"


async def _terminate(process: asyncio.subprocess.Process, grace: float) -> None:
    _signal(process, signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), grace)
    except TimeoutError:
        _signal(process, signal.SIGKILL)  # what ignores SIGTERM
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), KILL_GRACE)


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        pass  # nothing is left of the group


class _Output(asyncio.Protocol):
    """The beginning and the end of a stream of any length, in bounded memory."""

    def __init__(self) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0

    def data_received(self, data: bytes) -> None:
        self._total += len(data)
        space = KEPT_BYTES - len(self._head)
        self._head += data[:space]
        self._tail += data[space:]
        if len(self._tail) > 2 * KEPT_BYTES:
            del self._tail[:-KEPT_BYTES]

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    def text(self) -> str:
        tail = self._tail[-KEPT_BYTES:]
        left_out = self._total - len(self._head) - len(tail)
        if not left_out:
            return (self._head + tail).decode(errors="replace")
        note = f"\n[… {left_out} bytes are left out …]\n"
        return self._head.decode(errors="replace") + note + tail.decode(errors="replace")
