"""An agent as a file: the fields of `AgentSpec` in markdown, TOML or JSON; tools, hooks and memory providers by name or
import path, other agents by the paths of their files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from understudy.errors import InvalidSpec
from understudy.manifest import AGENTS
from understudy.problem_texts import described
from understudy.spec import AgentSpec

from .agent_resolving import Resolving
from .agent_text import read_text
from .checking import agent_problems

PLACEHOLDER = "agent"
"""The name of an agent without one, while its other fields are checked."""


@dataclass(frozen=True)
class AgentFile:
    """What a file says.

    Attributes:
        directory: the file's: import paths and a relative `workspace` are found from there. It is in `sys.path`.
        input: the file's `input`, a text to send to the agent where nobody gives another.
    """

    spec: AgentSpec
    directory: Path
    input: str | None


def read_agent(path: Path) -> AgentFile:
    """Read an agent. A tool is a name (`files`), `module:function` or `DISTRIBUTION:NAME`, a hook one of the latter, an
    output type a table with a JSON Schema or `module:Class`; modules are found from the file's directory. Another agent
    is a table, or the path of its file.

    Its modules are imported, so this runs code of the file's owner.

    Raises:
        InvalidInput: the file can't be read, or is not what its name says.
        InvalidSpec: with every problem in `details["problems"]`.
    """
    text, resolving = read_text(path), Resolving()
    problems = resolving.problems
    given = text.fields.get("input")
    if given is not None and not (isinstance(given, str) and given):
        problems.append({"field": "input", "problem": "must be a text"})
    resolved = resolving.file(path, text)
    spec: AgentSpec | None = None
    try:
        spec = AgentSpec.parse(resolved)
        problems += _new(agent_problems(spec), problems)
    except InvalidSpec as error:
        problems += error.details.get("problems") or [{"field": "(whole)", "problem": error.message}]
        problems += _new(_beyond(resolved, problems), problems)
    if problems or spec is None:
        found = [_placed(problem, resolving.where(problem["field"])) for problem in problems]
        raise InvalidSpec(described(str(path), found), details={"problems": found})
    return AgentFile(spec, path.resolve().parent, given)


def _placed(problem: dict[str, str], where: str) -> dict[str, str]:
    return {**problem, "problem": f"{problem['problem']} ({where})"} if where else problem


def _new(found: Iterable[dict[str, str]], known: list[dict[str, str]]) -> list[dict[str, str]]:
    """Those that don't follow from the known problems: a sub-agent may need a tool whose name is misspelt."""
    places = {item["field"].rpartition("tools")[0] for item in known if "tools" in item["field"].split(".")}
    follows = {f"{place}agents" for place in places}
    return [item for item in found if item not in known and item["field"] not in follows]


def _beyond(resolved: dict[str, Any], known: list[dict[str, str]]) -> list[dict[str, str]]:
    """What else is wrong with an agent: that without the fields which can't be used."""
    for item in known:
        _drop(resolved, item["field"].split("."))
    try:
        return agent_problems(AgentSpec.parse(_named(resolved)))
    except InvalidSpec:  # a list or table that is not one: what is in it can't be looked at
        return []


def _drop(agent: Any, place: list[str]) -> None:
    """Leave out the field of an agent, or of one below it, that this place is in. Tools and hooks that can't be found
    are left out already, and an agent whose file can't be read has another one in its place."""
    while place[0] in AGENTS and len(place) > 1 and isinstance(agent, dict) and isinstance(agent.get(place[0]), list):
        below = agent[place[0]][int(place[1])]
        if len(place) == 2:
            if isinstance(below, dict):
                return
            break
        agent, place = below, place[2:]
    if isinstance(agent, dict) and not (place[0] in ("tools", "hooks") and len(place) > 1):
        agent.pop(place[0], None)


def _named(table: dict[str, Any], name: str = PLACEHOLDER) -> dict[str, Any]:
    """The table with a name, and those of the agents in it: each with another."""
    for kind in AGENTS:
        agents = table.get(kind)
        if isinstance(agents, list):
            named = [
                _named(agent, f"{name}.{kind[0]}{index}") if isinstance(agent, dict) else agent
                for index, agent in enumerate(agents)
            ]
            table = {**table, kind: named}
    return {"name": name, **table}
