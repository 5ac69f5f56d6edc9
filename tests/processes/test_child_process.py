"""Processes that are started on an event loop: what they have, and what is left of them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT
from typing import Any

import pytest

from understudy.child_process import ChildProcess

pytestmark = pytest.mark.uvloop

DESCRIPTORS = """
import os

for number in range(1_000):
    try:
        os.fstat(number)
        print(number)
    except OSError:
        pass
"""


async def started(*command: str, **options: Any) -> ChildProcess:
    return await ChildProcess.start(
        command, **{"environment": None, "stdin": PIPE, "stdout": PIPE, "stderr": PIPE, **options}
    )


@asynccontextmanager
async def running(*command: str, **options: Any) -> AsyncIterator[ChildProcess]:
    process = await started(*command, **options)
    try:
        async with asyncio.timeout(20):
            yield process
    finally:
        process.kill()
        await process.wait()
        process.close()


def open_here() -> set[str]:
    """What descriptors of this process lead to; uvloop keeps one of /dev/null for itself."""
    found = {(each.name, os.readlink(each)) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()}
    return {f"{number} {path}" for number, path in found if path != os.devnull}


async def test_it_has_what_it_is_given_and_nothing_else(tmp_path: Path) -> None:
    """Given a file that children inherit, as Ray's logs, and another child with pipes, when one is started, then it has
    its three streams and the descriptor that is passed."""
    inherited, passed = (os.open(tmp_path / name, os.O_CREAT | os.O_WRONLY) for name in ("log", "passed"))
    os.set_inheritable(inherited, True)
    try:
        async with running("cat"):
            one = await started(sys.executable, "-I", "-S", "-c", DESCRIPTORS, passed=(passed,))
            other = await started(sys.executable, "-I", "-S", "-c", DESCRIPTORS, stdin=DEVNULL)
            has, has_other = [
                sorted(int(line) for line in (await child.communicate())[0].split()) for child in (one, other)
            ]
    finally:
        os.close(inherited)
        os.close(passed)
    assert has == sorted([0, 1, 2, passed])
    assert has_other == [0, 1, 2]


async def test_the_end_of_a_pipe_is_the_end_of_its_process() -> None:
    """Given two children, when one is killed, then its output ends, though the other one lives."""
    async with running("cat") as first, running("cat"):
        assert first.stdin is not None
        assert first.stdout is not None
        first.stdin.write(b"there\n")
        assert await first.stdout.readline() == b"there\n"
        os.kill(first.pid, signal.SIGKILL)
        assert await first.stdout.read() == b""
        assert await first.wait() == first.returncode == -signal.SIGKILL


async def test_what_is_sent_and_said() -> None:
    """More than pipes hold goes in and out; what it says of errors is apart; then nothing of it is open here."""
    before = open_here()
    sent = os.urandom(1 << 20)
    process = await started("/bin/sh", "-c", "cat; echo wrong >&2; exit 3")
    assert await process.communicate(sent) == (sent, b"wrong\n")
    assert process.returncode == 3
    await until_open(before)


async def test_it_need_not_read_what_it_is_sent() -> None:
    """Given a child that ends without having read its input, then that is no error."""
    before = open_here()
    process = await started("/bin/sh", "-c", "echo over", stderr=STDOUT)
    assert await process.communicate(b"x" * (1 << 20)) == (b"over\n", b"")
    await until_open(before)


async def test_it_has_ended_though_another_holds_its_pipes() -> None:
    """Given a child that leaves a process with its pipes, when it ends, then `wait` returns, and `close` closes them,
    whatever is still to be read of its input."""
    before = open_here()
    async with running("/bin/sh", "-c", "sleep 1000 & echo $!; exec kill -9 $$") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        left = int(await process.stdout.readline())
        process.stdin.write(b"x" * (1 << 22))
        assert await process.wait() == -signal.SIGKILL
    try:
        await until_open(before)
    finally:
        os.kill(left, signal.SIGKILL)


async def test_a_start_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """Given no such program or no such directory, then that is an error of whoever starts it."""
    before = open_here()
    with pytest.raises(FileNotFoundError):
        await started(str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError):
        await started("/bin/sh", directory=str(tmp_path / "none"))
    assert open_here() == before


async def test_a_start_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    """Given a start that is cancelled at its first wait, then the process has ended, and nothing of it is open."""
    before = open_here()
    os.mkfifo(tmp_path / "alive")
    reading = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    try:
        start = asyncio.ensure_future(started("/bin/sh", "-c", f"exec >{tmp_path}/alive; exec cat"))
        asyncio.get_running_loop().call_soon(start.cancel)
        with pytest.raises(asyncio.CancelledError):
            await start
        assert os.read(reading, 1) == b""  # nobody has it open: it has ended
    finally:
        os.close(reading)
    await until_open(before)


async def until_open(expected: set[str]) -> None:
    """Wait until nothing else is open: a loop closes pipes when it next comes to it."""
    for _ in range(1_000):
        if open_here() <= expected:
            return
        await asyncio.sleep(0)
    assert open_here() <= expected
