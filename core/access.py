"""What an agent may reach: by its commands (`Sandbox`), of files (`Worktree`), and of the web (`WebPolicy`)."""

from __future__ import annotations

import os
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from .confinement import MAX_SECONDS, Confinement
from .strict import Strict

_CONFINED = Confinement()


class CommandRule(Strict):
    """What is done about commands of `bash` and `start_command` that match a pattern.

    Attributes:
        command: a pattern as of file names, for one simple command with its arguments (`git push*`).
        action: `allow` executes it, `deny` refuses it, `ask` has a person approve the call first.
    """

    command: str = Field(min_length=1, max_length=1_000)
    action: Literal["allow", "deny", "ask"]


class Sandbox(Strict):
    """In what an agent's commands and its tools with `@tool(sandbox=True)` run (`docs/sandbox.md`).

    Attributes:
        backend: `bubblewrap` separates commands from the node, and they are refused where it does not work; so does
            `auto`, which may mean another sandbox once there is one. `none` is a plain shell that may do all that the
            session's process may; the limits hold but for `network`, `readable`, `processes` and `temporary`.
        network: whether commands reach the network; then also all services that the node reaches, Ray's among them.
        readable: absolute paths that commands may read, beside programs, libraries and the workspace.
        memory: bytes of address space of each process (`RLIMIT_AS`).
        processes: and threads, at once. The kernel does not limit those of root.
        file_size: bytes of the largest file that a command may write.
        temporary: bytes that /tmp and /dev/shm may hold each; both are empty when a command begins.
        output: bytes that are kept of a command's output: half from its beginning, half from its end.
        seconds: the longest time for one command.
        rules: for commands of `bash` and `start_command`; the first one that matches a simple command counts, and
            without one it is allowed. They are a guard against mistakes: what a shell does can't be seen from its text.
            The sandbox is the boundary.
    """

    backend: Literal["auto", "bubblewrap", "none"] = "auto"
    network: bool = False
    readable: tuple[Annotated[str, Field(max_length=4_096)], ...] = ()
    memory: int = Field(_CONFINED.memory, ge=64 << 20, le=1 << 50)
    processes: int = Field(_CONFINED.processes, ge=4, le=1_000_000)
    file_size: int = Field(_CONFINED.file_size, ge=1024, le=1 << 50)
    temporary: int = Field(_CONFINED.temporary, ge=1 << 20, le=1 << 50)
    output: int = Field(_CONFINED.output, ge=1_000, le=500_000)
    seconds: int = Field(_CONFINED.seconds, ge=1, le=MAX_SECONDS)
    rules: tuple[CommandRule, ...] = ()

    @field_validator("readable")
    @classmethod
    def _readable(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        found = tuple(os.path.normpath(path) for path in value)
        wrong = [path for path in found if not path.startswith("/") or path.strip("/") == "" or "\0" in path]
        if wrong:
            raise ValueError(f"{', '.join(map(repr, wrong))} must be absolute paths, and not the root")
        return found


class Worktree(Strict):
    """A workspace of a session's own: a git worktree on a branch of its own (`docs/worktrees.md`).

    Attributes:
        repository: top of the git repository that it is made of. None: a sub-agent's is made of its parent's workspace.
        base: the commit or branch that it begins with; None for what that workspace has checked out.
        on_end: of a run that completes. `merge`: its changes are merged into the workspace that it was made of, and the
            worktree is removed. `keep`: it stays. `remove`: it is removed with its changes. In any other end it stays.
        directory: that has the worktrees; None for that of the parent's, or the repository's name with `.worktrees`
            beside it.
    """

    repository: str | None = Field(None, min_length=1, max_length=4_096)
    base: str | None = Field(None, min_length=1, max_length=256, pattern=r"^[^-].*$")
    on_end: Literal["merge", "keep", "remove"] = "merge"
    directory: str | None = Field(None, min_length=1, max_length=4_096)


def _host_pattern(value: str) -> str:
    """A host, `*.` and a domain, or `*`, as `actors.web_rules` compares them."""
    start, name = ("*.", value[2:]) if value.startswith("*.") else ("", value)
    try:
        known = name if ":" in name else name.rstrip(".").encode("idna").decode().lower()
    except UnicodeError:
        known = ""
    if value != "*" and not re.fullmatch(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*|[0-9a-f:.]*:[0-9a-f:.]*", known):
        raise ValueError(f"{value!r} is no host, no '*.' followed by a domain, and not '*'")
    return value if value == "*" else start + known


HostPattern = Annotated[str, Field(min_length=1, max_length=253), AfterValidator(_host_pattern)]


class WebPolicy(Strict):
    """What `web_fetch` may fetch (docs/tools.md). Only http and https, and each redirect must fit as well.

    Attributes:
        allow: hosts: `docs.example.org`, `*.example.org` for all below `example.org`, or `*` for all.
        deny: hosts that are not allowed whatever `allow` says.
        private: addresses may be connected to that are not of the public network: this machine's, private and
            link-local ones, among them those by which clouds hand out credentials.
    """

    allow: tuple[HostPattern, ...] = ("*",)
    deny: tuple[HostPattern, ...] = ()
    private: bool = False
