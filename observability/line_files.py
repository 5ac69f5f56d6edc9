"""Files of lines that a process may die over."""

from __future__ import annotations

import os
from pathlib import Path


def append_lines(path: Path, data: bytes, *, sync: bool = False) -> None:
    """Append whole lines to a file, behind whatever a process that died within its last line has left there.

    Args:
        sync: return only when the disk has them.
    """
    is_new = not path.exists()
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                data = b"\n" + data
        file.write(data)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    if sync and is_new:  # the file's name as well
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
