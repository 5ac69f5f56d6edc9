"""Runs one command, in a process of its own that neither its node service nor a session's process takes along.

Executed as a file, with the standard library alone: `python -I -S command_runner.py DIRECTORY LIMITS`, with a JSON
object on its standard input (`understudy.commands.CommandProcess`). Nothing of that is written anywhere.

    runner      JSON: the pid and the start time of this process
    begun       is there before the command is, and after `runner`
    output.N    the output from byte N on; the last two parts stay
    end         JSON: how the command ended

The lock of `lock` is held while this process lives. With it and `begun`, a second runner in the same directory begins
nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import sys
import time
from typing import Any

LOOK_SECONDS = 5.0
"""So often it is looked whether anybody looks after the command, and whether its time is over."""

KILL_SECONDS = 2.0
"""After SIGTERM, for a command that has no session any more, or is past its time."""

DRAIN_SECONDS = 0.5
"""So long output is read that a process writes which has left the command's group."""

BEGIN_SECONDS = 20.0
"""So long a runner waits for another one of its command to begin."""

CHUNK = 1 << 16


def main(directory: str, limits: dict[str, Any]) -> None:
    """Begin; return when the runner, which goes on without this process, can be found."""
    wanted = json.load(sys.stdin)
    ready, begun = os.pipe()
    if os.fork():
        os.close(begun)
        problem = b"".join(iter(lambda: os.read(ready, CHUNK), b""))
        if problem:
            sys.exit(problem.decode(errors="replace"))
        return
    os.close(ready)
    os.setsid()
    _leave_files(begun)
    lock = os.open(f"{directory}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until = time.monotonic() + BEGIN_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:  # another runner has the command; nobody can find it before it has begun
            if os.path.exists(f"{directory}/begun"):
                os._exit(0)
            if time.monotonic() > until:
                os.write(begun, b"another runner does not begin")
                os._exit(1)
            time.sleep(0.02)
    if os.path.exists(f"{directory}/begun"):
        os._exit(0)  # another runner had it
    Runner(directory, limits, wanted).run(begun)
    os._exit(0)


def _leave_files(kept: int) -> None:
    """Hold nothing that whoever started this process waits for, or may want to remove."""
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.closerange(3, kept)
    os.closerange(kept + 1, 1024)


def start_time(pid: int) -> int:
    """When a process was started, in the kernel's ticks; 0 if there is no such process. Pids are used again."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError, IndexError, ValueError):
        return 0


def sessions_below(pid: int) -> list[int]:
    """Processes below this one that lead sessions of their own."""
    found: list[int] = []
    pending = [pid]
    while pending and len(found) < 1_000:
        parent = pending.pop()
        try:
            with open(f"/proc/{parent}/task/{parent}/children") as children:
                pending += map(int, children.read().split())
            if parent != pid and os.getsid(parent) == parent:
                found.append(parent)
        except OSError:
            pass  # it is gone
    return found


def shown_tail(output: bytes, secrets: list[str], size: int) -> str:
    """The end of some output, without these secrets."""
    text = output.decode(errors="replace")
    for secret in secrets:
        text = text.replace(secret, "***")
    return text[-size:]


class Runner:
    """The command, and what is kept of it."""

    def __init__(self, directory: str, limits: dict[str, Any], wanted: dict[str, Any]) -> None:
        self._directory = directory
        self._limits = limits
        self._wanted = wanted
        self._part = -1
        self._starts: list[int] = []
        self._written = 0
        self._in_part = 0
        self._tail = b""
        self._child = 0
        self._problem = ""
        self._alone_since: float | None = None
        self._kill_at: float | None = None

    def run(self, begun: int) -> None:
        """Execute the command until its end, and write that down."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number, handler in ((signal.SIGTERM, self._terminate), (signal.SIGUSR1, self._kill)):
            signal.signal(number, handler)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        try:
            self._write("runner", {"pid": os.getpid(), "start": start_time(os.getpid())})
            os.close(os.open(f"{self._directory}/begun", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except OSError as error:  # as on a full disk: nobody could find the command
            os.write(begun, str(error.strerror).encode())
            return
        try:
            output = self._start()
        except OSError as error:
            output, self._problem = -1, f"could not be started: {error.strerror}"
        os.close(begun)
        code = self._wait(output, wake_read) if output >= 0 else None
        tail = shown_tail(self._tail, self._wanted.get("secrets", []), self._limits["tail"])
        try:
            self._write("end", {"exit_code": code, "tail": tail, "problem": self._problem})
        except OSError:
            pass  # the directory was removed, and nobody wants to know, or the disk is full: the command is lost

    def _start(self) -> int:
        """Start the command; the end of the pipe that its output comes from."""
        output_read, output_write = os.pipe2(os.O_CLOEXEC)
        guard_read, self._guard = os.pipe2(os.O_CLOEXEC)  # ends with this process, which tells the guard in the group
        failed_read, failed_write = os.pipe2(os.O_CLOEXEC)
        self._child = os.fork()
        if not self._child:
            try:
                os.setsid()
                os.umask(self._wanted["umask"])
                for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD, signal.SIGPIPE):
                    signal.signal(number, signal.SIG_DFL)
                os.chdir(self._wanted["directory"])
                null = os.open(os.devnull, os.O_RDONLY)
                for target, source in ((0, null), (1, output_write), (2, guard_read)):
                    os.dup2(source, target)
                arguments, environment = self._wanted["arguments"], self._wanted["environment"]
                os.execvpe(arguments[0], arguments, environment)
            except OSError as error:
                os.write(failed_write, str(error.errno).encode())
            finally:
                os._exit(127)
        for end in (output_write, guard_read, failed_write):
            os.close(end)
        failed = os.read(failed_read, 16)
        os.close(failed_read)
        if failed:
            os.waitpid(self._child, 0)
            self._child = 0
            raise OSError(int(failed), os.strerror(int(failed)))
        return output_read

    def _wait(self, output: int, wake: int) -> int:
        """Take output until the command has ended; its exit code, or the signal that ended it as a negative number."""
        os.set_blocking(output, False)
        until = time.monotonic() + self._limits["seconds"]
        poll = select.poll()
        poll.register(output, select.POLLIN)
        poll.register(wake, select.POLLIN)
        looked, is_open, code = time.monotonic(), True, None
        while code is None:
            soon = min(LOOK_SECONDS, max(0.0, (self._kill_at or until) - time.monotonic()))
            for descriptor, _ in poll.poll(soon * 1000):
                if descriptor == output and not self._take(output):
                    poll.unregister(output)
                    is_open = False
                elif descriptor == wake:
                    os.read(wake, CHUNK)
            if os.waitid(os.P_PID, self._child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                self._signal(signal.SIGKILL)  # what is left of its group, whose number is its own until it is reaped
                code = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
                self._child = 0
                break
            if time.monotonic() - looked >= LOOK_SECONDS:
                looked = time.monotonic()
                self._look()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._kill()
                self._kill_at = time.monotonic() + LOOK_SECONDS
            elif self._kill_at is None and time.monotonic() >= until:
                self._give_up(f"was stopped: it was at work for {self._limits['seconds']:g} s, which is the longest")
        over = time.monotonic() + DRAIN_SECONDS
        while is_open and (left := over - time.monotonic()) > 0:
            if not select.select([output], [], [], left)[0] or not self._take(output):
                break
        return code

    def _take(self, output: int) -> bool:
        """Keep what there is of the output; False at its end."""
        try:
            data = os.read(output, CHUNK)
        except BlockingIOError:
            return True
        if not data:
            return False
        self._tail = (self._tail + data)[-2 * self._limits["tail"] :]
        while data:
            if self._part < 0 or self._in_part >= self._limits["part"]:
                self._next_part()
            some = data[: self._limits["part"] - self._in_part]
            try:
                count = os.write(self._part, some)
            except OSError:  # the disk is full: the command goes on, and its output is not kept
                count = len(some)
            self._written += count
            self._in_part += count
            data = data[count:]
        return True

    def _next_part(self) -> None:
        if self._part >= 0:
            os.close(self._part)
            self._part = -1
        if len(self._starts) == 2:
            try:
                os.unlink(f"{self._directory}/output.{self._starts.pop(0)}")
            except OSError:
                pass
        self._starts.append(self._written)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            self._part = os.open(f"{self._directory}/output.{self._written}", flags, 0o600)
        except OSError:
            self._part = os.open(os.devnull, flags)
        self._in_part = 0

    def _look(self) -> None:
        """End a command whose directory was removed, or that no node service has looked after for long."""
        try:
            lock = os.open(self._limits["service"], os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            lock = -1
        try:
            if lock >= 0:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a service holds it otherwise
        except OSError:
            self._alone_since = None
        else:
            self._alone_since = self._alone_since or time.monotonic()
        finally:
            if lock >= 0:
                os.close(lock)
        alone = self._alone_since is not None and time.monotonic() - self._alone_since >= self._limits["alone"]
        if self._kill_at is None and (alone or not os.path.isdir(self._directory)):
            self._give_up("was stopped: no node service has looked after it for long")

    def _give_up(self, problem: str) -> None:
        self._problem = problem
        self._terminate()
        self._kill_at = time.monotonic() + KILL_SECONDS

    def _terminate(self, *_: Any) -> None:
        self._signal(signal.SIGTERM)

    def _kill(self, *_: Any) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        """To the guard's group; a sandbox gives its command a session of its own, which ends with the guard's group."""
        if not self._child:
            return
        for group in (self._child, *(sessions_below(self._child) if number == signal.SIGTERM else ())):
            try:
                os.killpg(group, number)
            except (ProcessLookupError, PermissionError):
                pass

    def _write(self, name: str, value: Any) -> None:
        """Write a file at once: it is whole, or is not there."""
        path = f"{self._directory}/{name}"
        file = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(file, "wb") as whole:
            whole.write(json.dumps(value).encode())
        os.rename(f"{path}.new", path)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
