"""In what commands of an agent run: a backend makes a command line that confines another one. See docs/sandbox.md."""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from understudy.config import state_home
from understudy.confinement import Confinement
from understudy.errors import InvalidConfiguration, ToolError

from .guarded import Ended, run
from .system_calls import filter_file

PROBE_SECONDS = 10

PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
"""What programs and libraries are in; some are links into /usr."""

ETC = (
    "alternatives", "ca-certificates", "ca-certificates.conf", "group", "host.conf", "hosts", "ld.so.cache",
    "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types", "nsswitch.conf", "passwd", "pki/ca-trust", "pki/tls/certs",
    "protocols", "services", "ssl/certs", "ssl/openssl.cnf", "terminfo", "timezone",
)  # fmt: skip
"""What programs read in /etc; nothing of it is secret. All else is left out: the files of root have the owner that a
command of root's has, too."""

ETC_NETWORK = ("gai.conf", "resolv.conf")

STANDARD_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"

NOBODY = 65534
"""The user that a command of root's believes to be: programs do for root what is not permitted here."""

FILTERED = """
exec 9<"$0"
exec "$@"
"""
"""bubblewrap takes the filter of system calls from a descriptor; the command does not have it."""

LIMITED = """
{ ulimit -c 0; ulimit -v "$1"; ulimit -f "$2"; [ -z "$3" ] || ulimit -u "$3"; } 2>/dev/null
shift 3
exec "$@"
"""
"""Set in the sandbox: there the limit of processes counts those in it, and outside it would count all of the user's.
Where a limit is lower already, it stays, and `ulimit` complains."""


class Backend(Protocol):
    """Makes command lines that confine a command; `guarded.run` runs them, and so may anything else.

    Attributes:
        name: as `Sandbox.backend` has it.
    """

    @property
    def name(self) -> str: ...

    def command_line(
        self, command: Sequence[str], workspace: str | None, confinement: Confinement, code: Sequence[str] = ()
    ) -> list[str]:
        """The command line to run in place of `command`; the process that it is killed with takes all others along.
        Raises `ToolError` if there is no such line.

        Args:
            command: the program, by its name or path, and its arguments.
            workspace: real path of a directory that the command may change, and begins in.
            code: files and directories that it must be able to read, beside what `confinement` names.
        """

    def environment(self, more: Mapping[str, str]) -> dict[str, str]:
        """The whole environment for that command line, with these variables."""


def limited(command: Sequence[str], confinement: Confinement, processes: int | None) -> list[str]:
    """The command with limits of its own, and with SIGTERM as a command expects it."""
    sizes = f"{confinement.memory >> 10}", f"{confinement.file_size >> 10}", f"{processes or ''}"
    return ["env", "--default-signal=TERM", "bash", "-c", LIMITED, "bash", *sizes, *command]


class Plain:
    """No sandbox: the command may do all that this process may. Limits of memory and of files hold."""

    name = "none"

    def command_line(
        self, command: Sequence[str], workspace: str | None, confinement: Confinement, code: Sequence[str] = ()
    ) -> list[str]:
        """See `Backend`."""
        return limited(command, confinement, None)

    def environment(self, more: Mapping[str, str]) -> dict[str, str]:
        """That of this process, which has what tools get and no more (`understudy.environment`)."""
        return {**os.environ, **more}


