"""Processes that an event loop starts and waits for: each has the descriptors that it is given, and no others."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from subprocess import DEVNULL, PIPE
from typing import IO

log = logging.getLogger(__name__)

LINE_LIMIT = 1 << 16
"""Bytes of the longest line that a stream of output reads as one; it holds about twice as many ahead of its reader."""

READ_BYTES = 1 << 18
"""Bytes that are read at once at most."""

TRACED_SECONDS = 0.05
"""So often it is looked again after a process that has ended, and whose end a debugger has not passed on."""

UNKNOWN_CODE = 255
"""The exit code of a process that something else in this one has waited for (or that ignores SIGCHLD)."""


class PipeReader(asyncio.ReadTransport):
    """The reading end of a pipe, on any event loop. It closes the descriptor, at the pipe's end or when it is closed.

    The loops' own pipes differ: uvloop closes a descriptor twice, the second time perhaps what has its number by then.

    Args:
        descriptor: of the pipe; from now on this object's.
        received: called with what comes.
        ended: called once, when it is closed.
    """

    def __init__(self, descriptor: int, received: Callable[[bytes], None], ended: Callable[[], None]) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._received = received
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        os.set_blocking(descriptor, False)
        self.resume_reading()

    def pause_reading(self) -> None:
        """See `asyncio.ReadTransport`."""
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)

    def resume_reading(self) -> None:
        """See `asyncio.ReadTransport`."""
        if self._descriptor >= 0:
            self._loop.add_reader(self._descriptor, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._descriptor, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._received(data)
        else:
            self.close()

    def is_closing(self) -> bool:
        """See `asyncio.BaseTransport`."""
        return self._descriptor < 0

    def close(self) -> None:
        """Close the pipe: what is still in it is not read."""
        if self._descriptor >= 0:
            self.pause_reading()
            os.close(self._descriptor)
            self._descriptor = -1
            self._ended()


class PipeWriter:
    """The writing end of a pipe, on any event loop. One task at a time writes.

    Args:
        descriptor: of the pipe; from now on this object's.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[None] | None = None
        os.set_blocking(descriptor, False)

    async def write(self, data: bytes) -> None:
        """Wait until the pipe has taken all of it. Raises `BrokenPipeError` if nobody reads, or it is closed."""
        left = memoryview(data)
        while left:
            if self._descriptor < 0:
                raise BrokenPipeError("the pipe is closed")
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:
                await self._writable()

    async def _writable(self) -> None:
        self._waiting = self._loop.create_future()
        self._loop.add_writer(self._descriptor, self._wake)
        try:
            await self._waiting
        finally:
            self._stop_waiting()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _stop_waiting(self) -> None:
        if self._descriptor >= 0:  # otherwise its number may be another's
            self._loop.remove_writer(self._descriptor)

    def close(self) -> None:
        """Close the pipe: its reader has read all when it has read what is in it."""
        if self._descriptor >= 0:
            self._stop_waiting()
            os.close(self._descriptor)
            self._descriptor = -1
            self._wake()


