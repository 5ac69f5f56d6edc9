"""Commands of a machine: each under a runner of its own, found again by whoever looks after them next."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from understudy.actors.guarded import guarded
from understudy.commands import CommandEnd, CommandProcess
from understudy.node.command_processes import COMMANDS_PREFIX, FORGOTTEN_SECONDS, LocalCommands
from understudy.node.command_runner import start_time

pytestmark = pytest.mark.uvloop

PART = 1 << 16


def process(command: str, directory: Path, **more: str) -> CommandProcess:
    arguments = guarded(["bash", "-c", command])
    return CommandProcess(arguments, str(directory), {"PATH": os.environ["PATH"], **more}, ["sesame-street"], 0o027)


def is_gone(pid: int) -> bool:
    """Whether a process has ended, if perhaps nobody has taken note of it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[LocalCommands]:
    made = LocalCommands(str(tmp_path / "commands"), kept=PART, alone=0.0)
    made.open()
    yield made
    for key in made.known():
        made.remove(key)
    made.close()


async def test_what_a_command_has_and_leaves(commands: LocalCommands, tmp_path: Path) -> None:
    """A command has the directory, the variables and the mask that it was given and nothing else; its end has no
    secret, its files nobody else may read, and what it was given is in none of them."""
    await commands.start("k", process("env; umask; pwd; echo sesame-street; exit 3", tmp_path, GIVEN="a value"))
    end = await commands.ended("k")
    assert end is not None
    assert (end.exit_code, end.problem) == (3, "")
    said = [line for line in end.tail.splitlines() if not line.startswith(("PWD=", "OLDPWD=", "SHLVL=", "_="))]
    assert sorted(said) == sorted([f"PATH={os.environ['PATH']}", "GIVEN=a value", "0027", str(tmp_path), "***"])
    files = list((tmp_path / "commands" / "k").iterdir())
    assert all(file.stat().st_mode & 0o077 == 0 for file in (*files, tmp_path / "commands"))
    known = {file.name: file.read_text() for file in files if not file.name.startswith("output")}
    assert not any("a value" in text for name, text in known.items() if name != "end")


async def test_a_start_that_is_repeated(commands: LocalCommands, tmp_path: Path) -> None:
    """Given starts of the same key at once, and again after the end, then the command runs once."""
    wanted = process("echo once >> runs", tmp_path)
    await asyncio.gather(*(commands.start("k", wanted) for _ in range(4)))
    assert await commands.ended("k") == CommandEnd(0)
    await commands.start("k", wanted)
    assert await commands.ended("k") == CommandEnd(0)
    assert (tmp_path / "runs").read_text() == "once\n"
    assert await commands.ended("unknown") is None


async def test_what_it_leaves_running_ends_with_it(commands: LocalCommands, tmp_path: Path) -> None:
    """Given a command that leaves a process in its group, which ignores SIGTERM, when it ends, then so does that."""
    os.mkfifo(tmp_path / "go")
    await commands.start("k", process("(trap '' TERM; exec sleep 1000) & echo $! > left; read _ < go", tmp_path))
    await asyncio.to_thread((tmp_path / "go").write_text, "\n")
    left = int((tmp_path / "left").read_text())
    assert await commands.ended("k") == CommandEnd(0)
    assert is_gone(left)


async def test_a_flood_of_output(commands: LocalCommands, tmp_path: Path) -> None:
    """Given a command that writes without end, then only the newest of it is on the disk; who reads from the beginning
    learns where what is left begins."""
    await commands.start("k", process("head -c 1000000 /dev/zero | tr '\\0' x; echo; echo the end", tmp_path))
    await commands.ended("k")
    kept = sum(file.stat().st_size for file in (tmp_path / "commands" / "k").glob("output.*"))
    assert kept <= 2 * PART
    size = 1_000_000 + len("\nthe end\n")
    assert commands.read("k", None, 9) == (size - 9, b"\nthe end\n", size)
    start, data, _ = commands.read("k", 0, 10)
    assert (start, data) == (size - kept, b"x" * 10)
    start, data, _ = commands.read("k", size - kept + PART - 5, 10)
    assert (start, data) == (size - kept + PART - 5, b"x" * 10)


async def test_what_cannot_be_started(commands: LocalCommands, tmp_path: Path) -> None:
    """Given a directory that is not there, then the end says that it could not be started, and why."""
    await commands.start("k", process("true", tmp_path / "nowhere"))
    assert await commands.ended("k") == CommandEnd(problem="could not be started: No such file or directory")


async def test_the_next_service_finds_it(commands: LocalCommands, tmp_path: Path) -> None:
    """Given a command whose service has gone, when another one opens the directory, then it hears of its end."""
    os.mkfifo(tmp_path / "go")
    await commands.start("k", process("read code < go; exit $code", tmp_path))
    commands.close()
    following = LocalCommands(str(tmp_path / "commands"))
    following.open()
    assert following.known() == ["k"]
    end = asyncio.create_task(following.ended("k"))  # type: ignore[var-annotated]
    (tmp_path / "go").write_text("7\n")
    assert (await end) == CommandEnd(7)
    following.close()


