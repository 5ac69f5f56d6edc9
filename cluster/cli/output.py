"""Where commands write to: stdout, and the file or pipe that somebody named."""

from __future__ import annotations

import errno
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from understudy.errors import InvalidInput, OutputFailed

NO_MORE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPIPE, errno.EIO, errno.EBADF}
"""What a stdout that takes no more says."""


@contextmanager
def to_stdout() -> Iterator[None]:
    """What is printed within has arrived at the end. Raises `OutputFailed` where stdout takes no more."""
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in NO_MORE or error.filename is not None:
            raise
        # What is left in the buffer would fail again when the interpreter ends, with a message of its own.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise OutputFailed(f"the output can't be written: {error.strerror}") from None


def check_target(name: str, *, force: bool) -> None:
    """Refuse what can't be a command's output before there is any.

    Raises:
        InvalidInput: it is a directory, a socket or a disk, or a file and `force` is false.
    """
    mode = _mode(name)
    if mode is None and not os.path.islink(name):
        return
    if mode is not None and stat.S_ISDIR(mode):
        raise InvalidInput(f"{name} is a directory: name a file in it")
    if mode is not None and not stat.S_ISREG(mode) and not _is_stream(mode):
        raise InvalidInput(f"{name} is neither a file nor a pipe")
    if not force and not (mode is not None and _is_stream(mode)):
        raise InvalidInput(f"{name} exists; --force overwrites it")


def write(name: str, lines: Iterable[str], advance: Callable[[int], None]) -> None:
    """Write a checked target: a file as a whole or not at all, and for this user only (it holds whole conversations).

    A symlink stays, and what it leads to is replaced. A pipe or a terminal is written into.
    """
    mode = _mode(name)
    if mode is not None and _is_stream(mode):
        with _refusing_unwritable(name):
            handle = os.open(name, os.O_WRONLY)
        _fill(name, handle, lines, advance)
        return
    target = Path(os.path.realpath(name))
    with _refusing_unwritable(name):
        handle, made = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:100]}-")
    try:
        _fill(name, handle, lines, advance)
        with _refusing_unwritable(name):
            os.replace(made, target)
    finally:
        Path(made).unlink(missing_ok=True)


def _fill(name: str, handle: int, lines: Iterable[str], advance: Callable[[int], None]) -> None:
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            for line in lines:
                file.write(line)
                advance(line.startswith(("\n{", ",\n{")))
    except OSError as error:
        raise OutputFailed(f"{name} can't be written: {error.strerror}") from None


@contextmanager
def _refusing_unwritable(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidInput(f"{name} can't be written: {error.strerror}") from None


def _mode(name: str) -> int | None:
    """Of what a name leads to; None if there is nothing."""
    try:
        return os.stat(name).st_mode
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{name} can't be written: {getattr(error, 'strerror', error)}") from None


def _is_stream(mode: int) -> bool:
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)
