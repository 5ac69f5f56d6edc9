"""What is measured of a node's memory: the machine's, or the container's."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from understudy.node.memory import measure

MIB = 1 << 20


def files(directory: Path, **contents: str) -> Path:
    """A control group's directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        (directory / f"memory.{name}").write_text(text)
    return directory


def test_version_2(tmp_path: Path) -> None:
    """A container's limit counts, its page cache does not, and the kernel's kills are counted."""
    files(
        tmp_path, max="104857600\n", current=f"{80 * MIB}\n", stat=f"anon 1\ninactive_file {10 * MIB}\n",
        events="low 0\noom 3\noom_kill 2\n",
    )  # fmt: skip
    found = measure([], tmp_path)
    assert (found.total, found.free, found.frame, found.killed) == (100 * MIB, 30 * MIB, 0, 2)


def test_version_1(tmp_path: Path) -> None:
    """The same where the machine has the older interface."""
    files(
        tmp_path / "memory", limit_in_bytes="104857600", usage_in_bytes=f"{80 * MIB}",
        stat=f"total_inactive_file {10 * MIB}", oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 2",
    )  # fmt: skip
    found = measure([], tmp_path)
    assert (found.total, found.free, found.killed) == (100 * MIB, 30 * MIB, 2)


@pytest.mark.parametrize(
    "contents",
    [{}, {"max": "max", "current": "5"}, {"max": str(1 << 60), "current": "5"}, {"max": "?", "current": "?"}],
)
def test_without_a_limit_the_machine_counts(contents: dict[str, str], tmp_path: Path) -> None:
    """No container, one without a limit, or one that can't be read: what the machine has."""
    found = measure([], files(tmp_path, **contents))
    assert found.total == psutil.virtual_memory().total
    assert 0 < found.free <= found.total


def test_frames_are_measured(tmp_path: Path) -> None:
    """The mean of what processes have for themselves; one that is gone does not count."""
    found = measure([os.getpid(), os.getpid(), 2**22 + 1], tmp_path)
    info = psutil.Process().memory_info()
    assert found.frame == pytest.approx(info.rss - info.shared, rel=0.2)