@pytest.mark.thorough
async def test_nobody_looks_after_it(commands: LocalCommands, tmp_path: Path) -> None:
    """Given a command that no service looks after for longer than is borne, then it is ended, and says why."""
    await commands.start("k", process("exec sleep 1000", tmp_path))
    commands.close()
    end = await commands.ended("k")
    assert end is not None
    assert "no node service has looked after it" in end.problem


async def test_the_longest_time(tmp_path: Path) -> None:
    """Given a command that is at work for longer than any may, then it is ended, and says why."""
    commands = LocalCommands(str(tmp_path / "commands"), seconds=0.2)
    commands.open()
    await commands.start("k", process("exec sleep 1000", tmp_path))
    end = await commands.ended("k")
    assert end is not None
    assert "which is the longest" in end.problem
    commands.close()


async def test_a_number_that_is_used_again(commands: LocalCommands, tmp_path: Path) -> None:
    """Given a runner's file with the number of a process that began at another time, then that is not signalled."""
    await commands.start("k", process("exec sleep 1000", tmp_path))
    path = tmp_path / "commands" / "k" / "runner"
    runner = path.read_text()
    other = await asyncio.create_subprocess_exec("sleep", "1000")
    path.write_text(json.dumps({"pid": other.pid, "start": start_time(other.pid) + 1}))
    commands.stop("k", force=True)
    end = await commands.ended("k")
    assert end is not None
    assert "is lost" in end.problem
    assert start_time(other.pid) > 0
    assert other.returncode is None
    path.write_text(runner)
    commands.stop("k", force=True)
    assert await commands.ended("k") == CommandEnd(-9)
    other.kill()
    await other.wait()


async def test_a_runner_that_was_killed(commands: LocalCommands, tmp_path: Path) -> None:
    """Given a command whose runner was killed, then it is lost, with the end of its output, which has no secret; who
    does not know what is one says nothing of that."""
    await commands.start("k", process("echo sesame-street; exec sleep 1000", tmp_path))
    await commands.grown("k", 0, 20.0)
    os.kill(json.loads((tmp_path / "commands" / "k" / "runner").read_text())["pid"], signal.SIGKILL)
    lost = CommandEnd(problem="is lost: what ran it was killed", lost=True)
    assert await commands.ended("k") == replace(lost, tail="***\n")
    assert await LocalCommands(str(tmp_path / "commands")).ended("k") == lost


async def test_what_is_left_of_nodes_that_are_gone(tmp_path: Path) -> None:
    """Given directories of other nodes, when a service begins, then those go in which nothing lives and nothing has
    changed for long."""
    gone, busy, young = (tmp_path / f"{COMMANDS_PREFIX}{name}" for name in ("gone", "busy", "young"))
    others = [LocalCommands(str(path)) for path in (gone, busy, young)]
    for other in others:
        other.open()
        await other.start("k", process("true", tmp_path))
        await other.ended("k")
    others[0].close()
    others[2].close()
    long_ago = time.time() - FORGOTTEN_SECONDS - 60
    for path in (gone, busy):
        for entry in (*path.iterdir(), path):
            os.utime(entry, (long_ago, long_ago))
    here = LocalCommands(str(tmp_path / f"{COMMANDS_PREFIX}here"))
    here.open()
    assert [path.exists() for path in (gone, busy, young)] == [False, True, True]
    here.close()
    others[1].close()


async def test_a_start_returns_when_the_command_can_be_found(commands: LocalCommands, tmp_path: Path) -> None:
    """Given starts of one key at the same time, when each returns, then the command can be found."""

    async def one(key: str) -> bool:
        await commands.start(key, process("true", tmp_path))
        return await commands.ended(key) is not None

    place = tmp_path / "commands" / "k"
    place.mkdir(mode=0o700)
    lock = os.open(place / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)  # another runner, before it has begun
    starting = asyncio.ensure_future(one("k"))
    await asyncio.wait((starting,), timeout=1)
    assert not starting.done()
    os.close(lock)
    assert await starting


async def test_a_full_disk(commands: LocalCommands, tmp_path: Path) -> None:
    """Given a disk that takes no more bytes, when a command is started, then that fails, and nothing is executed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # files can be made, and take no bytes
    try:
        with pytest.raises(OSError, match="its runner failed"):
            await commands.start("k", process(f"mkdir {tmp_path}/executed", tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert commands.known() == []
    assert not (tmp_path / "executed").exists()


async def test_without_descriptors(commands: LocalCommands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a process that has no descriptor left, when it asks for a command at work, then that is not lost."""
    await commands.start("k", process("sleep 1000", tmp_path))

    def none_left(_pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pidfd_open", none_left)
        with pytest.raises(OSError, match="Too many open files"):
            await commands.ended("k")