class Bubblewrap:
    """Namespaces of its own for users, processes, files, network, IPC, host name and cgroups, without capabilities."""

    name = "bubblewrap"

    def command_line(
        self, command: Sequence[str], workspace: str | None, confinement: Confinement, code: Sequence[str] = ()
    ) -> list[str]:
        """See `Backend`. A command sees programs and libraries, this Python and what is named, all read-only; /tmp,
        /dev and /proc of its own; its workspace."""
        if workspace == "/":
            raise ToolError("the workspace of this agent is the root directory, which no sandbox can confine it to")
        user, group = (os.getuid() or NOBODY, os.getgid() or NOBODY)
        temporary = ("--size", f"{confinement.temporary}", "--tmpfs")
        program, calls = shutil.which("bwrap") or "bwrap", filter_file()
        line = [
            *(("/bin/sh", "-c", FILTERED, str(calls), program, "--seccomp", "9") if calls is not None else (program,)),
            "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
            *(() if confinement.network else ("--unshare-net",)),
            # The guard's session has no terminal; a session of its own keeps `kill 0` from the guard.
            "--disable-userns", "--die-with-parent", "--new-session", "--cap-drop", "ALL",
            "--uid", f"{user}", "--gid", f"{group}", "--hostname", "sandbox",
            # Read-only: the kernel's settings in there are root's, whose commands need no capability to change them.
            "--proc", "/proc", "--remount-ro", "/proc",
            "--dev", "/dev", *temporary, "/dev/shm", "--remount-ro", "/dev",
            *temporary, "/tmp", "--symlink", "/tmp", "/var/tmp",
        ]  # fmt: skip
        for path in PROGRAMS:
            link = os.path.islink(path)
            line += ["--symlink", os.readlink(path), path] if link else ["--ro-bind-try", path, path]
        for name in (*ETC, *(ETC_NETWORK if confinement.network else ())):
            line += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        line += self._mounts(workspace, (*_interpreter(), *confinement.readable, *code), confinement)
        line += ["--remount-ro", "/", "--chdir", workspace or "/tmp", "--"]
        return line + limited(command, confinement, confinement.processes)

    @staticmethod
    def _mounts(workspace: str | None, readable: Sequence[str], confinement: Confinement) -> list[str]:
        """The workspace, and what else is there to be read: the outer one first, as a mount covers what is below."""
        mounts = {os.path.normpath(path): "--ro-bind-try" for path in readable}
        mounts |= dict.fromkeys(confinement.writable, "--bind-try")
        if confinement.repository:
            mounts |= _of_repository(confinement.repository, confinement.worktree)
        if workspace is not None:
            mounts[workspace] = "--bind"
        line: list[str] = []
        for path, how in sorted(mounts.items(), key=lambda item: (item[0].count("/"), item[0])):
            line += [how, path, path]
        for path in _hidden():
            if any(Path(path).is_relative_to(outer) for outer in mounts) and os.path.isdir(path):
                line += ["--tmpfs", path, "--remount-ro", path]
        return line

    def environment(self, more: Mapping[str, str]) -> dict[str, str]:
        """Nothing of this process's, also not for bubblewrap itself: commands can read its environment."""
        kept = {name: value for name, value in os.environ.items() if name in ("LANG", "LC_ALL", "LC_CTYPE", "TZ")}
        path = f"{sys.prefix}/bin:{STANDARD_PATH}"
        return {**kept, "PATH": path, "HOME": "/tmp", "USER": "agent", "LOGNAME": "agent", "TERM": "dumb", **more}


def _of_repository(repository: str, worktree: str) -> dict[str, str]:
    """What git needs in a worktree: to read the repository, and to write what a commit does. Not its configuration and
    hooks, by which a command would decide what others execute."""
    common = os.path.join(os.path.realpath(repository), ".git")
    written = ("objects", "refs", "logs", f"worktrees/{worktree}")
    mounts = {common: "--ro-bind-try", **{os.path.join(common, name): "--bind-try" for name in written}}
    # What an agent has put a link in the place of would lead elsewhere.
    return {path: how for path, how in mounts.items() if os.path.realpath(path) == path}


def _interpreter() -> list[str]:
    """Directories of this Python and of the packages installed with it."""
    return sorted({path for path in (sys.prefix, sys.base_prefix) if len(Path(path).parts) > 2})


