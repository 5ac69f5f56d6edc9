"""One command in a process group of its own, which can't outlive its call, nor the frame; its output is bounded."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from subprocess import DEVNULL, PIPE

from understudy.child_process import ChildProcess, PipeReader

TERMINATE_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL for a command past its time."""

CANCEL_GRACE = 1.0
"""The same for a cancelled call: shorter than what `execution` waits before it calls a tool stuck."""

KILL_GRACE = 0.5
"""Seconds that a killed command has to be gone: so that nothing of it outlives its call, unless it can't be killed."""

DRAIN_SECONDS = 0.5
"""How long output is still read once the command's group is dead; only a process that left the group keeps it open."""

# Standard error is a pipe to read from, whose other end only the frame holds. However the frame dies, the pipe ends and
# the watcher in the command's group kills the group. PR_SET_PDEATHSIG would reach the shell alone and not its children,
# and needs Python code between fork and exec, which can deadlock in a process with threads.
# SIGTERM is for the command: the watcher must outlast it, the shell stay to wait for the command, and so must what
# holds a sandbox together, which ignores it; the command's own command line restores it (`sandbox.limited`).
# Where memory is short, the kernel ends the command before the frame.
GUARD = """
exec 3<&2 2>&1
(trap '' TERM; read -r _ <&3; kill -KILL 0) </dev/null >/dev/null 2>&1 &
watcher=$!
trap : TERM
(trap '' TERM; echo 1000 2>/dev/null >/proc/self/oom_score_adj; exec "$@" 3<&-)
code=$?
exec >/dev/null 2>&1
kill -KILL $watcher
wait $watcher
exit $code
"""


def guarded(command_line: Sequence[str]) -> list[str]:
    """The command line below a guard. Its standard error must be a pipe to read from: whoever has the other end keeps
    the command alive. The command's own goes where its standard output goes."""
    return ["/bin/sh", "-c", GUARD, "sh", *command_line]


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: its exit code, or minus the signal that ended it.
        timed_out: it was ended, because its time was over.
        output: what it wrote, standard output and error together, as far as it was kept.
        left_out: bytes that are missing after the first half of what is kept.
    """

    code: int
    timed_out: bool
    output: bytes
    left_out: int = 0


async def run(
    command_line: Sequence[str], *, directory: str, environment: Mapping[str, str], seconds: float | None, kept: int,
    sent: bytes | None = None,
) -> Ended:  # fmt: skip
    """Run a command to its end, and end all that it started with it. A cancelled one is over when that is raised.

    Args:
        seconds: after which the command is ended; None for never.
        kept: bytes of its output: half from the beginning, half from the end.
        sent: its standard input; empty without.

    Raises:
        OSError: it can't be started.
    """
    with ExitStack() as ours:
        with ExitStack() as theirs:
            guard_read, guard_write = os.pipe()
            theirs.callback(os.close, guard_read)
            ours.callback(os.close, guard_write)
            output_read, output_write = os.pipe()
            theirs.callback(os.close, output_write)
            output = Output(kept)
            ours.callback(PipeReader(output_read, output.take, output.set_closed).close)
            process = ChildProcess(
                guarded(command_line), stdin=DEVNULL if sent is None else PIPE, stdout=output_write, stderr=guard_read,
                directory=directory, environment=environment, own_session=True, ends_group=True,
            )  # fmt: skip
            ours.callback(process.close)
        sending = asyncio.ensure_future(process.send(sent or b""))
        ours.callback(sending.cancel)
        timed_out = await _finish(process, seconds)
        await asyncio.wait({output.closed}, timeout=DRAIN_SECONDS)
    code = process.returncode
    return Ended(-signal.SIGKILL if code is None else code, timed_out, output.kept(), output.left_out)


async def _finish(process: ChildProcess, seconds: float | None) -> bool:
    """Wait for the command; nothing is left of its group. Whether its time was over."""
    try:
        await asyncio.wait_for(process.wait(), seconds)
    except TimeoutError:
        await _terminate(process, TERMINATE_GRACE)
        return True
    except asyncio.CancelledError:
        await _terminate(process, CANCEL_GRACE)
        raise
    return False


async def _terminate(process: ChildProcess, grace: float) -> None:
    groups = _sessions_below(process.pid)
    process.signal_group(signal.SIGTERM)
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):  # nothing is left of it
            os.killpg(group, signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), grace)
    except TimeoutError:
        process.signal_group(signal.SIGKILL)  # what ignores SIGTERM
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), KILL_GRACE)


def _sessions_below(pid: int) -> list[int]:
    """Processes below this one that lead sessions of their own: a sandbox gives its command one."""
    found, pending = list[int](), [pid]
    while pending and len(found) < 1_000:
        try:
            with open(f"/proc/{(parent := pending.pop())}/task/{parent}/children") as children:
                pending += map(int, children.read().split())
            if parent != pid and os.getsid(parent) == parent:
                found.append(parent)
        except OSError:
            pass  # it is gone
    return found


class Output:
    """The beginning and the end of what a pipe brings, of any length, in bounded memory.

    Args:
        limit: bytes that are kept.

    Attributes:
        closed: done when the pipe has ended.
    """

    def __init__(self, limit: int) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._half = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0

    def take(self, data: bytes) -> None:
        """What has come."""
        self._total += len(data)
        space = self._half - len(self._head)
        self._head += data[:space]
        self._tail += data[space:]
        if len(self._tail) > 2 * self._half:
            del self._tail[: -self._half]

    def set_closed(self) -> None:
        """No more comes."""
        if not self.closed.done():
            self.closed.set_result(None)

    @property
    def left_out(self) -> int:
        """Bytes between the two halves that are not kept."""
        return self._total - len(self._head) - len(self._tail[-self._half :])

    def kept(self) -> bytes:
        """Both halves."""
        return bytes(self._head + self._tail[-self._half :])
