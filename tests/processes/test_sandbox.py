"""The sandbox and the file tools, under attack."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import select
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path

import pytest

from understudy.actors import guarded, sandbox
from understudy.actors.files import edit_file, glob, grep, read_file, write_file
from understudy.actors.sandbox import Bubblewrap, Plain, backend_of, bubblewrap_problem, sandbox_here
from understudy.actors.shell import bash
from understudy.actors.system_calls import ARCHITECTURES, program
from understudy.actors.tools import ToolContext
from understudy.confinement import Confinement
from understudy.errors import ToolError

from .attempts import PROGRAM, PYTHON, SHELL

pytestmark = [
    pytest.mark.skipif(bubblewrap_problem() is not None, reason=str(bubblewrap_problem())),
    pytest.mark.uvloop,
]

SECRET = "text of the host"
ESCAPED = re.compile(rf"ESCAPED|{SECRET}|root:\S*:\d+:")


def context_of(workspace: Path, **fields: object) -> ToolContext:
    confinement = Confinement(**{"backend": "bubblewrap", "seconds": 60, **fields})  # type: ignore[arg-type]
    return ToolContext(
        session_id="s", run_id="r", round=1, call_id="c", epoch=1, agent="a", workspace=str(workspace),
        confinement=confinement,
    )  # fmt: skip


@dataclass
class Host:
    """What there is to get at outside of a workspace."""

    workspace: Path
    outside: Path
    names: dict[str, object]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A workspace beside a secret, sockets of all kinds, a System V shared memory, a secret in the environment, and an
    open file that children inherit, as Ray's logs are."""
    workspace, outside = tmp_path / "workspace", tmp_path / "outside"
    workspace.mkdir()
    outside.mkdir()
    (outside / "secret.txt").write_text(SECRET)
    monkeypatch.setenv("PLANTED_SECRET", SECRET)
    monkeypatch.chdir(outside)
    listening, abstract = outside / "node.sock", f"understudy-test-{os.getpid()}"
    ported, named, unnamed = (
        socket.create_server(("0.0.0.0", 0)),
        socket.socket(socket.AF_UNIX),
        socket.socket(socket.AF_UNIX),
    )
    named.bind(str(listening))
    unnamed.bind(f"\0{abstract}")
    for one in (named, unnamed):
        one.listen()
    log = os.open(tmp_path / "log", os.O_CREAT | os.O_RDWR)
    os.set_inheritable(log, True)
    libc, key = ctypes.CDLL(None), os.getpid() + 0x10000000
    shared = libc.shmget(key, 4096, 0o1666)
    names = {
        "secret": outside / "secret.txt", "workspace": workspace,
        "pid": os.getpid(), "prefix": sys.prefix, "socket": str(listening), "abstract": abstract,
        "port": ported.getsockname()[1], "address": socket.gethostbyname(socket.gethostname()), "key": key,
    }  # fmt: skip
    try:
        yield Host(workspace, outside, names)
    finally:
        os.close(log)
        libc.shmctl(shared, 0, None)
        for one in (ported, named, unnamed):
            one.close()


def shell_script(host: Host) -> str:
    """All attempts of the shell, each in a subshell and a directory of its own."""
    lines = [f"mkdir -p {host.workspace}/w; cd {host.workspace}/w"]
    for number, (name, text) in enumerate(SHELL.items()):
        attempt = text.format(**host.names)
        lines.append(f"echo; echo '{name}:'; (mkdir d{number}; cd {host.workspace}; {attempt}) 2>/dev/null")
    return "\n".join([*lines, "echo; echo all tried"])


def python_program(host: Host) -> str:
    return f"ATTEMPTS = { {name: text.format(**host.names) for name, text in PYTHON.items()}!r}\n{PROGRAM}"


def escapes(output: str, names: Iterable[str]) -> list[str]:
    """The attempts that succeeded, when all of these were made."""
    expected = [*names]
    assert "\nall tried\n" in output, output
    parts = re.split(rf"(?:^|\n)({'|'.join(map(re.escape, expected))}):", output)
    assert parts[1::2] == expected
    return [name for name, text in zip(parts[1::2], parts[2::2], strict=True) if ESCAPED.search(text)]


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_the_filter_is_what_its_rules_say(machine: str) -> None:
    """The files that are installed are those that the rules make."""
    assert files("understudy.actors").joinpath(f"system_calls.{machine}.bpf").read_bytes() == program(machine)