class ChildProcess:
    """A child of this process, which is started at once, and our ends of its pipes. Whoever starts it calls
    `communicate`, `end` or `close`.

    `asyncio.create_subprocess_exec` leaves all this to the event loop. That of Ray's actors, uvloop, lets a child
    inherit whatever is inheritable: its own ends of the pipes to other children, which then have no end, and the files
    that Ray has open. `subprocess` closes them in the child. Nor does `wait` wait here for the end of pipes, which
    other processes may hold. Needs Linux 5.3 (`pidfd_open`).

    Args:
        command_line: the program and its arguments.
        environment: all its variables; None for those of this process.
        directory: that it begins in; None for that of this process.
        stdin: as for `subprocess.Popen`, as are the next two.
        stdout: see there.
        stderr: see there.
        passed: descriptors that it has as well.
        own_session: it leads a session and a process group.
        ends_group: what is left of its process group is killed when it has ended.
        line_limit: see `LINE_LIMIT`.

    Attributes:
        stdin: to write to it, where `PIPE` was asked for, as with the others.
        stdout: a stream of its output.
        stderr: a stream of its errors.

    Raises:
        OSError: it can't be started; then nothing is left of it.
    """

    stdin: PipeWriter | None = None
    stdout: asyncio.StreamReader | None = None
    stderr: asyncio.StreamReader | None = None

    def __init__(
        self, command_line: Sequence[str], *, environment: Mapping[str, str] | None, directory: str | None = None,
        stdin: int = DEVNULL, stdout: int | IO[bytes], stderr: int | IO[bytes], passed: Sequence[int] = (),
        own_session: bool = False, ends_group: bool = False, line_limit: int = LINE_LIMIT,
    ) -> None:  # fmt: skip
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._ends_group = ends_group
        self._readers = list[PipeReader]()
        pipes: list[int] = []
        process: subprocess.Popen[bytes] | None = None
        try:
            # Ours are not those of `Popen`, whose file objects would close them as well.
            theirs, ours = _pipe(pipes) if stdin == PIPE else (stdin, -1)
            output, their_output = _pipe(pipes) if stdout == PIPE else (-1, stdout)
            errors, their_errors = _pipe(pipes) if stderr == PIPE else (-1, stderr)
            process = subprocess.Popen(
                command_line,
                stdin=theirs,
                stdout=their_output,
                stderr=their_errors,
                cwd=directory,
                env=environment,
                pass_fds=passed,
                start_new_session=own_session,
            )
            self._handle = _handle(process.pid)
        except BaseException:
            if process is not None:
                process.kill()
                process.wait()
            for descriptor in pipes:
                os.close(descriptor)
            raise
        for descriptor in {*pipes} - {ours, output, errors}:
            os.close(descriptor)
        self._process = process
        self.stdin = PipeWriter(ours) if ours >= 0 else None
        self.stdout = self._stream(output, line_limit) if output >= 0 else None
        self.stderr = self._stream(errors, line_limit) if errors >= 0 else None
        if self._handle >= 0:
            self._loop.add_reader(self._handle, self._look)
        else:
            self._set_ended(UNKNOWN_CODE)

    def _stream(self, descriptor: int, line_limit: int) -> asyncio.StreamReader:
        stream = asyncio.StreamReader(limit=line_limit)
        reader = PipeReader(descriptor, stream.feed_data, stream.feed_eof)
        stream.set_transport(reader)
        self._readers.append(reader)
        return stream

    def _look(self) -> None:
        """It has ended: kill its group while it is not reaped, so that its number is no other's, and reap it."""
        self._loop.remove_reader(self._handle)
        try:
            found = os.waitid(os.P_PIDFD, self._handle, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None:
                self._loop.call_later(TRACED_SECONDS, self._look)
                return
            if self._ends_group:
                self.signal_group(signal.SIGKILL)
            os.waitid(os.P_PIDFD, self._handle, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            log.warning("something else has waited for process %d: its exit code is unknown", self.pid)
            code = UNKNOWN_CODE
        else:
            code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        os.close(self._handle)
        self._handle = -1
        self._set_ended(code)

    def _set_ended(self, code: int) -> None:
        self._process.returncode = code
        self._ended.set()

    @property
    def pid(self) -> int:
        """Its process id. It can't be another process's while `returncode` is None."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None while nobody has seen its end."""
        code: int | None = self._process.returncode
        return code

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        if self._handle >= 0:
            with suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the process group that it leads, unless it has ended."""
        if self._handle >= 0:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    async def wait(self) -> int:
        """Wait for its end. Returns `returncode`."""
        await self._ended.wait()
        return self._process.returncode

    async def communicate(self, sent: bytes = b"") -> tuple[bytes, bytes]:
        """Send it this, and wait until its outputs and the process have ended. Returns what it has written to both."""
        sending = asyncio.ensure_future(self.send(sent))
        try:
            output, errors = await asyncio.gather(_all(self.stdout), _all(self.stderr))
            await self.wait()
            return output, errors
        finally:
            sending.cancel()
            self.close()

    async def send(self, sent: bytes) -> None:
        """Send it this, and end its input. It need not read all."""
        if self.stdin is not None:
            with suppress(BrokenPipeError):
                await self.stdin.write(sent)
            self.stdin.close()

    async def end(self) -> None:
        """SIGKILL, unless it has ended; wait for it, and close its pipes."""
        try:
            self.kill()
            await self.wait()
        finally:
            self.close()

    def close(self) -> None:
        """Close our ends of its pipes. What it has not read by then it does not get. The process goes on."""
        if self.stdin is not None:
            self.stdin.close()
        for reader in self._readers:
            reader.close()


def _pipe(known: list[int]) -> tuple[int, int]:
    made = os.pipe()
    known += made
    return made


def _handle(pid: int) -> int:
    """A descriptor of a child of ours; -1 if something else has waited for its end already."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return -1


async def _all(stream: asyncio.StreamReader | None) -> bytes:
    return b"" if stream is None else await stream.read()
