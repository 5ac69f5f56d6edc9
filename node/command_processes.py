"""The commands of this machine: each under a runner of its own, with a private directory by which it is found."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

import msgspec

from understudy.child_process import ChildProcess
from understudy.commands import KEPT_OUTPUT, MOST_SECONDS, TAIL_BYTES, CommandEnd, CommandProcess
from understudy.waiting import ticks

from .command_runner import shown_tail, start_time

log = logging.getLogger(__name__)

RUNNER = Path(__file__).with_name("command_runner.py")
"""It is executed as a file: neither the package nor what is installed beside it is loaded."""

START_SECONDS = 30.0
GROWTH_SECONDS = 0.1
"""So often it is looked whether there is more output, while somebody waits for it."""

ALONE_SECONDS = 120.0
"""A command that no service has looked after for so long ends."""

COMMANDS_PREFIX = "commands-"
"""How the names of such directories begin that are beside each other."""

GONE_SECONDS = ALONE_SECONDS + 30.0
"""A command of a node that is gone has ended after so long, unless another service of its machine has taken it over."""

FORGOTTEN_SECONDS = 3_600
"""What is left of other stores is removed when nothing has changed there for so long."""

TIDY_ENVIRONMENT = {"PATH": os.defpath, "LC_ALL": "C.UTF-8"}
"""That of the runner itself."""


class LocalCommands:
    """See `understudy.ports.CommandProcesses`.

    Only the runner signals the command: it is the command's parent, so the number of the group is not another's. The
    runner itself is signalled by a descriptor of its process, once that is known to be the one which wrote its number.

    Args:
        directory: which nobody else may enter; it is made, if need be, within one that exists. Several services of a
            machine may have the same one.
    """

    def __init__(
        self, directory: str, *, seconds: float = MOST_SECONDS, kept: int = KEPT_OUTPUT, alone: float = ALONE_SECONDS
    ) -> None:
        self._directory = Path(directory)
        self._service = self._directory / "service"
        self._limits = {
            "seconds": seconds, "part": kept, "tail": TAIL_BYTES, "alone": alone, "service": str(self._service),
        }  # fmt: skip
        self._lock = -1
        self._secrets: dict[str, list[str]] = {}

    def open(self) -> None:
        """See `CommandProcesses.open`."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._lock < 0:
            self._lock = os.open(self._service, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_SH)  # a runner that looks at it holds it for a moment only
        if self._directory.name.startswith(COMMANDS_PREFIX):
            for other in self._directory.parent.glob(f"{COMMANDS_PREFIX}*"):
                if other != self._directory:
                    _remove_if_forgotten(other)

    def close(self) -> None:
        """See `CommandProcesses.close`."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def known(self) -> list[str]:
        """See `CommandProcesses.known`."""
        try:
            names = sorted(entry.name for entry in os.scandir(self._directory) if entry.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return []
        return [name for name in names if (self._directory / name / "begun").exists()]

    async def start(self, key: str, process: CommandProcess) -> None:
        """See `CommandProcesses.start`."""
        place = self._directory / key
        self._secrets[key] = process.secrets
        with suppress(FileExistsError):
            place.mkdir(mode=0o700)
        if (place / "begun").exists():
            return
        runner = ChildProcess(
            (sys.executable, "-I", "-S", str(RUNNER), str(place), json.dumps(self._limits)), stdin=PIPE,
            stdout=DEVNULL, stderr=PIPE, environment=TIDY_ENVIRONMENT, own_session=True,
        )  # fmt: skip
        try:
            _, said = await asyncio.wait_for(runner.communicate(msgspec.json.encode(process)), START_SECONDS)
        except TimeoutError:
            await runner.end()
            raise OSError("its runner did not start in time") from None
        if runner.returncode:
            raise OSError(f"its runner failed: {said.decode(errors='replace').strip()[-500:]}")

    async def ended(self, key: str) -> CommandEnd | None:
        """See `CommandProcesses.ended`."""
        place = self._directory / key
        if not (place / "begun").exists():
            return None
        handle = self._runner(key)
        if handle is not None:
            try:
                await _readable(handle)
            finally:
                os.close(handle)
        found = _read(place / "end")
        if found is not None:
            return CommandEnd(**found)
        return CommandEnd(problem="is lost: what ran it was killed", lost=True, tail=self._tail(key))

    def _tail(self, key: str) -> str:
        """The end of the output of a command whose runner has not written that; empty if its secrets are not known
        here, as where another service has started it."""
        if key not in self._secrets:
            return ""
        return shown_tail(self.read(key, None, 2 * TAIL_BYTES)[1], self._secrets[key], TAIL_BYTES)

    def _runner(self, key: str) -> int | None:
        """A descriptor of the runner's process; None if that has ended."""
        found = _read(self._directory / key / "runner")
        if found is None:
            return None
        try:
            handle = os.pidfd_open(found["pid"])
        except ProcessLookupError:  # another error, as that no descriptor is left, does not say that it has ended
            return None
        if start_time(found["pid"]) != found["start"]:  # another process has its number
            os.close(handle)
            return None
        return handle

    def stop(self, key: str, *, force: bool) -> None:
        """See `CommandProcesses.stop`."""
        handle = self._runner(key)
        if handle is not None:
            try:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGUSR1 if force else signal.SIGTERM)
            finally:
                os.close(handle)

    def read(self, key: str, after: int | None, limit: int) -> tuple[int, bytes, int]:
        """See `CommandProcesses.read`."""
        parts = self._parts(key)
        size = parts[-1][0] + parts[-1][1] if parts else 0
        first = parts[0][0] if parts else 0
        start = max(first, min(size, max(0, size - limit) if after is None else after))
        data = bytearray()
        for begin, length in parts:
            if start + len(data) < begin and not data:  # what was before could not be kept
                start = begin
            if begin <= start + len(data) < begin + length and len(data) < limit:
                with suppress(OSError), open(self._directory / key / f"output.{begin}", "rb") as file:
                    file.seek(start + len(data) - begin)
                    data += file.read(limit - len(data))
        return start, bytes(data), size

    def _parts(self, key: str) -> list[tuple[int, int]]:
        """Where each part of the output that is kept begins, and its size."""
        found = []
        with suppress(OSError):
            for entry in os.scandir(self._directory / key):
                if entry.name.startswith("output."):
                    with suppress(OSError):
                        found.append((int(entry.name.removeprefix("output.")), entry.stat().st_size))
        return sorted(found)

    async def grown(self, key: str, size: int, seconds: float) -> None:
        """See `CommandProcesses.grown`."""
        until = time.monotonic() + seconds
        async for _ in ticks(GROWTH_SECONDS):  # no file says that it has grown
            if self.read(key, None, 0)[2] > size or time.monotonic() >= until:
                return

    def remove(self, key: str) -> None:
        """See `CommandProcesses.remove`."""
        self.stop(key, force=True)
        self._secrets.pop(key, None)
        shutil.rmtree(self._directory / key, ignore_errors=True)


def _remove_if_forgotten(directory: Path) -> None:
    """Remove what is left of another store, or of an earlier boot: no service looks after it, no runner lives, and it
    is old."""
    with suppress(OSError):
        entries = [directory, *directory.iterdir()]
        is_old = time.time() - max(entry.stat().st_mtime for entry in entries) > FORGOTTEN_SECONDS
        if is_old and all(_is_free(lock) for lock in (directory / "service", *directory.glob("*/lock"))):
            shutil.rmtree(directory, ignore_errors=True)


def _is_free(lock: Path) -> bool:
    descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):  # another error does not say that it is not there
        return None
    return found


async def _readable(descriptor: int) -> None:
    """Wait until a descriptor can be read: that of a process, until it has ended."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def set_ended() -> None:
        if not ended.done():
            ended.set_result(None)

    loop.add_reader(descriptor, set_ended)
    try:
        await ended
    finally:
        loop.remove_reader(descriptor)
