"""One directory that file tools are confined to, and how its files are walked, read and searched.

Every path a model names is resolved to a name without symbolic links, which must lie in the workspace. Such a name is
then opened from the descriptor of the workspace's directory, one part after the other, each without following a link
(`openat(2)` with `O_NOFOLLOW`). So another process that exchanges a directory for a link between the two gets an error
from the tool, and nothing outside is read or written. Hard links and mounts in the workspace are part of it: see
docs/sandbox.md. Imports little: `grep` runs `search` in a process of its own.
"""

from __future__ import annotations

import errno
import fcntl
import fnmatch
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from understudy.errors import ToolError, WorkspaceViolation

SKIPPED_DIRECTORIES = frozenset(
    {".git", ".hg", ".svn", "node_modules", "__pycache__", ".venv", "venv", ".tox", ".nox"}
    | {".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis"}
)
"""Directories that `walk` leaves out: generated, or not the user's own text."""

MAX_WALKED = 100_000
"""Directory entries that one `walk` looks at before it stops."""

MAX_DEPTH = 100
"""Levels of directories that one `walk` goes down: it holds a descriptor for each."""

MAX_LINE_BYTES = 20_000
"""A longer line is cut when it is read."""

MAX_MATCHES = 200
MAX_MATCH_CHARACTERS = 300
TEMPORARY_PREFIX = ".understudy-"

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def _reported(shown: str) -> Iterator[None]:
    """Turn an operating system error into one that a model can act on, without telling it absolute paths."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ELOOP:  # of `O_NOFOLLOW`: the name had no links when it was resolved
            raise WorkspaceViolation(f"{shown}: a part of it became a symbolic link meanwhile") from error
        raise ToolError(f"{shown}: {error.strerror or type(error).__name__}") from error


class Workspace:
    """A directory that paths can't leave.

    Raises:
        ToolError: there is no workspace, or it is not a directory.
    """

    def __init__(self, root: str | None) -> None:
        if not root:
            raise ToolError(
                "this agent has no workspace: set `workspace` in its specification to use files and commands"
            )
        self.root = Path(os.path.realpath(root))
        if not self.root.is_dir():
            raise ToolError("the workspace of this agent does not exist, or is not a directory, on this node")

    def resolve(self, path: str) -> Path:
        """The real location of `path`, which need not exist; the result contains no symbolic link.

        Raises:
            WorkspaceViolation: the path leads outside, has a `..` part, or is no possible path.
        """
        shown = _shorten(path)
        try:
            os.fsencode(path)
        except UnicodeEncodeError:
            raise WorkspaceViolation(f"{shown}: a path must be encodable as UTF-8") from None
        if "\0" in path:
            raise WorkspaceViolation(f"{shown}: a path can't contain NUL")
        if ".." in path.split("/"):
            raise WorkspaceViolation(f"{shown}: `..` is not allowed; name the path from the workspace's root")
        with _reported(shown):
            location = Path(os.path.realpath(self.root / path))
        # After a loop of links realpath returns the rest of the path as it is, with links that may lead anywhere.
        unresolved = any(os.path.islink(part) for part in (location, *location.parents))
        if unresolved or not location.is_relative_to(self.root):
            raise WorkspaceViolation(f"{shown}: leads outside the workspace")
        return location

    def existing(self, path: str) -> Path:
        """Like `resolve`, for a file or directory that must exist.

        Raises:
            ToolError: also when it does not exist or can't be looked at.
        """
        location = self.resolve(path)
        with _reported(_shorten(path)), self._parent(location) as (directory, name):
            os.stat(name, dir_fd=directory, follow_symlinks=False)
        return location

    def shown(self, location: Path) -> str:
        """A resolved location as a model names it: relative to the root, with forward slashes."""
        return _shorten(location.relative_to(self.root).as_posix())

    @contextmanager
    def _directory(self, location: Path, *, create: bool = False) -> Iterator[int]:
        """A descriptor of the directory at a resolved location, which no symbolic link leads to."""
        descriptor = os.open(self.root, _DIRECTORY)
        try:
            for part in location.relative_to(self.root).parts:
                if create:
                    with suppress(FileExistsError):
                        os.mkdir(part, dir_fd=descriptor)
                inner = _open_directory(part, descriptor)
                os.close(descriptor)
                descriptor = inner
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def _parent(self, location: Path, *, create: bool = False) -> Iterator[tuple[int, str]]:
        """The directory that a resolved location is in, and its name there; `.` for the root."""
        parent = location.parent if location != self.root else location
        with self._directory(parent, create=create) as descriptor:
            yield descriptor, location.name if location != self.root else "."

    def open_file(self, location: Path) -> BinaryIO:
        """Open a resolved location for reading.

        Raises:
            ToolError: it does not exist or is no regular file (a directory, a device, a pipe).
            WorkspaceViolation: a part of it became a symbolic link since it was resolved.
        """
        shown = self.shown(location)
        with _reported(shown), self._parent(location) as (directory, name):
            # Before the open, because opening a device can have effects; after it, because it may be another one then.
            _require_regular(os.stat(name, dir_fd=directory, follow_symlinks=False), shown)
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(name, flags, dir_fd=directory)
            try:
                _require_regular(os.fstat(descriptor), shown)
            except BaseException:
                os.close(descriptor)
                raise
            return os.fdopen(descriptor, "rb")

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Nobody else changes a file by these tools meanwhile: no call of the same round, and no other process that has
        this workspace. Whoever dies lets go (`flock(2)`).

        Raises:
            ToolError: the operating system refused.
        """
        with _reported("."):
            directory = os.open(self.root, _DIRECTORY)
        try:
            with _reported("."):
                fcntl.flock(directory, fcntl.LOCK_EX)
            yield
        finally:
            os.close(directory)

    def replace_file(self, location: Path, data: bytes) -> None:
        """Write `data` to a resolved location, all or nothing, durably; parents are created, permissions are kept.

        A process killed in between leaves the old content, and at worst a hidden temporary file beside it.

        Raises:
            ToolError: the location is a directory or special file, or the operating system refused.
            WorkspaceViolation: a part of it became a symbolic link since it was resolved.
        """
        shown = self.shown(location)
        with _reported(shown), self._parent(location, create=True) as (directory, name):
            mode = None
            with suppress(FileNotFoundError):
                found = os.stat(name, dir_fd=directory, follow_symlinks=False)
                _require_regular(found, shown)
                mode = stat.S_IMODE(found.st_mode) & 0o777  # a new file is not set-user-ID because an old one was
            temporary = TEMPORARY_PREFIX + os.urandom(8).hex()
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                with os.fdopen(os.open(temporary, flags, 0o666, dir_fd=directory), "wb") as stream:
                    if mode is not None:
                        os.fchmod(stream.fileno(), mode)
                    stream.write(data)
                    stream.flush()
                    os.fsync(stream.fileno())
                os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
            except BaseException:
                with suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=directory)
                raise
            os.fsync(directory)

    def is_directory(self, location: Path) -> bool:
        """Whether there is a directory at a resolved location."""
        try:
            with self._directory(location):
                return True
        except OSError:
            return False

    def remove_file(self, location: Path) -> None:
        """Remove a resolved location, durably; nothing is done if there is no file.

        Raises:
            ToolError: it is a directory or special file, or the operating system refused.
            WorkspaceViolation: a part of it became a symbolic link since it was resolved.
        """
        shown = self.shown(location)
        with _reported(shown), self._parent(location) as (directory, name):
            try:
                _require_regular(os.stat(name, dir_fd=directory, follow_symlinks=False), shown)
            except FileNotFoundError:
                return
            os.unlink(name, dir_fd=directory)
            os.fsync(directory)

    def walk(self, start: Path) -> Iterator[Path]:
        """Every regular file below a resolved location, sorted within each directory; links are left out.

        Stops after `MAX_WALKED` entries, and goes down `MAX_DEPTH` levels.
        """
        with suppress(OSError), self._directory(start) as descriptor:
            yield from self._walk(descriptor, start, MAX_DEPTH, [MAX_WALKED])

    def _walk(self, descriptor: int, place: Path, levels: int, left: list[int]) -> Iterator[Path]:
        with os.scandir(descriptor) as scan:
            entries = sorted(islice(scan, left[0] + 1), key=lambda entry: entry.name)
        directories = []
        for entry in entries:
            left[0] -= 1
            if left[0] < 0:
                return
            if entry.is_dir(follow_symlinks=False):
                if entry.name not in SKIPPED_DIRECTORIES:
                    directories.append(entry.name)
            elif entry.is_file(follow_symlinks=False) and not entry.name.startswith(TEMPORARY_PREFIX):
                yield place / entry.name
        for name in directories if levels else ():
            try:
                inner = _open_directory(name, descriptor)
            except OSError:
                continue  # unreadable, or gone meanwhile: the rest is still worth finding
            try:
                with suppress(OSError):
                    yield from self._walk(inner, place / name, levels - 1, left)
            finally:
                os.close(inner)


