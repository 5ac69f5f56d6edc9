"""What memory a node has left, measured where its frames run: the machine's, or the container's if that has less."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import psutil

from understudy.supervisor.capacity import Memory

CGROUPS = Path("/sys/fs/cgroup")


def measure(pids: Iterable[int], cgroups: Path = CGROUPS) -> Memory:
    """The memory of this node, and what these processes take for themselves on average.

    Page cache that nobody uses counts as free: it is given back when memory is short.
    """
    machine = psutil.virtual_memory()
    total, free, killed = machine.total, machine.available, 0
    limits = _version_2(cgroups) if (cgroups / "memory.current").exists() else _version_1(cgroups / "memory")
    if limits is not None:
        limit, used, killed = limits
        if limit < total:
            total, free = limit, min(free, max(0, limit - used))
    sizes = [size for size in map(_own, pids) if size]
    return Memory(total, free, sum(sizes) // len(sizes) if sizes else 0, killed)


def _own(pid: int) -> int:
    """Bytes that a process does not share with others; 0 if it is gone."""
    try:
        memory = psutil.Process(pid).memory_info()
    except psutil.Error:
        return 0
    return max(0, int(memory.rss) - int(getattr(memory, "shared", 0)))


def _version_2(group: Path) -> tuple[int, int, int] | None:
    """Limit, use and kills of a container under cgroup v2; None if there is no limit."""
    limit = _text(group / "memory.max")
    killed = _field(group / "memory.events", "oom_kill")
    if not limit.isdecimal():
        return None if not killed else (1 << 62, 0, killed)
    used = int(_text(group / "memory.current") or 0) - _field(group / "memory.stat", "inactive_file")
    return int(limit), used, killed


def _version_1(group: Path) -> tuple[int, int, int] | None:
    """The same under v1, where a limit beyond any machine's memory means none."""
    limit = _text(group / "memory.limit_in_bytes")
    if not limit.isdecimal():
        return None
    used = int(_text(group / "memory.usage_in_bytes") or 0) - _field(group / "memory.stat", "total_inactive_file")
    return int(limit), used, _field(group / "memory.oom_control", "oom_kill")


def _field(path: Path, name: str) -> int:
    """A number from a file of lines like `name number`; 0 if it is not there."""
    for line in _text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdecimal():
            return int(value)
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
