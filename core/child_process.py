"""Processes that an event loop starts and waits for: each has the descriptors that it is given, and no others."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from subprocess import DEVNULL, PIPE
from typing import IO

LINE_LIMIT = 1 << 16
"""Bytes that a stream of its output holds ahead of whoever reads it, and the longest line that it reads as one."""


class ChildProcess:
    """A child, and the ends of its pipes. Whoever has started it calls `communicate` or `close`.

    `asyncio.create_subprocess_exec` leaves all this to the event loop. That of Ray's actors, uvloop, lets a child
    inherit whatever is inheritable: its own ends of the pipes to other children, which then have no end, and the files
    that Ray has open. `subprocess` closes them in the child. Nor does `wait` wait here for the end of pipes, which
    other processes may hold.

    Attributes:
        stdin: a stream to it where `PIPE` was asked for, as the others. To the child it is a socket.
        stdout: a stream of its output.
        stderr: a stream of its errors.
    """

    stdin: asyncio.StreamWriter | None = None
    stdout: asyncio.StreamReader | None = None
    stderr: asyncio.StreamReader | None = None

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._ended = asyncio.Event()
        self._handle = -1
        self._pipes = list[asyncio.BaseTransport]()

    @classmethod
    async def start(
        cls, command_line: Sequence[str], *, environment: Mapping[str, str] | None, directory: str | None = None,
        stdin: int = DEVNULL, stdout: int | IO[bytes], stderr: int | IO[bytes], passed: Sequence[int] = (),
        own_session: bool = False, line_limit: int = LINE_LIMIT,
    ) -> ChildProcess:  # fmt: skip
        """Start a process.

        Args:
            command_line: the program and its arguments.
            environment: all its variables; None for those of this process.
            directory: that it begins in; None for that of this process.
            stdin: as for `subprocess.Popen`, as are the next two.
            stdout: see there.
            stderr: see there.
            passed: descriptors that it has as well.
            own_session: it leads a session and a process group.
            line_limit: see `LINE_LIMIT`.

        Raises:
            OSError: it can't be started; then nothing is left of it.
        """
        # A socket, as event loops take as well: to write to a pipe, asyncio's streams have no public way.
        ours, theirs = socket.socketpair() if stdin == PIPE else (None, None)
        try:
            process = subprocess.Popen(  # noqa: ASYNC220 - it waits until the program is loaded, as asyncio's own does
                command_line, bufsize=0, stdin=stdin if theirs is None else theirs.fileno(), stdout=stdout,
                stderr=stderr, cwd=directory, env=environment, pass_fds=passed, start_new_session=own_session,
            )  # fmt: skip
        except BaseException:
            if ours is not None:
                ours.close()
            raise
        finally:
            if theirs is not None:
                theirs.close()
        child = cls(process)
        try:
            await child._connect(ours, line_limit)
        except BaseException:
            process.kill()
            process.wait()
            child.close()
            raise
        return child

    async def _connect(self, stdin: socket.socket | None, line_limit: int) -> None:
        try:
            self._handle = os.pidfd_open(self.pid)
            asyncio.get_running_loop().add_reader(self._handle, self._set_ended)
            if stdin is not None:
                _, self.stdin = await asyncio.open_unix_connection(sock=stdin)
            self.stdout = await self._reader(self._process.stdout, line_limit)
            self.stderr = await self._reader(self._process.stderr, line_limit)
        except BaseException:
            for open_here in (stdin, self._process.stdout, self._process.stderr):
                if open_here is not None:
                    open_here.close()
            raise

    async def _reader(self, pipe: IO[bytes] | None, line_limit: int) -> asyncio.StreamReader | None:
        if pipe is None:
            return None
        reader = asyncio.StreamReader(limit=line_limit)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
        self._pipes.append(transport)
        return reader

    def _set_ended(self) -> None:
        self._process.poll()
        self._forget_handle()
        self._ended.set()

    def _forget_handle(self) -> None:
        if self._handle >= 0:
            asyncio.get_running_loop().remove_reader(self._handle)
            os.close(self._handle)
            self._handle = -1

    @property
    def pid(self) -> int:
        """Its process id. It can't be another process's while `returncode` is None."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None while nobody has seen its end."""
        return self._process.returncode

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        self._process.kill()

    async def wait(self) -> int:
        """Wait for its end. Returns `returncode`."""
        await self._ended.wait()
        return self._process.returncode

    async def communicate(self, sent: bytes = b"") -> tuple[bytes, bytes]:
        """Send it this, and wait until its pipes and the process have ended. Returns what it has written to both.

        May be repeated where it was cancelled: what was read before is lost.
        """
        output, errors, _ = await asyncio.gather(_all(self.stdout), _all(self.stderr), self._send(sent))
        await self.wait()
        self.close()
        return output, errors

    async def _send(self, sent: bytes) -> None:
        if self.stdin is None:
            return
        with suppress(ConnectionError):  # it may have ended
            if sent:
                self.stdin.write(sent)
                await self.stdin.drain()
        self.stdin.close()

    def close(self) -> None:
        """Close our ends of its pipes. What it has not read by then it does not get. The process goes on."""
        if self.stdin is not None:
            self.stdin.transport.abort()  # `close` would wait until it is read: perhaps for ever
        for pipe in self._pipes:
            pipe.close()


async def _all(stream: asyncio.StreamReader | None) -> bytes:
    return b"" if stream is None else await stream.read()
