"""Processes that are started on an event loop: what they have, and what is left of them."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT
from typing import Any

import pytest

from understudy.actors import guarded
from understudy.child_process import UNKNOWN_CODE, ChildProcess

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


def started(*command: str, **options: Any) -> ChildProcess:
    return ChildProcess(command, **{"environment": None, "stdin": PIPE, "stdout": PIPE, "stderr": PIPE, **options})


@asynccontextmanager
async def running(*command: str, **options: Any) -> AsyncIterator[ChildProcess]:
    process = started(*command, **options)
    try:
        async with asyncio.timeout(20):
            yield process
    finally:
        await process.end()


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
            one = started(sys.executable, "-I", "-S", "-c", DESCRIPTORS, passed=(passed,))
            other = started(sys.executable, "-I", "-S", "-c", DESCRIPTORS, stdin=DEVNULL)
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
        await first.stdin.write(b"there\n")
        assert await first.stdout.readline() == b"there\n"
        os.kill(first.pid, signal.SIGKILL)
        assert await first.stdout.read() == b""
        assert await first.wait() == first.returncode == -signal.SIGKILL
        with pytest.raises(BrokenPipeError):
            await first.stdin.write(b"gone")


@pytest.mark.parametrize("size", [0, 65_536, 230_000, 300_000, 1 << 20, 20 << 20])
async def test_what_is_sent_and_said(size: int) -> None:
    """More than pipes hold goes in and out; what it says of errors is apart; then nothing of it is open here."""
    before = open_here()
    sent = os.urandom(size)
    process = started("/bin/sh", "-c", "cat; echo wrong >&2; exit 3")
    assert await process.communicate(sent) == (sent, b"wrong\n")
    assert process.returncode == 3
    command = ["/bin/sh", "-c", "wc -c"]
    ended = await guarded.run(command, directory="/", environment={}, seconds=20, kept=100, sent=sent)
    assert (ended.code, int(ended.output)) == (0, size)
    assert open_here() <= before


@pytest.mark.parametrize("command", ["echo over", "exec <&-; echo over", "sleep 1000 >/dev/null 2>&1 & echo over"])
async def test_it_need_not_read_what_it_is_sent(command: str) -> None:
    """Given a child that ends without having read its input, or that closes it, or that leaves it to another one, then
    that is no error, and nobody waits for it."""
    before = open_here()
    process = started("/bin/sh", "-c", command, stderr=STDOUT, own_session=True, ends_group=True)
    async with asyncio.timeout(20):
        assert await process.communicate(b"x" * (1 << 20)) == (b"over\n", b"")
    assert open_here() <= before


async def test_it_has_ended_though_another_holds_its_pipes() -> None:
    """Given a child that leaves a process with its pipes, when it ends, then `wait` returns, and `close` closes them,
    whatever is still to be read of its input."""
    before = open_here()
    async with running("/bin/sh", "-c", "sleep 1000 & echo $!; exec kill -9 $$") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        left = int(await process.stdout.readline())
        sending = asyncio.ensure_future(process.stdin.write(b"x" * (1 << 22)))
        assert await process.wait() == -signal.SIGKILL
    try:
        with pytest.raises(BrokenPipeError):
            await sending
        assert open_here() <= before
    finally:
        os.kill(left, signal.SIGKILL)


async def test_its_group_ends_with_it(tmp_path: Path) -> None:
    """Given a child that leaves a process in its group, when it has ended, then so has that, where it is asked for."""
    os.mkfifo(tmp_path / "alive")
    command = f"(trap '' TERM; exec sleep 1000) >{tmp_path}/alive & exit 3"
    reading = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reading, True)
    try:
        async with running("/bin/sh", "-c", command, own_session=True, ends_group=True) as process:
            assert await process.wait() == 3
            assert await asyncio.to_thread(os.read, reading, 1) == b""  # nobody has it open
    finally:
        os.close(reading)


async def test_a_start_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """Given no such program, no such directory or no descriptor, then that is an error of whoever starts it."""
    before = open_here()
    with pytest.raises(FileNotFoundError):
        started(str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError):
        started("/bin/sh", directory=str(tmp_path / "none"))
    assert open_here() == before
    for spare in range(1, 12):
        with few_descriptors(spare):
            try:
                process = started("cat")
            except OSError:
                pass
            else:
                await process.end()
        with few_descriptors(spare):
            try:
                await guarded.run(["true"], directory="/", environment={}, seconds=20, kept=100)
            except OSError:
                pass
        assert open_here() <= before


@contextmanager
def few_descriptors(spare: int) -> Iterator[None]:
    """So many descriptors can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(each.partition(" ")[0]) for each in open_here())
    filled = [os.open(os.devnull, os.O_RDONLY) for _ in range(highest + 1 - len(os.listdir("/proc/self/fd")) + 1)]
    highest = max([highest, *filled])
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + spare, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in filled:
            os.close(each)


async def test_a_cancel_at_any_moment_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a child that is sent more than it reads at once, or a guarded command, when that is cancelled after any
    number of the loop's turns, then it has ended or is ended, and nothing of it is open."""
    monkeypatch.setattr(guarded, "CANCEL_GRACE", 0.01)  # it ignores SIGTERM
    before = open_here()
    for turns in range(40):
        process = started("/bin/sh", "-c", "sleep 0.001; cat; exec sleep 1000")
        works = [process.communicate(b"x" * 200_000)]
        works += [guarded.run(["sleep", "1000"], directory="/", environment={}, seconds=9, kept=9, sent=b"x" * 200_000)]
        for work in works:
            task = asyncio.ensure_future(work)
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await process.end()
        assert open_here() <= before


async def test_descriptors_of_others_stay_open() -> None:
    """Given threads that open and close files, when children come and go, then none of their files is closed."""
    over = threading.Event()
    problems = list[OSError]()

    def use_files() -> None:
        while not over.is_set():
            opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
            for each in opened:
                try:
                    os.close(each)
                except OSError as error:
                    problems.append(error)

    threads = [threading.Thread(target=use_files) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(60):
            await asyncio.gather(*(started("cat").communicate(b"x") for _ in range(5)))
            await guarded.run(["true"], directory="/", environment={}, seconds=20, kept=100)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert problems == []


OTHERS_WAIT = """
import asyncio, signal, sys

import uvloop

from understudy.child_process import ChildProcess


async def main():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for _ in range(20):
        process = ChildProcess(["/bin/sh", "-c", "exit 3"], environment=None, stdout=-3, stderr=-3)
        print(await process.wait())


(uvloop.run if "uvloop" in sys.argv else asyncio.run)(main())
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_an_end_that_something_else_has_seen(loop: str) -> None:
    """Given a process that ignores SIGCHLD, so that nobody knows how its children end, then that is no success."""
    done = subprocess.run([sys.executable, "-P", "-c", OTHERS_WAIT, loop], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [str(UNKNOWN_CODE)] * 20, done.stderr
