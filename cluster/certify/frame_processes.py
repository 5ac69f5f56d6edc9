"""Frames as processes of their own, for `understudy certify`: started ahead, spoken to through a socket, killed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

from understudy.child_process import ChildProcess
from understudy.errors import ClusterError

from .watched_frame import LINE_LIMIT, START, line_of

START_SECONDS = 60.0
LOG_TAIL = 2_000


class FrameProcess:
    """One frame's process, as its node service sees it."""

    def __init__(
        self, frame_id: str, process: ChildProcess, reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:  # fmt: skip
        self.frame_id = frame_id
        self._process = process
        self._reader, self._writer = reader, writer

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, node_id: str) -> None:
        """Let it take work."""
        self.say({"frame_id": self.frame_id, "node_id": node_id})

    def say(self, message: dict[str, Any]) -> None:
        """Send a message; a dead process hears nothing."""
        if self._process.returncode is None and not self._writer.is_closing():
            self._writer.write(line_of(message))

    async def messages(self) -> AsyncIterator[dict[str, Any]]:
        """What it says, until it is dead; the last line may be half of one."""
        with contextlib.suppress(ConnectionError):
            while (line := await self._reader.readline()).endswith(b"\n"):
                yield json.loads(line)

    async def ready(self) -> bool:
        """Wait until it has imported what frames need; False if it died of it."""
        async for _ in self.messages():
            return True
        return False

    async def kill(self) -> None:
        """SIGKILL, also of what its tools started in its process group."""
        self._process.signal_group(signal.SIGKILL)
        await self._process.wait()

    async def bury(self) -> None:
        """End it, if it is not dead yet, and give its socket back."""
        await self.kill()
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class FrameProcesses:
    """Starts frames' processes, each one ahead of its use.

    Args:
        directory: of the agent's file: where its tools are imported from.
        environment: of the processes.
        log: file that takes what the processes and their tools print.
    """

    def __init__(self, directory: Path, environment: dict[str, str], log: Path) -> None:
        self._directory = directory
        self._environment = environment
        self._log = log
        self._numbers = itertools.count(1)
        self._next: asyncio.Task[FrameProcess] | None = None
        self._alive: set[FrameProcess] = set()

    async def take(self) -> FrameProcess:
        """A process that is ready; the next one is started behind it.

        Raises:
            ClusterError: it does not start; the message has the last it said.
        """
        starting = self._next or self._start_next()
        process = await asyncio.shield(starting)
        self._start_next()
        return process

    async def release(self, process: FrameProcess) -> None:
        """End a process, if it is not dead yet."""
        await process.bury()
        self._alive.discard(process)

    async def close(self) -> None:
        """End all of them."""
        if self._next is not None:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)
        for process in list(self._alive):
            await self.release(process)

    def _start_next(self) -> asyncio.Task[FrameProcess]:
        self._next = asyncio.get_running_loop().create_task(self._start())
        return self._next

    async def _start(self) -> FrameProcess:
        ours, theirs = socket.socketpair()
        process: ChildProcess | None = None
        try:
            with theirs, self._log.open("ab") as log:
                process = ChildProcess(
                    (sys.executable, "-P", "-c", START, str(theirs.fileno()), str(self._directory)),
                    passed=(theirs.fileno(),), stdin=DEVNULL, stdout=log, stderr=log, environment=self._environment,
                    own_session=True, ends_group=True,  # a terminal's Ctrl-C is not for it
                )  # fmt: skip
            reader, writer = await asyncio.open_unix_connection(sock=ours, limit=LINE_LIMIT)
        except BaseException:
            ours.close()
            if process is not None:
                await process.end()
            raise
        found = FrameProcess(f"frame-{next(self._numbers)}", process, reader, writer)
        self._alive.add(found)
        try:
            ready = await asyncio.wait_for(found.ready(), START_SECONDS)
        except TimeoutError:
            ready = False
        if not ready:
            await self.release(found)
            said = self._log.read_text(errors="replace")[-LOG_TAIL:].strip()
            raise ClusterError(f"a session's process does not start: {said or 'it says nothing'}")
        return found
