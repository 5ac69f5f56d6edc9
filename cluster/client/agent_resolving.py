"""From the text of agents' files to the fields of `AgentSpec`: names are looked up, paths are made absolute."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from understudy.errors import InvalidInput
from understudy.manifest import AGENTS
from understudy.worktrees import OWN_WORKTREE

from .agent_text import SUFFIXES, AgentText, read_text
from .extensions import extension, find_hook, find_provider, find_tool, imported


def import_from(directory: Path) -> None:
    """Let modules be found from a directory."""
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))
    importlib.invalidate_caches()


class Resolving:
    """Resolves an agent's file, and those that it names.

    Attributes:
        problems: what is wrong so far, as `{"field", "problem"}`.
    """

    def __init__(self) -> None:
        self.problems: list[dict[str, str]] = []
        self._texts: dict[str, tuple[Path, AgentText]] = {}
        self._reading: list[Path] = []

    def file(self, path: Path, text: AgentText, place: str = "") -> dict[str, Any]:
        """The fields of a file, with functions for their names and absolute paths.

        Args:
            place: of the agent in the first file: `agents.0.`.
        """
        directory = path.resolve().parent
        import_from(directory)
        self._texts[place] = path, text
        self.problems += [{**problem, "field": f"{place}{problem['field']}"} for problem in text.problems]
        self._reading.append(path.resolve())
        fields = {name: value for name, value in text.fields.items() if name != "input"}
        found = self._table(fields, directory, place)
        self._reading.pop()
        return found

    def where(self, place: str) -> str:
        """In which file and line a field is; empty where that is obvious, or not known."""
        owner = max((known for known in self._texts if place.startswith(known)), key=len)
        path, text = self._texts[owner]
        line = text.line_of(place.removeprefix(owner))
        parts = [str(path)] * bool(owner) + [f"line {line}"] * (line is not None)
        return ", ".join(parts)

    def _problem(self, place: str, problem: str) -> None:
        self.problems.append({"field": place, "problem": problem})

    def _table(self, table: dict[str, Any], directory: Path, place: str) -> dict[str, Any]:
        found = dict(table)
        workspace = found.get("workspace")
        if isinstance(workspace, str) and workspace != OWN_WORKTREE:
            found["workspace"] = self._directory(workspace, directory, f"{place}workspace")
        elif isinstance(workspace, dict):
            found["workspace"] = dict(workspace)
            if isinstance(workspace.get("repository"), str):
                where = f"{place}workspace.repository"
                found["workspace"]["repository"] = self._directory(workspace["repository"], directory, where)
            if isinstance(workspace.get("directory"), str):
                found["workspace"]["directory"] = str(directory / Path(workspace["directory"]).expanduser())
        for kind, find in (("tools", find_tool), ("hooks", find_hook)):
            if isinstance(table.get(kind), list):
                found[kind] = self._looked_up(table[kind], f"{place}{kind}", find)
        if isinstance(found.get("output_type"), str):
            try:
                found["output_type"] = imported(found["output_type"])
            except InvalidInput as error:
                self._problem(f"{place}output_type", error.message)
        memory = found.get("memory")
        if isinstance(memory, dict) and isinstance(memory.get("providers"), list):
            providers = self._looked_up(memory["providers"], f"{place}memory.providers", find_provider)
            found["memory"] = {**memory, "providers": providers}
        if isinstance(found.get("skills"), list):
            found["skills"] = [_skill_path(item, directory) for item in found["skills"]]
        for kind in AGENTS:
            if isinstance(found.get(kind), list):
                found[kind] = [
                    self._agent(agent, directory, kind, f"{place}{kind}.{index}")
                    for index, agent in enumerate(found[kind])
                ]
        return found

    def _directory(self, path: str, directory: Path, place: str) -> str:
        """A path of a directory that must be there, from the file's."""
        location = directory / Path(path).expanduser()
        if not location.is_dir():
            self._problem(place, f"{location} is not a directory")
        return str(location)

    def _looked_up(self, items: list[Any], place: str, find: Callable[[str], Any]) -> list[Any]:
        """The entries, found where they are names; those that can't be found are left out."""
        found = []
        for index, item in enumerate(items):
            try:
                found.append(find(item) if isinstance(item, str) else item)
            except InvalidInput as error:
                self._problem(f"{place}.{index}", error.message)
        return found

    def _agent(self, item: Any, directory: Path, kind: str, place: str) -> Any:
        """An agent that another one names: a table, or the path of a file; a handoff may name one that is known."""
        if isinstance(item, dict):
            return self._table(item, directory, f"{place}.")
        if not isinstance(item, str) or (kind == "handoffs" and Path(item).suffix not in SUFFIXES):
            return item
        path = directory / Path(item).expanduser()
        unread = {"name": f"unread.{place}"[-64:]}
        if path.resolve() in self._reading:
            self._problem(place, f"{item} is a file that this agent is in itself")
            return unread
        try:
            text = read_text(path)
        except InvalidInput as error:
            self._problem(place, error.message)
            return unread
        return self.file(path, text, f"{place}.")


def _skill_path(item: Any, directory: Path) -> Any:
    """A path of skills from the file's directory; the name of what a package offers as it is."""
    if not isinstance(item, str) or (":" in item and extension("skills", item) is not None):
        return item
    return str(directory / Path(item).expanduser())
