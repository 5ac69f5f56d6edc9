"""The worktrees that sessions have left in a repository: what of them is merged, and removing them. Uses git alone."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from understudy.actors.worktree_program import Failed, Git, base_reference, clear, locked
from understudy.errors import WorktreeFailed
from understudy.worktrees import BRANCHES, branch_of


@dataclass(frozen=True)
class WorktreeInfo:
    """A session's worktree, or the branch that is left of one.

    Attributes:
        session_id: empty where that is not known any more: a branch is left alone.
        path: its directory; empty where there is none.
        files: that its commits change.
        uncommitted: files with changes that nobody has committed.
        merged: another branch of the repository has all its commits.
    """

    name: str
    session_id: str
    branch: str
    path: str
    files: list[str]
    uncommitted: list[str]
    merged: bool

    @property
    def is_needless(self) -> bool:
        """Whether nothing is lost with it."""
        return self.merged and not self.uncommitted


def repository_of(directory: Path) -> Path:
    """The top of the repository that a directory is in. Raises `WorktreeFailed` if there is none."""
    here = Path(os.path.realpath(directory))
    for top in (here, *here.parents):
        if (top / ".git").is_dir():
            return top
    raise WorktreeFailed(f"{here} is in no git repository that has a directory .git")


def worktrees_of(top: Path, gone: Collection[str] = ()) -> list[WorktreeInfo]:
    """What sessions have left in a repository, by name.

    Args:
        gone: names of those that shall be as if they were removed.

    Raises:
        WorktreeFailed: git fails.
    """
    try:
        git = Git(_request(top, ""))
        references = git("for-each-ref", "--format=%(refname:short)", f"refs/heads/{BRANCHES}").splitlines()
        names = [branch.removeprefix(BRANCHES) for branch in sorted(references)]
        return [_info(top, git, name, gone) for name in names if name not in gone]
    except Failed as failed:
        raise WorktreeFailed(str(failed)) from None


def worktree_of(top: Path, name: str) -> WorktreeInfo:
    """One of them, by its name or its session. Raises `WorktreeFailed` if there is none."""
    found = [one for one in worktrees_of(top) if name in (one.name, one.session_id, one.branch)]
    if not found:
        raise WorktreeFailed(f"{top} has no worktree {name!r}; `understudy worktrees list` has their names")
    return found[0]


def remove_worktree(top: Path, found: WorktreeInfo, *, force: bool = False) -> None:
    """Remove a worktree and its branch, unless something would be lost with it. Nobody merges it meanwhile.

    Raises:
        WorktreeFailed: it has changes that are nowhere else, and `force` is not given; or git fails.
    """
    request = _request(top, found.name)
    try:
        with locked(request):
            git = Git(request)
            now = _info(top, git, found.name)
            if not force and not now.is_needless:
                files = ", ".join(dict.fromkeys([*now.files, *now.uncommitted][:10]))
                raise WorktreeFailed(
                    f"worktree {found.name} has changes that are merged nowhere: {files}. `git merge {found.branch}` "
                    "merges what is committed; --force removes it with them"
                )
            if now.path:
                clear({**request, "path": now.path})
            git("update-ref", "--stdin", sent=f"delete refs/heads/{now.branch}\ndelete {base_reference(request)}\n")
    except (Failed, OSError) as error:
        raise WorktreeFailed(str(error)) from None


def _request(top: Path, name: str) -> dict[str, Any]:
    """What `worktree_program` receives about a worktree."""
    return {"common": str(top / ".git"), "identity": {}, "name": name}


def _info(top: Path, git: Git, name: str, gone: Collection[str] = ()) -> WorktreeInfo:
    branch, own = branch_of(name), top / ".git" / "worktrees" / name
    tip = git("rev-parse", "--verify", f"refs/heads/{branch}")
    base = git.find(base_reference({"name": name})) or git.run("merge-base", "HEAD", tip).stdout.strip() or tip
    path, session_id, uncommitted = "", "", list[str]()
    if (own / "gitdir").is_file():
        path = os.path.dirname((own / "gitdir").read_text().strip())
    if (own / "understudy").is_file():
        session_id = json.loads((own / "understudy").read_text())["session"]
    if path and os.path.isdir(path):
        said = Git(_request(top, name), path, name)("status", "--porcelain", "-z", "--no-renames", "-uall")
        uncommitted = [entry[3:] for entry in said.split("\0") if entry]
    others = git("for-each-ref", f"--contains={tip}", "--format=%(refname:short)", "refs/heads").splitlines()
    merged = any(other not in {branch, *map(branch_of, gone)} for other in others)
    return WorktreeInfo(name, session_id, branch, path, git.changed(base, tip), uncommitted, merged)