class TestAttempts:
    async def test_none_succeeds_in_bubblewrap(self, host: Host, capsys: pytest.CaptureFixture[str]) -> None:
        """By paths, links, `/proc`, devices, mounts, namespaces, sockets, signals, other calls of the kernel."""
        context = context_of(host.workspace, output=400_000)
        (host.workspace / "attempts.py").write_text(python_program(host))
        found = escapes(await bash(shell_script(host), context), SHELL)
        found += escapes(await bash("exec python attempts.py", context), PYTHON)
        with capsys.disabled():
            print(f"\n{len(SHELL) + len(PYTHON)} attempts in bubblewrap, {len(found)} escapes")
        assert found == []
        assert (host.outside / "secret.txt").read_text() == SECRET

    async def test_a_plain_shell_stops_little(self, host: Host) -> None:
        """Without a sandbox the same attempts succeed that need no more than the rights of the session's process: so
        they notice an escape."""
        context = context_of(host.workspace, backend="none", output=400_000)
        reading = ("read a file by its path", "read through a link made inside", "signal a process of the host")
        attempts = {name: SHELL[name] for name in reading}
        script = "\n".join(f"echo; echo '{name}:'; ({text.format(**host.names)})" for name, text in attempts.items())
        assert escapes(await bash(f"{script}\necho; echo all tried", context), reading) == list(reading)
        sockets = [name for name, text in PYTHON.items() if text.startswith("connect(") and "192" not in text]
        sockets = [name for name in sockets if "169" not in PYTHON[name] and "IPv6" not in name]
        program = f"ATTEMPTS = { {name: PYTHON[name].format(**host.names) for name in sockets}!r}\n{PROGRAM}"
        (host.workspace / "attempts.py").write_text(program)
        assert escapes(await bash(f"exec {sys.executable} attempts.py", context), sockets) == sockets

    async def test_none_succeeds_for_a_user_without_rights(
        self, host: Host, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The same for a user that is not root, with whom sessions usually run."""
        with of_user(host.workspace, monkeypatch) as (workspace, line):
            names = {**host.names, "workspace": workspace}
            script = shell_script(Host(workspace, host.outside, names))
            ended = await run_as_user(line(["bash", "-c", script]), workspace, 60)
        found = escapes(ended.output.decode(errors="replace"), SHELL)
        with capsys.disabled():
            print(f"\n{len(SHELL)} attempts of another user in bubblewrap, {len(found)} escapes")
        assert found == []


USER = 64_321


@contextmanager
def of_user(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, **fields: object
) -> Iterator[tuple[Path, Callable[[list[str]], list[str]]]]:
    """A workspace of a user without rights, and what makes the line by which that user runs a command in it."""
    confinement = Confinement(**{"backend": "bubblewrap", **fields})  # type: ignore[arg-type]
    if os.getuid():
        yield workspace, lambda command: Bubblewrap().command_line(command, str(workspace), confinement)
        return
    monkeypatch.setattr(sandbox, "_interpreter", list)  # that of root is not for others
    with tempfile.TemporaryDirectory(prefix="understudy-test-") as name:
        own = Path(name)
        own.chmod(0o755)
        os.chown(own, USER, USER)
        # Were there no limit in the sandbox, this one would save the machine.
        become = ["prlimit", "--nproc=300", "setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
        yield own, lambda command: [*become, *Bubblewrap().command_line(command, str(own), confinement)]


async def run_as_user(line: list[str], workspace: Path, seconds: float) -> guarded.Ended:
    environment = Bubblewrap().environment({})
    return await guarded.run(
        line, directory=str(workspace), environment=environment, seconds=seconds, kept=400_000
    )  # fmt: skip


def processes_of(user: int) -> int:
    """How many processes and threads a user has."""
    found = 0
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == user:
                found += len(os.listdir(entry / "task"))
    return found


def until_there_are(number: int) -> None:
    """Wait for processes that have ended: who adopts them reaps them when it likes."""
    until = time.monotonic() + 30
    while processes_of(os.getuid() or USER) > number:
        assert time.monotonic() < until
        time.sleep(0.01)


class TestLimits:
    async def test_files(self, host: Host) -> None:
        """No file is larger than allowed; /tmp and /dev/shm hold no more than allowed."""
        context = context_of(host.workspace, file_size=1 << 20, temporary=1 << 20)
        await bash("head -c 5000000 /dev/zero >big", context)
        assert (host.workspace / "big").stat().st_size == 1 << 20
        fill = "for i in 1 2 3 4 5; do head -c 1000000 /dev/zero >{0}/$i; done 2>/dev/null; du -skx {0} | cut -f1"
        for place in ("/tmp", "/dev/shm"):
            output = await bash(fill.format(place), context)
            assert int(output.split()[0]) <= 1024, output

    async def test_memory(self, host: Host) -> None:
        """A process that wants more memory than allowed, private or shared, does not get it."""
        context = context_of(host.workspace, memory=256 << 20)
        assert "MemoryError" in await bash("python -c 'bytearray(1 << 30)'", context)
        assert "Cannot allocate" in await bash("python -c 'import mmap; mmap.mmap(-1, 1 << 30)'", context)

    async def test_a_fork_bomb(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        """It gets as many processes as allowed, whatever else the user runs, and when its time is over none is left."""
        before = processes_of(os.getuid() or USER)
        with of_user(host.workspace, monkeypatch, processes=20) as (workspace, line):
            script = ":() { : | : & }; : & exec sleep 1000"
            bomb = asyncio.create_task(run_as_user(line(["bash", "-c", script]), workspace, 1))
            most = 0
            while not bomb.done():
                most = max(most, processes_of(os.getuid() or USER) - before)
                await asyncio.sleep(0.01)
            assert (await bomb).timed_out
        assert 10 <= most <= 20 + 3  # with bubblewrap itself
        await asyncio.to_thread(until_there_are, before)

    async def test_a_daemon(self, host: Host) -> None:
        """A process that leaves its session and its parent ends with the command all the same."""
        os.mkfifo(host.workspace / "alive")
        daemon = "exec 9>alive; setsid sh -c 'trap \"\" TERM HUP; echo begun >&9; sleep 1000 & sleep 1000' & sleep 0.2"
        command = asyncio.create_task(bash(daemon, context_of(host.workspace)))
        descriptor = await asyncio.to_thread(os.open, host.workspace / "alive", os.O_RDONLY)
        assert await asyncio.to_thread(os.read, descriptor, 10) == b"begun\n"
        assert "[exit code 0]" in await command
        poll = select.poll()
        poll.register(descriptor, select.POLLHUP)
        assert poll.poll(30_000)
        os.close(descriptor)


class TestFileTools:
    async def test_what_a_command_leaves_leads_nowhere(self, host: Host, capsys: pytest.CaptureFixture[str]) -> None:
        """Links, chains and loops of links, pipes, sockets, long paths and deep directories that were made in the
        sandbox: no file tool follows them out of the workspace, none blocks."""
        context = context_of(host.workspace)
        make = (
            "ln -s {secret} file; ln -s {outside} directory; ln -s file chain; ln -s directory/secret.txt through; "
            "ln -s ../outside relative; ln -s loop loop; ln -s /proc/self/root root; ln -s /proc/self/fd/0 descriptor; "
            "ln -s /dev/zero device; ln -s {workspace}/../outside/secret.txt up; mkfifo pipe; mkdir d; "
            "ln -s .. d/parent; ln -s ../../outside d/outside; "
            "python -c \"import socket; socket.socket(socket.AF_UNIX).bind('socket')\"; "
            'python -c "import os; [(os.mkdir(chr(100) * 200), os.chdir(chr(100) * 200)) for _ in range(150)]"'
        )
        await bash(make.format(**host.names, outside=host.outside), context)
        paths = [
            *("file", "directory/secret.txt", "chain", "through", "relative/secret.txt", "loop", "loop/x", "device"),
            *(f"root/{host.outside}/secret.txt", "descriptor", "up", "pipe", "socket", "d/parent/../../outside"),
            *("d/parent/directory/secret.txt", "d/outside/secret.txt", "/".join(["d" * 200] * 150), "d" * 200),
            *("..", "../outside/secret.txt", "d/../../outside/secret.txt", str(host.outside / "secret.txt")),
        ]
        tried = 0
        for path in paths:
            for attempt in (
                partial(read_file, path, context),
                partial(write_file, path, "planted", context),
                partial(edit_file, path, SECRET, "planted", context),
                partial(glob, "**/*", context, path=path),
            ):
                tried += 1
                with contextlib.suppress(ToolError):
                    assert SECRET not in attempt()
            with contextlib.suppress(ToolError):
                tried += 1
                assert SECRET not in await grep(SECRET, context, path=path)
        assert "secret.txt" not in glob("**/*", context)
        assert await grep(SECRET, context) == "no matches"
        assert [path.name for path in host.outside.iterdir() if path.is_file()] == ["secret.txt"]
        assert (host.outside / "secret.txt").read_text() == SECRET
        with capsys.disabled():
            print(f"\n{tried} attempts by file tools, 0 escapes")

    def test_links_that_come_and_go(self, host: Host, capsys: pytest.CaptureFixture[str]) -> None:
        """A directory, and a file, that another thread exchanges for links to the outside all the while: what is read
        and written is inside or refused, in every one of many attempts."""
        context, workspace = context_of(host.workspace), host.workspace
        (workspace / "d").mkdir()
        (workspace / "d" / "secret.txt").write_text("own")
        (host.outside / "only.txt").write_text(SECRET)
        (workspace / "f").write_text("own")
        stop = threading.Event()

        def exchange_directory() -> None:
            (workspace / "link").symlink_to(host.outside)
            names = (os.fsencode(workspace / name) for name in ("d", "link"))
            arguments = [argument for name in names for argument in (-100, ctypes.c_char_p(name))]
            libc = ctypes.CDLL(None)
            while not stop.is_set():
                libc.renameat2(*arguments, 2)  # RENAME_EXCHANGE

        def exchange_file() -> None:
            new = workspace / "new"
            while not stop.is_set():
                new.symlink_to(host.outside / "secret.txt")
                new.replace(workspace / "f")
                new.write_text("own")
                new.replace(workspace / "f")

        threads = [threading.Thread(target=exchange_directory), threading.Thread(target=exchange_file)]
        for thread in threads:
            thread.start()
        outcomes: Counter[str] = Counter()

        def attempt(function: Callable[[], str]) -> str:
            try:
                found = function()
            except ToolError as error:
                outcomes["refused" if "symbolic link" in error.message or "outside" in error.message else "gone"] += 1
                return ""
            outcomes["done"] += 1
            return found

        try:
            for number in range(RACES):
                assert attempt(lambda: read_file("d/secret.txt", context)) in ("", "own")
                assert SECRET not in attempt(lambda: read_file("f", context))
                assert "only.txt" not in attempt(lambda: glob("*", context, path="d"))
                if number % 10 == 0:
                    attempt(lambda: write_file("d/new/planted.txt", "x", context))
                    attempt(lambda: write_file("f", "own", context))
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert sorted(path.name for path in host.outside.iterdir()) == ["node.sock", "only.txt", "secret.txt"]
        assert (host.outside / "secret.txt").read_text() == SECRET
        with capsys.disabled():
            print(f"\n{sum(outcomes.values())} attempts in a race, 0 escapes: {dict(outcomes)}")
        assert min(outcomes["refused"], outcomes["done"]) > 0  # it was a race


RACES = 300


class TestBackend:
    def test_what_does_not_work_is_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without bubblewrap nothing runs unless the specification permits it; the error says what to install, or what
        went wrong."""
        monkeypatch.setattr(shutil, "which", lambda _: None)
        bubblewrap_problem.cache_clear()
        try:
            with pytest.raises(ToolError, match=r'apt-get install bubblewrap.*sandbox="none"'):
                backend_of(Confinement())
            assert "none: bubblewrap is not installed" in sandbox_here()
            assert isinstance(backend_of(Confinement(backend="none")), Plain)
            monkeypatch.undo()
            monkeypatch.setattr(sandbox, "PROGRAMS", ())
            bubblewrap_problem.cache_clear()
            with pytest.raises(ToolError, match=r"does not work on this node \(bwrap: execvp"):
                backend_of(Confinement())
        finally:
            bubblewrap_problem.cache_clear()

    async def test_the_root_is_no_workspace(self) -> None:
        """A workspace that has all files of the node is refused."""
        with pytest.raises(ToolError, match="root directory"):
            await bash("true", context_of(Path("/")))

    async def test_network_and_further_paths(self, host: Host) -> None:
        """What is allowed works: other paths can be read and not changed, and the network is there."""
        context = context_of(host.workspace, readable=(str(host.outside),), network=True)
        assert SECRET in await bash(f"cat {host.outside}/secret.txt; echo x >{host.outside}/secret.txt", context)
        assert (host.outside / "secret.txt").read_text() == SECRET
        connect = f"exec 3<>/dev/tcp/127.0.0.1/{host.names['port']} && echo connected"
        assert "connected" in await bash(connect, context)

    async def test_our_own_directories_stay_hidden(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where a workspace contains the directories of sockets, of Ray and of the store, they are empty in there."""
        monkeypatch.setattr(tempfile, "tempdir", str(host.workspace))
        monkeypatch.setenv("XDG_STATE_HOME", str(host.workspace / "state"))
        for name in (f"understudy-{os.getuid()}", "ray", "state"):
            (host.workspace / name).mkdir()
            (host.workspace / name / "file").write_text(SECRET)
        output = await bash("cat */file; ls -d */; touch */x", context_of(host.workspace))
        assert "state/" in output
        assert SECRET not in output
        assert sorted(path.name for path in host.workspace.rglob("x")) == []

    async def test_the_interpreter_in_a_workspace_is_read_only(
        self, host: Host, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What runs the session itself can't be changed from a sandbox whose workspace contains it."""
        (host.workspace / ".venv").mkdir()
        monkeypatch.setattr(sandbox, "_interpreter", lambda: [str(host.workspace / ".venv")])
        assert "Read-only" in await bash("touch own; touch .venv/x", context_of(host.workspace))
        assert os.listdir(host.workspace / ".venv") == []
        assert (host.workspace / "own").exists()
