"""A git repository for tests."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

IDENTITY = ("-c", "user.name=Tester", "-c", "user.email=tester@example.invalid")


def git(directory: Path, *arguments: str) -> str:
    """What a command of git writes in a directory."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(
        ["git", *IDENTITY, *arguments], cwd=directory, env=kept, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


def repository(directory: Path, files: dict[str, str] | None = None) -> Path:
    """A new repository with a commit of these files on its branch `main`."""
    directory.mkdir(parents=True)
    git(directory, "init", "--quiet", "--initial-branch=main")
    for name, content in (files or {"a.txt": "a\n", "b.txt": "b\n"}).items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    git(directory, "add", "--all")
    git(directory, "commit", "--quiet", "-m", "first")
    return directory


def branches(directory: Path) -> list[str]:
    """The branches of a repository but `main`."""
    found = git(directory, "for-each-ref", "--format=%(refname:short)", "refs/heads").splitlines()
    return [name for name in found if name != "main"]
