"""Git worktrees of sessions: their names, whose worktree is made of whose workspace, and what a parent reads. Pure.

What is done about them, and in which process, is in `actors.worktrees`. See docs/worktrees.md.
"""

from __future__ import annotations

import os
from typing import Any

from .identifiers import digest

OWN_WORKTREE = "worktree"
"""`AgentSpec.workspace` of an agent whose sessions have a worktree each, with all that is usual."""

BRANCHES = "understudy/"
"""How the branches begin that sessions work on."""

BESIDE = ".worktrees"
"""What is added to a repository's directory for the directory that has its worktrees."""

MOST_FILES = 50
"""So many files are named to a model, and in an error."""


def name_of(session_id: str, origin: str = "") -> str:
    """The name of a session's worktree, of its directory and its branch: git accepts it as both, and no two sessions
    have the same.

    Args:
        origin: tells sub-agents of the same id apart that another store had, or that were removed since.
    """
    # Names of branches can't begin or end with a dot, have two of them, or end with `.lock`. An id has neither + nor =.
    name = session_id.replace(".", "+")
    return f"{name}={origin}" if origin else name


def branch_of(name: str) -> str:
    """The branch that belongs to a worktree."""
    return f"{BRANCHES}{name}"


def of_repository(repository: str, base: str | None, on_end: str, directory: str | None) -> dict[str, Any]:
    """The compiled form of a worktree that is made of a directory: of a repository's top, by its absolute path."""
    return {
        "repository": repository, "into": repository, "base": base, "on_end": on_end,
        "directory": directory or f"{repository.rstrip('/')}{BESIDE}",
    }  # fmt: skip


def placed(spec: dict[str, Any], session_id: str) -> dict[str, Any]:
    """A session's specification, in which its worktree has its name and is its workspace."""
    worktree = spec.get("worktree")
    if not worktree or not worktree.get("repository"):
        return spec
    name = name_of(session_id, worktree.get("origin", ""))
    made = {**worktree, "name": name, "branch": branch_of(name)}
    return {**spec, "worktree": made, "workspace": os.path.join(worktree["directory"], name)}


def for_child(template: dict[str, Any], parent: dict[str, Any], origin: int, *, copy: bool) -> dict[str, Any] | str:
    """The specification of a sub-agent whose worktree is made of its parent's workspace; a text that says why there can
    be none.

    Args:
        parent: the parent's specification, as `placed` makes it.
        origin: the parent's incarnation.
        copy: it is the parent's own specification: a directory that this names is the parent's.
    """
    worktree = template.get("worktree")
    others = {
        name: for_child(other, parent, origin, copy=copy) for name, other in (template.get("handoffs") or {}).items()
    }
    problem = next((other for other in others.values() if isinstance(other, str)), None)
    if problem is not None:
        return problem
    found = {**template, "handoffs": others} if others else template
    if worktree is None:
        return found
    if worktree.get("repository") and not copy:
        return {**found, "worktree": {**worktree, "origin": digest(str(origin), size=3)}}
    if parent["workspace"] is None:
        return "the sub-agent needs a git worktree of your workspace, and you have none."
    above = parent.get("worktree") or of_repository(parent["workspace"], None, "", worktree.get("directory"))
    made = {
        "repository": above["repository"], "directory": above["directory"], "into": parent["workspace"],
        "into_name": above.get("name"), "base": None if copy else worktree.get("base"), "on_end": worktree["on_end"],
        "origin": digest(str(origin), size=3),
    }  # fmt: skip
    return {**found, "worktree": made, "workspace": None}


def identity(agent: str, session_id: str) -> dict[str, str]:
    """The variables by which git knows who makes a commit."""
    email = f"{session_id}@understudy.invalid"
    return {
        "GIT_AUTHOR_NAME": agent, "GIT_AUTHOR_EMAIL": email,
        "GIT_COMMITTER_NAME": agent, "GIT_COMMITTER_EMAIL": email,
    }  # fmt: skip


def named(files: list[str], count: int) -> str:
    """The first of so many files."""
    return ", ".join(files) + (f" and {count - len(files)} more" if count > len(files) else "")


def worktree_text(found: dict[str, Any]) -> str:
    """What a parent's model reads of a sub-agent's worktree, behind all else; empty where the sub-agent changed
    nothing, or an error says it."""
    files = named(found.get("files") or [], found.get("count", 0))
    if found["outcome"] == "merged":
        return f"\n[its changes are merged into your workspace: {files}]"
    if found["outcome"] == "kept":
        what = f"it changed {files}" if files else "what it did by then is there"
        return f"\n[its work is not merged: {what}; branch {found['branch']}, directory {found['path']}]"
    return ""
