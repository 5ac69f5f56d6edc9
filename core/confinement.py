"""How an agent's commands are confined, as a session actor reads it; `spec.Sandbox` is what people write.

A session actor imports this module, which must stay light.
"""

from __future__ import annotations

from typing import Any

import msgspec

MAX_SECONDS = 600
"""How long one command may take at most."""


class CommandRule(msgspec.Struct, frozen=True):
    """What is done about commands that match a pattern; see `spec.CommandRule`."""

    command: str
    action: str


class Confinement(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `spec.Sandbox`, with their defaults, and what follows from the agent's worktree.

    Attributes:
        repository: the top of the git repository that the workspace is a worktree of; empty for none.
        worktree: its name in there.
        writable: directories beside the workspace that may be changed. No agent's commands have any.
    """

    backend: str = "auto"
    network: bool = False
    readable: tuple[str, ...] = ()
    memory: int = 4 << 30
    processes: int = 512
    file_size: int = 1 << 30
    temporary: int = 256 << 20
    output: int = 40_000
    seconds: int = MAX_SECONDS
    rules: tuple[CommandRule, ...] = ()
    repository: str = ""
    worktree: str = ""
    writable: tuple[str, ...] = ()


def confinement_of(compiled: dict[str, Any]) -> Confinement:
    """Of a session's compiled specification."""
    worktree = compiled.get("worktree") or {}
    of_git = {"repository": worktree["repository"], "worktree": worktree["name"]} if "name" in worktree else {}
    return msgspec.convert({**(compiled.get("sandbox") or {}), **of_git}, Confinement)
