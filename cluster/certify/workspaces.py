"""The agents' workspaces under `understudy certify`: every run works in copies, which are compared afterwards."""

from __future__ import annotations

import difflib
import hashlib
import os
import shutil
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from understudy.errors import InvalidInput
from understudy.manifest import below, with_below

MAX_TEXT_BYTES = 100_000
"""Of larger files, and of those that are not text, a difference is reported but not shown."""

MAX_DIFF_LINES = 40


@dataclass(frozen=True)
class File:
    """What is compared of a file, a link or a directory; `text` is shown."""

    kind: str
    digest: str
    text: str | None = None


@dataclass(frozen=True)
class FileChange:
    """A path that is not as it was in the undisturbed run; `change` is `added`, `changed` or `removed`."""

    path: str
    change: str
    diff: str = ""


class Workspaces:
    """The workspaces of an agent and its sub-agents.

    Args:
        spec: compiled; nothing is copied before `save`.
        directory: where the copies are made.
    """

    def __init__(self, spec: dict[str, Any], directory: Path) -> None:
        if any("worktree" in one for one in _all(spec)):
            raise InvalidInput("the agent works in git worktrees: these can't be copied for each run")
        paths = {Path(os.path.realpath(path)) for path in (one["workspace"] for one in _all(spec)) if path}
        roots = sorted(
            path for path in paths if not any(path != other and path.is_relative_to(other) for other in paths)
        )
        if any(directory.resolve().is_relative_to(root) for root in roots):
            raise InvalidInput(f"{directory} is inside a workspace of the agent: it would be copied into itself")
        self._saved = directory / "original"
        self._work = directory / "work"
        self._names = {root: "workspace" if len(roots) == 1 else f"workspace-{n}" for n, root in enumerate(roots, 1)}

    def __bool__(self) -> bool:
        return bool(self._names)

    def save(self) -> None:
        """Copy the workspaces as they are now. Raises `InvalidInput` for what can't be copied."""
        for root, name in self._names.items():
            _copy(root, self._saved / name)

    def reset(self) -> None:
        """Make the copies that a run works in as the workspaces were."""
        if self._work.exists():
            shutil.rmtree(self._work)
        for name in self._names.values():
            _copy(self._saved / name, self._work / name)

    def keep(self, target: Path) -> None:
        """Put the copies that the last run worked in there."""
        if self._work.exists():
            self._work.rename(target)

    def redirected(self, spec: dict[str, Any]) -> dict[str, Any]:
        """The compiled specification, with the copies as workspaces."""
        found = with_below(spec, self.redirected)
        if spec["workspace"] is not None:
            path = Path(os.path.realpath(spec["workspace"]))
            root = next(root for root in self._names if path.is_relative_to(root))
            found["workspace"] = str(self._work / self._names[root] / path.relative_to(root))
        return found

    def snapshot(self) -> dict[str, File]:
        """All that is in the copies, by path."""
        found = {}
        for name in self._names.values():
            root = self._work / name
            for path in _walk(root):
                place = Path(name, path.relative_to(root)) if len(self._names) > 1 else path.relative_to(root)
                found[place.as_posix()] = _read(path)
        return found


def _all(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The specification, and those of the agents that it names."""
    yield spec
    for agent in below(spec):
        yield from _all(agent)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copytree(source, target, symlinks=True)
    except shutil.Error as error:
        reasons = "; ".join(f"{item[0]}: {item[2]}" for item in error.args[0][:5])
        raise InvalidInput(f"the workspace can't be copied: {reasons}") from None
    except OSError as error:
        raise InvalidInput(f"the workspace can't be copied: {error}") from None


def _walk(root: Path) -> Iterator[Path]:
    for directory, names, files in os.walk(root):
        for name in sorted([*names, *files]):
            yield Path(directory, name)


def _read(path: Path) -> File:
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        target = os.readlink(path)
        return File("link", target, f"-> {target}\n")
    if stat.S_ISDIR(found.st_mode):
        return File("directory", "")
    if not stat.S_ISREG(found.st_mode):
        return File("special", str(stat.S_IFMT(found.st_mode)))
    kind = "program" if found.st_mode & stat.S_IXUSR else "file"
    if found.st_size > MAX_TEXT_BYTES:
        with path.open("rb") as file:
            return File(kind, hashlib.file_digest(file, "sha256").hexdigest())
    data = path.read_bytes()
    text: str | None
    try:
        text = data.decode() if b"\0" not in data else None
    except UnicodeDecodeError:
        text = None
    return File(kind, hashlib.sha256(data).hexdigest(), text)


def changes(before: dict[str, File], after: dict[str, File], leave_out: Collection[str] = ()) -> list[FileChange]:
    """What of `after` is not as in `before`, by path."""
    found = []
    for path in sorted({*before, *after} - {*leave_out}):
        old, new = before.get(path), after.get(path)
        if old == new:
            continue
        change = "added" if old is None else "removed" if new is None else "changed"
        found.append(FileChange(path, change, _difference(old, new)))
    return found


def _difference(old: File | None, new: File | None) -> str:
    texts = [file.text if file is not None else "" for file in (old, new)]
    if texts[0] is None or texts[1] is None:
        return ""
    return unified(texts[0].splitlines(), texts[1].splitlines())


def unified(before: list[str], after: list[str]) -> str:
    """A readable diff from the undisturbed run to this one; empty if there is no difference."""
    lines = list(difflib.unified_diff(before, after, "undisturbed", "this run", lineterm="", n=2))
    if len(lines) > MAX_DIFF_LINES:
        lines = [*lines[:MAX_DIFF_LINES], f"… {len(lines) - MAX_DIFF_LINES} lines more"]
    return "\n".join(lines)
