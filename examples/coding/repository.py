"""A small git repository whose tests fail: what the coding agent is given, and how its work is judged."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from understudy.errors import InvalidInput

TEST_SECONDS = 60.0

FILES = {
    "README.md": """# Schedule

Busy times of a day, merged, and the free times between them. Times are minutes since midnight.

    python3 -m unittest
""",
    "schedule/__init__.py": '''"""Busy and free times of a day."""

from .free import free_times
from .merge import merged

__all__ = ["free_times", "merged"]
''',
    "schedule/merge.py": '''"""Merging of busy times."""


def merged(busy):
    """The busy times, `(start, end)` each, in order: those that overlap or touch are one."""
    result = []
    for start, end in sorted(busy):
        if result and start < result[-1][1]:
            result[-1] = (result[-1][0], end)
        else:
            result.append((start, end))
    return result
''',
    "schedule/free.py": '''"""The times between busy ones."""

from .merge import merged


def free_times(busy, opens, closes):
    """The free times from `opens` to `closes`, `(start, end)` each, in order."""
    result = []
    at = opens
    for start, end in merged(busy):
        if start > at:
            result.append((at, start))
        at = end
    if at < closes:
        result.append((at, closes))
    return result
''',
    "tests/__init__.py": "",
    "tests/test_schedule.py": """import unittest

from schedule import free_times, merged


class Merged(unittest.TestCase):
    def test_overlapping_times_are_one(self):
        self.assertEqual(merged([(60, 120), (90, 150)]), [(60, 150)])

    def test_touching_times_are_one(self):
        self.assertEqual(merged([(60, 120), (120, 150)]), [(60, 150)])

    def test_a_time_within_another_changes_nothing(self):
        self.assertEqual(merged([(60, 180), (90, 120)]), [(60, 180)])


class Free(unittest.TestCase):
    def test_between_busy_times(self):
        self.assertEqual(free_times([(600, 660), (720, 780)], 540, 1020), [(540, 600), (660, 720), (780, 1020)])

    def test_only_while_open(self):
        self.assertEqual(free_times([(480, 600), (960, 1100)], 540, 1020), [(600, 960)])

    def test_what_is_busy_before_opening_does_not_count(self):
        self.assertEqual(free_times([(300, 400)], 540, 1020), [(540, 1020)])


if __name__ == "__main__":
    unittest.main()
""",
    ".gitignore": "__pycache__/\n",
}


@dataclass(frozen=True)
class Judgement:
    """What became of a repository.

    Attributes:
        passes: whether its tests, which must be as they were, pass.
        commits: made since it was created.
        clean: nothing is left that is not committed.
    """

    passes: bool
    commits: int
    clean: bool


def create(directory: Path) -> None:
    """Make the repository in a directory, which must be empty or not be there. Raises `InvalidInput` otherwise."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InvalidInput(f"{directory} is not an empty directory: name another one, in which the repository is made")
    for name, text in FILES.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    _git(directory, "init", "--quiet", "--initial-branch", "main")
    for name, value in (("user.name", "Example"), ("user.email", "example@example.org"), ("commit.gpgsign", "false")):
        _git(directory, "config", name, value)
    _git(directory, "add", "--all")
    _git(directory, "commit", "--quiet", "--message", "Busy and free times of a day")


def judge(directory: Path) -> Judgement:
    """Run the tests, outside of any sandbox, and look at the history."""
    tests_unchanged = (directory / "tests/test_schedule.py").read_text() == FILES["tests/test_schedule.py"]
    tested = subprocess.run(
        [sys.executable, "-m", "unittest", "--quiet"], cwd=directory, capture_output=True, timeout=TEST_SECONDS,
        check=False,
    )  # fmt: skip
    commits = int(_git(directory, "rev-list", "--count", "HEAD")) - 1
    return Judgement(tests_unchanged and tested.returncode == 0, commits, not _git(directory, "status", "--porcelain"))


def _git(directory: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=directory, capture_output=True, text=True, timeout=30.0, check=True)
    return done.stdout
