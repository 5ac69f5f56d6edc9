"""An agent as options of a command describe it, over an agent's file or without one."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from understudy.access import Worktree
from understudy.actors.tools import BUILTIN_TOOLS, TOOL_GROUPS, tool_names
from understudy.errors import InvalidInput, InvalidSpec
from understudy.problem_texts import listed
from understudy.skills import LOAD_SKILL
from understudy.spec import AgentSpec, Budget

from .agent_file import read_agent
from .agent_resolving import import_from
from .checking import agent_problems
from .extensions import extensions, find_tool
from .worktree_listing import repository_of

DEFAULT_NAME = "assistant"

WORKERS = frozenset(BUILTIN_TOOLS) - {LOAD_SKILL, "web_fetch"}

IN_WORKSPACE = WORKERS | {group for group, names in TOOL_GROUPS.items() if {*names} & WORKERS}
"""Tools that work in a directory, and groups that have some."""


def known_tools() -> list[str]:
    """Names of tools and groups that an agent may have, those of installed packages among them."""
    return [*tool_names(), *extensions("tools")]


def import_here(name: str) -> None:
    """Have modules found from the current directory, if a tool is named by an import path."""
    if ":" in name:
        import_from(Path.cwd())


@dataclass(frozen=True)
class AgentOptions:
    """What the options of a command say of an agent; None and empty where they say nothing.

    Attributes:
        file: an agent's file; the options below go over its fields, `tools` are added.
        allow_bash: the agent has `bash`.
        sandbox: the backend of its sandbox.
        budget_tokens: of the session and all below it.
        output_schema: a file with the JSON Schema that the answer must fit.
        worktree: the session has a git worktree of its own, of the repository that the directory is in.
    """

    file: Path | None = None
    tools: tuple[str, ...] = ()
    model: str | None = None
    instructions: str | None = None
    allow_bash: bool = False
    sandbox: str | None = None
    max_rounds: int | None = None
    budget_tokens: int | None = None
    output_schema: Path | None = None
    worktree: bool = False

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) != field.default for field in fields(self))

    def read(self, directory: Path) -> tuple[AgentSpec, str | None]:
        """The agent, and the input that its file has.

        Args:
            directory: where its tools are imported from; its workspace if its tools need one and it has none, and the
                repository of its worktree where it does not say which.

        Raises:
            InvalidInput, InvalidSpec: see `read_agent`; every problem of the options is reported at once.
            WorktreeFailed: a worktree is wanted, and there is no repository.
        """
        given: dict[str, Any] = {"name": DEFAULT_NAME}
        text = None
        if self.file is not None:
            file = read_agent(self.file)
            given, text = dict(file.spec), file.input
        given.update(self._fields(given, directory))
        if self.worktree and not isinstance(given.get("workspace"), Worktree):
            given["workspace"] = Worktree(repository=str(repository_of(directory)))
        workers = IN_WORKSPACE & {item for item in given.get("tools", ()) if isinstance(item, str)}
        if workers and given.get("workspace") is None:
            given["workspace"] = str(directory)
        elif given.get("workspace") == Worktree():
            given["workspace"] = Worktree(repository=str(directory))
        spec = AgentSpec(**given)
        problems = agent_problems(spec)
        if problems:
            raise InvalidSpec(listed(problems), details={"problems": problems})
        return spec, text

    def _fields(self, given: dict[str, Any], directory: Path) -> dict[str, Any]:
        tools, problems = [*given.get("tools", ())], []
        if any(":" in name for name in self.tools):
            import_from(directory)
        for name in self.tools:
            try:
                found = find_tool(name)
            except InvalidInput as error:
                problems.append({"field": "--tool", "problem": error.message})
            else:
                tools += [found] if found not in tools else []
        if self.allow_bash and not any(
            "bash" in TOOL_GROUPS.get(item, (item,)) for item in tools if isinstance(item, str)
        ):
            tools.append("bash")
        if problems:
            raise InvalidInput(listed(problems), details={"problems": problems})
        changed: dict[str, Any] = {"tools": tools, "model": self.model, "instructions": self.instructions}
        changed["max_rounds"] = self.max_rounds
        if self.sandbox is not None:
            changed["sandbox"] = {**dict(given.get("sandbox") or {}), "backend": self.sandbox}
        if self.output_schema is not None:
            changed["output_type"] = _schema(self.output_schema)
        if self.budget_tokens is not None:
            changed["budget"] = _limited(given.get("budget"), self.budget_tokens)
        return {name: value for name, value in changed.items() if value is not None}


def _schema(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"--output-schema: {file} is no JSON file that can be read: {error}") from None
    if not isinstance(found, dict):
        raise InvalidInput(f"--output-schema: {file} is no JSON Schema: it must be an object")
    return found


def _limited(budget: Budget | tuple[Budget, ...] | None, tokens: int) -> tuple[Budget, ...]:
    """The budgets with this limit for the tree."""
    budgets = budget if isinstance(budget, tuple) else (budget,) if budget is not None else ()
    own = next((dict(one) for one in budgets if one.scope == "tree"), {})
    return (Budget(**{**own, "tokens": tokens}), *(one for one in budgets if one.scope != "tree"))