def _open_directory(name: str, parent: int) -> int:
    """A descriptor of a directory in another one. Raises `OSError`: of a symbolic link, always with `ELOOP`."""
    try:
        return os.open(name, _DIRECTORY, dir_fd=parent)
    except NotADirectoryError:  # what the kernel says of a symbolic link, too, if it is asked for a directory
        if stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None
        raise


def _require_regular(found: os.stat_result, shown: str) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise ToolError(f"{shown}: is a directory")
    if not stat.S_ISREG(found.st_mode):
        raise ToolError(f"{shown}: is not a regular file")


def _shorten(path: str) -> str:
    text = path if path.isprintable() else repr(path)
    return text if len(text) <= 300 else f"{text[:300]}…"


def compile_glob(pattern: str) -> Callable[[tuple[str, ...]], bool]:
    """A test for the parts of a relative path; `**` stands for any number of directories."""
    steps = [
        None if part == "**" else re.compile(fnmatch.translate(part))
        for part in pattern.split("/")
        if part not in ("", ".")
    ]

    def skip(positions: set[int]) -> set[int]:
        """Also the positions behind a `**`, which may stand for nothing."""
        reached = set(positions)
        for position in range(len(steps)):
            if position in reached and steps[position] is None:
                reached.add(position + 1)
        return reached

    def matches(parts: tuple[str, ...]) -> bool:
        positions = skip({0})
        for part in parts:
            moved = set()
            for position in positions - {len(steps)}:
                step = steps[position]
                if step is None:
                    moved.add(position)
                elif step.match(part):
                    moved.add(position + 1)
            positions = skip(moved)
        return len(steps) in positions

    return matches


