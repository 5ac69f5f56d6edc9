"""What is wrong with an agent beyond its fields: tools that have no schema, names that are there twice."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import Any

from understudy.access import Worktree
from understudy.actors.hooks import describe_hook
from understudy.actors.providers import describe_provider
from understudy.actors.sandbox import sandbox_here as sandbox_here
from understudy.actors.tools import TOOL_GROUPS, describe
from understudy.commands import START_COMMAND
from understudy.errors import InvalidSpec
from understudy.spec import AgentSpec
from understudy.tool_hosting import program_of

from .compiling import by_value, function_problems
from .extensions import had
from .handoff_targets import handoff_targets
from .output_schema import output_of
from .skills import read_skills, tools_of

GIT_NEEDED = (2, 38)
"""`git merge-tree --write-tree` came with it."""


def agent_problems(spec: AgentSpec, place: str = "", *, handed_to: bool = False) -> list[dict[str, str]]:
    """Every problem that `compile_spec` would raise the first of, those of the agents that it names included.

    Args:
        place: of the agent in its file: `agents.0.`.
        handed_to: it is one that another may hand off to, with which its own handoffs were looked at.
    """
    problems = [] if handed_to else handoff_targets(spec)[1]
    described: dict[str, list[dict[str, Any]]] = {"tools": [], "hooks": [], "providers": []}
    for item in tools_of(spec):
        try:
            described["tools"] += describe(had("tools", item), pickle=by_value)[0]
        except InvalidSpec as error:
            problems.append({"field": "tools", "problem": error.message})
    for item in spec.hooks:
        try:
            described["hooks"].append(describe_hook(had("hooks", item), pickle=by_value)[0])
        except InvalidSpec as error:
            problems.append({"field": "hooks", "problem": error.message})
    for item in spec.memory.providers if spec.memory is not None else ():
        try:
            described["providers"].append(describe_provider(had("memory", item), pickle=by_value)[0])
        except InvalidSpec as error:
            problems.append({"field": "memory.providers", "problem": error.message})
    problems += read_skills(spec.skills).problems
    problems += function_problems(spec, described["tools"], described["hooks"], described["providers"])
    try:
        output_of(spec)
    except InvalidSpec as error:
        problems += error.details.get("problems") or [{"field": "output_type", "problem": error.message}]
    found = [{**problem, "field": f"{place}{problem['field']}"} for problem in problems]
    for index, agent in enumerate(spec.agents):
        found += agent_problems(agent, f"{place}agents.{index}.")
    for index, other in enumerate(spec.handoffs):
        found += [] if isinstance(other, str) else agent_problems(other, f"{place}handoffs.{index}.", handed_to=True)
    return found


def sandbox_for(spec: AgentSpec) -> str | None:
    """Whether the sandbox that an agent needs, or one that it names, works on this machine; None if none needs one."""
    uses = any(map(_is_sandboxed, spec.tools)) or isinstance(spec.workspace, Worktree)
    needed = spec.sandbox.backend != "none" and uses
    others = (sandbox_for(other) for other in (*spec.agents, *spec.handoffs) if not isinstance(other, str))
    return sandbox_here() if needed else next((found for found in others if found), None)


def git_here() -> str:
    """For people: whether git on this machine can make and merge worktrees."""
    program = shutil.which("git")
    if program is None:
        return "none: worktrees can't be used here (Debian, Ubuntu: apt-get install git)"
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"git does not work here: {error}"
    found = re.search(r"(\d+)\.(\d+)", said)
    if found is None or (int(found[1]), int(found[2])) < GIT_NEEDED:
        return f"{said.strip() or 'git does not work'}: worktrees need {GIT_NEEDED[0]}.{GIT_NEEDED[1]} or newer"
    return said.strip()


def git_for(spec: AgentSpec) -> str | None:
    """Whether git works here for an agent that has a worktree, or one that it names; None if none has one."""
    others = (git_for(other) for other in (*spec.agents, *spec.handoffs) if not isinstance(other, str))
    return git_here() if isinstance(spec.workspace, Worktree) else next((found for found in others if found), None)


def servers_missing(spec: AgentSpec) -> list[str]:
    """The MCP servers of an agent, or of those that it names, whose program this machine does not have."""
    path = os.environ.get("PATH")
    found = [server for server in spec.mcp_servers if server.command and program_of(server.command, path) is None]
    below = [servers_missing(other) for other in (*spec.agents, *spec.handoffs) if not isinstance(other, str)]
    return [*(f"{server.name} ({server.command[0]})" for server in found), *(name for names in below for name in names)]


def _is_sandboxed(tool: Any) -> bool:
    if isinstance(tool, str):
        return not {"bash", START_COMMAND}.isdisjoint(TOOL_GROUPS.get(tool, (tool,)))
    return bool(getattr(getattr(tool, "__understudy_tool__", None), "sandbox", False))
