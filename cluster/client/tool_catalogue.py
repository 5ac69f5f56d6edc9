"""Which tools there are, and single calls of them outside any session."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from understudy.actors.execution import Outcome, bind, execute
from understudy.actors.skills import Skills, described
from understudy.actors.tools import BUILTIN_TOOLS, TOOL_GROUPS, ToolContext, builtin, describe, load, tool_names
from understudy.actors.web_rules import WebRules
from understudy.commands import READ_COMMAND, START_COMMAND
from understudy.confinement import confinement_of
from understudy.errors import InvalidInput, ToolError
from understudy.identifiers import new_identifier
from understudy.skills import LOAD_SKILL
from understudy.spec import AgentSpec

from .compiling import compile_spec
from .extensions import extensions, find_tool

BUILT_IN = "built-in"

NO_PROFILE = "none"
"""In place of credentials: no model is asked."""

TRIED = "try"
"""The session and the run that a call outside any session has."""


@dataclass(frozen=True)
class ToolInfo:
    """A tool, or a group of tools.

    Attributes:
        name: as `AgentSpec.tools` has it.
        origin: `built-in`, or the distribution and version of its package.
        called: what the model calls it.
        in_session: only a session can execute it: with its sub-agents, its log, its people or its timers.
        resources: what its process needs of a node, by Ray's names; empty if it has no process of its own.
        sandbox: it runs in the agent's sandbox.
        members: of a group.
        problem: why it can't be had; then all below the origin is empty.
    """

    name: str
    origin: str
    called: str = ""
    description: str = ""
    on_crash: str = ""
    approve: bool = False
    timeout: float | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    in_session: bool = False
    resources: dict[str, float] = field(default_factory=dict)
    sandbox: bool = False
    members: tuple[str, ...] = ()
    problem: str = ""


def list_tools() -> list[ToolInfo]:
    """All groups, built-in tools and tools of installed packages. These are imported; what is broken has a problem."""
    found = [ToolInfo(name, BUILT_IN, members=members) for name, members in TOOL_GROUPS.items()]
    found += [show_tool(name) for name in tool_names() if name not in TOOL_GROUPS]
    for name, offered in extensions("tools").items():
        try:
            found.append(show_tool(name))
        except InvalidInput as error:
            found.append(ToolInfo(name, offered.origin, problem=error.message))
    return found


def show_tool(name: str) -> ToolInfo:
    """A tool or a group by its name or import path.

    Raises:
        InvalidInput: there is none, it can't be imported, or it has no schema.
    """
    if name in TOOL_GROUPS:
        return ToolInfo(name, BUILT_IN, members=TOOL_GROUPS[name])
    offered = extensions("tools").get(name)
    [spec], _ = describe(find_tool(name), pickle=_Kept())
    origin = BUILT_IN if builtin(spec) is not None else offered.origin if offered is not None else name
    return ToolInfo(
        name, origin, spec["name"], spec["description"], spec["on_crash"], spec.get("approve", False), spec["timeout"],
        spec["parameters"], in_session=_needs_session(spec), resources=spec.get("task", {}),
        sandbox=spec.get("sandbox", False),
    )  # fmt: skip


def try_tool(
    name: str, arguments: str, *, workspace: Path | None = None, agent: AgentSpec | None = None, reporting: Any = None
) -> Outcome:  # fmt: skip
    """Execute one call of a tool in this process, as a session actor executes it; hooks and people are not asked.

    Args:
        arguments: JSON text, as a model writes it.
        workspace: instead of the agent's.
        agent: one that has the tool; then `name` is what its model calls it.
        reporting: takes what the tool reports while it runs (`parameters.Reporting`).

    Raises:
        InvalidInput: there is no such tool, or only a session can execute it.
        ToolError: its code can't be had.
    """
    kept = _Kept()
    blobs: dict[str, bytes] = {}
    if agent is not None:
        compiled = compile_spec(agent, model="offline", profile=NO_PROFILE, pickle=kept)
        known, blobs, whole = {tool["name"]: tool for tool in compiled.spec["tools"]}, compiled.blobs, compiled.spec
        if name not in known:
            beyond = (
                "; those of MCP servers need a session: `understudy run … --agent FILE`" if agent.mcp_servers else ""
            )
            raise InvalidInput(f"{agent.name} has no tool {name!r}; it has: {', '.join(known) or 'none'}{beyond}")
        spec = known[name]
    else:
        if name in TOOL_GROUPS:
            raise InvalidInput(f"{name!r} is a group; it has: {', '.join(TOOL_GROUPS[name])}")
        [spec], blobs = describe(find_tool(name), pickle=kept)
        whole = {}
    if _needs_session(spec):
        raise InvalidInput(f"{name!r} needs a session: `understudy run … --tool {name}` begins one")
    if builtin(spec) == LOAD_SKILL and agent is None:
        raise InvalidInput(f"{name!r} reads the skills of an agent: say --agent FILE")
    if builtin(spec) == "web_fetch" and agent is None:
        raise InvalidInput(f"{name!r} may fetch what an agent's `web` allows: say --agent FILE")
    directory = str(workspace) if workspace is not None else whole.get("workspace")

    async def read(blob: str) -> bytes:
        return blobs[blob]

    context = ToolContext(
        session_id=f"{TRIED}-{new_identifier()}", run_id=TRIED, round=1, call_id=f"{TRIED}/1/0", epoch=1,
        agent=whole.get("name", TRIED), workspace=directory, skill_files=Skills(described(whole), read),
        confinement=confinement_of(whole), web=msgspec.convert(whole["web"], WebRules) if "web" in whole else None,
        _reporting=reporting,
    )  # fmt: skip
    tool = load(spec, blobs.__getitem__, kept.had)
    keywords = bind(tool, arguments, context)
    if isinstance(keywords, Outcome):
        return keywords
    timeout = spec["timeout"] or whole.get("tool_timeout") or AgentSpec.model_fields["tool_timeout"].default
    outcome = asyncio.run(execute(tool, keywords, timeout, math.inf))
    if outcome is None:  # nothing was too late
        raise ToolError(f"{name} was not executed")
    return outcome


def _needs_session(spec: dict[str, Any]) -> bool:
    """Whether the session loop executes a tool, or hands its calls over, or its commands are the session's."""
    name = builtin(spec)
    return name is not None and (name not in BUILTIN_TOOLS or name in (START_COMMAND, READ_COMMAND))


class _Kept:
    """Code that other processes could not import, by what stands for it in this one."""

    def __init__(self) -> None:
        self._items: dict[bytes, Any] = {}

    def __call__(self, item: Any) -> bytes:
        key = new_identifier().encode()
        self._items[key] = item
        return key

    def had(self, key: bytes) -> Any:
        """What stands behind a key."""
        return self._items[key]