def read_lines(stream: BinaryIO) -> Iterator[bytes]:
    """The lines of a stream with their ends, in bounded memory: what a line has beyond `MAX_LINE_BYTES` is dropped."""
    while line := stream.readline(MAX_LINE_BYTES):
        if len(line) < MAX_LINE_BYTES or line.endswith(b"\n"):
            yield line
            continue
        while (rest := stream.readline(65_536)) and not rest.endswith(b"\n"):
            pass
        yield line + "… [line cut]\n".encode()


def refuse_binary(stream: BinaryIO, shown: str) -> None:
    """Raise `ToolError` if a file just opened is not text."""
    if b"\0" in stream.read(8192):
        raise ToolError(f"{shown}: is a binary file")
    stream.seek(0)


def search(root: str, start: str, pattern: str, glob: str | None, ignore_case: bool) -> list[str]:
    """The matches of `grep`, one more than it shows if there are more; runs in a process of its own."""
    workspace = Workspace(root)
    expression = re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    matches = compile_glob(glob if "/" in glob else f"**/{glob}") if glob else None
    base = Path(start)
    found: list[str] = []
    for file in workspace.walk(base) if workspace.is_directory(base) else [base]:
        if matches and not matches(file.relative_to(base).parts or (file.name,)):
            continue
        shown = workspace.shown(file)
        try:
            with workspace.open_file(file) as stream:
                refuse_binary(stream, shown)
                for number, line in enumerate(read_lines(stream), start=1):
                    text = line.decode(errors="replace").rstrip("\r\n")
                    if expression.search(text):
                        cut = "…" if len(text) > MAX_MATCH_CHARACTERS else ""
                        found.append(f"{shown}:{number}: {text[:MAX_MATCH_CHARACTERS]}{cut}")
                        if len(found) > MAX_MATCHES:
                            return found
        except ToolError:
            if file == base:
                raise  # the one file asked for; among many, those that can't be read are left out
    return found
