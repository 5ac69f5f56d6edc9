"""The worktree of an activation's session: made before its model is asked anything, and merged before its run ends.

Both happen in the session's own process, in a program within the agent's sandbox (`worktree_program`). Each can be done
again, by whoever goes on with the session after a death.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from understudy.confinement import Confinement, confinement_of
from understudy.errors import MergeConflict, ToolError, WorktreeFailed
from understudy.events import WorktreeEnded
from understudy.messages import storable
from understudy.records import Finish
from understudy.worktrees import MOST_FILES, identity, named

from . import worktree_program
from .commits import Commits, Patience
from .sandbox import run_confined
from .steering import steers
from .window import Window

LONGEST = 600.0
"""Seconds for one request, with the time in which it waits for others that merge into the same repository."""

MAX_ANSWER_BYTES = 4_000_000

PROGRAM = str(Path(worktree_program.__file__).resolve())


class WorkingTree:
    """What an activation does about its session's worktree, if its agent has one."""

    def __init__(self, window: Window, commits: Commits, patience: Patience) -> None:
        self._window = window
        self._commits = commits
        self._patience = patience

    async def make(self) -> dict[str, Any] | None:
        """Have the worktree there; the error of the run if it can't be."""
        worktree = self._window.spec.get("worktree")
        if worktree is None:
            return None
        try:
            request = self._request(worktree)
            if not worktree_program.is_ready(request):
                os.makedirs(os.path.dirname(request["path"]), exist_ok=True)
                await self._ask({**request, "do": "create"})
        except WorktreeFailed as error:
            return error.to_wire()
        except OSError as error:
            return self._failed(f"{error.filename}: {error.strerror}").to_wire()
        return None

    async def fence(self, status: str) -> None:
        """Make sure that no other activation of the session exists, before something is merged that only the present
        one may merge. Raises `Fenced` if there is one."""
        if self._is_merged_as(status) and not self._commits.draft.messages:
            await self._commits.flush(even_if_empty=True)

    async def end(self, wanted: Finish) -> Finish:
        """Merge, keep or remove the worktree of a run that ends; how the run ends with that."""
        window, worktree = self._window, self._window.spec.get("worktree")
        if worktree is None or (not wanted.stopped and steers(window.inbox)):
            return wanted  # with a steer that came before it, it does not end
        completed = wanted.status == "completed" and window.cancel is None
        try:
            found = await self._ask({**self._request(worktree), "do": "end", "completed": completed})
        except WorktreeFailed as error:
            left = self._left(worktree)
            if not completed:
                return replace(wanted, worktree=left)
            return Finish("failed", wanted.text, error=error.to_wire(), worktree=left)
        if found["outcome"] == "none":
            return replace(wanted, worktree=found)
        found |= {"branch": worktree["branch"], "path": window.spec["workspace"]}
        fields = {name: found[name] for name in ("outcome", "branch", "files", "commit") if name in found}
        self._commits.draft.entries.append(WorktreeEnded(**fields))
        if found["outcome"] == "conflict":
            return Finish("failed", wanted.text, error=self._conflict(found).to_wire(), worktree=found)
        return replace(wanted, worktree=found)

    def _is_merged_as(self, status: str) -> bool:
        return status == "completed" and "worktree" in self._window.spec

    def _left(self, worktree: dict[str, Any]) -> dict[str, Any]:
        """What is reported of a worktree about which nothing could be done."""
        path = self._window.spec["workspace"]
        if path is None or not os.path.isdir(path):
            return {"outcome": "none"}
        return {"outcome": "kept", "branch": worktree["branch"], "path": path}

    def _conflict(self, found: dict[str, Any]) -> MergeConflict:
        files, branch = named(found["files"], found["count"]), found["branch"]
        why = (
            f"these files conflict: {files}"
            if found["reason"] == "conflict"
            else f"the workspace has changes of these files that are not committed: {files}"
        )
        return MergeConflict(
            f"its changes could not be merged, and nothing of them is: {why}. They are on branch {branch}, in "
            f"{found['path']}",
            session_id=self._window.session_id,
            details={"branch": branch, "path": found["path"], "files": found["files"], "reason": found["reason"]},
        )

    def _request(self, worktree: dict[str, Any]) -> dict[str, Any]:
        """What the program receives. Raises `WorktreeFailed` if there is no repository."""
        window = self._window
        if worktree.get("repository") is None:
            raise self._failed("a session that no other one starts needs Worktree(repository=…), the top of one")
        top = os.path.realpath(worktree["repository"])
        common = os.path.join(top, ".git")
        # A link, or the file that a linked worktree has there, may lead anywhere: an agent may have put it there.
        if os.path.realpath(common) != common or not os.path.isdir(common):
            raise self._failed(f"{top} is not the top of a git repository on this node: it has no directory .git")
        directory = os.path.realpath(worktree["directory"])
        return {
            "common": common, "path": os.path.join(directory, worktree["name"]), "name": worktree["name"],
            "branch": worktree["branch"], "base": worktree["base"], "into": os.path.realpath(worktree["into"]),
            "into_name": worktree.get("into_name"), "on_end": worktree["on_end"], "agent": window.spec["name"],
            "identity": identity(window.spec["name"], window.session_id), "session": window.session_id,
            "run": window.run_id, "most_files": MOST_FILES,
        }  # fmt: skip

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Have the program do something. Raises `WorktreeFailed` if it can't."""
        self._patience.expect(time.monotonic() + LONGEST)
        backend = confinement_of(self._window.spec).backend
        shared = (request["common"], os.path.dirname(request["path"]), request["into"])
        confinement = Confinement(backend=backend, writable=shared, file_size=1 << 40, memory=1 << 40)
        try:
            ended = await run_confined(
                [sys.executable, "-I", "-S", PROGRAM], request["common"], confinement, seconds=LONGEST,
                kept=MAX_ANSWER_BYTES, variables={}, code=(PROGRAM,), sent=json.dumps(request).encode(),
            )  # fmt: skip
        except ToolError as error:
            raise self._failed(error.message) from None
        try:
            found: dict[str, Any] = json.loads(ended.output)
        except ValueError:
            said = ended.output[-500:].decode(errors="replace").strip()
            why = "it took too long" if ended.timed_out else said or f"its process ended with {ended.code}"
            raise self._failed(f"the worktree can't be used: {why}") from None
        if "problem" in found:
            raise self._failed(storable(str(found["problem"])))
        return found

    def _failed(self, why: str) -> WorktreeFailed:
        return WorktreeFailed(why, session_id=self._window.session_id)