def _hidden() -> list[str]:
    """Directories of ours, and of Ray's, that no command may see, even where a workspace contains them."""
    temporary = os.path.realpath(tempfile.gettempdir())
    rays = (os.environ.get("RAY_TMPDIR") or temporary, "/tmp")
    found = {f"{temporary}/understudy-{os.getuid()}", *(f"{os.path.realpath(path)}/ray" for path in rays)}
    try:
        found.add(os.path.realpath(state_home()))
    except InvalidConfiguration:
        pass  # there is none
    return sorted(found)


@functools.cache
def bubblewrap_problem() -> str | None:
    """Why bubblewrap does not work here; None if it does. It is tried once per process."""
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed on this node (Debian, Ubuntu: apt-get install bubblewrap)"
    backend = Bubblewrap()
    line = backend.command_line(["true"], None, Confinement())
    try:
        tried = subprocess.run(
            line, env=backend.environment({}), cwd="/", stdin=subprocess.DEVNULL, capture_output=True,
            timeout=PROBE_SECONDS,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return f"bubblewrap does not work on this node: {error}"
    if tried.returncode:
        reason = tried.stderr.decode(errors="replace").strip()[-300:] or f"exit code {tried.returncode}"
        return f"bubblewrap does not work on this node ({reason}): it needs user namespaces, see docs/sandbox.md"
    return None


def sandbox_here() -> str:
    """For people: whether commands of agents can be confined on this machine."""
    problem = bubblewrap_problem()
    if problem is None:
        return "bubblewrap works"
    return f'none: {problem}. `bash` is refused here, unless an agent has sandbox="none"'


def backend_of(confinement: Confinement) -> Backend:
    """The backend that the agent's commands run with, here. May take some milliseconds the first time.

    Raises:
        ToolError: there is none that works; nothing runs without a sandbox unless the agent's specification says so.
    """
    if confinement.backend == "none":
        return Plain()
    problem = bubblewrap_problem()
    if problem is not None:
        raise ToolError(
            f'{problem}. Nothing was executed. `sandbox="none"` in the agent\'s specification permits commands without '
            "a sandbox."
        )
    return Bubblewrap()


@dataclass(frozen=True)
class Confined:
    """What a command is executed as, in its sandbox.

    Attributes:
        arguments: program and arguments.
        directory: it begins there.
        environment: all variables that it has.
    """

    arguments: list[str]
    directory: str
    environment: dict[str, str]


async def confined(
    command: Sequence[str], workspace: str | None, confinement: Confinement, variables: Mapping[str, str],
    code: Sequence[str] = (),
) -> Confined:  # fmt: skip
    """How a command is executed in the agent's sandbox. See `Backend.command_line`.

    Args:
        variables: for its environment.

    Raises:
        ToolError: there is no sandbox that works.
    """
    backend = await asyncio.to_thread(backend_of, confinement)
    line = backend.command_line(command, workspace, confinement, code)
    return Confined(line, workspace or "/", backend.environment(variables))


async def run_confined(
    command: Sequence[str], workspace: str | None, confinement: Confinement, *, seconds: float | None, kept: int,
    variables: Mapping[str, str], code: Sequence[str] = (), sent: bytes | None = None,
) -> Ended:  # fmt: skip
    """Run a command in the agent's sandbox. See `confined` and `guarded.run`.

    Raises:
        ToolError: there is no sandbox, or the command can't be started.
    """
    return await run_to_its_end(
        await confined(command, workspace, confinement, variables, code), seconds=seconds, kept=kept, sent=sent
    )


async def run_to_its_end(made: Confined, *, seconds: float | None, kept: int, sent: bytes | None = None) -> Ended:
    """See `guarded.run`. Raises `ToolError`: the command can't be started."""
    try:
        return await run(
            made.arguments, directory=made.directory, environment=made.environment, seconds=seconds, kept=kept,
            sent=sent,
        )  # fmt: skip
    except OSError as error:
        raise ToolError(f"the command can't be started: {error.strerror or error}") from error
